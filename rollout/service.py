"""The rollout server: joins a run, loads an engine, answers requests, follows the weights, drains.

Only weights whose probe matched serve requests; until then the server's presence is ``starting``
and requests wait.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from broker.channel import carriers
from broker.channel.listening import listening_address
from broker.contract import wire
from broker.contract.checks import PRESENCE_CHARS
from broker.contract.wire import ACTOR
from broker.errors import UserError
from broker.runtime import process
from broker.runtime.shared_devices import SharedDevices, sharing
from broker.settings import registry
from broker.settings.run_settings import RunSettings
from broker.settings.schema.model import ModelSection
from broker.system import gpus
from broker.system.batch_job import batch_job
from broker.system.devices import device_names
from broker.telemetry.operator_profile import ProfilePlan
from rlearner_text.config import check_model_path
from rlearner_text.model_files import LocalModel, local_model
from rollout import replicas
from rollout.checks import refuse_sleepless
from rollout.config import RolloutSection
from rollout.engines import ENGINES
from rollout.engines.base import Engine, EngineConfig, SleepingEngine
from rollout.interval_metrics import IntervalMetrics
from rollout.request_handler import RequestHandler
from rollout.server_options import check_arguments, server_section
from rollout.turns import ServerTurns

if TYPE_CHECKING:
    from torch import Tensor

    from broker.weights.receiver.receive import WeightReceiver
    from broker.weights.snapshots.snapshot_source import SnapshotSource
    from rollout.http import HttpApi

log = logging.getLogger(__name__)

FROZEN: Final = 0  # version of a policy whose weights never change
PROBLEM_CHARS: Final = PRESENCE_CHARS["problem"]
# of waiting: a run that is up may reject the arguments before any import
IMPORT_AFTER_S: Final = 0.5

# between the last reply and closing the connection, so that clients read the reply first
CLOSE_DELAY_S: Final = 0.25


async def run(options: argparse.Namespace, stop: process.Stop) -> None:
    """Run a rollout server until it is stopped; ``options`` are those of ``rollout.cli``.

    Raises:
        UserError: if a GPU, an engine, a model or a setting cannot be used.
    """
    device = gpus.select(options.gpus)  # first: torch must not be loaded before
    check_arguments(options)
    importing = _Importing(options.engine or RolloutSection().engine)
    async with process.join("rollout", options, stop, connected=importing.begin) as member:
        importing.end()
        while True:
            section = server_section(member.settings, options)
            parts = replicas.gpu_shares(options.gpus, section)
            if len(parts) > 1:
                break
            shared = (
                await asyncio.to_thread(device_names, options.gpus) if options.share_gpus else []
            )
            await _serve(
                member,
                member.spec,
                section,
                device=device,
                listen=(options.interface, options.bind),
                shared=shared,
            )
            if stop.asked.is_set():
                return
            log.info(
                "epoch %d changes the settings of rollout servers: restarting", member.spec.epoch
            )
        command = replicas.replica_command(options, member.bus.run, section)
    await replicas.run(parts, command, stop, drain_s=section.drain_timeout_s)


async def _serve(
    member: process.Member,
    spec: wire.RunSpec,
    section: RolloutSection,
    device: gpus.Device,
    listen: tuple[str | None, str | None],
    shared: Sequence[str] = (),
) -> None:
    """Serve one engine on all visible GPUs until a stop is requested or a RunSpec requires a
    restart.

    Args:
        listen: --interface and --bind.
        shared: devices on which to take turns with others.

    Raises:
        UserError: if the engine cannot take turns.
    """
    if section.model_path is not None:
        await asyncio.to_thread(check_model_path, section.model_path, "rollout.model_path")
    settings = RunSettings.of_config(spec.config)
    model = await local_model(member.bus, spec)
    config = replace(
        _engine_config(settings.model, section, model),
        device=device,
        shares_device=bool(shared),
        profile=_profile_plan(settings, section, member.id),
    )
    engine_class: type[Engine] = await asyncio.to_thread(
        registry.resolve, "engines", section.engine, ENGINES
    )
    bind = listening_address(*listen, member.bus.link.url, settings.broker.bind)
    if shared:
        refuse_sleepless(section.engine)
    engine = engine_class(config)
    if shared and not isinstance(engine, SleepingEngine):
        raise UserError(
            f"--share-gpus: engine {section.engine} has no sleep() and wake() to free its device for others"
        )
    async with sharing(member, shared, exclusive=False) as devices:
        service = RolloutService(
            member, spec, section, engine=engine, model=model, bind=bind, devices=devices
        )
        try:
            await service.serve()
        finally:
            await service.close()


def _built_from(spec: wire.RunSpec) -> tuple[object, ...]:
    """Return the parts of a RunSpec that a server reads at startup; it must restart when they
    change.
    """
    settings = RunSettings.of_config(spec.config)
    return (
        spec.model_path,
        spec.model_files,
        settings.model,
        settings.rollout,
        settings.teachers,
        settings.broker.channel,
        settings.broker.bind,
        settings.train.weights_bucket_mib,
        settings.train.weights_dtype,
        settings.train.profile,
    )


def _engine_config(model: ModelSection, section: RolloutSection, local: LocalModel) -> EngineConfig:
    return EngineConfig(
        model_path=section.model_path or local.path,
        has_weights=section.model_path is not None or local.has_weights,
        section=section,
        dtype=section.dtype or model.dtype,
        trust_remote_code=model.trust_remote_code,
        chat_template=model.chat_template,
    )


def _profile_plan(
    settings: RunSettings, section: RolloutSection, server: str
) -> ProfilePlan | None:
    """Return which steps' operators to record in the run's folder.

    A host that does not share the folder records none: it would write where a stranger tells it to.
    """
    folder = (Path(settings.run.dir) / str(settings.run.name)).absolute()
    plan = settings.train.profile.plan(folder, server)
    if plan is None or section.policy != ACTOR:
        return None
    if not (folder / "config.yaml").is_file():
        log.info("train.profile: nothing is recorded here, where the run has no folder %s", folder)
        return None
    return plan


class _Importing:
    """Imports the likely engine's libraries (seconds) while waiting for a run; ``_serve`` reports
    errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(IMPORT_AFTER_S, loop.run_in_executor, None, self._import)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _import(self) -> None:
        with contextlib.suppress(UserError):
            registry.resolve("engines", self._name, ENGINES)


class RolloutService:
    """One engine behind one request channel, kept at the newest weights.

    Args:
        spec: the RunSpec to build it from; the member's own may be newer.
        model: the run's model on this host, by default the folder or hub name in the RunSpec.
        bind: where it takes requests from other hosts and users, by default ``broker.bind``.
        devices: those on which the engine takes turns, if it does.
    """

    def __init__(
        self,
        member: process.Member,
        spec: wire.RunSpec,
        section: RolloutSection,
        engine: Engine,
        model: LocalModel | None = None,
        bind: str | None = None,
        devices: SharedDevices | None = None,
    ) -> None:
        self._model = model or LocalModel(spec.model_path)
        self._member = member
        self._spec = spec
        self._section = section
        self._engine = engine
        self._settings = RunSettings.of_config(spec.config)
        self._broker = self._settings.broker
        bind = self._broker.bind if bind is None else bind
        self._channel = carriers.make_server(self._broker.channel, member.bus, member.id, bind=bind)
        self._receiver: WeightReceiver | None = None
        self._snapshots: SnapshotSource | None = None
        self._http: HttpApi | None = None
        self._meter = IntervalMetrics(time.monotonic())
        self._answering = RequestHandler(engine, member.id, self._meter.answered, member.spans)
        self.handle = self._answering.handle
        self._devices = devices
        self._updates = asyncio.Lock()
        self._turns: ServerTurns | None = None
        self._turning: asyncio.Task[None] | None = None
        self._loaded = False  # whether loading new weights into the engine has at least begun
        self._paused_s = 0.0  # how long the last weight update paused generation
        self._address = ""

    async def serve(self) -> None:
        """Serve until a stop is requested or the run changes its settings, then drain.

        Raises:
            UserError: if the model cannot be served.
            Exception: if the engine fails.
        """
        member = self._member
        if self._engine.has_weights:
            self._snapshots = self._open_snapshots()
        member.announce(self.presence)
        member.report(self.metrics, self.texts)
        if self._section.http_port is not None:
            self._http = await self._take_http(self._section.http_port)
        log.info(
            "loading %s for engine %s",
            self._section.model_path or self._model.path,
            self._section.engine,
        )
        if self._devices is not None:
            await process.unless_stopped(member.stop, self._devices.acquire())
        await self._engine.start()
        member.spawn(self._watch_engine())
        await self._channel.start(self.handle, self._answering.abort)
        self._address = self._channel.address
        if self._http is not None:
            await self._http.listen()
        if self._engine.has_weights and self._section.policy == ACTOR:
            await self._follow_weights()
        elif self._engine.has_weights:
            await self._engine.adopt(FROZEN)
        if self._devices is not None:
            self._take_turns(self._devices)
        member.poke()
        log.info(
            "answering at %s, %d slots", self._address.partition(" ")[0], self._engine.stats().slots
        )
        await self._over()
        await self.drain()

    async def _over(self) -> None:
        """Return when a stop is requested or the newest RunSpec requires a restart."""
        stop_request = asyncio.create_task(self._member.stop.asked.wait())
        while not stop_request.done() and _built_from(self._member.spec) == _built_from(self._spec):
            renewed = asyncio.create_task(self._member.renewed.wait())
            await asyncio.wait({stop_request, renewed}, return_when=asyncio.FIRST_COMPLETED)
            self._member.renewed.clear()
            renewed.cancel()
        stop_request.cancel()

    async def drain(self) -> None:
        """Reject new requests, finish running ones, and return the rest with partial output."""
        self._answering.draining = True
        self._member.poke()
        log.info(
            "draining %d requests, at most %g s",
            len(self._answering),
            self._section.drain_timeout_s,
        )
        if aborted := await self._answering.finish(self._section.drain_timeout_s):
            log.warning("aborted %d requests that did not finish in time", aborted)
        await asyncio.sleep(CLOSE_DELAY_S)

    async def close(self) -> None:
        if self._turning is not None:
            self._turning.cancel()
            await asyncio.gather(self._turning, return_exceptions=True)
        if self._receiver is not None:
            await self._receiver.close()
        await self._channel.close()  # answers the remaining requests
        if self._http is not None:
            await self._http.close()
        await self._engine.close()

    def presence(self) -> wire.Presence:
        """Return what this server announces to the run."""
        stats, (base_s, each_s) = self._engine.stats(), self._answering.curve.fit()
        return wire.Presence(
            role="rollout",
            id=self._member.id,
            host=socket.gethostname(),
            pid=os.getpid(),
            state=self._state(),
            address=self._address,
            channel=self._broker.channel,
            policy=self._section.policy,
            engine=self._section.engine,
            epoch=self._receiver.served[0] if self._receiver is not None else 0,
            policy_version=self._engine.policy_version,
            slots=stats.slots,
            running=stats.running,
            waiting=stats.waiting,
            speed=self._meter.speed,
            idle_ratio=self._meter.idle_ratio,
            base_s=base_s,
            each_s=each_s,
            carriers=self._receiver.carriers() if self._receiver is not None else [],
            asleep=self._turns is not None and self._turns.asleep,
            problem=self._receiver.problem[:PROBLEM_CHARS] if self._receiver is not None else "",
            refusal=self._receiver.refusal if self._receiver is not None else None,
            job=batch_job(),
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last second."""
        weights = self._receiver.metrics() if self._receiver is not None else {}
        return {
            **self._meter.read(time.monotonic(), self._engine.stats()),
            **weights,
            **(self._turns.metrics() if self._turns is not None else {}),
            "weights/version": float(self._engine.policy_version),
            "weights/pause_seconds": self._paused_s,
        }

    def texts(self) -> dict[str, str]:
        problem = (
            (self._receiver.refused or self._receiver.last_error)
            if self._receiver is not None
            else ""
        )
        return {"state": self._state()} | ({"last_error": problem} if problem else {})

    async def _take_http(self, port: int) -> HttpApi:
        # imported here because the API is off by default
        from rollout.http import prepare_http, served_model

        served = served_model(self._engine, self._section, self._model.path, self._state)
        model = self._settings.model
        bind = self._section.http_bind or self._broker.bind
        return await prepare_http(
            self.handle,
            served,
            self._section,
            bind=bind,
            port=port,
            trust_remote_code=model.trust_remote_code,
            chat_template=model.chat_template,
        )

    async def _follow_weights(self) -> None:
        await asyncio.to_thread(import_module, "broker.weights.receiver.receive")  # imports torch
        from broker.weights.receiver.receive import WeightReceiver
        from rollout.engine_workers import engine_workers

        train = self._settings.train
        self._receiver = WeightReceiver(
            self._member.bus,
            self._member.id,
            self._engine.weights(),
            self._load,
            bucket_mib=train.weights_bucket_mib,
            dtype=train.weights_dtype,
            kept=getattr(self._engine, "keeps_tensors", False),
            first=self._first_weights,
            snapshots=self._snapshots,
            only_snapshots=self._section.snapshot_only,
            workers=await engine_workers(
                self._engine, self._section.update_mode, self._served_by_workers
            ),
            pace=self._updates,
            spans=self._member.spans,
        )
        await self._receiver.start()
        self._member.spawn(self._receiver.join())  # fails the server when it can no longer follow

    def _served_by_workers(self, paused_s: float) -> None:
        self._loaded = True
        self._paused_s = paused_s
        self._member.poke()

    def _take_turns(self, devices: SharedDevices) -> None:
        """From now on sleep while others use the devices."""
        assert isinstance(self._engine, SleepingEngine)
        rest_receiver = self._receiver.rest if self._receiver is not None else lambda: None
        self._turns = ServerTurns(
            self._engine,
            devices,
            self._answering,
            updates=self._updates,
            rest=rest_receiver,
            changed=self._member.poke,
        )
        self._turning = self._member.spawn(self._turns.serve())

    def _open_snapshots(self) -> SnapshotSource | None:
        """Open the source of weights to use while the learner is unavailable.

        Raises:
            UserError: if the address is not valid.
        """
        from broker.weights.snapshots.snapshot_source import SnapshotSource, is_url

        place = self._section.snapshot
        if place is None:
            return None
        from rlearner_text.openai import api_keys

        return SnapshotSource(place, api_keys.find_key()[0] if is_url(place) else "")

    def _first_weights(self) -> tuple[Mapping[str, Tensor], bool]:
        """Return the run's initial weights, from the engine or from disk, and whether they stay
        unchanged.
        """
        if not self._model.has_weights and self._section.model_path is None:
            raise UserError(f"this host has only the configuration of {self._spec.model_path}")
        tensors = self._engine.weights()
        if not self._loaded and not any(tensor.is_meta for tensor in tensors.values()):
            # merged ones replace them
            stay = all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors.values())
            return tensors, stay and getattr(self._engine, "keeps_tensors", False)
        from torch import device

        from rollout.engines.hf.model import load_model
        from rollout.engines.hf.weights import HeldWeights

        return HeldWeights(
            load_model(
                _engine_config(self._settings.model, self._section, self._model), device("cpu")
            )
        ).tensors(), True

    async def _load(self, tensors: Mapping[str, Tensor], offer: wire.WeightsOffer) -> None:
        """Load an offered version; an empty mapping means that the engine already holds these
        bytes.

        Raises:
            TransferFailed: if the probe does not match.
        """
        with self._member.spans.work("weights"):
            await self._load_offered(tensors, offer)
        self._member.poke()

    async def _load_offered(self, tensors: Mapping[str, Tensor], offer: wire.WeightsOffer) -> None:
        from broker.weights.probe import check_probe

        if tensors:
            self._loaded = True
            mode = self._section.update_mode
            self._paused_s = await self._engine.update_weights(
                tensors, offer.version, mode, offer.probe
            )
            log.info(
                "serving version %d of epoch %d, generation paused for %.3f s",
                offer.version,
                offer.epoch,
                self._paused_s,
            )
        else:
            check_probe(
                offer.probe, await self._engine.logprobs(offer.probe.token_ids.array().tolist())
            )
            await self._engine.adopt(offer.version)
            log.info(
                "serving version %d of epoch %d, weights unchanged", offer.version, offer.epoch
            )

    async def _watch_engine(self) -> None:
        await self._engine.join()

    def _state(self) -> Literal["starting", "serving", "draining", "failed"]:
        if self._answering.draining:
            return "draining"
        if self._address and self._engine.policy_version >= 0:
            return "serving"
        stuck = self._receiver is not None and (self._receiver.refused or self._receiver.last_error)
        return "failed" if stuck else "starting"
