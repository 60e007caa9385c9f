"""Turns texts into vectors with an encoder of transformers, such as E5 or BGE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from broker.errors import UserError, reason_of
from envhub.envs.retrieval.indexes import Vectors

BATCH: Final = 32
Pooling = Literal["mean", "cls"]


@dataclass(frozen=True)
class EncoderOptions:
    """How an encoder reads texts.

    Attributes:
        path: a folder, or a name on the Hugging Face hub.
        pooling: the mean over the tokens, or the first token.
        query_prefix, passage_prefix: put before texts, such as E5's ``query: `` and ``passage: ``.
        max_tokens: of a text; the rest is not read.
    """

    path: str
    pooling: Pooling = "mean"
    query_prefix: str = ""
    passage_prefix: str = ""
    max_tokens: int = 512
    device: str = "cpu"


class TextEncoder:
    """An encoder in this process.

    Raises:
        UserError: if it cannot be loaded.
    """

    def __init__(self, options: EncoderOptions) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        self._torch = torch
        self.options = options
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(options.path)
            model: Any = AutoModel.from_pretrained(options.path)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"--encoder {options.path} cannot be loaded: {reason_of(error)}"
            ) from None
        self._model = model.to(options.device).eval()

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Return vectors (texts, dimensions) of length 1."""
        return self._encode([f"{self.options.query_prefix}{text}" for text in texts])

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """Return vectors (texts, dimensions) of length 1."""
        prefixed = [f"{self.options.passage_prefix}{text}" for text in texts]
        # texts of like length share a batch, so that little is padded
        order = sorted(range(len(prefixed)), key=lambda place: len(prefixed[place]))
        vectors = self._encode([prefixed[place] for place in order])
        restored = np.empty_like(vectors)
        restored[order] = vectors
        return restored

    def _encode(self, texts: Sequence[str]) -> Vectors:
        parts = [
            self._encode_batch(texts[start : start + BATCH])
            for start in range(0, len(texts), BATCH)
        ]
        return np.concatenate(parts)

    def _encode_batch(self, texts: Sequence[str]) -> Vectors:
        torch = self._torch
        batch = self._tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=self.options.max_tokens,
            return_tensors="pt",
        ).to(self.options.device)
        with torch.inference_mode():
            hidden = self._model(**batch).last_hidden_state.float()
            if self.options.pooling == "cls":
                pooled = hidden[:, 0]
            else:
                mask = batch["attention_mask"][..., None].float()
                pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1.0)
            unit = torch.nn.functional.normalize(pooled, dim=-1)
        vectors: Vectors = unit.cpu().numpy()
        return vectors
