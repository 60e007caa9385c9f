"""Data sets: files, folders, folders of datasets and names on the hub, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from broker.errors import ConfigError, DataError
from broker.settings.runspec import digest_file
from rlearner_text.rows.reading import read_rows
from rlearner_text.rows.sources import DataSource

ROWS: list[dict[str, Any]] = [{"q": "a", "n": "1"}, {"q": "b,\n", "n": "2"}]


def read(path: Path | str, **options: Any) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(DataSource(str(path), **options), "data.train")]


def write_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        lines = [f'"{row["q"]}",{row["n"]}\n' for row in rows]
        path.write_text("\ufeffq,n\n" + "".join(lines), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text("\n " + json.dumps(rows, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "json", "csv", "parquet"])
def test_files_of_every_kind_have_the_same_rows(tmp_path: Path, ending: str) -> None:
    path = write_file(tmp_path / f"x.{ending}", ROWS)
    assert read(path) == ROWS
    assert read(path, max_rows=1) == ROWS[:1]
    assert DataSource(str(path)).extra == ("parquet" if ending == "parquet" else "")


def test_null_columns_are_absent(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": None, "c": [{"d": None, "e": 1}, {"d": 2, "e": 1}]}, {"a": None, "b": 2}]
    expected = [{"a": 1, "c": [{"e": 1}, {"d": 2, "e": 1}]}, {"b": 2}]
    assert read(write_file(tmp_path / "x.jsonl", rows)) == expected
    assert read(write_file(tmp_path / "x.parquet", rows)) == expected


def test_a_folder_of_files_with_splits(tmp_path: Path) -> None:
    folder = tmp_path / "sums"
    for name, rows in {
        "main/train-00001-of-00002.parquet": ROWS[1:],
        "main/train-00000-of-00002.parquet": ROWS[:1],
        "main/test-00000-of-00001.parquet": ROWS[:1],
        "other/train-00000-of-00001.parquet": [{"q": "o", "n": "9"}],
        ".cache/train.jsonl": [{"q": "hidden", "n": "0"}],
    }.items():
        write_file(folder / name, rows)
    assert read(folder, subset="main", split="train") == ROWS
    assert read(folder, subset="main", split="test") == ROWS[:1]
    assert read(folder, subset="other") == [{"q": "o", "n": "9"}]
    with pytest.raises(ConfigError, match="it has the splits test, train; name one as split"):
        read(folder, subset="main")
    with pytest.raises(ConfigError, match=r"a folder with files of dev that end in \.jsonl, "):
        read(folder, split="dev")
    before = digest_file(str(folder))
    write_file(folder / ".cache/train.jsonl", ROWS)
    assert digest_file(str(folder)) == before
    write_file(folder / "main/train-00002.jsonl", ROWS)
    assert digest_file(str(folder)) != before


@pytest.mark.parametrize(
    ("text", "error", "problem"),
    [
        ("q,n\na\n", DataError, "x.csv:2: not as many fields as the header, 2"),
        ("q,n\na,b,c\n", DataError, "x.csv:2: not as many fields as the header, 2"),
        ('q,n\n"a,b\n', ConfigError, "not a CSV file in UTF-8: unexpected end of data"),
    ],
)
def test_a_malformed_csv(tmp_path: Path, text: str, error: type[Exception], problem: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(error) as caught:
        read(tmp_path / "x.csv")
    assert problem in str(caught.value)


def test_a_json_list_names_the_wrong_row(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"a": 1}, 2]')
    with pytest.raises(DataError, match=r"x\.json:2: the row is not an object"):
        read(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("nowhere.jsonl", "there is no such file"),
        ("owner/name.csv", "there is no such file"),
        ("rows.txt", "a file ending in .jsonl, .ndjson, .json, .parquet, .pq, .csv"),
        ("owner/name", "a name on the hub with its commit"),
        ("owner/name@main", "a name on the hub with its commit"),
    ],
)
def test_paths_that_name_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("rows.txt").write_text("x")
    with pytest.raises(ConfigError) as caught:
        DataSource(path).check("data.train")
    assert str(caught.value).startswith(f"data.train: {path!r} is not allowed; ")
    assert problem in str(caught.value)


def test_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = write_file(tmp_path / "saved/state.json", []).parent
    monkeypatch.setitem(sys.modules, "datasets", None)
    for path in (str(saved), f"owner/name@{'0' * 40}"):
        assert DataSource(path).extra == "datasets"
        with pytest.raises(
            ConfigError, match=r"needs datasets: pip install 'rlearner\[datasets\]'"
        ):
            read(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow: pip install 'rlearner\[parquet\]'"):
        read(write_file(tmp_path / "x.jsonl", ROWS).rename(tmp_path / "x.parquet"))


def test_folders_that_datasets_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="make test-peers installs it")
    messages = [{"p": [{"role": "user", "content": str(n)}], "x": None} for n in range(3)]
    whole = datasets.Dataset.from_list(messages)
    whole.select([2, 0]).save_to_disk(tmp_path / "single")
    splits = {"train": whole.select([0, 1]), "test": whole.select([2])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    expected = [{"p": row["p"]} for row in messages]
    assert read(tmp_path / "single") == [expected[2], expected[0]]
    assert read(tmp_path / "splits", split="test") == expected[2:]
    assert read(tmp_path / "splits", split="train", max_rows=1) == expected[:1]
    with pytest.raises(ConfigError, match="it has the splits train, test; name one as split"):
        read(tmp_path / "splits")
    with pytest.raises(
        ConfigError, match=r"^data\.split: 'dev' is not allowed; .*has the splits train, test"
    ):
        read(tmp_path / "splits", split="dev")
