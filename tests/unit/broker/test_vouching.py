"""Which parts of a presence its voucher proves."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from broker.contract import wire
from broker.errors import WireError
from broker.identity import vouchers
from broker.identity.keys import Key
from broker.runtime.vouching import PresenceSigner, PresenceVerifier

OWNER = Key.generate()
REFUSAL = wire.OfferRefusal(
    epoch=2, version=5, kind="layout", difference="x is in the offer but not here"
)


class Login:
    """The keys of a broker's owner."""

    def vouch(self, run: str, statement: bytes) -> str:
        return vouchers.make_voucher(OWNER, statement)

    def check_voucher(self, run: str, role: str, statement: bytes, voucher: str) -> None:
        vouchers.check_voucher(OWNER.public, run, role, statement, voucher)


class Bus:
    run = "demo"

    def __init__(self) -> None:
        self.link: Any = self
        self.login = Login()


def presence(**fields: Any) -> wire.Presence:
    return wire.Presence(
        **({"role": "rollout", "id": "r1", "host": "h", "pid": 1, "state": "failed"} | fields)  # type: ignore[arg-type]
    )


def accepts(message: wire.Presence) -> bool:
    return PresenceVerifier(Bus(), "demo").accepts(message, "rollout.r1")  # type: ignore[arg-type]


def test_refusal_of_an_offer_is_signed() -> None:
    signer = PresenceSigner(Bus())  # type: ignore[arg-type]
    plain, refusing = signer.signed(presence()), signer.signed(presence(refusal=REFUSAL))
    assert accepts(plain)
    assert accepts(refusing)
    assert not accepts(msgspec.structs.replace(plain, refusal=REFUSAL))  # nobody else can say it
    for change in ({"epoch": 3}, {"version": 6}, {"kind": "logprobs"}):
        other = msgspec.structs.replace(REFUSAL, **change)
        assert not accepts(msgspec.structs.replace(refusing, refusal=other))
    again = msgspec.structs.replace(REFUSAL, loads=9, difference="another text")
    assert accepts(msgspec.structs.replace(refusing, refusal=again))  # which decides nothing


def test_statement_without_refusal_is_as_documented() -> None:
    statement = b'["demo","rollout","r1","","","actor",[],""]'
    signed = PresenceSigner(Bus()).signed(presence())  # type: ignore[arg-type]
    vouchers.check_voucher(OWNER.public, "demo", "rollout", statement, signed.voucher)
    with pytest.raises(WireError):
        vouchers.check_voucher(OWNER.public, "demo", "rollout", statement + b" ", signed.voucher)
