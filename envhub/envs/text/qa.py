"""Questions with reference answers of a data set, one turn each; reward hubs compare the answers.

Training shuffles all rows in every epoch, with a seed; evaluation takes its rows from a second data
set or split, or from a share at the end of the first that training never sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic import Field, PositiveInt

from broker.errors import ConfigError
from broker.settings.config import DataPath, Harmless, Section
from envhub.envs.base import Environment, History, Observation, Split, StepResult
from envhub.envs.text.rows import QuestionColumns, QuestionRow, RowCounts, load_questions
from rlearner_text.rows.sources import DataSource

SLOT = "{question}"


HARMLESS: Final = (
    "question", "answer", "answer_after", "template", "eval_share", "shuffle_seed",
    "subset", "split", "eval_split", "max_rows",
)  # fmt: skip


class QuestionAnswerArgs(Section):
    """``env_args`` of ``qa``."""

    harmless: ClassVar[Harmless] = HARMLESS

    # a JSON Lines, JSON, Parquet or CSV file, a folder of them, one that datasets saved, or a name
    # on the Hugging Face hub with its commit, owner/name@commit
    path: DataPath
    subset: str | None = None  # of a data set that has several
    split: str | None = None  # null if the data set has one
    max_rows: PositiveInt | None = None  # at most this many, the first ones
    # column with a text, or with messages that end with the user's; dots lead into nested columns
    question: str = "question"
    answer: str = "answer"  # column, for example reward_model.ground_truth; empty: there is none
    # the reference is the text after the last occurrence of this, for example ``####``
    answer_after: str = ""
    template: str = SLOT  # the user message
    # a data set for evaluation; None: ``eval_split`` of ``path``, or the share below
    eval_path: DataPath | None = None
    eval_split: str | None = None
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
        load_questions.cache_clear()
        _split_rows.cache_clear()
        if not _split_rows(args, "train"):
            raise ConfigError(
                "eval_share", args.eval_share, "a smaller share: it leaves no row for training"
            )
        if has_eval_rows(args):
            try:
                _split_rows(args, "eval")
            except ConfigError as error:
                key = f"eval_{error.key}" if error.key in ("path", "split") else error.key
                raise ConfigError(key, error.value, error.allowed) from None

    @classmethod
    def data_files(cls, args: QuestionAnswerArgs) -> list[str]:
        # The commit in a name on the hub is the digest of its files.
        paths = dict.fromkeys(source.path for source in _sources(args) if source.kind != "hub")
        return list(paths)

    @classmethod
    def references(cls, args: QuestionAnswerArgs) -> list[tuple[str, str]]:
        return [
            (f"{source.path}, row {number}", row.answer)
            for source in _sources(args)
            for number, row in enumerate(_load_rows(args, source)[0], start=1)
            if args.answer
        ]

    @classmethod
    def task_rows(cls, args: QuestionAnswerArgs) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for source in _sources(args):
            for number, row in enumerate(_load_rows(args, source)[0], start=1):
                yield f"{source.path}, row {number}", msgspec.json.decode(row.columns)

    @classmethod
    def histories(cls, args: QuestionAnswerArgs) -> list[History]:
        rows = (row for source in _sources(args) for row in _load_rows(args, source)[0])
        by_form = {tuple(role for role, _ in row.history): row.history for row in rows}
        return list(by_form.values())

    @classmethod
    def count_rows(cls, args: QuestionAnswerArgs, is_long: Callable[[str], bool]) -> str:
        parts = []
        for source in _sources(args):
            rows, counts = _load_rows(args, source)
            num_long = sum(is_long(args.template.replace(SLOT, row.question)) for row in rows)
            if num_long or counts.num_duplicates or counts.num_empty:
                parts.append(f"{source.path}: {counts}, {num_long} too long")
        return "; ".join(parts)

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
        return Observation(self.args.template.replace(SLOT, row.question), history=row.history)

    def step(self, text: str) -> StepResult:
        return StepResult(Observation(""), reward=0.0, done=True, valid=bool(text.strip()))

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str:
        """Return the reference answer; with probability ``noise`` that of another question."""
        if rng.random() >= noise:
            return self.reference
        rows = _split_rows(self.args, "train")
        return rows[int(rng.integers(len(rows)))].answer


def has_eval_rows(args: QuestionAnswerArgs) -> bool:
    """Return whether evaluation has a data set or split of its own."""
    return args.eval_path is not None or bool(args.eval_split)


def _sources(args: QuestionAnswerArgs) -> list[DataSource]:
    """Return the data set to train on, and the one for evaluation if there is one."""
    sources = [DataSource(args.path, args.subset or "", args.split or "", args.max_rows)]
    if has_eval_rows(args):
        path = args.eval_path or args.path
        split = args.eval_split or ""
        sources.append(DataSource(path, args.subset or "", split, args.max_rows))
    return sources


def _load_rows(
    args: QuestionAnswerArgs, source: DataSource
) -> tuple[tuple[QuestionRow, ...], RowCounts]:
    return load_questions(source, QuestionColumns(args.question, args.answer, args.answer_after))


@lru_cache(maxsize=32)
def _split_rows(args: QuestionAnswerArgs, split: Split) -> tuple[QuestionRow, ...]:
    sources = _sources(args)
    rows, _ = _load_rows(args, sources[-1] if split == "eval" else sources[0])
    if has_eval_rows(args):
        return rows
    num_held_out = max(round(len(rows) * args.eval_share), int(args.eval_share > 0))
    num_training = len(rows) - num_held_out
    return rows[num_training:] if split == "eval" else rows[:num_training]


@lru_cache(maxsize=4)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
