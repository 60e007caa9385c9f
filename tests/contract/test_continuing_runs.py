"""A run that is started again with another configuration, by ``start`` and by ``up``."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import learner_fleet as fleet
import pytest
import yaml

from broker.contract import wire
from broker.errors import ConfigError
from broker.jetstream.bus import Bus
from broker.runtime.process import Stop
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import newest_epoch
from learner.prepare import to_yaml
from learner.service import serve_learner
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

OTHER = fleet.TINY | {"hidden_size": 32}


async def life(bus: Bus, url: str, config: dict[str, Any], *, force: bool = False) -> None:
    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        return [fleet.group(ticket, ticket.min_version)]

    async with fleet.Hub(bus, answer, domains=list(config["domains"])), asyncio.timeout(120):
        await serve_learner(
            RunSettings.of_config(config), url, Stop(), connect_deadline_s=60, force=force
        )


async def test_a_second_life_says_what_changed_and_makes_no_warm_start(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await life(bus, broker_url, fleet.config(str(tmp_path), run_name, train={"steps": 1}))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps(
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "U"}]}
        )
        + "\n"
    )
    warm = {"steps": 3, "data": str(rows), "batch_size": 1}
    with caplog.at_level(logging.INFO):
        await life(
            bus,
            broker_url,
            fleet.config(str(tmp_path), run_name, train={"steps": 2, "lr": 2e-3}, warm_start=warm),
        )
    said = [record.getMessage() for record in caplog.records]
    assert "changed since the last start: train.lr: 0.001 -> 0.002" in said
    assert "changed since the last start: train.steps: 1 -> 2" in said
    assert not [
        line
        for line in said
        if "changed" in line and line.split(": ")[1].split(".")[0] not in ("train", "warm_start")
    ]
    assert not [line for line in said if line.startswith("warm start")]
    assert not (tmp_path / run_name / "warm_start").exists()
    assert (tmp_path / run_name / "checkpoints" / "step-000002").is_dir()


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
async def test_first_weights_that_are_gone_are_made_again_for_a_reference_only(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path, kl_coef: float
) -> None:
    rows, first = tmp_path / "rows.jsonl", tmp_path / run_name / "warm_start"
    rows.write_text(
        json.dumps(
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "U"}]}
        )
        + "\n"
    )
    settings = {
        "warm_start": {"steps": 3, "data": str(rows), "batch_size": 1},
        "algorithm": {"kl_coef": kl_coef},
    }
    await life(
        bus, broker_url, fleet.config(str(tmp_path), run_name, train={"steps": 1}, **settings)
    )
    weights = (first / "model.safetensors").read_bytes()
    shutil.rmtree(first)
    await life(
        bus, broker_url, fleet.config(str(tmp_path), run_name, train={"steps": 2}, **settings)
    )
    assert first.exists() == (kl_coef > 0)
    if kl_coef:
        assert (first / "model.safetensors").read_bytes() == weights


async def test_another_model_and_other_domains_are_refused_before_the_epoch(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    first = fleet.config(str(tmp_path), run_name, train={"steps": 1})
    await life(bus, broker_url, first)
    written = (tmp_path / run_name / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match=r"^model.tiny.hidden_size: 32 is not allowed"):
        await life(
            bus,
            broker_url,
            fleet.config(str(tmp_path), run_name, train={"steps": 2}, model={"tiny": OTHER}),
            force=True,
        )
    pond = fleet.config(str(tmp_path), run_name, train={"steps": 2})
    pond["domains"] = {"pond": pond["domains"]["lake"]}
    with pytest.raises(ConfigError, match=r"^domains: 'pond' is not allowed"):
        await life(bus, broker_url, pond)
    assert await newest_epoch(bus, run_name) == 1
    assert (tmp_path / run_name / "config.yaml").read_bytes() == written
    await life(bus, broker_url, pond, force=True)
    assert yaml.safe_load((tmp_path / run_name / "config.yaml").read_text())["domains"].keys() == {
        "pond"
    }
    assert await newest_epoch(bus, run_name) == 2


async def test_up_refuses_a_model_of_another_shape_before_it_starts_anything(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    config = fleet.config(str(tmp_path), run_name, train={"steps": 1})
    await life(bus, broker_url, config)
    # else a run that another broker has is left alone for that reason
    (tmp_path / run_name / "broker.url").unlink()
    other = build_tiny(tmp_path / "other", TinyModel.model_validate(OTHER))
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config))
    command = [
        sys.executable,
        "-m",
        "rlearner.cli",
        "up",
        str(file),
        "train.steps=2",
        f"model.path={other}",
        "--force",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=120, env=env, check=False
    )
    held = tmp_path / run_name / "checkpoints" / "step-000001"
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"error: model.path: '{other}' is not allowed; its hidden_size is 32, that of {held} is 16: "
        "a run cannot change that; choose another run.name"
    )
    assert "Traceback" not in done.stderr
    assert not (tmp_path / run_name / "logs").exists()
    assert not (tmp_path / run_name / "broker").exists()
