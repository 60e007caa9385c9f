"""Questions with reference answers of a data set, one turn each; reward hubs compare the answers.

Training shuffles all rows in every epoch, with a seed; evaluation takes its rows from a second data
set or split, or from a share at the end of the first that training never sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, Final

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from broker.errors import ConfigError
from broker.settings.config import DataPath, Harmless, Section
from envhub.envs.base import Environment, History, Observation, Split, StepResult
from envhub.envs.text.rows import QuestionColumns, QuestionRow, RowCounts, load_questions
from envhub.envs.text.training_rows import CleaningRule, Rows, TrainingRows, clean_rows
from rlearner_text.rows.sources import DataSource

SLOT = "{question}"


HARMLESS: Final = (
    "question", "answer", "answer_after", "template", "eval_share", "shuffle_seed",
    "subset", "split", "eval_split", "max_rows", "files", "deduplicate", "decontaminate",
    "overlap_words",
)  # fmt: skip


def _check_name(value: str) -> str:
    path = PurePath(value)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError("expected the name of a file below path")
    return value


class FileShare(Section):
    """A file of a mixed data set."""

    harmless = ("file", "weight")

    # its name within the folder
    file: Annotated[str, AfterValidator(_check_name)]
    # share of the tickets, in any unit
    weight: PositiveFloat = 1.0


class QuestionAnswerArgs(Section):
    """``env_args`` of ``qa``."""

    harmless: ClassVar[Harmless] = HARMLESS

    # a JSON Lines, JSON, Parquet or CSV file, a folder of them, one that datasets saved, or a name
    # on the Hugging Face hub with its commit, owner/name@commit
    path: DataPath
    subset: str | None = None  # of a data set that has several
    split: str | None = None  # null if the data set has one
    max_rows: PositiveInt | None = None  # at most this many, the first ones
    # files of the folder that path names, with their shares of the tickets; empty: all rows alike
    files: tuple[FileShare, ...] = ()
    deduplicate: bool = False  # leave out questions that an earlier row has in the same words
    # leave out training questions that stand in the rows for evaluation, or in eval_sets
    decontaminate: bool = False
    # further evaluation sets, a file or a folder of files with the same column
    eval_sets: DataPath | None = None
    # words in a row that a question has in common with one of an evaluation set to be left out
    overlap_words: Annotated[int, Field(ge=3)] = 13
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
        _training_rows.cache_clear()
        _all_training_rows.cache_clear()
        _evaluation_rows.cache_clear()
        _check_files(args)
        if args.eval_sets is not None and not args.decontaminate:
            raise ConfigError("eval_sets", args.eval_sets, "null without decontaminate")
        if has_eval_rows(args):
            try:
                _split_rows(args, "eval")
            except ConfigError as error:
                key = f"eval_{error.key}" if error.key in ("path", "split") else error.key
                raise ConfigError(key, error.value, error.allowed) from None
        if not _split_rows(args, "train"):
            if args.deduplicate or args.decontaminate:
                allowed = "other rows: all of them are left out"
                raise ConfigError("decontaminate", args.decontaminate, allowed)
            raise ConfigError(
                "eval_share", args.eval_share, "a smaller share: it leaves no row for training"
            )
        for share, part in zip(args.files, _training_rows(args).parts, strict=False):
            if not part:
                allowed = f"files with rows: {share.file} has none left for training"
                raise ConfigError("files", [share.file for share in args.files], allowed)

    @classmethod
    def data_files(cls, args: QuestionAnswerArgs) -> list[str]:
        # The commit in a name on the hub is the digest of its files.
        sources = [*_sources(args), *_further_sets(args)]
        paths = dict.fromkeys(source.path for source in sources if source.kind != "hub")
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
        if text := str(_training_rows(args)):
            parts.append(f"training: {len(_split_rows(args, 'train'))} rows, {text}")
        return "; ".join(parts)

    @classmethod
    def num_tasks(cls, args: QuestionAnswerArgs, split: Split) -> int | None:
        return len(_split_rows(args, split))

    @classmethod
    def is_mixed(cls, args: QuestionAnswerArgs) -> bool:
        return bool(args.files)

    @classmethod
    def task_parts(cls, args: QuestionAnswerArgs) -> Sequence[tuple[int, float]]:
        parts = _training_rows(args).parts
        return [(len(part), share.weight) for share, part in zip(args.files, parts, strict=False)]

    @classmethod
    def task_keys(cls, args: QuestionAnswerArgs) -> list[bytes] | None:
        rows = _split_rows(args, "train")
        return [rows[_training_place(args, task)].key for task in range(len(rows))]

    @classmethod
    def row_digests(cls, args: QuestionAnswerArgs) -> dict[str, list[bytes]]:
        digests: dict[str, list[bytes]] = {}
        for source in _sources(args):
            if source.kind != "hub":
                rows = _load_rows(args, source)[0]
                digests.setdefault(source.path, []).extend(row.key for row in rows)
        return digests

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        file = folder / "sums.jsonl"
        rows = (f'{{"question": "{n} + {n} = ?", "answer": "{2 * n}"}}\n' for n in range(20))
        file.write_text("".join(rows), encoding="utf-8")
        return {"path": str(file), "eval_share": 0.2}

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        """Show the question; not the seed but ``shuffle_seed`` orders the rows of an epoch.

        With ``files`` the learner orders them.
        """
        rows = _split_rows(self.args, split)
        if split == "train":
            row = rows[_training_place(self.args, task_index)]
        else:
            row = rows[task_index % len(rows)]
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
    """Return the data sets to train on, and the one for evaluation if there is one."""
    paths = [str(Path(args.path, share.file)) for share in args.files] or [args.path]
    sources = [
        DataSource(path, args.subset or "", args.split or "", args.max_rows) for path in paths
    ]
    if has_eval_rows(args):
        path = args.eval_path or args.path
        split = args.eval_split or ""
        sources.append(DataSource(path, args.subset or "", split, args.max_rows))
    return sources


def _load_rows(
    args: QuestionAnswerArgs, source: DataSource
) -> tuple[tuple[QuestionRow, ...], RowCounts]:
    return load_questions(source, QuestionColumns(args.question, args.answer, args.answer_after))


def _further_rows(args: QuestionAnswerArgs) -> list[QuestionRow]:
    columns = QuestionColumns(args.question, "")
    try:
        return [row for source in _further_sets(args) for row in load_questions(source, columns)[0]]
    except ConfigError as error:
        raise ConfigError("eval_sets", error.value, error.allowed) from None


def _further_sets(args: QuestionAnswerArgs) -> list[DataSource]:
    return [] if args.eval_sets is None else [DataSource(args.eval_sets)]


def _check_files(args: QuestionAnswerArgs) -> None:
    names = [share.file for share in args.files]
    if names and not Path(args.path).is_dir():
        raise ConfigError("files", names, f"[]: path {args.path} is not a folder")
    if len(set(names)) < len(names):
        raise ConfigError("files", names, f"files below {args.path}, each once")


def _split_rows(args: QuestionAnswerArgs, split: Split) -> Rows:
    return _evaluation_rows(args) if split == "eval" else _all_training_rows(args)


@lru_cache(maxsize=32)
def _evaluation_rows(args: QuestionAnswerArgs) -> Rows:
    if has_eval_rows(args):
        return _load_rows(args, _sources(args)[-1])[0]
    parts = [_load_rows(args, source)[0] for source in _sources(args)]
    return tuple(row for rows in parts for row in rows[len(rows) - _num_held_out(args, rows) :])


@lru_cache(maxsize=32)
def _training_rows(args: QuestionAnswerArgs) -> TrainingRows:
    if has_eval_rows(args):
        parts = [_load_rows(args, source)[0] for source in _sources(args)[:-1]]
    else:
        parts = [_load_rows(args, source)[0] for source in _sources(args)]
        parts = [rows[: len(rows) - _num_held_out(args, rows)] for rows in parts]
    if not (args.deduplicate or args.decontaminate):
        return TrainingRows(tuple(parts))
    evaluation_rows: list[QuestionRow] = []
    if args.decontaminate:
        evaluation_rows += _evaluation_rows(args)
        evaluation_rows += _further_rows(args)
    rule = CleaningRule(args.deduplicate, args.decontaminate, args.overlap_words)
    return clean_rows(parts, evaluation_rows, rule)


@lru_cache(maxsize=32)
def _all_training_rows(args: QuestionAnswerArgs) -> Rows:
    return _training_rows(args).rows


def _num_held_out(args: QuestionAnswerArgs, rows: Rows) -> int:
    return max(round(len(rows) * args.eval_share), int(args.eval_share > 0))


def _training_place(args: QuestionAnswerArgs, task_index: int) -> int:
    """Return the row of a training task."""
    num_rows = len(_split_rows(args, "train"))
    epoch, position = divmod(task_index, num_rows)
    if args.files:
        return position
    return int(_epoch_order(num_rows, args.shuffle_seed, epoch)[position])


@lru_cache(maxsize=4)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
