"""The part of docs/wire.md on join tokens and vouchers, with an example to recompute."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Final

import nkeys

from broker.channel import hub_admission
from broker.contract import wire
from broker.identity.keys import Key
from broker.identity.tokens import JoinToken
from broker.identity.vouchers import certify_key, make_voucher
from broker.runtime.vouching import signed_statement

RUN: Final = "lake"
ROLE: Final = "envhub"
EXPIRES_AT: Final = 1800000000
# Keys of the example: their 32 secret bytes are 0 to 31 and 32 to 63.
OWNER: Final = Key(bytes(nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER)).decode())
TOKEN_KEY: Final = Key(
    bytes(nkeys.encode_seed(bytes(range(32, 64)), nkeys.PREFIX_BYTE_USER)).decode()
)
PRESENCE: Final = wire.Presence(
    role=ROLE,
    id="hub-1",
    host="node-7",
    pid=4711,
    state="serving",
    slots=4,
    serves=["lake"],
    key="rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7",
)
MEANINGS: Final = {
    "broker": "address of the broker",
    "run": "the run",
    "role": "the only role that it admits",
    "name": "by which `rlearner revoke` ends it; the last part of the reply subjects",
    "expires_at": "unix seconds at which the broker refuses it, unless it was renewed there",
    "owner": "public key of the run's owner (nkeys), which signs what is marked `signed`",
    "certificate": "by which the owner vouches for the token's key, see below",
    "authority": "PEM of the broker's certificate authority; empty on loopback",
    "seed": "the secret half of the token's key (an nkeys seed of a user)",
}


def example_token() -> JoinToken:
    """Return the join token of the example."""
    return JoinToken(
        broker="tls://10.0.0.1:4222",
        run=RUN,
        role=ROLE,
        name="hub-a",
        expires_at=float(EXPIRES_AT),
        owner=OWNER.public,
        certificate=certify_key(OWNER, RUN, ROLE, TOKEN_KEY.public, EXPIRES_AT),
        authority="",
        seed=TOKEN_KEY.seed,
    )


def identity_section() -> str:
    """Return the section."""
    token = example_token()
    statement = signed_statement(RUN, PRESENCE)
    voucher = make_voucher(TOKEN_KEY, statement, token.certificate)
    certificate, _, signature = voucher.rpartition(".")
    rows = [f"| `{field.name}` | {MEANINGS[field.name]} |" for field in fields(JoinToken)]
    return "\n".join(
        [
            "## Join tokens and vouchers\n",
            "A join token is a file of one JSON object (mode 600):\n",
            "| field | meaning |",
            "|---|---|",
            *rows,
            "",
            "```json",
            json.dumps(asdict(token), indent=1),
            "```\n",
            "Keys and signatures are ed25519. Signatures are written in base64 with padding.\n",
            "**Certificate.** `PUBLIC.EXPIRES.SIGNATURE`: the token's public key, whole unix "
            "seconds (0: never), and\nthe owner's signature of the bytes "
            '`"rlearner certificate RUN ROLE PUBLIC EXPIRES"`, without quotes and newline. In the '
            "example:\n",
            f'    "rlearner certificate {RUN} {ROLE} {TOKEN_KEY.public} {EXPIRES_AT}"\n',
            "**Statement.** The JSON list `[run, role, id, address, channel, policy, serves, key]` "
            "in UTF-8, without spaces and\nwithout escapes of other characters than JSON requires; "
            "fields that the presence leaves out have their defaults.\nWith a `refusal`, its "
            "`epoch`, `version` and `kind` follow. Of the example's presence\n"
            '(`id` hub-1, `serves` ["lake"], a CURVE `key`):\n',
            f"    {statement.decode()}\n",
            "**Voucher.** `CERTIFICATE.SIGNATURE`: the signature, by the token's key, of "
            "`rlearner statement`, a newline (0x0A) and\nthe statement, without one at the end. "
            "In the example the signature is\n",
            f"    {signature}\n",
            "and the voucher\n",
            f"    {certificate}.\n    {signature}\n",
            "in one line. A process of the owner's user leaves out the certificate and its dot, and "
            "signs with the owner's key.\n",
            "**When a key is admitted.** The broker accepts a token's key by the time "
            "`rlearner invite` ends, and refuses a\nrevoked one by the time `rlearner revoke` ends. "
            "A rollout server admits the CURVE `key` of a hub when it hears a\npresence that "
            "announces it with a valid voucher. It listens for new keys only while one waits: a "
            "connection with an\nunknown key waits "
            f"{hub_admission.WAIT_S:g} s for that presence, then it is refused. So publish the "
            "presence before you connect, every second or\ntwo; an admission takes as long as your "
            f"next beat. At most {hub_admission.MAX_WAITING_OF_HOST} connections of one address "
            f"wait. A key that is not heard for\n{hub_admission.SILENT_S:g} s is no longer "
            "admitted, and its connections are closed.\n",
        ]
    )
