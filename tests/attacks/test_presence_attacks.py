"""A compromised process cannot announce another one: each attempt reaches the subject, and nobody
believes it.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
import zmq

from broker.channel.hub_admission import HubAdmission
from broker.contract import codec, wire
from broker.contract.streams import MEMBERS, PRESENCE
from broker.identity import tokens, vouchers
from broker.identity.keys import Key
from broker.identity.login import Login, keys_of
from broker.jetstream.bus import Bus
from broker.runtime.presence import Roster, census
from broker.runtime.vouching import PresenceSigner
from learner.reporting.status import ID

KEY = zmq.curve_keypair()[0].decode()
ADDRESS = f"tcp://10.0.0.66:4000 key={KEY} host=00"
SERVER = wire.Presence(
    role="rollout", id="evil", host="h", pid=1, state="serving", channel="zmq", address=ADDRESS
)
HUB = wire.Presence(role="envhub", id="evil", host="h", pid=1, state="serving", key=KEY)
LEARNER = wire.Presence(role="learner", id=ID, host="h", pid=1, state="serving", epoch=99)


async def believed(bus: Bus, data: bytes, name: str, *, entry: bool) -> tuple[bool, bool]:
    """Return whether forged bytes arrive where ``role.id`` announces itself, and whether a reader
    believes them.
    """
    role = name.partition(".")[0]
    roster = Roster(bus, beats=() if entry else (role,), members=(role,) if entry else ())
    await roster.start()
    target = (
        f"{MEMBERS.key_prefix(bus.run)}{bus.run}.{name}"
        if entry
        else PRESENCE.subject(bus.run, name)
    )
    arrived = asyncio.Event()

    async def note(_: object) -> None:
        arrived.set()

    subscribed = await bus.link.subscribe(target, note)
    await bus.link.send(target, data)  # as a process could that has got past the permissions
    async with asyncio.timeout(5):
        await arrived.wait()
    found = roster.alive(role) or await census(bus, bus.run, 1.0)
    await subscribed.close()
    await roster.close()
    return arrived.is_set(), bool(found)


@pytest.mark.parametrize("entry", [False, True], ids=["beat", "entry"])
@pytest.mark.parametrize("forged", [SERVER, HUB, LEARNER], ids=lambda presence: presence.role)
async def test_a_reward_hub_announces_no_other_process(
    bus: Bus, broker_url: str, forged: wire.Presence, entry: bool
) -> None:
    name = f"{forged.role}.{forged.id}"
    assert await believed(bus, codec.encode(forged), name, entry=entry) == (True, False)
    genuine = PresenceSigner(bus).signed(forged)  # the same with the owner's voucher is believed
    assert await believed(bus, codec.encode(genuine), name, entry=entry) == (True, True)


def hub_login(bus: Bus, broker_url: str) -> Login:
    return tokens.make_join_token(
        keys_of(broker_url), broker_url, "rewardhub", bus.run, expires_s=600
    ).login


@pytest.mark.parametrize(
    "means", ["its own token", "a certificate of its own", "the voucher of another process"]
)
async def test_a_vouched_hub_announces_no_server(bus: Bus, broker_url: str, means: str) -> None:
    login, signer = hub_login(bus, broker_url), PresenceSigner(bus)
    statement = msgspec.json.encode(
        [
            bus.run,
            "rollout",
            "evil",
            ADDRESS,
            SERVER.channel,
            SERVER.policy,
            SERVER.serves,
            SERVER.key,
        ]
    )
    assert login.key is not None
    if means == "its own token":
        voucher = login.vouch(bus.run, statement)
    elif means == "a certificate of its own":
        forged = vouchers.certify_key(
            login.key, bus.run, "rollout", login.key.public, time.time() + 60
        )
        voucher = vouchers.make_voucher(login.key, statement, forged)
    else:
        voucher = signer.signed(msgspec.structs.replace(SERVER, id="r1", address="")).voucher
    data = codec.encode(msgspec.structs.replace(SERVER, voucher=voucher))
    assert await believed(bus, data, "rollout.evil", entry=False) == (True, False)


async def test_a_signed_hub_that_moves_to_another_key_is_not_believed(
    bus: Bus, broker_url: str
) -> None:
    genuine = PresenceSigner(bus).signed(HUB)
    moved = msgspec.structs.replace(genuine, key=zmq.curve_keypair()[0].decode())
    assert await believed(bus, codec.encode(moved), "envhub.evil", entry=False) == (True, False)


async def test_a_forged_hub_is_not_admitted_to_a_server(bus: Bus, broker_url: str) -> None:
    admission = HubAdmission(bus, lambda key: None)
    await admission.start()

    async def admits(presence: wire.Presence) -> bool:
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        admission.ask(KEY, "10.0.0.66", answered.set_result)
        await asyncio.sleep(0.3)  # until it listens to all hubs
        await bus.link.send(PRESENCE.subject(bus.run, "envhub.evil"), codec.encode(presence))
        return await answered

    assert not await admits(HUB)
    assert not await admits(
        msgspec.structs.replace(HUB, voucher=vouchers.make_voucher(Key.generate(), b"x"))
    )
    assert await admits(PresenceSigner(bus).signed(HUB))
    await admission.close()
