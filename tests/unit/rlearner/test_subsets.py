"""``rlearner data sample``: shares of strata, by hand and by hypothesis."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.credit.model_identity import ModelIdentity
from learner.credit.pass_rate_file import write_pass_rates
from rlearner.cli import main
from rlearner.data.subsets import allot_by_share, allot_equally, draw_rows, name_band
from rlearner_text.rows.columns import digest_row

ROWS = [{"question": f"q{n}", "level": "hard" if n % 4 == 0 else "easy"} for n in range(20)]
SIZES = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 40), min_size=1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def drawn(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_shares_with_the_largest_remainders() -> None:
    # 10 of 30: 5.33, 3.33, 1.33: one more for the first of equal remainders
    assert allot_by_share({"a": 16, "b": 10, "c": 4}, 10) == {"a": 6, "b": 3, "c": 1}


def test_equal_numbers_as_far_as_there_are_rows() -> None:
    assert allot_equally({"a": 16, "b": 1, "c": 4}, 10) == {"a": 5, "b": 1, "c": 4}


@given(sizes=SIZES, share=st.floats(0, 1), seed=st.integers(0, 3), equal=st.booleans())
def test_as_many_rows_as_asked_for(
    sizes: dict[str, int], share: float, seed: int, equal: bool
) -> None:
    strata = [name for name, size in sizes.items() for _ in range(size)]
    num_rows = round(share * len(strata))
    indices = draw_rows(strata, num_rows, equal=equal, seed=seed)
    assert len(set(indices)) == len(indices) == num_rows
    assert indices == sorted(indices)
    counts = Counter(strata[index] for index in indices)
    if not equal:
        for name, size in sizes.items():
            assert abs(counts[name] - size * num_rows / len(strata)) < 1
    assert indices == draw_rows(strata, num_rows, equal=equal, seed=seed)


def test_bands_of_pass_rates() -> None:
    rates = (None, 0.0, 0.1, 0.25, 0.3, 0.75, 0.9, 1.0)
    assert [name_band(rate) for rate in rates] == [
        *("not measured", "0", "0 to 0.25", "0 to 0.25", "0.25 to 0.5"),
        *("0.5 to 0.75", "0.75 to 1", "1"),
    ]


def test_sample_by_a_column(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = data.parent / "small.jsonl"
    arguments = ["data", "sample", str(data), "--by", "level", "--n", "8", "--out", str(out)]
    assert main(arguments) == 0
    assert Counter(row["level"] for row in drawn(out)) == {"easy": 6, "hard": 2}
    assert [row for row in ROWS if row in drawn(out)] == drawn(out)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "       6       15  easy",
        "       2        5  hard",
        f"wrote {out}",
    ]
    # A second time: the file exists.
    assert main(arguments) == 2
    assert "the file exists" in capsys.readouterr().err


def test_sample_by_difficulty(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = b"".join(digest_row(dict(row))[:8] for row in ROWS)
    levels = bytes([0] * 10 + [125] * 10)
    write_pass_rates(
        data.parent / "pass_rates.jsonl",
        ModelIdentity("m", "00"),
        "run",
        levels={"math": levels},
        keys={"math": keys},
    )
    out = data.parent / "small.jsonl"
    arguments = ["data", "sample", str(data), "--by", "difficulty", "--n", "6", "--out", str(out)]
    assert main([*arguments, "--pass-rates", str(data.parent), "--equal", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["strata"] == [
        {"value": "0", "rows": 10, "drawn": 3},
        {"value": "0.25 to 0.5", "rows": 10, "drawn": 3},
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--by", "difficulty", "--n", "1"], "name the pass rates by --pass-rates RUN"),
        (["--by", "nothing", "--n", "1"], "has no such column"),
        (["--by", "level", "--n", "21"], "has 20 rows"),
    ],
)
def test_impossible_samples(
    data: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = data.parent / "small.jsonl"
    assert main(["data", "sample", str(data), *arguments, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
    assert not out.exists()
