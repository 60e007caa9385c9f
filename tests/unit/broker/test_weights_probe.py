"""The probe: the same weights give the same logprobs."""

from __future__ import annotations

import numpy as np
import pytest

from broker.contract import codec, wire
from broker.errors import TransferFailed
from broker.weights.probe import check_probe, make_probe

PROBE = make_probe([5, 6, 7], [-1.0, -2.0], tolerance=0.01)


def test_probe_is_a_valid_part_of_an_offer() -> None:
    offer = wire.WeightsOffer(
        epoch=1,
        version=0,
        digest="d",
        plan="p",
        size_bytes=1,
        carriers=["gloo"],
        probe=make_probe([5, 6, 7], [-1, -2.5], tolerance=0.01),
    )
    probe = codec.decode(codec.encode(offer), wire.WeightsOffer).probe
    assert probe.token_ids.array().tolist() == [5, 6, 7]
    assert probe.logprobs.array().tolist() == [-1.0, -2.5]


def test_largest_difference_within_the_tolerance() -> None:
    assert check_probe(PROBE, [-1.001, -1.995]) == pytest.approx(0.005, abs=1e-6)
    assert check_probe(make_probe([1, 2], [-0.5], tolerance=0.0), [-0.5]) == 0.0


@pytest.mark.parametrize(
    "logprobs",
    [[-1.0, -2.02], [-1.0, float("nan")], [float("-inf"), -2.0], [-1.0], [-1.0, -2.0, -3.0], []],
)
def test_anything_else_is_refused(logprobs: list[float]) -> None:
    with pytest.raises(TransferFailed, match="probe"):
        check_probe(PROBE, logprobs)


def test_message_names_the_worst_token() -> None:
    with pytest.raises(
        TransferFailed,
        match=r"token 2 has logprob -2\.500000, the learner's is -2\.000000, tolerance 0\.01",
    ):
        check_probe(PROBE, np.array([-1.1, -2.5]))


def test_another_expert_for_a_few_tokens_is_no_other_model() -> None:
    probe = make_probe(range(41), np.full(40, -2.0), tolerance=0.01)
    logprobs = np.full(40, -2.001)
    logprobs[[3, 8, 9, 39]] = -2.07
    assert check_probe(probe, logprobs) == pytest.approx(0.07, abs=1e-6)
    logprobs[20] = -2.02
    with pytest.raises(TransferFailed, match=r"token 4 has logprob -2\.07"):
        check_probe(probe, logprobs)


def test_a_few_tokens_that_differ_by_much_are_another_model() -> None:
    probe = make_probe(range(41), np.full(40, -2.0), tolerance=0.01)
    logprobs = np.full(40, -2.0)
    logprobs[7] = -2.081
    with pytest.raises(TransferFailed, match=r"token 8 has logprob -2\.08"):
        check_probe(probe, logprobs)
    logprobs[7] = np.nan
    with pytest.raises(TransferFailed, match="token 8 has logprob nan"):
        check_probe(probe, logprobs)


@pytest.mark.parametrize(("tokens", "logprobs"), [([1], []), ([1, 2], []), ([1, 2], [0.0, 0.0])])
def test_lengths_must_agree(tokens: list[int], logprobs: list[float]) -> None:
    with pytest.raises(ValueError, match="probe tokens need"):
        make_probe(tokens, logprobs, tolerance=0.1)
