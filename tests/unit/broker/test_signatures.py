"""Which values count as signed by the owner of a run."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import UserError, WireError
from broker.identity.keys import Key
from broker.identity.login import Login
from broker.identity.signatures import HEADER, sign_value, verify_stamp
from broker.identity.trust import is_trusted, trust_owner

OWNER, OTHER = Key.generate(), Key.generate()
SUBJECT = "$KV.rl_demo_runs.demo"


@given(data=st.binary(max_size=100), above=st.integers(0, 1 << 40))
def test_what_the_owner_signed_is_valid(data: bytes, above: int) -> None:
    assert (
        verify_stamp(OWNER.public, SUBJECT, sign_value(OWNER, SUBJECT, data, above=above), data)
        > above
    )


def test_a_later_value_has_a_larger_stamp_even_if_the_clock_went_back() -> None:
    future = 10**14
    first = verify_stamp(
        OWNER.public, SUBJECT, sign_value(OWNER, SUBJECT, b"x", above=future), b"x"
    )
    assert first == future + 1
    assert (
        verify_stamp(OWNER.public, SUBJECT, sign_value(OWNER, SUBJECT, b"y", above=first), b"y")
        == future + 2
    )


GOOD = sign_value(OWNER, SUBJECT, b"value")[HEADER]
NUMBER, _, SIGNATURE = GOOD.partition(".")


@pytest.mark.parametrize(
    ("owner", "subject", "header", "data"),
    [
        (OTHER.public, SUBJECT, GOOD, b"value"),
        ("", SUBJECT, GOOD, b"value"),
        ("no key", SUBJECT, GOOD, b"value"),
        (OWNER.public, SUBJECT.replace("demo", "omed"), GOOD, b"value"),
        (OWNER.public, SUBJECT, GOOD, b"value2"),
        (OWNER.public, SUBJECT, GOOD, b""),
        (OWNER.public, SUBJECT, f"{int(NUMBER) + 1}.{SIGNATURE}", b"value"),
        (OWNER.public, SUBJECT, f"-{GOOD}", b"value"),
        (OWNER.public, SUBJECT, f"{'9' * 5000}.{SIGNATURE}", b"value"),
        (OWNER.public, SUBJECT, f"٣.{SIGNATURE}", b"value"),
        (OWNER.public, SUBJECT, NUMBER, b"value"),
        (OWNER.public, SUBJECT, f"{NUMBER}.", b"value"),
        (OWNER.public, SUBJECT, f"{NUMBER}.ä", b"value"),
        (OWNER.public, SUBJECT, f"{NUMBER}.{base64.b64encode(bytes(64)).decode()}", b"value"),
        (OWNER.public, SUBJECT, "", b"value"),
    ],
    ids=[
        "another owner",
        "no owner",
        "no key",
        "another subject",
        "other bytes",
        "fewer bytes",
        "a later time",
        "a negative time",
        "a huge time",
        "another script",
        "no signature",
        "an empty signature",
        "no base64",
        "zeros",
        "nothing",
    ],
)
def test_anything_else_is_not(owner: str, subject: str, header: str, data: bytes) -> None:
    assert verify_stamp(OWNER.public, SUBJECT, {HEADER: GOOD}, b"value") == int(NUMBER)
    with pytest.raises(WireError, match="the owner of the run did not sign it"):
        verify_stamp(owner, subject, {HEADER: header}, data)


def test_a_value_without_headers_is_not_signed() -> None:
    with pytest.raises(WireError, match="did not sign"):
        verify_stamp(OWNER.public, SUBJECT, None, b"value")


def test_a_broker_without_keys_has_no_signatures() -> None:
    login = Login()
    assert login.sign("demo", SUBJECT, b"x") == {}
    assert login.stamp("demo", SUBJECT, None, b"x") == 0


def test_a_token_verifies_and_cannot_sign() -> None:
    login = Login("envhub", "demo", "far", OTHER, OWNER.public)
    assert login.sign("demo", SUBJECT, b"x") == {}
    assert login.stamp("demo", SUBJECT, sign_value(OWNER, SUBJECT, b"x"), b"x") > 0
    with pytest.raises(WireError, match="did not sign"):
        login.stamp("demo", SUBJECT, {}, b"x")


def test_trust_is_remembered_for_one_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert not is_trusted(OWNER.public)
    trust_owner(OWNER.public)
    trust_owner(OWNER.public)
    assert is_trusted(OWNER.public)
    assert not is_trusted(OTHER.public)
    file = tmp_path / "rlearner" / "trusted_owners"
    assert file.read_text() == f"{OWNER.public}\n"
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o622)
    with pytest.raises(
        UserError, match=r"trusted_owners could be written by other users; remove it$"
    ):
        is_trusted(OWNER.public)
    file.chmod(0o600)
    os.chown(file, 65534, 65534)
    with pytest.raises(UserError, match="could be written by other users"):
        is_trusted(OWNER.public)
