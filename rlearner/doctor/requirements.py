"""Derives what a configuration needs from the machine. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rlearner.doctor.weight_pairs import WeightsSettings
from rollout.checks import declaration

# Open at once in any process of a run, libraries and sockets included.
FILES_OF_A_PROCESS: Final = 256
# Pipes to and from a worker process.
FILES_OF_AN_ENVIRONMENT: Final = 4
# The value of train.weights_backend with which servers read the learner's GPU memory.
IPC: Final = "ipc"


@dataclass(frozen=True)
class MachineRequirements:
    """Requirements of a configuration.

    Attributes:
        plugins: engine, backend, trackers and environments: configuration key to name.
        programs: programs started by name: configuration key to program.
        parquet: whether a data file is Parquet.
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
    parquet: bool = False
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


def requirements_of(config: Mapping[str, Any]) -> MachineRequirements:
    """Return what a configuration with its defaults needs; offline training lacks most sections."""
    rollout = config.get("rollout") or {}
    train = config.get("train") or {}
    broker = config.get("broker") or {}
    checkpoint = config.get("checkpoint") or {}
    domains: Mapping[str, Any] = config.get("domains") or {}
    engine_args = rollout.get("engine_args") or {}
    sizes = ("tensor_parallel", "data_parallel", "pipeline_parallel")
    parallel = math.prod(int(engine_args.get(size) or 1) for size in sizes)
    ranks = int(train.get("ranks") or 1)
    device = str(train.get("device") or "auto")
    engine = rollout.get("engine")
    command = engine_args.get("command") or []
    declared = declaration(str(engine or ""))
    snapshot_port = train.get("weights_snapshot_port")
    ports = {
        "rollout.http_port": rollout.get("http_port"),
        "train.weights_snapshot_port": snapshot_port,
    }
    plugins: dict[str, str] = {}
    # The operator's own command brings its engine along.
    if engine and not command:
        plugins["rollout.engine"] = str(engine)
    if "backend" in train:
        plugins["train.backend"] = train["backend"]
    for name in (config.get("trackers") or {}).get("use") or []:
        plugins[f"trackers.use.{name}"] = name
    plugins |= {f"domains.{name}.env": domain["env"] for name, domain in domains.items()}
    if train.get("lora"):
        plugins["train.lora"] = "lora"
    return MachineRequirements(
        plugins=plugins,
        programs={"rollout.engine_args.command": str(command[0])} if command else {},
        parquet=any(str(path).endswith(".parquet") for path in _data_files(config)),
        sandbox=any(map(_needs_sandbox, domains.values())),
        cuda=device.startswith("cuda") or train.get("weights_backend") == IPC,
        num_gpus=max(
            ranks * device.startswith("cuda"),
            int(device.partition(":")[2] or -1) + 1,
            parallel * (parallel > 1),
            int(declared is not None and declared.needs_gpu and not command),
        ),
        weights=_weights_settings(rollout, train, parallel),
        nofile=FILES_OF_A_PROCESS
        + FILES_OF_AN_ENVIRONMENT * int((config.get("envhub") or {}).get("n") or 0),
        shared_memory=ranks > 1 or parallel > 1,
        replicas=broker.get("replicas"),
        bind=broker.get("bind") or "127.0.0.1",
        ports={key: port for key, port in ports.items() if port},
        run_dir=(config.get("run") or {}).get("dir") or "runs",
        # The new checkpoint is complete before the oldest goes.
        checkpoints=int(checkpoint.get("keep") or 0) + 1 if checkpoint else 0,
        whole_gib=float(checkpoint.get("hf_max_gib") or 0),
        model_path=(config.get("model") or {}).get("path"),
    )


def _needs_sandbox(domain: Mapping[str, Any]) -> bool:
    isolation = domain.get("isolation")
    # AppWorld runs the model's programs, so it is isolated by default.
    if isolation == "sandbox" or (not isolation and domain.get("env") == "appworld"):
        return True
    programs = [
        reward.get("args") or {}
        for reward in domain.get("rewards") or []
        if reward.get("name") == "code"
    ]
    return any(args.get("sandbox", "bubblewrap") != "none" for args in programs)


def _data_files(config: Mapping[str, Any]) -> list[Any]:
    of_domains = [
        (domain.get("env_args") or {}).get("path")
        for domain in (config.get("domains") or {}).values()
    ]
    data = config.get("data") or {}
    return [
        *of_domains,
        data.get("train"),
        data.get("eval"),
        (config.get("warm_start") or {}).get("data"),
    ]


def _weights_settings(
    rollout: Mapping[str, Any], train: Mapping[str, Any], parallel: int
) -> WeightsSettings:
    engine = str(rollout.get("engine") or "")
    if "backend" not in train or not engine:
        return WeightsSettings()
    declared = declaration(engine)
    lora = train.get("lora") or {}
    sends_adapters = bool(lora) and lora.get("send", "adapter") == "adapter"
    workers = 0
    workers_need = ""
    if declared is not None:
        workers = parallel * declared.workers_receive
        workers_need = declared.workers_need
    return WeightsSettings(
        setting=train.get("weights_backend") or "auto",
        on_gpu=not str(train.get("device") or "auto").startswith("cpu"),
        engine=engine,
        to_device=declared is None or declared.weights_memory == "device",
        workers=workers,
        workers_need=workers_need,
        into=rollout.get("weights_into") or "auto",
        plain=train.get("weights_dtype") != "fp8" and not sends_adapters,
    )
