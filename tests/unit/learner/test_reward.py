"""A reward model of the learner: its scores and gradient are those of transformers' classifier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_backend_kit import VOCAB, gradient, save_model
from transformers import AutoModelForSequenceClassification

from broker.errors import ConfigError
from learner.algorithm.losses.bradley_terry import bradley_terry
from learner.backends.models.reward_model import make_classifier
from learner.backends.reward import RewardBackend, scored_sample
from learner.config import LoraSection, TrainSection
from learner.offline.preference import LIKELIHOOD, answer_logprobs, weight_answers
from rlearner_text.config import ModelSection

PAD = 0
CUTS = [(24, "padded"), (24, "packed"), (8192, "packed")]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A classifier whose head is not 0 any more."""
    folder = tmp_path_factory.mktemp("reward")
    path = make_classifier(save_model(folder / "lm"), folder / "rm", ModelSection(), PAD)
    module = AutoModelForSequenceClassification.from_pretrained(path)
    torch.manual_seed(3)
    torch.nn.init.normal_(module.score.weight, 0.0, 0.3)
    module.save_pretrained(path)
    return path


def make_backend(path: str, train: TrainSection | None = None) -> RewardBackend:
    train = train or TrainSection(device="cpu")
    return RewardBackend(
        path, train=train, algorithm=LIKELIHOOD, model=ModelSection(), seed=0, ref_path=path
    )


def make_rows(count: int) -> list[list[int]]:
    """Return token ids without the pad token; each two have a common beginning."""
    rng = np.random.default_rng(1)
    rows = []
    for _ in range(count // 2):
        prompt = rng.integers(1, VOCAB, int(rng.integers(1, 12))).tolist()
        rows += [[*prompt, *rng.integers(1, VOCAB, int(rng.integers(1, 9))).tolist()] for _ in "ab"]
    return rows


@pytest.mark.parametrize(("budget", "packing"), CUTS)
def test_scores_and_gradient_are_those_of_transformers(
    classifier: str, budget: int, packing: str
) -> None:
    rows = make_rows(8)
    pairs = [
        (scored_sample(chosen), scored_sample(rejected))
        for chosen, rejected in zip(rows[::2], rows[1::2], strict=True)
    ]
    module = AutoModelForSequenceClassification.from_pretrained(classifier)
    expected = torch.stack([module(torch.tensor([row])).logits[0, 0] for row in rows]).view(-1, 2)
    bradley_terry(expected, 0.01)[0].mean().backward()
    plain = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])

    trainer = make_backend(
        classifier, TrainSection(device="cpu", micro_batch_tokens=budget, packing=packing)
    )
    scores = answer_logprobs(trainer, pairs).requires_grad_()
    assert scores.detach().numpy() == pytest.approx(expected.detach().numpy(), abs=1e-5)
    (slopes,) = torch.autograd.grad(bradley_terry(scores, 0.01)[0].mean(), scores)
    trainer.forward_backward(weight_answers(pairs, slopes))
    assert (gradient(trainer) / len(rows) - plain).norm() <= 1e-5 * plain.norm()


def test_a_new_head_scores_nothing_and_the_trunk_stays(tmp_path: Path) -> None:
    source = save_model(tmp_path / "lm")
    path = make_classifier(source, tmp_path / "rm", ModelSection(), PAD)
    module = AutoModelForSequenceClassification.from_pretrained(path)
    assert (module.config.num_labels, module.config.pad_token_id) == (1, PAD)
    assert not module.score.weight.any()
    trainer = make_backend(path)
    (pair,) = [(scored_sample([3, 4]), scored_sample([5, 6, 7]))]
    assert answer_logprobs(trainer, [pair]).tolist() == [[0.0, 0.0]]
    # Once made it is not made again, and a classifier with one label is taken as it is.
    (tmp_path / "lm" / "model.safetensors").unlink()
    assert make_classifier(source, tmp_path / "rm", ModelSection(), PAD) == path
    assert make_classifier(path, tmp_path / "other", ModelSection(), PAD) == path
    assert not (tmp_path / "other").exists()


def test_a_classifier_with_several_labels_is_refused(tmp_path: Path) -> None:
    path = save_model(tmp_path / "lm")
    module = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3)
    module.save_pretrained(tmp_path / "three")
    with pytest.raises(ConfigError, match="its classifier has 3 labels, a reward model has 1"):
        make_classifier(str(tmp_path / "three"), tmp_path / "rm", ModelSection(), PAD)


def test_a_classifier_that_computes_more_is_refused(
    classifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = type(AutoModelForSequenceClassification.from_pretrained(classifier))
    original = module.forward

    def forward(*args: object, **options: object) -> object:
        output = original(*args, **options)
        output.logits = torch.tanh(output.logits)
        return output

    monkeypatch.setattr(module, "forward", forward)
    with pytest.raises(ConfigError, match="computes more than a linear layer"):
        make_backend(classifier)


def test_adapters_train_the_head_too(classifier: str) -> None:
    pytest.importorskip("peft")
    lora = LoraSection(rank=2, alpha=4, target_modules=["q_proj"])
    trainer = make_backend(classifier, TrainSection(device="cpu", lr=1e-2, lora=lora))
    names = set(trainer.factors())
    # peft puts "base_model.model." in front of each.
    assert {name.split(".")[2] for name in names} == {"model", "score"}
    pair = (scored_sample([3, 4]), scored_sample([5, 6, 7]))
    before = answer_logprobs(trainer, [pair])
    trainer.update(weight_answers([pair], torch.tensor([[-0.5, 0.5]], dtype=torch.float64)))
    after = answer_logprobs(trainer, [pair])
    # An update by the slopes of the loss widens the margin.
    assert (after[0, 0] - after[0, 1]) > (before[0, 0] - before[0, 1])
