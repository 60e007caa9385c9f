"""The search tool: reading calls and answers, scoring, the corpus, an episode by hand, bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.errors import ConfigError, DataError
from envhub.envs.tools.corpus import read_corpus
from envhub.envs.tools.search_qa import SearchArgs, SearchQA
from envhub.envs.tools.tool_calls import exact, f1, parse, plain, scored


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>…</think><search> red  hats </search>", ("search", "red  hats")),
        ("<search>mayor", ("search", "mayor")),  # the server stopped at the closing tag
        ("<ANSWER>42</Answer> and <search>x</search>", ("answer", "42")),
        ("<search>x</search><information>made up</information><answer>y</answer>", ("search", "x")),
        (
            '<tool_call>\n{"name": "search", "arguments": {"query": "x y"}}\n</tool_call>',
            ("search", "x y"),
        ),
        ('<tool_call>{"name": "search", "arguments": {"query": ["x"]}}</tool_call>', None),
        ('<tool_call>{"name": "delete", "arguments": {"query": "x"}}</tool_call>', None),
        ("<tool_call>[]</tool_call>", None),
        ("<tool_call>" + "[" * 100_000, None),
        ("<tool_call>\ud800</tool_call>", None),
        ("<search> </search>", None),
        ("<searches>x</searches>", None),
        ("", None),
    ],
)
def test_the_first_call_or_answer_counts(text: str, expected: tuple[str, str] | None) -> None:
    assert parse(text, "search", "query") == expected


def test_answers_are_compared_as_in_squad() -> None:
    assert plain("The  U.S.A., an island!") == "usa island"
    assert (plain("A"), plain("+")) == ("a", "+")
    assert exact("the Beatles.", ["Rolling Stones", "beatles"]) == 1.0
    assert exact("beatles band", ["beatles"]) == exact("a", ["the"]) == exact("x", []) == 0.0
    assert f1("the red hat", ["red scarf"]) == pytest.approx(1 / 2)
    assert f1("red red hat", ["red hat", "x"]) == pytest.approx(4 / 5)
    assert f1("", ["x"]) == f1("y", ["x"]) == f1("y", []) == 0.0
    assert scored("red hat", ("hat",), "f1") == (pytest.approx(2 / 3), False)
    assert scored("Hat", ("hat",), "exact") == (1.0, True)


def world(folder: Path, **args: object) -> SearchQA:
    (folder / "corpus.jsonl").write_text(
        '{"title": "Hats", "contents": "Red hats are made\\nin Milan."}\n\n'
        '{"contents": "Scarves come from Oslo."}\n{"title": 3, "contents": "Nothing."}\n'
    )
    (folder / "questions.jsonl").write_text(
        '{"question": "Where are red hats made?", "answer": "Milan / Milano"}\n{"question": "Who?", "answer": '
        '"Nobody"}\n'
    )
    whole = {
        "corpus": str(folder / "corpus.jsonl"),
        "path": str(folder / "questions.jsonl"),
        "answer_separator": "/",
        **args,
    }
    made = SearchArgs.model_validate(whole)
    SearchQA.check(made)
    env = SearchQA(made)
    env.reset(0, "train", 0)
    return env


def test_an_episode_by_hand(tmp_path: Path) -> None:
    env = world(tmp_path, max_searches=2, documents=2, document_chars=12, format_penalty=0.25)
    assert (env.prompt, env.reference) == ("Where are red hats made?", "Milan / Milano")
    nothing = env.step("hm")
    assert (nothing.reward, nothing.done, nothing.valid) == (-0.25, False, False)
    found = env.step("<search>scarves, or red hats?</search>")
    assert (
        found.observation.text
        == "<information>\n(1) Hats: Red hats ar…\n(2) Scarves com…\n</information>"
    )
    assert (found.reward, found.valid, found.metrics) == (0.0, True, {"searches": 1.0})
    assert (
        env.step("<search>zebra</search>").observation.text
        == "<information>\nNothing was found.\n</information>"
    )
    assert (
        env.step("<search>hats</search>").observation.text
        == "<information>No more searches.</information>"
    )
    last = env.step("<answer>milano</answer>")
    assert (last.reward, last.done, last.success, last.metrics) == (
        1.0,
        True,
        True,
        {"searches": 2.0},
    )


def test_a_part_of_the_answer_counts_with_f1(tmp_path: Path) -> None:
    last = world(tmp_path, score="f1").step("<answer>in Milan</answer>")
    assert (last.reward, last.success) == (pytest.approx(2 / 3), False)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for key, value in (
        ("corpus", str(tmp_path / "none")),
        ("path", str(tmp_path / "none")),
        ("title", "contents"),
    ):
        with pytest.raises(ConfigError) as caught:
            world(tmp_path, **{key: value})
        assert caught.value.key == key
    bad = tmp_path / "bad.jsonl"
    for text, line, problem in (
        ('{"contents": "x"}\n{', 2, "not a JSON object"),
        ('\n{"text": "x"}', 2, "column 'contents' holds None, not a text; the line has text"),
        ('{"contents": 3}', 1, "column 'contents' holds 3"),
    ):
        bad.write_text(text)
        read_corpus.cache_clear()
        with pytest.raises(DataError) as problem_found:
            read_corpus(str(bad), "contents", "title")
        assert str(problem_found.value).startswith(f"{bad}:{line}: {problem}")
    bad.write_text("\n")
    with pytest.raises(ConfigError, match="holds no documents"):
        read_corpus(str(bad), "contents", "title")
