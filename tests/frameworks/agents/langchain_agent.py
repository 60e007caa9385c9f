"""LangChain: a model with tools, and structured output by its default method."""

from __future__ import annotations

import os
from typing import Literal

from common import QUESTION, done
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Verdict(BaseModel):
    """What is wanted."""

    even: Literal["yes", "no"]


@tool
def note(word: Literal["odd", "even"]) -> str:
    """Notes a word."""
    return f"noted {word}"


model = ChatOpenAI(model=os.environ["OPENAI_MODEL"])
messages = [HumanMessage(QUESTION)]
answer = model.bind_tools([note], tool_choice="any").invoke(messages)
messages.append(answer)
for call in answer.tool_calls:
    messages.append(ToolMessage(note.invoke(call["args"]), tool_call_id=call["id"]))
words = model.bind_tools([note]).invoke(messages, max_completion_tokens=12)
verdict = model.with_structured_output(Verdict).invoke(QUESTION)
assert isinstance(verdict, Verdict)
done((words.text, verdict.even), calls=len(answer.tool_calls))
