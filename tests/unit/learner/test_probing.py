"""Probes of offers: ordinary text past every switch of the model."""

from __future__ import annotations

import math
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


class EqualTokens:
    """A backend to which all tokens are equally likely."""

    vocab_size = 50

    def logprobs(self, token_ids: Any) -> torch.Tensor:
        return torch.full((len(token_ids) - 1,), -math.log(self.vocab_size))


@pytest.mark.parametrize(
    ("dtype", "converted", "tolerance"),
    [
        ("float32", (), 5e-3),
        ("float32", (None, None), 5e-3),
        ("float32", ("bfloat16", None), 0.25),
        ("float32", ("fp8", "bfloat16"), 0.25),
        ("float32", ("fp8", None), 5e-3),
        ("bfloat16", ("fp8", None), 0.25),
        ("float16", (), 0.05),
        ("bfloat16", ("float32", "float32"), 0.25),
    ],
)
def test_tolerance_is_that_of_the_coarser_dtype(
    dtype: str, converted: tuple[str | None, ...], tolerance: float
) -> None:
    probe = WeightProbe(EqualTokens(), dtype, converted).make()  # type: ignore[arg-type]
    assert probe.tolerance == tolerance
    assert len(probe.token_ids.array()) == RANDOM_TOKENS
    assert probe.logprobs.array() == pytest.approx([-math.log(50)] * (RANDOM_TOKENS - 1))
    assert WeightProbe(
        EqualTokens(), dtype, token_ids=[7, 8, 9]
    ).make().token_ids.array().tolist() == [7, 8, 9]  # type: ignore[arg-type]


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
