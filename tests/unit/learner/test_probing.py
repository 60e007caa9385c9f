"""Probes of offers: ordinary text past every switch of the model; the tolerance follows the model's own noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from learner.weights.probing import RANDOM_TOKENS, WeightProbe, read_probe_ids
from rlearner_text.config import ModelSection, TinyModel
from rlearner_text.tiny import build_tiny
from rlearner_text.tokenizer import Tokenizer


class TwoWays:
    """A backend whose plain attention gives logprobs that lie ``distance`` apart from its own."""

    vocab_size = 50

    def __init__(self, distance: float | None) -> None:
        self._distance, self.num_plain = distance, 0

    def logprobs(self, token_ids: Any) -> torch.Tensor:
        return torch.full((len(token_ids) - 1,), -2.0)

    def plain_logprobs(self, token_ids: Any) -> torch.Tensor | None:
        self.num_plain += 1
        return None if self._distance is None else self.logprobs(token_ids) + self._distance


@pytest.mark.parametrize(
    ("distance", "dtype", "tolerance"),
    [
        (0.0, "float32", 5e-3),  # the least
        (None, "float32", 5e-3),  # such as Megatron's
        (0.2, "float32", 0.8),  # four times what the model differs from itself
        (0.2, "bfloat16", 0.8 + 2 * 2**-7 / 4),  # and the rounding of logprobs of that size
        (float("nan"), "float32", 5e-3),
    ],
)
def test_tolerance_follows_the_noise_of_the_model(distance: float | None, dtype: str, tolerance: float) -> None:
    backend = TwoWays(distance)
    probe = WeightProbe(backend, dtype)  # type: ignore[arg-type]
    assert probe.make().tolerance == pytest.approx(tolerance, abs=1e-6)
    assert len(probe.make().token_ids.array()) == RANDOM_TOKENS
    assert backend.num_plain == 1  # measured once


def test_text_passes_the_window_and_is_of_the_models_tokenizer(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "model", TinyModel(max_position_embeddings=512, vocab="chars"))
    config = transformers.AutoConfig.from_pretrained(folder)
    config.sliding_window, config.use_sliding_window = 200, True
    config.save_pretrained(folder)
    path, model = str(folder), ModelSection.model_validate({})
    ids = read_probe_ids(path, model, vocab_size=config.vocab_size, max_context=400)
    assert 200 < len(ids) < 400
    assert Tokenizer.load(path).decode(ids).startswith("The baker counted 2 wooden chairs near")
    short = read_probe_ids(path, model, vocab_size=config.vocab_size, max_context=20)
    assert np.array_equal(short, ids[:19])  # as far as the run's context
