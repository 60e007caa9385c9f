"""The models of the reward ``process_reward`` in torch: probabilities that steps are right.

A classifier is a trunk with a head of its own on every token: one linear layer, as in transformers'
token classifiers, or several with ReLU between them, as in Qwen2.5-Math-PRM. Its weights are read
from the model's files, so no model runs code of its own. With tags a language model says at the end
of a step whether it is right, as Math-Shepherd does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn

from broker.errors import ConfigError
from rewardhub.rewards.base import Sample
from rewardhub.rewards.models.model_devices import (
    choose_device,
    choose_dtype,
    keep_softcap,
    pad_rows,
)
from rewardhub.rewards.models.process_args import ProcessRewardArgs
from rewardhub.rewards.models.step_tokens import StepTokens, encode_steps
from rlearner_text.hub import model_folder
from rlearner_text.tokenizer import Tokenizer

KEY: Final = "rewards.args.path"
# Names of heads in the files of public models; a number follows where there are several layers.
_HEAD: Final = re.compile(
    r"(?:score|classifier|v_head|v_head\.summary|value_head|value_head\.summary)"
    r"(?:\.(?P<layer>\d+))?\.(?P<kind>weight|bias)"
)


class StepScorer(Protocol):
    """Scores the steps of one or more episodes."""

    def __call__(self, batch: Sequence[StepTokens]) -> list[list[float]]:
        """Return for each episode the probabilities that its steps are right, by position."""
        ...


class StepModel:
    """A process reward model on one device.

    Raises:
        ConfigError: if there is no such model, or it does not have the form that is asked for.
    """

    def __init__(self, args: ProcessRewardArgs) -> None:
        self._args = args
        self._device = choose_device(args.device)
        torch.set_num_threads(args.num_threads)
        self.tokenizer = Tokenizer.load(args.path, key=KEY)
        folder = model_folder(args.path, KEY)
        dtype = choose_dtype(args.dtype, self._device)
        self._model = self._load(folder, dtype)
        keep_softcap(self._model)
        self._model.to(self._device).eval()
        self._scorer: StepScorer = self._say_tags
        if args.form == "tags":
            self._tags = [self._tag_id(name) for name in ("good_token", "bad_token")]
        else:
            self._scorer = self._classify
            self._head = read_head(folder, dtype).to(self._device)
            self._check_head(args)

    def encode(self, sample: Sample) -> StepTokens:
        """Return an episode's tokens; see ``encode_steps`` for errors."""
        return encode_steps(self.tokenizer, sample, self._args)

    @torch.inference_mode()
    def outputs(self, batch: Sequence[StepTokens]) -> list[list[float]]:
        """Return for each episode the probabilities that its steps are right."""
        return self._scorer(batch)

    def _load(self, folder: str, dtype: torch.dtype) -> Any:
        kind: Any = transformers.AutoModel
        if self._args.form == "tags":
            kind = transformers.AutoModelForCausalLM
        try:
            return kind.from_pretrained(folder, dtype=dtype, use_safetensors=True)
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(KEY, self._args.path, f"it cannot be loaded: {reason}") from None

    def _tag_id(self, setting: str) -> int:
        """Return the token of a tag, which stands behind white space as a word does."""
        tag = str(getattr(self._args, setting))
        ids = self.tokenizer.encode(tag)
        if not ids or self.tokenizer.decode(ids[-1:]).strip() != tag.strip():
            allowed = f"one token of {self._args.path}"
            raise ConfigError(f"rewards.args.{setting}", tag, allowed)
        return ids[-1]

    def _check_head(self, args: ProcessRewardArgs) -> None:
        last = [layer for layer in self._head if isinstance(layer, nn.Linear)][-1]
        if last.out_features > 1 and args.label >= last.out_features:
            allowed = f"below {last.out_features}, the outputs of {args.path}"
            raise ConfigError("rewards.args.label", args.label, allowed)

    def _classify(self, batch: Sequence[StepTokens]) -> list[list[float]]:
        rows = [row.token_ids for row in batch]
        ids, mask, _ = pad_rows(rows, self.tokenizer.pad_token_id, self._device)
        hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        outputs = [
            self._head(states[row.positions]) for states, row in zip(hidden, batch, strict=True)
        ]
        return [right_probabilities(logits.float(), self._args.label) for logits in outputs]

    def _say_tags(self, batch: Sequence[StepTokens]) -> list[list[float]]:
        # One row at a time: logits are as wide as the vocabulary, and wanted at few positions.
        return [self._say_row(row) for row in batch]

    def _say_row(self, row: StepTokens) -> list[float]:
        if not row.positions:
            return []
        ids = torch.tensor([row.token_ids], device=self._device)
        positions = torch.tensor(row.positions, device=self._device)
        logits = self._model(input_ids=ids, logits_to_keep=positions, use_cache=False).logits[0]
        probabilities: list[float] = logits[:, self._tags].float().softmax(-1)[:, 0].tolist()
        return probabilities


def right_probabilities(logits: Tensor, label: int) -> list[float]:
    """Return the probability of the class ``label``; of a single output its sigmoid.

    Args:
        logits: (steps, outputs) float32.
    """
    if logits.shape[1] == 1:
        # The log-odds of a second class are 0.
        logits = torch.cat([torch.zeros_like(logits), logits], -1)
        label = 1
    values: list[float] = logits.softmax(-1)[:, label].tolist()
    return values


def read_head(folder: str, dtype: torch.dtype) -> nn.Sequential:
    """Return the head in a model's safetensors: linear layers with ReLU between them.

    Raises:
        ConfigError: if there is none.
    """
    layers: dict[int, dict[str, Tensor]] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is not a mapping
                if (match := _HEAD.fullmatch(name)) is not None:
                    layer = layers.setdefault(int(match["layer"] or 0), {})
                    layer[match["kind"]] = tensors.get_tensor(name)
    if not layers or any("weight" not in tensors for tensors in layers.values()):
        allowed = (
            "a classifier of tokens, with a head named score, classifier, v_head or value_head; "
            "form: tags for a language model"
        )
        raise ConfigError(KEY, folder, allowed)
    modules: list[nn.Module] = []
    for _, tensors in sorted(layers.items()):
        modules += [_make_linear(tensors, dtype), nn.ReLU()]
    return nn.Sequential(*modules[:-1]).eval()


def _make_linear(tensors: dict[str, Tensor], dtype: torch.dtype) -> nn.Linear:
    weight = tensors["weight"]
    has_bias = "bias" in tensors
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if has_bias:
            linear.bias.copy_(tensors["bias"])
    return linear
