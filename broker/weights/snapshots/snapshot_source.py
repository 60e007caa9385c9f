"""Where a server finds snapshots: a folder or a web server. Everything blocks and belongs in a
thread.
"""

from __future__ import annotations

import http.client
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from broker.errors import TransferFailed, UserError, WireError
from broker.system.connections import is_loopback
from broker.weights.digest import BucketDigest, combine
from broker.weights.group import WaitMonitor
from broker.weights.memory.staging import FlatBuffer
from broker.weights.snapshots.snapshot import MAX_MANIFEST_BYTES, NEWEST, SnapshotManifest, decode

CHUNK_BYTES: Final = 4 << 20


class _Reader(Protocol):
    def read(self, size: int, /) -> bytes: ...

    def readinto(self, buffer: Any, /) -> int: ...


class SnapshotSource:
    """A place with snapshots of one run.

    Args:
        where: a folder, or http(s)://host:port/path.
        key: bearer token for a web server; empty: none.
        timeout_s: how long to wait for a web server to continue.

    Raises:
        UserError: if the address is not valid.
    """

    def __init__(self, address: str, key: str = "", timeout_s: float = 10.0) -> None:
        self.where = address.rstrip("/") or "/"
        self._key = key
        self.timeout_s = timeout_s
        self._url = urlsplit(address) if is_url(address) else None
        if self._url is not None:
            try:
                is_valid = bool(self._url.hostname) and self._url.port != 0
            except ValueError:  # not a port
                is_valid = False
            if not is_valid or self._url.query or self._url.username:
                problem = f"snapshot {address!r} is not allowed; a folder, or http://host:port/path without user and query"
                raise UserError(problem)
            if self._url.scheme == "http" and not is_loopback(self._url.hostname or ""):
                problem = "to other hosts only https://, because http proves neither the sender nor the bytes"
                raise UserError(f"snapshot {address!r} is not allowed; {problem}")

    def newest(self) -> SnapshotManifest | None:
        """Return the newest manifest, None without one.

        Raises:
            TransferFailed: if it cannot be read.
        """
        try:
            with self._open(NEWEST) as (reader, size):
                if size > MAX_MANIFEST_BYTES:
                    raise TransferFailed(
                        f"snapshot {self._name(NEWEST)}: {size} bytes are too many"
                    )
                return decode(_all(reader, size))
        except FileNotFoundError:
            return None
        except WireError as error:
            raise TransferFailed(f"snapshot {self._name(NEWEST)}: {error}") from None

    def fill(self, manifest: SnapshotManifest, flat: FlatBuffer, watch: WaitMonitor) -> None:
        """Read a snapshot's bytes into a buffer of its plan, in host memory.

        Raises:
            TransferFailed: if they cannot be read, or their number or digest is wrong; ``flat`` is
                invalid then.
        """
        name = self._name(manifest.file)
        try:
            with self._open(manifest.file) as (reader, size):
                if size != manifest.plan.size_bytes:
                    problem = f"snapshot {name}: {size} bytes, its plan has {manifest.plan.size_bytes}; nothing was loaded"
                    raise TransferFailed(problem)
                indices = range(len(manifest.plan.buckets))
                digests = [self._bucket(reader, flat, index, name, watch) for index in indices]
        except FileNotFoundError:
            raise TransferFailed(f"snapshot {name}: the file is gone") from None
        if (digest := combine(digests)) != manifest.offer.digest:
            problem = f"snapshot {name}: digest {digest}, its offer says {manifest.offer.digest}; nothing was loaded"
            raise TransferFailed(problem)

    def _bucket(
        self, reader: _Reader, flat: FlatBuffer, index: int, name: str, watch: WaitMonitor
    ) -> bytes:
        bucket = flat.bucket(index)
        digest = BucketDigest(bucket)
        view = bucket.numpy().data
        position = 0
        while position < len(view):
            watch.beat()
            count = reader.readinto(view[position : position + CHUNK_BYTES])
            if not count:
                problem = f"snapshot {name}: it ended before bucket {index} was complete; nothing was loaded"
                raise TransferFailed(problem)
            position += count
            digest.add(position)
        return digest.finish()

    @contextmanager
    def _open(self, name: str) -> Iterator[tuple[_Reader, int]]:
        """Open a file; yield a reader and its size in bytes.

        Raises:
            FileNotFoundError: if it does not exist.
            TransferFailed: for any other error.
        """
        try:
            if self._url is None:
                with open(Path(self.where) / name, "rb", buffering=0) as file:
                    yield file, os.fstat(file.fileno()).st_size
                return
            with self._get(name) as response:
                yield response
        except FileNotFoundError:
            raise
        except (OSError, http.client.HTTPException) as error:
            problem = f"snapshot {self._name(name)}: {' '.join(str(error).split()) or type(error).__name__}"
            raise TransferFailed(problem) from None

    @contextmanager
    def _get(self, name: str) -> Iterator[tuple[_Reader, int]]:
        assert self._url is not None, "not a web server"
        kind = (
            http.client.HTTPSConnection
            if self._url.scheme == "https"
            else http.client.HTTPConnection
        )
        connection = kind(self._url.hostname or "", self._url.port, timeout=self.timeout_s)
        try:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            connection.request("GET", f"{self._url.path.rstrip('/')}/{name}", headers=headers)
            answer = connection.getresponse()
            if answer.status == http.client.NOT_FOUND:
                raise FileNotFoundError(name)
            if answer.status == http.client.UNAUTHORIZED:
                problem = "the API key is missing or wrong; set RL_API_KEY to the learner's"
                raise TransferFailed(f"snapshot {self._name(name)}: {problem}")
            if answer.status != http.client.OK or answer.length is None:
                problem = (
                    f"{answer.status} {answer.reason}"
                    if answer.status != http.client.OK
                    else "the server does not say how long it is"
                )
                raise TransferFailed(f"snapshot {self._name(name)}: {problem}")
            yield answer, answer.length
        finally:
            connection.close()

    def _name(self, file: str) -> str:
        return f"{self.where}/{file}"


def is_url(address: str) -> bool:
    """Return whether it is a web server's address."""
    return address.startswith(("http://", "https://"))


def _all(reader: _Reader, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := reader.read(size - len(data))):
        data += part
    if len(data) < size:
        raise WireError(f"{len(data)} of {size} bytes came")
    return data
