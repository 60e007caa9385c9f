"""A kind of instruction: its id, its arguments and its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

# of IFEval's rows
Relation = Literal["less than", "at least"]
# of RLVR-IFeval's rows
Quantifier = Literal["at least", "around", "at most"]


def _whole_number(value: object) -> int:
    """Return a count; tables turn whole numbers into floats where other rows have none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("expected a whole number of at least 0")
    return value


def _not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("expected a text that is not blank")
    return value.strip()


Count = Annotated[int, BeforeValidator(_whole_number)]
Ordinal = Annotated[int, BeforeValidator(_whole_number), Field(ge=1)]
Phrase = Annotated[str, AfterValidator(_not_blank)]
Phrases = Annotated[list[Phrase], Field(min_length=1)]
Letter = Annotated[str, Field(min_length=1, max_length=1), AfterValidator(_not_blank)]


class ConstraintArgs(BaseModel):
    """Arguments of an instruction; by itself, those of an instruction that has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class ConstraintKind:
    """A kind of instruction.

    Attributes:
        name: the part of IFEval's id behind the colon, which is unique.
        args: the model of its arguments.
        follows: whether a text follows it, given its arguments; linear in the text.
    """

    name: str
    args: type[ConstraintArgs]
    follows: Callable[[str, Any], bool]


def compare_count(count: int, relation: str, number: int, tolerance: int = 0) -> bool:
    """Return whether a count stands in a relation to a number.

    Args:
        relation: one of ``Relation`` or ``Quantifier``.
        tolerance: the largest difference for ``around``.
    """
    results = {
        "less than": count < number,
        "at least": count >= number,
        "at most": count <= number,
        "around": abs(count - number) <= tolerance,
    }
    return results[relation]
