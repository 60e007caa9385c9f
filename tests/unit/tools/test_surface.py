"""The figures of the house rules, counted by hand on small files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.house import AT_LEAST, AT_MOST, find_excess
from tools.surface import measure

LINES = '''\
"""A module."""

# the reason for the number
LIMIT = 3  # behind code: not a line of comments


def show(found, *, rows):
    first, second = found, rows
    first, second = second, first
    names = (first, second)
    print(*names)
    return [one for one in rows if one] if rows else call(1, 2, 3, 4, 5, 6)


async def load_rows(self, now):
    with open(now) as told:
        return told.read()
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "module.py"
    path.write_text(LINES + f"TEXT = '{'x' * 100}'\n")
    return path


def test_each_figure_counts_what_it_says(file: Path) -> None:
    surface = measure([file])
    assert surface.num_lines == 18
    assert surface.num_comments == 1
    # found rows; first second; first second; names; one; now; told; LIMIT; TEXT; self is none
    assert surface.num_names == 12
    empty = {place.split()[1] for place in surface.places["pronoun_names"]}
    assert empty == {"found", "told", "one"}
    assert surface.figures() == {
        "pronoun_names": 0.25,
        "one_names": 1,
        "tuple_packs_per_1k": round(1 / 0.018, 2),  # the swap is no pack
        "one_word_functions": 0.5,
        "conditional_per_1k": round(1 / 0.018, 2),
        "comment_lines": round(1 / 18, 4),
        "lines_over_100": 1,
        "positional_over_5": 1,
        "tuple_splats": 1,
    }


def test_places_name_file_and_line(file: Path) -> None:
    surface = measure([file])
    assert surface.places["lines_over_100"] == [f"{file}:18"]
    assert surface.places["one_word_functions"] == [f"{file}:7 show"]


def test_figures_beyond_their_limits_are_named() -> None:
    assert len(find_excess({key: limit + 1e6 for key, limit in AT_MOST.items()})) == len(AT_MOST)
    assert find_excess({"import_cycles": 0, "comment_lines": 1.0}) == []
    assert len(find_excess(dict.fromkeys(AT_LEAST, 0.0))) == len(AT_LEAST)
    (line,) = find_excess({"import_cycles": 1})
    assert line == "import_cycles: 1, beyond its limit 0; see --list import_cycles"
