"""Calls reward functions of three forms, recognised from the names of their parameters.

- Ours, ``f(sample, **args)``: the first parameter may have any other name than those below.
- TRL's, ``f(completions, prompts=None, **columns) -> list[float]``: has a parameter
  ``completions``. It is called by keyword, with lists of one: a single episode, not a group.
- verl's, ``f(data_source, solution_str, ground_truth, extra_info=None)``: has a parameter
  ``solution_str``. It returns a number, or a mapping with the number as ``score``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, Literal

from broker.errors import ConfigError
from rewardhub.rewards.base import NoScore, Sample, Score, Scored

FunctionForm = Literal["sample", "trl", "verl"]

ALLOWED: Final = (
    "a function of (sample, **args), or TRL's of (completions, prompts=None, **columns), or verl's "
    "of (data_source, solution_str, ground_truth, extra_info=None)"
)
# what TRL's trainer passes beyond prompts, completions and the columns of the row
TRAINER_ONLY: Final = (
    "completion_ids", "trainer_state", "log_extra", "log_metric", "environments",
)  # fmt: skip
# columns that TRL does not pass on
NOT_PASSED: Final = ("prompt", "completion", "completion_ids")
NOT_APPLICABLE: Final = "not_applicable"
# by the parameter that marks a form
_FORMS: Final[dict[str, FunctionForm]] = {
    "sample": "sample",
    "completions": "trl",
    "solution_str": "verl",
}


def adapt_function(
    function: Callable[..., object], args: Mapping[str, Any], key: str = "rewards"
) -> Score:
    """Return a callable that scores one sample with a function of any form.

    Args:
        args: keyword arguments of each call; with TRL's and verl's form they take precedence.
        key: the setting that names the function.

    Raises:
        ConfigError: as in ``find_form``.
    """
    form = find_form(function, args, key)
    if form == "sample":
        return partial(function, **args)
    arguments = _ARGUMENTS[form]
    read_score = _READERS[form]
    parameters = inspect.signature(function).parameters

    def score(sample: Sample) -> object:
        values = {**arguments(sample), **args}
        result = function(**_choose_values(parameters, values, sample))
        if inspect.isawaitable(result):
            return _await_score(result, read_score)
        return read_score(result)

    return score


def find_form(
    function: Callable[..., object], args: Mapping[str, Any], key: str = "rewards"
) -> FunctionForm:
    """Return the form of a function.

    Raises:
        ConfigError: if its parameters belong to no form or to several, or it does not take
            ``args``.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Some callables written in C have no signature.
        return "sample"
    parameters = signature.parameters
    name = getattr(function, "__name__", "it")
    call_text = f"{name}{signature}"
    named = [
        each
        for each, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    marks = [mark for mark in _FORMS if mark in named]
    if len(marks) > 1:
        reason = f"{call_text} has both {' and '.join(marks)}"
        raise ConfigError(f"{key}.name", name, f"{ALLOWED}; {reason}")
    if parameters and not named:
        raise ConfigError(f"{key}.name", name, f"{ALLOWED}; {call_text} names no parameter")
    form = _FORMS[[*marks, "sample"][0]]
    if form == "sample":
        _check_call(signature, args, key, call_text)
    else:
        _check_keywords(parameters, args, key, call_text, form)
    return form


def _check_call(
    signature: inspect.Signature, args: Mapping[str, Any], key: str, call_text: str
) -> None:
    try:
        signature.bind(None, **args)
    except TypeError as error:
        raise ConfigError(
            f"{key}.args",
            dict(args),
            f"{call_text} is called with a sample and these arguments, but {error}; allowed is "
            f"{ALLOWED}",
        ) from None


def _check_keywords(
    parameters: Mapping[str, inspect.Parameter],
    args: Mapping[str, Any],
    key: str,
    call_text: str,
    form: FunctionForm,
) -> None:
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            allowed = f"a function that takes {name} by keyword, not {call_text}"
            raise ConfigError(f"{key}.name", name, allowed)
    for name in sorted(args):
        if name not in parameters and not _takes_any(parameters):
            raise ConfigError(f"{key}.args", dict(args), f"{call_text} takes no argument {name!r}")
    missing = set(_required_names(parameters)) - args.keys()
    if form == "trl" and (names := sorted(missing.intersection(TRAINER_ONLY))):
        allowed = f"a function without {', '.join(names)}, which only TRL's trainer has"
        raise ConfigError(f"{key}.name", call_text, allowed)
    known = ("data_source", "solution_str", "ground_truth", "extra_info")
    if form == "verl" and (names := sorted(missing.difference(known))):
        allowed = f"{ALLOWED}; set {', '.join(names)} in {key}.args"
        raise ConfigError(f"{key}.name", call_text, allowed)


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _required_names(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    return [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _choose_values(
    parameters: Mapping[str, inspect.Parameter], values: dict[str, Any], sample: Sample
) -> dict[str, Any]:
    """Return the values that the function takes.

    Raises:
        NoScore: if it needs one that there is not.
    """
    if missing := [name for name in _required_names(parameters) if name not in values]:
        columns = ", ".join(sample.row) or "none"
        raise NoScore(
            f"it needs the column {missing[0]!r}; the rows of domain {sample.domain!r} have "
            f"the columns {columns}"
        )
    if _takes_any(parameters):
        return values
    return {name: value for name, value in values.items() if name in parameters}


def _trl_arguments(sample: Sample) -> dict[str, Any]:
    columns = {name: [value] for name, value in sample.row.items() if name not in NOT_PASSED}
    if is_plain_text(sample):
        return {**columns, "prompts": [sample.prompt], "completions": [completion_text(sample)]}
    prompt = prompt_messages(sample)
    completion = sample.messages[len(prompt) :] or [
        {"role": "assistant", "content": sample.response}
    ]
    prompt = prompt or [{"role": "user", "content": sample.prompt}]
    return {**columns, "prompts": [prompt], "completions": [completion]}


def _verl_arguments(sample: Sample) -> dict[str, Any]:
    # a column that only other rows have is null
    row = {name: value for name, value in sample.row.items() if value is not None}
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, Mapping) else None
    if truth is None:
        truth = row.get("ground_truth", row.get("reward_model.ground_truth", sample.reference))
    info = row.get("extra_info")
    return {
        "data_source": row.get("data_source", sample.domain),
        "solution_str": completion_text(sample),
        "ground_truth": truth,
        "extra_info": {
            **(info if isinstance(info, Mapping) else {}),
            "num_turns": sample.num_turns,
            "rollout_reward_scores": dict(sample.reward_parts),
        },
    }


def is_plain_text(sample: Sample) -> bool:
    """Return whether a function of TRL's form gets texts; else it gets lists of messages.

    That is so in a domain of one turn whose rows have no messages as ``prompt``. It never depends
    on the episode.
    """
    return sample.max_turns == 1 and not isinstance(sample.row.get("prompt"), list)


def prompt_messages(sample: Sample) -> list[dict[str, Any]]:
    """Return the messages before the policy's first turn."""
    first = next((turn.message for turn in sample.turns), 0)
    return sample.messages[:first]


def completion_text(sample: Sample) -> str:
    """Return what follows the prompt: the response, or all texts of several turns, by lines."""
    texts = [str(message["content"]) for message in sample.messages[len(prompt_messages(sample)) :]]
    if len(texts) > 1:
        return "\n".join(texts)
    return sample.response


async def _await_score(result: Awaitable[object], read_score: Callable[[object], object]) -> object:
    return read_score(await result)


def _read_list(result: object) -> object:
    """Return the only score of TRL's list; ``None`` in it means that it does not apply here."""
    try:
        scores = list(result)  # type: ignore[call-overload]  # also an array
    except TypeError:
        raise NoScore(
            "a function of completions returns a list of one number for each completion, not "
            f"{type(result).__name__}"
        ) from None
    if len(scores) != 1:
        raise NoScore(f"it returned {len(scores)} numbers for 1 completion")
    return Scored(0.0, {NOT_APPLICABLE: 1.0}) if scores[0] is None else scores[0]


def _read_mapping(result: object) -> object:
    """Return verl's score; other numbers of its mapping become notes, other values are left out."""
    if not isinstance(result, Mapping):
        return result
    if "score" not in result:
        raise NoScore(
            "a mapping that a function of solution_str returns needs 'score'; it has "
            f"{', '.join(map(str, result)) or 'nothing'}"
        )
    notes = {
        str(name): float(value)
        for name, value in result.items()
        if name != "score" and isinstance(value, (bool, int, float)) and math.isfinite(value)
    }
    return Scored(result["score"], notes)


_ARGUMENTS: Final[dict[FunctionForm, Callable[[Sample], dict[str, Any]]]] = {
    "trl": _trl_arguments,
    "verl": _verl_arguments,
}
_READERS: Final[dict[FunctionForm, Callable[[object], object]]] = {
    "trl": _read_list,
    "verl": _read_mapping,
}
