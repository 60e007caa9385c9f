"""Which server a request goes to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from envhub.choose import SLACK, Server, choose


def server(name: str, load: int = 0, *, version: int = 5, slots: int = 8) -> Server:
    return Server(name, f"tcp://{name}", version, slots, load)


def name(*servers: Server, **kwargs: object) -> str | None:
    found = choose(servers, **kwargs)  # type: ignore[arg-type]
    return found.id if found else None


def test_nobody_is_there() -> None:
    assert name() is None


def test_the_emptiest_per_slot_is_asked() -> None:
    assert name(server("a", 4), server("b", 3)) == "b"
    assert name(server("a", 4, slots=8), server("b", 6, slots=64)) == "b"
    assert name(server("b", 2), server("a", 2)) == "a"


def test_a_conversation_stays_until_its_server_is_full_and_another_clearly_emptier() -> None:
    assert name(server("a", 7), server("b", 0), sticky="a") == "a"
    assert name(server("a", 8), server("b", 7), sticky="a") == "a"  # within the slack
    assert name(server("a", 8), server("b", 5), sticky="a") == "b"
    assert name(server("b", 5), sticky="a") == "b"  # it is gone


def test_a_server_that_is_new_enough_goes_before_an_emptier_one() -> None:
    assert name(server("a", 0, version=4), server("b", 7, version=5), min_version=5) == "b"
    assert name(server("a", 0, version=4), server("b", 7, version=5), min_version=5, sticky="a") == "b"
    assert name(server("a", 1, version=3), server("b", 0, version=4), min_version=5) == "b"  # it waits there


def test_who_just_failed_is_asked_only_when_there_is_nobody_else() -> None:
    assert name(server("a", 0), server("b", 9), avoid=frozenset({"a"}), sticky="a") == "b"
    assert name(server("a", 0), avoid=frozenset({"a"})) == "a"


SERVERS = st.lists(
    st.builds(server, st.sampled_from("abcdef"), st.integers(0, 20), version=st.integers(0, 3), slots=st.integers(1, 8)),
    max_size=5,
    unique_by=lambda one: one.id,
)


@given(SERVERS, st.integers(0, 4), st.sampled_from("abcdef"), st.frozensets(st.sampled_from("abcdef")))
def test_whatever_is_there(servers: list[Server], min_version: int, sticky: str, avoid: frozenset[str]) -> None:
    found = choose(servers, min_version=min_version, sticky=sticky, avoid=avoid)
    if found is None:
        assert not servers
        return
    free = [one for one in servers if one.id not in avoid]
    assert found.id not in avoid or not free
    new = [one for one in free or servers if one.policy_version >= min_version]
    assert found in (new or free or servers)
    best = min(one.pressure for one in new or free or servers)
    assert found.pressure == best or found.id == sticky
    if found.id == sticky and found.pressure > best + SLACK:
        assert found.load < found.slots
