"""The work that both sides do: model, tokenizer, prompts, reward, sampling and optimizer.

The model is a Qwen3 with random weights, an own output layer and a vocabulary of 51 tokens, one of
which ends the answer. Its outputs are therefore nearly uniform over the vocabulary whatever the
prompt, the end comes after 51 tokens on average, and lengths follow a geometric distribution: cut
at 64 they are nearly equal (mean 37), cut at 400 few are long (p99 over p50: 6.6). Nothing else
decides about a length, so both sides draw from the same distribution, which the small learning rate
does not change within a run; each side reports the mean that it saw.
"""

from __future__ import annotations

import json
import random
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROLES: Final = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>")
SPECIAL: Final = ("<|endoftext|>", "<|unk|>", "<|im_end|>", *ROLES)
# 45: with SPECIAL 51 tokens
CHARACTERS: Final = string.ascii_lowercase + string.digits + " +-*/=.?!"
TEMPLATE: Final = (
    "{%- for message in messages %}{{- '<|im_' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_assistant|>' }}{%- endif %}"
)
GROUP: Final = 8
GROUPS: Final = 16  # per step: 128 samples
SAMPLES: Final = GROUP * GROUPS
LR: Final = 1e-5
CLIP: Final = 0.2
SEED: Final = 0
REWARD: Final = '''"""The share of vowels in an answer."""


def vowels(sample):
    text = sample.response if hasattr(sample, "response") else sample
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)
'''


@dataclass(frozen=True)
class Case:
    """One row of the comparison."""

    name: str
    max_tokens: int  # of an answer
    max_staleness: int  # of ours; TRL is synchronous
    steps: int  # of ours in a turn
    trl_steps: int  # of TRL's in a turn
    engine: str = "hf"


CASES: Final = (
    Case("equal", 64, 1, steps=16, trl_steps=6),
    Case("skewed", 400, 1, steps=10, trl_steps=2),
    Case("skewed_4", 400, 4, steps=10, trl_steps=2),
    Case("vllm", 400, 1, steps=10, trl_steps=2, engine="vllm"),
)


def make(folder: Path) -> None:
    """Write the model, the prompts and the reward function into a folder."""
    import tokenizers
    import torch
    from tokenizers import decoders, models
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = folder / "model"
    vocab = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(vocab),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=vocab["<|im_end|>"],
        pad_token_id=vocab["<|endoftext|>"],
    )
    Qwen3ForCausalLM(config).save_pretrained(model)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<|unk|>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(one, normalized=False, special=True) for one in SPECIAL]
    )
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    settings |= {
        "unk_token": "<|unk|>",
        "model_max_length": 512,  # type: ignore[dict-item]
        "clean_up_tokenization_spaces": False,  # type: ignore[dict-item]
    }
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    draw = random.Random(SEED)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(4096):
            question = "".join(draw.choices(CHARACTERS, k=draw.randint(16, 32)))
            file.write(json.dumps({"question": question, "answer": "-"}) + "\n")
    (folder / "vowels.py").write_text(REWARD)


def config(folder: Path, case: Case, steps: int) -> dict[str, Any]:
    """Return our configuration of a case."""
    context = case.max_tokens + 48
    return {
        "run": {"dir": str(folder / "runs"), "seed": SEED},
        "trackers": {"use": []},
        "model": {"path": str(folder / "model")},
        "domains": {
            "letters": {
                "env": "qa",
                "env_args": {"path": str(folder / "prompts.jsonl"), "eval_share": 0.001},
                "group_size": GROUP,
                "max_context_tokens": context,
                "sampling": {"temperature": 1.0, "max_tokens": case.max_tokens},
                "rewards": [{"name": f"{folder / 'vowels.py'}:vowels"}],
            }
        },
        "train": {
            "steps": steps,
            "groups_per_step": GROUPS,
            "max_staleness": case.max_staleness,
            "lr": LR,
            "lr_schedule": "constant",
            "num_threads": 1,
        },
        "algorithm": {"adv_estimator": "grpo", "pg_variant": "ppo"},
        "eval": {"every_steps": 0, "at_start": False},
        "checkpoint": {"every_steps": 0, "every_minutes": 0},
        "rollout": {
            "engine": case.engine,
            "max_running": 128,
            "max_context_tokens": context,
            "num_threads": 1,
        },
        "envhub": {"n": 512},
    }
