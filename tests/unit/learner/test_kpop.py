"""KPop's mask by hand: both directions count, and unlikely tokens have more room."""

import torch

from learner.algorithm.corrections.base import CorrectionInputs
from learner.algorithm.corrections.icepop import icepop
from learner.algorithm.corrections.kpop import kpop
from learner.config import AlgorithmSection


def facts(proximal, rollout):
    log_p, log_b = (
        torch.tensor(column, dtype=torch.float64).log() for column in (proximal, rollout)
    )
    rows = torch.zeros(len(proximal), dtype=torch.long)
    return CorrectionInputs(log_p, log_p, log_b, torch.ones_like(log_p), rows, 1)


def test_both_directions_by_hand():
    # p 0.5, β 0.8: KL(p || β) = 0.2231, KL(β || p) = 0.1927. 0.2 masks by the first alone, and the
    # other way round by the second alone; 0.25 masks nothing.
    given = facts([0.5, 0.8, 0.5], [0.8, 0.5, 0.5])
    found = kpop(given, AlgorithmSection(kpop_phi=0.2))
    assert found.weights.tolist() == [0.0, 0.0, 1.0]
    assert found.masked.tolist() == [True, True, False]
    assert torch.equal(found.old_logprobs, given.proximal_logprobs)
    assert not kpop(given, AlgorithmSection(kpop_phi=0.25)).masked.any()


def test_unlikely_tokens_have_more_room_than_in_icepop():
    # p 0.01, β 0.05: a ratio of 0.2, which IcePop masks below 0.5. KL(p || β) = 0.01 ln 0.2 + 0.99
    # ln(0.99/0.95) = 0.0247, KL(β || p) = 0.05 ln 5 + 0.95 ln(0.95/0.99) = 0.0413.
    given = facts([0.01], [0.05])
    assert icepop(given, AlgorithmSection(correction_low=0.5)).masked.all()
    assert not kpop(given, AlgorithmSection(kpop_phi=0.042)).masked.any()
    assert kpop(given, AlgorithmSection(kpop_phi=0.041)).masked.all()
