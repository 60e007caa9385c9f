"""What ``bench.peers`` compares is what it says: the model, its vocabulary, and our configuration
of each case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
import yaml

from bench.peers.workload import CASES, SAMPLES, config, make
from rlearner_text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("peers")
    make(made)
    return made


def test_the_model_has_an_end_token_in_51(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) == 653_312
    assert model.config.vocab_size == 51
    theirs = transformers.AutoTokenizer.from_pretrained(folder / "model")
    question = json.loads((folder / "prompts.jsonl").read_text().splitlines()[0])["question"]
    messages = [{"role": "user", "content": question}]
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == Tokenizer.load(folder / "model").encode(
        f"<|im_user|>{question}<|im_end|><|im_assistant|>"
    )
    assert len(ids) == len(question) + 3
    assert theirs.eos_token_id == model.config.eos_token_id == 2


@pytest.mark.parametrize("case", CASES[2:3], ids=lambda case: case.name)
def test_our_configuration_is_valid_and_takes_128_samples(folder: Path, case) -> None:
    settings = config(folder, case, 10)
    train, domain = settings["train"], settings["domains"]["letters"]
    assert train["groups_per_step"] * domain["group_size"] == SAMPLES == 128
    (folder / "case.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "rlearner.cli", "check", str(folder / "case.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_without_trl_it_names_the_make_target(tmp_path: Path) -> None:
    code = (
        "import bench.peers.__main__ as m, pathlib; m.PACKAGES = pathlib.Path('nowhere'); m.main()"
    )
    command, env = (
        [sys.executable, "-c", code, "--pairs", "1"],
        {**os.environ, "PYTHONPATH": os.getcwd()},
    )
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=env, cwd=tmp_path
    )
    assert done.returncode == 2
    assert "TRL is not installed; run make peers-env" in done.stderr
