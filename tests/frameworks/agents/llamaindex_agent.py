"""LlamaIndex: a chat, and a typed answer by its default method. It knows models by OpenAI's names alone, so it gets one of those."""

from __future__ import annotations

import os
from typing import Literal

from common import QUESTION, done
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai import OpenAI
from pydantic import BaseModel


class Verdict(BaseModel):
    """What is wanted."""

    even: Literal["yes", "no"]


llm = OpenAI(model="gpt-4o-mini", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
words = llm.chat([ChatMessage(role="user", content=QUESTION)])
verdict = llm.structured_predict(Verdict, PromptTemplate("{question}"), question=QUESTION)
assert isinstance(verdict, Verdict)
done((words.message.content, verdict.even))
