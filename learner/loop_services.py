"""Opens the services next to the learner's loop: metrics, records, checkpoints, evaluation,
tickets.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.contract.streams import EVALTICKETS, TICKETS
from broker.runtime.presence import Roster
from broker.runtime.process import Member, Stop
from broker.settings.config import PRIVATE_STORE_GIB, BrokerSection
from broker.settings.runspec import domains, section
from broker.settings.timeouts import seconds
from learner.checkpoints.saver import CheckpointSaver
from learner.config import (
    CheckpointSection,
    EvalSection,
    SamplesSection,
    TrackersSection,
    TrainSection,
)
from learner.credit.ledger import Ledger
from learner.credit.orphans import OrphanReaper
from learner.credit.records import LedgerRecorder
from learner.credit.store_gate import StoreGate
from learner.credit.tickets import TicketIssuer, TicketReaper
from learner.disk_retry import DiskRetry
from learner.evaluation.evaluation import EvaluationQueue
from learner.evaluation.evaluator import Evaluator
from learner.reporting.metrics_writer import MetricsWriter
from learner.reporting.showcase import EpisodeShowcase
from learner.reporting.status import LearnerStatus
from learner.reporting.trackers import TrackerGroup
from learner.reporting.transcripts import TranscriptFactory
from learner.run_watch import EpochWatch
from learner.training import TrainingThread


@dataclass(frozen=True)
class LearnerServices:
    """The open services, which run as long as the member does."""

    book: MetricsWriter
    records: LedgerRecorder
    saver: CheckpointSaver
    evaluator: Evaluator
    issuer: TicketIssuer


def _patience(folder: Path, stop: Stop, shown: LearnerStatus) -> DiskRetry:
    return DiskRetry(folder, stop, "the learner does not start", shown.say_waiting)


async def open_trackers(
    stack: AsyncExitStack,
    config: dict[str, Any],
    folder: Path,
    run: str,
    stop: Stop,
    shown: LearnerStatus,
) -> TrackerGroup:
    """Open the trackers; needs no epoch, so that refused settings end a learner before it has the
    run.
    """
    settings = section(config, "trackers", TrackersSection)
    trackers = await _patience(folder, stop, shown).in_thread(
        TrackerGroup, settings, folder, run, config
    )
    stack.callback(trackers.close)
    return trackers


async def open_services(
    stack: AsyncExitStack,
    config: dict[str, Any],
    folder: Path,
    member: Member,
    roster: Roster,
    ledger: Ledger,
    training: TrainingThread,
    watch: EpochWatch,
    shown: LearnerStatus,
    trackers: TrackerGroup,
    written: int,
) -> LearnerServices:
    """Open the services one by one; the stack closes them in reverse order.

    Args:
        folder: the run's.
        written: step of the newest checkpoint, -1 if there is none.
    """
    bus = member.bus
    stop = member.stop
    shared = (stop, shown.say_waiting)
    patience = _patience(folder, stop, shown)
    lines = folder / "metrics.jsonl"
    version = ledger.state.version
    transcripts = TranscriptFactory(config, folder)
    showcase = EpisodeShowcase(
        trackers, section(config, "trackers", TrackersSection), transcripts, folder
    )
    book = await patience.in_thread(
        MetricsWriter, bus, roster, ledger, trackers, showcase, lines, version, *shared
    )
    stack.callback(book.close)
    samples = section(config, "samples", SamplesSection)
    records = await patience.in_thread(LedgerRecorder, folder, ledger, samples, *shared)
    stack.callback(records.close)
    settings = section(config, "checkpoint", CheckpointSection)
    target = folder / "checkpoints"
    state = (ledger, training, records, watch)
    saver = CheckpointSaver(target, settings, bus, *state, *shared, written, lambda: gate.pressed)
    limit_gib = section(config, "broker", BrokerSection).store_max_gib
    gate = StoreGate(bus, ledger, limit_gib, PRIVATE_STORE_GIB, shown.say_waiting, saver.relieve)
    stack.push_async_callback(saver.close)
    await saver.open()
    await gate.look()
    evaluation = section(config, "eval", EvalSection)
    first = await bus.last_seq(EVALTICKETS) + 1
    evaluations = EvaluationQueue(evaluation, domains(config), config["run"]["seed"], first)
    baseline = evaluation.baseline if evaluation.every_steps else ""
    retry = DiskRetry(
        folder,
        stop,
        "evaluated episodes are not kept, and the run does not end,",
        shown.say_waiting,
    )
    kept = folder / "evals"
    against = evaluation.against
    show = showcase.evaluated
    evaluator = Evaluator(
        bus, evaluations, roster, kept, baseline, retry, transcripts, against, show=show
    )
    await watch.refuse_if_fenced()
    await evaluator.open()
    issuer = TicketIssuer(bus, TICKETS, gate.wait, member.spans.traces)
    timeout_s = seconds(section(config, "train", TrainSection).ticket_timeout_s)
    pools = {
        name: {reward.pool for reward in domain.rewards} for name, domain in domains(config).items()
    }
    reaper = TicketReaper(
        bus, ledger, roster, timeout_s, lambda: watch.paused or training.on_device, pools=pools
    )
    orphans = OrphanReaper(bus, ledger, len(set[str]().union(*pools.values())))
    services = (issuer, gate, reaper, orphans)
    for work in (*book.services(), *evaluator.services(), *(one.serve() for one in services)):
        member.spawn(work)
    return LearnerServices(book, records, saver, evaluator, issuer)
