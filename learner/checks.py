"""Checks the learner's sections and plug-in names before a start, without importing torch.

``rlearner.doctor.preflight`` checks which packages they need.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from broker.contract.wire import ACTOR
from broker.errors import ConfigError
from broker.settings.run_settings import RunSettings
from broker.settings.schema.model import ModelSection
from broker.settings.schema.training import (
    LoraSection,
    MegatronSection,
    OptimizationSection,
    TrainSection,
)
from broker.weights.carriers import selected_carrier

# Parameters of the plug-ins that are functions, to check the user's.
CALLED_WITH: Final = {
    "advantages": ("trajectories", "algorithm"),
    "losses": ("tokens", "algorithm"),
    "corrections": ("facts", "algorithm"),
    "filters": ("group",),
    "preferences": ("pairs", "beta"),
}


def check(settings: RunSettings) -> RunSettings:
    """Check combinations across sections; import no plug-in of the registries.

    Returns:
        The settings, with the text of the file that ``model.chat_template`` names.

    Raises:
        ConfigError: for the first combination that cannot work.
    """
    check_names(settings)
    settings = _check_model(settings)
    _check_training(settings)
    from learner.algorithm_checks import check_algorithm
    from learner.credit.capacity import check_groups
    from learner.credit.curriculum_checks import check_curricula
    from learner.policy_checks import check_policies
    from learner.teacher_checks import check_teachers

    check_groups(settings)
    check_curricula(settings)
    check_algorithm(settings)
    check_teachers(settings)
    check_policies(settings)
    _check_warm_start(settings)
    if settings.eval.baseline == ACTOR:
        allowed = "that is the policy being trained; name another one, for example random"
        raise ConfigError("eval.baseline", ACTOR, allowed)
    opponents = settings.eval.against
    if (
        ACTOR in opponents
        or settings.eval.baseline in opponents
        or len(set(opponents)) < len(opponents)
    ):
        raise ConfigError(
            "eval.against",
            opponents,
            "names of other policies than actor and eval.baseline, each once",
        )
    return settings


def check_names(settings: RunSettings) -> None:
    """Check that there is a domain, and that the plug-ins that are named exist.

    Raises:
        ConfigError: if a name is unknown.
    """
    if not settings.domains:
        raise ConfigError("domains", {}, "name at least one domain, with its env")
    from broker.channel.carriers import CHANNELS
    from learner.algorithm.advantages import ADVANTAGES
    from learner.algorithm.corrections import CORRECTIONS
    from learner.algorithm.filters import FILTERS
    from learner.algorithm.losses import LOSSES
    from learner.backends import BACKENDS
    from learner.reporting.trackers import TRACKERS

    algorithm = settings.algorithm
    trackers = settings.trackers
    check_name("algorithm.adv_estimator", "advantages", algorithm.adv_estimator, ADVANTAGES)
    check_name("algorithm.pg_variant", "losses", algorithm.pg_variant, LOSSES)
    check_name("algorithm.correction", "corrections", algorithm.correction, CORRECTIONS)
    if algorithm.group_filter:
        check_name("algorithm.group_filter", "filters", algorithm.group_filter, FILTERS)
    check_name("broker.channel", "channels", settings.broker.channel, CHANNELS)
    check_name("train.backend", "backends", settings.train.backend, BACKENDS)
    for name in trackers.use:
        check_name("trackers.use", "trackers", name, TRACKERS)
    for name, value in trackers.args.items():
        if name not in (*trackers.use, "tensorboard"):
            raise ConfigError(f"trackers.args.{name}", value, "trackers.use does not name it")


def check_family(model: ModelSection, train: OptimizationSection) -> None:
    """Check that the model's family can be trained as configured (``rlearner_text.families``).

    Raises:
        ConfigError: if they cannot.
    """
    from rlearner_text.families import check_trained, family_at

    family = family_at(model.path)
    check_trained(family, model.path, packing=train.packing, lora=train.lora)


def check_run_family(settings: RunSettings) -> None:
    """Check that the model's family can be trained as a run is configured, see ``check_family``."""
    check_family(settings.model, settings.train)


def check_name(key: str, kind: str, name: str, table: Mapping[str, str]) -> None:
    """Refuse a name that is unknown or takes other parameters; trust those of the table."""
    from broker.settings.registry import check_call, resolve

    if name in table:
        return
    try:
        plugin = resolve(kind, name, table)
    except ConfigError as error:
        raise ConfigError(key, name, error.allowed) from None
    if kind in CALLED_WITH:
        check_call(key, name, plugin, CALLED_WITH[kind])


def _check_model(settings: RunSettings) -> RunSettings:
    from rlearner_text.model_checks import resolve_model
    from rlearner_text.tiny import check_tiny

    tiny = settings.model.tiny
    if settings.model.path is None:
        check_tiny(tiny)
    settings = settings.model_copy(update={"model": resolve_model(settings.model)})
    if settings.model.path is not None:
        return settings
    allowed = f"at most model.tiny.max_position_embeddings, which is {tiny.max_position_embeddings}"
    for name, domain in settings.domains.items():
        if (length := domain.max_context_tokens) > tiny.max_position_embeddings:
            raise ConfigError(f"domains.{name}.max_context_tokens", length, allowed)
    return settings


def _check_training(settings: RunSettings) -> None:
    from learner.backends import BACKENDS, SUPPORTED_OPTIONS
    from learner.backends.section_checks import check_deepspeed, check_megatron, check_stripes

    train = settings.train
    backend = settings.train.backend
    with_critic = SUPPORTED_OPTIONS["critic"]
    check_ranks(train)
    if backend in BACKENDS and backend not in with_critic and settings.algorithm.critic.enabled:
        raise ConfigError(
            "train.backend", backend, f"{', '.join(with_critic)} with algorithm.critic.enabled"
        )
    check_options(train)
    check_fp8(train, settings.rollout.dtype or "", settings.model.dtype)
    check_family(settings.model, train)
    check_layers(train.lora, settings.model)
    check_deepspeed(train)
    check_megatron(train)
    check_stripes(train)
    if backend == "megatron":
        _check_divided(settings.model, train.megatron)
    carrier = selected_carrier(train.weights_backend)
    if (
        carrier is not None
        and train.device == "cpu"
        and (allowed := carrier.host_problem("train.device cpu"))
    ):
        raise ConfigError("train.weights_backend", carrier.name, allowed)
    if (port := train.weights_snapshot_port) is not None and not train.weights_snapshot_every:
        raise ConfigError(
            "train.weights_snapshot_port", port, "null without train.weights_snapshot_every"
        )
    cert = train.weights_snapshot_cert
    key = train.weights_snapshot_key
    if (cert is None) != (key is None) or (cert is not None and port is None):
        allowed = (
            "null, or set together with train.weights_snapshot_key and train.weights_snapshot_port"
        )
        raise ConfigError("train.weights_snapshot_cert", cert, allowed)
    if train.warmup_steps >= train.steps and train.warmup_steps:
        raise ConfigError(
            "train.warmup_steps",
            train.warmup_steps,
            f"below train.steps, which is {train.steps}",
        )
    if train.profile.last_step > train.steps:
        allowed = f"steps up to train.steps, which is {train.steps}"
        raise ConfigError("train.profile.steps", train.profile.steps, allowed)
    for name, domain in settings.trained_domains.items():
        if (length := domain.max_context_tokens) > train.micro_batch_tokens:
            allowed = (
                f"at least domains.{name}.max_context_tokens, which is {length}: one sequence must "
                "fit"
            )
            raise ConfigError("train.micro_batch_tokens", train.micro_batch_tokens, allowed)
        if domain.sampling.temperature == 0:
            raise ConfigError(
                f"domains.{name}.sampling.temperature",
                0.0,
                "above 0: greedy tokens have no gradient",
            )


def check_ranks(train: TrainSection) -> None:
    """Check that the backend of a section ``train`` has as many ranks.

    Raises:
        ConfigError: if it trains in one process, or its ranks would share a GPU.
    """
    from learner.backends import SINGLE_PROCESS_BACKENDS
    from learner.backends.section_checks import check_rank_device

    check_rank_device(train)
    if train.ranks > 1 and train.backend in SINGLE_PROCESS_BACKENDS:
        others = _all_but(SINGLE_PROCESS_BACKENDS)
        allowed = f"1 with train.backend {train.backend}; more with {others}"
        raise ConfigError("train.ranks", train.ranks, allowed)


def check_options(train: OptimizationSection) -> None:
    """Check that the backend supports the options of a section ``train``.

    Raises:
        ConfigError: if the backend lacks one.
    """
    from learner.backends import BACKENDS, SUPPORTED_OPTIONS

    backend = train.backend
    for name in ("lora", "activation_offload", "optimizer_offload", "compile"):
        value = getattr(train, name)
        if value and backend in BACKENDS and backend not in SUPPORTED_OPTIONS[name]:
            allowed = (
                f"unset with train.backend {backend}; {', '.join(SUPPORTED_OPTIONS[name])} take it"
            )
            shown = value.model_dump() if isinstance(value, LoraSection) else value
            raise ConfigError(f"train.{name}", shown, allowed)


def check_fp8(train: TrainSection, engine_dtype: str, model_dtype: str) -> None:
    """Check that the learner sends matrices that it can quantize.

    Args:
        engine_dtype: empty: as the model's.

    Raises:
        ConfigError: if only adapters are sent, no rank has a whole matrix, or engines compute in
            another dtype, in which they would expect what is not quantized.
    """
    if train.weights_dtype != "fp8":
        return
    if engine_dtype not in ("", model_dtype):
        allowed = f"null or model.dtype ({model_dtype}) with train.weights_dtype fp8"
        raise ConfigError("rollout.dtype", engine_dtype, allowed)
    lora = train.lora
    backend = train.backend
    other_dtypes = "null, float32, bfloat16 or float16"
    if lora and lora.send == "adapter":
        allowed = (
            f"{other_dtypes} with train.lora.send adapter: factors are sent unquantized; fp8 works "
            "with merged"
        )
        raise ConfigError("train.weights_dtype", "fp8", allowed)
    if backend == "megatron" or (lora and backend == "deepspeed" and train.deepspeed.stage == 3):
        sender = "megatron" if backend == "megatron" else "deepspeed stage 3 and train.lora"
        allowed = (
            f"{other_dtypes} with train.backend {sender}: no rank has the whole matrices that "
            "servers compute with"
        )
        raise ConfigError("train.weights_dtype", "fp8", allowed)


def check_layers(lora: LoraSection | None, model: ModelSection) -> None:
    """Check that the model has the layers that adapters name, as far as known before it is loaded.

    Raises:
        ConfigError: if it has no linear layer of a name, or adapts experts with dropout.
    """
    from rlearner_text.hub import expert_names, layer_names
    from rlearner_text.tiny import LAYERS

    if lora is None:
        return
    is_default = lora.target_modules == "all-linear"
    folder = Path(model.path or "").expanduser()
    experts = frozenset[str]() if model.path is None else expert_names(folder)
    targets = experts if is_default else experts & set(lora.target_modules)
    if lora.dropout and targets:
        stacked = " and ".join(sorted(targets))
        allowed = f"0, or target_modules without {stacked}: stacked experts take no dropout"
        raise ConfigError("train.lora.dropout", lora.dropout, allowed)
    if is_default:
        return
    names = set(LAYERS) if model.path is None else layer_names(folder)
    if names is None:
        return
    names = names and names | experts
    if unknown := [name for name in lora.target_modules if name not in names]:
        allowed = f"names of this model's linear layers: {', '.join(sorted(names))}"
        raise ConfigError("train.lora.target_modules", unknown, allowed)


def _all_but(excluded: Collection[str]) -> str:
    from learner.backends import BACKENDS

    *names, last = (name for name in BACKENDS if name not in excluded)
    return f"{', '.join(names)} or {last}"


def _check_divided(model: ModelSection, section: MegatronSection) -> None:
    """Check the sizes of a local or tiny model; any other is checked when it is loaded."""
    from learner.backends.megatron.architecture import ModelSizes, check_architecture, check_sizes
    from rlearner_text.hub import is_local, read_json

    if model.path is None:
        tiny = model.tiny
        sizes: list[Any] = [
            tiny.num_layers,
            tiny.num_heads,
            tiny.num_kv_heads,
            tiny.intermediate_size,
        ]
    elif is_local(model.path):
        model_config = read_json(
            Path(model.path).expanduser() / "config.json", model.path, "model.path"
        )
        check_architecture(
            str(next(iter(model_config.get("architectures") or []), model_config["model_type"])),
            model.path,
        )
        keys = (
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
        )
        sizes = [model_config.get(key, model_config.get("num_attention_heads")) for key in keys]
    else:
        return
    if all(isinstance(size, int) and size > 0 for size in sizes):
        check_sizes(ModelSizes(*sizes), section.tensor_parallel, section.pipeline_parallel)


def _check_warm_start(settings: RunSettings) -> None:
    warm = settings.warm_start
    if not warm.steps:
        return
    if warm.data is not None:
        if not Path(warm.data).is_file():
            raise ConfigError(
                "warm_start.data", warm.data, "no such file; a JSONL of conversations"
            )
    elif unknown := [n for n in settings.demonstrated_domains() if n not in settings.domains]:
        allowed = f"one of {', '.join(settings.domains)}, or * for all that are trained"
        raise ConfigError("warm_start.domain", unknown[0], allowed)
