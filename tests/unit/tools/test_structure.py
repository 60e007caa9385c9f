"""The figures of files and folders, on a small tree."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.structure import count_statements, find_cycles, measure_structure, split_camel

MODULES = {
    "pack/__init__.py": "",
    "pack/first.py": "from pack import second\n\n\nclass Row:\n    pass\n",
    "pack/second.py": "import pack.first\n\n\nclass Row:\n    pass\n\n\nclass RowReader:\n"
    "    def __init__(self, config: dict[str, Any]) -> None:\n        self.nccl = config\n",
    "pack/third.py": "def anew(spec):\n    return spec.config.get('train')\n",
    "pack/backends/fourth.py": "NAME = 'nccl'\n",
    "tests/unit/pack/test_first.py": "",
    "tests/unit/pack/test_other.py": "",
    "bench/load.py": "A = 1\nB = 2\n",
    "docs/page.md": "whoever reads\n",
    "README.md": "",
    "pyproject.toml": "",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_figures_of_a_tree(root: Path) -> None:
    figures = measure_structure(root, ["pack"], first_statements=24)
    assert figures["repeated_class_names"] == ["Row"]
    assert figures["one_word_classes"] == round(2 / 3, 4)
    assert figures["max_modules_per_folder"] == 3
    assert figures["import_cycles"] == ["pack.first pack.second"]
    assert len(figures["settings_as_dict"]) == 2  # type: ignore[arg-type]  # an argument, a look-up
    assert figures["files_spelling_nccl"] == ["pack/second.py"]
    assert figures["stray_unit_tests"] == ["tests/unit/pack/test_other.py"]
    assert [place.split()[-1] for place in figures["archaic"]] == ["anew", "whoever"]  # type: ignore[union-attr]
    assert figures["bench_lines"] == 2
    assert figures["statements_share"] == 0.5  # 12 of 24


def test_an_assignment_of_two_values_counts_twice() -> None:
    assert count_statements(ast.parse("a, b = 1, 2\nc = 3")) == 3


@pytest.mark.parametrize(
    ("imports", "cycles"),
    [
        ({"a": ["b"], "b": ["c"], "c": []}, []),
        ({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}, ["a b c"]),
        ({"a": ["b"], "b": ["a"], "c": ["d"], "d": ["c"]}, ["a b", "c d"]),
    ],
)
def test_modules_that_import_each_other(imports: dict[str, list[str]], cycles: list[str]) -> None:
    assert sorted(find_cycles(imports)) == cycles


def test_words_of_class_names() -> None:
    names = ("HTTPServer", "Row", "_RowReader", "V2Client")
    assert [len(split_camel(name)) for name in names] == [2, 1, 2, 2]
