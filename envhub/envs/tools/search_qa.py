"""Questions to answer with a local search tool, as in Search-R1 (Jin et al. 2025,
arXiv:2503.09516).

``<search>words</search>``, or a tool call of that name with a ``query``, shows the best documents
by BM25 within ``<information>``; ``<answer>…</answer>`` ends the episode and is scored against the
reference. Set ``sampling.stop: ["</search>", "</answer>"]``, so that the model does not invent
search results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveInt

from broker.errors import ConfigError
from broker.settings.config import DataPath
from envhub.envs.base import Observation, StepResult
from envhub.envs.text.asked import QuestionEnvironment
from envhub.envs.text.qa import HARMLESS, QuestionAnswerArgs
from envhub.envs.tools import tool_calls
from envhub.envs.tools.corpus import Corpus, read_corpus

TOOL = "search"


class SearchArgs(QuestionAnswerArgs):
    """``env_args`` of ``search``; those of ``qa`` name the file of questions."""

    harmless = (
        *HARMLESS, "text", "title", "answer_separator", "documents", "document_chars",
        "max_searches", "score", "format_penalty",
    )  # fmt: skip

    corpus: DataPath  # JSONL, one document per line
    text: str = "contents"  # column
    title: str = "title"  # column, which may be missing
    # between several right answers in the answer column; empty: there is one
    answer_separator: str = ""
    documents: Annotated[int, Field(ge=1, le=50)] = 3  # shown after a search
    document_chars: PositiveInt = 1000  # of each; longer ones are cut
    max_searches: PositiveInt = 4  # in an episode; further ones show nothing
    score: tool_calls.Score = "exact"  # of the answer: exact match, or F1 of the words
    # taken from the reward for a turn with neither a search nor an answer
    format_penalty: NonNegativeFloat = 0.0


class SearchQA(QuestionEnvironment):
    """One question at a time."""

    Args = SearchArgs

    args: SearchArgs

    @classmethod
    def check(cls, args: SearchArgs) -> None:
        if args.text == args.title:
            raise ConfigError("title", args.title, "another column than text")
        super().check(args)
        # the file may have changed since the last check
        read_corpus.cache_clear()
        _load_corpus(args)

    @classmethod
    def data_files(cls, args: SearchArgs) -> list[str]:
        return [args.corpus, *super().data_files(args)]

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        towns = [f"Town{number}" for number in range(20)]
        corpus = folder / "corpus.jsonl"
        questions = folder / "questions.jsonl"
        documents = (
            f'{{"title": "{town}", "contents": "The mayor of {town} is Mayor{town}."}}\n'
            for town in towns
        )
        corpus.write_text("".join(documents))
        rows = (
            f'{{"question": "Who is the mayor of {town}?", "answer": "Mayor{town}"}}\n'
            for town in towns
        )
        questions.write_text("".join(rows))
        return {"corpus": str(corpus), "path": str(questions), "eval_share": 0.2}

    def _begin(self) -> None:
        self._searches = 0

    def step(self, text: str) -> StepResult:
        call = tool_calls.parse(text, TOOL, "query")
        metrics = {"searches": float(self._searches)}
        if call is None:
            hint = f"Write <{TOOL}>words</{TOOL}> or <answer>your answer</answer>."
            observation = self._show(f"Neither a search nor an answer was found. {hint}")
            return StepResult(observation, -self.args.format_penalty, False, False, metrics=metrics)
        kind, content = call
        if kind == tool_calls.ANSWER:
            reward, is_right = tool_calls.scored(content, self._references(), self.args.score)
            self._show(f"<answer>{content}</answer>")
            return StepResult(Observation(""), reward, True, True, is_right, metrics=metrics)
        if self._searches >= self.args.max_searches:
            return StepResult(
                self._show("<information>No more searches.</information>"),
                0.0,
                False,
                metrics=metrics,
            )
        self._searches += 1
        documents = _load_corpus(self.args).find(
            content, self.args.documents, self.args.document_chars
        )
        listing = (
            "\n".join(f"({rank}) {document}" for rank, document in enumerate(documents, start=1))
            or "Nothing was found."
        )
        observation = self._show(f"<information>\n{listing}\n</information>")
        return StepResult(observation, 0.0, False, metrics={"searches": float(self._searches)})

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str:
        """Search for the question, then answer; with probability ``noise`` wrongly and at once."""
        if rng.random() < noise:
            return f"<answer>{self._questions.demonstrate(rng, 1.0)}</answer>"
        if not self._searches:
            return f"<{TOOL}>{self.prompt}</{TOOL}>"
        return f"<answer>{self._references()[0]}</answer>"

    def _references(self) -> tuple[str, ...]:
        parts = [self.reference]
        if self.args.answer_separator:
            parts = self.reference.split(self.args.answer_separator)
        return tuple(part.strip() for part in parts if part.strip()) or (self.reference,)

    def _show(self, text: str) -> Observation:
        self._shown = text
        return Observation(text, anchor=f"{self.prompt}\n{text}")


def _load_corpus(args: SearchArgs) -> Corpus:
    return read_corpus(args.corpus, args.text, args.title)
