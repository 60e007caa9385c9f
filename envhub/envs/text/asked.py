"""The base class of environments that answer a question over several turns with a tool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from envhub.envs.base import Environment, History, Isolation, Observation, Split
from envhub.envs.text.qa import QuestionAnswer, QuestionAnswerArgs


class QuestionEnvironment(Environment):
    """One question at a time."""

    isolation: Isolation = "thread"  # its steps wait for the tool

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self._questions = QuestionAnswer(_question_args(args))
        self._shown = ""
        self._begin()

    @classmethod
    def check(cls, args: Any) -> None:
        QuestionAnswer.check(_question_args(args))

    @classmethod
    def data_files(cls, args: Any) -> list[str]:
        return QuestionAnswer.data_files(_question_args(args))

    @classmethod
    def references(cls, args: Any) -> list[tuple[str, str]]:
        return QuestionAnswer.references(_question_args(args))

    @classmethod
    def task_rows(cls, args: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
        return QuestionAnswer.task_rows(_question_args(args))

    @classmethod
    def histories(cls, args: Any) -> list[History]:
        return QuestionAnswer.histories(_question_args(args))

    @classmethod
    def count_rows(cls, args: Any, is_long: Callable[[str], bool]) -> str:
        return QuestionAnswer.count_rows(_question_args(args), is_long)

    @classmethod
    def num_tasks(cls, args: Any, split: Split) -> int | None:
        return QuestionAnswer.num_tasks(_question_args(args), split)

    @classmethod
    def is_mixed(cls, args: Any) -> bool:
        return QuestionAnswer.is_mixed(_question_args(args))

    @classmethod
    def task_parts(cls, args: Any) -> Sequence[tuple[int, float]]:
        return QuestionAnswer.task_parts(_question_args(args))

    @classmethod
    def task_keys(cls, args: Any) -> list[bytes] | None:
        return QuestionAnswer.task_keys(_question_args(args))

    @classmethod
    def row_digests(cls, args: Any) -> dict[str, list[bytes]]:
        return QuestionAnswer.row_digests(_question_args(args))

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        """Show the question; the seed has no effect, see ``qa``."""
        question = self._questions.reset(task_index, split, seed)
        self.prompt = self._questions.prompt
        self.reference = self._questions.reference
        self.row = self._questions.row
        self._begin()
        return msgspec.structs.replace(self._show(question.text), history=question.history)

    def text_frame(self) -> str:
        return self._shown

    def _begin(self) -> None:
        """Reset the state of the tool."""
        raise NotImplementedError

    def _show(self, text: str) -> Observation:
        self._shown = text
        return Observation(text)


@lru_cache(maxsize=8)
def _question_args(args: QuestionAnswerArgs) -> QuestionAnswerArgs:
    return QuestionAnswerArgs(**args.model_dump(include=set(QuestionAnswerArgs.model_fields)))
