"""A real learner on a small file system that is filled and freed; nothing is simulated."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from importlib import import_module
from pathlib import Path

import learner_fleet as fleet
import pytest
from waits import LONG_S, until

from broker.contract import wire
from broker.contract.streams import SAMPLES
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.runtime.process import Stop
from broker.settings.run_settings import RunSettings
from learner.checkpoints import checkpoint
from learner.reporting.metrics import read_lines
from learner.service import serve_learner
from learner.training_setup import SLOW_MODULES

SIZE_MIB = 4


@pytest.fixture(autouse=True, scope="module")
def libraries() -> None:
    """Imported before any test's clock runs."""
    for name in ("learner.backends.torch", *SLOW_MODULES):
        import_module(name)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """Mounts a small tmpfs on a folder, which it makes."""
    mounted: list[Path] = []

    def mount(folder: Path) -> Path:
        folder.mkdir(parents=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m,mode=700", "none", str(folder)],
            capture_output=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.decode().strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class Filler:
    """Takes all the space there is, again and again, until it gives it back."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "filler"

    def fill(self) -> None:
        with contextlib.suppress(OSError), self.file.open("ab", buffering=0) as out:
            for size in (1 << 16, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while out.write(b"x" * size):
                        pass

    def free(self) -> None:
        self.file.unlink()


@contextlib.asynccontextmanager
async def paced(bus: Bus) -> AsyncIterator[None]:
    """A hub that leaves the learner a moment between groups."""

    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        time.sleep(0.02)
        return [fleet.group(ticket, ticket.min_version)]

    async with fleet.Hub(bus, answer), asyncio.timeout(2 * LONG_S):
        yield


@pytest.mark.parametrize("where", ["checkpoints", "."])
async def test_a_learner_waits_for_space_and_goes_on(
    bus: Bus,
    broker_url: str,
    run_name: str,
    tmp_path: Path,
    small: Callable[[Path], Path],
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    """``checkpoints``: only they lack space, and training runs on for a while; ``.``: the whole
    run's folder is full.
    """
    caplog.set_level("INFO")
    steps = {"steps": 30, "groups_per_step": 1, "max_staleness": 1}
    keep = {"every_steps": 2}
    config = fleet.config(
        str(tmp_path / "runs"), run_name, train=steps, checkpoint=keep, samples={"keep": True}
    )
    run = tmp_path / "runs" / run_name
    full = small(run / "checkpoints" if where == "checkpoints" else tmp_path / "runs")
    filler = Filler(full)

    def lines() -> int:
        return len(read_lines(run / "metrics.jsonl"))

    def said(text: str) -> bool:
        return any(text in record.getMessage() for record in caplog.records)

    async with paced(bus):
        learner = asyncio.create_task(
            serve_learner(RunSettings.of_config(config), broker_url, Stop(), connect_deadline_s=60)
        )
        await until(
            lambda: learner.done() or len(checkpoint.list_checkpoints(run / "checkpoints")) == 2
        )
        filler.fill()
        await until(lambda: said("No space left on device"))
        await until(lambda: learner.done() or said("training waits"))
        filler.fill()
        await asyncio.sleep(0.3)
        before, trimmed = lines(), await bus.first_seq(SAMPLES)
        # whole ones only
        kept = [
            checkpoint.read_checkpoint(path)
            for path in checkpoint.list_checkpoints(run / "checkpoints")
        ]
        assert len(kept) == 2
        await asyncio.sleep(1.0)
        assert not learner.done()
        assert (lines(), await bus.first_seq(SAMPLES)) == (before, trimmed)
        assert before <= kept[-1].step + 7  # two kept, every second step, one under way
        filler.free()
        await learner
    assert lines() == 30
    assert [
        checkpoint.read_checkpoint(path).step
        for path in checkpoint.list_checkpoints(run / "checkpoints")
    ][-1] == 30
    assert said("can be written again")
    assert not list((run / "checkpoints").glob(".step-*"))


async def test_a_stop_on_a_full_folder_ends_with_one_line(
    bus: Bus,
    broker_url: str,
    run_name: str,
    tmp_path: Path,
    small: Callable[[Path], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = fleet.config(
        str(tmp_path),
        run_name,
        train={"steps": 500, "groups_per_step": 1},
        checkpoint={"every_steps": 1},
    )
    folder = small(tmp_path / run_name / "checkpoints")
    filler, stop = Filler(folder), Stop()
    async with paced(bus):
        learner = asyncio.create_task(
            serve_learner(RunSettings.of_config(config), broker_url, stop, connect_deadline_s=60)
        )
        await until(lambda: learner.done() or len(checkpoint.list_checkpoints(folder)) == 2)
        filler.fill()
        await until(
            lambda: any(
                "No space left on device" in record.getMessage() for record in caplog.records
            )
        )
        stop.request("test")
        with pytest.raises(
            UserError, match=rf"{folder}: No space left on device \(\d+ MiB free\); asked to stop"
        ):
            await learner
    assert len(checkpoint.list_checkpoints(folder)) == 2
    assert checkpoint.newest_checkpoint(folder) is not None


def test_what_safetensors_says_of_a_full_disk_is_the_operating_systems_word(
    tmp_path: Path, small: Callable[[Path], Path]
) -> None:
    import torch
    from checkpoint_kit import FakeBackend

    folder = small(tmp_path / "small")
    backend = FakeBackend({"moments": torch.zeros(SIZE_MIB << 20)})
    with pytest.raises(OSError, match="No space left on device") as raised:
        checkpoint.stage_checkpoint(folder, backend, backend.snapshot(), {"version": 3}, 1)  # type: ignore[arg-type]
    assert raised.value.errno == errno.ENOSPC
    assert list(folder.iterdir()) == []
