"""Finds and prints the command that continues a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker.errors import UserError
from broker.nats.addresses import without_passwords
from broker.settings.run_address import private_addresses
from broker.settings.run_settings import RunSettings
from broker.system.process_identity import this_process
from learner.checkpoints import checkpoint
from learner.run_folder import noted_epoch, noted_holder


@contextmanager
def continue_line_at_exit(settings: RunSettings, broker: str) -> Iterator[None]:
    """Print the command when the block ends, unless it fails and this process had not the run."""
    folder = Path(settings.run.dir) / str(settings.run.name)
    is_refused = False
    try:
        yield
    except UserError:
        is_refused = noted_holder(folder) != this_process()
        raise
    finally:
        if not is_refused:
            print(continue_line(settings, broker), end="", flush=True)


def continue_line(settings: RunSettings, broker: str = "") -> str:
    """Return one line with the command, or nothing for a run that no learner has held yet.

    ``broker`` is the address given to a learner that was started by hand.
    """
    folder = Path(settings.run.dir) / str(settings.run.name)
    if not noted_epoch(folder):
        return ""
    command = ["up", str(folder)]
    if broker and broker not in private_addresses(folder):
        command = ["start", str(folder), "--broker", without_passwords(broker)]
    newest = checkpoint.newest_checkpoint(folder / "checkpoints")
    # A completed run goes on only with more steps.
    if newest is not None and newest.step >= settings.train.steps:
        command.append(f"train.steps={2 * newest.step}")
    return f"go on with this run: rlearner {shlex.join(command)}\n"
