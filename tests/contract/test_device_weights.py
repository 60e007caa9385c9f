"""Weights by a device's memory between real processes: who sees the device reads it there, the
others get them by gloo; the learner is killed, a server comes late, sleeps while what it reads is
overwritten, and is killed. All but the device's own few calls is what runs with a GPU."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from memfd_device import Memfd
from test_shared_weights import SHARED, loaded
from test_weights import Child, Spawn, offer, spawn  # noqa: F401  # fixture
from torch import Tensor
from waits import until
from weights_model import content, make_tensors, probe_logprobs

from broker.contract import wire
from broker.jetstream.bus import Bus
from broker.weights.memory.staging import plan_of
from broker.weights.probe import check_probe
from broker.weights.receiver.receive import WeightReceiver
from broker.weights.sender.send import WeightSender


def mapped(child: Child) -> tuple[int, int]:
    """Maps that it has of a learner's words, and of a device's memory."""
    lines = Path(f"/proc/{child.pid}/maps").read_text().splitlines()
    return sum("rlearner-weights" in line for line in lines), sum(
        "rlearner-device" in line for line in lines
    )


class Beside:
    """A server in this process, which does not see the learner's unit."""

    def __init__(self, bus: Bus) -> None:
        self._held = make_tensors(0)
        self.loaded: dict[tuple[int, int], str] = {}
        self.receiver = WeightReceiver(
            bus,
            "r2",
            self._held,
            self._load,
            bucket_mib=1,
            settings=SHARED,
            memory=Memfd(visible=["right"]),
        )

    async def _load(self, tensors: Mapping[str, Tensor], offered: wire.WeightsOffer) -> None:
        for name, tensor in tensors.items():
            self._held[name].copy_(tensor)
        check_probe(offered.probe, probe_logprobs(self._held))
        self.loaded[offered.epoch, offered.version] = content(self._held)


async def test_a_run_on_one_device(
    bus: Bus,
    spawn: Spawn,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    hidden = Beside(bus)
    await hidden.receiver.start()
    near = await spawn("r1", visible=["left"])
    learner = await spawn(
        "learner", script="weights_learner.py", at_byte=5 << 20, do="kill", on_device=True
    )

    async def both(epoch: int, version: int) -> set[str]:
        """What the two of them hold of a version."""
        there = await near.hears(event="loaded", epoch=epoch, version=version)
        await until(lambda: (epoch, version) in hidden.loaded)
        return {there["content"], hidden.loaded[epoch, version]}

    assert len(await both(1, 0)) == 1
    assert mapped(near) == (1, 1)
    await learner.hears(event="kill")  # in the middle of version 1
    await until(lambda: mapped(near) == (0, 0))  # what it had is let go of

    sender = WeightSender(
        bus, plan_of(make_tensors(0), 1), epoch=2, settings=SHARED, memory=Memfd()
    )
    await sender.start()
    try:
        expected = offer(sender, 0)
        assert await both(2, 0) == {expected}
        await until(lambda: "weights/shared" in sender.metrics())
        assert (sender.metrics()["weights/receivers"], sender.metrics()["weights/shared"]) == (2, 1)
        why = (
            "the learner's memory cannot be read from here (unit left------------ is hidden from this process), so "
            "it sends them"
        )
        assert f"weights: {why}" in caplog.messages

        late = await spawn("r3", visible=["left", "right"], at_bucket=6, do="stop", then_kill_at=45)
        await late.hears(event="stop")  # in the middle of version 0, which nobody packs any more
        # by the timeout alone, for nobody says who is there
        await until(lambda: sender.metrics()["weights/failures"] == 1)
        for version in (1, 2):  # both buffers are written again
            expected = offer(sender, version)
            assert await both(2, version) == {expected}
        os.kill(late.pid, signal.SIGCONT)
        assert await loaded(2, late) == {expected}
        assert [said["event"] for said in late.said] == ["ready", "stop", "error", "loaded"]
        assert (
            "overwritten while it was read" in late.said[2]["reason"]
            or "the learner stopped it" in late.said[2]["reason"]
        )
        assert mapped(late) == (1, 1)

        for version in (3, 4):
            expected = offer(sender, version)
            if version == 3:
                await late.hears(event="kill")  # in the middle of it
            assert await both(2, version) == {expected}
        assert {said["event"] for said in near.said} <= {"ready", "loaded", "error"}
        assert [
            said
            for said in near.said
            if said["event"] == "loaded" and said["epoch"] == 1 and said["version"] != 0
        ] == []
        assert (1, 1) not in hidden.loaded
    finally:
        await hidden.receiver.close()
        await sender.close()
