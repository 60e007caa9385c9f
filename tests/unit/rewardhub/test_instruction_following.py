"""The reward ``instruction_following``: its scores and notes, loose variants, and responses that
must not stop it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rewardhub import protocol
from rewardhub.rewards.base import InvalidRowError, ResponseFault, Sample, Scored
from rewardhub.rewards.constraints import rows
from rewardhub.rewards.constraints.kind import ConstraintArgs, ConstraintKind
from rewardhub.rewards.instruction_following import (
    InstructionFollowingArgs,
    InstructionFollowingReward,
    loose_variants,
)
from rewardhub.worker import RewardWorker

ROW: dict[str, Any] = {
    "key": 1,
    "instruction_id_list": ["punctuation:no_comma", "startend:quotation", "keywords:existence"],
    "kwargs": [{}, {}, {"keywords": ["river"]}],
}

JSON_FORMAT = "detectable_format:json_format"


def sample(response: str, row: dict[str, Any] | None = None) -> Sample:
    return Sample(
        domain="d", task_index=3, prompt="", response=response, reference="", reward=0.0,
        reward_parts={}, success=False, end="terminated", num_turns=1, num_tokens=4, metrics={},
        row=ROW if row is None else row,
    )  # fmt: skip


def score(response: str, **args: Any) -> Scored:
    return InstructionFollowingReward(InstructionFollowingArgs(**args)).score(sample(response))


def test_prompt_score_needs_all_instructions() -> None:
    assert score('"A river"').value == 1.0
    assert score('"A river, wide"').value == 0.0


def test_share_of_instructions() -> None:
    # the comma violates one of three
    assert score('"A river, wide"', score="instructions").value == pytest.approx(2 / 3)
    assert score("", score="instructions").value == 0.0


def test_loose_mode_forgives_a_first_line() -> None:
    response = 'Sure, here it is:\n"A river"'
    strict, loose = (score(response, mode=mode) for mode in ("strict", "loose"))
    assert (strict.value, loose.value) == (0.0, 1.0)
    # strictly only the keyword is there
    assert strict.notes == {
        "instructions": 3.0,
        "prompt_strict": 0.0,
        "instructions_strict": pytest.approx(1 / 3),
        "prompt_loose": 1.0,
        "instructions_loose": 1.0,
        "no_comma": 0.0,
        "quotation": 0.0,
        "existence": 1.0,
    }


def test_notes_of_a_kind_are_shares() -> None:
    ids = ["keywords:existence", "keywords:existence"]
    row = {"instruction_id_list": ids, "kwargs": [{"keywords": ["a"]}, {"keywords": ["z"]}]}
    reward = InstructionFollowingReward(InstructionFollowingArgs())
    assert reward.score(sample("a", row)).notes["existence"] == 0.5


def test_loose_variants() -> None:
    # without the first line, the last line, both, and each without asterisks
    assert loose_variants("*a*\nb\n*c*") == [
        "*a*\nb\n*c*", "b\n*c*", "*a*\nb", "b", "a\nb\nc", "b\nc", "a\nb",
    ]  # fmt: skip
    assert loose_variants("a") == ["a", ""]


def test_thinking_does_not_count() -> None:
    response = '<think>well, yes</think>"A river"'
    assert score(response).value == 1.0
    assert score(response, thinking="keep").value == 0.0
    assert score('<think>"A river"').value == 0.0


def test_rows_with_wrong_arguments_name_domain_task_and_argument() -> None:
    row = {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": "river"}]}
    line = (
        r"^domain 'd', task 3: instruction 1, keywords:existence: kwarg keywords: 'river' is not "
        r"allowed; input should be a valid list$"
    )
    reward = InstructionFollowingReward(InstructionFollowingArgs())
    with pytest.raises(InvalidRowError, match=line):
        reward.score(sample("x", row))


@pytest.mark.parametrize(
    "response", ["\ud800", "\x00", "{" * 100_000, "*" * 300_000, "\u0300" * 100_000, "9" * 100_000]
)
def test_no_response_stops_a_worker(response: str) -> None:
    row = {**ROW, "instruction_id_list": [*ROW["instruction_id_list"][:2], JSON_FORMAT]}
    row["kwargs"] = [{}, {}, {}]
    worker = RewardWorker()
    try:
        request = protocol.ScoreRequest("instruction_following", {}, sample(response, row))
        reply = worker.answer(request)
    finally:
        worker.close()
    assert isinstance(reply, protocol.ScoreReply), reply
    assert reply.value in (0.0, 1.0)


def raise_error(text: str, args: ConstraintArgs) -> bool:
    raise IndexError("a check that some text breaks")


def burn_time(text: str, args: ConstraintArgs) -> bool:
    while True:
        pass


@pytest.mark.parametrize(
    ("check", "note"), [(raise_error, "check_failed"), (burn_time, "too_costly")]
)
def test_failing_check_is_the_fault_of_the_response(
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[[str, ConstraintArgs], bool],
    note: str,
) -> None:
    key = "punctuation:no_comma"
    kind = ConstraintKind("no_comma", ConstraintArgs, check)
    monkeypatch.setattr(rows, "ALL_KINDS", {**rows.ALL_KINDS, key: kind})
    reward = InstructionFollowingReward(InstructionFollowingArgs(cpu_s=0.2))
    row = {"instruction_id_list": [key]}
    with pytest.raises(ResponseFault) as fault:
        reward.score(sample("text", row))
    assert (fault.value.note, fault.value.value) == (note, 0.0)


def test_sample_with_its_row_passes_through_the_wire() -> None:
    request = protocol.ScoreRequest("instruction_following", {}, sample('"A river"'))
    worker = RewardWorker()
    try:
        reply = worker.answer(protocol.REQUESTS.decode(msgspec.msgpack.encode(request)))
    finally:
        worker.close()
    assert isinstance(reply, protocol.ScoreReply)
    assert reply.value == 1.0
    assert msgspec.json.encode(reply.notes)
