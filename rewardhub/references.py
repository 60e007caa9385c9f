"""Finds the references of a data set that ``math_answer`` cannot parse as mathematics.

Parsing runs in a separate process, ``python -m rewardhub.references``, because it loads sympy and
forks.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from broker.errors import RlearnerError
from broker.settings.config import RewardConfig
from broker.settings.preflight import PreflightFinding
from broker.settings.run_settings import RunSettings
from rewardhub.rewards import math_extract, math_text

# For the references of one reward; the others are only counted.
LOOK_S: Final = 20.0
MAX_EXAMPLES: Final = 5
MAX_EXAMPLE_CHARS: Final = 40
NO_ANSWER: Final = "holds no answer"
AS_TEXT: Final = "cannot be parsed as mathematics, so answers are compared with it as text"


class _Asked(msgspec.Struct):
    args: dict[str, Any]
    references: list[str]


class _Told(msgspec.Struct):
    reasons: dict[int, str]  # by index in the request
    looked_at: int


def reference_findings(
    settings: RunSettings, references: Mapping[str, Sequence[tuple[str, str]]]
) -> list[PreflightFinding]:
    """Return a warning for each ``math_answer`` and reason, with the first rows.

    Args:
        references: by domain, the place and the text of each reference.
    """
    return [
        finding
        for name, domain in settings.domains.items()
        for index, reward in enumerate(domain.rewards)
        if reward.name == "math_answer" and references.get(name)
        for finding in _find_problems(f"domains.{name}.rewards.{index}", reward, references[name])
    ]


def _find_problems(
    key: str, reward: RewardConfig, references: Sequence[tuple[str, str]]
) -> list[PreflightFinding]:
    marker = str(reward.args.get("answer_after", "####"))
    # Plain numbers, which most data sets hold, need no parser.
    doubtful = [
        reference
        for reference in references
        if math_text.number(math_extract.answer_of(reference[1], marker).text) is None
    ]
    if not doubtful:
        return []
    verdicts = _read_result(_Asked(reward.args, [text for _, text in doubtful]))
    findings = []
    for reason in dict.fromkeys(verdicts.reasons.values()):
        rows = [
            doubtful[number] for number, why_not in verdicts.reasons.items() if why_not == reason
        ]
        examples = "; ".join(
            f"{place}: {_shorten_text(text)}" for place, text in rows[:MAX_EXAMPLES]
        )
        more = f"; and {len(rows) - MAX_EXAMPLES} more" if len(rows) > MAX_EXAMPLES else ""
        text = f"{len(rows)} of {len(references)} references: each {reason} ({examples}{more})"
        findings.append(PreflightFinding("rewards", key, "warning", text))
    if num_left := len(doubtful) - verdicts.looked_at:
        text = f"{num_left} of {len(references)} references were not checked within {LOOK_S:g} s"
        findings.append(PreflightFinding("rewards", key, "ok", text))
    return findings


def _shorten_text(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= MAX_EXAMPLE_CHARS else "..." + line[-MAX_EXAMPLE_CHARS:])


def _read_result(request: _Asked) -> _Told:
    command = [sys.executable, "-m", "rewardhub.references"]
    ended_process = subprocess.run(
        command, input=msgspec.msgpack.encode(request), capture_output=True, check=False
    )
    if ended_process.returncode:
        raise RlearnerError(
            "references cannot be checked: "
            f"{ended_process.stderr.decode(errors='replace').strip()[-500:]}"
        )
    return msgspec.msgpack.decode(ended_process.stdout, type=_Told)


def _check_references() -> None:
    from rewardhub.rewards.math_answer import MathAnswerArgs, MathAnswerReward

    request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Asked)
    args = MathAnswerArgs.model_validate(request.args)
    reward = MathAnswerReward(args)
    reasons: dict[int, str] = {}
    ends = time.monotonic() + LOOK_S
    looked_at = 0
    for number, text in enumerate(request.references):
        if time.monotonic() > ends:
            break
        gold = reward.answer_of_reference(text)
        if not gold.text.strip():
            reasons[number] = NO_ANSWER
        elif reward.kind(gold) == "text":
            reasons[number] = AS_TEXT
        looked_at += 1
    sys.stdout.buffer.write(msgspec.msgpack.encode(_Told(reasons, looked_at)))


if __name__ == "__main__":
    _check_references()
