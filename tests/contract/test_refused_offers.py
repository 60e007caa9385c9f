"""Offers that servers refuse: a wrong one ends the run, a wrong server costs only itself. Real
learners and servers.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import Popen

import learner_fleet as fleet
import pytest
from waits import LONG_S, until

from broker.contract import wire
from broker.contract.streams import CONTROL
from broker.jetstream.bus import Bus
from broker.runtime.announce import Announcer
from broker.runtime.presence import Roster
from learner.checkpoints import checkpoint
from learner.prepare import to_yaml
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

ENV = {name: value for name, value in os.environ.items() if name not in ("RL_BROKER", "RL_RUN")} | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parents[1] / "kit"),
}


class Process:
    """A command in a process of its own, which writes to a file."""

    def __init__(self, log: Path, module: str, *arguments: str) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = Popen(
                [sys.executable, "-m", module, *arguments], stdout=file, stderr=file, env=ENV
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    async def ended(self) -> int:
        await until(lambda: self.process.poll() is not None, 3 * LONG_S)
        assert "Traceback" not in self.said, self.said
        return self.process.wait()

    async def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Scene:
    """One run's learner and servers."""

    def __init__(self, bus: Bus, url: str, folder: Path) -> None:
        self.bus, self.url, self.folder = bus, url, folder
        self.processes: list[Process] = []
        self.roster = Roster(bus)

    def learner(self, **sections: dict[str, object]) -> Process:
        file = self.folder / "run.yaml"
        file.write_text(to_yaml(fleet.config(str(self.folder), self.bus.run, **sections)))
        return self._begin("learner", "rlearner.cli", "start", str(file), "--broker", self.url)

    def server(self, name: str, *options: str) -> Process:
        where = ("--broker", self.url, "--run", self.bus.run, "--id", name, "--gpus", "cpu")
        return self._begin(name, "rollout.cli", *where, *options)

    def _begin(self, name: str, module: str, *arguments: str) -> Process:
        self.processes.append(Process(self.folder / f"{name}.log", module, *arguments))
        return self.processes[-1]

    async def fake(self, name: str, *, epoch: int = 1, version: int = 0) -> Announcer:
        """A server that only says that it refuses an offer."""
        refusal = wire.OfferRefusal(
            epoch=epoch,
            version=version,
            kind="layout",
            difference="x float32[1] is in the offer but not here",
        )
        presence = wire.Presence(
            role="rollout", id=name, host="h", pid=1, state="failed", refusal=refusal
        )
        announcer = Announcer(self.bus, lambda: presence)
        await announcer.start()
        return announcer

    async def seen(self, name: str, text: str) -> wire.Presence:
        """The presence of a server once its problem holds the text."""
        async with asyncio.timeout(3 * LONG_S):
            while (server := self.roster.get(name)) is None or text not in server.problem:
                await self.roster.changed(0.5)
        return server

    async def status(self) -> str:
        where = ("status", self.bus.run, "--dir", str(self.folder), "--broker", self.url)
        shown = self._begin("status", "rlearner.cli", *where)
        assert await shown.ended() == 0, shown.said
        return shown.said


@asynccontextmanager
async def opened(bus: Bus, url: str, folder: Path) -> AsyncIterator[Scene]:
    scene = Scene(bus, url, folder)
    await scene.roster.start()
    try:
        yield scene
    finally:
        for process in scene.processes:
            await process.close()
        await scene.roster.close()


def good(ticket: wire.Ticket) -> list[wire.Message | bytes]:
    return [fleet.group(ticket, ticket.min_version)]


async def stopped_because(bus: Bus) -> str:
    found = await bus.key_value(CONTROL).get(bus.run)
    assert found is not None
    assert isinstance(found[0], wire.DesiredState)
    assert found[0].state == "stopped"
    return found[0].reason


async def test_learner_that_offers_other_names_ends_with_the_first_difference(
    bus: Bus, broker_url: str, tmp_path: Path
) -> None:
    async with opened(bus, broker_url, tmp_path) as scene:
        learner = scene.learner(train={"backend": "wrong_weights:RenamingBackend"})
        server = scene.server("only")
        assert await learner.ended() == 2
        line, tensor = learner.said.splitlines()[-1], "model.base_layer.norm.weight float32[16]"
        assert line == (
            "error: no server can load the weights, version 0 of epoch 1: only: "
            f"{tensor} is in the offer but not here; the learner confirms it: {tensor} is in the offer, and not in the "
            "model; change model, train.lora or train.backend so that servers have tensors of the same names and "
            "shapes, and start the run again, which resumes it"
        )
        assert await stopped_because(bus) == line.removeprefix("error: ")
        assert await server.ended() == 0  # the run is stopped


async def test_learner_that_trains_other_logprobs_ends_with_the_first_token(
    bus: Bus, broker_url: str, tmp_path: Path
) -> None:
    async with opened(bus, broker_url, tmp_path) as scene:
        learner = scene.learner(train={"backend": "wrong_weights:ShiftedBackend"})
        server = scene.server("only")
        assert await learner.ended() == 2
        line = learner.said.splitlines()[-1]
        assert line.startswith(
            "error: no server can load the weights, version 0 of epoch 1: only: probe: after loading"
        )
        assert "the learner confirms it: it trains token 1 with logprob " in line
        assert await server.ended() == 0
        assert server.said.count("loaded in vain") <= 3  # not one line for each try


async def test_servers_at_fault_cost_only_themselves_and_say_so(
    bus: Bus, broker_url: str, tmp_path: Path
) -> None:
    async with opened(bus, broker_url, tmp_path) as scene:
        learner = scene.learner(train={"steps": 2})
        forgetful = scene.server("forgetful", "--engine", "wrong_weights:ForgetfulEngine")
        repeated = await scene.seen("forgetful", "loaded in vain")
        assert repeated.refusal is not None
        assert (repeated.refusal.kind, repeated.refusal.loads > 3) == ("logprobs", True)
        await until(lambda: "this process finds no fault in them" in learner.said, 2 * LONG_S)
        shown = await scene.status()
        assert "loaded in vain" in shown
        assert "probe: after loading, token 1 has logprob" in shown
        forgetful.process.terminate()
        await forgetful.ended()
        stranger = scene.server("stranger", "--engine", "wrong_weights:StrangeEngine")
        refused = await scene.seen("stranger", "is another model than the one here")
        assert refused.refusal is not None
        assert refused.refusal.kind == "layout"
        assert refused.refusal.difference in await scene.status()
        await until(lambda: learner.said.count("this process finds no fault in them") == 2)
        async with fleet.Hub(bus, good):
            assert await learner.ended() == 0
        await stranger.close()


async def test_word_of_one_identity_never_ends_a_run_and_of_two_does(
    bus: Bus, broker_url: str, tmp_path: Path
) -> None:
    async with opened(bus, broker_url, tmp_path) as scene:
        learner = scene.learner()
        liars, elder = [await scene.fake("liar")], await scene.fake("elder", epoch=7)
        await until(lambda: "this process finds no fault in them" in learner.said, 2 * LONG_S)
        await elder.close()
        liars.append(await scene.fake("accomplice"))
        assert await learner.ended() == 2
        line = learner.said.splitlines()[-1]
        assert line.startswith(
            "error: no server can load the weights, version 0 of epoch 1: accomplice: x float32[1] is in the offer but "
            "not here; liar refused it too; "
        )
        for one in liars:
            await one.close()
        kept = checkpoint.list_checkpoints(tmp_path / bus.run / "checkpoints")
        assert [checkpoint.read_checkpoint(path).step for path in kept] == [0]


async def test_weight_that_becomes_nan_is_named_and_not_saved(
    bus: Bus, broker_url: str, tmp_path: Path
) -> None:
    async with opened(bus, broker_url, tmp_path) as scene:
        saved = {"every_steps": 1}
        learner = scene.learner(train={"backend": "wrong_weights:BrokenBackend"}, checkpoint=saved)
        async with fleet.Hub(bus, good):
            assert await learner.ended() == 2
        line = learner.said.splitlines()[-1]
        assert line == (
            "error: the weight model.norm.weight holds nan at [3] (1 of its 16 values are not finite); "
            "lower train.lr, and start the run again, which resumes it"
        )
        assert await stopped_because(bus) == line.removeprefix("error: ")
        assert checkpoint.list_checkpoints(tmp_path / bus.run / "checkpoints") == []


async def test_run_whose_gradients_are_never_finite_ends(
    bus: Bus, broker_url: str, tmp_path: Path
) -> None:
    async with opened(bus, broker_url, tmp_path) as scene:
        train: dict[str, object] = {"backend": "wrong_weights:SkippingBackend", "steps": 20}
        learner = scene.learner(train=train)
        async with fleet.Hub(bus, good):
            assert await learner.ended() == 2
        tensor = "the gradient of model.norm.weight holds inf at [0] (16 of its 16 values are not finite)"
        assert learner.said.count(f"an update was skipped: {tensor}") == 1
        assert learner.said.splitlines()[-1].startswith(
            f"error: 5 steps in a row made no update because their gradients were not finite: {tensor}; lower train.lr "
        )


@pytest.mark.parametrize("role", ["learner", "server"])
async def test_model_with_nan_is_refused_with_its_file(
    bus: Bus, broker_url: str, tmp_path: Path, role: str
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path = build_tiny(tmp_path / "model", TinyModel.model_validate(fleet.TINY))
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][2, 1] = torch.nan
    broken = Path(build_tiny(tmp_path / "broken", TinyModel.model_validate(fleet.TINY)))
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    named = "model.safetensors: model.layers.0.mlp.up_proj.weight holds nan at [2, 1] (1 of its 512 values "
    async with opened(bus, broker_url, tmp_path) as scene:
        if role == "learner":
            learner = scene.learner(model={"path": str(broken), "tiny": fleet.TINY})
            assert await learner.ended() == 2
            assert (
                f"error: model.path: '{broken}' is not allowed; a model of finite weights: {named}"
                in learner.said
            )
            return
        scene.learner(model={"path": str(path), "tiny": fleet.TINY})
        server = scene.server("s", "--policy", "baseline", "--model", str(broken))
        assert await server.ended() == 2
        assert f"error: model path '{broken}': its weights are not finite: {named}" in server.said
