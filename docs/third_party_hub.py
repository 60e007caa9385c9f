"""An environment hub that shares no code with rlearner: nats-py, nkeys, pyzmq and msgpack, as
docs/wire.md describes.

    python docs/third_party_hub.py nats://127.0.0.1:4222 RUN DOMAIN TOKEN

TOKEN is a file that `rlearner invite envhub --run RUN --out TOKEN` wrote.

It plays a made-up game, one turn long: the reward is the share of even numbers among the sampled
tokens.
"""

import array
import asyncio
import base64
import contextlib
import json
import os
import socket
import sys
import time
import uuid

import msgpack
import nats
import nkeys
import zmq
import zmq.asyncio
from nats.js.errors import KeyNotFoundError, NotFoundError

URL, RUN, DOMAIN = sys.argv[1:4]
with open(sys.argv[4], encoding="utf-8") as file:
    TOKEN = json.load(file)
ID = f"third-party-{uuid.uuid4().hex[:8]}"
CURVE = zmq.curve_keypair()
AT_ONCE, MAX_TOKENS = 4, 4  # tickets in hand; tokens of an answer


def column(dtype, values):  # little-endian, as these machines are
    return {
        "dtype": dtype,
        "data": array.array({"<i4": "i", "<f4": "f", "|u1": "B"}[dtype], values).tobytes(),
    }


def values(column):
    return array.array({"<i4": "i", "<f4": "f"}[column["dtype"]], column["data"]).tolist()


class Servers:
    """Rollout servers by their heartbeats, and a DEALER socket to each that is used."""

    def __init__(self):
        self.heard, self.sockets, self.replies, self.reading = {}, {}, {}, set()
        self.context = zmq.asyncio.Context()

    async def on_beat(self, message):
        self.heard[message.subject] = (time.monotonic(), msgpack.unpackb(message.data))

    # the least loaded one that is alive; beats come at least every two seconds
    async def find(self):
        while True:
            live = [one for at, one in self.heard.values() if time.monotonic() - at < 5]
            wanted = {"state": "serving", "policy": "actor", "channel": "zmq"}
            able = [one for one in live if wanted.items() <= one.items()]
            if able:
                return min(able, key=lambda one: one["running"] + one["waiting"])
            await asyncio.sleep(0.2)

    async def ask(self, request, within_s):
        address, token = (await self.find())["address"], uuid.uuid4().hex
        if address not in self.sockets:
            endpoint, *words = address.split(" ")  # tcp://10.0.0.2:41234 key=... host=... local=...
            dealer = self.sockets[address] = self.context.socket(zmq.DEALER)
            dealer.curve_serverkey = dict(word.split("=", 1) for word in words)["key"].encode()
            # admitted because our presence has the first
            dealer.curve_publickey, dealer.curve_secretkey = CURVE
            dealer.connect(endpoint)
            self.reading.add(asyncio.create_task(self.receive(self.sockets[address])))
        self.replies[token] = asyncio.get_running_loop().create_future()
        try:
            # a bundle of one
            await self.sockets[address].send(msgpack.packb([[token, msgpack.packb(request)]]))
            return await asyncio.wait_for(self.replies[token], within_s)
        finally:
            del self.replies[token]

    async def receive(self, dealer):
        while True:
            for token, message in msgpack.unpackb(await dealer.recv()):
                if token in self.replies and not self.replies[token].done():
                    self.replies[token].set_result(msgpack.unpackb(message))


async def episode(servers, ticket, number):
    prompt, attempt = [2 + ticket["task_index"] % 8] * 3, 0
    while True:
        name = f"{ID}.{ticket['number']}.{number}.{attempt}"
        sampling = {"max_tokens": MAX_TOKENS, "temperature": 1.0}
        request = {
            "type": "GenerateRequest",
            "request_id": name,
            "conversation_id": name,
            "deadline_s": 30.0,
        }
        request |= {
            "token_ids": column("<i4", prompt),
            "sampling": sampling,
            "min_version": ticket["min_version"],
        }
        try:
            reply = await servers.ask(request, within_s=35.0)
        except TimeoutError:
            reply = {"finish_reason": "error"}
        if reply["finish_reason"] in ("stop", "length"):
            break
        attempt += 1  # another server, or the same one later
        await asyncio.sleep(0.5)
    sampled, start = values(reply["token_ids"]), len(prompt)
    end, reward = start + len(sampled), sum(token % 2 == 0 for token in sampled) / len(sampled)
    turn = {"start": start, "end": end, "reward": reward, "valid": True}
    turn |= {"finish_reason": reply["finish_reason"], "server": reply["server"]}
    return {
        "episode": number,
        "token_ids": column("<i4", prompt + sampled),
        "loss_mask": column("|u1", [0] * start + [1] * len(sampled)),
        "logprobs": column("<f4", [0.0] * start + values(reply["logprobs"])),
        "version_runs": reply["version_runs"],
        "turns": [turn],
        "reward": reward,
        "reward_parts": {"env": reward},
        "success": reward == 1.0,
        "end": "terminated",
    }


async def play(jetstream, servers, message):
    async def mark():  # every 2 s; after 6 s without, the ticket goes to another hub
        while True:
            await asyncio.sleep(2)
            await message.in_progress()

    ticket, marking = msgpack.unpackb(message.data), asyncio.create_task(mark())
    common = {"ticket": ticket["number"], "domain": ticket["domain"]}
    try:
        work = [episode(servers, ticket, number) for number in range(ticket["group_size"])]
        trajectories = await asyncio.wait_for(asyncio.gather(*work), ticket["deadline_s"])
        record = {
            "type": "Group",
            **common,
            "task_index": ticket["task_index"],
            "min_version": ticket["min_version"],
        }
        record |= {
            "hub": ID,
            "deliveries": message.metadata.num_delivered,
            "pools": [],
            "trajectories": trajectories,
        }
    except TimeoutError:
        detail = "the group was not complete in time"
        record = {"type": "Closed", **common, "reason": "deadline", "detail": detail, "by": ID}
    finally:
        marking.cancel()
    headers = {"Rl-Ticket": str(ticket["number"]), "Nats-Msg-Id": f"tickets-{ticket['number']}"}
    # stored first,
    await jetstream.publish(f"rl.{RUN}.samples", msgpack.packb(record), headers=headers)
    await message.ack_sync()  # acknowledged afterwards


async def announce(client, members, playing):
    presence = {
        "type": "Presence",
        "role": "envhub",
        "id": ID,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    presence |= {"state": "serving", "slots": AT_ONCE, "serves": [DOMAIN], "key": CURVE[0].decode()}
    # with the defaults of what is left out
    said = [RUN, "envhub", ID, "", "", "actor", [DOMAIN], presence["key"]]
    content = b"rlearner statement\n" + json.dumps(said, separators=(",", ":")).encode()
    signature = nkeys.from_seed(bytearray(TOKEN["seed"].encode())).sign(content)
    presence["voucher"] = f"{TOKEN['certificate']}.{base64.b64encode(signature).decode()}"
    for second in range(1 << 62):
        body = msgpack.packb({**presence, "running": len(playing)})
        await client.publish(f"rl.{RUN}.presence.envhub.{ID}", body)
        if second % 20 == 0:
            await members.put(f"{RUN}.envhub.{ID}", body)
        await asyncio.sleep(1)


async def main():
    inbox = f"_INBOX.envhub.{RUN}.{TOKEN['name']}"  # the only one that this key may read
    client = await nats.connect(
        URL, nkeys_seed_str=TOKEN["seed"], inbox_prefix=inbox, max_reconnect_attempts=-1
    )
    jetstream, servers, playing = client.jetstream(), Servers(), set()
    control, members = (
        await jetstream.key_value(f"rl_{RUN}_control"),
        await jetstream.key_value(f"rl_{RUN}_members"),
    )
    await client.subscribe(f"rl.{RUN}.presence.rollout.*", cb=servers.on_beat)
    announcing = asyncio.create_task(announce(client, members, playing))
    while True:
        with contextlib.suppress(NotFoundError):  # until the learner has created it
            await jetstream.consumer_info(f"rl_{RUN}_tickets", DOMAIN)
            break
        await asyncio.sleep(0.5)
    stream, prefix = f"rl_{RUN}_tickets", f"{inbox}.".encode()
    queue = await jetstream.pull_subscribe_bind(DOMAIN, stream=stream, inbox_prefix=prefix)
    wanted = "running"
    while True:
        with contextlib.suppress(KeyNotFoundError):  # no learner has taken the run yet
            wanted = msgpack.unpackb((await control.get(RUN)).value)["state"]
        if wanted in ("stopped", "draining"):
            break
        if wanted == "paused" or len(playing) == AT_ONCE:
            await asyncio.sleep(0.2)
        else:
            with contextlib.suppress(TimeoutError):
                for message in await queue.fetch(AT_ONCE - len(playing), timeout=1):
                    playing.add(asyncio.create_task(play(jetstream, servers, message)))
        for done in [one for one in playing if one.done()]:
            playing.discard(done)
            done.result()  # an error ends this hub; its tickets go to another one
    await asyncio.gather(*playing)
    announcing.cancel()
    await members.delete(f"{RUN}.envhub.{ID}")
    await client.close()


asyncio.run(main())
