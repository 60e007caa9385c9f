"""Vouchers: which statements are accepted with the owner's public key alone."""

from __future__ import annotations

import time

import pytest

from broker.errors import WireError
from broker.identity import vouchers
from broker.identity.keys import Key

OWNER, MEMBER, STRANGER = Key.generate(), Key.generate(), Key.generate()
SAID = b'["demo","envhub","hub-1"]'


def accepted(voucher: str, *, run: str = "demo", role: str = "envhub", said: bytes = SAID) -> str:
    try:
        vouchers.check_voucher(OWNER.public, run, role, said, voucher)
    except WireError as error:
        return str(error)
    return "accepted"


def certificate(expires_at: float = 0.0, *, by: Key = OWNER, role: str = "envhub") -> str:
    return vouchers.certify_key(by, "demo", role, MEMBER.public, expires_at)


def test_the_owner_may_say_anything() -> None:
    voucher = vouchers.make_voucher(OWNER, SAID)
    assert accepted(voucher) == "accepted"
    assert accepted(voucher, said=SAID + b" ") == "it has no valid voucher"
    assert accepted(vouchers.make_voucher(STRANGER, SAID)) == "it has no valid voucher"


def test_signer_is_the_join_token() -> None:
    assert vouchers.signer_of(vouchers.make_voucher(MEMBER, SAID, certificate())) == MEMBER.public
    assert vouchers.signer_of(vouchers.make_voucher(OWNER, SAID)) == vouchers.signer_of("") == ""


def test_a_certified_key_speaks_for_its_role_and_run() -> None:
    uncertified = "the owner of the run did not certify its key for the role "
    voucher = vouchers.make_voucher(MEMBER, SAID, certificate(time.time() + 60))
    assert len(voucher) <= 512
    assert accepted(voucher) == "accepted"
    assert accepted(voucher, role="rollout") == uncertified + "rollout"
    assert accepted(voucher, run="other") == uncertified + "envhub"
    assert accepted(voucher, said=b"else") == "it has no valid voucher"
    assert accepted(vouchers.make_voucher(MEMBER, SAID, certificate())) == "accepted"
    # the broker decides until when
    renewed = vouchers.make_voucher(MEMBER, SAID, certificate(time.time() - 1))
    assert accepted(renewed) == accepted(vouchers.make_voucher(MEMBER, SAID, certificate()))
    assert (
        accepted(vouchers.make_voucher(STRANGER, SAID, certificate())) == "it has no valid voucher"
    )
    assert (
        accepted(vouchers.make_voucher(MEMBER, SAID, certificate(by=STRANGER)))
        == uncertified + "envhub"
    )
    assert (
        accepted(vouchers.make_voucher(MEMBER, SAID, certificate(by=MEMBER)))
        == uncertified + "envhub"
    )


def test_a_certificate_cannot_be_changed() -> None:
    public, expires, signature = certificate(time.time() + 60).split(".")
    for changed in (
        f"{STRANGER.public}.{expires}.{signature}",
        f"{public}.{int(expires) + 1}.{signature}",
    ):
        assert accepted(vouchers.make_voucher(MEMBER, SAID, changed)).startswith(
            "the owner of the run did not certify"
        )
        assert accepted(vouchers.make_voucher(STRANGER, SAID, changed)).startswith(
            "the owner of the run did not certify"
        )


@pytest.mark.parametrize("voucher", ["", ".", "...", "a.b.c.d.e", "é", "A" * 88, "UABC.²3.aa.bb"])
def test_what_is_not_a_voucher_is_refused(voucher: str) -> None:
    assert accepted(voucher) != "accepted"


def test_a_signature_of_another_kind_is_not_one_of_a_statement() -> None:
    signature = vouchers._encode_base64(OWNER.sign(SAID))
    assert accepted(signature) == "it has no valid voucher"
