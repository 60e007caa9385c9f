"""Pydantic AI: typed output by its default (a tool), by the model's own JSON, and plain text with a
tool at hand.
"""

from __future__ import annotations

import os
from typing import Literal

from common import QUESTION, done
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel


class Verdict(BaseModel):
    """What is wanted."""

    even: Literal["yes", "no"]


name = os.environ["OPENAI_MODEL"]
typed = Agent(f"openai:{name}", output_type=Verdict).run_sync(QUESTION)
native = Agent(f"openai:{name}", output_type=NativeOutput(Verdict)).run_sync(QUESTION)
chat = Agent(OpenAIChatModel(name), output_type=Verdict).run_sync(QUESTION)
words = Agent(OpenAIChatModel(name), instructions="Be brief.").run_sync(QUESTION)
assert all(isinstance(one.output, Verdict) for one in (typed, native, chat))
done((typed.output.even, native.output.even, chat.output.even, words.output))
