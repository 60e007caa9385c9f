"""Derives what a configuration needs from the machine. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from broker.settings.config import BrokerSection, DomainSection
from broker.settings.run_settings import RunSettings
from broker.settings.schema.serving import RolloutSection
from broker.settings.schema.training import OptimizationSection, TrainSection
from learner.offline.config import DistillSettings, OfflineSettings
from rlearner.doctor.weight_pairs import WeightsSettings
from rlearner_text.rows.sources import DataSource
from rollout.checks import declaration

# Open at once in any process of a run, libraries and sockets included.
FILES_OF_A_PROCESS: Final = 256
# Pipes to and from a worker process.
FILES_OF_AN_ENVIRONMENT: Final = 4
# The value of train.weights_backend with which servers read the learner's GPU memory.
IPC: Final = "ipc"
# Of a run or of offline training.
Settings = RunSettings | OfflineSettings


@dataclass(frozen=True)
class MachineRequirements:
    """Requirements of a configuration.

    Attributes:
        plugins: engine, backend, trackers and environments: configuration key to name.
        programs: programs started by name: configuration key to program.
        data_extras: the extras that read the data sets.
        sandbox: whether a reward or a domain runs in the sandbox.
        cuda: whether a GPU is requested explicitly.
        weights: how the learner's weights travel to the servers.
        num_gpus: the least number of GPUs that the sizes imply.
        nofile: files that one process may have open at once.
        shared_memory: whether several processes share one model, and so /dev/shm.
        replicas: brokers that hold each message, None if the broker decides.
        ports: configuration key to the port that must be free on ``bind``.
        run_dir: folder of the runs.
        checkpoints: checkpoints on disk at the same time.
        whole_gib: weights up to which a checkpoint also holds the model in Hugging Face format.
        model_path: folder or hub name, None for a model that the run makes.
    """

    plugins: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=dict)
    data_extras: frozenset[str] = frozenset()
    sandbox: bool = False
    cuda: bool = False
    num_gpus: int = 0
    weights: WeightsSettings = field(default_factory=WeightsSettings)
    nofile: int = FILES_OF_A_PROCESS
    shared_memory: bool = False
    replicas: int | None = None
    bind: str = "127.0.0.1"
    ports: Mapping[str, int] = field(default_factory=dict)
    run_dir: str = "runs"
    checkpoints: int = 0
    whole_gib: float = 0.0
    model_path: str | None = None


def requirements_of(settings: Settings) -> MachineRequirements:
    """Return what settings need; offline training lacks most sections."""
    needs = _training_requirements(settings)
    if isinstance(settings, RunSettings | DistillSettings):
        needs = _add_servers(needs, settings.rollout, settings.broker, settings.train)
    if isinstance(settings, RunSettings):
        needs = _add_run(needs, settings)
    return needs


def _training_requirements(settings: Settings) -> MachineRequirements:
    """Return what the learner and offline training need."""
    device = settings.train.device
    return MachineRequirements(
        plugins=_plugin_names(settings),
        data_extras=frozenset(_data_extras(settings)),
        cuda=device.startswith("cuda"),
        num_gpus=max(int(device.startswith("cuda")), int(device.partition(":")[2] or -1) + 1),
        run_dir=settings.run.dir or "runs",
        # The new checkpoint is complete before the oldest goes.
        checkpoints=settings.checkpoint.keep + 1,
        whole_gib=float(settings.checkpoint.hf_max_gib),
        model_path=settings.model.path,
    )


def _add_servers(
    needs: MachineRequirements,
    rollout: RolloutSection,
    broker: BrokerSection,
    train: OptimizationSection,
) -> MachineRequirements:
    sizes = ("tensor_parallel", "data_parallel", "pipeline_parallel")
    parallel = math.prod(int(rollout.engine_args.get(size) or 1) for size in sizes)
    declared = declaration(rollout.engine)
    command = rollout.engine_args.get("command") or []
    programs = {"rollout.engine_args.command": str(command[0])} if command else {}
    return replace(
        needs,
        programs=programs,
        num_gpus=max(
            needs.num_gpus,
            parallel * (parallel > 1),
            int(declared is not None and declared.needs_gpu and not command),
        ),
        weights=_weights_settings(rollout, train, parallel),
        shared_memory=parallel > 1,
        replicas=broker.replicas,
        bind=broker.bind,
        ports={"rollout.http_port": rollout.http_port} if rollout.http_port else {},
    )


def _add_run(needs: MachineRequirements, settings: RunSettings) -> MachineRequirements:
    train = settings.train
    ports = dict(needs.ports)
    if train.weights_snapshot_port:
        ports["train.weights_snapshot_port"] = train.weights_snapshot_port
    return replace(
        needs,
        sandbox=any(map(_needs_sandbox, settings.domains.values())),
        cuda=needs.cuda or train.weights_backend == IPC,
        num_gpus=max(needs.num_gpus, train.ranks * train.device.startswith("cuda")),
        nofile=needs.nofile + FILES_OF_AN_ENVIRONMENT * settings.envhub.n,
        shared_memory=needs.shared_memory or train.ranks > 1,
        ports=ports,
    )


def _plugin_names(settings: Settings) -> dict[str, str]:
    names: dict[str, str] = {}
    if isinstance(settings, RunSettings | DistillSettings):
        rollout = settings.rollout
        # The operator's own command brings its engine along.
        if rollout.engine and not rollout.engine_args.get("command"):
            names["rollout.engine"] = rollout.engine
    names["train.backend"] = settings.train.backend
    names |= {f"trackers.use.{name}": name for name in settings.trackers.use}
    if isinstance(settings, RunSettings):
        names |= {f"domains.{name}.env": domain.env for name, domain in settings.domains.items()}
    if settings.train.lora:
        names["train.lora"] = "lora"
    return names


def _needs_sandbox(domain: DomainSection) -> bool:
    # AppWorld runs the model's programs, so it is isolated by default.
    if domain.isolation == "sandbox" or (not domain.isolation and domain.env == "appworld"):
        return True
    programs = [reward.args for reward in domain.rewards if reward.name == "code"]
    return any(args.get("sandbox", "bubblewrap") != "none" for args in programs)


def _data_extras(settings: Settings) -> set[str]:
    if isinstance(settings, OfflineSettings):
        paths: list[Any] = [settings.data.train, settings.data.eval]
    else:
        paths = [domain.env_args.get("path") for domain in settings.domains.values()]
        paths += [domain.env_args.get("eval_path") for domain in settings.domains.values()]
        paths.append(settings.warm_start.data)
    return {DataSource(str(path)).extra for path in paths if path} - {""}


def _weights_settings(
    rollout: RolloutSection, train: OptimizationSection, parallel: int
) -> WeightsSettings:
    if not rollout.engine:
        return WeightsSettings()
    declared = declaration(rollout.engine)
    workers = 0
    workers_need = ""
    if declared is not None:
        workers = parallel * declared.workers_receive
        workers_need = declared.workers_need
    weights = WeightsSettings(
        on_gpu=not train.device.startswith("cpu"),
        engine=rollout.engine,
        to_device=declared is None or declared.weights_memory == "device",
        workers=workers,
        workers_need=workers_need,
        into=rollout.weights_into,
        plain=train.lora is None or train.lora.send != "adapter",
    )
    if not isinstance(train, TrainSection):
        return weights
    is_plain = weights.plain and train.weights_dtype != "fp8"
    return replace(weights, setting=train.weights_backend or "auto", plain=is_plain)
