"""Which servers a hub follows: how many, in what proportion, and for how long."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from broker.channel.endpoint import RequestLimits
from envhub.servers.sample import MOST, ROTATE_S, SIZE, ServerSample, inclusion, sample_size


def sample_of(speeds: dict[str, float], seed: int) -> ServerSample:
    sample = ServerSample(random.Random(seed))
    for server, speed in speeds.items():
        sample.exists(server, speed)
    sample.tick(0.0, ())
    return sample


def test_a_few_servers_are_all_followed() -> None:
    sample = sample_of({"a": 10.0, "b": 0.0, "c": 30.0}, seed=1)
    assert sample.followed == {"a", "b", "c"}
    # in proportion to speed; the mean where it is unknown
    assert sample.weights() == {"a": 10.0, "b": 20.0, "c": 30.0}


def test_of_many_as_many_as_fit_in_proportion_to_speed() -> None:
    speeds = {f"s{n}": float((1, 2, 4)[n % 3]) for n in range(99)}
    counts = Counter(server for seed in range(1000) for server in sample_of(speeds, seed).drawn)
    assert sum(counts.values()) == 1000 * SIZE
    by_speed = [
        sum(counts[server] for server in speeds if speeds[server] == speed)
        for speed in (1.0, 2.0, 4.0)
    ]
    assert by_speed[1] / by_speed[0] == pytest.approx(2.0, rel=0.15)
    assert by_speed[2] / by_speed[0] == pytest.approx(4.0, rel=0.15)
    # the draw has taken account of speed already
    assert len(set(sample_of(speeds, 0).weights().values())) == 1


def test_a_server_that_joins_a_full_sample_gets_its_share_at_once() -> None:
    entered = 0
    for seed in range(1000):
        sample = sample_of({f"s{n}": 1.0 for n in range(31)}, seed)
        sample.exists("new", 1.0)
        sample.tick(0.1, ())
        assert len(sample.drawn) == SIZE
        entered += "new" in sample.drawn
    assert entered / 1000 == pytest.approx(SIZE / 32, abs=0.05)


def test_servers_are_exchanged_now_and_then_but_not_while_conversations_are_with_all_of_them() -> (
    None
):
    sample = sample_of({f"s{n}": 1.0 for n in range(40)}, seed=3)
    seen, now = set(sample.drawn), 0.0
    for _ in range(500):
        now += ROTATE_S
        sample.tick(now, ())
        seen |= sample.followed
        assert len(sample.followed) == SIZE
    assert len(seen) == 40
    for _ in range(100):
        now += ROTATE_S
        sample.tick(now, {f"s{n}" for n in range(40)})
    assert len(sample.followed) == MOST * SIZE
    before = sample.followed
    sample.tick(now + 10 * ROTATE_S, before)
    assert sample.followed == before
    sample.tick(now + 11 * ROTATE_S, ())
    assert len(sample.followed) == SIZE


def test_who_is_silent_is_replaced_until_it_is_heard_of_again() -> None:
    sample = sample_of({"a": 1.0, "b": 1.0}, seed=0)
    sample.silent("a")
    sample.tick(1.0, ())
    assert sample.followed == {"b"}
    sample.exists("a", 1.0)
    sample.tick(2.0, ())
    assert sample.followed == {"a", "b"}
    sample.gone("b")
    sample.tick(3.0, ())
    assert sample.followed == {"a"}


@pytest.mark.parametrize(
    "speeds", [[1.0] * 20, [1.0, 2.0, 4.0] * 10, [1000.0] + [1.0] * 20, [5.0] * 3]
)
def test_the_probabilities_sum_to_the_size(speeds: list[float]) -> None:
    shares = inclusion(speeds, SIZE)
    assert sum(shares) == pytest.approx(min(SIZE, len(speeds)))
    assert all(0 < share <= 1 for share in shares)
    assert (
        len(
            {
                round(share / speed, 9)
                for share, speed in zip(shares, speeds, strict=True)
                if share < 1
            }
        )
        <= 1
    )


class Fleet(RuleBasedStateMachine):
    """Servers come, go, fall silent and are used in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.sample, self.now = ServerSample(random.Random(7), size=3, most=5, rotate_s=4.0), 0.0
        self.there: set[str] = set()
        self.in_use: set[str] = set()

    names = st.sampled_from([f"s{n}" for n in range(9)])

    @rule(server=names, speed=st.sampled_from([0.0, 0.1, 1.0, 50.0]))
    def exists(self, server: str, speed: float) -> None:
        self.sample.exists(server, speed)
        self.there.add(server)

    @rule(server=names)
    def gone(self, server: str) -> None:
        self.sample.gone(server)
        self.there.discard(server)

    @rule(server=names)
    def silent(self, server: str) -> None:
        self.sample.silent(server)
        self.there.discard(server)

    @rule(seconds=st.sampled_from([0.1, 3.0, 20.0]), data=st.data())
    def tick(self, seconds: float, data: st.DataObject) -> None:
        self.now += seconds
        followed = sorted(self.sample.followed)
        self.in_use = data.draw(st.sets(st.sampled_from(followed))) if followed else set()
        self.sample.tick(self.now, self.in_use)
        # a conversation's server stays followed
        assert self.in_use & self.there <= self.sample.followed
        assert len(self.sample.drawn) == min(3, len(self.there))

    @invariant()
    def holds(self) -> None:
        assert self.sample.followed <= self.there
        assert len(self.sample.drawn) == len(set(self.sample.drawn)) <= 3
        assert len(self.sample.followed) <= 5
        assert not self.sample.kept & set(self.sample.drawn)
        assert set(self.sample.weights()) == set(self.sample.drawn)
        assert all(weight > 0 for weight in self.sample.weights().values())


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("episodes", "max_context_tokens", "size"),
    [(64, 4096, SIZE), (1000, 32768, SIZE), (10_000, 65_536, 20)],
)
def test_sample_grows_with_what_a_hub_sends(
    episodes: int, max_context_tokens: int, size: int
) -> None:
    assert sample_size(episodes, max_context_tokens) == size
    most = RequestLimits()
    assert episodes * 4 * max_context_tokens <= size * most.bytes_of_client
    assert episodes <= size * most.count_of_client


def test_sample_of_a_size_follows_twice_as_many() -> None:
    sample = ServerSample(random.Random(1), size=20)
    for number in range(99):
        sample.exists(f"s{number}", 1.0)
    sample.tick(0.0, ())
    assert len(sample.drawn) == 20
    for turn in range(1, 200):
        sample.tick(turn * 2 * ROTATE_S, sample.followed)
    assert len(sample.followed) == 40
