"""Keeps what a hub has learnt about lengths on the broker, for its next start and other hubs.

One record per domain, of at most 64 KiB. Every half minute a hub reads it and, if others have
written since, averages their means with its own, weighted by the turns that either side has learnt
from since they last met; then it writes the result, unless another hub was faster, and tries again
half a minute later. A hub that starts knows nothing and thus takes what is there. No ticket waits
for any of this, and nothing but the order of requests depends on it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from broker.contract import codec, wire
from broker.contract.checks import MAX_TASKS
from broker.contract.streams import LENGTHS
from broker.errors import WireError
from broker.jetstream.bus import Bus
from broker.system.fault import told
from envhub.lengths.base import LengthKnowledge
from envhub.lengths.predictor import LengthPredictor

log = logging.getLogger(__name__)

EVERY_S: Final = 30.0
NAME_CHARS: Final = 256


class LengthStore:
    """Exchanges the knowledge of one hub's predictors with the broker.

    Args:
        predictors: of the trained policy by domain; makes those that do not exist yet.
    """

    def __init__(
        self, bus: Bus, predictors: Callable[[], Mapping[str, tuple[str, LengthPredictor]]]
    ) -> None:
        self._bus = bus
        self._predictors = predictors
        self._has_warned = False

    async def serve(self) -> None:
        """Exchange until cancelled, at once and then every half minute or so."""
        while True:
            await self.exchange()
            # at random, so that hubs seldom write at the same time
            await asyncio.sleep(EVERY_S * random.uniform(0.8, 1.2))

    async def exchange(self) -> None:
        """Exchange with the record of every domain; what fails is logged and tried next time."""
        for domain, (name, predictor) in self._predictors().items():
            try:
                await self._merge(domain, name[:NAME_CHARS], predictor)
            except Exception as error:  # noqa: BLE001 - of the broker, or of the user's estimator
                # once: while the broker is away this fails every half minute
                level = logging.DEBUG if self._has_warned else logging.WARNING
                log.log(level, "lengths of %s: %s", domain, told(error))
                self._has_warned = True

    async def _merge(self, domain: str, name: str, predictor: LengthPredictor) -> None:
        if predictor.estimator.knowledge() is None:
            return
        bucket = self._bus.key_value(LENGTHS)
        key = f"{self._bus.run}.{domain}"
        data, revision = await bucket.get_bytes(key) or (b"", 0)
        record = self._decoded(domain, data)
        record_turns = 0
        if record is not None and record.estimator == name:
            record_turns = new_turns = record.turns
            # if fewer than before, another run of the same name has begun
            if record_turns >= predictor.merged:
                new_turns -= predictor.merged
            if new_turns and self._take(predictor, record, new_turns):
                predictor.merged = record_turns
        new = predictor.new
        if not new or (knowledge := predictor.estimator.knowledge()) is None:
            return
        new_revision = await bucket.update(
            key, record_of(domain, name, record_turns + new, knowledge), revision
        )
        if new_revision is not None:
            # not 0: turns may have ended during the update
            predictor.new -= new
            predictor.merged = record_turns + new

    def _decoded(self, domain: str, data: bytes) -> wire.LengthRecord | None:
        """Return a record; None if there is none, or none that decodes; it is then replaced."""
        try:
            record = codec.decode(data, wire.LengthRecord) if data else None
        except WireError as error:
            log.warning("lengths of %s: ignoring the record: %s", domain, error)
            return None
        assert record is None or isinstance(record, wire.LengthRecord)
        return record

    def _take(self, predictor: LengthPredictor, record: wire.LengthRecord, new_turns: int) -> bool:
        """Average with a record; return whether it fits this version of the estimator."""
        own = predictor.estimator.knowledge()
        record_knowledge = knowledge_of(record)
        if own is None or own.values.shape != record_knowledge.values.shape:
            return False
        return predictor.estimator.adopt(averaged(own, record_knowledge, predictor.new, new_turns))


def averaged(
    own: LengthKnowledge, theirs: LengthKnowledge, own_turns: int, other_turns: int
) -> LengthKnowledge:
    """Average two sides that started from the same means, weighted by the turns learnt since.

    A task that both know gets the mean of all its turns. If there are too many tasks, the other
    side's with the fewest turns are left out.
    """
    share = other_turns / (own_turns + other_turns)
    values = own.values + np.float32(share) * (theirs.values - own.values)
    tasks, first, entry = np.unique(
        np.concatenate([own.tasks, theirs.tasks]), return_index=True, return_inverse=True
    )
    weights = np.concatenate([own.counts, theirs.counts])
    means = np.concatenate([own.means, theirs.means])
    totals = np.bincount(entry, weights, len(tasks))
    task_means = np.bincount(entry, weights * means, len(tasks)) / np.maximum(totals, 1e-9)
    counts = np.zeros(len(tasks), np.float32)
    # not the sum: what both knew before would count twice
    np.maximum.at(counts, entry, weights)
    if len(tasks) > MAX_TASKS:
        entries = np.sort(np.lexsort((-counts, first >= len(own.tasks)))[:MAX_TASKS])
        tasks = tasks[entries]
        counts = counts[entries]
        task_means = task_means[entries]
    return LengthKnowledge(values, tasks, counts, task_means.astype(np.float32))


def record_of(domain: str, name: str, turns: int, knowledge: LengthKnowledge) -> wire.LengthRecord:
    """Return the message of an estimator's knowledge."""
    return wire.LengthRecord(
        domain=domain,
        estimator=name,
        turns=turns,
        values=wire.column(knowledge.values, "<f4"),
        tasks=wire.column(knowledge.tasks, "<i4"),
        counts=wire.column(knowledge.counts, "<f4"),
        means=wire.column(knowledge.means, "<f4"),
    )


def knowledge_of(record: wire.LengthRecord) -> LengthKnowledge:
    """Return the knowledge in a message."""
    columns = (record.values, record.tasks, record.counts, record.means)
    return LengthKnowledge(*(column.array() for column in columns))
