"""The rollout server as a real process on a real broker: join, answer, new weights, drain, kill,
bad input.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from broker.channel import carriers
from broker.channel.carriers import ChannelClient
from broker.contract import wire
from broker.contract.streams import RUNS
from broker.errors import RequestFailed
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import watch_metrics
from broker.runtime.presence import Roster
from broker.settings import runspec
from broker.weights.memory.staging import plan_of
from broker.weights.probe import make_probe
from broker.weights.sender.send import WeightSender
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

START_S = 100.0
DOMAINS = {"lake": {"env": "frozenlake", "max_context_tokens": 128, "sampling": {"max_tokens": 4}}}
PROBE = [9, 20, 31, 42, 53, 64]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    tiny = TinyModel(
        hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48
    )
    return str(build_tiny(tmp_path_factory.mktemp("service") / "model", tiny))


@dataclass
class Server:
    """One rollout-server process."""

    id: str
    process: asyncio.subprocess.Process
    said: asyncio.Task[bytes]

    async def ended(self, timeout_s: float = START_S) -> tuple[int, str]:
        """Exit code and all that it said."""
        async with asyncio.timeout(timeout_s):
            code = await self.process.wait()
            return code, (await self.said).decode()


class Fleet:
    """Servers of one run, a roster that sees them, and a client that asks them."""

    def __init__(self, bus: Bus, url: str, kind: str) -> None:
        self.bus, self.url = bus, url
        self.roster, self.client = Roster(bus), carriers.make_client(kind, bus)
        self.servers: list[Server] = []

    async def start(self, name: str, *options: str) -> Server:
        command = [
            "-m",
            "rollout.cli",
            "--broker",
            self.url,
            "--run",
            self.bus.run,
            "--id",
            name,
            "--gpus",
            "cpu",
            *options,
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "RL_RUN": "", "RL_BROKER": ""}
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
        )
        assert process.stdout is not None
        server = Server(name, process, asyncio.create_task(process.stdout.read()))
        self.servers.append(server)
        return server

    async def seen(
        self, name: str, until: Callable[[wire.Presence | None], bool], timeout_s: float = START_S
    ) -> Any:
        """The presence of a server once the condition holds."""
        async with asyncio.timeout(timeout_s):
            while not until(self.roster.get(name)):
                server = next(s for s in self.servers if s.id == name)
                assert server.process.returncode in (None, 0, -signal.SIGKILL), (
                    await server.said
                ).decode()
                await self.roster.changed(0.5)
        return self.roster.get(name)

    async def serving(self, name: str) -> wire.Presence:
        found: wire.Presence = await self.seen(
            name, lambda p: p is not None and p.state == "serving"
        )
        return found

    async def close(self) -> None:
        for server in self.servers:
            if server.process.returncode is None:
                server.process.kill()
            await server.process.wait()
            await server.said
        await self.client.close()
        await self.roster.close()


@pytest.fixture(params=["zmq"])
async def fleet(
    request: pytest.FixtureRequest, bus: Bus, broker_url: str, model_path: str
) -> AsyncIterator[Fleet]:
    config = runspec.validate(
        {
            "broker": {"channel": request.param},
            "rollout": {"max_running": 4, "max_context_tokens": 128, "num_threads": 1},
            "train": {"weights_timeout_s": 5.0},
            "domains": DOMAINS,
        }
    )
    await runspec.publish_runspec(
        bus,
        wire.RunSpec(
            run=bus.run,
            wire_version=wire.WIRE_VERSION,
            epoch=0,
            config=config,
            model_path=model_path,
        ),
    )
    made = Fleet(bus, broker_url, request.param)
    await made.roster.start()
    yield made
    await made.close()


def ask(
    name: str,
    *,
    conversation: str = "",
    prompt: list[int] | None = None,
    min_version: int = 0,
    **sampling: Any,
) -> wire.GenerateRequest:
    return wire.GenerateRequest(
        request_id=name, conversation_id=conversation or name, token_ids=wire.column(prompt or [10, 11, 12], "<i4"),
        sampling=wire.SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **sampling}), min_version=min_version,
        deadline_s=30.0,
    )  # fmt: skip


def load(path: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def logprobs(model: Any, prompt: list[int], output: list[int]) -> np.ndarray:
    ids = torch.tensor([prompt + output])
    table = model(ids).logits[0].log_softmax(-1)
    return table[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()


def probe_of(model: Any, shift: float = 0.0) -> wire.Probe:
    return make_probe(PROBE, logprobs(model, PROBE[:1], PROBE[1:]) + shift, tolerance=1e-3)


def stop(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("fleet", ["zmq", "nats"], indirect=True)
async def test_random_joins_answers_and_leaves(fleet: Fleet) -> None:
    server = await fleet.start(
        "r1", "--engine", "random", "--policy", "random", "engine_args.choices=[left, up]"
    )
    presence = await fleet.serving("r1")
    assert (presence.policy, presence.engine, presence.policy_version, presence.slots) == (
        "random",
        "random",
        0,
        4,
    )
    assert presence.pid == server.process.pid
    reply = await fleet.client.generate(presence.address, ask("a", min_version=7), timeout_s=100)
    assert (reply.finish_reason, reply.server, reply.policy_version, reply.error) == (
        "stop",
        "r1",
        0,
        "",
    )
    assert reply.logprobs.array()[0] == pytest.approx(np.log(0.5))
    assert reply.version_runs.array().tolist() == [0, len(reply.token_ids.array())]
    stop(server)
    code, said = await server.ended()
    assert code == 0, said
    assert "Traceback" not in said
    await fleet.seen("r1", lambda p: p is None)


async def test_hf_serves_its_first_weights_once_their_probe_matched_and_takes_new_ones(
    fleet: Fleet, model_path: str
) -> None:
    server = await fleet.start("h1")
    presence = await fleet.seen("h1", lambda p: p is not None and p.address != "")
    assert (presence.state, presence.policy_version, presence.engine) == ("starting", -1, "hf")
    early = asyncio.create_task(
        fleet.client.generate(presence.address, ask("early"), timeout_s=100)
    )
    model = load(model_path)
    sender = WeightSender(
        fleet.bus, plan_of(dict(model.named_parameters()), 32.0), epoch=3, roster=fleet.roster
    )
    await sender.start()
    try:
        sender.offer(0, dict(model.named_parameters()), probe_of(model))
        first = await early
        assert first.version_runs.array().tolist() == [0, 8]
        check(model, first)
        presence = await fleet.serving("h1")
        assert (presence.epoch, presence.policy_version) == (3, 0)

        metrics = await anext(
            m
            async for m in watch_metrics(fleet.bus)
            if m.id == "h1" and m.values["weights/version"] == 0
        )
        assert {
            "rollouter/idle_ratio",
            "perf/tokens_per_s",
            "rollout/running",
            "rollout/waiting",
            "time/pause",
        } <= metrics.values.keys()
        assert 0 <= metrics.values["rollouter/idle_ratio"] <= 1

        late = asyncio.create_task(
            fleet.client.generate(presence.address, ask("late", min_version=1), timeout_s=100)
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.3)
        sender.offer(1, dict(model.named_parameters()), probe_of(model))
        reply = await late
        assert reply.version_runs.array().tolist() == [1, 8]
        check(model, reply)
        await fleet.seen("h1", lambda p: p is not None and p.policy_version == 1)

        # as if loaded wrong
        sender.offer(2, dict(model.named_parameters()), probe_of(model, shift=1.0))
        await fleet.seen(
            "h1", lambda p: p is not None and p.policy_version == -1 and p.state == "failed"
        )
        sender.offer(3, dict(model.named_parameters()), probe_of(model))
        await fleet.seen(
            "h1", lambda p: p is not None and p.policy_version == 3 and p.state == "serving"
        )
        second = await fleet.client.generate(
            presence.address, ask("again", min_version=3), timeout_s=100
        )
        check(model, second)
    finally:
        await sender.close()
    stop(server)
    code, said = await server.ended()
    assert code == 0, said


def check(model: Any, reply: wire.GenerateReply) -> None:
    assert reply.error == ""
    expected = logprobs(model, [10, 11, 12], reply.token_ids.array().tolist())
    assert np.abs(expected - reply.logprobs.array()).max() < 1e-4


async def test_draining_finishes_what_runs_and_takes_nothing_new(fleet: Fleet) -> None:
    server = await fleet.start("r1", "--engine", "random", "engine_args.delay_s=0.05")
    address = (await fleet.serving("r1")).address
    running = asyncio.create_task(
        fleet.client.generate(address, ask("runs", max_tokens=40), timeout_s=100)
    )
    await asyncio.sleep(0.3)
    stop(server)
    await fleet.seen("r1", lambda p: p is not None and p.state == "draining")
    refused = await fleet.client.generate(address, ask("new"), timeout_s=100)
    assert (refused.finish_reason, len(refused.token_ids.data)) == ("abort", 0)
    reply = await running
    assert (reply.finish_reason, len(reply.token_ids.array())) == ("length", 40)
    code, said = await server.ended()
    assert code == 0, said


async def test_what_does_not_finish_in_time_is_handed_back_as_it_is(fleet: Fleet) -> None:
    server = await fleet.start(
        "r1", "--engine", "random", "rollout.engine_args.delay_s=0.1", "drain_timeout_s=0.5"
    )
    address = (await fleet.serving("r1")).address
    running = asyncio.create_task(
        fleet.client.generate(address, ask("runs", max_tokens=120), timeout_s=100)
    )
    await asyncio.sleep(0.5)
    stop(server)
    reply = await running
    assert reply.finish_reason == "abort"
    assert 0 < len(reply.token_ids.array()) < 120
    code, said = await server.ended()
    assert code == 0, said


async def renew(bus: Bus, **changes: Any) -> None:
    """The learner is back under a new epoch, with these fields of the RunSpec."""
    found = await bus.key_value(RUNS).get(bus.run)
    assert found is not None
    assert isinstance(found[0], wire.RunSpec)
    await runspec.publish_runspec(bus, msgspec.structs.replace(found[0], **changes))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of another shape."""
    tiny = TinyModel(
        hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16, intermediate_size=32
    )
    return str(build_tiny(tmp_path_factory.mktemp("other") / "model", tiny))


async def test_a_new_epoch_with_another_model_has_the_server_start_again_with_that(
    fleet: Fleet, model_path: str, other_model: str
) -> None:
    """As after a start with a wrong model: it could never take the weights of the run, and does
    once the epoch says which.
    """
    await renew(fleet.bus, model_path=other_model)
    server = await fleet.start("h1")
    before = await fleet.seen("h1", lambda p: p is not None and p.address != "")
    model = load(model_path)
    sender = WeightSender(
        fleet.bus, plan_of(dict(model.named_parameters()), 32.0), epoch=3, roster=fleet.roster
    )
    await sender.start()
    try:
        sender.offer(0, dict(model.named_parameters()), probe_of(model))
        await fleet.seen("h1", lambda p: p is not None and p.state == "failed")
        await renew(fleet.bus, model_path=model_path)
        presence = await fleet.serving("h1")
        assert (presence.pid, presence.policy_version, presence.epoch) == (before.pid, 0, 3)
        check(model, await fleet.client.generate(presence.address, ask("a"), timeout_s=100))
    finally:
        await sender.close()
    stop(server)
    code, said = await server.ended()
    assert code == 0, said
    assert "Traceback" not in said
    assert said.count("loading ") == 2


async def test_a_new_epoch_answers_what_runs_and_the_same_settings_change_nothing(
    fleet: Fleet,
) -> None:
    server = await fleet.start("r1", "--engine", "random", "engine_args.delay_s=0.05")
    first = await fleet.serving("r1")
    running = asyncio.create_task(
        fleet.client.generate(first.address, ask("runs", max_tokens=40), timeout_s=100)
    )
    await fleet.seen("r1", lambda p: p is not None and p.running == 1)
    await renew(fleet.bus, data_digests={"unread": "0"})
    config = runspec.validate(
        {"rollout": {"max_running": 7, "max_context_tokens": 128}, "domains": DOMAINS}
    )
    await renew(fleet.bus, config=config)
    reply = await running
    assert (reply.finish_reason, len(reply.token_ids.array())) == ("length", 40)
    second = await fleet.seen(
        "r1", lambda p: p is not None and p.state == "serving" and p.slots == 7
    )
    again = await fleet.client.generate(second.address, ask("again"), timeout_s=100)
    assert (again.finish_reason, again.server) == ("length", "r1")
    stop(server)
    code, said = await server.ended()
    assert code == 0, said
    assert "Traceback" not in said
    assert said.count("settings of rollout servers: restarting") == 1


async def test_a_new_epoch_that_cannot_be_served_ends_the_server_as_at_its_start(
    fleet: Fleet, tmp_path: Path
) -> None:
    server = await fleet.start("h1", "--policy", "judge")
    await fleet.serving("h1")
    await renew(fleet.bus, model_path=str(tmp_path))
    code, said = await server.ended()
    assert code == 2, said
    assert said.splitlines()[-1].startswith(f"error: model path '{tmp_path}': no model there")
    assert "Traceback" not in said


async def test_the_run_stopped_by_the_operator_ends_it(fleet: Fleet) -> None:
    from broker.contract.streams import CONTROL

    server = await fleet.start("r1", "--engine", "random")
    await fleet.serving("r1")
    control = fleet.bus.key_value(CONTROL)
    await control.put(fleet.bus.run, wire.DesiredState(state="stopped"))
    code, said = await server.ended()
    assert code == 0, said


async def test_killed_it_is_gone_and_another_goes_on(fleet: Fleet) -> None:
    killed, _ = (
        await fleet.start("k1", "--engine", "random", "engine_args.delay_s=0.1"),
        await fleet.start("k2", "--engine", "random"),
    )
    first, second = await fleet.serving("k1"), await fleet.serving("k2")
    client: ChannelClient = fleet.client
    lost = asyncio.create_task(
        client.generate(first.address, ask("lost", max_tokens=100), timeout_s=100)
    )
    await asyncio.sleep(0.3)
    killed.process.kill()
    began = time.monotonic()
    await fleet.seen("k1", lambda p: p is None, timeout_s=60)
    await client.forget(first.address)
    with pytest.raises(RequestFailed):
        await lost
    assert time.monotonic() - began < 60
    reply = await client.generate(second.address, ask("elsewhere"), timeout_s=100)
    assert (reply.finish_reason, reply.server) == ("length", "k2")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            ("--engine", "randm"),
            "error: rollout.engine: 'randm' is not allowed; did you mean 'random'? known: hf, openai, random, sglang, "
            "vllm",
        ),
        pytest.param(
            ("--engine", "vllm"),
            "error: engine vllm needs the package vllm: pip install 'rlearner[vllm]' for GPUs, or make vllm-env",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here"
            ),
        ),
        (("--gpus", "97"), "error: --gpus 97: GPU 97 not on this machine; it has"),
        (
            ("max_runing=3",),
            "error: rollout.max_runing: 3 is not allowed; unknown key, did you mean 'rollout.max_running'?",
        ),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
async def test_bad_input_is_one_line_and_exit_code_2(
    fleet: Fleet, options: tuple[str, ...], error: str
) -> None:
    server = await fleet.start("bad", *options)
    code, said = await server.ended(START_S)
    lines = [line for line in said.splitlines() if line.startswith("error")]
    assert code == 2, said
    assert len(lines) == 1, said
    assert lines[0].startswith(error)
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "options",
    [("--broker", "nats://127.0.0.1:9", "--connect-deadline", "0.3"), ("engine_args.never=1",)],
)
async def test_what_is_refused_is_refused_before_anything_heavy_is_imported(
    fleet: Fleet, options: tuple[str, ...]
) -> None:
    program = (
        "import sys; from rollout.cli import main; code = main(sys.argv[1:]); sys.exit(90 if 'torch' in "
        "sys.modules else code)"
    )
    command = [program, "--broker", fleet.url, "--run", fleet.bus.run, "--gpus", "cpu", *options]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", *command, stderr=subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 2, said.decode()
    assert said.decode().splitlines()[-1].startswith("error: ")


async def test_a_port_that_is_taken_is_said_before_the_engine_loads(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = await fleet.start(
            "bad", f"--http={port}", "--engine", "random", "--policy", "random"
        )
        code, said = await server.ended(START_S)
    assert code == 2, said
    assert f"error: rollout.http_port: {port} is not allowed; the port is not available (" in said
    assert "loading" not in said


async def test_a_model_path_that_is_none(fleet: Fleet, tmp_path: Path) -> None:
    spec = runspec.validate({"rollout": {"max_context_tokens": 128}, "domains": DOMAINS})
    empty = wire.RunSpec(
        run=fleet.bus.run,
        wire_version=wire.WIRE_VERSION,
        epoch=0,
        config=spec,
        model_path=str(tmp_path),
    )
    await runspec.publish_runspec(fleet.bus, empty)
    server = await fleet.start("bad")
    code, said = await server.ended(START_S)
    assert code == 2, said
    assert f"error: model path '{tmp_path}': no model there, the folder has no config.json" in said
    assert "Traceback" not in said
