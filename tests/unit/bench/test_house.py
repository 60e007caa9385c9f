"""What bench.house counts."""

from __future__ import annotations

import ast

from bench import house


def test_words_are_counted_whole_and_across_lines() -> None:
    assert house.archaic("Mend it so\n many times. Amend, besides, mend_it.") == 2


def test_public_classes_and_their_words() -> None:
    assert house.public_classes(
        ast.parse("class A:\n  class B: ...\nclass _C: ...\ndef f():\n  class D: ...")
    ) == ["A"]
    assert [
        house.is_one_word(name) for name in ("Hub", "PPO", "FSDP2", "HubBroker", "HTTPServer")
    ] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_a_name_counts_once_it_is_in_two_modules() -> None:
    assert house.repeated({"a": ["X", "Y"], "b": ["X"], "c": ["Z", "Z"]}) == {"X": ["a", "b"]}


def test_folders_count_modules_without_init() -> None:
    assert house.modules_per_folder(["a/__init__.py", "a/x.py", "a/y.py", "a/b/z.py"]) == {
        "a": 2,
        "a/b": 1,
    }


def test_imports_name_modules_in_functions_and_relative_ones_too() -> None:
    source = "import os, p.a\nfrom p import b\nfrom p.q import NAME\ndef f():\n  from . import c\n  from .q.d import X"
    known = {"p", "p.a", "p.b", "p.c", "p.q", "p.q.d", "p.me"}
    assert house.imports(ast.parse(source), "p.me", False, known) == {
        "p.a",
        "p.b",
        "p.q",
        "p.c",
        "p.q.d",
    }
    assert house.imports(ast.parse("from .d import X"), "p.q", True, known) == {"p.q.d"}


def test_cycles_and_arrows_that_point_up() -> None:
    assert house.cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    graph = {"p.x.a": {"p.y.b"}, "p.x.c": {"p.y.b"}, "p.y.b": {"p.x.c", "p.z"}, "p.z": set[str]()}
    arrows = house.rooms(graph, "p")
    assert arrows == {("p.x", "p.y"): 2, ("p.y", "p.x"): 1, ("p.y", "p.z"): 1}
    assert house.upward(arrows) == {("p.y", "p.x"): 1}
    assert house.upward({("a", "b"): 1, ("b", "c"): 1, ("a", "c"): 3}) == {}


def test_sizes() -> None:
    assert [house.quantile(range(1, 11), share) for share in (0.5, 0.9)] == [5, 9]
    assert house.function_lines(ast.parse("@d\ndef f():\n  pass\n\n  pass\n")) == {"2 f": 4}
