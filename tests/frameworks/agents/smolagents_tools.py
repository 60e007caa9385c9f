"""smolagents: its agent that calls tools."""

from __future__ import annotations

import os

from common import QUESTION, done
from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def note(word: str) -> str:
    """Notes a word.

    Args:
        word: what to note.
    """
    return f"noted {word}"


model = OpenAIServerModel(
    os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
done(ToolCallingAgent(tools=[note], model=model, max_steps=2, verbosity_level=0).run(QUESTION))
