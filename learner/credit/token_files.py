"""Keeps entropy and importance ratio of each trained token in ``runs/<name>/samples/tokens/``.

There is a file for each step. They accompany the archive (``samples.keep``), for ``rlearner show
--tokens`` and the console; nothing else reads them. A thread of their own writes them, so training
never waits for them, and a file that cannot be written is omitted.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from broker.errors import UserError
from broker.system.private_files import private_folder, private_write
from learner.algorithm.token_figures import StepTokens, TokenFigures

log = logging.getLogger(__name__)

FOLDER: Final = "tokens"  # below the archive's
SUFFIX: Final = ".msgpack"
_DTYPE: Final = "<f2"


class StoredFigures(msgspec.Struct, frozen=True, array_like=True):
    """``TokenFigures`` as bytes, little-endian float16."""

    entropy: bytes
    log_ratio: bytes


class StoredStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file."""

    step: int
    tickets: dict[int, list[StoredFigures]]  # for each trajectory of the ticket's group, in order


class TokenFiles:
    """Folder of the files, open for writing.

    Args:
        archive: ``runs/<name>/samples``.
        step: of the resumed ledger; files of later steps, which are repeated, are removed.
        keep_steps: newest steps whose files are kept; 0: all.
    """

    def __init__(self, archive: Path, step: int, keep_steps: int = 0) -> None:
        self._folder = archive / FOLDER
        self._keep_steps = keep_steps
        self._failed = False
        oldest = step - (keep_steps or step)
        for path in self._folder.glob(f"*{SUFFIX}"):
            if not path.stem.isdecimal() or not oldest < int(path.stem) <= step:
                path.unlink()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="token-files")

    def write(self, step: int, tokens: StepTokens) -> None:
        """Write a step's file, in the thread."""
        self._thread.submit(self._write, step, tokens)

    def flush(self) -> None:
        """Wait for all calls of ``write``."""
        wait([self._thread.submit(lambda: None)])

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, step: int, tokens: StepTokens) -> None:
        tickets = {
            ticket: [_to_stored(figures) for figures in trajectories]
            for ticket, trajectories in tokens.items()
        }
        try:
            private_folder(self._folder)
            private_write(
                file_of(self._folder.parent, step),
                msgspec.msgpack.encode(StoredStep(step, tickets)),
            )
            if self._keep_steps:
                file_of(self._folder.parent, step - self._keep_steps).unlink(missing_ok=True)
        except (OSError, UserError) as error:
            if not self._failed:
                log.warning("entropy and importance ratio per token are not kept: %s", error)
            self._failed = True


def file_of(archive: Path, step: int) -> Path:
    """Return the file of a step."""
    return archive / FOLDER / f"{step:09d}{SUFFIX}"


def read_figures(archive: Path, step: int, ticket: int) -> list[TokenFigures]:
    """Return the figures of a ticket's trajectories, in order.

    Args:
        step: that trained the ticket, 0 if none has.

    Raises:
        UserError: if they are not there, or the file is damaged.
    """
    if not step:
        raise UserError("not recorded: no step has trained it")
    path = file_of(archive, step)
    try:
        content = msgspec.msgpack.decode(path.read_bytes(), type=StoredStep)
        figures = [_from_stored(stored) for stored in content.tickets[ticket]]
    except FileNotFoundError:
        raise UserError(f"not recorded for step {step} (samples.keep, with one rank)") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except KeyError:
        raise UserError(f"not recorded: step {step} did not train ticket {ticket}") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    return figures


def _to_stored(figures: TokenFigures) -> StoredFigures:
    return StoredFigures(
        figures.entropy.astype(_DTYPE).tobytes(), figures.log_ratio.astype(_DTYPE).tobytes()
    )


def _from_stored(stored: StoredFigures) -> TokenFigures:
    figures = TokenFigures(
        np.frombuffer(stored.entropy, _DTYPE), np.frombuffer(stored.log_ratio, _DTYPE)
    )
    if figures.entropy.shape != figures.log_ratio.shape:
        raise ValueError(f"{len(figures.entropy)} entropies and {len(figures.log_ratio)} ratios")
    return figures
