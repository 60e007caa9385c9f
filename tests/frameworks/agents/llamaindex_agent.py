"""LlamaIndex: an agent with a tool that it must call first, and a streamed chat. It knows models by
OpenAI's names alone, so it gets one of those.
"""

from __future__ import annotations

import asyncio
import os
from typing import Literal

from common import QUESTION, done
from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAI
from pydantic import BaseModel


class NoteArguments(BaseModel):
    """What is noted."""

    word: Literal["odd", "even"]


def note(word: str) -> str:
    """Notes a word."""
    return f"noted {word}"


llm = OpenAI(
    model="gpt-4o-mini",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)


async def ask() -> tuple[str, int]:
    """Return the agent's answer, and how often it called the tool."""
    tool = FunctionTool.from_defaults(note, fn_schema=NoteArguments)
    agent = FunctionAgent(
        tools=[tool], llm=llm, system_prompt="Be brief.", initial_tool_choice="note"
    )
    handler = agent.run(QUESTION)
    calls = [event async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
    return str(await handler), len(calls)


answer, num_calls = asyncio.run(ask())
assert num_calls >= 1
chunks = llm.stream_chat([ChatMessage(role="user", content=QUESTION)])
streamed = "".join(chunk.delta or "" for chunk in chunks)
done((answer, streamed), calls=num_calls)
