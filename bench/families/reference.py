"""Plain transformers, one sequence at a time: what every cell is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from rlearner_text.transformers_import import import_transformers

EXACT: Final = 1e-4  # largest difference of logprobs in float32
ROUNDING: Final = 3.0  # times the dtype's own noise
LEAST_NOISE: Final = 0.005  # of logprobs in bfloat16, where a few tokens happen to be exact
NOISE_TEXTS: Final = 5
# In bfloat16 a router with two almost equal experts takes the other one for a few tokens, which
# says nothing.
SHARE: Final = 0.9  # of the tokens that are compared there


class DifferenceError(Exception):
    """A cell's numbers are not those of transformers."""


class PlainModel:
    """A folder's model as transformers runs it.

    Args:
        context: longest sequence of the run; a model with two sets of rotary factors uses those of
            this length for every sequence, as vLLM does, since keys in a cache cannot change.
    """

    def __init__(self, folder: Path, dtype: str, context: int) -> None:
        self.folder = folder
        self.dtype = dtype
        self.context = context
        self.module = self._load(dtype)

    def _load(self, dtype: str) -> Any:
        import_transformers()
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(self.folder)
        fix_factors(config.get_text_config(), self.context)
        # Eager attention is the definition of a model: the fused kernel drops what it does not
        # know, such as soft caps.
        named: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": "eager"}
        return AutoModelForCausalLM.from_pretrained(self.folder, config=config, **named).eval()

    def logits(self, token_ids: Sequence[int], module: Any = None) -> Tensor:
        """Return the logits of each position, (n, vocabulary) float32."""
        logits: Tensor = (module or self.module)(
            input_ids=torch.tensor([list(token_ids)]), use_cache=False
        ).logits[0]
        return logits.float()

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int], start: int = 1, module: Any = None) -> Tensor:
        """Return log p(token[i] | token[:i]) for i from ``start`` on, (n - start,) float32."""
        ids = torch.tensor(list(token_ids))
        chosen = self.logits(token_ids, module).log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        return chosen[start - 1 :]

    @cached_property
    def noise(self) -> float:
        """The difference between the model in its dtype and the same weights in float32."""
        if self.dtype == "float32":
            return 0.0
        exact = self._load("float32")
        rounded = {
            name: tensor.to(exact.dtype) for name, tensor in self.module.state_dict().items()
        }
        exact.load_state_dict(rounded)
        texts = [sample_tokens(self.context // 3, seed) for seed in range(90, 90 + NOISE_TEXTS)]
        return max(
            self.distance(self.logprobs(ids), self.logprobs(ids, module=exact)) for ids in texts
        )

    @property
    def limit(self) -> float:
        """The largest difference that rounding explains."""
        return EXACT if self.dtype == "float32" else ROUNDING * max(self.noise, LEAST_NOISE)

    def distance(self, found: Tensor, expected: Tensor) -> float:
        """Return the largest difference; in bfloat16 that of the nine tenths of the tokens with the
        smallest.
        """
        differences = (found.float() - expected.float()).abs()
        if not differences.numel():
            return 0.0
        return float(differences.max() if self.dtype == "float32" else differences.quantile(SHARE))

    def compare(self, subject: str, found: Tensor, expected: Tensor) -> float:
        """Return the largest difference.

        Raises:
            DifferenceError: if it is more than rounding explains.
        """
        difference = self.distance(found, expected)
        if not difference <= self.limit:  # NaN is wrong, too
            raise DifferenceError(
                f"{subject}: logprobs differ by {difference:.2g} (limit {self.limit:.2g})"
            )
        return difference


def fix_factors(config: Any, context: int) -> None:
    """Let longrope use the factors of the run's longest sequence for all of them."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return
    original = (
        rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
    )
    kept, replaced = (
        ("long_factor", "short_factor") if context > original else ("short_factor", "long_factor")
    )
    config.rope_parameters = {**rope, replaced: rope[kept]}


def sample_tokens(length: int, seed: int) -> list[int]:
    """Return ordinary tokens, without special ones."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(8, 100, (length,), generator=generator).tolist()
    return tokens
