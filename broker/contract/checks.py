"""Checks that the types of ``broker.contract.wire`` cannot express: ranges, dtypes, fields that
must agree.

Ranges and names are data, so that docs/wire.md can show them. NaN and infinity are outside every
range.
"""

from __future__ import annotations

import reprlib
import struct
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from broker.contract import own_messages, wire
from broker.contract.sizes import LEAST_PART_BYTES, MAX_GROUP_BYTES, MAX_PAYLOAD_BYTES, PART_BYTES
from broker.errors import WireError

LARGEST: Final = sys.float_info.max
SHORT_BYTES: Final = 4096
# from here on min() is faster than argmin, which copies read-only memory
LONG_BYTES: Final = 256 * 1024
FEW_BYTES: Final = 64
SMALLEST: Final = 5e-324
MAX_BIAS: Final = 100  # as in OpenAI's API
MAX_GUIDE_CHARS: Final = 1 << 16  # a grammar of this size takes a second or two to compile
INT32_MAX: Final = 2**31 - 1
LOGPROB_EPS: Final = 1e-3  # log_softmax in low precision may slightly exceed 0
DEAD_LETTER_BYTES: Final = 1 << 20
MAX_SPANS: Final = 256
MAX_REQUEST_S: Final = 86_400.0  # of a request's deadline
MAX_ID_CHARS: Final = 256  # of a request or a conversation
MAX_SERVES: Final = 1024
MAX_TICKETS: Final = 32_768  # of one hub
MAX_TASKS: Final = 4096  # of a record of lengths
MAX_MEAN: Final = 1_000_000
PASS_RATE: Final = ("low", "high")
# characters of the texts of a presence
PRESENCE_CHARS: Final = {
    "host": 256, "address": 256, "channel": 64, "policy": 256, "engine": 1024, "problem": 2048,
    "process": 256,
    "said": 512, "job": 64, "voucher": 512,
}  # fmt: skip
DIFFERENCE_CHARS: Final = 512  # of the weights on offer from a server's
DIGEST_CHARS: Final = 32  # of a model's files
HEX: Final = frozenset("0123456789abcdef")
KEY_CHARS: Final = 40  # of a CURVE key in Z85
MAX_RANKS: Final = 4096  # that one rollout server brings into a transfer
Z85: Final = frozenset(
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)


class ValueRange(NamedTuple):
    """A closed interval and its text in the documentation."""

    least: float
    most: float
    text: str


FINITE: Final = ValueRange(-LARGEST, LARGEST, "finite")
NATURAL: Final = ValueRange(0, LARGEST, ">= 0")
POSITIVE: Final = ValueRange(SMALLEST, LARGEST, "> 0")
COUNT: Final = ValueRange(1, LARGEST, ">= 1")
VERSION: Final = ValueRange(0, INT32_MAX, "0 to 2^31 - 1")
OPTIONAL: Final = ValueRange(-1, INT32_MAX, "-1 to 2^31 - 1")
PORT: Final = ValueRange(0, 65535, "0 to 65535")
FRACTION: Final = ValueRange(0, 1, "0 to 1")
BODY: Final = ValueRange(1, MAX_GROUP_BYTES, "1 to 2^30")
PART: Final = ValueRange(LEAST_PART_BYTES, MAX_PAYLOAD_BYTES, "2^16 to 2^23")
OPTIONAL_FRACTION: Final = ValueRange(-1, 1, "-1 to 1")
PENALTY: Final = ValueRange(-2, 2, "-2 to 2")
SHARE: Final = ValueRange(SMALLEST, 1, "> 0 and <= 1")
REQUEST_S: Final = ValueRange(SMALLEST, MAX_REQUEST_S, "> 0 and <= 86,400")

# every int and float field, as a test checks
RANGES: Final[dict[type, dict[str, ValueRange]]] = {
    wire.Ticket: {
        "number": COUNT, "task_index": NATURAL, "seed": NATURAL, "min_version": VERSION,
        "max_staleness": NATURAL,
        "group_size": COUNT, "min_group_size": COUNT, "deadline_s": POSITIVE, "num_greedy": NATURAL,
        "num_redundant": NATURAL,
    },
    wire.EvalTicket: {
        "number": COUNT, "task_index": NATURAL, "seed": NATURAL, "eval_step": NATURAL,
        "min_version": VERSION,
        "group_size": COUNT, "temperature": NATURAL, "deadline_s": POSITIVE,
    },
    wire.Turn: {"start": NATURAL, "end": NATURAL, "reward": FINITE},
    wire.EpisodeToolCall: {},
    wire.EpisodeMessage: {"turn": OPTIONAL},
    wire.TeacherScores: {"version": VERSION},
    wire.Trajectory: {"episode": NATURAL, "reward": FINITE},
    wire.Group: {
        "ticket": COUNT, "task_index": NATURAL, "min_version": VERSION, "deliveries": COUNT,
        "eval_step": OPTIONAL,
        "generate_s": NATURAL, "env_step_s": NATURAL, "env_step_max_s": NATURAL,
        "reward_s": NATURAL,
        "temperature": NATURAL,
    },
    wire.RewardScore: {},
    wire.EpisodeScores: {"episode": NATURAL},
    wire.EpisodeScoreRequest: {
        "ticket": COUNT, "task_index": NATURAL, "episode": NATURAL, "reward": FINITE,
        "num_turns": NATURAL,
        "num_tokens": NATURAL, "eval_step": OPTIONAL,
    },
    wire.EpisodeScoreReply: {"reward": FINITE},
    wire.Closed: {"ticket": COUNT, "eval_step": OPTIONAL},
    wire.RulesChange: {"epoch": COUNT},
    wire.Parted: {"ticket": COUNT, "size": BODY, "part_bytes": PART, "eval_step": OPTIONAL},
    wire.Probe: {"tolerance": NATURAL},
    wire.Adapter: {"rank": COUNT, "scale": POSITIVE},
    wire.WeightsOffer: {"epoch": NATURAL, "version": VERSION, "size_bytes": NATURAL},
    wire.WeightsJoin: {"epoch": NATURAL, "version": VERSION},
    wire.WeightsSession: {"rank": NATURAL, "world_size": NATURAL, "port": PORT, "version": VERSION,
        "timeout_s": NATURAL},
    wire.SamplingParams: {
        "max_tokens": COUNT, "temperature": NATURAL, "top_p": SHARE, "top_k": NATURAL,
        "min_p": FRACTION,
        "seed": NATURAL, "frequency_penalty": PENALTY, "presence_penalty": PENALTY,
        "top_logprobs": NATURAL,
    },
    wire.GenerateRequest: {"min_version": VERSION, "deadline_s": REQUEST_S,
        "expected_tokens": NATURAL,
        "expected_high": NATURAL, "priority": NATURAL, "step": OPTIONAL, "prompt_top_k": NATURAL},
    wire.AbortRequest: {},
    wire.GenerateReply: {"policy_version": OPTIONAL, "prefix_hit_tokens": NATURAL},
    wire.LengthRecord: {"turns": COUNT},
    wire.Span: {"start": NATURAL, "end": NATURAL, "seconds": NATURAL, "count": NATURAL,
        "ticket": NATURAL,
        "step": OPTIONAL},
    wire.Metrics: {"time": NATURAL},
    wire.DeadLetter: {"sequence": NATURAL, "ticket": NATURAL},
    wire.Attempt: {"deaths": NATURAL},
    wire.DesiredState: {},
    wire.OperatorRequest: {"step": OPTIONAL},
    wire.OperatorReply: {"step": VERSION},
    wire.DeviceLease: {},
    wire.DeviceClaim: {"beat": NATURAL},
    wire.Presence: {
        "pid": NATURAL, "epoch": NATURAL, "policy_version": OPTIONAL, "slots": NATURAL,
        "running": NATURAL,
        "waiting": NATURAL, "speed": NATURAL, "idle_ratio": OPTIONAL_FRACTION, "base_s": NATURAL,
        "each_s": NATURAL,
        "at_once": NATURAL,
    },
    wire.OfferRefusal: {"epoch": NATURAL, "version": VERSION, "loads": NATURAL},
    wire.RunSpec: {"wire_version": NATURAL, "epoch": NATURAL, "created": NATURAL},
    wire.ModelPart: {"part": NATURAL, "num_parts": COUNT},
}  # fmt: skip

# fields that become part of a subject or a key; see ``broker.contract.streams.token``
NAMES: Final[dict[type, tuple[str, ...]]] = {
    wire.Ticket: ("domain",),
    wire.EvalTicket: ("domain",),
    wire.Group: ("domain", "pools"),
    wire.EpisodeScoreRequest: ("domain",),
    wire.Closed: ("domain",),
    wire.Parted: ("domain", "upload"),
    wire.LengthRecord: ("domain",),
    wire.Metrics: ("role", "id"),
    wire.DeadLetter: ("stream",),
    wire.Presence: ("role", "id"),
    wire.DeviceClaim: ("holder",),
    wire.RunSpec: ("run",),
    wire.ModelPart: ("digest",),
}


def check(message: wire.Message) -> None:
    """Check the rules that types cannot express.

    Raises:
        WireError: if a rule is broken; names the message, the field, the value and the rule.
    """
    try:
        for rule in _CHECKS.get(type(message), _OWN_MESSAGE_CHECKS):
            rule(message)
    # built here with a value of a wrong type
    except (TypeError, AttributeError, KeyError, RecursionError) as error:
        raise WireError(" ".join(f"{type(message).__name__}: {error}".split())) from None


def check_trajectory(trajectory: wire.Trajectory) -> None:
    """Columns have n >= 1 values each. Turns are in order, disjoint and inside. The mask is 1 in
    turns, but 0 at tokens drawn from a reshaped distribution, and 0 elsewhere. Logprobs are finite,
    at most 0.001, and 0 where the mask is 0. Token ids are >= 0. Version runs have counts >= 1 that
    add up to the sum of the mask. A teacher's logprobs keep the rules of logprobs; its top_ids and
    top_logprobs come together, with as many values for each token with mask 1. seat is empty or a
    name of 1-64 letters, digits, '_' or '-'."""
    _check_structure(trajectory)
    _check_values([trajectory])


def check_trajectories(trajectories: list[wire.Trajectory]) -> None:
    """Check every trajectory of a group in a few microseconds per 2,048 tokens.

    Spans are compared as bytes, and the values of all trajectories are checked at once: the
    overhead of a numpy call dominates.
    """
    index = 0
    try:
        for index, trajectory in enumerate(trajectories):  # noqa: B007
            _check_structure(trajectory)
        try:
            _check_values(trajectories)
        except WireError:
            for index, trajectory in enumerate(trajectories):  # noqa: B007
                _check_values([trajectory])
            raise
    except WireError as error:
        raise WireError(f"Group.trajectories[{index}]: {error}") from None


def _check_structure(trajectory: wire.Trajectory) -> None:
    """Check everything but the token ids and the logprobs of sampled tokens."""
    mask = trajectory.loss_mask
    logprobs = trajectory.logprobs
    ids = trajectory.token_ids
    n = len(mask.data)
    if mask.dtype != "|u1":
        raise _rule_error("Trajectory", "loss_mask.dtype", mask.dtype, "must be |u1")
    if n == 0:
        raise _rule_error("Trajectory", "loss_mask", "empty", "at least one token")
    if ids.dtype != "<i4" or len(ids.data) != 4 * n:
        _check_column("Trajectory", "token_ids", ids, "<i4", n)
    if logprobs.dtype != "<f4" or len(logprobs.data) != 4 * n:
        _check_column("Trajectory", "logprobs", logprobs, "<f4", n)
    sampled = _check_turns(trajectory.turns, mask.data, logprobs.data, n)
    _check_version_runs("Trajectory", trajectory.version_runs, sampled)
    if trajectory.episode < 0:
        raise _rule_error("Trajectory", "episode", trajectory.episode, NATURAL.text)
    if not -LARGEST <= trajectory.reward <= LARGEST:
        raise _rule_error("Trajectory", "reward", trajectory.reward, FINITE.text)
    _require_finite("Trajectory", "reward_parts", trajectory.reward_parts)
    if trajectory.metrics:
        _require_finite("Trajectory", "metrics", trajectory.metrics)
    _check_messages(trajectory.messages)
    if trajectory.seat and not wire.NAME.fullmatch(trajectory.seat):
        raise _rule_error(
            "Trajectory", "seat", trajectory.seat, "must be 1-64 letters, digits, '_' or '-'"
        )
    if trajectory.teacher is not None:
        _check_teacher(trajectory.teacher, mask.data, sampled)


def _check_teacher(teacher: wire.TeacherScores, mask: bytes, sampled: int) -> None:
    """Check a teacher's columns against the mask and its sum."""
    _check_numbers(teacher)
    if not teacher.policy or len(teacher.policy) > PRESENCE_CHARS["policy"]:
        most = PRESENCE_CHARS["policy"]
        raise _rule_error(
            "TeacherScores", "policy", teacher.policy, f"must have 1-{most} characters"
        )
    _check_column("TeacherScores", "logprobs", teacher.logprobs, "<f4", len(mask))
    _check_logprobs("TeacherScores", teacher.logprobs.data)
    values = np.frombuffer(teacher.logprobs.data, _F4)
    if np.any(values[np.frombuffer(mask, np.uint8) == 0] != 0):
        raise _rule_error(
            "TeacherScores", "logprobs", "another value", "must be 0 where the mask is 0"
        )
    _check_top("TeacherScores", teacher.top_ids, teacher.top_logprobs, sampled)


def _check_top(
    message: str, top_ids: wire.Column | None, top_logprobs: wire.Column | None, num_tokens: int
) -> None:
    """Check the columns of likeliest tokens: together, and as many for each of ``num_tokens``."""
    if top_ids is None and top_logprobs is None:
        return
    if top_ids is None or top_logprobs is None:
        raise _rule_error(message, "top_ids", "alone", "must come with top_logprobs")
    if num_tokens and (size := len(top_ids.data)) % (4 * num_tokens):
        raise _rule_error(
            message,
            "top_ids",
            f"of {size} bytes",
            f"must be as many for each of {num_tokens} tokens",
        )
    num_top = _check_column(message, "top_ids", top_ids, "<i4")
    _check_column(message, "top_logprobs", top_logprobs, "<f4", num_top)
    _check_token_ids(message, top_ids.data)
    _check_logprobs(message, top_logprobs.data)


def _check_messages(messages: list[wire.EpisodeMessage]) -> None:
    for message in messages:
        _check_numbers(message)
        for call in message.tool_calls:
            _require_json("EpisodeToolCall", "arguments", call.arguments)


def _check_values(trajectories: list[wire.Trajectory]) -> None:
    """Check the token ids and logprobs of trajectories whose structure is right."""
    # a copy would cost more than the calls
    if sum(len(trajectory.token_ids.data) for trajectory in trajectories) >= LONG_BYTES:
        for trajectory in trajectories:
            _check_token_ids("Trajectory", trajectory.token_ids.data)
            _check_logprobs("Trajectory", trajectory.logprobs.data)
        return
    _check_token_ids(
        "Trajectory", bytearray().join([trajectory.token_ids.data for trajectory in trajectories])
    )
    _check_logprobs(
        "Trajectory", bytearray().join([trajectory.logprobs.data for trajectory in trajectories])
    )


def _check_turns(turns: list[wire.Turn], mask: bytes, logprobs: bytes, n: int) -> int:
    """Check turns, mask, and that logprobs are 0 where it is 0; return the sum of the mask."""
    position = sampled = 0
    for turn in turns:
        start = turn.start
        end = turn.end
        if not position <= start <= end <= n:
            raise _rule_error(
                "Turn", "start, end", (start, end), f"must lie in order within {position} to {n}"
            )
        if start > position:
            _check_gap(mask, logprobs, position, start)
        num_sampled = end - start
        if not mask.startswith(b"\1" * num_sampled, start):
            num_sampled = _check_mixed(mask, logprobs, start, end)
        if not -LARGEST <= turn.reward <= LARGEST:
            raise _rule_error("Turn", "reward", turn.reward, FINITE.text)
        sampled += num_sampled
        position = end
    if position < n:
        _check_gap(mask, logprobs, position, n)
    return sampled


def _check_mixed(mask: bytes, logprobs: bytes, start: int, end: int) -> int:
    """Check a turn in which tokens with a reshaped distribution have mask and logprob 0; return the
    sum of the mask.
    """
    flags = np.frombuffer(mask, np.uint8, end - start, start)
    if np.any(flags > 1):
        raise _rule_error(
            "Trajectory", "loss_mask", "another value", f"must be 0 or 1 in the turn {start}:{end}"
        )
    if np.any(np.frombuffer(logprobs, _F4, end - start, 4 * start)[flags == 0] != 0):
        raise _rule_error(
            "Trajectory",
            "logprobs",
            "another value",
            f"must be 0 where the mask is 0, in {start}:{end}",
        )
    return int(flags.sum())


def _check_gap(mask: bytes, logprobs: bytes, start: int, end: int) -> None:
    """Check that tokens outside the turns have mask 0 and logprob 0."""
    length = end - start
    first = 4 * start
    if not mask.startswith(bytes(length), start):
        raise _rule_error(
            "Trajectory",
            "loss_mask",
            "another value",
            f"must be 0 outside the turns, in {start}:{end}",
        )
    if not logprobs.startswith(bytes(4 * length), first) and np.any(
        np.frombuffer(logprobs, _F4, length, first) != 0
    ):
        raise _rule_error(
            "Trajectory",
            "logprobs",
            "another value",
            f"must be 0 where the mask is 0, in {start}:{end}",
        )


_I4 = np.dtype("<i4")
_F4 = np.dtype("<f4")
_PAIR = struct.Struct("<2i")
_FLOAT = struct.Struct("<f")


def _check_column(
    message: str, field: str, column: wire.Column, dtype: str, n: int | None = None
) -> int:
    """Check a column's dtype and length (n values, None: any number); return its number of 4-byte
    values.
    """
    if column.dtype != dtype:
        raise _rule_error(message, f"{field}.dtype", column.dtype, f"must be {dtype}")
    size = len(column.data)
    if n is None and size % 4:
        raise _rule_error(
            message, f"{field}.data", f"{size} bytes", "must be a multiple of 4 bytes"
        )
    if n is not None and size != 4 * n:
        raise _rule_error(
            message, f"{field}.data", f"{size} bytes", f"must be {4 * n} bytes for {n} values"
        )
    return size // 4


def _check_token_ids(message: str, data: bytes | bytearray) -> None:
    """Check that no token id is negative."""
    # no sign bit is set; several times faster than numpy
    if len(data) <= SHORT_BYTES and data[3::4].isascii():
        return
    if data:
        tokens = np.frombuffer(data, _I4)
        least = int(tokens.min()) if len(data) >= LONG_BYTES else tokens.item(tokens.argmin())
        if least < 0:
            raise _rule_error(message, "token_ids", least, NATURAL.text)


def _check_logprobs(message: str, data: bytes | bytearray) -> None:
    """Check that logprobs are finite and at most LOGPROB_EPS; numpy returns NaN as minimum and
    maximum.
    """
    if len(data) <= FEW_BYTES and all(
        -LARGEST <= value <= LOGPROB_EPS for (value,) in _FLOAT.iter_unpack(data)
    ):
        return  # faster than numpy for a few values
    if data:
        values = np.frombuffer(data, _F4)
        if len(data) >= LONG_BYTES:
            least = float(values.min())
            most = float(values.max())
        else:
            least = values.item(values.argmin())
            most = values.item(values.argmax())
        if not (least >= -LARGEST and most <= LOGPROB_EPS):
            bad = most if least >= -LARGEST else least
            raise _rule_error(message, "logprobs", bad, f"must be finite and at most {LOGPROB_EPS}")


def _check_version_runs(message: str, column: wire.Column, sampled: int) -> None:
    if column.dtype != "<i4" or len(column.data) % 8:
        raise _rule_error(
            message,
            "version_runs",
            f"{len(column.data)} bytes of {column.dtype}",
            "must be pairs of <i4",
        )
    total = 0
    for version, count in _PAIR.iter_unpack(column.data):
        if version < 0 or count < 1:
            raise _rule_error(
                message, "version_runs", (version, count), "must be a version >= 0 and a count >= 1"
            )
        total += count
    if total != sampled:
        raise _rule_error(
            message, "version_runs", total, f"must count the {sampled} sampled tokens"
        )


def _check_group(group: wire.Group) -> None:
    """There is at least one trajectory, and each keeps its rules. Scores are finite. row and
    arguments of tool calls hold only what JSON can express."""
    if not group.trajectories:
        raise _rule_error("Group", "trajectories", "[]", "at least one")
    check_trajectories(group.trajectories)
    for episode_scores in group.scores:
        _check_numbers(episode_scores)
        _check_scores(episode_scores.scores)
    _require_json("Group", "row", group.row)


def _check_scores(scores: list[wire.RewardScore]) -> None:
    for score in scores:
        value = score.value
        if isinstance(value, list):
            _require_finite("RewardScore", "value", _by_turn(value))
        else:
            numbers = value if isinstance(value, dict) else {"": value}
            _require_finite("RewardScore", "value", numbers)
        _require_finite("RewardScore", "notes", score.notes)


def _check_score_request(request: wire.EpisodeScoreRequest) -> None:
    """reward_parts and metrics are finite. row and arguments of tool calls hold only what JSON can
    express."""
    _require_finite("EpisodeScoreRequest", "reward_parts", request.reward_parts)
    _require_finite("EpisodeScoreRequest", "metrics", request.metrics)
    for turn in request.turns:
        _check_numbers(turn)
    _check_messages(request.messages)
    _require_json("EpisodeScoreRequest", "row", request.row)


def _check_score_reply(reply: wire.EpisodeScoreReply) -> None:
    """Scores, reward_parts and turn_rewards are finite."""
    _check_scores(reply.scores)
    _require_finite("EpisodeScoreReply", "turn_rewards", _by_turn(reply.turn_rewards))
    _require_finite("EpisodeScoreReply", "reward_parts", reply.reward_parts)


def _check_ticket(ticket: wire.Ticket) -> None:
    """min_group_size is at most group_size minus num_redundant, and at least one episode is not
    greedy. pass_rate is empty or two numbers from 0 to 1, the lower one first."""
    size = ticket.group_size
    least = ticket.min_group_size
    if least > size:
        raise _rule_error("Ticket", "min_group_size", least, f"must be at most group_size, {size}")
    if ticket.num_greedy >= size:
        raise _rule_error(
            "Ticket", "num_greedy", ticket.num_greedy, f"must be below group_size, {size}"
        )
    if ticket.num_redundant > size - least:
        raise _rule_error(
            "Ticket", "num_redundant", ticket.num_redundant, f"must leave min_group_size, {least}"
        )
    bounds = ticket.pass_rate
    if bounds and not (len(bounds) == len(PASS_RATE) and 0 <= bounds[0] <= bounds[1] <= 1):
        raise _rule_error(
            "Ticket",
            "pass_rate",
            bounds,
            "must be empty, or two numbers from 0 to 1, the lower one first",
        )


def _check_offer(offer: wire.WeightsOffer) -> None:
    """The probe has n >= 2 token ids >= 0 and n - 1 finite logprobs of at most 0.001. An adapter
    has named targets.
    """
    if offer.adapter is not None:
        _check_numbers(offer.adapter)
        if not all(offer.adapter.targets or [""]):
            raise _rule_error(
                "Adapter", "targets", offer.adapter.targets, "at least one, none empty"
            )
    probe = offer.probe
    _check_numbers(probe)
    n = _check_column("Probe", "token_ids", probe.token_ids, "<i4")
    if n < 2:
        raise _rule_error("Probe", "token_ids", f"{n} tokens", "at least two")
    _check_column("Probe", "logprobs", probe.logprobs, "<f4", n - 1)
    _check_token_ids("Probe", probe.token_ids.data)
    _check_logprobs("Probe", probe.logprobs.data)


def _check_lease(lease: wire.DeviceLease) -> None:
    """Holders are named, and each has one claim."""
    holders = [claim.holder for claim in lease.claims]
    for claim in lease.claims:
        _check_numbers(claim)
        _check_names(claim)
    if len(set(holders)) < len(holders):
        raise _rule_error("DeviceLease", "claims", holders, "one claim of each holder")


def _check_join(join: wire.WeightsJoin) -> None:
    """key is a CURVE key in Z85: 40 characters. carriers names at least one, each with 1 to 4096
    ranks.
    """
    _check_key("WeightsJoin", join.key)
    if not join.carriers or not all(1 <= ranks <= MAX_RANKS for ranks in join.carriers.values()):
        raise _rule_error(
            "WeightsJoin",
            "carriers",
            join.carriers,
            f"must be at least one, each with 1 to {MAX_RANKS} ranks",
        )


def _check_key(kind: str, key: str) -> None:
    if len(key) != KEY_CHARS or not Z85.issuperset(key):
        raise _rule_error(kind, "key", key, f"must be a CURVE key in Z85, {KEY_CHARS} characters")


def _check_session(session: wire.WeightsSession) -> None:
    """rank is below world_size, or not below it for ipc and shared, unless error is set. key is a
    CURVE key in Z85.
    """
    _check_key("WeightsSession", session.key)
    reads = session.carrier in ("ipc", "shared")
    if not session.error and (session.rank < session.world_size) == reads:
        must = f"must {'not ' * reads}be below world_size, {session.world_size}"
        raise _rule_error("WeightsSession", "rank", session.rank, must)


def _check_request(request: wire.GenerateRequest) -> None:
    """There is a request_id and at least one token id; token ids are >= 0; stop strings are not
    empty; biases are from -100 to 100, guides have at most 2^16 characters, request_id and
    conversation_id at most 256. expected_high is 0 or at least expected_tokens."""
    sampling = request.sampling
    ids = request.token_ids
    _check_numbers(sampling)
    if sampling.stop and "" in sampling.stop:
        raise _rule_error("SamplingParams", "stop", "''", "must not be empty")
    if sampling.stop_token_ids and min(sampling.stop_token_ids) < 0:
        raise _rule_error(
            "SamplingParams", "stop_token_ids", min(sampling.stop_token_ids), NATURAL.text
        )
    if sampling.logit_bias or sampling.guides:
        _check_reshaping(sampling)
    if ids.dtype != "<i4" or not ids.data or len(ids.data) % 4:
        _check_column("GenerateRequest", "token_ids", ids, "<i4")
        raise _rule_error("GenerateRequest", "token_ids", "empty", "at least one token")
    _check_token_ids("GenerateRequest", ids.data)
    if not 0 < len(request.request_id) <= MAX_ID_CHARS:
        _check_request_id(request)
    if len(request.conversation_id) > MAX_ID_CHARS:
        raise _too_long("GenerateRequest", "conversation_id", request.conversation_id, MAX_ID_CHARS)
    if 0 < request.expected_high < request.expected_tokens:
        must = f"must be 0 or at least expected_tokens, {request.expected_tokens}"
        raise _rule_error("GenerateRequest", "expected_high", request.expected_high, must)


def _check_reshaping(sampling: wire.SamplingParams) -> None:
    rule = f"must be token ids >= 0 with numbers from -{MAX_BIAS} to {MAX_BIAS}"
    for token, bias in sampling.logit_bias.items():
        if token < 0 or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise _rule_error("SamplingParams", "logit_bias", {token: bias}, rule)
    if any(not guide.schema for guide in sampling.guides):
        raise _rule_error("Guide", "schema", "''", "must not be empty")
    size = sum(
        len(guide.schema) + len(guide.before) + len(guide.after) for guide in sampling.guides
    )
    if size > MAX_GUIDE_CHARS:
        raise _rule_error(
            "SamplingParams",
            "guides",
            f"of {size} characters",
            f"must have at most {MAX_GUIDE_CHARS}",
        )


def _check_request_id(request: wire.GenerateRequest | wire.AbortRequest) -> None:
    """There is a request_id, of at most 256 characters."""
    if not request.request_id:
        raise _rule_error(type(request).__name__, "request_id", "''", "must not be empty")
    if len(request.request_id) > MAX_ID_CHARS:
        raise _too_long(type(request).__name__, "request_id", request.request_id, MAX_ID_CHARS)


def _too_long(message: str, field: str, value: str, most: int) -> WireError:
    return _rule_error(message, field, f"{len(value)} characters", f"must have at most {most}")


def _check_presence(presence: wire.Presence) -> None:
    """host, address, policy and process have at most 256 characters, channel and job 64, engine
    1,024, problem 2,048, said, voucher and the difference of a refusal 512. serves has at most
    1,024 names, tickets at most 32,768 numbers from 1 on. key is a CURVE key in Z85 or empty."""
    for name, most in PRESENCE_CHARS.items():
        if len(value := getattr(presence, name)) > most:
            raise _too_long("Presence", name, value, most)
    if len(presence.serves) > MAX_SERVES:
        raise _rule_error(
            "Presence", "serves", f"{len(presence.serves)} names", f"must have at most {MAX_SERVES}"
        )
    for name in presence.serves:
        if not wire.NAME.fullmatch(name):
            raise _rule_error(
                "Presence", "serves", name, "must be 1-64 letters, digits, '_' or '-'"
            )
    tickets = presence.tickets or []
    if len(tickets) > MAX_TICKETS:
        raise _rule_error(
            "Presence", "tickets", f"{len(tickets)} numbers", f"must have at most {MAX_TICKETS}"
        )
    if tickets and min(tickets) < 1:
        raise _rule_error("Presence", "tickets", min(tickets), "must be >= 1")
    if presence.key:
        _check_key("Presence", presence.key)
    if (refusal := presence.refusal) is not None:
        _check_numbers(refusal)
        if len(refusal.difference) > DIFFERENCE_CHARS:
            raise _too_long("OfferRefusal", "difference", refusal.difference, DIFFERENCE_CHARS)


def _check_reply(reply: wire.GenerateReply) -> None:
    """Columns have k values each, and version runs count them. With finish_reason `error` or
    `busy`, error is set and k is 0. top_ids and top_logprobs come together, with the same number of
    values for each of k sampled tokens. prompt_logprobs are finite and at most 0.001. reshaped
    holds 0 and 1."""
    ids = reply.token_ids
    logprobs = reply.logprobs
    n = len(ids.data) // 4
    if (
        ids.dtype != "<i4"
        or logprobs.dtype != "<f4"
        or len(ids.data) % 4
        or len(logprobs.data) != 4 * n
    ):
        _check_column("GenerateReply", "token_ids", ids, "<i4")
        _check_column("GenerateReply", "logprobs", logprobs, "<f4", n)
    _check_token_ids("GenerateReply", ids.data)
    _check_logprobs("GenerateReply", logprobs.data)
    _check_version_runs("GenerateReply", reply.version_runs, n)
    if (reason := reply.finish_reason) in ("error", "busy") and (n or not reply.error):
        raise _rule_error(
            "GenerateReply",
            "finish_reason",
            reason,
            "must come with a text in `error` and without tokens",
        )
    _check_top("GenerateReply", reply.top_ids, reply.top_logprobs, n)
    if reply.prompt_logprobs is not None:
        _check_column("GenerateReply", "prompt_logprobs", reply.prompt_logprobs, "<f4")
        _check_logprobs("GenerateReply", reply.prompt_logprobs.data)
    flags = reply.reshaped
    if flags is not None and (
        flags.dtype != "|u1" or len(flags.data) != n or flags.data.strip(b"\0\1")
    ):
        raise _rule_error(
            "GenerateReply",
            "reshaped",
            "another value",
            f"must be {n} bytes of dtype |u1, each 0 or 1",
        )


def _check_metrics(metrics: wire.Metrics) -> None:
    """All values are finite. There are at most 256 spans, and none ends before it starts."""
    _require_finite("Metrics", "values", metrics.values)
    if len(metrics.spans) > MAX_SPANS:
        raise _rule_error("Metrics", "spans", f"{len(metrics.spans)} spans", f"at most {MAX_SPANS}")
    for span in metrics.spans:
        _check_numbers(span)
        if span.end < span.start:
            raise _rule_error(
                "Metrics", "spans", f"{span.start} to {span.end}", "must not end before it starts"
            )


def _check_dead_letter(letter: wire.DeadLetter) -> None:
    """data has at most 1 MiB."""
    if len(letter.data) > DEAD_LETTER_BYTES:
        raise _rule_error(
            "DeadLetter", "data", f"{len(letter.data)} bytes", f"at most {DEAD_LETTER_BYTES} bytes"
        )


def _check_run_spec(spec: wire.RunSpec) -> None:
    """config holds only what JSON can express, and finite numbers. model_files is empty or 32
    hexadecimal digits.
    """
    _require_json("RunSpec", "config", spec.config)
    if spec.model_files and not (
        len(spec.model_files) == DIGEST_CHARS and HEX.issuperset(spec.model_files)
    ):
        raise _rule_error(
            "RunSpec",
            "model_files",
            spec.model_files,
            f"must be {DIGEST_CHARS} hexadecimal digits, or empty",
        )


def _check_model_part(part: wire.ModelPart) -> None:
    """part is below num_parts. data has 1 byte to 1 MiB."""
    if part.part >= part.num_parts:
        raise _rule_error(
            "ModelPart", "part", part.part, f"must be below num_parts, {part.num_parts}"
        )
    if not 1 <= len(part.data) <= PART_BYTES:
        raise _rule_error(
            "ModelPart", "data", f"{len(part.data)} bytes", f"1 to {PART_BYTES} bytes"
        )


def _check_length_record(record: wire.LengthRecord) -> None:
    """estimator has 1 to 256 characters. tasks, counts and means have k values each, k at most
    4096. All numbers are finite, at most 10^6 from 0, counts not below 0."""
    if not 0 < len(record.estimator) <= MAX_ID_CHARS:
        raise _rule_error(
            "LengthRecord",
            "estimator",
            f"{len(record.estimator)} characters",
            f"1 to {MAX_ID_CHARS}",
        )
    num_tasks = _check_column("LengthRecord", "tasks", record.tasks, "<i4")
    if num_tasks > MAX_TASKS:
        raise _rule_error("LengthRecord", "tasks", num_tasks, f"at most {MAX_TASKS}")
    for name, least, n in (
        ("values", -MAX_MEAN, None),
        ("counts", 0, num_tasks),
        ("means", -MAX_MEAN, num_tasks),
    ):
        numbers = getattr(record, name)
        _check_column("LengthRecord", name, numbers, "<f4", n)
        values = numbers.array()
        if not np.all((values >= least) & (values <= MAX_MEAN)):  # false for NaN
            raise _rule_error(
                "LengthRecord", name, "another value", f"must be numbers from {least} to {MAX_MEAN}"
            )


def _check_rules_change(change: wire.RulesChange) -> None:
    """rules hold only what JSON can express, and finite numbers."""
    _require_json("RulesChange", "rules", change.rules)


def _require_json(message: str, field: str, value: Any) -> None:
    if (violation := _find_non_json(value)) is not None:
        path, wrong, rule = violation
        raise _rule_error(message, field + path, wrong, rule)


def _find_non_json(value: Any) -> tuple[str, Any, str] | None:
    """Return path, value and rule of the first thing that JSON cannot express, None if there is
    none.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                return "", key, "keys must be strings"
            if (violation := _find_non_json(inner)) is not None:
                return f".{reprlib.repr(key)[1:-1]}{violation[0]}", violation[1], violation[2]
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            if (violation := _find_non_json(inner)) is not None:
                return f"[{index}]{violation[0]}", violation[1], violation[2]
    elif isinstance(value, float):
        if not -LARGEST <= value <= LARGEST:
            return "", value, FINITE.text
    elif not (value is None or isinstance(value, str | int)):
        return "", value, "must be a mapping, list, text, number, boolean or null"
    return None


def _by_turn(numbers: list[float]) -> dict[str, float]:
    return {str(turn): number for turn, number in enumerate(numbers)}


def _require_finite(message: str, field: str, numbers: dict[str, float]) -> None:
    for value in numbers.values():
        if not -LARGEST <= value <= LARGEST:
            name = next(name for name, number in numbers.items() if number is value)
            raise _rule_error(message, f"{field}[{reprlib.repr(name)}]", value, FINITE.text)


def _check_numbers(message: Any) -> None:
    """Check that every number of one struct is in its range; an optional one may be None."""
    kind = type(message)
    if _IN_RANGE[kind](message):
        return
    for field, (least, most, text) in RANGES[kind].items():
        value = getattr(message, field)
        if value is not None and not least <= value <= most:
            raise _rule_error(kind.__name__, field, value, text)


def _in_range(kind: type) -> Callable[[Any], bool]:
    """Return a check of all numbers of a struct in one expression, three times faster than a loop
    over the table.
    """
    terms = []
    for field, (least, most, _) in RANGES[kind].items():
        optional = (
            f"m.{field} is None or " if kind.__annotations__[field].endswith("| None") else ""
        )
        terms.append(f"({optional}{least!r} <= m.{field} <= {most!r})")
    # built only from the table above
    check_ranges: Callable[[Any], bool] = eval(f"lambda m: {' and '.join(terms) or True}")
    return check_ranges


def _check_names(message: wire.Message | wire.DeviceClaim) -> None:
    """Check every field that becomes part of a subject."""
    for field in NAMES.get(type(message), ()):
        value: str | list[str] = getattr(message, field)
        for name in [value] if isinstance(value, str) else value:
            if not wire.NAME.fullmatch(name):
                raise _rule_error(
                    type(message).__name__, field, name, "must be 1-64 letters, digits, '_' or '-'"
                )


def _rule_error(message: str, field: str, value: object, rule: str) -> WireError:
    text = value if isinstance(value, str) and len(value) < 40 else reprlib.repr(value)
    return WireError(f"{message}.{field}: {text}; {rule}")


_IN_RANGE: Final = {kind: _in_range(kind) for kind in RANGES}

RULES: Final[dict[type, Callable[[Any], None]]] = {
    wire.Ticket: _check_ticket,
    wire.Group: _check_group,
    wire.EpisodeScoreRequest: _check_score_request,
    wire.EpisodeScoreReply: _check_score_reply,
    wire.WeightsOffer: _check_offer,
    wire.DeviceLease: _check_lease,
    wire.WeightsJoin: _check_join,
    wire.WeightsSession: _check_session,
    wire.GenerateRequest: _check_request,
    wire.AbortRequest: _check_request_id,
    wire.Presence: _check_presence,
    wire.GenerateReply: _check_reply,
    wire.Metrics: _check_metrics,
    wire.DeadLetter: _check_dead_letter,
    wire.RulesChange: _check_rules_change,
    wire.RunSpec: _check_run_spec,
    wire.ModelPart: _check_model_part,
    wire.LengthRecord: _check_length_record,
}

_CHECKS: Final[dict[type, tuple[Callable[[Any], None], ...]]] = {
    kind: (
        *((_check_numbers,) if kind in RANGES else ()),
        *((_check_names,) if kind in NAMES else ()),
        *((RULES[kind],) if kind in RULES else ()),
    )
    for kind in wire.MESSAGES
}

_OWN_MESSAGE_CHECKS: Final = (own_messages.check,)
