"""Supervised fine-tuning: the loss is exact, only the assistant's tokens count, and the folder is a
model.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from broker.errors import ConfigError, DataError, UserError
from learner.backends.torch import TorchBackend
from learner.offline.config import OfflineTrainSection, backend_train, first_changed_key
from learner.offline.data import TokenizedExample, shuffled_batches
from learner.offline.supervised import SFT, fine_tune, supervised_step
from rlearner_text.config import ModelSection, TinyModel
from rlearner_text.rows.reading import read_rows
from rlearner_text.supervised_masks import encode_supervised
from rlearner_text.tiny import build_tiny
from rlearner_text.tokenizer import Tokenizer

SIZES = TinyModel(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
)
RULE = {"a": "U", "b": "D", "c": "L", "d": "R"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny(tmp_path_factory.mktemp("sft") / "tiny", SIZES, seed=1))


@pytest.fixture
def data(tmp_path: Path) -> str:
    lines = []
    for letters in ("ab", "cd", "da", "bc", "ac", "db"):
        messages = []
        for letter in letters:
            messages += [
                {"role": "user", "content": letter * 3},
                {"role": "assistant", "content": RULE[letter]},
            ]
        lines.append(json.dumps({"messages": messages}))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n\n")
    return str(tmp_path / "rows.jsonl")


def settings(**options: Any) -> OfflineTrainSection:
    return OfflineTrainSection(**{"device": "cpu", "lr": 1e-3, "num_threads": 1, **options})


def tune(
    path: str, data: str, out: str, *, seed: int = 0, on_step: Any = None, **options: Any
) -> dict[str, float]:
    model = ModelSection(path=path)
    return fine_tune(
        path, data, out, model=model, train=settings(**options), seed=seed, on_step=on_step
    )


def test_it_learns_and_writes_a_folder_that_transformers_loads(
    model: str, data: str, tmp_path: Path
) -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    out = str(tmp_path / "out" / "warm")
    result = tune(
        model, data, out, steps=120, batch_size=6, lr=1e-2, on_step=lambda s, m: seen.append((s, m))
    )
    assert [s for s, _ in seen] == list(range(1, 121))
    # a fresh model is uniform over its 102 tokens
    assert seen[0][1]["train/loss"] == pytest.approx(math.log(102), abs=0.3)
    assert result["loss"] < 0.05
    assert result["examples"] == 6
    assert result["epochs"] == 120
    # two letters and two ends of turn in each conversation
    assert result["trained_tokens"] == 120 * 6 * 4
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["warm"]
    trained, tokenizer = (
        AutoModelForCausalLM.from_pretrained(out),
        AutoTokenizer.from_pretrained(out),
    )
    for letter, answer in RULE.items():
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": letter * 3}],
            add_generation_prompt=True,
            return_tensors="pt",
        )
        output = trained.generate(**prompt, do_sample=False, max_new_tokens=4)[
            0, prompt["input_ids"].shape[1] :
        ]
        assert tokenizer.decode(output) == answer + "<|im_end|>"
    assert Tokenizer.load(out).eos_token_ids == (0, 2)


def test_same_seed_same_weights(model: str, data: str, tmp_path: Path) -> None:
    weights = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        tune(model, data, str(tmp_path / name), seed=seed, steps=3, batch_size=4)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def _examples(model: str) -> list[TokenizedExample]:
    tokenizer = Tokenizer.load(model)
    chats = [
        [("aaaa", "U")],
        [("b", "D"), ("cc", "LL"), ("d" * 9, "R")],
        [("a", "UDLR"), ("b", "D")],
    ]
    messages = [
        [
            {"role": r, "content": c}
            for turn in chat
            for r, c in zip(("user", "assistant"), turn, strict=True)
        ]
        for chat in chats
    ]
    return [TokenizedExample(*encode_supervised(tokenizer, m)) for m in messages]


def test_the_loss_is_the_mean_over_the_batch_however_it_is_cut(model: str) -> None:
    examples = _examples(model)
    # By hand: every conversation alone, without padding, summed over the trained tokens.
    reference = AutoModelForCausalLM.from_pretrained(model)
    total = count = 0.0
    for example in examples:
        ids = torch.tensor([example.token_ids])
        logprobs = functional.log_softmax(reference(ids).logits[0, :-1], dim=-1)
        picked = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(example.loss_mask[1:], dtype=torch.bool)
        total, count = total - picked[mask].sum(), count + int(mask.sum())
    (total / count).backward()
    expected_norm = torch.linalg.vector_norm(
        torch.cat([p.grad.flatten() for p in reference.parameters()])
    ).item()
    samples = [example.sample() for example in examples]
    for micro_batch_tokens in (1, 40, 10_000):
        train = settings(micro_batch_tokens=micro_batch_tokens, max_grad_norm=0.0)
        backend = TorchBackend(
            model,
            train=backend_train(train),
            algorithm=SFT,
            model=ModelSection(path=model),
            seed=0,
            ref_path=model,
        )
        values = supervised_step(backend, samples)
        assert values["train/loss"] == pytest.approx((total / count).item(), rel=1e-5)
        assert values["train/grad_norm"] == pytest.approx(expected_norm, rel=1e-4)


def test_batches_see_every_example_once_an_epoch() -> None:
    batches = shuffled_batches(5, 2, seed=3)
    drawn = [i for _ in range(5) for i in next(batches)]
    assert sorted(drawn[:5]) == sorted(drawn[5:]) == list(range(5))
    assert drawn[:5] != drawn[5:]
    # a batch larger than the data holds it more than once
    assert next(shuffled_batches(2, 5, seed=0)).count(0) in (2, 3)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"messages": [', "not JSON"),
        ("[1]", "the row is not an object"),
        (
            '{"text": "x"}',
            "expected the columns messages, or prompt and completion (or response); it has text",
        ),
        (
            '{"messages": [{"role": "user", "content": "x"}]}',
            "the last message must be the assistant's",
        ),
        (
            '{"messages": [{"role": "robot", "content": "x"}, {"role": "assistant", "content": "y"}]}',
            "role 'robot', expected 'user'",
        ),
    ],
)
def test_a_malformed_row_names_file_and_line(
    data: str, model: str, row: str, problem: str, tmp_path: Path
) -> None:
    with open(data, "a") as file:
        file.write(row + "\n")
    with pytest.raises(DataError) as caught:
        tune(model, data, str(tmp_path / "out"), steps=1)
    assert str(caught.value).startswith(f"{data}:8: ")
    assert problem in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"messages": "\xff"}\n')
    with pytest.raises(DataError, match=r"x\.jsonl:1: not UTF-8"):
        list(read_rows(tmp_path / "x.jsonl"))
    good = b'{"prompt": "p", "response": "r"}'
    (tmp_path / "y.jsonl").write_bytes(
        good + b"\r\n\n" + good + b"\n" + b'{"prompt": "\xff"}\n' + good
    )
    rows = read_rows(tmp_path / "y.jsonl")
    assert [next(rows)[0], next(rows)[0]] == [1, 3]
    with pytest.raises(DataError, match=r"y\.jsonl:4: not UTF-8"):
        next(rows)


def test_missing_things_are_one_line(model: str, data: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^data: .*nowhere.jsonl' is not allowed; the file cannot be read: No such file",
    ):
        tune(model, str(tmp_path / "nowhere.jsonl"), str(tmp_path / "out"), steps=1)
    with pytest.raises(ConfigError, match=r"^model.path: .*no such folder"):
        tune(str(tmp_path / "nothing"), data, str(tmp_path / "out"), steps=1)
    with pytest.raises(
        ConfigError, match=r"^train.device: 'cuda:99' is not allowed; this machine has cpu"
    ):
        tune(model, data, str(tmp_path / "out"), steps=1, device="cuda:99")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"no row has an assistant's answer"):
        tune(model, str(tmp_path / "empty.jsonl"), str(tmp_path / "out"), steps=1)


def test_missing_weights_are_not_drawn_at_random(model: str, data: str, tmp_path: Path) -> None:
    torn = shutil.copytree(model, tmp_path / "torn")
    weights = load_file(torn / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, torn / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"1 of its weights are missing, the first is model.norm.weight"
    ):
        tune(str(torn), data, str(tmp_path / "out"), steps=1)


def test_a_loss_that_explodes_is_said_plainly(model: str, data: str, tmp_path: Path) -> None:
    tensor = r"the gradient of model\..* holds nan at .*"
    with pytest.raises(
        UserError,
        match=rf"^the gradient is not finite at step 2: {tensor}; lower warm_start\.lr \(1e",
    ):
        tune(model, data, str(tmp_path / "out"), steps=50, lr=1e30, max_grad_norm=0.0)


OLD_SETTINGS: dict[str, Any] = {
    "model": {"path": "m"},
    "train": {"steps": 10, "steps_between": 1, "device": "cpu", "lora": {"rank": 8}},
    "eval": {"rows": 4},
}


@pytest.mark.parametrize(
    ("section", "value", "changed"),
    [
        ("train", {**OLD_SETTINGS["train"], "steps": 20, "device": "cuda"}, None),
        # Begins like a key that may change.
        ("train", {**OLD_SETTINGS["train"], "steps_between": 2}, "train.steps_between"),
        ("train", {**OLD_SETTINGS["train"], "lora": {"rank": 16}}, "train.lora.rank"),
        ("train", {**OLD_SETTINGS["train"], "lora": None}, "train.lora"),
        ("eval", {"rows": 5}, None),
        # Sections that an earlier version did not have.
        ("rollout", {"engine": "hf"}, None),
        ("evaluation", {"rows": 5}, "evaluation"),
        ("model", {"path": "n"}, "model.path"),
    ],
)
def test_first_changed_key(section: str, value: object, changed: str | None) -> None:
    assert first_changed_key(OLD_SETTINGS, {**OLD_SETTINGS, section: value}) == changed
