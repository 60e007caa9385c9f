"""Moves the streams of a store to the account that has JetStream now.

A nats-server keeps the streams of each account in a folder of its name. Before the joining roles
had accounts of their own, every identity was in the server's default account.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Final

from broker.errors import UserError
from broker.identity.accounts import ACCOUNT
from broker.system.private_files import replace

log = logging.getLogger(__name__)

DEFAULT_ACCOUNT: Final = "$G"
CLUSTER_STATE: Final = "$SYS"  # the servers of a cluster keep there which account each stream is of


def move_streams(jetstream: Path, *, is_clustered: bool) -> None:
    """Move the streams of the default account, if any; only while no nats-server uses the store.

    Raises:
        UserError: if they cannot be moved: those of a cluster, or if both accounts have streams.
        OSError: if the folder cannot be renamed.
    """
    old = jetstream / DEFAULT_ACCOUNT
    new = jetstream / ACCOUNT
    if not _has_streams(old):
        return
    if is_clustered or (jetstream / CLUSTER_STATE).is_dir():
        raise UserError(
            f"the store {jetstream.parent} is of a cluster that an older rlearner started, without accounts, and its "
            "streams cannot be moved: finish its runs with the older version, or start with empty stores and continue "
            "each run from its newest checkpoint with --rebase"
        )
    if _has_streams(new):
        raise UserError(
            f"the store {jetstream.parent} has streams of both an older and this rlearner; move {old} or {new} away"
        )
    if new.is_dir():
        shutil.rmtree(new)  # it has no streams
    replace(old, new)
    log.info("moved the streams of %s to the account %s", jetstream.parent, ACCOUNT)


def _has_streams(account: Path) -> bool:
    return any((account / "streams").glob("*"))
