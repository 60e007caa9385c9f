"""What settings of TRL and verl are called here, for messages about unknown keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# A name in TRL or verl, with the key above it where the name alone says too little. DOMAIN stands
# for a domain's name.
OWN_NAMES: Final[Mapping[str, str]] = {
    # TRL
    "beta": "algorithm.kl_coef",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "eval_steps": "eval.every_steps",
    "generation_batch_size": "train.groups_per_step",
    "learning_rate": "train.lr",
    "logging_dir": "run.dir",
    "lora_alpha": "train.lora.alpha",
    "lora_dropout": "train.lora.dropout",
    "lora_r": "train.lora.rank",
    "lora_target_modules": "train.lora.target_modules",
    "loss_type": "algorithm.pg_variant",
    "lr_scheduler_type": "train.lr_schedule",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "max_completion_length": "domains.DOMAIN.sampling.max_tokens",
    "max_prompt_length": "domains.DOMAIN.max_context_tokens",
    "max_steps": "train.steps",
    "model_name_or_path": "model.path",
    "num_generations": "domains.DOMAIN.group_size",
    "num_iterations": "algorithm.num_epochs",
    "output_dir": "run.dir",
    "per_device_train_batch_size": "train.micro_batch_tokens",
    "report_to": "trackers.use",
    "reward_funcs": "domains.DOMAIN.rewards",
    "reward_weights": "domains.DOMAIN.rewards",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": "algorithm.norm_std",
    "torch_dtype": "model.dtype",
    "use_vllm": "rollout.engine",
    # verl
    "clip_ratio": "algorithm.clip_low",
    "clip_ratio_c": "algorithm.dual_clip",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "entropy_coeff": "algorithm.entropy_coef",
    "experiment_name": "run.name",
    "grad_clip": "train.max_grad_norm",
    "kl_loss_coef": "algorithm.kl_coef",
    "kl_loss_type": "algorithm.kl_estimator",
    "lam": "algorithm.gae_lambda",
    "logger": "trackers.use",
    "lora_rank": "train.lora.rank",
    "max_response_length": "domains.DOMAIN.sampling.max_tokens",
    "n_gpus_per_node": "train.ranks",
    "norm_adv_by_std_in_grpo": "algorithm.norm_std",
    "ppo_epochs": "algorithm.num_epochs",
    "ppo_max_token_len_per_gpu": "train.micro_batch_tokens",
    "ppo_mini_batch_size": "algorithm.num_minibatches",
    "project_name": "trackers.project",
    "rollout.n": "domains.DOMAIN.group_size",
    "save_freq": "checkpoint.every_steps",
    "test_freq": "eval.every_steps",
    "total_training_steps": "train.steps",
    "train_batch_size": "train.groups_per_step",
}


def own_name(key: str, value: Any) -> str:
    """Return what a setting of TRL or verl is called here, empty if it is none of theirs.

    Args:
        key: with the keys above it, as in ``train.learning_rate``.
        value: of the key; in a section that only they have, the first setting counts.
    """
    while isinstance(value, Mapping) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    above, _, name = key.rpartition(".")
    parent = above.rpartition(".")[2]
    own = OWN_NAMES.get(f"{parent}.{name}") or OWN_NAMES.get(name, "")
    parts = above.split(".")
    if parts[0] == "domains" and len(parts) > 1:
        return own.replace("DOMAIN", parts[1])
    return own
