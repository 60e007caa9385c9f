"""The criteria of a rubric and the schema of the judge's answer, from a configuration or a row.

Rows have a list, or a JSON text of one, in the form of RaR (``title``, ``description``, ``weight``)
or HealthBench (``criterion``, ``points``), or a mapping with ``criteria`` and ``schema``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field

from broker.contract import strict
from broker.errors import ConfigError
from broker.settings.config import Section
from broker.settings.sections import parse
from rewardhub.rewards.base import MAX_PARTS, InvalidRowError
from rewardhub.rewards.judges.answer_schema import Schema, check_object_schema

MAX_NAME_CHARS: Final = 64
REASON: Final = "reason"
# Names of notes, which are shown next to the criteria, and of the reason.
TAKEN_NAMES: Final = (REASON, "tokens_in", "tokens_out", "cost", "cached", "asked", "truncated")
# Of data sets, by ours.
_OTHER_NAMES: Final = {
    "description": "text",
    "criterion": "text",
    "points": "weight",
}
_ROW_KEYS: Final = ("name", "text", "weight", "low", "high")


class CriterionSection(Section):
    """One criterion."""

    harmless = ("name", "text", "weight", "low", "high")

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]  # of its reward part
    text: Annotated[str, Field(min_length=1)]  # what the judge scores
    weight: float = 1.0  # negative: what a response should not have
    # scores from the worst to the best; null: the schema's, or those of all criteria
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class ScoredCriterion:
    """A criterion with the range of its scores."""

    name: str
    text: str
    weight: float
    low: float
    high: float


@dataclass(frozen=True)
class Rubric:
    """Criteria, and the schema of an answer that scores all of them."""

    criteria: tuple[ScoredCriterion, ...]
    schema: Schema

    def parts(self, answer: Mapping[str, Any]) -> dict[str, float]:
        """Return the reward part of each criterion for an answer of the schema.

        A part is the score, scaled to 0 to 1, times the weight's share of the positive weights:
        the best response gets 1 (Gunjal et al., Rubrics as Rewards, arXiv 2507.17746, equation 1).
        """
        total = sum(criterion.weight for criterion in self.criteria if criterion.weight > 0)
        return {
            criterion.name: criterion.weight
            / total
            * (float(answer[criterion.name]) - criterion.low)
            / (criterion.high - criterion.low)
            for criterion in self.criteria
        }


def make_rubric(
    criteria: Sequence[CriterionSection], schema: Schema | None, low: float, high: float
) -> Rubric:
    """Return a rubric.

    Args:
        schema: of the answer; None: made of the criteria.
        low: worst score of criteria without one of their own.
        high: best score of such criteria.

    Raises:
        ConfigError: if the criteria contradict each other or the schema, with ``criteria`` or
            ``schema`` as the beginning of the key.
    """
    _check_criteria(criteria)
    if schema is None:
        made = [_score_criterion(index, item, low, high) for index, item in enumerate(criteria)]
        return Rubric(tuple(made), _make_schema(made))
    check_object_schema("schema", schema)
    _check_properties(criteria, schema)
    ranges = [_schema_range(item.name, schema["properties"][item.name]) for item in criteria]
    for index, (item, limits) in enumerate(zip(criteria, ranges, strict=True)):
        for word, own, limit in zip(("low", "high"), (item.low, item.high), limits, strict=True):
            if own is not None and own != limit:
                place = f"criteria.{index}.{word}"
                raise ConfigError(place, own, f"the schema says {limit:g} for {item.name!r}")
    scored = [
        _score_criterion(index, item, *limits)
        for index, (item, limits) in enumerate(zip(criteria, ranges, strict=True))
    ]
    return Rubric(tuple(scored), schema)


def read_rubric(value: Any, low: float, high: float) -> Rubric:
    """Return the rubric of a row's column.

    Raises:
        InvalidRowError: if it is no rubric, or contradicts its schema.
    """
    if isinstance(value, str):
        try:
            value = strict.parse_json(value)
        except strict.BadJson as error:
            raise InvalidRowError(f"expected a list of criteria, not JSON: {error}") from None
    schema = None
    if isinstance(value, Mapping):
        schema = value.get("schema")
        value = value.get("criteria")
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise InvalidRowError(f"expected a list of criteria, got {value!r:.80}")
    if schema is not None and not isinstance(schema, Mapping):
        raise InvalidRowError(f"schema: expected a mapping, got {schema!r:.80}")
    try:
        criteria = [
            parse(f"criteria.{index}", _read_criterion(index, item), CriterionSection)
            for index, item in enumerate(value)
        ]
        return make_rubric(criteria, schema, low, high)
    except ConfigError as error:
        raise InvalidRowError(str(error)) from None


def _read_criterion(index: int, item: Mapping[str, Any]) -> dict[str, Any]:
    """Return a criterion of a row in our names; other keys, such as tags, are left out.

    Titles differ from row to row, and each name is a metric, so criteria without a name are
    numbered.
    """
    renamed = {_OTHER_NAMES.get(key, key): field for key, field in item.items()}
    fields = {key: renamed[key] for key in _ROW_KEYS if renamed.get(key) is not None}
    return {"name": f"criterion_{index + 1}", **fields}


def _check_criteria(criteria: Sequence[CriterionSection]) -> None:
    if not 0 < len(criteria) <= MAX_PARTS:
        raise ConfigError("criteria", len(criteria), f"expected 1 to {MAX_PARTS} criteria")
    names: set[str] = set()
    for index, item in enumerate(criteria):
        place = f"criteria.{index}"
        if not item.name.isprintable() or item.name in TAKEN_NAMES:
            taken = ", ".join(TAKEN_NAMES)
            raise ConfigError(f"{place}.name", item.name, f"a printable name, and none of {taken}")
        if item.name in names:
            raise ConfigError(f"{place}.name", item.name, "another criterion has that name")
        names.add(item.name)
        if item.weight == 0:
            raise ConfigError(f"{place}.weight", item.weight, "it must not be 0")
    if not any(item.weight > 0 for item in criteria):
        raise ConfigError("criteria", [item.weight for item in criteria], "one weight must be > 0")


def _score_criterion(
    index: int, item: CriterionSection, low: float, high: float
) -> ScoredCriterion:
    worst = low if item.low is None else item.low
    best = high if item.high is None else item.high
    if not worst < best:
        raise ConfigError(
            f"criteria.{index}.high", best, f"it must be above low, which is {worst:g}"
        )
    return ScoredCriterion(item.name, item.text, item.weight, worst, best)


def _make_schema(criteria: Sequence[ScoredCriterion]) -> Schema:
    properties: dict[str, Any] = {REASON: {"type": "string"}}
    for criterion in criteria:
        properties[criterion.name] = {
            "type": "number",
            "minimum": criterion.low,
            "maximum": criterion.high,
        }
    return {
        "type": "object",
        "properties": properties,
        "required": [REASON, *(criterion.name for criterion in criteria)],
        "additionalProperties": False,
    }


def _check_properties(criteria: Sequence[CriterionSection], schema: Schema) -> None:
    """Check that each criterion is a required property, and each number a criterion."""
    properties = schema["properties"]
    names = [item.name for item in criteria]
    for index, name in enumerate(names):
        if name not in properties:
            listed = ", ".join(properties)
            raise ConfigError(f"criteria.{index}.name", name, f"the schema has only {listed}")
        if name not in schema.get("required", []):
            required = list(schema.get("required", []))
            raise ConfigError("schema.required", required, f"the criterion {name!r} must be in it")
    for name, inner in properties.items():
        if name not in names and inner["type"] != "string":
            raise ConfigError(
                f"schema.properties.{name}", inner["type"], "no criterion has that name"
            )


def _schema_range(name: str, schema: Schema) -> tuple[float, float]:
    """Return the lowest and the highest score that a criterion's property allows."""
    place = f"schema.properties.{name}"
    if schema["type"] == "boolean":
        return 0.0, 1.0
    if schema["type"] == "string":
        raise ConfigError(f"{place}.type", "string", "a criterion is a number or a boolean")
    values = schema.get("enum", [schema.get("minimum"), schema.get("maximum")])
    if not isinstance(values, list) or not all(isinstance(item, (int, float)) for item in values):
        raise ConfigError(
            place, dict(schema), "it needs minimum and maximum, or an enum of numbers"
        )
    low = min(values)
    high = max(values)
    if not low < high:
        raise ConfigError(f"{place}.maximum", high, f"it must be above minimum, which is {low:g}")
    return float(low), float(high)
