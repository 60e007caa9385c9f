"""Backends of the registry as the contract suite makes them, and their samples."""

import pytest
import torch_backend_kit as kit

from broker.settings.registry import resolve
from learner.backends import BACKENDS
from learner.config import AlgorithmSection, TrainSection
from rlearner_text.config import ModelSection

RANKS = {"torch": 1, "ddp": 2, "fsdp2": 2, "deepspeed": 2, "megatron": 2}
INSTALLS = {"deepspeed": "deepspeed", "megatron": "megatron.core"}
# Each backend, megatron in its layouts of two ranks, deepspeed in its stages, where small weights
# are divided, too, and the gradient takes several buckets, some of them smaller than one weight.
SMALL = {"param_persistence_threshold": 0, "reduce_bucket_size": 1000}
OFFLOADED = {"offload_optimizer": True, "offload_param": True}
VARIANTS = {name: (name, {}) for name in BACKENDS if name != "deepspeed"}
VARIANTS["megatron-tp2"] = ("megatron", {"megatron": {"tensor_parallel": 2}})
VARIANTS["megatron-pp2"] = ("megatron", {"megatron": {"pipeline_parallel": 2}})
VARIANTS |= {
    f"deepspeed-{stage}": ("deepspeed", {"deepspeed": {"stage": stage, **SMALL}})
    for stage in (1, 2, 3)
}
# nothing that is gathered waits to be used again
VARIANTS["deepspeed-3"][1]["deepspeed"]["max_live_parameters"] = 0
VARIANTS["deepspeed-2-offload"] = (
    "deepspeed",
    {"deepspeed": {"stage": 2, **SMALL, "offload_optimizer": True}},
)
VARIANTS["deepspeed-3-offload"] = ("deepspeed", {"deepspeed": {"stage": 3, **SMALL, **OFFLOADED}})


def make(variant, path, *, ranks=None, algorithm=None, model=None, ref_path=None, **more):
    name, options = VARIANTS[variant]
    if name in INSTALLS:
        pytest.importorskip(INSTALLS[name], reason=f"{name} is not installed: make test-{name}")
    if name == "deepspeed":
        _as_if_first()
    more = {**options, **more}
    settings = {
        "lr": 1e-2,
        "device": "cpu",
        "num_threads": 1,
        "micro_batch_tokens": 60,
        "ranks": ranks or RANKS[name],
        **more,
    }
    train = TrainSection.model_validate(settings)
    backend = resolve("backends", name, BACKENDS)
    others = {
        "algorithm": algorithm or AlgorithmSection(),
        "model": model or ModelSection(),
        "ref_path": ref_path,
    }
    return backend(path, train=train, **others, seed=0, max_length=50)


def _as_if_first():
    """DeepSpeed numbers modules and weights of all engines of a process; a learner makes one, this
    process one after the other.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][:] = [0]


def run(backend, steps):
    """One optimizer step for each seed, from samples cut as a learner cuts them; the metrics."""
    found = []
    for seed in steps:
        cutter = backend.cutter()
        for sample in kit.samples(seed, 20):
            if (full := cutter.add(sample)) is not None:
                backend.forward_backward(full)
        backend.forward_backward(cutter.flush())
        found.append(backend.step())
    return found
