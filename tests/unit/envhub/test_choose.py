"""Which server a request goes to."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from envhub.servers.choose import ServerLoad, choose


def server(
    name: str,
    load: int = 0,
    *,
    version: int = 5,
    slots: int = 8,
    speed: float | None = None,
    weight: float = 1.0,
) -> ServerLoad:
    return ServerLoad(
        name, f"tcp://{name}", version, slots, load, slots if speed is None else speed, weight
    )


def name(*servers: ServerLoad, seed: int = 0, **kwargs: object) -> str | None:
    found = choose(servers, random.Random(seed), **kwargs)  # type: ignore[arg-type]
    return found.id if found else None


def test_nobody_is_there() -> None:
    assert name() is None


def test_the_emptier_of_two_for_its_speed_is_asked() -> None:
    assert name(server("a", 4), server("b", 3)) == "b"
    assert name(server("a", 4, slots=8), server("b", 6, slots=64)) == "b"
    assert name(server("a", 3, speed=1.0), server("b", 6, speed=4.0)) == "b"
    # a free slot is used before any request waits
    assert name(server("a", 7, speed=1.0), server("b", 8, speed=9.0)) == "a"


def test_the_least_loaded_of_all_is_not_where_everyone_goes() -> None:
    """Of ten servers it is one of the two that are compared in a fifth of all draws."""
    servers = [server(f"s{n}", 0 if n == 0 else 4) for n in range(10)]
    counts = Counter(name(*servers, seed=seed) for seed in range(2000))
    assert 300 < counts["s0"] < 500
    assert len(counts) == 10
    # nor does a name come first among equals
    assert max(count for one, count in counts.items() if one != "s0") < 300


def test_a_server_is_compared_as_often_as_its_weight_says() -> None:
    servers = [server("a", weight=8.0), *(server(f"s{n}", 1, weight=1.0) for n in range(8))]
    assert 0.5 < sum(name(*servers, seed=seed) == "a" for seed in range(1000)) / 1000 < 0.85
    idle = [server("a", 0, weight=0.0), server("b", 5), server("c", 5)]
    # it takes no new conversations
    assert "a" not in {name(*idle, seed=seed) for seed in range(100)}
    assert name(*idle, sticky="a") == "a"
    assert name(server("a", 0, weight=0.0), server("b", 5), avoid=frozenset({"b"})) == "a"


def test_a_conversation_stays_until_its_server_is_full_and_another_clearly_emptier() -> None:
    assert name(server("a", 7), server("b", 0), sticky="a") == "a"
    assert name(server("a", 8), server("b", 7), sticky="a") == "a"  # within the slack
    assert name(server("a", 8), server("b", 5), sticky="a") == "b"
    assert name(server("b", 5), sticky="a") == "b"  # it is gone


def test_a_server_that_is_new_enough_goes_before_an_emptier_one() -> None:
    assert name(server("a", 0, version=4), server("b", 7, version=5), min_version=5) == "b"
    assert (
        name(server("a", 0, version=4), server("b", 7, version=5), min_version=5, sticky="a") == "b"
    )
    # it waits there
    assert name(server("a", 1, version=3), server("b", 0, version=4), min_version=5) == "b"


def test_who_just_failed_is_asked_only_when_there_is_nobody_else() -> None:
    assert name(server("a", 0), server("b", 9), avoid=frozenset({"a"}), sticky="a") == "b"
    assert name(server("a", 0), avoid=frozenset({"a"})) == "a"


SERVERS = st.lists(
    st.builds(
        server,
        st.sampled_from("abcdef"),
        st.integers(0, 20),
        version=st.integers(0, 3),
        slots=st.integers(1, 8),
        weight=st.sampled_from([0.0, 0.5, 3.0]),
    ),
    max_size=5,
    unique_by=lambda one: one.id,
)


@given(
    SERVERS,
    st.integers(0, 4),
    st.sampled_from("abcdef"),
    st.frozensets(st.sampled_from("abcdef")),
    st.integers(0, 9),
)
def test_any_servers(
    servers: list[ServerLoad], min_version: int, sticky: str, avoid: frozenset[str], seed: int
) -> None:
    found = choose(
        servers, random.Random(seed), min_version=min_version, sticky=sticky, avoid=avoid
    )
    if found is None:
        assert not servers
        return
    free = [one for one in servers if one.id not in avoid]
    assert found.id not in avoid or not free
    new = [one for one in free or servers if one.policy_version >= min_version]
    assert found in (new or free or servers)
    able = new or free or servers
    if (
        len(able) == 2
        and sticky not in {one.id for one in able}
        and all(one.weight for one in able)
    ):
        assert found.rank == min(one.rank for one in able)
