"""The reward ``reward_model``: scores worked out by hand, and the same as transformers gives one
text at a time.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from broker.errors import ConfigError
from broker.settings.config import RewardConfig
from rewardhub.reward_processes import RewardProcesses
from rewardhub.rewards.base import NoScore, Sample
from rewardhub.rewards.reward_model import RewardModel
from rewardhub.rewards.reward_model_args import RewardModelArgs
from rlearner_text.config import TinyModel
from rlearner_text.tiny import _write_tokenizer

WORDS = ["<pad>", "good", "bad", "so", "what"]
BOTH = "{prompt} {response}"


def sample(response: str, prompt: str = "what") -> Sample:
    return Sample(
        domain="d", task_index=1, prompt=prompt, response=response, reference="", reward=0.0, reward_parts={},
        success=False,
        end="terminated", num_turns=1, num_tokens=1, metrics={},
    )  # fmt: skip


def config(**fields: Any) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=4,
        rms_norm_eps=1e-12, max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=None, **fields,
    )  # fmt: skip


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer of five words and no chat template."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    return tmp_path


def transparent(model: Any) -> Any:
    """Without attention and MLP, so that what comes out at the end is the normalised embedding of
    the last token.
    """
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(
            torch.tensor(
                [[0.0] * 4, [3.0, 4, 0, 0], [-3.0, 4, 0, 0], [1.0, 1, 1, 1], [0, 0, 2.0, 0]]
            )
        )
    return model


def classifier(folder: Path, **fields: Any) -> Path:
    model = transparent(Qwen3ForSequenceClassification(config(vocab_size=5, **fields)))
    with torch.no_grad():
        model.score.weight[0] = torch.tensor([10.0, 1.0, 100.0, 0.0])
    model.save_pretrained(folder)
    return folder


async def values(folder: Path, *responses: str, **args: Any) -> list[float]:
    made = RewardModel(RewardModelArgs(path=str(folder), template=BOTH, **args))
    return [
        one.value for one in await asyncio.gather(*(made.score(sample(text)) for text in responses))
    ]  # type: ignore[misc]


async def test_scores_worked_out_by_hand(words: Path) -> None:
    # The root mean square of (3, 4, 0, 0) is 2.5, so the state is (1.2, 1.6, 0, 0) and the score 10
    # * 1.2 + 1.6; with -3, -12 + 1.6. (1, 1, 1, 1) stays as it is: 10 + 1 + 100. Longer texts are
    # padded beside shorter ones and read to their own end.
    folder = classifier(words, num_labels=1)
    expected = [13.6, -10.4, 111.0, 13.6]
    assert await values(folder, "good", "so so bad", "so", "bad so good") == pytest.approx(
        expected, rel=1e-6
    )
    one_by_one = await values(folder, "good", "so so bad", "so", "bad so good", batch_size=1)
    assert one_by_one == pytest.approx(expected, rel=1e-6)
    assert await values(
        folder, "good", "so", scale=0.1, offset=-1.0, clip=[-1.0, 5.0]
    ) == pytest.approx([0.36, 5.0])
    assert await values(folder, "bad", activation="sigmoid") == pytest.approx(
        [1 / (1 + math.exp(10.4))]
    )


async def test_a_label_of_several_and_a_text_that_is_too_long(words: Path) -> None:
    folder = classifier(words, num_labels=2)
    state = load_file(folder / "model.safetensors")
    state["score.weight"][1] = torch.tensor([10.0, 1.0, 100.0, 0.0]) * 2
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert await values(folder, "good", label=1) == pytest.approx([27.2])
    assert await values(folder, "good", label=1, activation="softmax") == pytest.approx(
        [1 / (1 + math.exp(-13.6))]
    )
    made = RewardModel(RewardModelArgs(path=str(folder), template=BOTH, max_length=2))
    short, long = await asyncio.gather(made.score(sample("good")), made.score(sample("so good")))
    assert (short.notes, long.notes, long.value) == (
        {"truncated": 0.0},
        {"truncated": 1.0},
        pytest.approx(13.6),
    )
    with pytest.raises(
        ConfigError, match=r"rewards\.args\.label: 2 is not allowed; below 2, the labels of"
    ):
        RewardModel(RewardModelArgs(path=str(folder), label=2))


async def test_a_value_head_beside_a_language_model(words: Path) -> None:
    transparent(Qwen3ForCausalLM(config(vocab_size=5, tie_word_embeddings=True))).save_pretrained(
        words
    )
    with pytest.raises(
        ConfigError,
        match=r"a sequence classifier, or a model with one value head of shape \[1, hidden\] among v_head",
    ):
        await values(words, "good")
    state = load_file(words / "model.safetensors")
    head = {
        "v_head.summary.weight": torch.tensor([[10.0, 1.0, 100.0, 0.0]]),
        "v_head.summary.bias": torch.tensor([0.5]),
    }
    save_file(state | head, words / "model.safetensors", metadata={"format": "pt"})
    assert await values(words, "good", "so so bad") == pytest.approx([14.1, -9.9], rel=1e-6)


async def test_an_output_that_is_not_finite_is_no_score(words: Path) -> None:
    folder = classifier(words, num_labels=1)
    state = load_file(folder / "model.safetensors")
    save_file(
        state | {"score.weight": torch.full((1, 4), math.nan)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(NoScore, match="domain 'd', task 1: the model's output is nan"):
        await values(folder, "good")


async def test_a_process_on_each_gpu() -> None:
    hosts = RewardProcesses([4, 5])
    pool = hosts._pool(RewardConfig(name="reward_model", args={"path": "x", "batch_size": 3}))
    assert [env["CUDA_VISIBLE_DEVICES"] for env in pool._envs] == ["4", "5"]
    assert (pool.num_free, pool._timeout_s) == (2 * 2 * 3, 125.0)
    judge = hosts._pool(RewardConfig(name="judge", args={"base_url": "http://x/v1"}))
    assert (judge._envs, judge.num_free) == ([{}], 16)  # a judge needs none


async def test_with_its_own_chat_template_it_gives_what_transformers_gives(tmp_path: Path) -> None:
    _write_tokenizer(tmp_path, TinyModel())
    reference_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    torch.manual_seed(5)
    made = Qwen3ForSequenceClassification(config(vocab_size=len(reference_tokenizer), num_labels=1))
    made.save_pretrained(tmp_path)
    reference = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    reference.config.pad_token_id = reference_tokenizer.pad_token_id
    pairs = [
        ("2 + 2?", "four"),
        ("name a color that is long", "g"),
        ("?", "it is rather long, that one, is it not"),
    ]
    expected = []
    for prompt, response in pairs:
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        ids = reference_tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)[
            "input_ids"
        ]
        expected.append(reference(input_ids=ids).logits.tolist()[0][0])
    model = RewardModel(RewardModelArgs(path=str(tmp_path)))
    found = await asyncio.gather(
        *(model.score(sample(response, prompt)) for prompt, response in pairs)
    )
    assert len(set(expected)) == 3
    assert [one.value for one in found] == pytest.approx(expected, abs=1e-6)


async def test_the_soft_cap_of_attention_counts(words: Path) -> None:
    torch.manual_seed(0)
    capped = Gemma2Config(
        vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8,
        num_key_value_heads=1, query_pre_attn_scalar=8, attn_logit_softcapping=0.5, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    model = Gemma2ForSequenceClassification._from_config(capped, attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 1.0)
    model.save_pretrained(words)
    ids = torch.tensor(
        [[WORDS.index(word) for word in ("what", "good", "bad", "so", "bad", "good")]]
    )
    expected = model(input_ids=ids).logits.item()
    model.set_attn_implementation("sdpa")
    assert abs(model(input_ids=ids).logits.item() - expected) > 1e-3
    assert await values(words, "good bad so bad good") == pytest.approx([expected], abs=1e-5)
