"""A rank that obeys, and what it says when something goes wrong: nothing that rank 0 says, too."""

from __future__ import annotations

import logging
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from broker.errors import ConfigError
from broker.system import logs
from learner.backends.ranks import follower
from learner.backends.ranks.link import RankLink, SocketFrames
from learner.backends.ranks.messages import BuildCommand, DiscardCommand, SumsReply


class Failing:
    """Answers once, then fails as told."""

    error: Exception = RuntimeError()
    at_build = False
    parted = False

    @classmethod
    def follow(cls, build: BuildCommand, _: Any) -> Failing:
        assert build.rank == 2
        if cls.at_build:
            raise cls.error
        return cls()

    def __init__(self) -> None:
        self.done = 0

    def obey(self, *_: object) -> SumsReply:
        self.done += 1
        if self.done == 2:
            raise self.error
        return SumsReply([{"n": 1.0}])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(follower, "resolve", lambda *_: Failing)
    monkeypatch.setattr(logs, "configure", lambda: None)
    monkeypatch.setattr(logs, "identify", lambda **_: None)

    def start(error: Exception, *, at_build: bool = False) -> RankLink:
        monkeypatch.setattr(Failing, "error", error)
        monkeypatch.setattr(Failing, "at_build", at_build)
        ours, theirs = socket.socketpair()
        link = RankLink(SocketFrames(ours))
        found.append(theirs.detach())
        link.send(BuildCommand("any:Any", 2, 3, str(tmp_path / "store"), {}))
        if not at_build:
            link.send(DiscardCommand())
            link.send(DiscardCommand())
        return link

    found: list[int] = []
    return start, found


def test_a_lost_peer_is_rank_0s_to_report(started: Any) -> None:
    start, descriptors = started
    link = start(RuntimeError("Connection closed by peer [127.0.0.1]:1"))
    rank_0 = threading.Timer(0.2, link.close)  # it ends as soon as it notices
    rank_0.start()
    assert follower.main(descriptors[0]) == 0
    rank_0.join()


def test_what_went_wrong_here_alone_is_raised(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_FAREWELL_S", 0.1)
    start, descriptors = started
    link = start(RuntimeError("CUDA out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        follower.main(descriptors[0])
    assert link.receive_reply() == SumsReply([{"n": 1.0}])
    link.close()


@pytest.mark.parametrize("alone", [False, True])
def test_wrong_settings_are_said_once(
    started: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, alone: bool
) -> None:
    monkeypatch.setattr(follower, "_FAREWELL_S", 0.1 if alone else 30.0)
    start, descriptors = started
    link = start(ConfigError("model.path", "m", "another"), at_build=True)
    if not alone:
        link.close()  # rank 0 has met the same
    with caplog.at_level(logging.ERROR):
        assert follower.main(descriptors[0]) == (2 if alone else 0)
    assert caplog.messages == (["model.path: 'm' is not allowed; another"] if alone else [])
    link.close()
