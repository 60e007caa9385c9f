"""Checkpoints of Megatron's layouts: each rank writes what it holds, and any layout and any backend
reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_kit import kit, make, run
from checkpoint_kit import state_of, tensors_of
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from learner.backends.parts.part_file import DamagedFileError, part_name
from learner.backends.parts.stored import StoredTensors
from learner.backends.torch import TorchBackend
from learner.checkpoints import checkpoint
from learner.checkpoints.export import export_model
from rlearner_text.config import ModelSection

pytest.importorskip("megatron.core", reason="megatron is not installed: make test-megatron")
pytestmark = pytest.mark.timeout(600)
LOSSES = ("actor/pg_loss", "actor/entropy", "actor/grad_norm")
FOUR = {
    "tp2-dp2": {"tensor_parallel": 2},
    "tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
}
OTHERS = [("torch", 1), ("megatron", 1), ("megatron-tp2", 2), ("megatron-pp2", 2), ("fsdp2", 3)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kit.save_model(tmp_path_factory.mktemp("model"), kv_heads=2)


def four(layout: str, path: str, **more: Any) -> TorchBackend:
    made: TorchBackend = make("megatron", path, ranks=4, megatron=FOUR[layout], **more)
    return made


def losses(metrics: list[dict[str, float]]) -> list[list[float]]:
    return [[one[name] for name in LOSSES] for one in metrics]


def weights(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights().items()}


def agree(
    backend: TorchBackend, made: checkpoint.Checkpoint, expected: list[list[float]], what: str
) -> None:
    checkpoint.load_state(made, backend)
    np.testing.assert_allclose(
        losses(run(backend, range(2, 5))), expected, rtol=1e-5, atol=1e-5, err_msg=what
    )


@pytest.mark.parametrize("layout", FOUR)
def test_any_layout_and_any_backend_continues(path: str, tmp_path: Path, layout: str) -> None:
    first = four(layout, path)
    try:
        run(first, range(2))
        before = weights(first)
        written = checkpoint.write_checkpoint(tmp_path, first, {"version": 2}, 1, hf_max_gib=0)
        expected = losses(run(first, range(2, 5)))
        after = weights(first)
    finally:
        first.close()
    made = checkpoint.read_checkpoint(written)
    assert [Path(part.path).name for part in made.parts] == [
        part_name(rank, 4) for rank in range(4)
    ]
    assert not list(written.glob("*.safetensors"))

    again = four(layout, str(written))
    try:
        checkpoint.load_state(made, again)
        assert losses(run(again, range(2, 5))) == expected
        assert all(torch.equal(tensor, after[name]) for name, tensor in again.weights().items())
    finally:
        again.close()
    for reader, ranks in OTHERS:
        other = make(reader, str(written), ranks=ranks)
        try:
            agree(other, made, expected, f"{reader} on {ranks}")
        finally:
            other.close()

    export_model(made, tmp_path / "out", 20_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())


@pytest.mark.parametrize("layout", FOUR)
def test_torchs_checkpoint_continues(path: str, tmp_path: Path, layout: str) -> None:
    alone = make("torch", path)
    run(alone, range(2))
    made = checkpoint.read_checkpoint(
        checkpoint.write_checkpoint(tmp_path, alone, {"version": 2}, 1, hf_max_gib=0)
    )
    expected = losses(run(alone, range(2, 5)))
    backend = four(layout, str(made.path))
    try:
        checkpoint.load_state(made, backend)
        found, written = state_of(backend), tensors_of(made.parts)
        assert found.keys() == written.keys()
        assert all(torch.equal(tensor, written[name]) for name, tensor in found.items())
        agree(backend, made, expected, layout)
    finally:
        backend.close()


@pytest.mark.parametrize("layout", FOUR)
def test_each_rank_writes_what_it_holds_and_nothing_twice(
    path: str, tmp_path: Path, layout: str
) -> None:
    backend = four(layout, path)
    try:
        run(backend, range(1))
        parts = backend.snapshot().write(tmp_path)
    finally:
        backend.close()
    stored = StoredTensors(part.path for part in parts).below("optimizer.exp_avg.")
    held = [0] * len(parts)
    for entry in stored.entries.values():
        assert sum(piece.box.numel for piece in entry.pieces) == entry.numel
        for piece in entry.pieces:
            held[int(piece.file.name.split("-")[1]) - 1] += piece.box.numel
    assert max(held) <= 1.02 * sum(held) / 4
    down = stored.entries["model.layers.1.mlp.down_proj.weight"]
    # of 48 columns
    assert {(piece.box.left, piece.box.right) for piece in down.pieces} == {(0, 24), (24, 48)}


def test_a_damaged_part_is_named(path: str, tmp_path: Path) -> None:
    backend = four("tp2-pp2", path)
    try:
        made = checkpoint.read_checkpoint(
            checkpoint.write_checkpoint(tmp_path, backend, {"version": 0}, 1)
        )
        for part in made.parts:
            file = Path(part.path)
            data = file.read_bytes()
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            with pytest.raises(DamagedFileError, match=rf"^{file} is damaged: its digest"):
                checkpoint.load_state(made, backend)
            file.write_bytes(data)
        checkpoint.load_state(made, backend)
    finally:
        backend.close()


def test_training_does_not_change_what_is_being_written(path: str, tmp_path: Path) -> None:
    backend = four("tp2-pp2", path)
    try:
        run(backend, range(1))
        expected = tensors_of(backend.snapshot().write(tmp_path))
        snapshot = backend.snapshot()
        run(backend, range(1, 3))
        (tmp_path / "later").mkdir()
        found = tensors_of(snapshot.write(tmp_path / "later"))
    finally:
        backend.close()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_adapters_continue_in_another_backend_and_bit_for_bit(path: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="LoRA needs the extra rlearner[lora]")
    lora = {"rank": 4}
    first = four("tp2-pp2", path, lora=lora)
    try:
        run(first, range(2))
        made = checkpoint.read_checkpoint(
            checkpoint.write_checkpoint(tmp_path, first, {"version": 2}, 1, hf_max_gib=0)
        )
        expected = losses(run(first, range(2, 5)))
        after = weights(first)
    finally:
        first.close()
    again = four("tp2-pp2", str(made.path), lora=lora, ref_path=path)
    try:
        checkpoint.load_state(made, again)
        assert losses(run(again, range(2, 5))) == expected
        assert all(torch.equal(tensor, after[name]) for name, tensor in again.weights().items())
    finally:
        again.close()
    agree(make("torch", str(made.path), lora=lora, ref_path=path), made, expected, "torch")


@pytest.mark.parametrize("offload", [False, True])
def test_bfloat16_with_an_output_layer_of_its_own(tmp_path: Path, offload: bool) -> None:
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {"num_hidden_layers": 2, "vocab_size": kit.VOCAB, "max_position_embeddings": 128}
    config = LlamaConfig(**sizes, tie_word_embeddings=False, bos_token_id=None, eos_token_id=0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    named = {"model": ModelSection(dtype="bfloat16"), "optimizer_offload": offload}
    first = four("tp2-pp2", str(tmp_path / "model"), **named)
    try:
        run(first, range(2))
        made = checkpoint.read_checkpoint(
            checkpoint.write_checkpoint(tmp_path, first, {"version": 2}, 1, hf_max_gib=0)
        )
        expected = run(first, [2])
        after = weights(first)
    finally:
        first.close()
    assert tensors_of(made.parts)["optimizer.master.lm_head.weight"].dtype == torch.float32
    again = four("tp2-pp2", str(made.path), **named)
    try:
        checkpoint.load_state(made, again)
        assert run(again, [2]) == expected
        assert all(torch.equal(tensor, after[name]) for name, tensor in again.weights().items())
    finally:
        again.close()
