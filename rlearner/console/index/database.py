"""Opens an index's database, private; a damaged one is moved aside."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

from broker.system.locks import lock
from broker.system.private_files import open_private, private_folder, replace
from rlearner.console.index.schema import (
    PAGE_BYTES,
    PLAIN_TEXTS,
    SCHEMA,
    TEXT_TABLES,
    TEXTS,
    VERSION,
)

NAME: Final = "console.sqlite"
DAMAGED: Final = "console.damaged.sqlite"
BUSY_S: Final = 10.0
RESERVE_BYTES: Final = 64 * 2**20
_UNAVAILABLE: Final = (
    *(
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    ),
    *(sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_PROTOCOL),
)
_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class DatabaseDamagedError(Exception):
    """The file is not a database, or its pages contradict each other."""


class DatabaseUnavailableError(Exception):
    """The database cannot be used now: the disk is full or read-only, another process holds it, or
    it is not there.
    """


def place(folder: Path) -> Path:
    """Return the path of a run's index: in its folder, or in the user's cache if read-only."""
    own = folder / NAME
    if os.access(own, os.W_OK) if own.exists() else os.access(folder, os.W_OK):
        return own
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = blake2b(os.fsencode(folder.resolve()), digest_size=8).hexdigest()
    return base / "rlearner" / "console" / f"{folder.name}-{key}" / NAME


def open_writer(path: Path) -> sqlite3.Connection:
    """Open the database for writing, and make its tables if they are missing or of another version.

    Raises:
        DatabaseDamagedError: if it cannot be used; call ``move_aside``.
        DatabaseUnavailableError: if it cannot be written.
        UserError: if the file belongs to another user.
    """
    with explained():
        if not path.parent.is_dir():
            private_folder(path.parent)
        os.close(open_private(path, os.O_RDWR | os.O_CREAT))
        connection = sqlite3.connect(
            path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA secure_delete=OFF")
            connection.execute("PRAGMA cache_size=-16384")
            connection.execute("PRAGMA journal_size_limit=16777216")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version != VERSION:
                _create_tables(connection, version)
        except BaseException:
            connection.close()
            raise
    return connection


def open_reader(path: Path) -> sqlite3.Connection:
    """Open the database for reading.

    Raises:
        DatabaseDamagedError: if it cannot be used.
        DatabaseUnavailableError: if it does not exist yet.
    """
    with explained():
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=BUSY_S, isolation_level=None
        )
        connection.execute("PRAGMA query_only=ON")
        connection.execute("PRAGMA cache_size=-16384")
        connection.execute("PRAGMA mmap_size=268435456")
        connection.row_factory = None
    return connection


def has_fts(connection: sqlite3.Connection) -> bool:
    """Return whether texts are in full-text tables, which need FTS5."""
    row = connection.execute(
        "SELECT sql FROM sqlite_master WHERE name = ?", (TEXT_TABLES[0],)
    ).fetchone()
    return row is not None and "fts5" in row[0]


def _create_tables(connection: sqlite3.Connection, version: int) -> None:
    """Make the tables.

    Raises:
        DatabaseDamagedError: if there are those of another version.
    """
    # Another console may do the same.
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == VERSION:
            connection.execute("ROLLBACK")
            return
        if version or connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise DatabaseDamagedError(
                f"written by another version of rlearner ({version}, this one needs {VERSION})"
            )
        for statement in SCHEMA.split(";\n"):
            connection.execute(statement)
        for name in TEXT_TABLES:
            try:
                connection.execute(TEXTS.format(name=name))
            except sqlite3.OperationalError as error:
                if "fts5" not in str(error):
                    raise
                connection.execute(PLAIN_TEXTS.format(name=name))
        connection.execute(f"PRAGMA user_version={VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


@contextmanager
def explained() -> Iterator[None]:
    """Turn errors of SQLite into those above.

    Raises:
        DatabaseDamagedError: if the file is damaged.
        DatabaseUnavailableError: if it cannot be written now.
    """
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _UNAVAILABLE:
            raise DatabaseUnavailableError(_one_line(error)) from error
        if code in _DAMAGED:
            raise DatabaseDamagedError(_one_line(error)) from error
        raise
    except OSError as error:
        if error.errno in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EROFS,
            errno.EACCES,
            errno.EFBIG,
            errno.ENOENT,
            errno.EIO,
        ):
            raise DatabaseUnavailableError(error.strerror or str(error)) from error
        raise


def require_room(path: Path) -> None:
    """Check that the disk has more than ``RESERVE_BYTES`` left.

    Raises:
        DatabaseUnavailableError: if it has not.
    """
    with explained():
        usage = os.statvfs(path.parent)
    if (free := usage.f_bavail * usage.f_frsize) < RESERVE_BYTES:
        raise DatabaseUnavailableError(
            f"{free >> 20} MiB are free, it leaves {RESERVE_BYTES >> 20} MiB to the run"
        )


def identity(path: Path) -> int:
    """Return the inode of the database, 0 if there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def move_aside(path: Path, version: int) -> None:
    """Rename a damaged database, over an earlier one.

    Args:
        found: its ``identity`` before it was found damaged; another console may have moved it by
            now.
    """
    with (
        explained(),
        lock(path.with_suffix(".lock"), f"{path} is being moved aside", wait_s=BUSY_S),
    ):
        if identity(path) == version:
            replace(path, path.with_name(DAMAGED))
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
