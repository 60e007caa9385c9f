"""Which keys a folder of keys accepts, and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker.errors import ConfigError
from broker.identity import key_folder
from broker.identity.key_folder import AUTHORIZATION, BrokerUser, KeyFolder
from broker.identity.keys import Key

KEY = Key.generate()


def test_revoked_key_in_a_file_of_another_name(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    keys = KeyFolder(folder)
    user = BrokerUser(KEY.public, "envhub", "quick", "guest")
    keys.admit(user)
    users = folder / "users"
    (users / f"{KEY.public}.json").rename(users / "copy.json")
    keys.revoke(user)
    assert keys.users() == []
    assert KEY.public not in (folder / AUTHORIZATION).read_text()


@pytest.mark.parametrize("key", ["../operator", "", "a/b", "U" * 65])
def test_key_that_names_no_file_of_its_folder(tmp_path: Path, key: str) -> None:
    keys = KeyFolder(tmp_path / "keys")
    outside = tmp_path / "keys" / "operator.json"
    outside.write_text("mine")
    with pytest.raises(ConfigError, match="public key"):
        keys.admit(BrokerUser(key, "envhub", "quick"))
    keys.revoke(BrokerUser(key, "envhub", "quick"))
    assert outside.read_text() == "mine"


class Killed(BaseException):
    """Ends a process in the middle of its work."""


class ServerDouble:
    """A server that notes what it is told, and a process that may be killed while it tells it."""

    def __init__(self, keys: KeyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys = keys
        self.accepted = ""
        self.kills = 0
        monkeypatch.setattr(key_folder, "reload_server", self.reload)
        keys.operator()
        self.read()
        keys.serve(os.getpid(), keys.path / "log", keys.version())

    def read(self) -> None:
        """Read the configuration."""
        self.accepted = (self.keys.path / AUTHORIZATION).read_text()

    def reload(self, pid: int, server_log: Path, *, has_new_accounts: bool) -> None:
        """As ``reload_server``; the first ``kills`` calls end their process before the server
        reads.
        """
        assert (pid, server_log) == (os.getpid(), self.keys.path / "log")
        if self.kills:
            self.kills -= 1
            raise Killed
        self.read()


def test_a_process_killed_while_it_makes_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next life has a key that the server accepts, with nothing else to tell the server."""
    server = ServerDouble(KeyFolder(tmp_path / "keys"), monkeypatch)
    server.kills = 1
    with pytest.raises(Killed):
        server.keys.role("learner", "quick")
    assert server.keys.role("learner", "quick").public in server.accepted


def test_a_process_killed_while_it_admits_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's own host tells it, once."""
    server = ServerDouble(KeyFolder(tmp_path / "keys"), monkeypatch)
    server.kills = 1
    with pytest.raises(Killed):
        server.keys.admit(BrokerUser(KEY.public, "envhub", "quick", "guest"))
    assert KEY.public not in server.accepted
    server.keys.follow(os.getpid())
    assert KEY.public in server.accepted
    server.kills = 1  # not told again
    server.keys.follow(os.getpid())


def test_a_key_made_while_a_server_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has read its configuration, and nobody knows yet whom to tell."""
    server = ServerDouble(KeyFolder(tmp_path / "keys"), monkeypatch)
    server.keys.path.joinpath(
        "servers", next(iter(os.listdir(server.keys.path / "servers")))
    ).unlink()
    version = server.keys.version()
    key = server.keys.role("learner", "quick")
    assert key.public not in server.accepted
    server.keys.serve(os.getpid(), server.keys.path / "log", version)
    server.keys.follow(os.getpid())
    assert key.public in server.accepted
