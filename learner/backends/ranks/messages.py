"""Commands of rank 0 and replies of the other ranks, in msgpack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from learner.algorithm.samples import Array, TrainSample
from learner.backends.parts.part_file import PartFile

# Sections of the settings as plain values, and the backend's other arguments.
BackendArguments = dict[str, Any]
_DTYPES: Final = {
    "token_ids": "<i4",
    "loss_mask": "u1",
    "rollout_logprobs": "<f4",
    "versions": "<i4",
    "advantages": "<f4",
    "proximal_logprobs": "<f4",
    "values": "<f4",
    "returns": "<f4",
    "teacher_logprobs": "<f4",
    "teacher_top_ids": "<i4",
    "teacher_top_logprobs": "<f4",
    "selected": "u1",
}


class SampleMessage(msgspec.Struct, frozen=True, array_like=True):
    """A ``TrainSample``; columns are little-endian bytes, None if missing."""

    columns: tuple[bytes | None, ...]  # in the order of _DTYPES
    group: int
    reward: float
    temperature: float


class BuildCommand(msgspec.Struct, frozen=True, tag=True):
    """The first command: build the backend and join."""

    backend: str  # "module:attribute"
    rank: int
    size: int
    store: str  # of the rendezvous: a file on one host, a name between nodes
    settings: BackendArguments
    local_rank: int = 0  # number of the rank on its host
    num_here: int = 1  # ranks on that host


class RunCommand(msgspec.Struct, frozen=True, tag=True):
    """Run forward passes, and backward passes where ``train``; the reply is ``SumsReply``."""

    slices: list[list[SampleMessage]]
    train: list[bool]
    kl_coef: float
    version: int
    seed: int  # of dropout
    critic: bool = False  # passes of the critic, all trained


class ScoreCommand(msgspec.Struct, frozen=True, tag=True):
    """Compute scores before the step; the reply is ``ColumnsReply``."""

    slices: list[list[SampleMessage]]
    energies: bool = False  # measure them, too


class StepCommand(msgspec.Struct, frozen=True, tag=True):
    """Reduce the gradient, divide, clip, update."""

    denominator: float  # for the critic, its trained tokens
    at: int  # steps completed
    steps: int  # at which the schedule of the learning rate ends
    critic: bool = False


class DiscardCommand(msgspec.Struct, frozen=True, tag=True):
    """Drop the gradient."""


class CollectiveCommand(msgspec.Struct, frozen=True, tag=True):
    """Take part in an operation that needs all ranks."""

    name: str
    numbers: list[int] = []


class OffloadCommand(msgspec.Struct, frozen=True, tag=True):
    """Move everything off the device; the reply is an empty ``SumsReply``."""

    folder: str  # for what a CPU holds


class ReloadCommand(msgspec.Struct, frozen=True, tag=True):
    """Move everything back onto the device; the reply is an empty ``SumsReply``."""


class ReleaseCommand(msgspec.Struct, frozen=True, tag=True):
    """Drop the backend and leave the group; the reply is ``DoneReply``.

    Another ``BuildCommand`` may follow.
    """


class EndCommand(msgspec.Struct, frozen=True, tag=True):
    """End this process, for the reason given if there is one."""

    code: int
    reason: str = ""


class FoldersCommand(msgspec.Struct, frozen=True, tag=True):
    """Compare model folders with rank 0's; the reply is ``FoldersReply``."""

    # by path, for each file its size and, if it is small, its digest
    folders: dict[str, dict[str, tuple[int, str]]]


class DoneReply(msgspec.Struct, frozen=True, tag=True):
    """The command was executed."""


class FoldersReply(msgspec.Struct, frozen=True, tag=True):
    """How this host's folders differ from rank 0's."""

    problem: str  # one line, empty if they do not


class CopyCommand(msgspec.Struct, frozen=True, tag=True):
    """Copy this rank's part of a checkpoint to host memory."""


class WriteCommand(msgspec.Struct, frozen=True, tag=True):
    """Write the copied part into a folder, in a thread; ``WrittenReply`` follows at any time."""

    folder: str


class DropCommand(msgspec.Struct, frozen=True, tag=True):
    """Give the memory of the copied part back."""


class VerifyCommand(msgspec.Struct, frozen=True, tag=True):
    """Verify this rank's share of a checkpoint's files; the reply is ``VerifiedReply``."""

    parts: list[PartFile]


class LoadCommand(msgspec.Struct, frozen=True, tag=True):
    """Restore the state from a checkpoint's files."""

    parts: list[PartFile]


class OpenStripesCommand(msgspec.Struct, frozen=True, tag=True):
    """Divide the weights' plan by what this rank holds; the reply is ``StripeReply``."""

    plan: str


class ServeStripesCommand(msgspec.Struct, frozen=True, tag=True):
    """Wait at the weights' rendezvous for orders to send."""

    host: str
    port: int
    key: str  # public CURVE key of the rendezvous, Z85
    public: str  # this rank's key pair there
    secret: str
    timeout_s: float
    connect_timeout_s: float

    def __repr__(self) -> str:
        # Logs must not have the secret key.
        return f"ServeStripesCommand({self.host}:{self.port})"


class SumsReply(msgspec.Struct, frozen=True, tag=True):
    """The sums of each slice."""

    slices: list[dict[str, float]]


class ColumnsReply(msgspec.Struct, frozen=True, tag=True):
    """Float32 columns over each slice's trained tokens, None if not computed."""

    slices: list[list[bytes | None]]


class VerifiedReply(msgspec.Struct, frozen=True, tag=True):
    """What is wrong with the files, empty if nothing is."""

    problem: str


class StripeReply(msgspec.Struct, frozen=True, tag=True):
    """The plan of what this rank sends."""

    plan: str


class WrittenReply(msgspec.Struct, frozen=True, tag=True):
    """The file that was written, or why none was."""

    part: PartFile | None
    errno: int = 0
    problem: str = ""


TurnCommand = OffloadCommand | ReloadCommand
PartCommand = CopyCommand | WriteCommand | DropCommand | VerifyCommand | LoadCommand
WorkCommand = (
    RunCommand | ScoreCommand | StepCommand | DiscardCommand | CollectiveCommand
    | PartCommand | TurnCommand | OpenStripesCommand | ServeStripesCommand
)  # fmt: skip
Command = WorkCommand | BuildCommand | ReleaseCommand | EndCommand | FoldersCommand
ResultsReply = SumsReply | ColumnsReply
Reply = ResultsReply | DoneReply | FoldersReply | VerifiedReply | WrittenReply | StripeReply


def results_of(reply: Reply) -> Sequence[dict[str, float]] | Sequence[list[Array | None]]:
    """Return a reply's result of each slice."""
    if isinstance(reply, SumsReply):
        return reply.slices
    if not isinstance(reply, ColumnsReply):
        raise TypeError(f"expected results, got {type(reply).__name__}")
    return [
        [None if column is None else np.frombuffer(column, "<f4") for column in columns]
        for columns in reply.slices
    ]


class FillerSample(TrainSample):
    """One token to read and none to train, for ranks with fewer slices than others."""

    @property
    def num_inputs(self) -> int:
        # The model needs an input.
        return 1


def filler_sample() -> FillerSample:
    """Return a sample whose gradient is zero."""
    ids = np.zeros(1, np.int32)
    mask = np.zeros(1, np.uint8)
    zeros = np.zeros(1, np.float32)
    return FillerSample(ids, mask, zeros, ids, zeros, group=0, reward=0.0)


def pack_sample(sample: TrainSample) -> SampleMessage:
    """Return a sample as a message."""
    columns = [(getattr(sample, name), dtype) for name, dtype in _DTYPES.items()]
    data = tuple(
        None if c is None else np.ascontiguousarray(c, dtype).tobytes() for c, dtype in columns
    )
    return SampleMessage(data, sample.group, float(sample.reward), float(sample.temperature))


def unpack_sample(sample: SampleMessage) -> TrainSample:
    """Return the sample of a message."""
    columns: dict[str, Array | None] = {
        name: None if data is None else np.frombuffer(data, dtype)
        for (name, dtype), data in zip(_DTYPES.items(), sample.columns, strict=True)
    }
    return TrainSample(
        **columns,  # type: ignore[arg-type]
        group=sample.group,
        reward=sample.reward,
        temperature=sample.temperature,
    )


def deal_slices(costs: list[int], num_ranks: int) -> list[list[int]]:
    """Return each rank's slices, ascending.

    The largest are dealt first, each to the rank with the least cost, the lowest of equal ones.
    """
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = loads.index(min(loads))
        dealt[rank].append(index)
        loads[rank] += costs[index]
    return [sorted(indices) for indices in dealt]
