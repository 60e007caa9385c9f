"""Checks whether a response follows the verifiable instructions of its task's row.

    rewards:
      - {name: instruction_following, args: {mode: loose, score: instructions}}

Zhou et al., IFEval, arXiv 2311.07911: 25 kinds of instructions, checked strictly, or loosely on
eight variants of the response. ``rewardhub.rewards.constraints`` has the kinds and the forms of
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
from pydantic import PositiveFloat

from broker.settings.config import Section
from rewardhub.bounded import BoundedFunction, TooCostly
from rewardhub.rewards.base import InvalidRowError, ResponseFault, Sample, Scored
from rewardhub.rewards.constraints.rows import Instruction, read_instructions
from rewardhub.rewards.thinking import Thinking, visible_text

MEMORY_MIB: Final = 512  # of the process that checks
LOWEST: Final = 0.0


class InstructionFollowingArgs(Section):
    """Arguments of the reward ``instruction_following``."""

    harmless = ("mode", "score", "column", "kwargs", "skip_unknown", "thinking", "cpu_s")

    # strict: the response as it is; loose: also without its first or last line, or asterisks
    mode: Literal["strict", "loose"] = "strict"
    # prompt: 1 if all instructions are followed, else 0; instructions: the share followed
    score: Literal["prompt", "instructions"] = "prompt"
    # with the ids or the ground truth; empty: instruction_id_list, ground_truth or
    # reward_model.ground_truth, the first that the row has
    column: str = ""
    kwargs: str = "kwargs"  # column with the arguments of the ids
    # leave out instructions of other kinds than the 25; else rows with such a one are refused
    skip_unknown: bool = False
    # keep: <think> counts, too; required: without </think> there is no response
    thinking: Thinking = "drop"
    cpu_s: PositiveFloat = 1.0  # CPU seconds to check one response


class CheckRequest(msgspec.Struct, frozen=True):
    """A response and the instructions that it is checked against."""

    text: str
    instructions: list[Instruction]


class InstructionVerdict(msgspec.Struct, frozen=True):
    """Whether a response follows one instruction."""

    strict: bool
    loose: bool


class InstructionFollowingReward:
    """Reward: 1 if the response follows all instructions of the row, or the share that it follows.

    Notes: ``prompt_strict``, ``prompt_loose``, ``instructions_strict`` and ``instructions_loose``,
    the figures of IFEval; ``instructions``, their number; and by the name of each kind, such as
    ``number_words``, the share followed in this ``mode``. A response on which checking takes longer
    than ``cpu_s`` gets 0, note ``too_costly``, and so does one on which a check fails, note
    ``check_failed``.
    """

    Args = InstructionFollowingArgs

    def __init__(self, args: InstructionFollowingArgs) -> None:
        self._args = args
        self._bounded = BoundedFunction(check_response, cpu_s=args.cpu_s, memory_mib=MEMORY_MIB)

    @classmethod
    def check_row(cls, args: InstructionFollowingArgs, row: Mapping[str, Any]) -> None:
        """Check that the instructions of a row can be read.

        Raises:
            InvalidRowError: if it has none, or wrong arguments; names the argument.
        """
        _read_row(args, row)

    def score(self, sample: Sample) -> Scored:
        """Return the reward of one response.

        Raises:
            ResponseFault: if checking takes too long or fails.
            InvalidRowError: if the row holds no instructions, or wrong arguments; names domain,
                task and argument.
        """
        try:
            instructions = _read_row(self._args, sample.row)
        except InvalidRowError as error:
            place = f"domain {sample.domain!r}, task {sample.task_index}"
            raise InvalidRowError(f"{place}: {error}") from None
        text = visible_text(sample.response, self._args.thinking)
        verdicts = self._ask(CheckRequest(text, instructions))
        notes = _count_verdicts(verdicts)
        for kind in {instruction.kind.name for instruction in instructions}:
            followed = [
                getattr(verdict, self._args.mode)
                for verdict, instruction in zip(verdicts, instructions, strict=True)
                if instruction.kind.name == kind
            ]
            notes[kind] = sum(followed) / len(followed)
        return Scored(notes[f"{self._args.score}_{self._args.mode}"], notes)

    def _ask(self, request: CheckRequest) -> list[InstructionVerdict]:
        try:
            reply = self._bounded(_encode_request(request))
        except TooCostly:
            raise ResponseFault("too_costly", LOWEST) from None
        if not reply:
            raise ResponseFault("check_failed", LOWEST)
        return msgspec.msgpack.decode(reply, type=list[InstructionVerdict])


def check_response(data: bytes) -> bytes:
    """Return the verdicts on a ``CheckRequest``, both encoded; nothing if a check raises.

    The arguments were checked before, so an exception is the fault of the response.
    """
    request = msgspec.msgpack.decode(data, type=CheckRequest)
    variants = loose_variants(request.text)
    try:
        verdicts = [
            InstructionVerdict(
                strict=instruction.is_followed(request.text),
                loose=any(instruction.is_followed(variant) for variant in variants),
            )
            for instruction in request.instructions
        ]
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001 - whatever a text can cause
        return b""
    return msgspec.msgpack.encode(verdicts)


def loose_variants(text: str) -> list[str]:
    """Return a response with and without its first line, its last line, and its asterisks."""
    lines = text.split("\n")
    texts = (text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])))
    return list(dict.fromkeys([*texts, *(part.replace("*", "") for part in texts)]))


def _read_row(args: InstructionFollowingArgs, row: Mapping[str, Any]) -> list[Instruction]:
    return read_instructions(row, args.column, args.kwargs, skip_unknown=args.skip_unknown)


def _encode_request(request: CheckRequest) -> bytes:
    # A lone surrogate cannot be encoded; no check tells it from a question mark.
    text = request.text.encode("utf-8", "replace").decode()
    return msgspec.msgpack.encode(msgspec.structs.replace(request, text=text))


def _count_verdicts(verdicts: list[InstructionVerdict]) -> dict[str, float]:
    notes = {"instructions": float(len(verdicts))}
    for mode in ("strict", "loose"):
        followed = [bool(getattr(verdict, mode)) for verdict in verdicts]
        notes[f"prompt_{mode}"] = float(all(followed))
        notes[f"instructions_{mode}"] = sum(followed) / len(followed)
    return notes
