"""Reads the instructions of a row, in the forms of public data sets.

- ``instruction_id_list`` and ``kwargs``, lists of equal length: google/IFEval, and the rows of
  NVIDIA's Nemotron data and NeMo Gym
- ``ground_truth``, a JSON text, with ``instruction_id`` and ``kwargs`` in a list:
  allenai/IF_multi_constraints_upto5
- ``ground_truth``, a JSON text, with ``func_name`` and its arguments: allenai/RLVR-IFeval
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import pydantic

from broker.contract import strict
from broker.settings.sections import first_problem
from rewardhub.rewards.base import InvalidRowError
from rewardhub.rewards.constraints.ifeval import KINDS
from rewardhub.rewards.constraints.kind import ConstraintKind
from rewardhub.rewards.constraints.rlvr import FUNCTIONS
from rlearner_text.rows.columns import column_names, column_value, drop_nulls

IDS: Final = ("instruction_id_list", "instruction_id")
# Where rows have them, the first of these counts.
COLUMNS: Final = ("instruction_id_list", "ground_truth", "reward_model.ground_truth")
ALL_KINDS: Final[Mapping[str, ConstraintKind]] = {**KINDS, **FUNCTIONS}


class Instruction(msgspec.Struct, frozen=True):
    """One instruction of a row.

    Attributes:
        key: IFEval's id, or the name of RLVR-IFeval's function.
        arguments: those of the key's kind, checked.
    """

    key: str
    arguments: dict[str, Any]

    @property
    def kind(self) -> ConstraintKind:
        """The kind that checks it."""
        return ALL_KINDS[self.key]

    def is_followed(self, text: str) -> bool:
        """Return whether a text follows it; a blank text follows none."""
        kind = self.kind
        return bool(text.strip()) and kind.follows(text, kind.args(**self.arguments))


def read_instructions(
    row: Mapping[str, Any], column: str = "", kwargs: str = "kwargs", *, skip_unknown: bool = False
) -> list[Instruction]:
    """Return the instructions of a row.

    Args:
        column: with the ids or the ground truth; empty: the first of ``COLUMNS`` that it has.
        kwargs: column with the arguments, if the former holds ids.
        skip_unknown: leave out an id that is not among the 25; else it is refused.

    Raises:
        InvalidRowError: if the row has none, or one with wrong arguments; names the argument.
    """
    plain = dict(row)
    names = [column] if column else [name for name in COLUMNS if column_value(plain, name)]
    value = column_value(plain, names[0]) if names else None
    if value is None:
        expected = column or " or ".join(COLUMNS)
        raise InvalidRowError(f"no column {expected}; it has {column_names(plain)}")
    pairs = _read_pairs(names[0], _parse_value(names[0], value), column_value(plain, kwargs))
    instructions = [
        _read_instruction(number, key, arguments)
        for number, (key, arguments) in enumerate(pairs, start=1)
        if key in ALL_KINDS or not skip_unknown
    ]
    if not instructions:
        raise InvalidRowError(f"{names[0]}: it holds no instruction of the {len(KINDS)} kinds")
    return instructions


def _parse_value(place: str, value: Any) -> Any:
    """Return the value of a column that may be a JSON text, or a list of one such text.

    The texts of some data sets are Python's way of writing lists and mappings.
    """
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        if value[0] in ALL_KINDS or value[0].lstrip()[:1] not in ("{", "["):
            return value
        value = value[0]
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return drop_nulls(strict.parse_json(value))
    except strict.BadJson as error:
        try:
            return drop_nulls(ast.literal_eval(value.strip()))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise InvalidRowError(f"{place}: not JSON: {error}") from None


def _read_pairs(place: str, value: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """Return the key and the arguments of each instruction."""
    if isinstance(value, Mapping):
        if "func_name" in value:
            arguments = {name: item for name, item in value.items() if name != "func_name"}
            return [(str(value["func_name"]), arguments)]
        ids = next((value[name] for name in IDS if name in value), None)
        if ids is None:
            raise InvalidRowError(
                f"{place}: expected func_name, or instruction_id and kwargs; it has "
                f"{column_names(dict(value))}"
            )
        return _read_pairs(place, ids, value.get("kwargs"))
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        return [pair for item in value for pair in _read_pairs(place, item, None)]
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidRowError(f"{place}: expected ids of instructions, got {value!r:.80}")
    return _pair_arguments(value, _parse_value("kwargs", kwargs))


def _pair_arguments(ids: list[str], kwargs: Any) -> list[tuple[str, Any]]:
    if isinstance(kwargs, Mapping) and len(ids) == 1:
        kwargs = [kwargs]
    kwargs = [{}] * len(ids) if kwargs is None else kwargs
    if not isinstance(kwargs, list) or len(kwargs) != len(ids):
        size = len(kwargs) if isinstance(kwargs, list) else "no list"
        raise InvalidRowError(f"kwargs: expected a list of {len(ids)}, one for each id, got {size}")
    return [
        (key, _parse_value("kwargs", arguments) or {})
        for key, arguments in zip(ids, kwargs, strict=True)
    ]


def _read_instruction(number: int, key: str, arguments: Any) -> Instruction:
    place = f"instruction {number}"
    kind = ALL_KINDS.get(key)
    if kind is None:
        raise InvalidRowError(f"{place}: {key!r} is not allowed; known: {', '.join(KINDS)}")
    if not isinstance(arguments, Mapping):
        raise InvalidRowError(f"{place}, {key}: kwargs: expected a mapping, got {arguments!r:.80}")
    try:
        checked = kind.args.model_validate(drop_nulls(dict(arguments)))
    except pydantic.ValidationError as error:
        raise InvalidRowError(f"{place}, {key}: {_describe_problem(error, kind)}") from None
    return Instruction(key, checked.model_dump())


def _describe_problem(error: pydantic.ValidationError, kind: ConstraintKind) -> str:
    problem = error.errors()[0]
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"kwarg {name} is missing"
    if problem["type"] == "extra_forbidden":
        known = ", ".join(kind.args.model_fields) or "none"
        return f"kwarg {name} is not allowed; known: {known}"
    reason = first_problem(error).removeprefix(f"{name}: ")
    return f"kwarg {name}: {problem['input']!r:.80} is not allowed; {reason}"
