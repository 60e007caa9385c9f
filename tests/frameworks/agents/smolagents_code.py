"""smolagents: its agent that writes code."""

from __future__ import annotations

import os

from common import QUESTION, done
from smolagents import CodeAgent, OpenAIServerModel

model = OpenAIServerModel(
    os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
done(CodeAgent(tools=[], model=model, max_steps=2, verbosity_level=0).run(QUESTION))
