"""Short messages between the two ends of a transfer, in the rendezvous store."""

from __future__ import annotations

import time
from typing import Final

from torch.distributed import Store  # type: ignore[attr-defined]

from broker.errors import TransferFailed
from broker.weights.group import WaitMonitor, first_line
from broker.weights.rendezvous.board_client import BoardClient
from broker.weights.rendezvous.board_request import SLICE_S, BoardRequest, BoardStore

STORE_POLL_S: Final = 0.0005


class StoreMessages:
    """Keys of one transfer."""

    def __init__(self, store: Store, session: str, watch: WaitMonitor) -> None:
        self._store = store
        self._session = session
        self._watch = watch

    def say(self, word: str, text: str = "") -> None:
        try:
            self._store.set(f"{self._session}/{word}", text or "ok")
        except RuntimeError as error:
            raise TransferFailed(
                f"the learner's rendezvous store is gone: {first_line(error)}"
            ) from None

    def note(self, word: str, text: str = "") -> None:
        """Say something without waiting for the learner to confirm it; a later message fails if it
        got lost.
        """
        if isinstance(self._store, BoardClient):
            self._store.post(
                BoardRequest("set", [f"{self._session}/{word}"], value=(text or "ok").encode())
            )
        else:
            self.say(word, text)

    def heard(self, word: str) -> str | None:
        """Return a message: None if it was not sent, else the reason, empty for yes."""
        return self._read(f"{self._session}/{word}", 0.0)

    def _read(self, key: str, wait_s: float) -> str | None:
        store = self._store
        try:
            if isinstance(store, BoardStore):  # one round trip, which may be 100 ms
                value = store.wait_for(key, wait_s) if wait_s else store.peek(key)
            else:
                value = store.get(key) if store.check([key]) else None
        except RuntimeError as error:
            raise TransferFailed(
                f"the learner's rendezvous store is gone: {first_line(error)}"
            ) from None
        if value is None:
            return None
        text: str = value.decode(errors="replace")  # any text is a reason
        return "" if text == "ok" else text

    def wait(self, word: str, timeout_s: float) -> str | None:
        """Wait for a message and return it as ``heard`` does; None after the timeout."""
        deadline = time.monotonic() + timeout_s
        key = f"{self._session}/{word}"
        while (left_s := deadline - time.monotonic()) > 0:
            self._watch.beat()
            if (answer := self._read(key, min(left_s, SLICE_S))) is not None:
                return answer
            if not isinstance(self._store, BoardStore):
                time.sleep(STORE_POLL_S)
        return self.heard(word)

    def forget(self, num_receivers: int, num_sizes: int, last_session: str | None) -> None:
        """Delete the keys after the transfer, except ``go``: a server whose workers receive may
        look for it only then.

        Args:
            last_session: the communicator's previous session, whose ``go`` is deleted now.
        """
        words = [
            f"{word}/{rank}"
            for word in ("held", "ready", "done", "at")
            for rank in range(1, num_receivers + 1)
        ]
        for word in [*words, *(f"size/{index}" for index in range(num_sizes)), "digest"]:
            self._store.delete_key(f"{self._session}/{word}")
        if last_session is not None:
            self._store.delete_key(f"{last_session}/go")
