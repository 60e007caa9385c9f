"""Which broker a command asks for a run: the run's own, whatever the shell's variables say."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from broker import cli as broker_cli
from broker.jetstream.bus import Bus
from broker.settings.arguments import commands_of
from broker.settings.run_address import broker_address
from learner.credit.recovery import Recovery
from learner.credit.tickets import REBASE
from learner.run_folder import note_broker
from rlearner import cli
from rlearner.exporter.service import _find_address
from rlearner.up.run_claim import RunClaim

OWN = "nats://127.0.0.1:4301"
OTHER = "nats://127.0.0.1:4302"


def test_the_folder_precedes_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RL_BROKER", raising=False)
    assert broker_address(None, tmp_path) == "nats://127.0.0.1:4222"
    monkeypatch.setenv("RL_BROKER", OTHER)
    assert broker_address(None, tmp_path) == broker_address(None, None) == OTHER
    note_broker(tmp_path, OWN)
    assert broker_address(None, tmp_path) == OWN
    assert broker_address("nats://10.0.0.1:1", tmp_path) == "nats://10.0.0.1:1"
    with RunClaim(tmp_path, "a") as claim:
        claim.note("nats://127.0.0.1:4303")
        assert broker_address(None, tmp_path) == "nats://127.0.0.1:4303"


def test_the_variable_adds_a_login_to_the_address_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_broker(tmp_path, f"{OWN},{OTHER}")
    with_login = f"{OWN},{OTHER}".replace("nats://", "nats://me:secret@")
    monkeypatch.setenv("RL_BROKER", with_login)
    assert broker_address(None, tmp_path) == with_login
    monkeypatch.setenv("RL_BROKER", OTHER.replace("nats://", "nats://me:secret@"))
    assert broker_address(None, tmp_path) == f"{OWN},{OTHER}"


def commands_of_a_run() -> Iterator[argparse.ArgumentParser]:
    """Yield each command that takes a run and a broker."""
    for parser in (cli.make_parser(), broker_cli.parser()):
        for command in commands_of(parser):
            names = {action.dest for action in command._actions}
            if "broker" in names and names & {"run_name", "run"}:
                yield command


def test_no_command_of_a_run_has_the_variable_as_its_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RL_BROKER", OTHER)
    brokers = {command.prog: command.get_default("broker") for command in commands_of_a_run()}
    assert set(brokers.values()) == {None}, brokers
    expected = {
        *(f"rlearner {name}" for name in ("status", "audit", "show", "trace", "logs", "pause")),
        *(f"rlearner {name}" for name in ("resume", "drain", "stop", "eval-now", "exporter")),
        *(f"rlearner {name}" for name in ("checkpoint-now", "console", "invite")),
        *(f"broker dead {name}" for name in ("list", "show", "retry", "purge")),
        "broker status",
        "broker control",
    }
    assert expected <= set(brokers), expected - set(brokers)


@pytest.mark.parametrize("words", ["--run quick", "--run runs/quick"])
async def test_broker_commands_find_the_broker_by_the_run(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "quick"
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    note_broker(folder, OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RL_BROKER", OTHER)
    options = broker_cli.parser().parse_args(["dead", "list", *words.split()])
    assert broker_cli.find_broker(options) == OWN
    assert options.run == "quick"
    options = broker_cli.parser().parse_args(["dead", "list", "--run", "elsewhere"])
    assert broker_cli.find_broker(options) == OTHER


def test_exporter_of_a_run_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_BROKER", OTHER)
    options = cli.make_parser().parse_args(["exporter", "elsewhere"])
    assert _find_address(options) == ("elsewhere", OTHER, None)


def test_a_learner_at_another_broker_does_not_take_the_store_for_lost(
    tmp_path: Path,
) -> None:
    """`rlearner start` of a run of `rlearner up`, with a broker that never had the run."""
    recovery = Recovery.__new__(Recovery)
    recovery._folder = tmp_path
    recovery._bus = cast("Bus", SimpleNamespace(link=SimpleNamespace(url=OTHER)))
    note_broker(tmp_path, OWN)
    assert f"`rlearner start {tmp_path} --broker {OWN}` continues there" in recovery._advice()
    with RunClaim(tmp_path, "a") as claim:
        claim.note(OWN)
    assert recovery._advice() == REBASE  # its private store is gone
    (tmp_path / "broker" / "jetstream").mkdir(parents=True)
    assert recovery._advice() == (
        f"the run's streams are in {tmp_path}/broker: `rlearner up {tmp_path}` continues there"
    )
    with RunClaim(tmp_path, "a"):
        assert recovery._advice() == REBASE  # that of the private broker itself
