"""Requests in flight and open episodes, counted by hand."""

from __future__ import annotations

import pytest

from broker.contract import wire
from broker.contract.lengths import remaining_tokens
from envhub.servers.in_flight import OpenEpisodes, OpenTurn, RequestsInFlight
from envhub.tally import HubMetrics


def presence(name: str, **more: object) -> wire.Presence:
    fields = {
        "id": name,
        "host": "here",
        "pid": 1,
        "state": "serving",
        "address": name,
        "slots": 4,
        **more,
    }
    return wire.Presence(role="rollout", **fields)  # type: ignore[arg-type]


def test_requests_weigh_as_much_as_their_predicted_tokens() -> None:
    requests, servers = (
        RequestsInFlight(),
        [presence("a", speed=8.0), presence("b", speed=8.0, running=1)],
    )
    requests.loads(servers, {})
    requests.sent("a", 900)
    requests.sent("b", 100)
    requests.sent("b", 200)
    loads = {one.id: one for one in requests.loads(servers, {"a": 1.0})}
    # b: one of another hub
    assert {name: one.load for name, one in loads.items()} == {"a": 1, "b": 3}
    assert loads["a"].work == pytest.approx(900 / 400)
    assert loads["b"].work == pytest.approx(1 + 300 / 400)
    assert loads["b"].rank < loads["a"].rank
    requests.returned("a", 900)
    assert requests.loads(servers, {})[0].rank < requests.loads(servers, {})[1].rank
    assert (requests.requests("a"), requests.requests("b"), requests.requests("c")) == (0, 2, 0)


def test_without_predictions_requests_are_counted() -> None:
    requests, servers = RequestsInFlight(), [presence("a"), presence("b", running=2, waiting=1)]
    requests.loads(servers, {})
    requests.sent("a", 0)
    assert [(one.load, one.work) for one in requests.loads(servers, {})] == [(1, 1.0), (3, 3.0)]


def test_an_open_episode_grows_at_the_rate_of_earlier_turns() -> None:
    episodes = OpenEpisodes()
    first = OpenTurn("e", 0.0, 80, 200, 1000)
    episodes.began(first)
    assert episodes.left_s("e", 5.0) == 0.0  # no rate yet
    episodes.ended(first, 100, 10.0)  # 10 tokens per second
    assert (episodes.length("e", 10.0), episodes.left_s("e", 10.0)) == (100, 0.0)
    episodes.began(OpenTurn("e", 10.0, 80, 200, 1000))
    assert episodes.left_s("e", 10.0) == 8.0
    left = remaining_tokens(80, 200, 120, 10**9)[0]  # it has outgrown its prediction
    assert left > 40
    assert episodes.left_s("e", 22.0) == left / 10
    assert episodes.length("e", 22.0) == 100 + 120 + left
    episodes.forget("e")
    assert (episodes.length("e", 22.0), episodes.left_s("e", 22.0)) == (0, 0.0)


def test_a_turn_near_its_limit_is_not_expected_to_pass_it() -> None:
    episodes = OpenEpisodes()
    first = OpenTurn("a", 0.0, 100, 1000, 1000)
    episodes.began(first)
    episodes.ended(first, 100, 10.0)  # 10 tokens per second
    episodes.began(OpenTurn("b", 10.0, 100, 1000, 1000))
    assert (episodes.left_s("b", 100.0), episodes.length("b", 100.0)) == (10.0, 1000)
    assert (episodes.left_s("b", 300.0), episodes.length("b", 300.0)) == (0.0, 1000)


def test_the_length_bias_compares_what_is_kept_with_all() -> None:
    metrics = HubMetrics()
    assert "off_policy/length_bias" not in metrics.report()
    metrics.add_lengths([10, 20], [60])
    assert metrics.report()["off_policy/length_bias"] == pytest.approx(15 / 30)
    metrics.add_lengths([40, 40], [])
    kept, every = (0.99 * 30 + 80) / (0.99 * 2 + 2), (0.99 * 90 + 80) / (0.99 * 3 + 2)
    assert metrics.report()["off_policy/length_bias"] == pytest.approx(kept / every)


def test_room_of_a_server_follows_its_busy_replies() -> None:
    requests = RequestsInFlight()
    for _ in range(4):
        assert requests.has_room("a", 100)
        requests.sent("a", 0, 100)
    requests.returned("a", 0, 100, is_busy=True)
    assert not requests.has_room("a", 100)
    assert requests.has_room("b", 100)
    requests.returned("a", 0, 100)
    assert requests.has_room("a", 100)  # the other one has ended
    for _ in range(2):
        requests.returned("a", 0, 100)
    assert requests.has_room("a", 10**9)  # it has none of ours, so one is tried
