"""The benchmark of answers on some of its cases: nothing is voided, executed or judged wrongly."""

from __future__ import annotations

import asyncio

from bench.answers import measure
from bench.support.answer_cases import adversarial
from bench.support.answer_pairs import pairs


def test_there_are_enough_cases_and_each_stands_once() -> None:
    attacks, cases = adversarial(), pairs()
    assert len(set(attacks)) == len(attacks) >= 200
    assert len({case[:2] for case in cases}) == len(cases) >= 1000
    verdicts = {
        kind: {case.equal for case in cases if case.kind == kind}
        for kind in {case.kind for case in cases}
    }
    assert len(verdicts) >= 40
    assert all(both == {True, False} for both in verdicts.values())
    assert all(case.proof for case in cases)


def test_a_part_of_the_cases_is_judged_rightly() -> None:
    found = asyncio.run(measure(2, 17))
    assert {
        name: found[name] for name in ("voided", "executed", "wrong_verdicts", "killed_workers")
    } == dict.fromkeys(("voided", "executed", "wrong_verdicts", "killed_workers"), 0)
    assert found["adversarial"] >= 15
    assert found["pairs"] >= 80
