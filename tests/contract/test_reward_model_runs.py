"""The command rm on a tiny model: it learns which answers are preferred, and its checkpoint scores
the same in the learner, in transformers and in a reward hub. An implicit reward model of dpo gives
in a reward hub the rewards that it was trained with.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from declared_metrics import undeclared
from process_models import SEPARATOR, make_sample, write_classifier
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from broker.settings.config import RewardConfig
from learner.backends.reward import RewardBackend, scored_sample
from learner.config import TrainSection
from learner.offline.preference import LIKELIHOOD, answer_logprobs
from rewardhub.reward_processes import RewardProcesses
from rewardhub.rewards.base import Sample, Scored
from rlearner import cli
from rlearner_text.config import ModelSection, TinyModel
from rlearner_text.scored_text import encode_scored
from rlearner_text.tiny import build_tiny
from rlearner_text.tokenizer import Tokenizer

SIZES = TinyModel(
    hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
)
RULE = {"a": "U", "b": "D", "c": "L", "d": "R"}
NUM_HELD_OUT = 24


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and pairs whose chosen answer is the move of the prompt's letter."""
    folder = tmp_path_factory.mktemp("rm")
    build_tiny(folder / "model", SIZES, seed=1)
    rows = [
        {"prompt": letter * number, "chosen": move, "rejected": other}
        for letter, move in RULE.items()
        for number in range(1, 9)
        for other in RULE.values()
        if other != move
    ]
    random.Random(5).shuffle(rows)
    for name, part in (("train", rows[NUM_HELD_OUT:]), ("eval", rows[:NUM_HELD_OUT])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def words(place: Path, pipeline: str, name: str, *overrides: str) -> list[str]:
    settings = {
        "run.name": name, "run.dir": place / "runs", "model.path": place / "model",
        "data.train": place / "train.jsonl", "data.eval": place / "eval.jsonl",
        "train.steps": 60, "train.batch_size": 16, "train.lr": 1e-2, "train.num_threads": 1,
        "eval.every_steps": 0, "checkpoint.every_steps": 0, "trackers.use": "[]",
    }  # fmt: skip
    return [
        pipeline,
        f"configs/{pipeline}.yaml",
        *(f"{key}={value}" for key, value in settings.items()),
        *overrides,
    ]


def lines(place: Path, name: str) -> list[dict[str, Any]]:
    text = (place / "runs" / name / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert undeclared(name for row in rows for name in row) == set()
    return rows


def held_out(place: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (place / "eval.jsonl").read_text().splitlines()]


def chat_of(row: dict[str, str], answer: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row[answer]},
    ]


def sample_of(row: dict[str, str], answer: str) -> Sample:
    return Sample(
        domain="d", task_index=0, prompt=row["prompt"], response=row[answer], reference="", reward=0.0,
        reward_parts={}, success=False, end="terminated", num_turns=1, num_tokens=1, metrics={},
    )  # fmt: skip


def scores_of_hub(name: str, args: dict[str, Any], samples: list[Sample]) -> list[Scored]:
    """Score samples in the process of a reward hub."""

    async def score() -> list[Scored]:
        processes = RewardProcesses()
        try:
            reward = RewardConfig(name=name, args=args)
            return await asyncio.gather(*(processes.score(reward, sample) for sample in samples))
        finally:
            await processes.close()

    return asyncio.run(score())


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """The checkpoint of a reward model."""
    assert cli.main(words(place, "rm", "rm")) == 0
    return place / "runs" / "rm" / "checkpoints" / "step-000060"


@pytest.mark.usefixtures("trained")
def test_preferred_answers_get_ahead(place: Path) -> None:
    first, *_, last = lines(place, "rm")
    # A head of zeros scores all alike: log 2, and no chosen answer is ahead.
    assert first["eval/loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert first["eval/reward_margin"] == first["eval/accuracy"] == 0.0
    assert last["eval/accuracy"] > 0.9
    assert last["eval/reward_margin"] > 1.0
    assert last["eval/chosen_reward"] - last["eval/rejected_reward"] == pytest.approx(
        last["eval/reward_margin"]
    )


def test_scores_are_the_same_everywhere(place: Path, trained: Path) -> None:
    rows = held_out(place)[:12]
    pairs = [(row, answer) for row in rows for answer in ("chosen", "rejected")]

    tokenizer = Tokenizer.load(trained)
    samples = [
        scored_sample(encode_scored(tokenizer, chat_of(row, answer))) for row, answer in pairs
    ]
    backend = RewardBackend(
        str(trained), train=TrainSection(device="cpu"), algorithm=LIKELIHOOD,
        model=ModelSection(), seed=0,
    )  # fmt: skip
    learner = answer_logprobs(backend, list(zip(samples[::2], samples[1::2], strict=True)))

    module = AutoModelForSequenceClassification.from_pretrained(trained).eval()
    assert module.config.num_labels == 1
    theirs = AutoTokenizer.from_pretrained(trained)
    encoded = theirs.apply_chat_template(
        [chat_of(row, answer) for row, answer in pairs],
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        transformers_scores = module(**encoded).logits[:, 0].tolist()

    hub = scores_of_hub(
        "reward_model", {"path": str(trained)}, [sample_of(row, answer) for row, answer in pairs]
    )
    assert len({round(score, 3) for score in transformers_scores}) > 6
    assert learner.flatten().tolist() == pytest.approx(transformers_scores, abs=1e-5)
    assert [scored.value for scored in hub] == pytest.approx(transformers_scores, abs=1e-5)


def test_an_implicit_reward_model_rewards_what_it_was_trained_with(place: Path) -> None:
    overrides = ["dpo.loss=outcome", "dpo.beta=0.5", "train.lr=5e-3"]
    assert cli.main(words(place, "dpo", "prm", *overrides)) == 0
    last = lines(place, "prm")[-1]
    assert last["eval/accuracy"] > 0.9
    args = {
        "path": str(place / "runs" / "prm" / "checkpoints" / "step-000060"),
        "reference": str(place / "model"),
        "beta": 0.5,
    }
    rows = held_out(place)
    for answer in ("chosen", "rejected"):
        scored = scores_of_hub("implicit_reward", args, [sample_of(row, answer) for row in rows])
        turns = [value for one in scored if isinstance(one.value, list) for value in one.value]
        assert len(turns) == NUM_HELD_OUT
        assert sum(turns) / NUM_HELD_OUT == pytest.approx(last[f"eval/{answer}_reward"], abs=1e-4)


def test_steps_are_scored_in_the_process_of_a_hub(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "model")
    args = {"path": str(folder), "separator": SEPARATOR}
    (scored,) = scores_of_hub("process_reward", args, [make_sample("one\n\ntwo", "three")])
    assert isinstance(scored.value, list)
    assert len(scored.value) == 2
    assert all(0 < value < 1 for value in scored.value)
    assert scored.notes == {"steps": 3.0, "lowest": min(scored.value), "truncated": 0.0}


def refused(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(arguments) == 2
    errors = [text for text in capsys.readouterr().err.splitlines() if not text[:1].isdigit()]
    assert len(errors) == 1
    assert errors[0].startswith(line)


def test_bad_input_is_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    equal = place / "equal.jsonl"
    equal.write_text('{"prompt": "a", "chosen": "U", "rejected": "U"}\n')
    refused(
        words(place, "rm", "refused", f"data.train={equal}"),
        f"error: {equal}:1: chosen and rejected are the same, or one is the beginning of the other",
        capsys,
    )
    refused(
        words(place, "rm", "refused", "train.backend=ddp"),
        "error: train.backend: 'ddp' is not allowed; torch: no other backend trains a classifier",
        capsys,
    )
    refused(
        words(place, "rm", "refused", "rm.center=-1"),
        "error: rm.center: -1 is not allowed; input should be greater than or equal to 0",
        capsys,
    )
