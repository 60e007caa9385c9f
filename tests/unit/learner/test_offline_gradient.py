"""The gradient of a preference step and of a distillation step is that of the loss written out
plainly, however the batch is cut.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_backend_kit import backend, gradient, plain_logprobs, samples, save_model
from transformers import AutoModelForCausalLM

from broker.errors import ConfigError
from broker.settings.registry import resolve
from learner.algorithm.losses.distill import candidate_logprobs, distillation_kl
from learner.algorithm.losses.preference import PairLogprobs
from learner.backends.distill import DistillBackend
from learner.config import AlgorithmSection, TrainSection
from learner.offline import PREFERENCES
from learner.offline.distillation import with_candidates
from learner.offline.preference import LIKELIHOOD, answer_logprobs, compare_pairs, weight_answers
from rlearner_text.config import ModelSection

BETA = 0.3
CUTS = [(24, "padded"), (24, "packed"), (8192, "packed")]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return [
        save_model(tmp_path_factory.mktemp("offline") / name, seed=seed)
        for name, seed in (("student", 0), ("teacher", 1))
    ]


@pytest.mark.parametrize(("budget", "packing"), CUTS)
@pytest.mark.parametrize("name", PREFERENCES)
def test_a_preference_step(paths, name, budget, packing):
    loss = resolve("preferences", name, PREFERENCES)
    rows = samples(3, count=8, advantage=1.0)
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    model, reference = (AutoModelForCausalLM.from_pretrained(path) for path in paths)
    sums = torch.stack([plain_logprobs(model, one)[0].sum() for one in rows]).reshape(-1, 2)
    with torch.no_grad():
        ref = torch.stack([plain_logprobs(reference, one)[0].sum() for one in rows]).reshape(-1, 2)
    counts = torch.tensor([[float(one.num_tokens) for one in pair] for pair in pairs])
    expected = loss(PairLogprobs(*sums.unbind(1), *ref.unbind(1), *counts.unbind(1)), BETA)[
        0
    ].mean()
    expected.backward()
    plain = torch.cat([p.grad.flatten() for p in model.parameters()])

    trainer = backend(
        paths[0],
        algorithm=LIKELIHOOD,
        train=TrainSection(device="cpu", micro_batch_tokens=budget, packing=packing),
    )
    logprobs = answer_logprobs(trainer, pairs).requires_grad_()
    found = compare_pairs(loss, BETA, logprobs, ref.double(), pairs)[0].mean()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    (slopes,) = torch.autograd.grad(found, logprobs)
    trainer.forward_backward(weight_answers(pairs, slopes))
    difference = gradient(trainer) / len(rows) - plain
    assert difference.norm() <= 2e-6 * plain.norm()


def distiller(paths, direction, top_k, *, budget=8192, packing="auto", served=False):
    others = {
        "train": TrainSection(device="cpu", micro_batch_tokens=budget, packing=packing),
        "model": ModelSection(),
        "seed": 0,
    }
    algorithm = AlgorithmSection(pg_variant="sft")
    return DistillBackend(
        paths[0],
        direction=direction,
        top_k=top_k,
        teacher=None if served else paths[1],
        algorithm=algorithm,
        **others,
    )


def plain_divergence(student, teacher, one, direction, top_k):
    ids, where = (
        torch.tensor(one.token_ids[None].astype(np.int64)),
        torch.from_numpy(one.positions) - 1,
    )
    with torch.no_grad():
        theirs = teacher(input_ids=ids).logits[0, where]
    ours = student(input_ids=ids).logits[0, where]
    if not top_k:
        return distillation_kl(ours.log_softmax(-1), theirs.log_softmax(-1), direction)
    top = theirs.topk(top_k, -1).indices
    return distillation_kl(
        candidate_logprobs(ours, top), candidate_logprobs(theirs, top), direction
    )


@pytest.mark.parametrize(("budget", "packing"), CUTS)
@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_distillation_step(paths, direction, top_k, budget, packing, monkeypatch):
    if budget == 24:
        # five tokens at a time, computed again going back
        monkeypatch.setattr("learner.backends.models.policy._LOGIT_BUDGET", 23 * 5)
    rows = samples(4, count=7, advantage=1.0)
    student, teacher = (AutoModelForCausalLM.from_pretrained(path) for path in paths)
    values = torch.cat([plain_divergence(student, teacher, one, direction, top_k) for one in rows])
    values.sum().backward()
    plain = torch.cat([p.grad.flatten() for p in student.parameters()])

    trainer = distiller(paths, direction, top_k, budget=budget, packing=packing)
    assert trainer.divergence(rows) == pytest.approx(values.mean().item(), rel=1e-5)
    sums = trainer.forward_backward(rows)
    assert sums["pg_loss"] == pytest.approx(values.sum().item(), rel=1e-5)
    assert (gradient(trainer) - plain).norm() <= 2e-6 * plain.norm()


def test_a_teacher_elsewhere_teaches_the_same(paths):
    rows = samples(5, count=5, advantage=1.0)
    teacher = AutoModelForCausalLM.from_pretrained(paths[1])
    told = []
    for one in rows:
        with torch.no_grad():
            best = (
                teacher(input_ids=torch.tensor(one.token_ids[None].astype(np.int64)))
                .logits[0, :-1]
                .log_softmax(-1)
                .topk(4, -1)
            )
        told.append(with_candidates(one, best.indices.numpy(), best.values.numpy()))
    here, elsewhere = distiller(paths, "reverse", 4), distiller(paths, "reverse", 4, served=True)
    assert elsewhere.divergence(told) == pytest.approx(here.divergence(rows), rel=1e-5)
    here.forward_backward(rows)
    elsewhere.forward_backward(told)
    assert (gradient(elsewhere) - gradient(here)).norm() <= 1e-5 * gradient(here).norm()
    with pytest.raises(ValueError, match="a sample has no logprobs of the teacher"):
        elsewhere.forward_backward(rows)
    told[2].top_ids[0, 0] = 23  # padding of a larger model
    line = (
        r"distill.top_k: 4 is not allowed; a smaller one: one of the teacher's best is token 23, "
        r"and the student's model has 23$"
    )
    with pytest.raises(ConfigError, match=line):
        elsewhere.divergence(told)


def test_a_teacher_equal_to_the_student_leaves_nothing_to_learn(paths):
    trainer = distiller([paths[0], paths[0]], "forward", 0)
    rows = samples(6, count=4, advantage=1.0)
    assert abs(trainer.divergence(rows)) < 1e-7
    trainer.forward_backward(rows)
    assert gradient(trainer).norm() < 1e-4


def test_as_many_candidates_as_tokens_are_refused(paths):
    with pytest.raises(
        ConfigError,
        match=r"distill.top_k: 23 is not allowed; below 23, the vocabulary; 0 compares all of it",
    ):
        distiller(paths, "forward", 23)
