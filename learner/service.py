"""The learner process: takes the run, runs the training loop and writes a last checkpoint."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from broker.contract import wire
from broker.contract.streams import RUNS, SAMPLES
from broker.errors import ConfigError, Fenced, LostState, NotFinite, UserError
from broker.jetstream.bus import Bus
from broker.jetstream.stored_message import peek_message
from broker.runtime.presence import Roster
from broker.runtime.process import Member, Stop, Stopped, unless_stopped
from broker.runtime.shared_devices import SharedDevices, sharing
from broker.settings.run_settings import RunSettings
from broker.system import logs
from broker.system.process_identity import this_process
from broker.telemetry.traces import require_installed
from learner.backends.parts.part_file import DamagedFileError
from learner.checkpoints import checkpoint
from learner.credit.dataset_record import describe_datasets, note_datasets
from learner.credit.ledger import Ledger, RulesUpdate
from learner.credit.record_intake import rules_change
from learner.credit.recovery import Recovery
from learner.credit.task_sources import TaskSources
from learner.credit.ticket_rules import TicketRules, rules_of
from learner.give_up import FailureMonitor, watch_hubs
from learner.loop import TrainingLoop
from learner.loop_services import open_services, open_trackers
from learner.operator_requests import OperatorRequests
from learner.prepare import data_digests, nothing_left, run_folder, write_config
from learner.reporting.missing_roles import required_roles, watch_missing_roles
from learner.reporting.starts import note_start
from learner.reporting.status import ID, LearnerStatus
from learner.resume_checks import (
    check_continuing,
    format_change,
    read_settings,
    setting_changes,
)
from learner.rival_learners import RivalDetector
from learner.run_folder import note_broker, note_epoch, noted_epoch
from learner.run_watch import EpochWatch
from learner.training_setup import begin_imports, open_training
from learner.warm_start import ModelPreparation, PreparationInterrupted
from learner.weights.refusal_watch import watch_refusals
from learner.weights.refusals import CheckOffer, OfferRefusals
from rlearner_text.model_files import share

if TYPE_CHECKING:
    from broker.weights.sender.send import WeightSender

log = logging.getLogger(__name__)

ALL_DONE: Final = wire.DesiredState(state="stopped", reason="all steps are done")


async def serve_learner(
    settings: RunSettings,
    url: str,
    stop: Stop,
    *,
    connect_deadline_s: float | None = None,
    rebase: bool = False,
    take_over: bool = False,
    force: bool = False,
    shared: Sequence[str] = (),
) -> None:
    """Run the learner until all steps are done or a stop is requested.

    Args:
        settings: validated, with ``run.name`` set.
        url: address of the broker.
        rebase: continue although the broker has lost its store, see ``learner/credit/recovery.py``.
        take_over: start although another learner of the run is alive; it is fenced once this one
            has loaded.
        force: continue with settings that a run should not change, see
            ``learner/resume_checks.py``.
        shared: devices on which to take turns with rollout servers.

    Raises:
        UserError: if another learner is alive or took over, the broker lost state, or the user must
            fix something.
    """
    run = str(settings.run.name)
    folder = run_folder(settings.run)
    logs.identify(run=run, role="learner", process_id=ID)
    if settings.telemetry.traces:
        require_installed()
    is_new = not (folder / "config.yaml").exists()
    for change in await asyncio.to_thread(check_continuing, settings, force=force):
        log.info("changed since the last start: %s", change)
    stop.health.set("starting", f"run {run}: waiting for a broker")
    try:
        async with AsyncExitStack() as stack:
            bus = await unless_stopped(
                stop, Bus.connect(url, run, name=ID, role=ID, deadline_s=connect_deadline_s)
            )
            stack.push_async_callback(bus.close)
            # Imports take seconds: they overlap with the broker and the reading of files.
            begin_imports(settings.train.backend)
            bus.replicas = settings.broker.replicas
            await _refuse_foreign_run(bus, folder, is_new)
            rivals = await _refuse_rivals(stack, bus, folder, stop) if not take_over else None
            if is_new:
                # demonstrations need it; a restart replaces it once it holds the run
                write_config(folder, settings.to_plain())
                note_broker(folder, url)
            await bus.ensure_streams()
            stop.health.set("starting", f"run {run}: opening")
            stop.health.joined()
            opening = _open_learner(
                settings, folder, bus, stop, rivals, rebase=rebase, shared=shared
            )
            learner = await stack.enter_async_context(opening)
            # Only now: until then another learner may hold the run, on another broker.
            note_broker(folder, url)
            await learner.run()
    except (LostState, Fenced) as error:
        raise UserError(str(error)) from None
    except PreparationInterrupted:
        raise Stopped(stop.reason) from None


async def _refuse_foreign_run(bus: Bus, folder: Path, is_new: bool) -> None:
    """Refuse a run name that the broker already knows from elsewhere.

    Raises:
        UserError: if the broker already knows a run of this name that this folder did not create.
    """
    entry = await bus.key_value(RUNS).get(bus.run)
    if entry is not None and is_new:
        problem = f"run.name: the broker already has a run {bus.run}"
        raise UserError(f"{problem}, and {folder} does not come from it; choose another run.name")


async def _refuse_rivals(
    stack: AsyncExitStack, bus: Bus, folder: Path, stop: Stop
) -> RivalDetector:
    """Start listening for other learners of the run.

    Raises:
        UserError: if one is alive.
    """
    rivals = RivalDetector(bus, folder)
    stack.push_async_callback(rivals.close)
    await rivals.start()
    await unless_stopped(stop, rivals.refuse())
    return rivals


@asynccontextmanager
async def _open_learner(
    settings: RunSettings,
    folder: Path,
    bus: Bus,
    stop: Stop,
    rivals: RivalDetector | None,
    *,
    rebase: bool,
    shared: Sequence[str],
) -> AsyncIterator[LearnerService]:
    """Open everything between the broker and the loop; close it in reverse order."""
    async with AsyncExitStack() as stack:
        placeholder = wire.RunSpec(
            run=bus.run,
            wire_version=wire.WIRE_VERSION,
            epoch=0,
            config=settings.to_plain(),
            model_path="",
        )
        member = Member(bus, placeholder, ID, "learner", stop)
        stack.push_async_callback(member.leave)
        roster = Roster(bus, beats=("rollout",), members=("envhub", "rewardhub"))
        devices = await stack.enter_async_context(sharing(member, shared, exclusive=True))
        learner = LearnerService(
            settings, folder, member, roster=roster, rivals=rivals, devices=devices
        )
        member.announce(learner.status.presence)
        member.report(learner.status.values, learner.status.text)
        member.spawn(roster.serve())
        stack.push_async_callback(roster.close)
        await learner.prepare(stack, rebase=rebase)
        yield learner


class LearnerService:
    """One incarnation of the learner of one run.

    Args:
        rivals: checked before the run is taken; None takes it over from any learner.
        devices: to take turns on with rollout servers.
    """

    def __init__(
        self,
        settings: RunSettings,
        folder: Path,
        member: Member,
        roster: Roster,
        rivals: RivalDetector | None,
        devices: SharedDevices | None = None,
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.member = member
        self.roster = roster
        self.rivals = rivals
        self.bus = member.bus
        self.stop = member.stop
        self.devices = devices
        self.train = settings.train
        self.status = LearnerStatus(
            self.stop, self.train.groups_per_step, lambda: self.watch.epoch, folder
        )
        self.watch = EpochWatch(self.bus, self.stop, self.status.say_waiting)
        self.checkpoints = folder / "checkpoints"
        self._damaged: list[Path] = []  # checkpoints that cannot be read

    # ----------------------------------------------------------------------------------------------
    # prepare

    async def prepare(self, stack: AsyncExitStack, *, rebase: bool = False) -> None:
        """Load the model, take the epoch, and open the weight sender and the other services.

        Steps that a user error can fail come before the epoch where possible, so that a healthy
        learner keeps the run.
        """
        await self.watch.open()
        self.digests = await asyncio.to_thread(data_digests, self.settings)
        self.datasets = await asyncio.to_thread(describe_datasets, self.settings)
        self.task_sources = await asyncio.to_thread(TaskSources, self.settings)
        self.model_path = model_path = await self._model_path()
        trackers = await open_trackers(
            stack,
            self.settings,
            self.folder,
            run=self.bus.run,
            stop=self.stop,
            status=self.status,
        )
        recovery = await self._take_over(stack, model_path, rebase=rebase)
        self.resumed = await recovery.recover()
        appending = self._append_rules()
        if self.ledger.state.position or await self.bus.last_seq(SAMPLES):
            # Not awaited: if the store is full, the log must be trimmed first.
            self.member.spawn(appending)
        else:
            # A new log begins with its rules.
            await appending
        await asyncio.to_thread(checkpoint.remove_partial, self.checkpoints)
        for path in self._damaged:
            await asyncio.to_thread(checkpoint.set_aside, path)
        self.sender = await self._open_sender(stack)
        self.services = await open_services(
            stack,
            self.settings,
            self.folder,
            member=self.member,
            roster=self.roster,
            ledger=self.ledger,
            training=self.training,
            watch=self.watch,
            status=self.status,
            trackers=trackers,
            newest_step=self.ledger.state.version if self._newest() else -1,
            store_pass_rates=partial(self.task_sources.store_pass_rates, self.folder),
        )
        self.status.metrics_writer = self.services.metrics_writer
        self.member.spawn(self._abandon_on_stop())

    async def _take_over(self, stack: AsyncExitStack, model_path: str, *, rebase: bool) -> Recovery:
        """Load the newest checkpoint and take the run.

        The current holder continues while this learner loads. If a newer checkpoint exists
        afterwards, it is loaded instead; it is the last one, because this learner holds the run
        from then on.
        """
        while True:
            path = self._newest()
            recovery = None
            async with AsyncExitStack() as loading:
                try:
                    recovery = await self._load(loading, path, model_path, rebase=rebase)
                except (UserError, LostState, OSError) as error:
                    # A checkpoint that is no longer the newest was deleted, or the log was trimmed
                    # past it: try the newest one.
                    if path == self._newest() and not self._pass_over(path, error):
                        raise
                    if path in self._damaged:
                        continue
                if not self.watch.epoch:
                    await self._take_epoch(model_path)
                if recovery is not None and path == self._newest():
                    stack.push_async_callback(loading.pop_all().aclose)
                    return recovery
            log.warning(
                "another learner continued while this one was loading, to %s", self._newest()
            )

    def _newest(self) -> Path | None:
        paths = checkpoint.list_checkpoints(self.checkpoints)
        return next((path for path in reversed(paths) if path not in self._damaged), None)

    def _pass_over(self, path: Path | None, error: Exception) -> bool:
        """Resume from the checkpoint before a damaged one, if there is one."""
        if path is None or not isinstance(error, DamagedFileError):
            return False
        self._damaged.append(path)
        if (previous := self._newest()) is None:
            return False
        log.warning("%s; the run resumes from %s, and trains again from there", error, previous)
        return True

    async def _load(
        self, stack: AsyncExitStack, path: Path | None, model_path: str, *, rebase: bool
    ) -> Recovery:
        """Load model and ledger, from a checkpoint if there is one; inspect the broker."""
        # In a thread: another one may be importing torch, and the event loop would wait for it.
        await asyncio.to_thread(import_module, "learner.weights.offering")
        from learner.weights.offering import WeightOffering
        from learner.weights.probing import read_probe_ids

        resumed = checkpoint.read_checkpoint(path) if path is not None else None
        if resumed is not None:
            log.info("resuming from %s", resumed.path)
        self.ledger = self.status.ledger = (
            Ledger.load(resumed.ledger) if resumed else Ledger(await self._first_rules())
        )
        self.status.say("loading the model")
        try:
            from_path = str(resumed.path) if resumed else model_path
            keeps_samples = bool(self.settings.samples.keep)
            # The seed of the configuration may have changed since.
            seed = self.ledger.rules.seed
            self.training = await open_training(
                self.settings,
                from_path,
                model_path,
                devices=self.devices,
                folder=self.folder,
                record_tokens=keeps_samples,
                seed=seed,
                profile=self.train.profile.plan(self.folder, ID),
            )
            self.training.spans = self.member.spans
        except ConfigError as error:
            if resumed is None or error.value != str(resumed.path):
                raise
            problem = f"{resumed.path} is damaged: {error.allowed.partition(';')[0]}"
            raise DamagedFileError(f"{problem}; restore its files, or begin a new run") from None
        stack.push_async_callback(asyncio.to_thread, self.training.close)
        if resumed is not None:
            await self.training.call(partial(checkpoint.load_state, resumed, self.training.backend))
        model = self.settings.model
        max_context = self.settings.rollout.max_context_tokens
        vocab_size = self.training.backend.vocab_size
        probe_ids = await asyncio.to_thread(
            read_probe_ids, model_path, model, vocab_size=vocab_size, max_context=max_context
        )
        self.offering = await self.training.call(
            lambda: WeightOffering(
                self.training.backend,
                self.train,
                model.dtype,
                probe_ids,
                engine_dtype=self.settings.rollout.dtype,
                exact=self.settings.rollout.exact,
            )
        )
        if self.ledger.state.version >= self.train.steps:
            await self._end_completed_run(self.ledger.state.version)
        recovery = Recovery(self.bus, self.ledger, self.folder, self.training.backend.vocab_size)
        await recovery.inspect_broker(rebase=rebase)
        return recovery

    def _rules(self) -> TicketRules:
        """Return the rules of the configuration."""
        algorithm = self.settings.algorithm
        return rules_of(
            self.train,
            algorithm,
            self.settings.domains,
            self.settings.run.seed,
            tasks=self.task_sources.rules,
        )

    async def _first_rules(self) -> TicketRules:
        """Return the first rules of the log: a learner killed early may have appended some."""
        first_message = await peek_message(self.bus, SAMPLES, 1)
        if first_message is not None and isinstance(first_message.record.message, wire.RulesChange):
            update = rules_change(first_message.record.message).record
            if isinstance(update, RulesUpdate):
                return update.rules
        return self._rules()

    async def _append_rules(self) -> None:
        """Append the configuration's rules to the log; earlier records keep those of their time."""
        change = wire.RulesChange(epoch=self.watch.epoch, rules=self._rules().plain())
        await self.bus.publish(
            SAMPLES, change, message_id=f"rules.{self.bus.run}.{self.watch.epoch}"
        )

    async def _end_completed_run(self, steps: int) -> NoReturn:
        """Announce the end of a completed run and exit cleanly.

        A supervisor restarts a killed learner even after its last step, and treats any other exit
        as a failure.

        Raises:
            Stopped: always.
        """
        if await self.watch.desired() != "stopped":
            await self.watch.put(ALL_DONE)
        log.warning("%s", nothing_left(self.bus.run, steps))
        raise Stopped(ALL_DONE.reason)

    async def _model_path(self) -> str:
        needs_warm_start = self._needs_warm_start()
        preparation = ModelPreparation(
            self.settings, self.folder, self.status.say, make_warm_start=needs_warm_start
        )
        work = asyncio.create_task(asyncio.to_thread(preparation.model_path))
        stopping = asyncio.create_task(self.stop.asked.wait())
        try:
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                preparation.stop()
            stopping.cancel()
        return await work

    def _needs_warm_start(self) -> bool:
        """Return whether a new run, the reference or adapters need the first weights."""
        if self._newest() is None:
            return True
        began_with = ((read_settings(self.folder) or {}).get("warm_start") or {}).get("steps")
        has_reference = self.settings.algorithm.kl_coef > 0 or self.train.lora is not None
        return bool(began_with) and has_reference

    async def _take_epoch(self, model_path: str) -> None:
        """Fence the previous holder of the run and let the other processes join."""
        run = self.bus.run
        config = self.settings.to_plain()
        digests = self.digests
        with_code = self.settings.model.trust_remote_code
        spec = wire.RunSpec(
            run=run,
            wire_version=wire.WIRE_VERSION,
            epoch=0,
            config=config,
            model_path=model_path,
            data_digests=digests,
            model_files=await share(self.bus, model_path, with_code=with_code),
        )
        while not self.watch.epoch:
            cleared_epoch = None
            if self.rivals is not None:
                cleared_epoch = await unless_stopped(self.stop, self.rivals.refuse())
            # If another learner was faster, check that one.
            with suppress(Fenced):
                await self.watch.take_epoch(
                    spec, above=noted_epoch(self.folder), cleared_epoch=cleared_epoch
                )
        note_epoch(self.folder, self.watch.epoch, this_process())
        previous = read_settings(self.folder) or config
        changes = [format_change(change) for change in setting_changes(previous, config)]
        write_config(self.folder, config)
        note_datasets(self.folder, self.datasets)
        await asyncio.to_thread(
            partial(
                note_start,
                self.folder,
                config,
                self.watch.epoch,
                data=digests,
                model=model_path,
                changes=changes,
            )
        )
        for work in self.watch.services():
            self.member.spawn(work)

    async def _open_sender(self, stack: AsyncExitStack) -> WeightSender:
        sender = await self.training.call(
            lambda: self.offering.sender(self.bus, self.roster, self.watch.epoch)
        )
        await sender.start()
        stack.push_async_callback(sender.close)
        await self.training.call(lambda: self.offering.serve(sender))
        # A learner that can no longer send weights must be restarted.
        self.member.spawn(sender.join())
        if self.train.weights_snapshot_every:
            from learner.weights.addresses import weights_address
            from learner.weights.snapshots import open_snapshots

            bind = self.settings.broker.bind
            if self.train.weights_snapshot_cert is not None:
                bind = weights_address(self.train.weights_interface, self.bus.link.url)
            await open_snapshots(
                stack,
                self.train,
                bind,
                folder=self.folder,
                run=self.bus.run,
                sender=sender,
            )
        return sender

    # ----------------------------------------------------------------------------------------------
    # run

    async def run(self) -> None:
        """Run the loop, write the last checkpoint and announce the end of the run."""
        ledger = self.ledger
        roster = self.roster
        services = self.services
        failures = self.settings.failures
        failure_monitor = FailureMonitor(
            failures, self.train.groups_per_step, self.settings.trained_domains
        )
        loop = TrainingLoop(
            self.bus,
            ledger,
            self.training,
            issuer=services.issuer,
            evaluator=services.evaluator,
            metrics_writer=services.metrics_writer,
            records=services.records,
            stop=self.stop,
            resumed=self.resumed,
            offer=self._offer,
            fleet_values=self._other_values,
            checkpoint=services.saver.at_boundary,
            checkpoint_every=1,
            requested=services.saver.requested,
            between_steps=services.saver.between_steps,
            failure_monitor=failure_monitor,
            steps=self.train.steps,
        )
        say = self.status.say_waiting
        settings = self.settings
        roles = required_roles(settings.domains, settings.teachers, settings.policies)
        self.member.spawn(
            watch_missing_roles(
                self.bus.run, roster, roles, has_work=lambda: bool(ledger.open), say=say
            )
        )

        def is_paused() -> bool:
            return self.watch.paused

        self.member.spawn(watch_hubs(failure_monitor, roster, is_paused, self.stop.request))
        refusals = OfferRefusals(self.watch.epoch, others_s=failures.give_up_after_s)
        self.member.spawn(
            watch_refusals(
                refusals,
                self.sender,
                self._check_offer,
                roster=roster,
                paused=is_paused,
                end=self.stop.request,
            )
        )
        tasks = self.settings.eval.tasks
        requests = OperatorRequests(
            self.bus,
            ledger,
            services.saver,
            evaluator=services.evaluator,
            stop=self.stop,
            num_tasks=tasks,
        )
        self.member.spawn(requests.serve())
        self.status.serving = True
        self.status.say("training")
        try:
            is_done = await loop.run()
        except LostState:
            # A learner that took over may have trimmed the log: report that instead.
            await self.watch.refuse_if_fenced()
            raise
        # No checkpoint is written: the run must resume from finite weights.
        except NotFinite as error:
            await self.watch.put(wire.DesiredState(state="stopped", reason=str(error)))
            raise
        self.watch.refuse_if_seen_fenced()
        verdict = failure_monitor.verdict or refusals.verdict
        if not is_done and verdict and self.stop.reason == verdict:
            await self._give_up(verdict, loop)
        await services.saver.finish(loop.boundary)
        if is_done:
            await self.watch.put(ALL_DONE)
            self.status.say("done")

    async def _give_up(self, verdict: str, loop: TrainingLoop) -> NoReturn:
        """Write a checkpoint if that is possible, and end the run for all processes.

        Raises:
            UserError: always, with the verdict.
        """
        try:
            await self.services.saver.finish(loop.boundary)
        except Fenced:
            raise
        # Whatever made the run fail may also prevent a checkpoint; the verdict is the cause.
        except Exception as error:  # noqa: BLE001
            log.error("no checkpoint was written: %s", " ".join(str(error).split()))
        # Hubs hold the code that failed, servers the model: all must restart.
        await self.watch.put(wire.DesiredState(state="stopped", reason=verdict))
        raise UserError(verdict)

    async def _check_offer(self, check: CheckOffer) -> str:
        """Return the first fault of the weights on offer, as far as this process can find one."""
        model = self.settings.model
        if check.kind == "layout":
            return await self.training.call(
                lambda: self.offering.layout_difference(self.model_path, model)
            )
        return await self.training.call(self.offering.logprobs_difference)

    def _offer(self, version: int) -> float:
        """Offer one version; runs in the training thread."""
        with self.member.spans.work("weights", step=version):
            return self.sender.offer(version, self.offering.tensors(), self.offering.probe())

    def _other_values(self) -> dict[str, float]:
        """Return the step metrics that are measured outside training."""
        values: dict[str, float] = self.sender.metrics()
        values |= self.training.turn_values()
        return (
            values
            | self.services.saver.values()
            | {"time/broadcast_weights": values.get("weights/seconds", 0.0)}
        )

    # ----------------------------------------------------------------------------------------------
    # next to the loop

    async def _abandon_on_stop(self) -> None:
        await self.stop.asked.wait()
        self.training.abandon()
