"""When a run whose groups only fail ends, and when it does not."""

from __future__ import annotations

import pytest

from broker.contract import wire
from broker.settings.config import DomainSection, RewardConfig
from learner.config import FailuresSection
from learner.give_up import LEAST_WINDOW, MAX_SKIPPED, NOT_FAILURES, WORKED_TIMES, FailureMonitor

DOMAINS = {
    "a": DomainSection(env="qa"),
    "b": DomainSection(env="qa", rewards=[RewardConfig(name="length", pool="judge")]),
}
G = 2  # groups of a step


def made(domains: dict[str, DomainSection] | None = None, **settings: float) -> FailureMonitor:
    return FailureMonitor(
        FailuresSection.model_validate(settings), G, domains or {"a": DOMAINS["a"]}
    )


def hub(hub_id: str, role: str, serves: list[str], problem: str = "") -> wire.Presence:
    return wire.Presence(
        role=role,
        id=hub_id,
        host="h",
        pid=1,
        state="serving" if serves else "failed",
        serves=serves,
        problem=problem,
    )


def test_the_first_groups_all_failing_ends_the_run_and_names_the_most_frequent_reason() -> None:
    giveup = made()
    details = (
        ["reset raised KeyError: 'x' (bad.py:7 in reset)"] * 5
        + ["episode 3: timed out"]
        + ["step raised OSError: 17 (bad.py:9 in f)"]
    )
    for detail in details:
        assert giveup.failed("a", "env_error", detail) == ""
    verdict = giveup.failed("a", "env_error", "reset raised KeyError: 'y' (bad.py:7 in reset)")
    assert verdict.startswith(
        "all of the first 8 groups failed, most often (6 of 8) by env_error: reset raised KeyError: 'y' (bad.py:7 in "
        "reset); fix that"
    )
    assert giveup.verdict == verdict


def test_details_that_differ_in_numbers_alone_are_one_reason() -> None:
    giveup = made(give_up_after=3)
    giveup.failed("a", "timeout", "something else")
    giveup.failed("a", "reward_error", "episode 1: no answer")
    assert "(2 of 3) by reward_error: episode 2: no answer" in giveup.failed(
        "a", "reward_error", "episode 2: no answer"
    )


def test_what_is_no_failure_of_the_users_code_does_not_count() -> None:
    giveup = made()
    for reason in sorted(NOT_FAILURES) * 50:
        assert giveup.failed("a", reason, "") == ""
    assert {"late", "lost"} <= NOT_FAILURES


def test_zero_never_ends_a_run() -> None:
    giveup = made(give_up_after=0, give_up_after_s=0)
    for _ in range(500):
        assert giveup.failed("a", "env_error", "x") == ""
    for now in (0.0, 1e9):
        assert giveup.look([hub("h", "envhub", [], "domain a: x")], now) == ""


def test_a_run_that_worked_ends_only_when_a_whole_window_of_every_domain_has_failed() -> None:
    giveup = made(DOMAINS)
    giveup.worked("a")
    giveup.worked("b")
    for _ in range(10 * LEAST_WINDOW):  # the other domain is slow, and trained
        assert giveup.failed("a", "env_error", "x") == ""
    for _ in range(LEAST_WINDOW - 1):
        assert giveup.failed("b", "env_error", "x") == ""
    giveup.worked("b")
    for _ in range(LEAST_WINDOW - 1):
        assert giveup.failed("b", "env_error", "x") == ""
    assert giveup.failed("b", "env_error", "x").startswith(
        "100% of the last 32 groups of each domain failed"
    )


def test_a_share_is_of_the_domains_by_their_weights_however_fast_one_fails() -> None:
    giveup = made(
        {"a": DomainSection(env="qa", weight=3.0), "b": DomainSection(env="qa")}, max_share=0.75
    )
    giveup.worked("b")
    verdicts = [bool(giveup.failed("a", "env_error", "x")) for _ in range(LEAST_WINDOW)]
    assert verdicts.index(True) == LEAST_WINDOW - 1
    other = made(
        {"a": DomainSection(env="qa"), "b": DomainSection(env="qa", weight=3.0)}, max_share=0.75
    )
    other.worked("b")
    assert not any(other.failed("a", "env_error", "x") for _ in range(1000))


def test_all_hubs_of_a_domain_broken_for_long_ends_the_run() -> None:
    giveup = made(DOMAINS)
    broken = hub(
        "h1",
        "envhub",
        ["a"],
        "domain b: 5 tickets in a row failed here, the last: reset raised OSError (bad.py:3 in reset)",
    )
    good = hub("h2", "envhub", ["a", "b"])
    assert giveup.look([broken], 0.0) == ""
    assert giveup.look([broken], 599.0) == ""
    assert giveup.look([broken, good], 600.0) == ""  # another one serves it: the time begins again
    assert giveup.look([broken], 601.0) == ""
    assert giveup.look([], 700.0) == ""  # no hub is there: the learner says whom it waits for
    assert giveup.look([broken], 1000.0) == ""
    assert giveup.look([broken], 1599.0) == ""
    verdict = giveup.look([broken], 1600.0)
    assert verdict.startswith(
        "for 600 s every hub of domain b was broken and no group was trained: h1: domain b: 5 tickets in a row"
    )
    assert "(bad.py:3 in reset)" in verdict


def test_a_reward_pool_too_and_not_while_it_is_paused() -> None:
    giveup = made(DOMAINS, give_up_after_s=10)
    broken = hub("r", "rewardhub", [], "pool judge: no key")
    assert giveup.look([broken], 0.0) == ""
    giveup.pause()
    assert giveup.look([broken], 11.0) == ""
    assert giveup.look([broken, hub("e", "envhub", ["a", "b"])], 21.0).startswith(
        "for 10 s every hub of pool judge was broken"
    )


@pytest.mark.parametrize("domain", ["a", "b"])
def test_a_domain_that_worked_is_waited_for_longer_and_others_that_train_reset_the_time(
    domain: str,
) -> None:
    giveup = made(DOMAINS, give_up_after_s=10)
    broken = hub("h", "envhub", ["b"], "domain a: down")
    giveup.look([broken], 0.0)
    giveup.worked(domain)
    assert giveup.look([broken], 11.0) == ""
    after = 10.0 * (WORKED_TIMES if domain == "a" else 1)
    assert giveup.look([broken], 11.0 + after - 0.1) == ""
    assert giveup.look([broken], 11.0 + after).startswith(
        f"for {after:g} s every hub of domain a was broken"
    )


def test_steps_without_an_update_in_a_row_end_a_run() -> None:
    giveup = made()
    for _ in range(MAX_SKIPPED - 1):
        assert giveup.stepped(is_skipped=True, problem="the gradient of w holds nan") == ""
    assert giveup.stepped(is_skipped=False, problem="") == ""
    for _ in range(MAX_SKIPPED - 1):
        assert giveup.stepped(is_skipped=True, problem="the gradient of w holds nan") == ""
    assert giveup.stepped(is_skipped=True, problem="the gradient of v holds inf") == (
        "5 steps in a row made no update because their gradients were not finite: the gradient of v holds inf; lower "
        "train.lr or set model.dtype=float32, and start the run again, which resumes it "
        "(failures.give_up_after=0 continues regardless)"
    )
    endless = made(give_up_after=0)
    assert [endless.stepped(is_skipped=True, problem="") for _ in range(100)] == [""] * 100
