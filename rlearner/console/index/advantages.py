"""Computes advantages again, where they follow from the group's records and settings."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

import numpy as np
from pydantic import ValidationError

from broker.contract import wire
from broker.contract.wire import PlainSettings
from broker.errors import ConfigError
from broker.settings.registry import resolve
from broker.settings.run_settings import stored_section
from learner.algorithm.advantages import ADVANTAGES
from learner.algorithm.assembly import SampleAssembler, waits_for_batch
from learner.algorithm.samples import TrainSample
from learner.config import AlgorithmSection
from rlearner.console.index.answers import Provenance
from rlearner.console.index.records import read_record

MAX_STEP_BYTES: Final = 256 * 2**20  # of the records of a step whose groups are all needed
Advantages = list[dict[int, float]]  # of each trajectory, by position of the trained tokens


def group_advantages(
    connection: sqlite3.Connection,
    folder: Path,
    config: PlainSettings,
    group: wire.Group,
    way: Provenance,
) -> tuple[Advantages | None, str]:
    """Return the advantages of a group's tokens under the run's present settings, or None and why
    they are not known.

    An estimator that is not part of rlearner is code of the run, which is not executed here.
    """
    try:
        algorithm = stored_section(config, "algorithm", AlgorithmSection)
        name = algorithm.adv_estimator
        if name not in ADVANTAGES:
            return None, f"algorithm.adv_estimator is {name}, which is code of the run"
        assembler = SampleAssembler(resolve("advantages", name, ADVANTAGES), algorithm)
        if not assembler.needs_batch:
            return [_by_position(sample) for sample in assembler.stream(group)], ""
        if assembler.needs_scores:
            return None, f"they need the models' scores ({waits_for_batch(algorithm) or name})"
        groups, reason = _groups_of_step(connection, folder, group, way)
        if reason:
            return None, reason
        samples = iter(assembler.batch(groups))
        positions = {
            group.ticket: [_by_position(next(samples)) for _ in group.trajectories]
            for group in groups
        }
    except (ConfigError, ValidationError, ValueError, TypeError, ArithmeticError) as error:
        return (
            None,
            f"they cannot be computed: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}",
        )
    if group.ticket not in positions:
        return None, "the group was not selected for training (algorithm.keep_fraction)"
    return positions[group.ticket], ""


def _groups_of_step(
    connection: sqlite3.Connection, folder: Path, group: wire.Group, way: Provenance
) -> tuple[list[wire.Group], str]:
    """Return the groups that a group's step was trained on, in order, or why they are missing."""
    if not way.step:
        return [], "they depend on the whole step, and no step has trained the group"
    rows = connection.execute(
        "SELECT l.seq, f.length FROM ledger_lines l LEFT JOIN frames f ON f.seq = l.seq"
        " WHERE l.step = ? AND l.ticket > 0 AND l.state = 'trained' ORDER BY l.first, l.end",
        (way.step,),
    ).fetchall()
    if sum(length or 0 for _, length in rows) > MAX_STEP_BYTES:
        return (
            [],
            f"they depend on the whole step, whose records have more than {MAX_STEP_BYTES >> 20} "
            "MiB",
        )
    groups = []
    for seq, _ in rows:
        record = read_record(connection, folder, seq)
        if record is None or not isinstance(record.message, wire.Group):
            return (
                [],
                f"they depend on the whole step, and record {seq} of it is not in the archive",
            )
        groups.append(record.message)
    return groups, ""


def _by_position(sample: TrainSample) -> dict[int, float]:
    return {int(at): float(sample.advantages[at]) for at in np.flatnonzero(sample.loss_mask)}
