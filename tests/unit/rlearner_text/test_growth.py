"""A conversation grows by exactly what was sampled and what was said; nothing before is touched."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_models import make_tokenizer_folder

from broker.errors import ConfigError
from rlearner_text.config import TinyModel
from rlearner_text.incremental_tokenization import Conversation
from rlearner_text.template_rules import rules_for
from rlearner_text.tiny import _write_tokenizer
from rlearner_text.tokenizer import Tokenizer

_cache: dict[str, Tokenizer] = {}


@pytest.fixture(scope="module", autouse=True)
def _folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("tokenizers")
    for family in (
        "qwen3",
        "qwen2",
        "llama3",
        "mistral",
        "gemma",
        "r1",
        "marked",
        "plain",
        "countdown",
        "amnesia",
    ):
        _cache[family] = Tokenizer.load(make_tokenizer_folder(root / family, family))
    (root / "tiny").mkdir()
    _write_tokenizer(root / "tiny", TinyModel())
    _cache["tiny"] = Tokenizer.load(root / "tiny")


def grow(
    tokenizer: Tokenizer, system: str, turns: list[tuple[str, str]], *, close: bool = True
) -> Conversation:
    conversation = Conversation(tokenizer, system)
    for said, answered in turns:
        conversation.observe(said)
        ids = tokenizer.encode(answered) + (list(conversation.rules.closing) if close else [])
        conversation.sampled(ids, [-0.5] * len(ids), [1, len(ids)])
    return conversation


# Printable text that no template trims and that spells no special token.
words = st.text(st.sampled_from("abc XYZ012.,+=\n"), min_size=1, max_size=20).map(
    lambda s: "x" + s + "x"
)
turns = st.lists(st.tuples(words, words), min_size=1, max_size=5)


@pytest.mark.parametrize("family", ["qwen2", "llama3", "tiny", "marked"])
@settings(max_examples=30, deadline=None)
@given(turns=turns, system=st.one_of(st.just(""), words), last=words)
def test_equals_the_whole_rendering_when_the_text_round_trips(
    family: str, turns: list[tuple[str, str]], system: str, last: str
) -> None:
    tokenizer = _cache[family]
    messages = [{"role": "system", "content": system}] if system else []
    for said, answered in turns:
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answered}]
    for close in (True, False):
        conversation = grow(tokenizer, system, turns, close=close)
        conversation.observe(last)
        assert list(conversation.token_ids) == tokenizer.encode_chat(
            [*messages, {"role": "user", "content": last}]
        )


tokens = st.lists(st.integers(6, 90), max_size=6)
steps = st.lists(st.one_of(words, st.tuples(tokens, st.integers(0, 3))), max_size=12)


@pytest.mark.parametrize(
    "family", ["qwen3", "qwen2", "llama3", "mistral", "gemma", "r1", "plain", "tiny"]
)
@settings(max_examples=30, deadline=None)
@given(steps=steps)
def test_what_is_there_never_changes(family: str, steps: list[str | tuple[list[int], int]]) -> None:
    conversation = Conversation(_cache[family])
    sampled: list[int] = []
    versions: list[int] = []
    spoke = False
    for step in steps:
        before = (
            list(conversation.token_ids),
            list(conversation.loss_mask),
            list(conversation.logprobs),
        )
        if isinstance(step, str):
            if spoke:
                continue
            conversation.observe(step)
            spoke = True
        elif conversation.token_ids:
            ids, version = step
            conversation.sampled(ids, [-float(i) for i in ids], [version, len(ids)])
            sampled += ids
            versions += [version] * len(ids)
            spoke = False
        n = len(before[0])
        assert (
            list(conversation.token_ids[:n]),
            list(conversation.loss_mask[:n]),
            list(conversation.logprobs[:n]),
        ) == before
    mask = conversation.loss_mask
    assert (
        len(conversation.token_ids) == len(mask) == len(conversation.logprobs) == len(conversation)
    )
    assert [t for t, m in zip(conversation.token_ids, mask, strict=True) if m] == sampled
    assert all(
        p == (-float(t) if m else 0.0)
        for t, m, p in zip(conversation.token_ids, mask, conversation.logprobs, strict=True)
    )
    assert [t for s, e in conversation.spans for t in conversation.token_ids[s:e]] == sampled
    runs = conversation.version_runs
    assert [v for v, k in zip(runs[::2], runs[1::2], strict=True) for _ in range(k)] == versions
    assert all(a != b for a, b in zip(runs[::2], runs[2::2], strict=False))


def test_a_turn_cut_short_gets_its_end_token_unmasked() -> None:
    tokenizer = _cache["tiny"]
    conversation = Conversation(tokenizer)
    conversation.observe("ab")
    conversation.sampled(tokenizer.encode("U"), [-0.25], [4, 1])
    conversation.observe("c")
    spelled = (
        "<|im_user|>ab<|im_end|><|im_assistant|>U<|im_end|><|im_user|>c<|im_end|><|im_assistant|>"
    )
    assert tokenizer.decode(conversation.token_ids, skip_special_tokens=False) == spelled
    assert list(conversation.loss_mask) == [0] * 5 + [1] + [0] * 5
    assert list(conversation.logprobs) == [0.0] * 5 + [-0.25] + [0.0] * 5
    assert conversation.version_runs == [4, 1]
    assert conversation.spans == [(5, 6)]


def test_a_resumed_turn_is_one_span() -> None:
    conversation = Conversation(_cache["tiny"])
    conversation.observe("ab")
    conversation.sampled([50, 51], [-1, -2], [1, 1, 2, 1])
    conversation.sampled([52, 2], [-3, -4], [2, 2])
    assert conversation.spans == [(5, 9)]
    assert conversation.version_runs == [1, 1, 2, 3]
    assert conversation.observe("c") == conversation.cost_of("c") - 1


def test_end_of_turn_and_stop_tokens_by_family() -> None:
    spelled = {
        f: t.decode([rules_for(t).end_of_turn_id or -1], skip_special_tokens=False)
        for f, t in _cache.items()
        if f in _STABLE
    }
    assert spelled == _STABLE
    assert rules_for(_cache["plain"]).end_of_turn_id is None
    assert rules_for(_cache["llama3"]).stop_token_ids == (1, 4)
    assert rules_for(_cache["tiny"]).stop_token_ids == (2,)


_STABLE = {
    "qwen3": "<|im_end|>", "qwen2": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>",
    "r1": "<|end|>",
    "tiny": "<|im_end|>",
}  # fmt: skip


def test_a_template_that_thinks_keeps_its_opening_in_every_turn() -> None:
    tokenizer = _cache["r1"]
    conversation = grow(tokenizer, "", [("one", "because</think>1")])
    conversation.observe("two")
    assert tokenizer.decode(conversation.token_ids, skip_special_tokens=False) == (
        "<|begin|><|User|>one<|Assistant|><think>\nbecause</think>1<|end|><|User|>two<|Assistant|><think>\n"
    )


def test_a_template_that_rewrites_the_last_answer_grows_without_rewriting() -> None:
    tokenizer = _cache["qwen3"]
    conversation = grow(tokenizer, "be brief", [("one", "1")])
    conversation.observe("two")
    assert tokenizer.decode(conversation.token_ids, skip_special_tokens=False) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("family", "system", "problem"),
    [
        ("gemma", "be brief", "rejects messages of the roles system, user"),
        ("countdown", "", "the beginning of a conversation changes"),
        ("amnesia", "", "does not render every assistant turn"),
    ],
)
def test_an_unstable_template_is_refused_by_name(family: str, system: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Conversation(_cache[family], system)
    assert problem in str(caught.value)
    assert str(caught.value).startswith(f"model.path: {_cache[family].name!r}")


def test_calls_out_of_order_and_lengths_that_disagree() -> None:
    conversation = Conversation(_cache["tiny"])
    with pytest.raises(ValueError, match="before observe"):
        conversation.sampled([7], [0.0], [0, 1])
    conversation.observe("a")
    with pytest.raises(ValueError, match="twice"):
        conversation.observe("b")
    for ids, logprobs, runs in (([7], [], [0, 1]), ([7], [0.0], [0, 2]), ([7], [0.0], [0])):
        with pytest.raises(ValueError, match="lengths disagree"):
            conversation.sampled(ids, logprobs, runs)
    assert conversation.spans == []
