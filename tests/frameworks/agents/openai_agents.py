"""openai-agents: an agent with a tool that it must call first, and one with a typed output."""

from __future__ import annotations

import os
from typing import Literal

from agents import Agent, ModelSettings, Runner, function_tool
from common import QUESTION, done
from pydantic import BaseModel


class Verdict(BaseModel):
    """What is wanted."""

    even: Literal["yes", "no"]


@function_tool
def note(word: Literal["odd", "even"]) -> str:
    """Notes a word."""
    return f"noted {word}"


name = os.environ["OPENAI_MODEL"]
caller = Agent(
    name="caller",
    instructions="Be brief.",
    tools=[note],
    model=name,
    model_settings=ModelSettings(tool_choice="required"),
)
judge = Agent(name="judge", instructions="Be brief.", output_type=Verdict, model=name)
called = Runner.run_sync(caller, QUESTION)
judged = Runner.run_sync(judge, QUESTION)
assert isinstance(judged.final_output, Verdict)
done((called.final_output, judged.final_output.even), items=len(called.new_items))
