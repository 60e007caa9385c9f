"""Process reward models: the probabilities are those that transformers gives at the separators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from process_models import (
    SEPARATOR,
    make_sample,
    write_classifier,
    write_deep_head,
    write_language_model,
)
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from broker.errors import ConfigError
from rewardhub.rewards.models.process_args import ProcessRewardArgs
from rewardhub.rewards.models.step_model import StepModel, right_probabilities

EPISODES = [
    make_sample("one\n\ntwo\n\nthree"),
    make_sample("a rather long first turn\n\nand more", "4"),
    make_sample("x"),
]


def reference_tokens(folder: Path, number: int) -> tuple[torch.Tensor, list[int]]:
    """Return an episode's tokens as transformers encodes it, and where its separators are."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [
        {**message, "content": message["content"].replace("\n\n", SEPARATOR) + SEPARATOR}
        if message["role"] == "assistant"
        else message
        for message in EPISODES[number].messages
    ]
    encoded = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)
    ids = encoded["input_ids"]
    (separator,) = tokenizer.encode(SEPARATOR)
    return ids, (ids[0] == separator).nonzero()[:, 0].tolist()


def scores(folder: Path, **args: Any) -> list[list[float]]:
    model = StepModel(ProcessRewardArgs(path=str(folder), separator=SEPARATOR, **args))
    return model.outputs([model.encode(sample) for sample in EPISODES])


def assert_scores(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> None:
    assert [len(steps) for steps in found] == [3, 3, 1]
    for steps, wanted in zip(found, expected, strict=True):
        assert steps == pytest.approx(wanted, abs=1e-5)


def test_a_token_classifier(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "model")
    module = AutoModelForTokenClassification.from_pretrained(folder).eval()
    expected = []
    for number in range(len(EPISODES)):
        ids, places = reference_tokens(folder, number)
        expected.append(module(ids).logits[0, places].softmax(-1)[:, 1].tolist())
    assert_scores(scores(folder), expected)
    assert_scores(scores(folder, label=0), [[1 - p for p in steps] for steps in expected])
    with pytest.raises(ConfigError, match=r"args\.label: 2 is not allowed; below 2, the outputs"):
        scores(folder, label=2)


def test_one_output_is_a_log_odds(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "model", num_labels=1)
    module = AutoModelForTokenClassification.from_pretrained(folder).eval()
    ids, places = reference_tokens(folder, 0)
    expected = module(ids).logits[0, places, 0].sigmoid().tolist()
    assert scores(folder)[0] == pytest.approx(expected, abs=1e-5)
    # 1 / (1 + e^-2)
    assert right_probabilities(torch.tensor([[2.0]]), 1) == pytest.approx([0.8807971])
    # e / (1 + e + e^2)
    assert right_probabilities(torch.tensor([[0.0, 1.0, 2.0]]), 1) == pytest.approx([0.2447285])


def test_the_head_of_a_public_model(tmp_path: Path) -> None:
    folder = write_deep_head(tmp_path / "model")
    trunk = AutoModel.from_pretrained(folder).eval()
    head = load_file(folder / "model.safetensors")
    expected = []
    for number in range(len(EPISODES)):
        ids, places = reference_tokens(folder, number)
        hidden = trunk(ids).last_hidden_state[0, places]
        hidden = (hidden @ head["score.0.weight"].T + head["score.0.bias"]).relu()
        logits = hidden @ head["score.2.weight"].T + head["score.2.bias"]
        expected.append(logits.softmax(-1)[:, 1].tolist())
    assert_scores(scores(folder), expected)


def test_tags_of_a_language_model(tmp_path: Path) -> None:
    folder = write_language_model(tmp_path / "model")
    module = AutoModelForCausalLM.from_pretrained(folder).eval()
    tags = AutoTokenizer.from_pretrained(folder).encode("+-")
    expected = []
    for number in range(len(EPISODES)):
        ids, places = reference_tokens(folder, number)
        logits = module(ids).logits[0, places][:, tags]
        expected.append(logits.softmax(-1)[:, 0].tolist())
    assert_scores(scores(folder, form="tags"), expected)
    with pytest.raises(ConfigError, match=r"args\.good_token: 'good' is not allowed; one token of"):
        scores(folder, form="tags", good_token="good")


def test_a_language_model_is_no_classifier(tmp_path: Path) -> None:
    folder = write_language_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="a classifier of tokens, with a head named score,"):
        scores(folder)
