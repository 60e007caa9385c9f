"""Model folders on nodes that do not have rank 0's: compared file by file, and copied if they are missing and small."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import msgspec

from broker.errors import UserError
from broker.system.private_files import private_folder
from learner.backends.ranks.messages import BuildCommand, DoneReply, FileCommand, FoldersCommand, FoldersReply, Reply

log = logging.getLogger(__name__)

SUFFIXES: Final = {".json", ".safetensors", ".txt", ".model", ".jinja", ".py"}
STATE: Final = "learner"  # folder of a checkpoint that only rank 0 reads
SMALL_BYTES: Final = 1 << 20  # files up to this size are compared by content
MOST_BYTES: Final = 4 << 30  # of a folder that is copied
PART_BYTES: Final = 8 << 20
KEPT: Final = 4  # copies on a node

Listing = dict[str, tuple[int, str]]  # file: size, digest if it is small


def list_folder(folder: Path) -> Listing:
    """Return the files of a model folder that ranks load."""
    found: Listing = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        if file.suffix in SUFFIXES and name.parts[0] != STATE and file.is_file():
            size = file.stat().st_size
            found[str(name)] = size, sha256(file.read_bytes()).hexdigest()[:32] if size <= SMALL_BYTES else ""
    return found


def difference(rank_0: Listing, here: Listing) -> str:
    """Return how a folder differs from rank 0's, as a line; empty if it does not."""
    for name in dict.fromkeys([*rank_0, *here]):
        one, two = rank_0.get(name), here.get(name)
        if one is None or two is None:
            return f"{name} is only {'here' if one is None else 'there'}"
        if one[0] != two[0]:
            return f"{name} has {two[0]} bytes, there {one[0]}"
        if one != two:
            return f"the content of {name} differs"
    return ""


def file_commands(folder: str, listing: Listing) -> Iterator[FileCommand]:
    """Yield the commands that copy a folder."""
    for name in listing:
        with (Path(folder) / name).open("rb") as file:
            at = 0
            while (data := file.read(PART_BYTES)) or not at:
                yield FileCommand(folder, name, at, data)
                at += max(len(data), 1)


def refuse_large(folder: str, listing: Listing, node: str) -> None:
    """Refuse to copy a folder that is too large.

    Raises:
        UserError: if it is; says what to do.
    """
    size = sum(size for size, _ in listing.values())
    if size > MOST_BYTES:
        remedy = "put it on a shared file system, copy it there, or give a hub name as model.path"
        raise UserError(f"{node} has no {folder}, and {size / (1 << 30):.1f} GiB are too many to send; {remedy}")


class ModelFolders:
    """The folders of one rank's host.

    Args:
        cache: where copies are.
        name: of the node, for messages.
    """

    def __init__(self, cache: Path, name: str) -> None:
        self._cache, self._name = cache, name
        self._wanted: dict[str, Listing] = {}
        self._paths: dict[str, str] = {}  # here, by rank 0's path

    def execute(self, command: FoldersCommand | FileCommand) -> Reply:
        """Execute a command and return the reply.

        Raises:
            UserError: if a copy cannot be written.
        """
        if isinstance(command, FileCommand):
            self._store(command)
            return DoneReply()
        self._wanted, missing = command.folders, []
        for path, listing in command.folders.items():
            copy = self._copy_of(listing)
            if Path(path).is_dir():
                if differs := difference(listing, list_folder(Path(path))):
                    return FoldersReply([], f"{path} on {self._name} is not the folder of node 0: {differs}")
                self._paths[path] = path
            elif not difference(listing, list_folder(copy)):
                self._paths[path] = str(copy)
            else:
                missing.append(path)
        return FoldersReply(missing)

    def localized(self, build: BuildCommand) -> BuildCommand:
        """Return a command with the paths of this host."""
        settings = {key: self._local(value) for key, value in build.settings.items()}
        return msgspec.structs.replace(build, settings=settings)

    def _local(self, value: Any) -> Any:
        return self._paths.get(value, value) if isinstance(value, str) else value

    def _copy_of(self, listing: Listing) -> Path:
        return self._cache / sha256(msgspec.json.encode(sorted(listing.items()))).hexdigest()[:32]

    def _store(self, part: FileCommand) -> None:
        if part.name not in self._wanted.get(part.folder, {}):
            raise UserError(f"{part.folder}: rank 0 sent a file that it did not list: {part.name}")
        copy = self._copy_of(self._wanted[part.folder])
        file = (copy / part.name).resolve()
        if not file.is_relative_to(copy.resolve()):
            raise UserError(f"{part.folder}: {part.name} is outside the folder")
        try:
            if not copy.exists():
                private_folder(self._cache)
                self._tidy()
                log.info("this node has no %s; copying it from node 0 to %s", part.folder, copy)
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with file.open("wb" if part.at == 0 else "ab") as target:
                target.write(part.data)
        except OSError as error:
            remedy = "set XDG_CACHE_HOME to a folder of yours"
            raise UserError(f"cannot write {copy}: {error.strerror}; {remedy}") from None

    def _tidy(self) -> None:
        copies = sorted((one for one in self._cache.iterdir() if one.is_dir()), key=lambda one: one.stat().st_mtime)
        for old in copies[: max(0, len(copies) - KEPT + 1)]:
            shutil.rmtree(old, ignore_errors=True)


def default_cache() -> Path:
    """Return ``$XDG_CACHE_HOME/rlearner/nodes``, by default in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rlearner" / "nodes"
