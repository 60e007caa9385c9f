"""A domain's predictions: calibrated in the long run, within the request, and never at the mercy of
a user's code.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import signal
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.contract import wire
from envhub.lengths import predictor as predictor_module
from envhub.lengths.base import LengthEstimator, UpcomingTurn
from envhub.lengths.corrections import LengthCalibration
from envhub.lengths.mean import RunningMean
from envhub.lengths.predictor import HubLengths, Interrupted, LengthPredictor, time_limit
from envhub.lengths.selection import FunctionEstimator, load_estimator


def turn(max_tokens: int = 4096) -> UpcomingTurn:
    return UpcomingTurn([1, 2, 3], max_tokens)


def predictor(says: Any, calibration: LengthCalibration | None = None) -> LengthPredictor:
    """A predictor with a function that returns a value, or the value of a call."""
    function = says if callable(says) else lambda turn: says
    return LengthPredictor(
        "lake", FunctionEstimator(function, {}), calibration or LengthCalibration()
    )


def play(
    using: LengthPredictor, lengths: Any, max_tokens: int = 10**6
) -> list[tuple[int, int, int]]:
    """Rows (median, high, length)."""
    rows = []
    for length in lengths:
        made = using.predict(turn(max_tokens))
        using.add(made, int(min(length, max_tokens)))
        rows.append((made.expected, made.high, int(min(length, max_tokens))))
    return rows


def shares(rows: list[tuple[int, int, int]]) -> tuple[float, float]:
    return float(np.mean([row[2] <= row[0] for row in rows])), float(
        np.mean([row[2] <= row[1] for row in rows])
    )


def test_a_thousand_turns_in_flight_do_not_correct_the_same_error_a_thousand_times() -> None:
    lengths = 100 * np.exp(np.random.default_rng(0).normal(0, 1, 6000))
    using, flying, rows = predictor(30.0), [], []
    for length in lengths:
        flying.append(using.predict(turn(10**6)))
        if len(flying) > 1000:
            made = flying.pop(0)
            using.add(made, int(length))
            rows.append((made.expected, made.high, int(length)))
    assert all(60 < expected < 160 for expected, _, _ in rows[2500:])
    below, high = shares(rows[2500:])
    assert abs(below - 0.5) < 0.05
    assert abs(high - 0.9) < 0.05


@pytest.mark.parametrize("says", [(100.0, 360.0), (10.0, 20.0), (3000.0, 3000.0), 100.0, 7])
def test_the_quantiles_are_right_in_the_long_run_whatever_the_estimator_says(says: Any) -> None:
    lengths = 100 * np.exp(np.random.default_rng(0).normal(0, 1, 3000))
    using = predictor(says)
    below, high = shares(play(using, lengths)[1000:])
    assert (below, high) == (pytest.approx(0.5, abs=0.05), pytest.approx(0.9, abs=0.03))


def test_the_hub_measures_predicted_against_actual_quantiles() -> None:
    calibration = LengthCalibration(memory=100_000)
    assert calibration.report() == {}
    for actual in (1.0, 3.0, 5.0, 7.0):
        calibration.add((4.0, 6.0), actual, limit=8.0)
    assert calibration.report() == {
        "length/error": pytest.approx(2.0),
        "length/calibration_50": pytest.approx(0.5),
        "length/calibration_90": pytest.approx(0.75),
    }
    calibration.add((9.0, 9.0), 8.0, limit=8.0)  # at the limit no quantile can be exceeded
    assert calibration.report()["length/calibration_90"] == pytest.approx(0.75)
    assert calibration.report()["length/error"] == pytest.approx(1.6)


def test_turns_that_are_cut_off_are_expected_to_be_cut_off() -> None:
    using = predictor((50.0, 60.0))
    rows = play(using, [5000] * 400, max_tokens=300)
    assert [row[0] >= 290 for row in rows[-20:]] == [True] * 20


ODD = st.one_of(
    st.none(), st.floats(), st.integers(-(10**30), 10**30), st.text(max_size=3), st.binary(max_size=3),
    st.tuples(st.floats(), st.floats()), st.tuples(st.integers(0, 9)), st.lists(st.floats(), max_size=3),
    st.just(KeyError("x")), st.just(SystemExit(3)), st.just(np.float64(5)), st.just(RecursionError()),
)  # fmt: skip


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    answers=st.lists(ODD, max_size=20),
    lengths=st.lists(st.integers(0, 5000), min_size=20, max_size=20),
)
def test_whatever_a_users_function_does_costs_its_prediction_only(
    answers: list[Any], lengths: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    left = list(answers)

    def says(turn: UpcomingTurn) -> Any:
        answer = left.pop(0) if left else 20.0
        if isinstance(answer, BaseException):
            raise answer
        return answer

    using = predictor(says)
    for length in lengths:
        made = using.predict(turn(1000))
        assert 0 <= made.expected <= made.high <= 1000
        assert (made.expected == 0) == (made.high == 0)
        using.add(made, length)
    assert using.new == len(lengths)
    assert len(caplog.records) <= 1  # 20 turns are too few to call it a liar


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("ZeroDivisionError: division by zero", lambda turn: 1 / 0),
        ("ValueError: it predicts nan, not a number above 0, or two in order", math.nan),
        ("ValueError: it predicts '12', not a number above 0, or two in order", "12"),
        ("ValueError: it predicts -3, not a number above 0, or two in order", -3),
        ("ValueError: it predicts (9, 4), not a number above 0, or two in order", (9, 4)),
    ],
)
def test_a_function_that_fails_is_noted_once_and_the_mean_is_used(
    fault: str, says: Any, caplog: pytest.LogCaptureFixture
) -> None:
    using, mean = predictor(says), LengthPredictor("lake", RunningMean(), LengthCalibration())
    with caplog.at_level(logging.WARNING):
        rows = play(using, [40, 60, 50] * 10)
    assert rows == play(mean, [40, 60, 50] * 10)
    assert rows[0][:2] == (0, 0)  # nothing is known of the first turn
    assert 40 <= rows[-1][0] <= 60
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(f"domains.lake.length_estimator: {fault}")
    assert line.endswith("; the running mean is used instead")


def test_a_function_that_lies_is_noted_once_and_the_mean_is_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rng = np.random.default_rng(3)
    using = predictor(lambda turn: float(rng.choice([2.0, 60_000.0])))
    with caplog.at_level(logging.WARNING):
        rows = play(using, 100 * np.exp(rng.normal(0, 0.3, 400)))
    assert all(70 <= median <= 140 for median, _, _ in rows[200:])
    (line,) = [record.message for record in caplog.records]
    assert "its predictions are off by a factor of " in line


def test_a_slow_function_is_noted_once_and_used(caplog: pytest.LogCaptureFixture) -> None:
    using = predictor(lambda turn: time.sleep(0.002) or 70.0)
    with caplog.at_level(logging.WARNING):
        rows = play(using, [70] * 30)
    assert rows[-1][0] == pytest.approx(70, abs=2)
    (line,) = [record.message for record in caplog.records]
    says = r"20 predictions in a row took about \d+(\.\d+)? ms each, in which the hub can do nothing else"
    assert re.fullmatch(f"domains.lake.length_estimator: {says}", line)


def test_a_function_that_hangs_is_interrupted_once_and_never_called_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def hangs(turn: UpcomingTurn) -> float:
        calls.append(turn)
        while True:
            with contextlib.suppress(Exception):  # as careless code does
                time.sleep(60)

    monkeypatch.setattr(predictor_module, "HANGS_S", 0.05)
    before = signal.getsignal(signal.SIGALRM)
    using, mean = predictor(hangs), LengthPredictor("lake", RunningMean(), LengthCalibration())
    with caplog.at_level(logging.WARNING):
        rows = play(using, [40, 60, 50] * 10)
    assert rows == play(mean, [40, 60, 50] * 10)
    assert len(calls) == 1
    (line,) = [record.message for record in caplog.records]
    says = "it takes longer than 0.05 s and is not called again; the running mean is used instead"
    assert line == f"domains.lake.length_estimator: {says}"
    assert signal.getsignal(signal.SIGALRM) is before


def test_the_time_limit_leaves_another_timer_running() -> None:
    rang = []
    handler = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    timer = signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(Interrupted), time_limit(0.01):
            time.sleep(10)
        deadline = time.monotonic() + 10
        while not rang and time.monotonic() < deadline:
            time.sleep(0.01)
        assert rang == [1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def test_an_error_that_does_no_harm_is_not_noted(caplog: pytest.LogCaptureFixture) -> None:
    # Lengths hardly differ: the mean is better by far, and still it does not matter.
    rng = np.random.default_rng(4)
    using = predictor(lambda turn: float(rng.choice([97.0, 103.0])))
    with caplog.at_level(logging.WARNING):
        rows = play(using, [100] * 400)
    assert all(88 <= median <= 112 for median, _, _ in rows[200:])
    assert using._own.error > predictor_module.WORSE * using._mean.error
    assert not caplog.records


class Broken(LengthEstimator):
    def __init__(self, args: Any) -> None:
        raise OSError("no such model")

    def predict(self, turn: UpcomingTurn) -> float:
        return 1.0


class Forgetful(LengthEstimator):
    def predict(self, turn: UpcomingTurn) -> float:
        return 30.0

    def observe(self, turn: UpcomingTurn, tokens: int) -> None:
        raise KeyError("weights")


@pytest.mark.parametrize(
    ("name", "fault"), [("Broken", "OSError: no such model"), ("Forgetful", "KeyError: 'weights'")]
)
def test_a_class_that_fails_is_noted_once(
    name: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = HubLengths()
    choice = load_estimator("lake", f"{__file__}:{name}", {})
    with caplog.at_level(logging.WARNING):
        rows = play(lengths.of("lake", choice, wire.ACTOR), [30] * 20)
    assert rows[-1][0] == pytest.approx(30, abs=1)
    (line,) = [record.message for record in caplog.records]
    assert fault in line


def test_a_baseline_neither_teaches_nor_counts() -> None:
    lengths, choice = HubLengths(), load_estimator("lake", "history", {})
    play(lengths.of("lake", choice, "random"), [900] * 20)
    trained = lengths.of("lake", choice, wire.ACTOR)
    assert trained.predict(turn()).expected == 0
    assert lengths.calibration.report() == {}
    play(trained, [30] * 20)
    assert trained is lengths.of("lake", load_estimator("lake", "history", {}), wire.ACTOR)
    assert trained.predict(turn()).expected == pytest.approx(30, abs=1)
    assert lengths.of("lake", choice, "random").predict(turn()).expected == pytest.approx(
        900, rel=0.01
    )


def test_new_settings_begin_again_and_tickets_of_the_old_ones_teach_them() -> None:
    lengths, old, new = (
        HubLengths(),
        load_estimator("lake", "history", {}),
        load_estimator("lake", "mean", {}),
    )
    first = lengths.of("lake", old, wire.ACTOR)
    lengths.renew("lake", new)
    for choice in (old, new) * 10:
        play(lengths.of("lake", choice, wire.ACTOR), [30])
    (second,) = lengths.trained.values()
    assert (first.new, second.new) == (0, 20)
    assert isinstance(second.estimator, RunningMean)
    assert second.predict(turn()).expected == pytest.approx(30, abs=1)
    lengths.renew("lake", load_estimator("lake", "mean", {}))  # another setting has changed
    assert lengths.of("lake", new, wire.ACTOR) is second
