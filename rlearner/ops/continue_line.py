"""Finds and prints the command that continues a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from broker.errors import UserError
from broker.nats.addresses import without_passwords
from broker.system.process_identity import this_process
from learner.checkpoints import checkpoint
from learner.run_folder import noted_epoch, noted_holder, private_addresses


@contextmanager
def continue_line_at_exit(config: dict[str, Any], broker: str) -> Iterator[None]:
    """Print the command when the block ends, unless it fails while another learner, or none, holds
    the run.
    """
    folder = Path(config["run"]["dir"]) / config["run"]["name"]
    refused = False
    try:
        yield
    except UserError:
        refused = noted_holder(folder) != this_process()
        raise
    finally:
        if not refused:
            print(continue_line(config, broker), end="", flush=True)


def continue_line(config: dict[str, Any], broker: str = "") -> str:
    """Return one line with the command, or nothing for a run that no learner has held yet.

    ``broker`` is the address given to a learner that was started by hand.
    """
    folder = Path(config["run"]["dir"]) / config["run"]["name"]
    if not noted_epoch(folder):
        return ""
    by_hand = broker and broker not in private_addresses(folder)
    command = (
        ["start", str(folder), "--broker", without_passwords(broker)]
        if by_hand
        else ["up", str(folder)]
    )
    made = checkpoint.newest_checkpoint(folder / "checkpoints")
    if made is not None and made.step >= config["train"]["steps"]:
        command.append(f"train.steps={2 * made.step}")
    return f"go on with this run: rlearner {shlex.join(command)}\n"
