"""Trains on the records of the archive, step by step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from broker.contract import wire
from broker.errors import UserError
from broker.jetstream.bus import LogRecord
from broker.settings.run_settings import RunSettings
from learner.checkpoints import checkpoint
from learner.consumer import RecordConsumer
from learner.credit import archive
from learner.credit.archive_trim import missing_reason
from learner.credit.ledger import Ledger
from learner.reporting.metrics import count_tickets, finite_values
from learner.training import TrainingThread
from learner.training_setup import open_training
from rlearner.replay.start import ReplayStart


@dataclass(frozen=True)
class ReplayedStep:
    """A replayed step.

    Attributes:
        step: steps completed.
        tickets: the tickets of the step, in order.
        values: metrics by name.
    """

    step: int
    tickets: list[int]
    values: dict[str, float]


class ReplayTraining:
    """A model and a ledger that consume the archive of a run's folder."""

    def __init__(self, folder: Path, settings: RunSettings, start: ReplayStart) -> None:
        self._samples = folder / archive.FOLDER
        self._settings = settings
        self._start = start
        self.training: TrainingThread

    @property
    def ledger(self) -> Ledger:
        return self._start.ledger

    async def steps(self, until: int) -> AsyncGenerator[ReplayedStep, None]:
        """Yield each step up to ``until`` after it is made, while the model is between two steps.

        Raises:
            UserError: if the archive lacks a record.
        """
        start = self._start
        records = self._records(self.ledger.state.position + 1)
        self.training = await open_training(
            self._settings,
            start.model_path,
            start.first_path,
            seed=self.ledger.rules.seed,
        )
        try:
            if start.resumed is not None:
                await self.training.call(
                    partial(checkpoint.load_state, start.resumed, self.training.backend)
                )
            consumer = RecordConsumer(self.ledger, self.training)
            consumer.resume(self._arrived())
            # The live learner opened its credit at this point, too.
            self.ledger.open_credit()
            while self.ledger.state.version < until:
                if not self.ledger.full:
                    _, actions = consumer.apply(next(records))
                    consumer.perform(actions)
                    continue
                completed = await consumer.complete()
                assert completed is not None, "a replay abandons no step"
                values = finite_values(completed.result.values) | count_tickets(self.ledger)
                tickets = [entry.number for entry in completed.entries]
                # The caller compares the step before the next one changes model and ledger.
                yield ReplayedStep(self.ledger.state.version, tickets, values)
                consumer.perform(completed.actions)
        finally:
            await asyncio.to_thread(self.training.close)

    async def save(self, folder: Path) -> Path:
        """Write a checkpoint of the newest step into ``folder``, and return its path."""
        backend = self.training.backend
        ledger = self.ledger.dump()
        hf_max_gib = self._settings.checkpoint.hf_max_gib
        return await self.training.call(
            partial(checkpoint.write_checkpoint, folder, backend, ledger, 0, hf_max_gib=hf_max_gib)
        )

    def _arrived(self) -> dict[int, wire.Group]:
        """Return the groups that had arrived but were not trained at the start."""
        groups: dict[int, wire.Group] = {}
        seqs = [entry.seq for entry in self.ledger.arrived]
        frames = {frame.seq: frame for frame in archive.select_frames(self._samples, seqs)}
        for entry in self.ledger.arrived:
            message = frames[entry.seq].record().message if entry.seq in frames else None
            if not isinstance(message, wire.Group) or message.ticket != entry.number:
                raise self._missing(entry.seq)
            groups[entry.number] = message
        return groups

    def _records(self, first: int) -> Iterator[LogRecord]:
        """Yield every record from ``first`` on.

        Raises:
            UserError: if one of them is missing.
        """
        next_seq = first
        for frame in archive.read_frames(self._samples, first):
            if frame.error:
                raise UserError(f"{self._samples}: {frame.error}")
            if frame.seq != next_seq:
                break
            yield frame.record()
            next_seq += 1
        raise self._missing(next_seq)

    def _missing(self, seq: int) -> UserError:
        step = self.ledger.state.version + 1
        reason = missing_reason(self._samples, seq)
        return UserError(f"{self._samples}: record {seq}, which step {step} needs, is {reason}")
