"""Questions to answer with a search tool, as in Search-R1 (Jin et al. 2025,
arXiv:2503.09516).

``<search>words</search>``, or a tool call of that name with a ``query``, shows the best documents
within ``<information>``; ``<answer>…</answer>`` ends the episode and is scored against the
reference. The documents come from ``corpus`` by BM25, or from ``retriever``, a server in the form
of Search-R1, such as ``envhub retriever``; without its answer the episode fails and is tried again.
Set ``sampling.stop: ["</search>", "</answer>"]``, so that the model does not invent search results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from broker.errors import ConfigError
from broker.settings.config import DataPath, EndpointMark
from broker.settings.secret import SecretRef
from envhub.envs.base import Observation, StepResult
from envhub.envs.retrieval.client import RetrieverDown, retrieve
from envhub.envs.text.asked import QuestionEnvironment
from envhub.envs.text.qa import HARMLESS, QuestionAnswerArgs
from envhub.envs.tools import tool_calls
from envhub.envs.tools.corpus import Corpus, read_corpus

TOOL = "search"


class SearchArgs(QuestionAnswerArgs):
    """``env_args`` of ``search``; those of ``qa`` name the file of questions."""

    harmless = (
        *HARMLESS, "text", "title", "answer_separator", "documents", "document_chars",
        "max_searches", "score", "format_penalty", "retriever_timeout_s",
    )  # fmt: skip

    corpus: DataPath | None = None  # JSONL, one document per line; or:
    # address of a server that searches, for example http://127.0.0.1:8000
    retriever: Annotated[str, EndpointMark()] = ""
    retriever_api_key: SecretRef | None = None  # that the server asks for
    retriever_timeout_s: PositiveFloat = 10.0
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
        if (args.corpus is None) == (not args.retriever):
            raise ConfigError("corpus", args.corpus, "a file, or null with retriever; one of them")
        if args.retriever:
            _check_retriever(args)
            return
        # the file may have changed since the last check
        read_corpus.cache_clear()
        _load_corpus(args)

    @classmethod
    def data_files(cls, args: SearchArgs) -> list[str]:
        corpus = [args.corpus] if args.corpus else []
        return [*corpus, *super().data_files(args)]

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
        documents = _find_documents(self.args, content)
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
    assert args.corpus is not None
    return read_corpus(args.corpus, args.text, args.title)


def _find_documents(args: SearchArgs, query: str) -> list[str]:
    """Return the best documents, each as its title and its text, cut to ``document_chars``.

    Raises:
        RetrieverDown: without an answer of the server.
    """
    if not args.retriever:
        return _load_corpus(args).find(query, args.documents, args.document_chars)
    key = args.retriever_api_key
    api_key = key.require("retriever_api_key", args.retriever) if key else ""
    contents = retrieve(
        args.retriever, query, args.documents, timeout_s=args.retriever_timeout_s, api_key=api_key
    )
    return [shown_document(each, args.document_chars) for each in contents[: args.documents]]


def shown_document(contents: str, max_chars: int) -> str:
    """Return a document of Search-R1's form as one line: title, colon, text."""
    title, _, text = contents.partition("\n")
    text = " ".join(text.split())
    title = title.strip().strip('"')
    text = text if len(text) <= max_chars else text[: max_chars - 1] + "…"
    return f"{title}: {text}" if title else text


def _check_retriever(args: SearchArgs) -> None:
    if urlsplit(args.retriever).scheme not in ("http", "https"):
        allowed = "an address such as http://127.0.0.1:8000"
        raise ConfigError("retriever", args.retriever, allowed)
    try:
        _find_documents(args, "a first query")
    except RetrieverDown as error:
        allowed = f"the address of a running retriever: {error}"
        raise ConfigError("retriever", args.retriever, allowed) from None
