"""The commands sft, dpo, distill and rm on a tiny model: they learn, survive kill -9 with the same
bits, and refuse bad input in a line.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from declared_metrics import undeclared
from transformers import AutoModelForCausalLM, AutoTokenizer

from broker.system.locks import lock
from learner.reporting.metrics import MetricsFile
from rlearner import cli
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

SIZES = TinyModel(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
)
RULE = {"a": "U", "b": "D", "c": "L", "d": "R"}
PIPELINES = ("sft", "dpo", "distill", "rm")
TIMES = ("time", "time/step", "perf/tokens_per_s")
PATIENCE_S = 250.0


# One child for each pipeline, which are killed as they enter their 7th step, two beyond a
# checkpoint.
NURSERY = """
import json, os, pathlib, signal, sys, time
from rlearner.cli import main
from learner.offline import distillation, preference, reward_model, run, supervised

place = pathlib.Path(sys.argv[1])
step = run._Loop._step

def until_the_seventh(self, number, rows, show):
    if number == 7:
        (place / f"{self._name}.there").touch()
        time.sleep(1000)
    step(self, number, rows, show)

run._Loop._step = until_the_seventh
for name, words in json.loads(sys.argv[2]).items():
    child = os.fork()
    if child == 0:
        os._exit(main(words))
    while not (place / f"{name}.there").exists():
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            sys.exit(f"{name} ended by itself")
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, conversations that follow a rule, and pairs of which the chosen answer does."""
    folder = tmp_path_factory.mktemp("offline")
    build_tiny(folder / "model", SIZES, seed=1)
    build_tiny(folder / "teacher", SIZES.model_copy(update={"hidden_size": 48}), seed=2)
    prompts = [(letter, letter * n) for n in (1, 2, 3) for letter in RULE]
    wrong = dict(zip(RULE, [*list(RULE.values())[1:], RULE["a"]], strict=True))
    conversations = [{"prompt": prompt, "response": RULE[letter]} for letter, prompt in prompts]
    pairs = [
        {"prompt": prompt, "chosen": RULE[letter], "rejected": wrong[letter]}
        for letter, prompt in prompts
    ]
    for name, rows in (
        ("sft", conversations),
        ("dpo", pairs),
        ("distill", conversations),
        ("rm", pairs),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def words(place: Path, pipeline: str, name: str, *overrides: str) -> list[str]:
    settings = {
        "run.name": name, "run.dir": place / "runs", "model.path": place / "model",
        "data.train": place / f"{pipeline}.jsonl",
        "data.eval_share": 0.25, "train.steps": 12, "train.batch_size": 5, "train.lr": 1e-2, "train.num_threads": 1,
        "eval.every_steps": 4, "checkpoint.every_steps": 4, "train.warmup_steps": 2,
    }  # fmt: skip
    if pipeline == "distill":
        settings["distill.teacher"] = place / "teacher"
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
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def state(place: Path, name: str, step: int) -> dict[str, bytes]:
    folder = place / "runs" / name / "checkpoints" / f"step-{step:06d}"
    return {
        file: (folder / file).read_bytes()
        for file in ("model.safetensors", "learner/part-00001-of-00001.safetensors")
    }


@pytest.mark.timeout(300)  # a second process imports torch, on a busy machine
def test_killed_and_started_again_the_bits_are_the_same(place: Path) -> None:
    command = [
        sys.executable,
        "-c",
        NURSERY,
        str(place),
        json.dumps({name: words(place, name, f"{name}-killed") for name in PIPELINES}),
    ]
    nursery = subprocess.Popen(
        command, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    for name in PIPELINES:  # meanwhile, undisturbed
        assert cli.main(words(place, name, f"{name}-whole")) == 0
    _, errors = nursery.communicate(timeout=PATIENCE_S)
    assert nursery.returncode == 0, errors.decode()
    for name in PIPELINES:
        assert len(lines(place, f"{name}-killed")) == 7  # before the first step, and six
        assert cli.main(words(place, name, f"{name}-killed")) == 0
        assert lines(place, f"{name}-killed") == lines(place, f"{name}-whole")
        assert state(place, f"{name}-killed", 12) == state(place, f"{name}-whole", 12)
        assert sorted(
            path.name for path in (place / "runs" / f"{name}-killed" / "checkpoints").iterdir()
        ) == [
            "step-000008",
            "step-000012",
        ]
        assert list((place / "runs" / f"{name}-killed" / "tensorboard").glob("events.*"))


def test_sft_learns_the_rule(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(
            words(
                place,
                "sft",
                "sft",
                "train.steps=60",
                "data.eval_share=0",
                "data.eval=" + str(place / "sft.jsonl"),
            )
        )
        == 0
    )
    first, last = lines(place, "sft")[0], lines(place, "sft")[-1]
    assert first["eval/loss"] == pytest.approx(4.6, abs=0.3)  # log of the vocabulary's 102 tokens
    assert last["eval/loss"] < 0.05
    path = place / "runs" / "sft" / "checkpoints" / "step-000060"
    assert capsys.readouterr().out.startswith(f"wrote {path} after 60 steps")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
    )
    for letter, answer in RULE.items():
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": letter}], add_generation_prompt=True, return_tensors="pt"
        )
        output = model.generate(**prompt, do_sample=False, max_new_tokens=4)[
            0, prompt["input_ids"].shape[1] :
        ]
        assert tokenizer.decode(output) == answer + "<|im_end|>"


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_preferences_are_learned(place: Path, loss: str) -> None:
    assert (
        cli.main(words(place, "dpo", loss, f"dpo.loss={loss}", "train.steps=30", "train.lr=3e-3"))
        == 0
    )
    first, last = lines(place, loss)[0], lines(place, loss)[-1]
    # At the reference: log 2, or (0 - 1 / (2 * 0.1))^2 = 25. The beginning shows no preference, the
    # end the right one, held out too.
    assert first["eval/loss"] == pytest.approx({"dpo": 0.6931, "ipo": 25.0}[loss], abs=1e-3)
    assert first["eval/reward_margin"] == pytest.approx(0.0, abs=1e-4)
    assert last["train/accuracy"] == last["eval/accuracy"] == 1.0
    assert last["eval/loss"] < 0.7 * first["eval/loss"]


@pytest.mark.parametrize("settings", [["forward"], ["reverse", "distill.top_k=12"]])
def test_the_student_becomes_its_teacher(place: Path, settings: list[str]) -> None:
    teacher = place / "runs" / "sft" / "checkpoints" / "step-000060"  # of the test above
    name, settings = (
        settings[0],
        [
            f"distill.kl={settings[0]}",
            f"distill.teacher={teacher}",
            "train.lr_schedule=constant",
            *settings[1:],
        ],
    )
    assert (
        cli.main(
            words(
                place,
                "distill",
                name,
                *settings,
                "train.steps=100",
                "train.batch_size=9",
                "eval.every_steps=0",
            )
        )
        == 0
    )
    first, last = lines(place, name)[0], lines(place, name)[-1]
    assert first["eval/loss"] > 2
    assert last["eval/loss"] < 0.1
    assert last["train/loss"] < 0.05


REFUSED = {
    "an unknown key": (
        ["train.steps_=3"],
        "error: train.steps_: 3 is not allowed; unknown key, did you mean 'train.steps'?",
    ),
    "a missing file": (
        ["data.train=nowhere.jsonl"],
        "error: data.train: 'nowhere.jsonl' is not allowed; there is no such file",
    ),
    "a malformed row": (["data.train={place}/bad.jsonl"], "error: {place}/bad.jsonl:2: not JSON"),
    "no model": (
        ["model.path=/nowhere"],
        "error: model.path: '/nowhere' is not allowed; no such folder",
    ),
    "a warm-up without end": (
        ["train.warmup_steps=12"],
        "error: train.warmup_steps: 12 is not allowed; below train.steps, which is 12",
    ),
    "too long a row": (
        ["data.max_tokens=5000"],
        "error: data.max_tokens: 5000 is not allowed; at most 4096, which the model takes",
    ),
    "nothing to train on": (
        ["data.eval_share=0.99"],
        "error: data.eval_share: 0.99 is not allowed; a smaller share",
    ),
    "an unknown backend": (
        ["train.backend=jax"],
        "error: train.backend: 'jax' is not allowed; known: ",
    ),
}


def refused(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(arguments) == 2
    errors = [text for text in capsys.readouterr().err.splitlines() if not text[:1].isdigit()]
    assert len(errors) == 1
    assert errors[0].startswith(line)


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_one_line(place: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "bad.jsonl").write_text('{"prompt": "p", "response": "r"}\n{"prompt": \n')
    overrides, line = REFUSED[what]
    refused(
        words(place, "sft", "refused", *(one.format(place=place) for one in overrides)),
        line.format(place=place),
        capsys,
    )


def test_a_full_disk_is_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MetricsFile, "write", refuse)
    line = f"error: {place / 'runs' / 'full' / 'metrics.jsonl'}: step 0 cannot be written: No space left on device"
    refused(words(place, "sft", "full"), line, capsys)


def test_a_teacher_must_speak_the_same_tokens(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = place / "corpus.txt"
    corpus.write_text("other words " * 50)
    build_tiny(
        place / "other",
        SIZES.model_copy(update={"vocab": "bpe", "vocab_size": 300, "corpus": str(corpus)}),
    )
    line = f"error: distill.teacher: '{place / 'other'}' is not allowed; its vocabulary must be the student's: token '"
    refused(words(place, "distill", "refused", f"distill.teacher={place / 'other'}"), line, capsys)
    refused(
        words(place, "distill", "refused", "distill.teacher=/nowhere"),
        "error: distill.teacher: '/nowhere' is not allowed; no such",
        capsys,
    )
    refused(
        words(place, "distill", "refused", "distill.served=true"),
        "error: distill.top_k: 0 is not allowed; at least 1",
        capsys,
    )


def test_two_processes_never_train_one_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = place / "runs" / "shared"
    folder.mkdir(parents=True)
    line = f"error: run.name: another process trains run shared in {folder}; wait for its end, or choose another run.name"
    with lock(folder / "lock", "free"):
        refused(words(place, "dpo", "shared", "train.steps=3"), line, capsys)
        refused(words(place, "sft", "shared", "train.steps=3"), line, capsys)
    assert [file.name for file in folder.iterdir()] == ["lock"]


def test_a_run_goes_on_only_as_it_began(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words(place, "dpo", "began", "train.steps=3")) == 0
    refused(
        words(place, "dpo", "began", "train.lr=1e-3"),
        "error: train.lr: differs from what run began was started with (see ",
        capsys,
    )
    assert cli.main(words(place, "dpo", "began", "train.steps=4")) == 0
    assert [line["step"] for line in lines(place, "began")] == [0, 1, 2, 3, 4]
    refused(
        words(place, "dpo", "began", "train.steps=3"),
        "error: train.steps: 3 is not allowed; the run has made 4 steps already",
        capsys,
    )
    with (place / "dpo.jsonl").open("a") as file:
        file.write("\n")
    refused(
        words(place, "dpo", "began", "train.steps=5"),
        "error: data.train or data.eval changed since run began was started",
        capsys,
    )
