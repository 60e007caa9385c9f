"""The health of a process: what follows its presence, its stop and its event loop."""

from __future__ import annotations

import asyncio
import time

from broker.contract import wire
from broker.runtime.health import Health, report_of
from broker.runtime.member import Stop


def presence(**values: object) -> wire.Presence:
    return wire.Presence(
        **{"role": "rollout", "id": "r", "host": "h", "pid": 1, "state": "serving", **values}
    )  # type: ignore[arg-type]


def test_a_presence_gives_state_and_status() -> None:
    server = presence(policy_version=7, slots=64, running=3, waiting=2)
    assert report_of("lake", server) == (
        "ready",
        "run lake: version 7, 3 of 64 requests, 2 waiting",
    )
    learner = presence(role="learner", policy_version=7, slots=8, running=3)
    expected = ("ready", "run lake: step 7, 3 of 8 groups, waiting for environment hubs")
    assert report_of("lake", learner, "waiting for environment hubs") == expected
    hub = presence(
        role="envhub", state="failed", slots=4, serves=["lake", "sums"], problem="no display"
    )
    assert report_of("lake", hub) == ("failed", "run lake: 0 of 4 episodes, lake,sums, no display")
    assert report_of("lake", presence(state="draining"))[0] == "draining"
    assert report_of("lake", presence(state="starting")) == ("starting", "run lake: starting")


def test_listeners_hear_each_change_and_a_stop_stays() -> None:
    stop = Stop()
    health = stop.health
    heard: list[tuple[str, bool, str]] = []
    health.listeners.append(lambda one: heard.append((one.state, one.has_joined, one.status)))
    health.joined()
    health.follow(lambda: ("ready", "busy"))
    stop.request("SIGTERM")
    stop.request("SIGINT")
    health.set("ready", "a last line")
    assert heard == [
        ("starting", True, "starting"),
        ("ready", True, "busy"),
        ("draining", True, "stopping: SIGTERM"),
        ("draining", True, "a last line"),
    ]


def test_a_source_that_fails_is_a_failed_process() -> None:
    health = Health()
    health.follow(lambda: ("ready", str(1 // 0)))
    assert (health.state, health.status) == (
        "failed",
        "ZeroDivisionError: integer division or modulo by zero",
    )


async def test_a_blocked_loop_does_not_turn_and_is_measured() -> None:
    health = Health()
    health.beat_every_s = 0.02
    beating = asyncio.create_task(health.keep_beating())
    await asyncio.sleep(0.1)
    assert health.is_turning(0.3)
    time.sleep(0.5)  # noqa: ASYNC251 - what a blocking call does
    assert not health.is_turning(0.3)
    await asyncio.sleep(0.1)
    assert health.is_turning(0.3)
    assert 0.4 < health.lag_s < 2
    beating.cancel()
