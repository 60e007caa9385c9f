"""Quotas of an API key, with times as arguments: what is admitted never exceeds the limit in the
long run.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.named_keys import NamedKey
from rlearner_text.openai.quotas import Budget, KeyUsage


def usage(**limits: int) -> KeyUsage:
    return KeyUsage(NamedKey("alice", "0" * 64, 1e12, **limits), now=100.0)


def refused(used: KeyUsage, now: float) -> tuple[str, int | None]:
    with pytest.raises(HttpError) as caught:
        used.begin(now)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    return caught.value.message, caught.value.retry_s


def test_requests_refill_evenly() -> None:
    used = usage(requests_per_minute=6)
    for _ in range(6):
        used.begin(100.0)
    said = "the API key alice is limited to 6 requests per minute; try again later"
    assert refused(used, 100.0) == (said, 10)
    assert refused(used, 109.0) == (said, 1)
    used.begin(110.0)
    assert refused(used, 110.0) == (said, 10)


def test_no_more_than_a_minute_is_saved_up() -> None:
    used = usage(requests_per_minute=2)
    for _ in range(2):
        used.begin(100_000.0)
    assert refused(used, 100_000.0)[1] == 30


def test_concurrent_requests_count_until_they_end() -> None:
    used = usage(concurrent=2, requests_per_minute=100)
    used.begin(100.0)
    used.begin(100.0)
    assert refused(used, 100.0) == (
        "the API key alice is limited to 2 requests at once; try again later",
        1,
    )
    used.end()
    used.begin(100.0)


def test_one_request_may_overdraw_the_tokens_and_the_next_waits() -> None:
    used = usage(tokens_per_minute=60)
    used.begin(100.0)
    used.reserve(180, 100.0)
    assert refused(used, 100.0) == (
        "the API key alice is limited to 60 tokens per minute; try again later",
        121,
    )
    with pytest.raises(HttpError, match="60 tokens per minute"):
        used.reserve(1, 100.0)
    used.give_back(130, 100.0)  # 50 were used
    used.begin(100.0)
    used.reserve(10, 100.0)
    assert refused(used, 100.0)[1] == 1


def test_nothing_is_limited_without_limits() -> None:
    used = usage()
    for _ in range(1000):
        used.begin(100.0)
        used.reserve(10**6, 100.0)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    budget = Budget(60, 100.0)
    budget.take(60, 100.0)
    assert budget.wait_s(1, 50.0) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 500), st.floats(0, 1)), max_size=60))
def test_tokens_never_exceed_the_limit_by_more_than_one_request(
    calls: list[tuple[float, int, float]],
) -> None:
    used, now, total = usage(tokens_per_minute=300), 100.0, 0.0
    for pause, most, share in calls:
        now += pause
        try:
            used.begin(now)
            used.reserve(most, now)
        except HttpError:
            continue
        assert total <= 300 + (now - 100) * 5 - 1 + 1e-6
        spent = round(most * share)
        used.give_back(most - spent, now)
        used.end()
        total += spent
