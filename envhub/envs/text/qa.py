"""Questions with reference answers from a file, one turn each; reward hubs compare the answers.

Training shuffles the whole file in every epoch, with a seed; evaluation takes its rows from a
second file, or from a share at the end of the first that training never sees.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic import Field

from broker.errors import ConfigError
from broker.settings.config import DataPath, Harmless, Section
from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.envs.text.rows import Row, read_rows

SLOT = "{question}"


HARMLESS: Final = ("question", "answer", "answer_after", "template", "eval_share", "shuffle_seed")


class QuestionAnswerArgs(Section):
    """``env_args`` of ``qa``."""

    harmless: ClassVar[Harmless] = HARMLESS

    path: DataPath  # JSONL or Parquet
    question: str = "question"  # column
    answer: str = "answer"  # column
    # the reference is the text after the last occurrence of this, for example ``####``
    answer_after: str = ""
    template: str = SLOT  # the user message
    eval_path: DataPath | None = None  # a file for evaluation; None: the share below
    # of the rows of ``path``, taken from its end
    eval_share: Annotated[float, Field(ge=0, lt=1)] = 0.05
    shuffle_seed: Annotated[int, Field(ge=0)] = 0


class QuestionAnswer(Environment):
    """One question at a time."""

    Args = QuestionAnswerArgs
    isolation = "none"
    has_reward = False

    args: QuestionAnswerArgs

    @classmethod
    def check(cls, args: QuestionAnswerArgs) -> None:
        if SLOT not in args.template:
            raise ConfigError("template", args.template, f"a text with {SLOT} in it")
        # the files may have changed since the last check
        read_rows.cache_clear()
        _split_rows.cache_clear()
        if not _split_rows(args, "train"):
            raise ConfigError(
                "eval_share", args.eval_share, "a smaller share: it leaves no row for training"
            )
        if args.eval_path is not None:
            try:
                _split_rows(args, "eval")
            except ConfigError as error:
                key = "eval_path" if error.key == "path" else error.key
                raise ConfigError(key, error.value, error.allowed) from None

    @classmethod
    def data_files(cls, args: QuestionAnswerArgs) -> list[str]:
        return [args.path] if args.eval_path is None else [args.path, args.eval_path]

    @classmethod
    def references(cls, args: QuestionAnswerArgs) -> list[tuple[str, str]]:
        references = []
        for path in dict.fromkeys(cls.data_files(args)):
            rows = read_rows(path, args.question, args.answer, args.answer_after)
            references += [
                (f"{path}, row {number}", row.answer) for number, row in enumerate(rows, start=1)
            ]
        return references

    @classmethod
    def num_tasks(cls, args: QuestionAnswerArgs, split: Split) -> int | None:
        return len(_split_rows(args, split))

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        file = folder / "sums.jsonl"
        rows = (f'{{"question": "{n} + {n} = ?", "answer": "{2 * n}"}}\n' for n in range(20))
        file.write_text("".join(rows), encoding="utf-8")
        return {"path": str(file), "eval_share": 0.2}

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        """Show the question; not the seed but ``shuffle_seed`` orders the rows of an epoch."""
        rows = _split_rows(self.args, split)
        epoch, position = divmod(task_index, len(rows))
        if split == "train":
            position = int(_epoch_order(len(rows), self.args.shuffle_seed, epoch)[position])
        row = rows[position]
        self.prompt = row.question
        self.reference = row.answer
        self.row = msgspec.json.decode(row.columns)
        return Observation(self.args.template.replace(SLOT, self.prompt))

    def step(self, text: str) -> StepResult:
        return StepResult(Observation(""), reward=0.0, done=True, valid=bool(text.strip()))

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str:
        """Return the reference answer; with probability ``noise`` that of another question."""
        if rng.random() >= noise:
            return self.reference
        rows = _split_rows(self.args, "train")
        return rows[int(rng.integers(len(rows)))].answer


@lru_cache(maxsize=32)
def _split_rows(args: QuestionAnswerArgs, split: Split) -> tuple[Row, ...]:
    if split == "eval" and args.eval_path is not None:
        return read_rows(args.eval_path, args.question, args.answer, args.answer_after)
    rows = read_rows(args.path, args.question, args.answer, args.answer_after)
    if args.eval_path is not None:
        return rows
    num_held_out = max(round(len(rows) * args.eval_share), int(args.eval_share > 0))
    num_training = len(rows) - num_held_out
    return rows[num_training:] if split == "eval" else rows[:num_training]


@lru_cache(maxsize=4)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
