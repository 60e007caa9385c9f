"""Rows of preference and conversation files: which tokens are trained, and what is said about
malformed rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from broker.errors import ConfigError, DataError
from broker.settings.config import DomainSection
from broker.settings.run_settings import RunSettings
from envhub.demos import write_demonstrations
from learner.offline.data import join_dialogue, load_examples
from learner.offline.preference_pairs import load_pairs
from rlearner_text.config import TinyModel
from rlearner_text.supervised_masks import encode_supervised
from rlearner_text.tiny import build_tiny
from rlearner_text.tokenizer import Tokenizer

SIZES = TinyModel(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(build_tiny(tmp_path_factory.mktemp("offline") / "tiny", SIZES))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trained(tokenizer: Tokenizer, example: Any) -> str:
    kept = [token for token, mask in zip(example.token_ids, example.loss_mask, strict=True) if mask]
    return tokenizer.decode(kept, skip_special_tokens=False)


def test_texts_and_messages_mean_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = {"prompt": "abc", "chosen": "U", "rejected": "DD"}
    lists = {"prompt": [user("abc")], "chosen": [assistant("U")], "rejected": [assistant("DD")]}
    whole = {
        "prompt": "looked past",
        "chosen": [user("abc"), assistant("U")],
        "rejected": [user("abc"), assistant("DD")],
    }
    found, num_long = load_pairs(write(tmp_path / "x.jsonl", [texts, lists, whole]), tokenizer, 100)
    assert num_long == 0
    assert found[0] == found[1] == found[2]
    assert trained(tokenizer, found[0].chosen) == "U<|im_end|>"
    assert trained(tokenizer, found[0].rejected) == "DD<|im_end|>"
    assert (
        found[0].chosen.token_ids == encode_supervised(tokenizer, [user("abc"), assistant("U")])[0]
    )


def test_pairs_after_examples_train_their_answers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    shared = [user("a"), {**assistant("shown"), "weight": 0}, user("b"), assistant("c"), user("d")]
    row = {"chosen": [*shared, assistant("U")], "rejected": [*shared, assistant("DD")]}
    ((pair,), _) = load_pairs(write(tmp_path / "x.jsonl", [row]), tokenizer, 100)
    assert trained(tokenizer, pair.chosen) == "U<|im_end|>"
    assert trained(tokenizer, pair.rejected) == "DD<|im_end|>"


def test_only_what_comes_after_the_shared_beginning_is_trained(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    shared = [user("a"), assistant("first"), user("b"), assistant("second"), user("c")]
    row = {
        "chosen": [*shared, assistant("x"), user("d"), assistant("y")],
        "rejected": [*shared, assistant("z")],
    }
    ((pair,), _) = load_pairs(write(tmp_path / "x.jsonl", [row]), tokenizer, 200)
    assert trained(tokenizer, pair.chosen) == "x<|im_end|>y<|im_end|>"
    assert trained(tokenizer, pair.rejected) == "z<|im_end|>"


def test_long_pairs_are_left_out_whole(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": "p", "chosen": "c", "rejected": "r" * n} for n in (1, 50)]
    found, num_long = load_pairs(write(tmp_path / "x.jsonl", rows), tokenizer, 20)
    assert (len(found), num_long) == (1, 1)
    with pytest.raises(DataError, match=r"x\.jsonl:2: no row has both answers within 3 tokens"):
        load_pairs(tmp_path / "x.jsonl", tokenizer, 3)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"prompt": "p", "chosen": "c"},
            "no column 'rejected'; it has chosen, prompt",
        ),
        ({"chosen": "c", "rejected": "r"}, "chosen and rejected need the same beginning"),
        (
            {"prompt": "p", "chosen": 3, "rejected": "r"},
            "chosen is neither a text nor a list of messages",
        ),
        ({"prompt": "p", "chosen": "c", "rejected": "c"}, "chosen and rejected are the same"),
        (
            {"prompt": "p", "chosen": "c\ud83d", "rejected": "r"},
            "not JSON: it holds half of a surrogate pair, which is not text",
        ),
        ({"prompt": "p", "chosen": "c", "rejected": float("nan")}, "not JSON: it holds NaN"),
        (
            {"prompt": "p", "chosen": [assistant("c"), user("u")], "rejected": "r"},
            "prompt and chosen: the last message must be the assistant's",
        ),
        (
            {"chosen": [user("a"), assistant("c")], "rejected": [user("b"), assistant("c")]},
            "chosen and rejected differ at message 0, of the user",
        ),
    ],
)
def test_a_malformed_pair_names_file_and_line(
    tokenizer: Tokenizer, tmp_path: Path, row: Any, problem: str
) -> None:
    path = write(tmp_path / "x.jsonl", [{"prompt": "p", "chosen": "c", "rejected": "r"}, row])
    with pytest.raises(DataError) as caught:
        load_pairs(path, tokenizer, 100)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert problem in str(caught.value)


def test_prompt_and_response_are_a_conversation(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.jsonl",
        [{"prompt": "p", "response": "r"}, {"messages": [user("p"), assistant("r")]}],
    )
    first, second = load_examples(path, tokenizer, 100)
    assert first == second
    sample = first.sample()
    assert sample.loss_mask.tolist() == sample.advantages.tolist() == first.loss_mask
    assert (
        join_dialogue([{"role": "system", "content": "s"}, user("p")], "r", "response").messages[0][
            "role"
        ]
        == "system"
    )


def test_parquet_rows_read_as_lines_do(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [
        {"prompt": [user("abc")], "chosen": [assistant("U")], "rejected": [assistant("D" * n)]}
        for n in (1, 2, 3)
    ]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet", row_group_size=2
    )
    assert load_pairs(tmp_path / "x.parquet", tokenizer, 100) == load_pairs(
        write(tmp_path / "x.jsonl", rows), tokenizer, 100
    )
    bad = [*rows, {"prompt": [user("abc")], "chosen": [assistant("U")], "rejected": None}]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(bad), tmp_path / "bad.parquet", row_group_size=2
    )
    with pytest.raises(
        DataError, match=r"bad\.parquet:4: no column 'rejected'; it has chosen, prompt"
    ):
        load_pairs(tmp_path / "bad.parquet", tokenizer, 100)
    (tmp_path / "no.parquet").write_text("no")
    with pytest.raises(ConfigError, match=r"^data.train: .*not a Parquet file"):
        load_examples(tmp_path / "no.parquet", tokenizer, 100, "data.train")


def test_pairs_of_solved_and_failed_episodes_are_made_here(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    out = tmp_path / "pairs.jsonl"
    domain = DomainSection(env="frozenlake", max_turns=10)
    settings = RunSettings(domains={"lake": domain})
    solved = write_demonstrations(settings, None, episodes=20, noise=0.0, against=1.0, out=str(out))
    pairs, num_long = load_pairs(out, tokenizer, 4096)
    assert solved == 1.0
    assert num_long == 0
    assert 10 <= len(pairs) <= 20  # a few random walks arrive, too
