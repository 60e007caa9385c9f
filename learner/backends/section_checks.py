"""Rules of the backends, for ``rlearner check`` and for the backends themselves. No torch."""

from __future__ import annotations

from broker.errors import ConfigError
from broker.weights.carriers import CARRIERS
from broker.weights.carriers.selection import AUTO
from learner.config import AlgorithmSection, DeepspeedSection, TrainSection
from rlearner_text.config import ModelSection


def check_values(model: ModelSection, algorithm: AlgorithmSection) -> None:
    """Check single values that no backend trains with.

    Raises:
        ConfigError: if gradients would underflow, or a clip would take no effect.
    """
    if model.dtype == "float16":
        raise ConfigError(
            "model.dtype", "float16", "float32 or bfloat16: gradients underflow in float16"
        )
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1:
        raise ConfigError("algorithm.dual_clip", algorithm.dual_clip, "above 1; 3 is usual")


def check_rank_device(train: TrainSection) -> None:
    """Check that each rank can have a device of its own.

    Raises:
        ConfigError: if several ranks would share one GPU.
    """
    if train.ranks > 1 and train.device not in ("auto", "cpu", "cuda"):
        allowed = (
            f"auto, cpu or cuda with train.ranks {train.ranks}: each rank takes a GPU of its own"
        )
        raise ConfigError("train.device", train.device, allowed)


def check_deepspeed(train: TrainSection) -> None:
    """Check the DeepSpeed options of a section ``train``.

    Raises:
        ConfigError: if DeepSpeed is not the backend, or the stage does not support an option.
    """
    section = train.deepspeed
    if train.backend != "deepspeed":
        plain = DeepspeedSection().model_dump()
        for key, value in section.model_dump().items():
            if value != plain[key]:
                allowed = f"unset with train.backend {train.backend}"
                raise ConfigError(f"train.deepspeed.{key}", value, allowed)
        return
    if section.offload_param and section.stage < 3:
        allowed = f"false with train.deepspeed.stage {section.stage}: only stage 3 divides weights"
        raise ConfigError("train.deepspeed.offload_param", True, allowed)


def check_megatron(train: TrainSection) -> None:
    """Check the Megatron-core options of a section ``train``.

    Raises:
        ConfigError: if Megatron is not the backend, or the number of ranks does not divide.
    """
    section = train.megatron
    if train.backend != "megatron":
        for key, size in section.model_dump().items():
            if size != 1:
                allowed = f"1 with train.backend {train.backend}; more with megatron"
                raise ConfigError(f"train.megatron.{key}", size, allowed)
        return
    if train.lora and train.lora.dropout:
        allowed = "0 with train.backend megatron, whose ranks divide a layer's inputs"
        raise ConfigError("train.lora.dropout", train.lora.dropout, allowed)
    tensor = section.tensor_parallel
    pipeline = section.pipeline_parallel
    ranks = train.ranks
    if ranks % (tensor * pipeline):
        sizes = (
            f"train.megatron.tensor_parallel {tensor} "
            f"times train.megatron.pipeline_parallel {pipeline}"
        )
        raise ConfigError("train.ranks", ranks, f"a multiple of {sizes}")


def stripes_problem(train: TrainSection) -> str:
    """Return what keeps the ranks from each sending what they hold; empty if they can."""
    carriers = (AUTO, *(name for name in CARRIERS if CARRIERS[name].serves_stripes))
    if train.ranks == 1:
        return "train.ranks above 1"
    if train.lora:
        return "no train.lora: adapters are merged or sent by one rank"
    if train.weights_dtype == "fp8":
        return "train.weights_dtype other than fp8: its blocks span what ranks hold"
    if train.weights_delta:
        return "train.weights_delta false: changes are found in whole versions"
    if train.weights_snapshot_every:
        return "train.weights_snapshot_every 0: snapshots are whole versions"
    if (train.weights_backend or AUTO) not in carriers:
        return f"train.weights_backend {', '.join(carriers[:-1])} or {carriers[-1]}"
    return ""


def check_stripes(train: TrainSection) -> None:
    """Check that the ranks can send weights in stripes if they must.

    Raises:
        ConfigError: if they cannot.
    """
    if train.weights_stripes == "always" and (problem := stripes_problem(train)):
        raise ConfigError("train.weights_stripes", "always", f"auto or never, or {problem}")
