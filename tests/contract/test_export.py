"""``rlearner export``: what transformers loads from a sharded checkpoint, and how little of it is
ever in memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from backend_kit import kit, make, run
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.checkpoints import checkpoint
from learner.config import LoraSection
from rlearner import cli

GIB_PER_SHARD = 2e-5  # of a model of 16,320 weights: several shards


def checkpoint_in_run(folder: Path, backend: Any, step: int) -> Path:
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run" / "config.yaml").write_text(
        yaml.safe_dump({"run": {"name": "run", "dir": str(folder)}})
    )
    return checkpoint.write_checkpoint(
        folder / "run" / "checkpoints", backend, {"version": step}, 1, hf_max_gib=0
    )


def export(folder: Path, *options: str) -> int:
    return cli.main(
        ["export", "run", "--dir", str(folder), "--max-shard-gib", str(GIB_PER_SHARD), *options]
    )


@pytest.mark.parametrize("adapters", [False, True])
def test_transformers_loads_the_shards(tmp_path: Path, adapters: bool) -> None:
    if adapters:
        pytest.importorskip("peft", reason="LoRA needs the extra rlearner[lora]")
    path = kit.save_model(tmp_path / "first")
    backend = make("torch", path, lora=LoraSection(rank=2) if adapters else None)
    run(backend, range(1))
    expected = {name: tensor.clone() for name, tensor in backend.weights().items()}
    written = checkpoint_in_run(tmp_path, backend, 1)
    assert not list(written.glob("*.safetensors"))
    run(backend, range(1, 2))
    checkpoint_in_run(tmp_path, backend, 2)
    out = tmp_path / "out"
    assert export(tmp_path, "--step", "1", "--out", str(out)) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(file.name for file in out.glob("model-*.safetensors"))
    assert shards == sorted(set(index["weight_map"].values()))
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert len(shards) > 2
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert (out / "tokenizer.json").read_text() == (Path(path) / "tokenizer.json").read_text()
    assert not (out / "learner").exists()
    assert (out / "adapter" / "adapter_model.safetensors").exists() == adapters
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_newest_goes_into_the_runs_folder_and_wrong_input_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = make("torch", kit.save_model(tmp_path / "first"))
    for step in (1, 2):
        checkpoint_in_run(tmp_path, backend, step)
    assert cli.main(["export", str(tmp_path / "run")]) == 0
    out = tmp_path / "run" / "exported" / "step-000002"
    assert capsys.readouterr().out == f"{out}: step 2, model.safetensors\n"
    assert export(tmp_path, "--out", str(tmp_path / "plain"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["step"], found["folder"]) == ("run", 2, str(tmp_path / "plain"))
    assert (
        found["files"]
        == sorted(file.name for file in (tmp_path / "plain").glob("*.safetensors"))
        != []
    )
    assert export(tmp_path) == 2
    assert f"--out {out}: exists already" in capsys.readouterr().err
    assert export(tmp_path, "--step", "3") == 2
    said = "--step 3: no such checkpoint is kept; there is step-000001, step-000002"
    assert said in capsys.readouterr().err
    part = (
        tmp_path
        / "run"
        / "checkpoints"
        / "step-000001"
        / "learner"
        / "part-00001-of-00001.safetensors"
    )
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    assert export(tmp_path, "--step", "1", "--out", str(tmp_path / "other")) == 2
    assert f"{part} is damaged" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


MEASURED = """
    import sys
    from pathlib import Path

    import torch

    from bench.support.node_memory import MemoryPeak
    from learner.backends.parts.hugging_face import write_model
    from learner.backends.parts.stored_model import StoredModel
    from learner.backends.parts.slices import Slice
    from learner.backends.parts.writing import write_part

    def written(folder, rows):
        folder.mkdir()
        halves = [torch.full((rows * 512,), float(half)) for half in (1, 2)]
        shape = (2 * rows, 512)
        for half, tensor in enumerate(halves):
            write_part(folder / f"{half}.safetensors", [Slice("model.a", shape, half * rows * 512, tensor)])
        return StoredModel({"a": ("F32", list(shape))}, same_names=True), sorted(folder.glob("*.safetensors"))

    place = Path(sys.argv[1])
    for name, rows in (("small", 8), ("large", 32768)):  # the first brings what is only needed once
        model, parts = written(place / f"{name}-parts", rows)
        (place / name).mkdir()
        with MemoryPeak() as peak:
            write_model(model, parts, place / name)
            print(peak.growth())
"""


@pytest.mark.timeout(120)
def test_128_mib_are_exported_with_a_few(tmp_path: Path) -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, "-c", textwrap.dedent(MEASURED), str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    assert int(done.stdout.splitlines()[-1]) < 20 << 20
    file = tmp_path / "large" / "model.safetensors"
    assert file.stat().st_size > 128 << 20
    found = load_file(file)["a"]
    assert found.shape == (65536, 512)
    assert [float(found[0, 0]), float(found[32767, 511]), float(found[32768, 0])] == [1.0, 1.0, 2.0]
