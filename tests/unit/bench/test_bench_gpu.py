"""bench/gpu without a GPU: its formulas, the model that it makes, what it says here; and one script
on a CPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from bench.gpu import checks, common, engine, ipc, learner, load, run, update, weights
from broker.errors import UserError
from broker.settings import runspec
from rlearner_text.tokenizer import Tokenizer

SMALL = common.ModelShape(
    hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=32, positions=64
)


def test_parameters_by_hand_and_by_the_model() -> None:
    # a block: q and o 2 x 8 x 8, k and v 2 x 8 x 4, norms of q and k 2 x 4, mlp 3 x 8 x 16, two
    # norms of 8; then the last norm
    assert common.num_parameters(SMALL) == (2 * (128 + 64 + 8 + 384 + 16) + 8, 256)
    assert sum(common.num_parameters(common.HALF_BILLION)) == 596_049_920  # Qwen3-0.6B's own count
    tensors = weights.tensors_of(SMALL, "meta")
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(common.num_parameters(SMALL))


def test_mfu_by_hand() -> None:
    # 6 x (1208 + 256) + 12 x 2 layers x 2 heads x 4 wide x 10 tokens = 8784 + 1920
    assert common.train_flops_per_token(SMALL, 10) == 10704
    assert common.train_flops_per_token(SMALL, 10, causal=True) == 8784 + 960
    assert common.mfu(tokens_per_s=1e6, flops_per_token=3e9, peak_flops=1e16) == pytest.approx(0.3)
    assert common.mfu(1e6, 3e9, None) is None
    # PaLM's example of 540 billion is not ours to repeat; Qwen3-0.6B at 2048 tokens: 6 x 596 M + 12
    # x 28 x 2048 x 2048
    assert (
        common.train_flops_per_token(common.HALF_BILLION, 2048)
        == 6 * 596_049_920 + 12 * 28 * 2048 * 2048
    )


@pytest.mark.parametrize(
    ("name", "flops"),
    [("NVIDIA H200", 989e12), ("NVIDIA H20", 148e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
     ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A10G", 70e12), ("NVIDIA L40S", 362e12), ("cpu", None)],
)  # fmt: skip
def test_the_peak_of_a_device_by_its_name(name: str, flops: float | None) -> None:
    assert common.peak_flops(name) == flops


def test_the_model_that_is_made(tmp_path: Path) -> None:
    path = common.make_model(tmp_path, SMALL, dtype="float32")
    tensors = load_file(f"{path}/model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(common.num_parameters(SMALL))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert (
        model.config.vocab_size,
        model.config.tie_word_embeddings,
        model.config.max_position_embeddings,
    ) == (
        32,
        True,
        64,
    )
    assert Tokenizer.load(path).encode("<|im_end|>") == [2]


@pytest.mark.parametrize("script", [checks, engine, ipc, learner, run, update, weights])
def test_without_a_gpu_each_says_so_in_one_line(
    script: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.gpu.common.existing", list)
    assert script.main([]) == 2  # type: ignore[attr-defined]
    said = capsys.readouterr()
    assert (said.out, said.err) == (
        "",
        "error: this machine has no NVIDIA GPU; --device cpu --tiny shows that the script runs\n",
    )


def test_figures_of_a_cpu_are_none_of_a_gpu() -> None:
    with pytest.raises(UserError, match="--device cpu is for --tiny"):
        common.begin(argparse.Namespace(device="cpu", tiny=False))


def test_a_check_that_fails_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert common.finish("x", "cpu", SMALL, {"a": 1}, {"good": True}) == 0
    assert common.finish("x", "cpu", SMALL, {"a": 1}, {"good": True, "bad": False}) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["a"], last["failed"], last["model"]["parameters"]) == (1, ["bad"], 1464)


def test_requests_are_the_same_for_the_same_seed() -> None:
    one, other = (
        load.make_requests(5, 100, prompt=(4, 9), output=(2, 3), temperature=1.0, name=name)
        for name in ("a", "b")
    )
    assert [r.token_ids for r in one] == [r.token_ids for r in other]
    assert [r.sampling for r in one] == [r.sampling for r in other]
    assert {r.request_id for r in one}.isdisjoint(r.request_id for r in other)
    assert all(4 <= r.token_ids.array().size <= 9 and 2 <= r.sampling.max_tokens <= 3 for r in one)


def test_identical_tokens_count_up_to_the_first_difference() -> None:
    assert engine._share([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]]) == 1.0
    assert engine._share([[1, 2, 3], [4, 5]], [[1, 9, 3], [4, 5]]) == 3 / 5


@pytest.mark.parametrize("tiny", [True, False])
def test_the_run_is_one_that_can_be_started(tiny: bool) -> None:
    options = argparse.Namespace(
        device="cpu",
        tiny=tiny,
        engine="hf",
        engine_args={},
        steps=None,
        weights=None,
        overrides=["train.steps=7"],
    )
    config = runspec.validate(
        runspec.load("configs/quickstart.yaml", run.settings(options, "/tmp"))
    )
    assert (config["train"]["steps"], config["model"]["tiny"]["num_layers"]) == (
        7,
        run.shape_of(options).layers,
    )
    blocks, embedding = common.num_parameters(run.shape_of(options))
    assert (0.44e9 < blocks + embedding < 0.45e9) != tiny


def test_a_run_whose_weights_go_by_cuda_ipc_is_asked_for() -> None:
    options = argparse.Namespace(
        device="cuda",
        tiny=False,
        engine="hf",
        engine_args={},
        steps=None,
        weights="ipc",
        overrides=[],
    )
    config = runspec.validate(
        runspec.load("configs/quickstart.yaml", run.settings(options, "/tmp"))
    )
    assert config["train"]["weights_backend"] == "ipc"


def test_the_ipc_script_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert ipc.main(["--device", "cpu", "--tiny", "--repeats", "1"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["size_bytes"], last["failed"]) == (230_272, [])
    assert set(last["checks"].values()) == {True}
    assert len(last["checks"]) == 6
    assert last["ratio_to_local"] > 0


def test_the_learner_script_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--tiny", "--tokens", "128", "--lengths", "64,32", "--repeats", "1"]
    assert learner.main(words) == 0
    first, second, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (last["tokens_per_step"], last["tokens_per_step_32"], last["mfu"], last["failed"]) == (
        126,
        124,
        None,
        [],
    )
    assert last["tokens_per_s"] > 0
    assert "tokens_per_step_32" not in first
    # each length's figures are there as soon as they are measured
    assert second.items() <= last.items()


def test_the_checks_script_on_a_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checks.main(["--device", "cpu", "--tiny", "--only", "gradient_p"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["held"], last["checks"]) == (1, {"gradient_plain": True})
    norms = iter([1.0, 1.01])  # on the CPU, on the device
    monkeypatch.setattr(checks, "gradient_norm", lambda *_: next(norms))
    assert checks.main(["--device", "cpu", "--tiny", "--only", "gradient_p"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"] == ["gradient_plain"]
    monkeypatch.setattr(checks, "_same_fp8", lambda device: 1 / 0)
    assert checks.main(["--device", "cpu", "--tiny", "--only", "fp8"]) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["failed"], last["errors"]) == (
        ["fp8"],
        {"fp8": "ZeroDivisionError: division by zero"},
    )
