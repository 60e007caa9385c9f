"""The models of the reward ``implicit_reward`` in torch: log-ratios of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from broker.errors import ConfigError
from rewardhub.rewards.base import Sample
from rewardhub.rewards.models.model_devices import choose_device, choose_dtype, keep_softcap
from rewardhub.rewards.models.process_args import ImplicitRewardArgs
from rewardhub.rewards.models.turn_tokens import TurnTokens, encode_turns
from rlearner_text.hub import model_folder
from rlearner_text.tokenizer import Tokenizer

# Tokens whose logits are copied to float32 at once; each is as wide as the vocabulary.
_CHUNK: Final = 1024


class ImplicitModel:
    """A language model and its reference on one device.

    Raises:
        ConfigError: if one of them does not exist, or they have different vocabularies.
    """

    def __init__(self, args: ImplicitRewardArgs) -> None:
        self._args = args
        self._device = choose_device(args.device)
        torch.set_num_threads(args.num_threads)
        self.tokenizer = Tokenizer.load(args.path, key="rewards.args.path")
        reference = Tokenizer.load(args.reference, key="rewards.args.reference")
        if self.tokenizer.vocabulary() != reference.vocabulary():
            allowed = f"a model with the vocabulary of {args.path}"
            raise ConfigError("rewards.args.reference", args.reference, allowed)
        self._model = self._load(args.path, "path")
        self._reference = self._load(args.reference, "reference")

    def encode(self, sample: Sample) -> TurnTokens:
        """Return an episode's tokens; see ``encode_turns`` for errors."""
        return encode_turns(self.tokenizer, sample, self._args.system_prompt)

    def outputs(self, batch: Sequence[TurnTokens]) -> list[list[list[float]]]:
        """Return ``beta (log p - log ref)`` of each token, by episode and turn.

        Tokens beyond ``max_length`` are left out.
        """
        return [self._token_rewards(row) for row in batch]

    @torch.inference_mode()
    def _token_rewards(self, row: TurnTokens) -> list[list[float]]:
        ids = row.token_ids[: self._args.max_length]
        # The first token of a conversation is never predicted.
        positions = [
            position
            for start, end in row.spans
            for position in range(max(start, 1), min(end, len(ids)))
        ]
        if not positions:
            return [[] for _ in row.spans]
        inputs = torch.tensor([ids], device=self._device)
        targets = torch.tensor(positions, device=self._device)
        ratios = self._logprobs(self._model, inputs, targets)
        ratios -= self._logprobs(self._reference, inputs, targets)
        rewards = dict(zip(positions, (self._args.beta * ratios).tolist(), strict=True))
        return [
            [rewards[position] for position in range(start, end) if position in rewards]
            for start, end in row.spans
        ]

    def _logprobs(self, model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the logprobs of the tokens at some positions, (T,) float32."""
        logits: Tensor = model(
            input_ids=inputs[:, :-1], logits_to_keep=targets - 1, use_cache=False
        ).logits[0]
        logit_parts = torch.split(logits, _CHUNK)
        token_parts = torch.split(inputs[0, targets], _CHUNK)
        pieces = [
            part.float().log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
            for part, chosen in zip(logit_parts, token_parts, strict=True)
        ]
        return torch.cat(pieces)

    def _load(self, path: str, key: str) -> Any:
        dtype = choose_dtype(self._args.dtype, self._device)
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                model_folder(path, f"rewards.args.{key}"), dtype=dtype, use_safetensors=True
            )
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            allowed = f"it cannot be loaded: {reason}"
            raise ConfigError(f"rewards.args.{key}", path, allowed) from None
        keep_softcap(model)
        return model.to(self._device).eval()
