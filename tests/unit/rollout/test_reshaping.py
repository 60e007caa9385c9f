"""Guides, penalties and biases: what is sampled keeps to them, and logprobs and flags are those of
what it was drawn from.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from template_models import make_tokenizer_folder

from broker.contract import wire
from rlearner_text.guided_decoding import GuideCompiler, GuideError
from rlearner_text.tokenizer import Tokenizer
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig, GenerationOutput
from rollout.engines.hf.engine_core import EngineCore
from rollout.engines.hf.logit_offsets import MOVED
from rollout.engines.hf.sampling import probability_moved
from rollout.engines.random import RandomEngine

POINT = {
    "type": "object", "required": ["x", "kind"], "additionalProperties": False,
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["red", "blue"]}},
}  # fmt: skip
GUIDE = wire.Guide(schema=json.dumps(POINT), before="<tool_call>\n", after="\n</tool_call>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that is far from uniform, with a byte-level tokenizer and more logits than that
    has tokens.
    """
    made = make_tokenizer_folder(tmp_path_factory.mktemp("reshaping"), "hermes")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    vocab = Tokenizer.load(made).vocab_size + 7
    config = transformers.Qwen3Config(
        **sizes, head_dim=16, vocab_size=vocab, bos_token_id=None, eos_token_id=2, pad_token_id=0,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(12)
    model.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def request(name: str, context: list[int], **sampling: Any) -> wire.GenerateRequest:
    return wire.GenerateRequest(
        request_id=name, conversation_id=name, token_ids=wire.column(context, "<i4"), deadline_s=60.0,
        sampling=wire.SamplingParams(**{"max_tokens": 60, "seed": 5, **sampling}),
    )  # fmt: skip


def answers(folder: Path, *requests: wire.GenerateRequest) -> dict[str, GenerationOutput]:
    """All at once, in one batch."""
    core = EngineCore(
        EngineConfig(
            str(folder),
            RolloutSection(max_running=8, max_context_tokens=200, num_threads=1),
            device="cpu",
            policy_version=0,
        )
    )
    for one in requests:
        core.submit(one, 0.0, reshaping=core.reshape(one.sampling))
    for _ in range(200):
        core.admit(0.0)
        if core.can_step:
            core.step()
    core.model.close()
    return dict(core.outbox)


def logits_of(folder: Path, context: list[int], output: GenerationOutput) -> torch.Tensor:
    """The model's logits at the place of every sampled token, (n, vocabulary), from one plain
    forward.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found: torch.Tensor = (
            model(input_ids=torch.tensor([[*context, *output.token_ids]])).logits[0].float()
        )
    return found[len(context) - 1 : -1]


def test_answers_keep_to_their_guides_and_say_how_likely_they_were(
    folder: Path, tokenizer: Tokenizer
) -> None:
    free = wire.Guide(schema='{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}')
    context = tokenizer.encode("what is 17 + 25?")
    asks = [
        request(f"{n}", context, seed=n, guides=[GUIDE, free] if n % 2 else [GUIDE])
        for n in range(6)
    ]
    plain = request("plain", context, seed=9, max_tokens=20, ignore_eos=True)
    outputs = answers(folder, *asks, plain)
    # those beside them are left alone
    assert outputs["plain"].token_ids == answers(folder, plain)["plain"].token_ids
    assert outputs["plain"].reshaped == ()
    kinds = set()
    for ask in asks:
        output = outputs[ask.request_id]
        assert output.finish_reason == "stop", output.error
        assert output.token_ids[-1] in tokenizer.eos_token_ids
        text = tokenizer.decode(output.token_ids)
        if text.startswith("<tool_call>\n"):
            value = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            assert set(value) == {"x", "kind"}
            assert (0 <= value["x"] <= 99, value["kind"] in ("red", "blue")) == (True, True)
        else:
            assert all(isinstance(one, bool) for one in json.loads(text))
        kinds.add(text[0])
        check_numbers(folder, tokenizer, ask, output)
    assert kinds == {"<", "["}


def check_numbers(
    folder: Path, tokenizer: Tokenizer, ask: wire.GenerateRequest, output: GenerationOutput
) -> None:
    """Against the grammar applied by hand to the logits of a plain forward."""
    logits = logits_of(folder, ask.token_ids.array().tolist(), output)
    matcher = GuideCompiler(tokenizer, logits.shape[1]).matcher(ask.sampling.guides)
    for row, token, logprob, flag in zip(
        logits, output.token_ids, output.logprobs, output.reshaped, strict=True
    ):
        allowed = torch.from_numpy(matcher.allowed())
        probs = row.softmax(-1)
        kept = float(probs[allowed].sum())
        assert logprob == pytest.approx(float((probs[token] / kept).log()), abs=1e-4)
        assert flag == (1 - kept > MOVED)
        matcher.take(token)


def test_penalties_and_biases_move_the_logits(folder: Path, tokenizer: Tokenizer) -> None:
    context = tokenizer.encode("what is 17 + 25?")
    bias = {11: 4.0, 12: -100.0, 13: 2.0}
    how: dict[str, Any] = {
        "frequency_penalty": 0.7,
        "presence_penalty": -0.4,
        "logit_bias": bias,
        "temperature": 0.8,
    }
    output = answers(folder, request("a", context, ignore_eos=True, max_tokens=40, **how))["a"]
    counts = torch.zeros(logits_of(folder, context, output).shape[1])
    flags = []
    for row, token, logprob in zip(
        logits_of(folder, context, output), output.token_ids, output.logprobs, strict=True
    ):
        changed = row - 0.7 * counts + 0.4 * (counts > 0)
        for one, value in bias.items():
            changed[one] += value
        drawn = (changed / 0.8).softmax(-1)
        assert logprob == pytest.approx(float(drawn[token].log()), abs=1e-4)
        flags.append(float((drawn - (row / 0.8).softmax(-1)).abs().sum() / 2) > MOVED)
        counts[token] += 1
    assert (12 in output.token_ids, list(output.reshaped)) == (False, flags)
    assert any(flags)


def test_what_hardly_changes_a_distribution_is_not_flagged(
    folder: Path, tokenizer: Tokenizer
) -> None:
    """The ratio of the policy to what was drawn from is then 1 to within the bound, wherever a
    token is trained on.
    """
    context = tokenizer.encode("what is 17 + 25?")
    ask = request("a", context, ignore_eos=True, logit_bias={11: 1e-4}, max_tokens=30)
    output = answers(folder, ask)["a"]
    own = logits_of(folder, context, output).log_softmax(-1)
    ratios = [
        float((own[at, token]).exp()) / np.exp(logprob)
        for at, (token, logprob) in enumerate(zip(output.token_ids, output.logprobs, strict=True))
    ]
    assert list(output.reshaped) == [False] * 30
    assert ratios == pytest.approx([1.0] * 30, abs=MOVED)
    greedy = answers(folder, request("g", context, temperature=0.0, guides=[GUIDE]))["g"]
    best = logits_of(folder, context, greedy).argmax(-1).tolist()
    assert list(greedy.reshaped) == [
        token != one for token, one in zip(greedy.token_ids, best, strict=True)
    ]
    assert set(greedy.logprobs) == {0.0}


@pytest.mark.parametrize(
    "how",
    [{}, {"top_k": 3}, {"top_p": 0.6, "temperature": 1.5}, {"min_p": 0.2}, {"temperature": 0.0}],
    ids=str,
)
def test_how_much_probability_a_change_moves(how: dict[str, Any]) -> None:
    torch.manual_seed(1)
    logits = 2 * torch.randn(3, 40)
    changed = logits.clone()
    changed[1, :20] -= 0.5
    changed[2, 5:] = float("-inf")
    found = probability_moved(logits, changed, [wire.SamplingParams(max_tokens=1, **how)] * 3)
    by_hand = [
        (drawn_from(a, how) - drawn_from(b, how)).abs().sum() / 2
        for a, b in zip(logits, changed, strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(by_hand))
    assert found[0] == 0


def drawn_from(row: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
    """One row's probabilities, sorted out one by one."""
    if how.get("temperature") == 0:
        return torch.nn.functional.one_hot(row.argmax(), len(row)).float()
    probs = (row / how.get("temperature", 1.0)).softmax(-1)
    kept, total = torch.zeros_like(probs), 0.0
    for rank, token in enumerate(probs.argsort(descending=True).tolist()):
        inside = (
            rank < how.get("top_k", 40)
            and total < how.get("top_p", 1.1)
            and probs[token] >= how.get("min_p", 0) * probs.max()
        )
        kept[token] = probs[token] if inside else 0.0
        total += float(probs[token])
    return kept / kept.sum()


def test_a_random_engine_keeps_to_guides_too(folder: Path, tokenizer: Tokenizer) -> None:
    engine = RandomEngine(
        EngineConfig(str(folder), RolloutSection(engine="random", max_context_tokens=200))
    )

    async def ask(**sampling: Any) -> GenerationOutput:
        await engine.start()
        return await engine.generate(request("a", [5, 6], **sampling))

    output = asyncio.run(ask(guides=[GUIDE]))
    value = json.loads(
        tokenizer.decode(output.token_ids)
        .removeprefix("<tool_call>\n")
        .removesuffix("\n</tool_call>")
    )
    assert set(value) == {"x", "kind"}
    matcher = GuideCompiler(tokenizer).matcher([GUIDE])
    for token, logprob in zip(output.token_ids, output.logprobs, strict=True):
        assert logprob == pytest.approx(-np.log(matcher.allowed().sum()))
        matcher.take(token)
    assert list(output.reshaped) == [True] * len(output.token_ids)
    biased = asyncio.run(ask(logit_bias={7: 100.0}, max_tokens=5))
    assert list(biased.token_ids) == [7] * 5
    outside = asyncio.run(ask(logit_bias={10_000: 1.0}))
    assert (
        outside.error
        == f"guide: logit_bias: token id 10000 is outside the model's vocabulary of {tokenizer.vocab_size}"
    )


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("{", "the schema is not valid JSON"),
        ("[]", "the schema must be an object"),
        ('{"type": "thing"}', "Invalid type: thing"),
        ('{"type": "string", "not": {}}', 'Unimplemented keys: ["not"]'),
        ('{"$ref": "#/nowhere"}', "Pointer '/nowhere' does not exist"),
        (
            '{"type": "string", "pattern": "(?<=a)b"}',
            "regex parse error: (?<=a)b error: look-around",
        ),
    ],
)
def test_a_schema_that_no_grammar_supports_is_one_line(
    folder: Path, tokenizer: Tokenizer, schema: str, says: str
) -> None:
    with pytest.raises(GuideError) as caught:
        GuideCompiler(tokenizer).check([wire.Guide(schema=schema)])
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)
    output = answers(folder, request("a", [5], guides=[wire.Guide(schema=schema)]))["a"]
    assert (output.finish_reason, output.error) == ("error", f"guide: {caught.value}")


def test_special_tokens_around_a_value_are_tokens(folder: Path, tokenizer: Tokenizer) -> None:
    guide = wire.Guide(schema='{"const": 1}', before="<|im_start|>so ", after="<|endoftext|>")
    output = answers(folder, request("a", [5], guides=[guide]))["a"]
    ids = [
        tokenizer.token_id("<|im_start|>"),
        *tokenizer.encode("so 1"),
        tokenizer.token_id("<|endoftext|>"),
        tokenizer.eos_token_ids[0],
    ]
    assert list(output.token_ids) == ids
