"""Engine hf runs families of models as plain transformers does, or refuses them with the reason."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import model_families as families
import pytest
import torch
import transformers
from hf_models import request

from broker.errors import UserError
from rlearner_text.rope import fix_rope
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig, GenerationOutput
from rollout.engines.hf import attention, forward_pass, recurrent
from rollout.engines.hf.engine_core import EngineCore
from rollout.engines.hf.support import unsupported_reason

CONTEXT = 128
CLOSE = 1e-4  # float32
LENGTHS = (5, families.WINDOW - 3, families.WINDOW + 9, families.ORIGINAL + 7)


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    families.make_model(name, dtype).save_pretrained(folder)
    return folder


def load_plain(folder: Path) -> Any:
    """Load as users do; only transformers' own attention computes soft caps and sinks."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    fix_rope(model, CONTEXT)
    return model.eval()


@contextmanager
def opened(folder: Path, dtype: str = "float32", **section: Any) -> Iterator[EngineCore]:
    settings = {"max_running": 4, "max_context_tokens": CONTEXT, "num_threads": 1, **section}
    core = EngineCore(
        EngineConfig(str(folder), RolloutSection(**settings), dtype, device="cpu", policy_version=0)
    )
    yield core
    core.model.close()


def drain(core: EngineCore) -> dict[str, GenerationOutput]:
    for _ in range(500):
        core.admit(0.0)
        if not core.can_step:
            break
        core.step()
    assert core.scheduler.num_running + core.scheduler.num_waiting == 0
    answers = dict(core.outbox)
    core.outbox.clear()
    return answers


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(2, families.VOCAB) for _ in range(length)]


@torch.no_grad()
def assert_logprobs(
    model: Any, context: list[int], tokens: list[int], logprobs: list[float]
) -> None:
    ids = torch.tensor([context + tokens])
    table = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    expected = table[len(context) - 1 : -1].gather(-1, ids[0, len(context) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_family_computes_as_transformers_does(name: str, tmp_path: Path) -> None:
    """Prompts of four lengths side by side, two with one prompt, three turns, and new weights in
    flight.
    """
    folder = save(name, tmp_path)
    model = load_plain(folder)
    contexts = {str(length): prompt(length) for length in LENGTHS} | {"shared": prompt(LENGTHS[2])}
    with opened(folder, prefill_tokens=19, max_running=5) as core:
        assert core.model.has_states == (name in families.RECURRENT)
        for turn in range(3):
            for key, context in contexts.items():
                fields = {
                    "conversation": key,
                    "seed": len(context) + (key == "shared"),
                    "max_tokens": 5,
                }
                core.submit(request(f"{key} {turn}", context, **fields), 0.0)
            hits = 0
            for request_id, output in drain(core).items():
                key = request_id.split()[0]
                assert_logprobs(model, contexts[key], list(output.token_ids), list(output.logprobs))
                hits += output.prefix_hit_tokens
                contexts[key] += [*output.token_ids, *prompt(4, seed=turn)]
            assert hits >= (sum(LENGTHS) if turn else LENGTHS[2] - 1)
        context = prompt(LENGTHS[2], seed=9)
        core.submit(request("flying", context, seed=1, max_tokens=8), 0.0)
        generated = core.stats().generated_tokens
        while core.stats().generated_tokens < generated + 3:
            core.admit(0.0)
            core.step()
        generator = torch.Generator().manual_seed(0)
        parameters = dict(core.model.model.named_parameters(remove_duplicate=False))
        tensors = {  # buffers are constants that fit each other (MiniMax)
            key: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
            if key in parameters
            else tensor
            for key, tensor in core.model.weights().items()
        }
        core.update(tensors, 1, "recompute", None)
        output = drain(core)["flying"]
    assert output.version_runs == [(0, 3), (1, 5)]
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    tokens = list(output.token_ids)
    assert_logprobs(model, context + tokens[:3], tokens[3:], list(output.logprobs[3:]))


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "falcon_h1"])
def test_states_of_older_weights_go_on_with_new_ones(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path)
    old, new, context = load_plain(folder), load_plain(folder), prompt(30)
    tensors = {key: tensor * 1.1 for key, tensor in new.named_parameters()}
    new.load_state_dict(tensors, strict=False)
    with opened(folder) as core:
        core.submit(request("x", context, seed=3, max_tokens=10, conversation="c"), 0.0)
        while core.stats().generated_tokens < 4:  # the last of them is not run yet
            core.admit(0.0)
            core.step()
        core.update(
            {key: tensor * 1.1 for key, tensor in core.model.weights().items()}, 1, "keep", None
        )
        output = drain(core)["x"]
        sampled = list(output.token_ids)
        cache = old(torch.tensor([context + sampled[:3]]), use_cache=True).past_key_values
        logits = new(torch.tensor([sampled[3:9]]), past_key_values=cache, use_cache=True).logits[0]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(sampled[4:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.logprobs[4:]), expected, atol=CLOSE, rtol=0)
        core.submit(request("y", context + sampled, conversation="c"), 0.0)
        assert drain(core)["y"].prefix_hit_tokens == 0


def test_state_is_only_reused_where_it_was_saved(tmp_path: Path) -> None:
    folder = save("lfm2", tmp_path)
    model, context = load_plain(folder), prompt(30)
    with opened(folder) as core:
        core.submit(request("1", context, conversation="c"), 0.0)
        drain(core)
        other = [*context[:20], *prompt(15, seed=3)]  # leaves what the slot holds in its middle
        core.submit(request("2", other, conversation="c", seed=1), 0.0)
        output = drain(core)["2"]
        assert output.prefix_hit_tokens == 0
        assert_logprobs(model, other, list(output.token_ids), list(output.logprobs))
        core.submit(request("3", context, seed=2, max_tokens=9), 0.0)
        for _ in range(4):
            core.admit(0.0)
            core.step()
        core.submit(request("late", context, seed=4), 0.0)  # the first one's state has gone on
        output = drain(core)["late"]
        assert output.prefix_hit_tokens == 0
        assert_logprobs(model, context, list(output.token_ids), list(output.logprobs))


@pytest.mark.parametrize("name", families.REFUSED)
def test_family_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    folder, why = save(name, tmp_path), families.REFUSED[name][1]
    with pytest.raises(UserError, match=rf"engine hf cannot run \w+: .*{why}"), opened(folder):
        pass
    config = transformers.AutoConfig.from_pretrained(folder)
    assert why in unsupported_reason(config)


def test_reason_follows_from_a_configuration_alone() -> None:
    for name, config in families.FAMILIES.items():
        assert unsupported_reason(config()) == "", name


# -------------------------------------------------------------------------------------------------
# the self-test


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mixtral", "deepseek_v3", "qwen3_next"])
def test_models_that_agree_are_accepted(name: str, dtype: str, tmp_path: Path) -> None:
    with opened(save(name, tmp_path, getattr(torch, dtype)), dtype):
        pass


@pytest.mark.parametrize("name", families.WINDOWED)
def test_ignored_window_is_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "mask_rule", lambda *_: None)
    with pytest.raises(UserError, match="logprobs differ by"), opened(save(name, tmp_path)):
        pass


@pytest.mark.parametrize("name", ["qwen2 window", "phi3", "gemma3", "llama4", "gpt_oss"])
def test_ignored_window_is_noticed_in_bfloat16(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "mask_rule", lambda *_: None)
    folder = save(name, tmp_path, torch.bfloat16)
    with pytest.raises(UserError, match="logprobs differ by"), opened(folder, "bfloat16"):
        pass


@pytest.mark.parametrize("fault", ["window", "neighbour", "state", "rope"])
def test_faults_are_noticed(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window too long by one, a slot read up to its neighbour's length, a forgotten state,
    changing frequencies.
    """
    name = {"window": "mistral", "neighbour": "llama", "state": "lfm2", "rope": "phi3 longrope"}[
        fault
    ]
    if fault == "window":
        visible = attention.MaskRule.visible

        def too_much(rule: Any, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            return visible(rule, query, keys) | (keys == query - families.WINDOW)

        monkeypatch.setattr(attention.MaskRule, "visible", too_much)
    elif fault == "neighbour":
        monkeypatch.setattr(forward_pass.ForwardPass, "mask", lambda *_: None)
    elif fault == "state":
        monkeypatch.setattr(recurrent.RecurrentStates, "_write", lambda *_: None)
    else:
        monkeypatch.setattr("rollout.engines.hf.model.fix_rope", lambda *_: ())
    with pytest.raises(UserError, match="logprobs differ by"), opened(save(name, tmp_path)):
        pass


def test_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = families.make_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    model.save_pretrained(tmp_path)
    where = r"not finite: model\.safetensors: model\.layers\.1\.mlp\.up_proj\.weight holds nan at \[3, 5\]"
    with pytest.raises(UserError, match=where), opened(tmp_path):
        pass
