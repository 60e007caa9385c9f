"""Compares the data sets of a resumed run with those that it began with, row by row.

``runs/<name>/data.json`` holds digests of the rows of each data set, and of other data files. Tasks
are rows by their number: with other rows, or the same in another order, a resumed run would train
on other tasks than those that its ledger names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec

from broker.contract.wire import PlainSettings
from broker.errors import UserError
from broker.settings.registry import resolve
from broker.settings.run_settings import RunSettings
from broker.system.private_files import private_write
from rlearner_text.rows.columns import digest_row
from rlearner_text.rows.reading import read_rows
from rlearner_text.rows.sources import DataSource

FILE: Final = "data.json"
# Only the package with the environments reads data sets.
ROWS: Final = "envhub.task_catalogue:dataset_rows"
DIGESTS: Final = "envhub.config:data_digests"


class RowSummary(msgspec.Struct, frozen=True):
    """Rows of a data set: how many, a digest of them in order, and one in any order."""

    num_rows: int
    ordered: str
    unordered: str


class DatasetRecord(msgspec.Struct, frozen=True):
    """The data of a run.

    Attributes:
        rows: by domain, or key of offline training, and path.
        files: digests by path, of data files that are not data sets of rows.
    """

    rows: dict[str, dict[str, RowSummary]] = {}
    files: dict[str, str] = {}


def summarize_rows(digests: Sequence[bytes]) -> RowSummary:
    """Return the summary of the rows with these digests."""
    ordered, unordered = (
        blake2b(b"".join(rows), digest_size=16).hexdigest() for rows in (digests, sorted(digests))
    )
    return RowSummary(len(digests), ordered, unordered)


def describe_datasets(settings: RunSettings) -> DatasetRecord:
    """Return the record of a run's data as it is now.

    Raises:
        UserError: if it cannot be read.
    """
    by_domain: Mapping[str, Any] = resolve("rows", ROWS, {})(settings)
    rows = {
        name: {path: summarize_rows(digests) for path, digests in sets.items()}
        for name, sets in by_domain.items()
    }
    summarized = {path for sets in rows.values() for path in sets}
    files: Mapping[str, str] = resolve("digests", DIGESTS, {})(settings)
    others = {path: digest for path, digest in files.items() if path not in summarized}
    return DatasetRecord(rows, others)


def describe_sources(sources: Mapping[str, DataSource | None]) -> DatasetRecord:
    """Return the record of the data sets of offline training, by their keys.

    A data set on the hub is named with its commit, and not read.

    Raises:
        UserError: if one cannot be read.
    """
    rows = {
        key: {source.path: summarize_rows([digest_row(row) for _, row in read_rows(source, key)])}
        for key, source in sources.items()
        if source is not None and source.kind != "hub"
    }
    return DatasetRecord(rows)


def note_datasets(folder: Path, record: DatasetRecord) -> None:
    """Write the record into the run's folder."""
    private_write(folder / FILE, msgspec.json.format(msgspec.json.encode(record), indent=1))


def check_datasets(
    folder: Path, settings: RunSettings, old_config: PlainSettings, *, force: bool
) -> list[str]:
    """Return what changed in the data of a run since its last start.

    Domains whose ``env_args`` are others now are not compared.

    Args:
        old_config: of the last start.
        force: continue with other data.

    Raises:
        UserError: if the data changed; names the data set and what changed.
    """
    old = read_datasets(folder)
    if old is None:
        return []
    new = describe_datasets(settings)
    old_domains: Any = old_config.get("domains") or {}
    changes: list[str] = []
    same_domains = [
        name
        for name, domain in settings.to_plain()["domains"].items()
        if (old_domains.get(name) or {}).get("env_args") == domain["env_args"]
    ]
    for name in same_domains:
        changed = changed_rows(old.rows.get(name, {}), new.rows.get(name, {}))
        changes += [f"domains.{name}.env_args: {change}" for change in changed]
    for path, digest in old.files.items():
        if new.files.get(path, digest) != digest:
            changes.append(f"{path} changed since then")
    if changes and not force:
        advice = "restore it, choose another run.name, or give --force"
        raise UserError(f"{_problem(str(settings.run.name))}: {changes[0]}; {advice}")
    return changes


def check_sources(folder: Path, run: str, record: DatasetRecord) -> None:
    """Check that the data sets of offline training are those of the run's start.

    Raises:
        UserError: if one changed; names it and what changed.
    """
    old = read_datasets(folder)
    for key, rows in record.rows.items():
        old_rows: Mapping[str, RowSummary] = {} if old is None else old.rows.get(key, {})
        for change in changed_rows(old_rows, rows):
            advice = "restore it, or choose another run.name"
            raise UserError(f"{_problem(run)}: {key}: {change}; {advice}")


def read_datasets(folder: Path) -> DatasetRecord | None:
    """Return the record in a run's folder, None if there is none.

    Raises:
        UserError: if it cannot be read.
    """
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=DatasetRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{folder / FILE}: cannot be read: {error}") from None


def changed_rows(old: Mapping[str, RowSummary], new: Mapping[str, RowSummary]) -> list[str]:
    """Return a text for each data set that both have and that changed."""
    changes = {path: _describe_change(rows, new.get(path, rows)) for path, rows in old.items()}
    return [f"{path} {change}" for path, change in changes.items() if change]


def _problem(run: str) -> str:
    return f"the data of run {run} is not that of its start"


def _describe_change(old: RowSummary, new: RowSummary) -> str:
    """Return what changed, empty if nothing did."""
    if old.ordered == new.ordered:
        return ""
    if old.num_rows != new.num_rows:
        return f"had {old.num_rows} rows, and has {new.num_rows}"
    if old.unordered == new.unordered:
        return "has its rows in another order"
    return "has other rows"
