"""Opens the services next to the learner's loop: metrics, records, checkpoints, tickets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from broker.contract.streams import EVALTICKETS, TICKETS
from broker.runtime.presence import Roster
from broker.runtime.process import Member, Stop
from broker.settings.config import PRIVATE_STORE_GIB
from broker.settings.run_settings import RunSettings
from broker.settings.timeouts import seconds
from learner.checkpoints.saver import CheckpointSaver
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

    metrics_writer: MetricsWriter
    records: LedgerRecorder
    saver: CheckpointSaver
    evaluator: Evaluator
    issuer: TicketIssuer


def _startup_retry(folder: Path, stop: Stop, status: LearnerStatus) -> DiskRetry:
    return DiskRetry(folder, stop, "the learner does not start", status.say_waiting)


async def open_trackers(
    stack: AsyncExitStack,
    settings: RunSettings,
    folder: Path,
    *,
    run: str,
    stop: Stop,
    status: LearnerStatus,
) -> TrackerGroup:
    """Open the trackers before the learner takes the run: their settings may be refused."""
    trackers = await _startup_retry(folder, stop, status).in_thread(
        TrackerGroup, settings.trackers, folder, run, settings.model_dump(mode="json")
    )
    stack.callback(trackers.close)
    return trackers


async def open_services(
    stack: AsyncExitStack,
    settings: RunSettings,
    folder: Path,
    *,
    member: Member,
    roster: Roster,
    ledger: Ledger,
    training: TrainingThread,
    watch: EpochWatch,
    status: LearnerStatus,
    trackers: TrackerGroup,
    newest_step: int,
    store_pass_rates: Callable[[Mapping[str, Any]], None],
) -> LearnerServices:
    """Open the services one by one; the stack closes them in reverse order.

    Args:
        folder: the run's.
        newest_step: step of the newest checkpoint, -1 if there is none.
        store_pass_rates: called with the dumped ledger of each checkpoint.
    """
    bus = member.bus
    stop = member.stop
    startup_retry = _startup_retry(folder, stop, status)
    transcripts = TranscriptFactory(settings.model, folder)
    showcase = EpisodeShowcase(trackers, settings.trackers, transcripts, folder)
    metrics_writer = await startup_retry.in_thread(
        partial(
            MetricsWriter,
            bus,
            roster,
            ledger,
            trackers=trackers,
            showcase=showcase,
            path=folder / "metrics.jsonl",
            last_step=ledger.state.version,
            stop=stop,
            say=status.say_waiting,
        )
    )
    stack.callback(metrics_writer.close)
    samples = settings.samples
    records = await startup_retry.in_thread(
        partial(LedgerRecorder, folder, ledger, samples, stop=stop, say=status.say_waiting)
    )
    stack.callback(records.close)
    saver = CheckpointSaver(
        folder / "checkpoints",
        settings.checkpoint,
        bus,
        ledger=ledger,
        training=training,
        records=records,
        watch=watch,
        stop=stop,
        say=status.say_waiting,
        newest_step=newest_step,
        pressed=lambda: gate.pressed,
        store_pass_rates=store_pass_rates,
    )
    gate = StoreGate(
        bus,
        ledger,
        limit_gib=settings.broker.store_max_gib,
        press_from_gib=PRIVATE_STORE_GIB,
        say=status.say_waiting,
        relieve=saver.relieve,
    )
    stack.push_async_callback(saver.close)
    await saver.open()
    await gate.look()
    evaluation = settings.eval
    first_number = await bus.last_seq(EVALTICKETS) + 1
    evaluations = EvaluationQueue(
        evaluation, settings.domains, settings.run.seed, first_number=first_number
    )
    evaluator = Evaluator(
        bus,
        evaluations,
        roster,
        folder=folder / "evals",
        baseline=evaluation.baseline if evaluation.every_steps else "",
        disk_retry=DiskRetry(
            folder,
            stop,
            "evaluated episodes are not kept, and the run does not end,",
            status.say_waiting,
        ),
        transcripts=transcripts,
        opponents=evaluation.against,
        show=showcase.evaluated,
        say=status.say_waiting,
    )
    await watch.refuse_if_fenced()
    await evaluator.open()
    await evaluator.restore(ledger.state.version, metrics_writer.evaluations_since)
    issuer = TicketIssuer(bus, TICKETS, gate.wait, member.spans.traces)
    timeout_s = seconds(settings.train.ticket_timeout_s)
    pools = {
        name: {reward.pool for reward in domain.rewards}
        for name, domain in settings.domains.items()
    }
    reaper = TicketReaper(
        bus,
        ledger,
        roster,
        timeout_s=timeout_s,
        is_paused=lambda: watch.paused or training.on_device,
        pools=pools,
    )
    orphans = OrphanReaper(bus, ledger, len(set[str]().union(*pools.values())))
    coroutines = [*metrics_writer.services(), *evaluator.services()]
    coroutines += [service.serve() for service in (issuer, gate, reaper, orphans)]
    for coroutine in coroutines:
        member.spawn(coroutine)
    return LearnerServices(metrics_writer, records, saver, evaluator=evaluator, issuer=issuer)
