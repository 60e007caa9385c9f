"""Names a data set: a file, a folder, or a name on the Hugging Face hub.

A folder is one that ``datasets`` saved (``save_to_disk``), or holds files; a word of a file's path,
such as ``test`` in ``main/test-00000-of-00001.parquet``, tells its split and its subset.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from broker.errors import ConfigError
from broker.settings.runspec import digest_file

PARQUET: Final = (".parquet", ".pq")
CSV: Final = (".csv",)
JSON: Final = (".jsonl", ".ndjson", ".json")
ENDINGS: Final = (*JSON, *PARQUET, *CSV)
# What datasets writes next to its rows, for one split and for several.
_SAVED: Final = "state.json"
_SAVED_SPLITS: Final = "dataset_dict.json"
_SPLITS: Final = ("train", "test", "validation", "valid", "dev", "eval")
_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+(@\S+)?")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")

SourceKind = Literal["file", "folder", "saved", "hub"]


@dataclass(frozen=True)
class DataSource:
    """A data set.

    Attributes:
        path: file, folder, or ``owner/name@commit`` on the hub.
        subset: of a data set that has several; empty if it has one.
        split: empty if it has one.
        max_rows: at most this many rows, the first ones; of the hub no more are fetched.
    """

    path: str
    subset: str = ""
    split: str = ""
    max_rows: int | None = None

    @property
    def kind(self) -> SourceKind:
        """What the path names; a missing file, if it names nothing."""
        if os.path.isdir(self.path):
            names = (_SAVED, _SAVED_SPLITS)
            is_saved = any(os.path.exists(os.path.join(self.path, name)) for name in names)
            return "saved" if is_saved else "folder"
        return "hub" if is_hub_name(self.path) else "file"

    @property
    def extra(self) -> str:
        """The extra of rlearner that reads it, empty if none is needed."""
        kind = self.kind
        if kind == "saved" or (kind == "hub" and "@" in self.path):
            return "datasets"
        files = list(Path(self.path).rglob("*")) if kind == "folder" else [Path(self.path)]
        return "parquet" if any(file.suffix.lower() in PARQUET for file in files) else ""

    def digest(self) -> str:
        """Return a digest of the rows: of the file or folder, or the commit on the hub.

        Raises:
            UserError: if a file cannot be read.
        """
        return self.path.partition("@")[2] if self.kind == "hub" else digest_file(self.path)

    def check(self, key: str) -> None:
        """Check that the path names a data set.

        Raises:
            ConfigError: if it does not, with this key, or is a name on the hub without a commit.
        """
        if (kind := self.kind) == "file":
            if not os.path.exists(self.path):
                raise ConfigError(key, self.path, "there is no such file")
            if not self.path.lower().endswith(ENDINGS):
                raise ConfigError(key, self.path, f"a file ending in {', '.join(ENDINGS)}")
        elif kind == "folder":
            self.list_files(key)
        elif kind == "hub" and not _COMMIT.fullmatch(self.path.partition("@")[2]):
            raise ConfigError(key, self.path, _missing_commit(self.path))

    def list_files(self, key: str = "path") -> list[str]:
        """Return the files of a folder that belong to subset and split, in order of their names.

        Raises:
            ConfigError: if there is none, or there are several splits and none is named.
        """
        root = Path(self.path)
        wanted = {word for word in (self.subset, self.split) if word}
        files: list[str] = []
        splits = set[str]()
        for file in sorted(root.rglob("*")):
            place = file.relative_to(root)
            is_hidden = any(part.startswith(".") for part in place.parts)
            if is_hidden or file.suffix.lower() not in ENDINGS:
                continue
            words = set(re.split(r"[/_.-]", str(place.with_suffix(""))))
            if all(word in words or word in place.parts for word in wanted):
                files.append(str(file))
                splits |= words.intersection(_SPLITS)
        if not files:
            place_text = " and ".join(sorted(wanted))
            suffix = f" of {place_text}" if place_text else ""
            allowed = f"a folder with files{suffix} that end in {', '.join(ENDINGS)}"
            raise ConfigError(key, self.path, allowed)
        if not self.split and len(splits) > 1:
            raise split_error(key, self.path, sorted(splits))
        return files

    def saved_folder(self, key: str) -> str:
        """Return the folder of one split among those that ``datasets`` saved.

        Raises:
            ConfigError: if there is no such split, or several and none is named.
        """
        file = Path(self.path, _SAVED_SPLITS)
        if not file.exists():
            return self.path
        names = list(json.loads(file.read_text(encoding="utf-8"))["splits"])
        split = self.split or (names[0] if len(names) == 1 else "")
        if split not in names:
            raise split_error(key, self.path, names, self.split)
        return str(Path(self.path, split))


def is_hub_name(path: str) -> bool:
    """Return whether a path that names no file may be a name on the hub."""
    is_file = path.lower().endswith(ENDINGS) or os.path.lexists(path)
    return not is_file and _HUB_NAME.fullmatch(path) is not None


def split_error(key: str, path: str, splits: list[str], split: str = "") -> ConfigError:
    """Return the error for a split that is not named, or does not exist."""
    names = ", ".join(splits)
    if split:
        return ConfigError(
            f"{key[: key.rfind('.') + 1]}split", split, f"{path} has the splits {names}"
        )
    return ConfigError(key, path, f"it has the splits {names}; name one as split")


def _missing_commit(name: str) -> str:
    repository, _, revision = name.partition("@")
    reason = "so that every process and every resume reads the same rows"
    try:
        from huggingface_hub import HfApi

        information = HfApi().dataset_info(repository, revision=revision or None, timeout=10)
    except Exception:  # noqa: BLE001 - the network; the name is refused in any case
        return f"a file or folder, or a name on the hub with its commit (owner/name@…), {reason}"
    return f"{repository}@{information.sha}: a name with its commit, {reason}"
