"""A version of the weights as files, for servers without a learner or at another site.

    newest.json        the run, the offer with digest and probe, and the plan of the other file
    1-000020.weights   epoch 1, version 20: the flat buffer as it travels

A file has its name only once it is complete. The previous version stays until the next, for those
still reading it. Any web server can serve the folder. Nothing is pickled.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from broker.contract import codec, wire
from broker.errors import WireError
from broker.system.private_files import private_folder, private_write
from broker.weights import plan as plans
from broker.weights.plan import LayoutPlan

log = logging.getLogger(__name__)

FORMAT: Final = 1
NEWEST: Final = "newest.json"
NAME: Final = re.compile(r"\d{1,18}-\d{6,18}\.weights")
MAX_VERSIONS: Final = 2  # versions in a folder
MAX_MANIFEST_BYTES: Final = 64 << 20  # a plan takes about 100 bytes per tensor


@dataclass(frozen=True)
class SnapshotManifest:
    """Content of ``newest.json``.

    Attributes:
        offer: the learner's, with the digest.
        plan: of the bytes.
        file: name of the file with the bytes.
    """

    run: str
    offer: wire.WeightsOffer
    plan: LayoutPlan
    file: str


def encode(run: str, offer: wire.WeightsOffer, plan: LayoutPlan) -> bytes:
    """Return a manifest as JSON with a checksum."""
    body = {
        "format": FORMAT,
        "run": run,
        "epoch": offer.epoch,
        "version": offer.version,
        "size_bytes": plan.size_bytes,
        "file": file_name(offer),
        "offer": base64.b64encode(codec.encode(offer)).decode(),
        "plan": plan.text,
    }
    return json.dumps({**body, "checksum": _checksum(body)}).encode()


def decode(data: bytes) -> SnapshotManifest:
    """Return a manifest that another process wrote.

    Raises:
        WireError: if it is not a manifest, is damaged, or of another version of this program.
    """
    try:
        body = json.loads(data)
        if body.get("format") != FORMAT:
            raise WireError(f"format {body.get('format')!r}, this program reads {FORMAT}")
        checksum = body.pop("checksum", None)
        if checksum != _checksum(body):
            raise WireError("damaged: its checksum is wrong")
        offer = codec.decode(base64.b64decode(body["offer"], validate=True), wire.WeightsOffer)
        manifest = SnapshotManifest(
            str(body["run"]), offer, plans.from_text(body["plan"]), str(body["file"])
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WireError(f"it cannot be read: {' '.join(str(error).split())[:200]}") from None
    if (
        manifest.plan.digest != offer.plan
        or not offer.digest
        or NAME.fullmatch(manifest.file) is None
    ):
        raise WireError("its plan, digest or file name does not match its offer")
    return manifest


def file_name(offer: wire.WeightsOffer) -> str:
    """Return the name of the file with a version's bytes."""
    return f"{offer.epoch}-{offer.version:06d}.weights"


def write(
    folder: Path, run: str, offer: wire.WeightsOffer, plan: LayoutPlan, buffer: Tensor
) -> bool:
    """Make a version the newest of a folder, atomically: a crash leaves the old or the new one
    complete.

    Args:
        offer: with its digest.
        buffer: uint8, shape (plan.size_bytes,), in host memory.

    Returns:
        False if the folder has a newer learner's snapshot, which stays.

    Raises:
        OSError: for example without space; the previous version stays.
    """
    private_folder(folder)
    if _epoch(folder / NEWEST, run) > offer.epoch:
        return False
    private_write(folder / file_name(offer), buffer.numpy().data)
    if _epoch(folder / NEWEST, run) > offer.epoch:  # again, because writing took seconds
        return False
    private_write(folder / NEWEST, encode(run, offer, plan))
    _prune(folder, file_name(offer))
    return True


def _epoch(path: Path, run: str) -> int:
    """Return the epoch of a run's newest snapshot, -1 without one."""
    try:
        manifest = decode(path.read_bytes())
    except (FileNotFoundError, WireError):
        return -1
    return manifest.offer.epoch if manifest.run == run else -1


def _prune(folder: Path, newest: str) -> None:
    """Delete all but the newest and the most recent other snapshots, and what a killed process
    left.
    """
    older = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.name != newest]
    older.sort(key=lambda path: path.stat().st_mtime_ns)
    for path in [
        *older[: -(MAX_VERSIONS - 1)],
        *folder.glob(".*.weights.*"),
        *folder.glob(f".{NEWEST}.*"),
    ]:
        path.unlink(missing_ok=True)


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()
