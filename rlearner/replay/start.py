"""Finds where a replay begins: weights, checkpoint, and ledger with its rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from broker.contract import wire
from broker.errors import UserError
from broker.settings.run_settings import RunSettings
from learner.checkpoints import checkpoint
from learner.checkpoints.checkpoint import Checkpoint
from learner.credit import archive
from learner.credit.archive_trim import missing_reason
from learner.credit.ledger import Ledger, RulesUpdate
from learner.credit.record_intake import rules_change
from learner.credit.ticket_rules import TicketRules


@dataclass
class ReplayStart:
    """Starting point of a replay.

    Attributes:
        first_path: the run's initial weights.
        resumed: the checkpoint to continue from; None: from the beginning.
        ledger: its state at that point.
    """

    first_path: str
    resumed: Checkpoint | None
    ledger: Ledger

    @property
    def model_path(self) -> str:
        return str(self.resumed.path) if self.resumed else self.first_path


def find_start(folder: Path, settings: RunSettings, step: int) -> ReplayStart:
    """Return the start at ``step``, or for 0 at the beginning of the run.

    Raises:
        UserError: if the run kept no records, or not those that a replay from there needs, has no
            checkpoint of that step, or its initial weights or rules are gone.
    """
    files = archive.archive_files(folder / archive.FOLDER)
    if not files:
        raise UserError(
            f"{folder / archive.FOLDER}: no records to replay; "
            "a run keeps them with samples.keep=true"
        )
    paths = checkpoint.list_checkpoints(folder / "checkpoints")
    checkpoints = {saved.step: saved for saved in map(checkpoint.read_checkpoint, paths)}
    if not step:
        ledger = Ledger(_first_rules(folder / archive.FOLDER))
        return ReplayStart(first_weights(folder, settings), None, ledger)
    if step not in checkpoints:
        starts = _describe_starts(folder, settings, sorted(checkpoints))
        raise UserError(f"--from {step}: no checkpoint of step {step} is kept; {starts}")
    ledger = Ledger.load(checkpoints[step].ledger)
    seqs = [entry.seq for entry in ledger.arrived]
    first_seq = min(seqs, default=ledger.state.position + 1)
    if first_seq < files[0][0]:
        reason = missing_reason(folder / archive.FOLDER, first_seq)
        raise UserError(f"--from {step}: record {first_seq}, which it needs, is {reason}")
    return ReplayStart(first_weights(folder, settings), checkpoints[step], ledger)


def _describe_starts(folder: Path, settings: RunSettings, steps: Sequence[int]) -> str:
    """Return a text about where the run can be replayed from."""
    try:
        _first_rules(folder / archive.FOLDER)
        first_weights(folder, settings)
    except UserError as error:
        beginning = f"the beginning cannot be replayed ({error})"
    else:
        beginning = "the run can be replayed from its beginning (--from 0)"
    return f"there are checkpoints of steps {', '.join(map(str, steps)) or 'none'}; {beginning}"


def first_weights(folder: Path, settings: RunSettings) -> str:
    """Return folder or hub name of a run's initial weights.

    Raises:
        UserError: if they were made in the run's folder, and are no longer there.
    """
    model = settings.model
    warm = settings.warm_start
    if model.path is not None and not warm.steps:
        local = Path(model.path).expanduser()
        return str(local.absolute()) if local.is_dir() else model.path
    own = folder / ("warm_start" if warm.steps else "model")
    if not (own / "config.json").is_file():
        raise UserError(f"{own}: the initial weights of the run are missing")
    return str(own)


def _first_rules(samples: Path) -> TicketRules:
    """Return the run's initial rules, from its first record.

    Raises:
        UserError: if the archive does not begin with it.
    """
    frame = archive.find_frame(samples, 1)
    message = frame.record().message if frame else None
    if isinstance(message, wire.RulesChange):
        update = rules_change(message).record
        if isinstance(update, RulesUpdate):
            return update.rules
    reason = missing_reason(samples, 1)
    raise UserError(f"{samples}: record 1, which sets the run's rules, is {reason}")
