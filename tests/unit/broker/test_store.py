"""What storing does with every answer that a cluster gives while its leaders change. The link is a
script of answers.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from broker.errors import BrokerUnreachable, LostState, RlearnerError
from broker.jetstream import publish as module
from broker.jetstream.api import NO_MESSAGE, NO_STREAM
from broker.jetstream.publish import (
    EXPECTED_LAST_KEY_SEQ,
    EXPECTED_LAST_SEQ,
    MESSAGE_ID,
    store_message,
)
from broker.nats.addresses import split_servers, without_passwords
from broker.nats.nats_errors import NoResponders
from broker.nats.refusals import RefusalTracker

ID = {MESSAGE_ID: "mine"}
API = "$JS.API."


class Answer:
    def __init__(self, **body: Any) -> None:
        self.data = json.dumps(body).encode()


def refusal(err_code: int, code: int = 400) -> Answer:
    return Answer(error={"code": code, "err_code": err_code, "description": "no"})


class Script:
    """Stands for a link: publishes get ``answers`` in turn, requests of the management API those of
    ``api``.
    """

    where, inbox, has_jetstream = "here", "_INBOX", True

    def __init__(
        self, *answers: Answer | Exception, api: dict[str, list[Answer]] | None = None
    ) -> None:
        self.answers, self.asked = list(answers), api or {}
        self.doubts = self.trusts = 0
        self.refusals = RefusalTracker("here")

    async def ready(self) -> None: ...

    async def call(
        self, subject: str, data: bytes, *, headers: dict[str, str] | None = None, timeout_s: float
    ) -> Answer:
        if subject.startswith(API):
            return self.asked[subject.removeprefix(API).split(".")[1]].pop(0)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def doubt(self, what: str, waited_s: float = 0.0) -> None:
        self.doubts += what == "s"

    def trust(self, what: str) -> None:
        self.trusts += what == "s"


def info(last: int) -> Answer:
    return Answer(state={"first_seq": 1, "last_seq": last, "messages": last})


def found(seq: int, message_id: str) -> Answer:
    headers = base64.b64encode(f"NATS/1.0\r\n{MESSAGE_ID}: {message_id}\r\n\r\n".encode()).decode()
    return Answer(message={"seq": seq, "subject": "s", "hdrs": headers})


async def put(script: Script, **headers: str) -> int | None:
    return await store_message(
        script,
        "S",
        "s",
        b"x",
        ID | {name.replace("_", "-"): value for name, value in headers.items()},
    )  # type: ignore[arg-type]


def expecting(seq: int) -> dict[str, str]:
    return {EXPECTED_LAST_SEQ: str(seq)}


async def test_an_attempt_in_process_is_waited_for() -> None:
    script = Script(TimeoutError(), refusal(10158, 409), Answer(seq=7))
    assert await put(script) == 7
    assert (script.doubts, script.trusts) == (2, 1)


async def test_what_is_refused_for_good_is_raised() -> None:
    with pytest.raises(RlearnerError, match="refuses the message"):
        await put(Script(refusal(10054)))


@pytest.mark.parametrize(
    ("code", "err_code"), [(400, 10002), (503, 10023), (500, 10047), (503, 10077)]
)
async def test_no_room_is_waited_for_whatever_the_server_calls_it(
    code: int, err_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An account's limit, a server's in newer and older versions, a stream's."""
    monkeypatch.setattr("broker.nats.refusals.FIRST_PAUSE_S", 0.01)
    script = Script(refusal(err_code, code), refusal(err_code, code), Answer(seq=8))
    assert await put(script) == 8
    assert script.doubts == 0  # another server of the cluster has no more room
    assert not script.refusals.full


async def test_what_must_be_stored_makes_room_before_each_repetition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    script = Script(refusal(10023, 503), refusal(10023, 503), Answer(seq=8))
    made: list[int] = []

    async def make_room() -> None:
        made.append(len(script.answers))

    assert await store_message(script, "S", "s", b"x", ID, make_room) == 8  # type: ignore[arg-type]
    assert made == [2, 1]


async def test_a_wrong_last_sequence_that_is_right_waits_for_a_majority() -> None:
    """The first attempt is proposed but not stored, the second is refused for it; then the first is
    given up with its leader.
    """
    script = Script(TimeoutError(), refusal(10164), Answer(seq=5), api={"INFO": [info(4)]})
    assert await put(script, **expecting(4)) == 5


async def test_a_wrong_last_sequence_of_our_own_making_counts_as_stored() -> None:
    script = Script(
        TimeoutError(), refusal(10071), api={"INFO": [info(5)], "MSG": [found(5, "mine")]}
    )
    assert await put(script, **expecting(4)) == 5


async def test_a_wrong_last_sequence_of_anothers_making_is_told() -> None:
    assert (
        await put(
            Script(
                TimeoutError(), refusal(10071), api={"INFO": [info(5)], "MSG": [found(5, "theirs")]}
            ),
            **expecting(4),
        )
        is None
    )
    assert await put(Script(refusal(10071), api={"INFO": [info(9)]}), **expecting(4)) is None
    # the broker has lost something
    assert await put(Script(refusal(10071), api={"INFO": [info(3)]}), **expecting(4)) is None


async def test_the_same_for_a_key() -> None:
    revision = {EXPECTED_LAST_KEY_SEQ: "4"}
    script = Script(TimeoutError(), refusal(10164), Answer(seq=6), api={"MSG": [found(4, "older")]})
    assert await put(script, **revision) == 6
    assert await put(Script(refusal(10071), api={"MSG": [found(5, "theirs")]}), **revision) is None
    missing = refusal(NO_MESSAGE, 404)
    assert (
        await put(
            Script(refusal(10071), Answer(seq=1), api={"MSG": [missing]}),
            **{EXPECTED_LAST_KEY_SEQ: "0"},
        )
        == 1
    )


async def test_a_stream_without_a_leader_is_waited_for_and_one_that_is_gone_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "NO_STREAM_AFTER_S", 0.0)
    nobody = NoResponders("s")
    assert await put(Script(nobody, nobody, Answer(seq=3), api={"INFO": [info(2), info(2)]})) == 3
    with pytest.raises(LostState, match="has no stream for s; it was purged, or lost its store"):
        await put(Script(nobody, api={"INFO": [refusal(NO_STREAM, 404)]}))


def test_several_addresses() -> None:
    assert split_servers("nats://a:1,b:2, tls://c") == ["nats://a:1", "nats://b:2", "tls://c"]
    assert without_passwords("nats://u:p@a:1,nats://u:p@b:2") == "a:1,b:2"
    with pytest.raises(BrokerUnreachable, match="a:1,b:x is not a broker address"):
        split_servers("nats://u:p@a:1,u:p@b:x")
