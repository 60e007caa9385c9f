"""Adapters on every kind of model: merged as peft computes, written for peft and transformers,
parts kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from part_models import SETTINGS, WITH_VISION, save_parts
from safetensors.torch import load_file
from torch import Tensor
from torch_backend_kit import backend, samples
from transformers import AutoConfig, AutoModelForCausalLM

from learner.backends.torch import TorchBackend
from learner.checkpoints import checkpoint
from learner.checkpoints.export import export_model
from learner.config import TrainSection
from rlearner_text.config import ModelSection

peft = pytest.importorskip("peft", reason="LoRA needs the extra rlearner[lora]")

EVERY = sorted(SETTINGS | WITH_VISION)
IDS = torch.arange(3, 23)
LORA = {"rank": 4, "alpha": 12}


def start(
    path: str, *, lora: bool, first: str | None = None, dtype: str = "float32", **more: Any
) -> TorchBackend:
    settings = {"lr": 1e-2, "device": "cpu", "micro_batch_tokens": 64, "packing": "padded", **more}
    train = TrainSection.model_validate(settings | ({"lora": LORA} if lora else {}))
    return backend(path, train=train, ref_path=first, model=ModelSection(dtype=dtype))


def trained(path: str, **more: Any) -> TorchBackend:
    trainer = start(path, **more)
    before = trainer.logprobs(IDS.numpy())
    trainer.update(samples(1))
    trainer.update(samples(2))
    assert (trainer.logprobs(IDS.numpy()) - before).abs().max() > 1e-3
    return trainer


def stored_in(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@torch.no_grad()
def plain_logprobs(model: Any) -> Tensor:
    logits = model.eval()(input_ids=IDS[None, :-1]).logits[0].float()
    return logits.log_softmax(-1).gather(-1, IDS[1:, None])[:, 0]


def loaded(folder: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("name", EVERY)
def test_adapters_are_merged_and_read_by_peft(name: str, tmp_path: Path) -> None:
    path = save_parts(name, tmp_path / "model")
    trainer = trained(path, lora=True)
    expected = trainer.logprobs(IDS.numpy())
    written = checkpoint.write_checkpoint(tmp_path / "steps", trainer, {"version": 1}, 1)
    merged = plain_logprobs(loaded(written))
    torch.testing.assert_close(merged, expected, rtol=0, atol=2e-5)
    adapted = peft.PeftModel.from_pretrained(loaded(path), written / "adapter")
    torch.testing.assert_close(plain_logprobs(adapted), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        plain_logprobs(adapted.merge_and_unload()), merged, rtol=0, atol=2e-5
    )
    assert {n: t.shape for n, t in stored_in(written).items()} == {
        n: t.shape for n, t in stored_in(tmp_path / "model").items()
    }
    resumed = start(str(written), lora=True, first=path)
    checkpoint.load_state(checkpoint.read_checkpoint(written), resumed)
    assert torch.equal(resumed.logprobs(IDS.numpy()), expected)


@pytest.mark.parametrize("name", EVERY)
def test_checkpoints_have_the_names_of_the_original_files(name: str, tmp_path: Path) -> None:
    path = save_parts(name, tmp_path / "model")
    trainer = trained(path, lora=False)
    expected = trainer.logprobs(IDS.numpy())
    small = checkpoint.write_checkpoint(tmp_path / "small", trainer, {"version": 1}, 1)
    large = checkpoint.write_checkpoint(
        tmp_path / "large", trainer, {"version": 1}, 1, hf_max_gib=0
    )
    export_model(checkpoint.read_checkpoint(large), tmp_path / "out", 20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    original = {n: t.shape for n, t in stored_in(tmp_path / "model").items()}
    for folder in (small, tmp_path / "out"):
        assert {n: t.shape for n, t in stored_in(folder).items()} == original
        torch.testing.assert_close(plain_logprobs(loaded(folder)), expected, rtol=0, atol=1e-6)
    resumed = start(str(large), lora=False, first=path)
    checkpoint.load_state(checkpoint.read_checkpoint(large), resumed)
    assert torch.equal(resumed.logprobs(IDS.numpy()), expected)
    again = checkpoint.write_checkpoint(tmp_path / "again", resumed, {"version": 1}, 1)
    assert {n: t.shape for n, t in stored_in(again).items()} == original


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", sorted(WITH_VISION))
def test_towers_are_kept_byte_for_byte(name: str, lora: bool, tmp_path: Path) -> None:
    path = save_parts(name, tmp_path / "model", dtype=torch.bfloat16)
    (tmp_path / "model" / "preprocessor_config.json").write_text('{"kept": true}')
    trainer = trained(path, lora=lora, weight_decay=0.1)
    written = checkpoint.write_checkpoint(tmp_path / "steps", trainer, {"version": 1}, 1)
    before, after = stored_in(tmp_path / "model"), stored_in(written)
    towers = [key for key in before if "vision" in key or "visual" in key or "projector" in key]
    assert len(towers) > 10
    for key in towers:
        assert after[key].dtype == torch.bfloat16
        assert torch.equal(after[key].view(torch.int16), before[key].view(torch.int16)), key
    trained_names = [key for key in before if key.endswith("mlp.down_proj.weight")]
    assert all(after[key].dtype == torch.float32 for key in trained_names)
    assert not any(torch.equal(after[key], before[key].float()) for key in trained_names)
    config = json.loads((written / "config.json").read_text())
    assert config["model_type"] == name
    assert config["dtype"] == "float32"
    assert AutoConfig.from_pretrained(written).vision_config.hidden_size == 16
    assert (written / "preprocessor_config.json").read_text() == '{"kept": true}'


def test_further_tensors_of_the_files_are_kept(tmp_path: Path) -> None:
    """As layers that predict further tokens, which transformers does not load."""
    from safetensors.torch import save_file

    path = save_parts("qwen3_moe", tmp_path / "model")
    held, extra = stored_in(tmp_path / "model"), torch.randn(3, 5).to(torch.bfloat16)
    save_file(
        held | {"mtp.layers.0.weight": extra},
        tmp_path / "model" / "model.safetensors",
        {"format": "pt"},
    )
    for lora in (False, True):
        written = checkpoint.write_checkpoint(
            tmp_path / f"steps-{lora}", trained(path, lora=lora), {"version": 1}, 1
        )
        assert stored_in(written).keys() == held.keys() | {"mtp.layers.0.weight"}
        assert torch.equal(stored_in(written)["mtp.layers.0.weight"], extra)
    large = checkpoint.write_checkpoint(
        tmp_path / "large", trained(path, lora=False), {"version": 1}, 1, hf_max_gib=0
    )
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(Exception, match=r"lacks 1 tensors of it.*the first is mtp.layers.0.weight"):
        export_model(checkpoint.read_checkpoint(large), tmp_path / "out", 1 << 30)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_gradient_checkpointing_with_stacked_experts(name: str, tmp_path: Path) -> None:
    path = save_parts(name, tmp_path / "model")
    plain, checkpointed = (
        start(path, lora=True),
        start(path, lora=True, gradient_checkpointing=True),
    )
    for step in range(2):
        one, other = plain.update(samples(step)), checkpointed.update(samples(step))
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-4)
    torch.testing.assert_close(
        plain.logprobs(IDS.numpy()), checkpointed.logprobs(IDS.numpy()), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_bfloat16_experts(name: str, tmp_path: Path) -> None:
    path = save_parts(name, tmp_path / "model", dtype=torch.bfloat16)
    trainer = trained(path, lora=True, dtype="bfloat16")
    written = checkpoint.write_checkpoint(tmp_path / "steps", trainer, {"version": 1}, 1)
    merged = AutoModelForCausalLM.from_pretrained(written, dtype=torch.bfloat16)
    differences = (plain_logprobs(merged) - trainer.logprobs(IDS.numpy())).abs()
    assert differences.median() < 0.02
    assert differences.max() < 0.25  # where rounding changes which experts a token takes
    factors = load_file(written / "adapter" / "adapter_model.safetensors")
    assert {factor.dtype for factor in factors.values()} == {torch.float32}
