"""Processes of two wire versions on one broker: the one that does not fit says so and exits with 2;
nothing is lost.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from waits import LONG_S

from broker.contract import wire
from broker.contract.streams import RUNS
from broker.jetstream.bus import Bus
from broker.settings.runspec import load, validate
from learner.prepare import write_config
from learner.run_folder import note_epoch

REMEDY = "install the version that started the run, or see docs/operations.md#upgrading"
OTHER = wire.WIRE_VERSION + 1
TINY = (
    "model.tiny={hidden_size: 16, num_layers: 1, num_heads: 1, num_kv_heads: 1, head_dim: 16, intermediate_size: 32, "
    "vocab: chars}"
)
UPGRADED = f"""
import sys
from broker.contract import wire
wire.WIRE_VERSION = {OTHER}
from importlib import import_module
sys.exit(import_module(sys.argv[1]).main(sys.argv[2:]))
"""


async def upgraded(module: str, *words: str) -> tuple[int, list[str]]:
    """Return exit code and errors of a program of the next wire version, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RL_")}
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", UPGRADED, module, *words, env=environment, stdout=pipe, stderr=pipe
    )
    _, err = await asyncio.wait_for(child.communicate(), 3 * LONG_S)
    assert child.returncode is not None
    return child.returncode, [
        line for line in err.decode().splitlines() if line.startswith("error: ")
    ]


@pytest.mark.parametrize("module", ["envhub.cli", "rewardhub.cli", "rollout.cli"])
async def test_a_hub_or_server_of_another_version_does_not_join(
    module: str, bus: Bus, broker_url: str
) -> None:
    spec = wire.RunSpec(
        run=bus.run, wire_version=wire.WIRE_VERSION, epoch=3, config={}, model_path="m"
    )
    await bus.key_value(RUNS).put(bus.run, spec)
    code, errors = await upgraded(module, "--broker", broker_url, "--run", bus.run)
    says = f"run {bus.run} uses wire version {wire.WIRE_VERSION}, this program {OTHER}; "
    assert (code, errors) == (2, [f"error: {says}{REMEDY}"])


async def test_a_learner_of_another_version_leaves_the_run_alone(
    bus: Bus, broker_url: str, tmp_path: Path
) -> None:
    spec = wire.RunSpec(
        run=bus.run, wire_version=wire.WIRE_VERSION, epoch=3, config={}, model_path="m"
    )
    await bus.key_value(RUNS).put(bus.run, spec)
    words = [
        "start",
        "quickstart",
        f"run.name={bus.run}",
        f"run.dir={tmp_path}",
        TINY,
        "warm_start.steps=0",
    ]
    folder = tmp_path / bus.run
    write_config(folder, validate(load("quickstart", words[2:])))
    note_epoch(folder, 3, "")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, errors = await upgraded("rlearner.cli", *words, "--broker", broker_url)
    assert code == 2
    assert errors[0].startswith(
        f"error: run {bus.run} uses wire version {wire.WIRE_VERSION}, this program {OTHER}; "
    )
    found = await bus.key_value(RUNS).get(bus.run)
    assert found is not None
    assert found[0] == spec
    assert {name: (folder / name).read_bytes() for name in before} == before
