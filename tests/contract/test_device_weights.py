"""Weights by a device's memory between real processes: who sees the device reads it there, the others get them by gloo; the learner is
killed, a server comes late, sleeps while what it reads is overwritten, and is killed. All but the device's own few calls is what runs with
a GPU."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from memfd_device import Memfd
from test_shared_weights import SHARED, loaded
from test_weights import Child, Spawn, offer, ready, spawn  # noqa: F401  # fixture
from waits import until
from weights_model import make_tensors

from broker.jetstream import Bus
from broker.weights.send import Sender
from broker.weights.staging import plan_of


def mapped(child: Child) -> tuple[int, int]:
    """Maps that it has of a learner's words, and of a device's memory."""
    lines = Path(f"/proc/{child.pid}/maps").read_text().splitlines()
    return sum("rlearner-weights" in line for line in lines), sum("rlearner-device" in line for line in lines)


async def test_a_run_on_one_device(bus: Bus, spawn: Spawn) -> None:  # noqa: F811
    near, hidden = await spawn("r1", visible=["left"]), await spawn("r2", visible=["right"])
    learner = await spawn("learner", script="weights_learner.py", at_byte=5 << 20, do="kill", on_device=True)
    assert len(await loaded(0, near, hidden)) == 1
    assert (mapped(near), mapped(hidden)) == ((1, 1), (0, 0))
    await learner.hears(event="kill")  # in the middle of version 1
    await until(lambda: mapped(near) == (0, 0))  # what it had is let go of; nothing of version 1 was loaded

    sender = Sender(bus, plan_of(make_tensors(0), 1), epoch=2, settings=SHARED, memory=Memfd())
    await sender.start()
    try:
        assert sender._staging._sides[0].flat.buffer.data_ptr() == sender._segment.buffer(0).data_ptr()
        expected = offer(sender, 0)
        assert {(await child.hears(event="loaded", epoch=2))["content"] for child in (near, hidden)} == {expected}
        await until(lambda: "weights/shared" in sender.metrics())
        assert (sender.metrics()["weights/receivers"], sender.metrics()["weights/shared"]) == (2, 1)

        late = await spawn("r3", visible=["left", "right"], at_bucket=6, do="stop", then_kill_at=45)
        await late.hears(event="stop")  # in the middle of version 0, which nobody packs any more
        await until(lambda: sender.metrics()["weights/failures"] == 1)  # by the timeout alone, for nobody says who is there
        for version in (1, 2, 3):  # both buffers are written again
            expected = offer(sender, version)
            assert await loaded(version, near, hidden) == {expected}
        os.kill(late.pid, signal.SIGCONT)
        assert await loaded(3, late) == {expected}
        assert [said["event"] for said in late.said] == ["ready", "stop", "error", "loaded"]
        assert "overwritten while it was read" in late.said[2]["reason"] or "the learner stopped it" in late.said[2]["reason"]
        assert mapped(late) == (1, 1)

        expected = offer(sender, 4)
        await late.hears(event="kill")  # in the middle of version 4
        assert await loaded(4, near, hidden) == {expected}
        expected = offer(sender, 5)
        assert await loaded(5, near, hidden) == {expected}
        assert [said for said in (*near.said, *hidden.said) if said["event"] == "error" and "epoch 2" in said["reason"]] == []
    finally:
        await sender.close()
