"""Generated sums, differences and products: ``What is 37 + 48?``

The reward is 1 if the last number of the reply is the result. A task and its mirror image (48 + 37)
are one task.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field

from broker.settings.config import Section
from envhub.envs.text.generated import GeneratedEnvironment, GeneratedTask

# A whole number, perhaps with commas between thousands: neither 3.5 nor 3rd. The 48 of 37-48 has no
# sign.
NUMBER: Final = re.compile(r"(?<![\w.])(-?)(\d{1,3}(?:,\d{3})+|\d+)(?!\w|[.,]\d)")


def last_number(text: str) -> str | None:
    """Return the last whole number of a text, without commas and leading zeros, if any."""
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    sign, digits = numbers[-1]
    digits = digits.replace(",", "").lstrip("0")
    return f"{sign}{digits}" if digits else "0"


class ArithmeticArgs(Section):
    """``env_args`` of ``arithmetic``."""

    harmless = ("digits", "operator")

    digits: Annotated[int, Field(ge=1, le=9)] = 2  # of both numbers
    operator: Literal["+", "-", "*"] = "+"


class Arithmetic(GeneratedEnvironment):
    """Two numbers and one operator."""

    Args = ArithmeticArgs

    @classmethod
    def draw(cls, args: ArithmeticArgs, rng: np.random.Generator) -> GeneratedTask:
        low = 10 ** (args.digits - 1)
        high = 10**args.digits
        first, second = (int(number) for number in rng.integers(low, high, size=2))
        results = {"+": first + second, "-": first - second, "*": first * second}
        smaller, larger = sorted((first, second))
        question = f"What is {first} {args.operator} {second}?"
        return GeneratedTask(
            question, str(results[args.operator]), f"{smaller} {args.operator} {larger}"
        )

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {"digits": 2, "operator": "-"}

    def is_valid(self, text: str) -> bool:
        return last_number(text) is not None

    def is_right(self, text: str) -> bool:
        return last_number(text) == self.task.reference
