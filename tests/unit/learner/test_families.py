"""Families of models: the learner's logprobs and gradients are those of transformers, one sequence
at a time.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from family_models import FAMILIES, VOCAB, family_config, save_family

from broker.errors import ConfigError
from learner.algorithm.samples import TrainSample
from learner.backends.models import attention, attention_trial, mixers
from learner.backends.models.attention import (
    AttentionPattern,
    InexactAttentionError,
    SequenceAttention,
)
from learner.backends.models.batch import collate_samples
from learner.backends.models.policy import PolicyModel, load_model
from learner.backends.models.support import training_problem
from rlearner_text.config import ModelSection

CPU = torch.device("cpu")
# beyond every window, chunk and set of rotary factors of FAMILIES, as are the longest rows
CONTEXT = 80
PADDED = {"llama4"}  # its attention scales with a token's index in the row
GRADIENTS = [
    "mistral",
    "gemma2",
    "gemma3n",
    "gpt_oss",
    "qwen3_5",
    "lfm2",
    "falcon_h1",
    "phi4_longrope",
    "deepseek_v3",
]


def make_rows() -> list[TrainSample]:
    """Return rows shorter and longer than every switch of a model, three of them with one prompt."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(2, VOCAB, 11).astype(np.int32)
    rows = [rng.integers(2, VOCAB, length).astype(np.int32) for length in (3, 12, 41, 40, 70)]
    rows += [
        np.append(prompt, row[:length]).astype(np.int32)
        for row, length in zip(rows[2:], (3, 19, 20), strict=True)
    ]
    return [make_sample(ids) for ids in rows]


def make_sample(ids: np.ndarray) -> TrainSample:
    mask = np.ones(len(ids), np.uint8)
    mask[0] = 0
    zeros = np.zeros(len(ids), np.float32)
    versions = np.where(mask, 0, -1).astype(np.int32)
    return TrainSample(ids, mask, zeros, versions, mask.astype(np.float32), group=1, reward=0.0)


ROWS = make_rows()
WEIGHTS = torch.linspace(-1, 1, sum(row.num_tokens for row in ROWS))


def plain_logprobs(path: str, dtype: str = "float32") -> tuple[torch.Tensor, torch.nn.Module]:
    """Return the logprobs of transformers' own code, a sequence at a time, and its model."""
    model = load_model(path, ModelSection(dtype=dtype), CPU, CONTEXT)
    model.set_attn_implementation("eager")
    found = []
    for row in ROWS:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        found.append(logits.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    return torch.cat(found), model


def policy(path: str, *, packing: bool = True, dtype: str = "float32") -> PolicyModel:
    return PolicyModel(path, ModelSection(dtype=dtype), CPU, packing=packing, max_context=CONTEXT)


def scores(model: PolicyModel) -> torch.Tensor:
    return model.score(collate_samples(ROWS, CPU, packed=not model.unpackable))[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_are_those_of_single_sequences(tmp_path, name):
    path = save_family(tmp_path, name)
    with torch.no_grad():
        expected, _ = plain_logprobs(path)
        for packing in (False, True):
            model = policy(path, packing=packing)
            assert model.module.config._attn_implementation == attention.NAME
            assert bool(model.unpackable) == (not packing or name in PADDED)
            torch.testing.assert_close(scores(model), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_single_sequences(tmp_path, name):
    path = save_family(tmp_path, name)
    logprobs, plain = plain_logprobs(path)
    (logprobs @ WEIGHTS).backward()
    expected = {
        key: parameter.grad
        for key, parameter in plain.named_parameters()
        if parameter.grad is not None
    }
    for packing, repeated in ((False, False), (True, False), (True, True)):
        model = policy(path, packing=packing)
        if repeated:
            model.checkpoint_blocks()
        (scores(model) @ WEIGHTS).backward()
        gradients = {
            key: value.grad
            for key, value in model.module.named_parameters()
            if value.grad is not None
        }
        assert gradients.keys() == expected.keys()
        for key, gradient in gradients.items():
            error = float((gradient - expected[key]).norm() / (expected[key].norm() + 1e-3))
            assert error < 1e-4, (key, error)


@pytest.mark.parametrize(
    "name", ["qwen3", "gemma2", "gpt_oss", "qwen3_5", "falcon_h1", "qwen3_moe", "lfm2"]
)
def test_bfloat16_is_as_near_as_rounding_allows(tmp_path, name):
    path = save_family(tmp_path, name)
    with torch.no_grad():
        exact, _ = plain_logprobs(path)
        rounded, _ = plain_logprobs(path, "bfloat16")
        model = policy(path, dtype="bfloat16")
        assert not model.unpackable
        assert (scores(model) - exact).norm() < 2 * (rounded - exact).norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "falcon_h1"])
def test_states_that_leak_between_sequences_are_seen(tmp_path, monkeypatch, name, dtype):
    monkeypatch.setattr(attention_trial, "separate_sequences", lambda _: lambda: None)
    path = save_family(tmp_path, name)
    model = policy(path, dtype=dtype)
    assert "states differ by" in model.unpackable
    if dtype == "float32":
        with torch.no_grad():
            torch.testing.assert_close(scores(model), plain_logprobs(path)[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mistral", "llama4", "gpt_oss"])
def test_windows_that_are_ignored_are_seen(tmp_path, monkeypatch, name, dtype):
    monkeypatch.setattr(AttentionPattern, "mask", lambda _, low, start, stop: torch.ones(
        stop - start, stop - low, dtype=torch.bool).tril(start - low))  # fmt: skip
    original = AttentionPattern.__init__
    monkeypatch.setattr(
        AttentionPattern, "__init__", lambda self, f, _, d: original(self, f, 10**6, d)
    )
    model = policy(save_family(tmp_path, name), dtype=dtype)
    assert model.unpackable
    assert model.module.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["deepseek_v3", "minimax_m2", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_routers_in_bfloat16_do_not_hide_packed_rows(tmp_path, name, seed):
    assert not policy(save_family(tmp_path, name, seed=seed), dtype="bfloat16").unpackable


def test_a_few_tokens_with_another_expert_are_no_leak(tmp_path):
    module = load_model(save_family(tmp_path, "mistral"), ModelSection(), CPU)
    module.set_attn_implementation("eager")
    with torch.no_grad():
        trial = attention_trial.AttentionTrial(module.base_model, CPU)
        states = trial.read_padded()
    some, most = ([state.clone() for state in states] for _ in range(2))
    for few, many in zip(some, most, strict=True):
        few[: (len(few) - 1) // 2] *= 2
        many[len(many) // 3 :] *= 1.5
    assert trial.refuse(lambda: some) == ""
    assert trial.refuse(lambda: most).startswith("states differ by 0.5 of their size")


def test_windows_longer_than_the_trial_are_crossed_in_it(tmp_path, monkeypatch):
    config = family_config("mistral")
    config.sliding_window = 4096
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(tmp_path)
    sizes = []
    original = AttentionPattern.__init__
    monkeypatch.setattr(
        AttentionPattern,
        "__init__",
        lambda self, f, size, d: (sizes.append(size), original(self, f, size, d))[1],
    )
    trained = policy(str(tmp_path))
    assert not trained.unpackable
    assert sizes[0] == 5
    assert trained.module.config.sliding_window == 4096


def test_a_model_that_amplifies_rounding_errors_is_not_refused(tmp_path):
    config = family_config("llama")
    config.num_hidden_layers = 8
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 2.0)
    model.save_pretrained(tmp_path)
    module = load_model(str(tmp_path), ModelSection(), CPU)
    module.set_attn_implementation("eager")
    with torch.no_grad():
        noise = attention_trial.AttentionTrial(module.base_model, CPU).noise
    assert noise > attention_trial._MIN_NOISE
    assert not policy(str(tmp_path)).unpackable


def test_a_model_that_sees_later_tokens_is_refused(tmp_path):
    save_bert(tmp_path, is_decoder=False)
    with pytest.raises(
        ConfigError,
        match=r"model.path: .* bert without is_decoder sees later tokens: it is no causal",
    ):
        policy(str(tmp_path))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"model.path: .* BertLMHeadModel cannot be trained: states differ by"
    ):
        attention_trial.choose_attention(model.eval(), CPU, "a/bert", packed=True)


def save_bert(folder, *, is_decoder):
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
    config = transformers.BertConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, is_decoder=is_decoder
    )
    torch.manual_seed(0)
    model = transformers.BertLMHeadModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "bert"}, "bert without is_decoder sees later tokens"),
        ({"model_type": "bert", "is_decoder": True}, ""),
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 has an encoder"),
        ({"model_type": "vit"}, "transformers has no causal language model of type 'vit'"),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "code.Own"}}, ""),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}},
            "its weights are quantised (fp8)",
        ),
    ],
)
def test_what_a_configuration_shows(config, problem):
    found = training_problem(config)
    assert found.startswith(problem) if problem else not found


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_is_refused_by_its_configuration(name):
    assert training_problem(family_config(name).to_dict()) == ""


@pytest.mark.parametrize("name", ["indices", "position_bias", "anything_new"])
def test_an_argument_that_attention_does_not_know_is_an_error(name):
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(InexactAttentionError, match=f"its attention has {name}"):
        attention.compute_attention(
            torch.nn.Module(), states, states, states, None, **{name: torch.zeros(1)}
        )


@pytest.mark.parametrize("step", [1, 7, 512])
@pytest.mark.parametrize("size", [None, 1, 5, 30])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_in_blocks_equals_the_formula(monkeypatch, step, size, softcap, has_sinks):
    monkeypatch.setattr(attention, "_MAX_QUERIES", step)
    torch.manual_seed(0)
    rows, heads, kv_heads, length, width = 2, 4, 2, 23, 8
    query, key, value = (torch.randn(rows, n, length, width) for n in (heads, kv_heads, kv_heads))
    sinks = torch.randn(heads) if has_sinks else None
    places = torch.arange(length)
    distance = places[:, None] - places[None]
    seen = (distance >= 0) & (distance < (size or length))
    scores = (query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.5).masked_fill(
        ~seen, -torch.inf
    )
    if softcap:
        scores = torch.where(seen, softcap * torch.tanh(scores / softcap), -torch.inf)
    totals = scores.exp().sum(-1, keepdim=True)
    if sinks is not None:
        totals = totals + sinks.exp()[None, :, None, None]
    expected = scores.exp() / totals @ value.repeat_interleave(2, 1)
    window = None
    if size is not None:
        window = AttentionPattern(lambda row, head, q, k: (k <= q) & (k > q - size), size, CPU)
    form = SequenceAttention(0.5, window, softcap, sinks)
    torch.testing.assert_close(form(query, key, value), expected, rtol=0, atol=1e-5)


def test_mixers_keep_their_own_forward_pass_without_packing(tmp_path):
    model = load_model(save_family(tmp_path, "lfm2"), ModelSection(), CPU)
    layer = next(module for module in model.modules() if type(module).__name__ == "Lfm2ShortConv")
    undo = mixers.separate_sequences(model)
    assert "forward" in vars(layer)
    undo()
    assert layer.forward.__func__ is type(layer).forward
