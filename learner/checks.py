"""Checks the learner's sections and plug-in names before a start, without importing torch.

``rlearner.doctor.preflight`` checks which packages they need.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from broker.contract.wire import ACTOR
from broker.errors import ConfigError

# Parameters of the plug-ins that are functions, to check the user's.
CALLED_WITH: Final = {
    "advantages": ("trajectories", "algorithm"),
    "losses": ("tokens", "algorithm"),
    "corrections": ("facts", "algorithm"),
    "filters": ("group",),
    "preferences": ("pairs", "beta"),
}


def check(config: dict[str, Any]) -> None:
    """Check combinations across sections; import no plug-in of the registries.

    Args:
        config: every section with its defaults filled in.

    Raises:
        ConfigError: for the first combination that cannot work.
    """
    check_names(config)
    _check_model(config)
    _check_training(config)
    from learner.algorithm_checks import check_algorithm
    from learner.credit.capacity import check_groups

    check_groups(config)
    check_algorithm(config)
    _check_warm_start(config)
    if config["eval"]["baseline"] == ACTOR:
        allowed = "that is the policy being trained; name another one, for example random"
        raise ConfigError("eval.baseline", ACTOR, allowed)
    opponents = config["eval"]["against"]
    if (
        ACTOR in opponents
        or config["eval"]["baseline"] in opponents
        or len(set(opponents)) < len(opponents)
    ):
        raise ConfigError(
            "eval.against",
            opponents,
            "names of other policies than actor and eval.baseline, each once",
        )


def check_names(config: dict[str, Any]) -> None:
    """Check that there is a domain, and that the plug-ins that are named exist.

    Raises:
        ConfigError: if a name is unknown.
    """
    if not config["domains"]:
        raise ConfigError("domains", {}, "name at least one domain, with its env")
    from broker.channel.carriers import CHANNELS
    from learner.algorithm.advantages import ADVANTAGES
    from learner.algorithm.corrections import CORRECTIONS
    from learner.algorithm.filters import FILTERS
    from learner.algorithm.losses import LOSSES
    from learner.backends import BACKENDS
    from learner.reporting.trackers import TRACKERS

    algorithm = config["algorithm"]
    trackers = config["trackers"]
    check_name("algorithm.adv_estimator", "advantages", algorithm["adv_estimator"], ADVANTAGES)
    check_name("algorithm.pg_variant", "losses", algorithm["pg_variant"], LOSSES)
    check_name("algorithm.correction", "corrections", algorithm["correction"], CORRECTIONS)
    if algorithm["group_filter"]:
        check_name("algorithm.group_filter", "filters", algorithm["group_filter"], FILTERS)
    check_name("broker.channel", "channels", config["broker"]["channel"], CHANNELS)
    check_name("train.backend", "backends", config["train"]["backend"], BACKENDS)
    for name in trackers["use"]:
        check_name("trackers.use", "trackers", name, TRACKERS)
    for name, value in trackers["args"].items():
        if name not in (*trackers["use"], "tensorboard"):
            raise ConfigError(f"trackers.args.{name}", value, "trackers.use does not name it")


def check_family(config: dict[str, Any]) -> None:
    """Check that the model's family can be trained as configured (``rlearner_text.families``).

    Raises:
        ConfigError: if they cannot.
    """
    from rlearner_text.families import check_trained, family_at

    path = config["model"]["path"]
    check_trained(family_at(path), path, config["train"])


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


def _check_model(config: dict[str, Any]) -> None:
    from rlearner_text.config import TinyModel
    from rlearner_text.model_checks import resolve_model
    from rlearner_text.tiny import check_tiny

    model = config["model"]
    tiny = TinyModel.model_validate(model["tiny"])
    if model["path"] is None:
        check_tiny(tiny)
    resolve_model(model)
    if model["path"] is not None:
        return
    allowed = f"at most model.tiny.max_position_embeddings, which is {tiny.max_position_embeddings}"
    for name, domain in config["domains"].items():
        if (length := domain["max_context_tokens"]) > tiny.max_position_embeddings:
            raise ConfigError(f"domains.{name}.max_context_tokens", length, allowed)


def _check_training(config: dict[str, Any]) -> None:
    from learner.backends import BACKENDS, SUPPORTED_OPTIONS
    from learner.backends.section_checks import check_deepspeed, check_megatron, check_stripes

    train = config["train"]
    backend = config["train"]["backend"]
    with_critic = SUPPORTED_OPTIONS["critic"]
    check_ranks(train)
    if (
        backend in BACKENDS
        and backend not in with_critic
        and config["algorithm"]["critic"]["enabled"]
    ):
        raise ConfigError(
            "train.backend", backend, f"{', '.join(with_critic)} with algorithm.critic.enabled"
        )
    check_options(train)
    check_fp8(train, config["rollout"]["dtype"] or "", config["model"]["dtype"])
    check_family(config)
    check_layers(train["lora"], config["model"])
    check_deepspeed(train)
    check_megatron(train)
    check_stripes(train)
    if backend == "megatron":
        _check_divided(config["model"], train["megatron"])
    if train["weights_backend"] == "nccl" and train["device"] == "cpu":
        raise ConfigError(
            "train.weights_backend", "nccl", "gloo with train.device cpu: nccl sends between GPUs"
        )
    if train["weights_backend"] == "ipc" and train["device"] == "cpu":
        raise ConfigError(
            "train.weights_backend",
            "ipc",
            "shared with train.device cpu: ipc is read in a GPU's memory",
        )
    if (port := train["weights_snapshot_port"]) is not None and not train["weights_snapshot_every"]:
        raise ConfigError(
            "train.weights_snapshot_port", port, "null without train.weights_snapshot_every"
        )
    cert = train["weights_snapshot_cert"]
    key = train["weights_snapshot_key"]
    if (cert is None) != (key is None) or (cert is not None and port is None):
        allowed = (
            "null, or set together with train.weights_snapshot_key and train.weights_snapshot_port"
        )
        raise ConfigError("train.weights_snapshot_cert", cert, allowed)
    if train["warmup_steps"] >= train["steps"] and train["warmup_steps"]:
        raise ConfigError(
            "train.warmup_steps",
            train["warmup_steps"],
            f"below train.steps, which is {train['steps']}",
        )
    for name, domain in config["domains"].items():
        if (length := domain["max_context_tokens"]) > train["micro_batch_tokens"]:
            allowed = (
                f"at least domains.{name}.max_context_tokens, which is {length}: one sequence must "
                "fit"
            )
            raise ConfigError("train.micro_batch_tokens", train["micro_batch_tokens"], allowed)
        if domain["sampling"]["temperature"] == 0:
            raise ConfigError(
                f"domains.{name}.sampling.temperature",
                0.0,
                "above 0: greedy tokens have no gradient",
            )


def check_ranks(train: Mapping[str, Any]) -> None:
    """Check that the backend of a section ``train`` has as many ranks.

    Raises:
        ConfigError: if it trains in one process.
    """
    from learner.backends import SINGLE_PROCESS_BACKENDS

    if train["ranks"] > 1 and train["backend"] in SINGLE_PROCESS_BACKENDS:
        others = _all_but(SINGLE_PROCESS_BACKENDS)
        allowed = f"1 with train.backend {train['backend']}; more with {others}"
        raise ConfigError("train.ranks", train["ranks"], allowed)


def check_options(train: Mapping[str, Any]) -> None:
    """Check that the backend supports the options of a section ``train``.

    Raises:
        ConfigError: if the backend lacks one.
    """
    from learner.backends import BACKENDS, SUPPORTED_OPTIONS

    backend = train["backend"]
    for name in ("lora", "activation_offload", "optimizer_offload", "compile"):
        if train[name] and backend in BACKENDS and backend not in SUPPORTED_OPTIONS[name]:
            allowed = (
                f"unset with train.backend {backend}; {', '.join(SUPPORTED_OPTIONS[name])} take it"
            )
            raise ConfigError(f"train.{name}", train[name], allowed)


def check_fp8(train: Mapping[str, Any], engine_dtype: str, model_dtype: str) -> None:
    """Check that the learner sends matrices that it can quantize.

    Args:
        engine_dtype: empty: as the model's.

    Raises:
        ConfigError: if only adapters are sent, no rank has a whole matrix, or engines compute in
            another dtype, in which they would expect what is not quantized.
    """
    if train["weights_dtype"] != "fp8":
        return
    if engine_dtype not in ("", model_dtype):
        allowed = f"null or model.dtype ({model_dtype}) with train.weights_dtype fp8"
        raise ConfigError("rollout.dtype", engine_dtype, allowed)
    lora = train["lora"]
    backend = train["backend"]
    other_dtypes = "null, float32, bfloat16 or float16"
    if lora and lora["send"] == "adapter":
        allowed = (
            f"{other_dtypes} with train.lora.send adapter: factors are sent unquantized; fp8 works "
            "with merged"
        )
        raise ConfigError("train.weights_dtype", "fp8", allowed)
    if backend == "megatron" or (
        lora and backend == "deepspeed" and train["deepspeed"]["stage"] == 3
    ):
        sender = "megatron" if backend == "megatron" else "deepspeed stage 3 and train.lora"
        allowed = (
            f"{other_dtypes} with train.backend {sender}: no rank has the whole matrices that "
            "servers compute with"
        )
        raise ConfigError("train.weights_dtype", "fp8", allowed)


def check_layers(lora: Mapping[str, Any] | None, model: Mapping[str, Any]) -> None:
    """Check that the model has the layers that adapters name, as far as known before it is loaded.

    Raises:
        ConfigError: if it has no linear layer of a name, or adapts experts with dropout.
    """
    from rlearner_text.hub import expert_names, layer_names
    from rlearner_text.tiny import LAYERS

    if lora is None:
        return
    is_default = lora["target_modules"] == "all-linear"
    folder = Path(model["path"] or "").expanduser()
    experts = frozenset[str]() if model["path"] is None else expert_names(folder)
    targets = experts if is_default else experts & set(lora["target_modules"])
    if lora["dropout"] and targets:
        stacked = " and ".join(sorted(targets))
        allowed = f"0, or target_modules without {stacked}: stacked experts take no dropout"
        raise ConfigError("train.lora.dropout", lora["dropout"], allowed)
    if is_default:
        return
    names = set(LAYERS) if model["path"] is None else layer_names(folder)
    if names is None:
        return
    names = names and names | experts
    if unknown := [name for name in lora["target_modules"] if name not in names]:
        allowed = f"names of this model's linear layers: {', '.join(sorted(names))}"
        raise ConfigError("train.lora.target_modules", unknown, allowed)


def _all_but(excluded: Collection[str]) -> str:
    from learner.backends import BACKENDS

    *names, last = (name for name in BACKENDS if name not in excluded)
    return f"{', '.join(names)} or {last}"


def _check_divided(model: Mapping[str, Any], section: Mapping[str, int]) -> None:
    """Check the sizes of a local or tiny model; any other is checked when it is loaded."""
    from learner.backends.megatron.architecture import ModelSizes, check_architecture, check_sizes
    from rlearner_text.hub import is_local, read_json

    if model["path"] is None:
        tiny = model["tiny"]
        sizes = [
            tiny[key] for key in ("num_layers", "num_heads", "num_kv_heads", "intermediate_size")
        ]
    elif is_local(model["path"]):
        model_config = read_json(
            Path(model["path"]).expanduser() / "config.json", model["path"], "model.path"
        )
        check_architecture(
            str(next(iter(model_config.get("architectures") or []), model_config["model_type"])),
            model["path"],
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
        check_sizes(ModelSizes(*sizes), section["tensor_parallel"], section["pipeline_parallel"])


def _check_warm_start(config: dict[str, Any]) -> None:
    warm = config["warm_start"]
    names = list(config["domains"])
    if not warm["steps"]:
        return
    if warm["data"] is not None:
        if not Path(warm["data"]).is_file():
            raise ConfigError(
                "warm_start.data", warm["data"], "no such file; a JSONL of conversations"
            )
    elif warm["domain"] not in names and (warm["domain"] or len(names) > 1):
        raise ConfigError("warm_start.domain", warm["domain"], f"one of {', '.join(names)}")
