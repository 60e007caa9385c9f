"""Reads what a configuration asks for, and which choices it leaves to the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from broker.errors import ConfigError
from broker.settings.config import PluginArguments, UserSettings, num_greedy
from broker.settings.run_settings import RunSettings
from broker.settings.schema.serving import RolloutSection
from broker.settings.sections import parse
from broker.weights.carriers import selected_carrier
from learner.backends import BACKENDS
from learner.checks import check_ranks
from learner.config import LoraSection, TrainSection
from rlearner.plan.facts import ModelFacts, ServeFacts, StepFacts, TrainFacts
from rollout.checks import declaration
from rollout.engines import ENGINES

# Chosen by the plan unless the configuration or the command line sets them.
CHOICES: Final = (
    "train.backend", "train.gradient_checkpointing", "train.optimizer_offload",
    "train.deepspeed.stage", "train.deepspeed.offload_optimizer", "train.megatron.tensor_parallel",
    "train.megatron.pipeline_parallel", "train.ranks", "rollout.engine_args.tensor_parallel",
)  # fmt: skip
SIZES: Final = ("rollout.max_running", "rollout.engine_args.kv_cache_gib")
ENGINE_DEFAULTS: Final = {
    "rollout.engine_args.tensor_parallel": 1,
    "rollout.engine_args.kv_cache_gib": 8.0,
}
# By engine the argument with its share of a GPU's memory, and the engine's default.
SHARES: Final = {"vllm": ("gpu_memory_utilization", 0.9), "sglang": ("mem_fraction_static", 0.88)}
# By dtype on the wire or in an engine.
ITEM_BYTES: Final[Mapping[str | None, int]] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
# Engines that need no GPU.
WEIGHTLESS: Final = ("random", "openai")
# Rewards that load models, and the arguments that name them.
MODEL_REWARDS: Final = ("reward_model", "process_reward", "implicit_reward")
MODEL_PATHS: Final = ("path", "reference")


@dataclass(frozen=True)
class Demands:
    """A run's demands.

    Attributes:
        serve: None if the servers need no GPU.
        fixed: choices that the configuration makes already, by key.
        current: values of all keys that a plan may set.
        rewards: path and dtype of each reward model.
        longest: tokens of the longest sequence that is trained.
        environments: episodes at once, for ``envhub --n``.
    """

    train: TrainFacts
    serve: ServeFacts | None
    step: StepFacts
    fixed: Mapping[str, Any]
    current: Mapping[str, Any]
    rewards: tuple[tuple[str, str], ...]
    environments: int
    longest: int

    def allows(self, **choices: Any) -> bool:
        """Return whether the configuration leaves these choices open; keys have __ for dots."""
        values = {key.replace("__", "."): value for key, value in choices.items()}
        return all(self.fixed.get(key, value) == value for key, value in values.items())


def read_demands(config: UserSettings, settings: RunSettings, model: ModelFacts) -> Demands:
    """Return what a run asks for.

    Args:
        config: the user's, without defaults: what it sets is not changed.
        settings: the same with defaults.

    Raises:
        ConfigError: if the model cannot be divided as the configuration says, or there are no
            formulas for its backend or engine.
    """
    settings = settings.with_values("rollout", engine_args=_engine_args(settings.rollout))
    values = settings.to_plain()
    fixed = {key: _value_at(values, key) for key in CHOICES if _value_at(config, key) is not None}
    backend = fixed.get("train.backend", "ddp")
    check_ranks(TrainSection(backend=backend, ranks=fixed.get("train.ranks", 1)))
    if (backend := fixed.get("train.backend", "torch")) not in BACKENDS:
        raise ConfigError(
            "train.backend",
            backend,
            f"one of {', '.join(BACKENDS)}: there are no formulas for others",
        )
    check_tensor_parallel("rollout.engine_args.tensor_parallel", fixed, model, model.heads)
    check_tensor_parallel(
        "train.megatron.tensor_parallel", fixed, model, math.gcd(model.heads, model.kv_heads)
    )
    train = settings.train
    algorithm = settings.algorithm
    lora = lora_parameters(train.lora, model) if train.lora else 0
    longest = max(domain.max_context_tokens for domain in settings.trained_domains.values())
    carrier = selected_carrier(train.weights_backend)
    facts = TrainFacts(
        slice_tokens=max(train.micro_batch_tokens, longest),
        lora_parameters=lora,
        reference=bool(algorithm.kl_coef) and not train.lora,
        critic=algorithm.critic.enabled,
        activation_offload=train.activation_offload,
        staging=_staging_bytes(train, model, lora),
        # The other carriers send from host memory.
        staging_on_gpu=carrier is not None and carrier.on_gpu,
    )
    group_size = max(domain.group_size for domain in settings.trained_domains.values())
    group_size += num_greedy(algorithm.adv_estimator)
    step = StepFacts(
        sequences=train.groups_per_step * group_size,
        length=longest / 2,
        generated=longest / 4,
        passes=algorithm.num_epochs,
    )
    rewards = tuple(
        (str(reward.args[name]), str(reward.args.get("dtype", "auto")))
        for domain in settings.domains.values()
        for reward in domain.rewards
        if reward.name in MODEL_REWARDS and reward.args.get("device") != "cpu"
        for name in MODEL_PATHS
        if name in reward.args
    )
    current = ENGINE_DEFAULTS | {
        key: value for key in (*CHOICES, *SIZES) if (value := _value_at(values, key)) is not None
    }
    models = tuple(dict.fromkeys(rewards))
    environments = settings.envhub.n
    return Demands(
        train=facts,
        serve=read_serving(settings.rollout),
        step=step,
        fixed=fixed,
        current=current,
        rewards=models,
        environments=environments,
        longest=longest,
    )


def check_tensor_parallel(
    key: str, fixed: Mapping[str, Any], model: ModelFacts, heads: int
) -> None:
    """Check that every GPU gets whole attention heads.

    Args:
        heads: a number that the GPUs must divide.

    Raises:
        ConfigError: if they do not; names the key.
    """
    value = fixed.get(key, 1)
    has = f"{model.path} has {model.heads} attention heads and {model.kv_heads} key-value heads"
    if value > heads:
        raise ConfigError(key, value, f"at most {heads}: {has}")
    if heads % value:
        raise ConfigError(key, value, f"a divisor of {heads}: {has}")


def _engine_args(rollout: RolloutSection) -> PluginArguments:
    """Return the engine's arguments as it reads them, only those that are set."""
    engine = rollout.engine
    if (declared := declaration(engine)) is None:
        raise ConfigError(
            "rollout.engine",
            engine,
            f"one of {', '.join(ENGINES)}: there are no formulas for others",
        )
    return parse("rollout.engine_args", rollout.engine_args, declared).model_dump(
        mode="json", exclude_unset=True
    )


def read_serving(rollout: RolloutSection) -> ServeFacts | None:
    """Return what a section asks of its servers; None if they need no GPU."""
    engine = rollout.engine
    args = rollout.engine_args
    if engine in WEIGHTLESS:
        return None
    slots = args.get("kv_slots")
    if not slots:
        # Half of engine hf's slots keep prefixes of conversations that wait for their next turn.
        has_prefixes = rollout.prefix_cache and engine == "hf"
        slots = rollout.max_running * (1 + has_prefixes)
    key, share = SHARES.get(engine, ("", 0.0))
    if args.get(key) is not None:
        share = args[key]
    return ServeFacts(
        engine=engine,
        running=rollout.max_running,
        context=rollout.max_context_tokens,
        prefill=rollout.prefill_tokens,
        slots=slots,
        kv_gib=args.get("kv_cache_gib"),
        share=float(share),
        itemsize=ITEM_BYTES.get(rollout.dtype, 0),
    )


def _staging_bytes(train: TrainSection, model: ModelFacts, lora: int) -> int:
    if train.lora and train.lora.send == "adapter":
        return 4 * lora
    # Without a dtype of their own, weights are sent as they are.
    return model.parameters * ITEM_BYTES.get(train.weights_dtype, model.itemsize)


def lora_parameters(lora: LoraSection, model: ModelFacts) -> int:
    """Return the number of factors of all adapters."""
    names = lora.target_modules
    targets = [layer for layer in model.linears if names == "all-linear" or layer[0] in names]
    return sum(lora.rank * (inputs + outputs) for _, inputs, outputs in targets)


def _value_at(values: Mapping[str, Any], key: str) -> Any:
    value: Any = values
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
