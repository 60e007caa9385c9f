"""A ticket's greedy episodes: the last of the group, at temperature 0, marked as a baseline."""

from __future__ import annotations

import msgspec
import pytest

from broker.contract import codec, wire
from broker.contract.examples import EXAMPLES
from broker.errors import WireError
from envhub.tickets.assignment import assignment

TICKET = EXAMPLES[wire.Ticket]


def test_the_last_episodes_are_greedy() -> None:
    assert isinstance(TICKET, wire.Ticket)
    asked = assignment(
        msgspec.structs.replace(TICKET, group_size=5, min_group_size=4, num_greedy=2)
    )
    assert [asked.is_greedy(episode) for episode in range(5)] == [False, False, False, True, True]
    assert not any(assignment(TICKET).is_greedy(episode) for episode in range(TICKET.group_size))
    assert not any(assignment(EXAMPLES[wire.EvalTicket]).is_greedy(episode) for episode in range(1))


def test_one_episode_at_least_is_sampled() -> None:
    bad = msgpack_of(msgspec.structs.replace(TICKET, group_size=2, min_group_size=2, num_greedy=2))
    with pytest.raises(WireError, match="num_greedy"):
        codec.decode(bad, wire.Ticket)


def msgpack_of(message: wire.Message) -> bytes:
    return msgspec.msgpack.encode(message)
