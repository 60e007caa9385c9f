"""The model of the reward ``reward_model`` in torch: tokenization and batched outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import transformers
from safetensors import safe_open

from broker.errors import ConfigError
from rewardhub.rewards.models.model_devices import (
    choose_device,
    choose_dtype,
    keep_softcap,
    pad_rows,
)
from rlearner_text.hub import model_folder, read_json
from rlearner_text.scored_text import encode_scored, has_chat_template
from rlearner_text.tokenizer import CHARS_PER_TOKEN, Tokenizer

if TYPE_CHECKING:
    from rewardhub.rewards.reward_model_args import RewardModelArgs

# Names of the value head, a linear layer from the last hidden state to a number, in libraries that
# train such models.
HEADS: Final = ("v_head.summary", "value_head.summary", "v_head", "value_head", "score")
_KEY: Final = "rewards.args.path"


class ScoringModel:
    """One model on one device.

    Raises:
        ConfigError: if there is no such model, or it has no head with one output.
    """

    def __init__(self, args: RewardModelArgs) -> None:
        self._args = args
        self._device = choose_device(args.device)
        torch.set_num_threads(args.num_threads)
        dtype = choose_dtype(args.dtype, self._device)
        trusted = args.trust_remote_code
        self._tokenizer = Tokenizer.load(
            args.path, trust_remote_code=args.trust_remote_code, key=_KEY
        )
        self._converses = has_chat_template(self._tokenizer)
        folder = model_folder(args.path, _KEY, trust_remote_code=trusted)
        config = read_json(Path(folder) / "config.json", args.path, _KEY)
        options = {"dtype": dtype, "trust_remote_code": trusted, "use_safetensors": True}
        classifier = any(
            "SequenceClassification" in architecture
            for architecture in config.get("architectures") or ()
        )
        self._head: torch.nn.Linear | None = None
        try:
            if args.head == "classifier" or (args.head == "auto" and classifier):
                kind = transformers.AutoModelForSequenceClassification
                self._model: Any = kind.from_pretrained(folder, **options)
                self._model.config.pad_token_id = self._pad = self._tokenizer.pad_token_id
            else:
                self._model = transformers.AutoModel.from_pretrained(folder, **options)
                self._head = _value_head(folder, dtype)
                self._pad = self._tokenizer.pad_token_id
                self._head.to(self._device)
        except (OSError, ValueError) as error:
            raise ConfigError(
                _KEY, args.path, f"it cannot be loaded: {' '.join(str(error).split())[:300]}"
            ) from None
        keep_softcap(self._model)
        self._check_label()
        self._model.to(self._device).eval()

    def _check_label(self) -> None:
        if self._head is None and self._args.label >= self._model.config.num_labels:
            raise ConfigError(
                "rewards.args.label",
                self._args.label,
                f"below {self._model.config.num_labels}, the labels of {self._args.path}",
            )

    def tokens(self, prompt: str, response: str) -> tuple[list[int], bool]:
        """Return the token ids of question and response, and whether the beginning was cut off."""
        args = self._args
        most = args.max_length * CHARS_PER_TOKEN
        # what would be cut off in any case is not even encoded
        is_cut = len(prompt) + len(response) > most
        if is_cut:
            response = response[-most:]
            prompt = prompt[len(prompt) - (most - len(response)) :]
        if self._converses:
            system = (
                [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
            )
            chat = [
                *system,
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": response},
            ]
            ids = encode_scored(self._tokenizer, chat)
        else:
            text_before, _, text_after = args.template.partition("{response}")
            ids = self._tokenizer.encode(
                text_before.replace("{prompt}", self._tokenizer.shield(prompt))
                + self._tokenizer.shield(response)
                + text_after
            )
        return ids[-args.max_length :], is_cut or len(ids) > args.max_length

    @torch.inference_mode()
    def outputs(self, batch: Sequence[Sequence[int]]) -> list[float]:
        """Return one number for each row of token ids; rows are padded on the right."""
        rows = [list(row) for row in batch]
        ids, mask, lengths = pad_rows(rows, self._pad, self._device)
        if self._head is None:
            return self._activated(self._model(input_ids=ids, attention_mask=mask).logits.float())
        hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        last = hidden[torch.arange(len(batch), device=self._device), lengths - 1]
        return self._activated(self._head(last).float())

    def _activated(self, logits: torch.Tensor) -> list[float]:
        if self._args.activation == "softmax":
            logits = logits.softmax(-1)
        elif self._args.activation == "sigmoid":
            logits = logits.sigmoid()
        values: list[float] = logits[:, self._args.label].tolist()
        return values


def _value_head(path: str, dtype: torch.dtype) -> torch.nn.Linear:
    """Return the value head in the model's safetensors.

    Raises:
        ConfigError: if there is no head with one output.
    """
    tensors_by_name: dict[str, torch.Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is not a mapping
                if any(name in (f"{head}.weight", f"{head}.bias") for head in HEADS):
                    tensors_by_name[name] = tensors.get_tensor(name)
    weights = {
        name: tensor
        for name, tensor in tensors_by_name.items()
        if name.endswith(".weight") and tensor.ndim == 2 and tensor.shape[0] == 1
    }
    if len(weights) != 1:
        head_names = ", ".join(f"{head}.weight" for head in HEADS)
        raise ConfigError(
            _KEY,
            path,
            "a sequence classifier, or a model with one value head of shape [1, hidden] "
            f"among {head_names}",
        )
    ((name, weight),) = weights.items()
    bias = tensors_by_name.get(name.removesuffix("weight") + "bias")
    head = torch.nn.Linear(weight.shape[1], 1, bias=bias is not None, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
        if bias is not None:
            head.bias.copy_(bias)
    return head
