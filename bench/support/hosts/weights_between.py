"""A learner's and a server's end of the weight channel on two hosts, which measure rounds in
lockstep.

    python -m bench.support.hosts.weights_between RANK < OPTIONS

RANK 0 is the learner, 1 the server. OPTIONS is one line of JSON. The learner prints where it serves
the rendezvous, then what it measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from bench.support.hosts.network_namespaces import HostNetwork
from bench.support.rendezvous import NAME, MeetingPlace
from bench.support.weights_ends import SETTINGS, ChannelEnd, EndProcess, large_model
from broker.weights import fp8
from broker.weights.memory.staging import FlatBuffer, plan_of
from broker.weights.rendezvous.board_client import KeyPair, RendezvousAddress
from broker.weights.rendezvous.board_server import BoardServer

CHANGED: Final = 0.03  # share of the elements that differ from the version before
TIMEOUT_S: Final = 120.0
LAST_REPLY_S: Final = 1.0  # until the other end has heard that both are done


def measure_carriers(end: EndProcess) -> dict[str, Any]:
    """Measure a bare gloo broadcast, and transfers of a packed version by gloo and by CURVE."""
    model = large_model(end.options.layers)
    buffer = FlatBuffer(plan_of(model, end.options.bucket_mib)).buffer
    calls: list[Callable[[int], None]] = [lambda pair: end.broadcast([buffer])]
    exact = True
    for backend in ("gloo", "curve"):
        channel = end.channel(model, shared=False, backend=backend)
        channel.whole(0)
        exact = exact and _holds(channel, model)
        calls.append(lambda pair, channel=channel: channel.transfer(0))  # type: ignore[misc]
    return {
        "pairs": end.pairs(*calls),
        "size_bytes": buffer.numel(),
        "exact": end.agreed("carriers", exact),
    }


def measure_slow(end: EndProcess) -> dict[str, Any]:
    """Measure transfers of a bfloat16 model: all of it, what has changed, and all of it as FP8."""
    truth = {name: tensor.bfloat16() for name, tensor in large_model(end.options.layers).items()}
    generator = torch.Generator().manual_seed(1)
    backend = end.options.backend
    exact = True
    full = end.channel(truth, shared=False, kept=False, backend=backend)
    changes = end.channel(truth, shared=False, kept=False, delta=True, backend=backend)
    quantized = end.channel(truth, shared=False, kept=False, dtype=fp8.NAME, backend=backend)
    end.options.pairs = end.options.slow_pairs

    def send(channel: ChannelEnd, version: int) -> None:
        channel.transfer(version)

    _stage(changes, 0, truth)
    changes.transfer(0)
    rounds = []
    sent = []
    for version in range(1, end.options.slow_pairs + 1):
        for tensor in truth.values():
            bits = tensor.view(torch.int16)
            bits[torch.rand(tensor.shape, generator=generator) < CHANGED] ^= 0x155
        for channel in (full, changes, quantized):
            _stage(channel, version, truth)
        rounds.append(
            [end.timed(partial(send, channel, version)) for channel in (full, changes, quantized)]
        )
        sent.append([full.sent_bytes, changes.sent_bytes, quantized.sent_bytes])
        exact = exact and _holds(full, truth) and _holds(changes, truth)
    return {"rounds": rounds, "sent_bytes": sent, "exact": end.agreed("slow", exact)}


def _stage(channel: ChannelEnd, version: int, model: dict[str, torch.Tensor]) -> None:
    """Pack and digest a version at the learner, before the time runs."""
    if channel.staging is not None:
        channel.staging.write(version, model)
        channel.staging.digest(version)


def _holds(channel: ChannelEnd, model: dict[str, torch.Tensor]) -> bool:
    """Return whether the server's end received the model bit by bit; true at the learner's."""
    bits = torch.uint8
    return channel.rank == 0 or all(
        torch.equal(channel.flat.tensors[name].view(bits), tensor.view(bits))
        for name, tensor in model.items()
    )


def measure_between(
    network: HostNetwork, addresses: tuple[str, str], what: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Run both ends on the first two hosts of a network and return what the learner measured.

    Args:
        addresses: of the learner's and the server's host.
        what: ``carriers`` or ``slow``.
        options: layers, bucket_mib, pairs, slow_pairs, backend.

    Raises:
        RuntimeError: if an end fails.
    """
    keys = KeyPair.make()
    common = {**options, "what": what, "public": keys.public, "learner": addresses[0]}
    learner = _start(network, 0, {**common, "host": addresses[0]})
    place = json.loads(learner.stdout.readline() or "{}")
    server = _start(
        network, 1, {**common, **place, "host": addresses[1], "secret": keys.secret.decode()}
    )
    measured, _ = learner.communicate(timeout=600)
    server.wait(60)
    server.stdout.close()
    if learner.returncode or server.returncode:
        raise RuntimeError(f"the ends exited with {learner.returncode} and {server.returncode}")
    found: dict[str, Any] = json.loads(measured)
    return found


def _start(network: HostNetwork, host: int, options: dict[str, Any]) -> Any:
    command = [*network.inside(host), sys.executable, "-m", __name__, str(host)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None, "a pipe was asked for"
    process.stdin.write(json.dumps(options) + "\n")
    process.stdin.close()
    process.stdin = None
    return process


def main() -> None:
    """Run one end."""
    rank = int(sys.argv[1])
    options = argparse.Namespace(**json.loads(sys.stdin.readline()))
    settings = SETTINGS.__class__(
        host=options.host, timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S
    )
    store = None
    if rank == 0:
        server = BoardServer(options.host)
        server.admit(NAME, options.public)
        options.port = server.port
        options.key = server.key
        options.secret = ""
        print(json.dumps({"port": server.port, "key": server.key}), flush=True)
        store = server.store(TIMEOUT_S)
    address = RendezvousAddress(options.learner, options.port, options.key)
    place = MeetingPlace(address, KeyPair(options.public, options.secret.encode()))
    end = EndProcess(rank, place, options, store, settings)
    measured = measure_carriers(end) if options.what == "carriers" else measure_slow(end)
    end.meet()
    if rank == 0:
        print(json.dumps(measured), flush=True)
        time.sleep(LAST_REPLY_S)


if __name__ == "__main__":
    main()
