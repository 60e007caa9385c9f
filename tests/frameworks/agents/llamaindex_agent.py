"""LlamaIndex: a chat and a streamed one. It knows models by OpenAI's names alone, so it gets one of
those.
"""

from __future__ import annotations

import os

from common import QUESTION, done
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai import OpenAI

llm = OpenAI(
    model="gpt-4o-mini",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
chat = [ChatMessage(role="user", content=QUESTION)]
words = llm.chat(chat)
chat += [words.message, ChatMessage(role="user", content="Again.")]
again = [chunk.delta or "" for chunk in llm.stream_chat(chat)]
done((words.message.content, "".join(again)))
