"""Which keys a folder of keys accepts, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.errors import ConfigError
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
