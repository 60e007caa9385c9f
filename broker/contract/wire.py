"""The messages between processes, as typed ``msgspec`` structs.

``broker.contract.codec`` encodes and decodes them as MessagePack maps, whose field ``type`` holds
the message's name. Unknown fields are refused, sizes are checked before decoding, and
``broker.contract.checks`` checks what types cannot express (NaN, ranges, lengths that disagree),
before encoding and after decoding. Nothing is ever pickled.

Per-token data is sent as columns, raw little-endian bytes with a dtype: 1-2 microseconds for a
trajectory of 2,048 tokens, where lists take 26-158. Each field's comment is its meaning and unit;
``docs/wire.md`` is generated from them.
"""

from __future__ import annotations

import re
import sys
from array import array
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from broker.contract import sizes
from broker.contract.sizes import MAX_GROUP_BYTES, MAX_SMALL_BYTES

WIRE_VERSION: Final = 19
MAX_PAYLOAD_BYTES: Final = sizes.MAX_PAYLOAD_BYTES
ACTOR: Final = "actor"  # the policy being trained
EVAL_HEADER: Final = "Rl-Eval-Step"  # eval_step of messages of an evaluation; absent in training
# ticket number, so that a body that does not decode still closes its ticket
TICKET_HEADER: Final = "Rl-Ticket"
NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")  # parts of subjects and keys

Dtype = Literal["<i4", "<f4", "|u1"]
# how weights travel: see broker.weights.carriers
Carrier = Literal["ipc", "shared", "nccl", "gloo", "curve"]
RefusalKind = Literal["layout", "base", "logprobs"]
Array = npt.NDArray[Any]
# Checked settings as JSON values, as messages and a run's folder hold them.
PlainSettings = dict[str, Any]
_NATIVE: Final = {"<i4": "i", "<f4": "f", "|u1": "B"}
_TYPECODES: Final[dict[str, str]] = _NATIVE if sys.byteorder == "little" else {}


class Message(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag=True,
    tag_field="type",
):
    """Base of every message; the subclass's name is the value of the field ``type``."""


class Column(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One array of per-token values."""

    dtype: Dtype  # numpy dtype string, little-endian
    data: bytes  # the array's bytes, C order

    def array(self) -> Array:
        """Return the values as a read-only numpy array of shape (n,), without a copy."""
        return np.frombuffer(self.data, dtype=self.dtype)


def growable_array(column: Column) -> array[Any]:
    """Return the values of a column as a growable array; for short columns several times faster
    than numpy.
    """
    if column.dtype not in _TYPECODES:
        return array(_NATIVE[column.dtype], column.array().tolist())
    values: array[Any] = array(_TYPECODES[column.dtype])
    values.frombytes(column.data)
    return values


def column(values: Any, dtype: Dtype) -> Column:
    """Pack a sequence or array of shape (n,) into a column."""
    # 13 times faster than numpy
    if type(values) is array and values.typecode == _TYPECODES.get(dtype):
        return Column(dtype, values.tobytes())
    if type(values) is bytearray and dtype == "|u1":
        return Column(dtype, bytes(values))
    return Column(dtype, np.ascontiguousarray(values, dtype=dtype).tobytes())


# --------------------------------------------------------------------------------------------------
# credit


class Ticket(Message, frozen=True, tag="Ticket"):
    """Permission to start one group; its number is its sequence in the tickets stream."""

    number: int  # 1, 2, 3, … within the run
    domain: str  # domain whose environment to run
    task_index: int  # position in the domain's sequence of tasks, from 0
    seed: int  # seeds environment and sampling; a pure function of run seed, domain and task_index
    min_version: int  # oldest policy version that may sample a token
    max_staleness: int  # versions that a token may lag behind the version being trained
    group_size: int  # episodes in the group
    min_group_size: int  # episodes that suffice after the deadline
    deadline_s: float  # seconds in one hub until the group closes with the episodes it has
    # the last num_greedy episodes are sampled at temperature 0 as a baseline, never trained on
    num_greedy: int = 0
    # spare episodes: when all but this many have finished, the rest are aborted
    num_redundant: int = 0
    # if set: a hub may close a group whose share of successes cannot end within
    pass_rate: list[float] = []


class EvalTicket(Message, frozen=True, tag="EvalTicket"):
    """Requests a group that is measured, never trained on; it has no credit and no ledger state."""

    number: int  # 1, 2, 3, … within the run
    domain: str  # domain whose environment to run
    task_index: int  # index of the held-out task, from 0
    seed: int  # the same for a task in every evaluation
    eval_step: int  # the optimizer step after which the evaluation was requested
    policy: str  # which rollout servers may answer: `actor`, or a baseline such as `random`
    min_version: int  # oldest policy version that may answer
    group_size: int  # episodes in the group
    temperature: float  # sampling temperature, 0 is greedy
    deadline_s: float  # seconds in one hub until the group closes


# --------------------------------------------------------------------------------------------------
# samples

SpanKind = Literal[
    "generate", "env_step", "reward", "train", "weights", "evaluate", "checkpoint", "wait"
]
FinishReason = Literal["stop", "length", "abort", "deadline", "error", "busy"]
MessageRole = Literal["system", "user", "assistant", "tool"]
EpisodeEnd = Literal["terminated", "truncated", "timeout", "length"]
ClosedReason = Literal[
    "late", "deadline", "env_error", "reward_error", "too_large", "malformed", "timeout",
    "too_many_deliveries",
    "poisonous", "aborted", "lost", "filtered",
]  # fmt: skip


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One span of sampled tokens and the environment's reaction to it."""

    start: int  # first sampled token, as an index into the trajectory
    end: int  # one past the last sampled token
    reward: float  # reward from the environment for this turn
    valid: bool  # whether the text parsed to an action of the environment
    finish_reason: FinishReason  # why generation of this turn ended
    server: str  # id of the rollout server that sampled it
    anchor: str = ""  # the observation acted on, the same for equal states (step groups of GiGPO)


class EpisodeToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call of a function in a message of the policy."""

    name: str  # of the function
    arguments: dict[str, Any]  # JSON values by name


class EpisodeMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of an episode's conversation, as text."""

    role: MessageRole  # tool: what tools answered
    content: str  # with its markup of tool calls, if the policy sampled it
    tool_calls: list[EpisodeToolCall] = []  # that the environment read in it
    turn: int = -1  # the turn of the episode that sampled it, from 0; -1: none did

    def plain(self) -> dict[str, Any]:
        """Return the message in the form of chat templates."""
        plain: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            plain["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return plain


class TeacherScores(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False
):
    """What a teacher says about the tokens that the policy sampled."""

    policy: str  # name of the teacher
    version: int  # policy version of the servers that scored it, 0 unless they follow the learner
    # <f4, shape (n,): natural log of the teacher's probability at temperature 1; 0 where the mask
    # is 0
    logprobs: Column
    # <i4, shape (k T,): the teacher's k likeliest tokens at each of T tokens with mask 1; null:
    # not asked for
    top_ids: Column | None = None
    top_logprobs: Column | None = None  # <f4, shape (k T,): of top_ids, in descending order


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One training sequence: all tokens of a conversation, in the order in which the policy read
    and sampled them.
    """

    # index of the episode in the group, from 0; samples of one episode's turns share it. If the
    # policy plays k seats of an episode, these are k episodes here: k * episode + seat's number
    episode: int
    token_ids: Column  # <i4, shape (n,): prompt, sampled and environment tokens
    loss_mask: Column  # |u1, shape (n,): 1 where the token was sampled by the policy
    # <f4, shape (n,): natural log of the sampling probability; 0 where the mask is 0
    logprobs: Column
    # <i4, shape (2k,): pairs (policy_version, number of sampled tokens), in token order
    version_runs: Column
    turns: list[Turn]  # spans of sampled tokens, in order
    reward: float  # total reward so far; reward hubs add their parts
    reward_parts: dict[str, float]  # value of each reward by name; its notes as name/note
    success: bool  # whether the task was solved, as the environment or the reward defines it
    end: EpisodeEnd  # why the episode ended
    response: str = ""  # text of the last sampled turn, for rewards that read text
    metrics: dict[str, float] = {}  # numbers from the environment, averaged into env/<name>
    greedy: bool = False  # sampled at temperature 0 as a baseline, never trained on
    # the conversation, on its last trajectory or in parts on each, for rewards that may read it;
    # removed with the last score
    messages: list[EpisodeMessage] = []
    teacher: TeacherScores | None = None  # null: no teacher has scored it
    seat: str = ""  # whose part of the episode it is, empty in environments without seats


class RewardScore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One reward's score of one episode."""

    reward: str  # the reward's name, as in reward_parts
    # a number, one of each part, or one of each turn of the episode; they add up
    value: float | dict[str, float] | list[float]
    notes: dict[str, float] = {}  # numbers that are shown and not part of the reward, by name


class EpisodeScores(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False
):
    """Scores that an episode got before its group was complete."""

    episode: int  # index of the episode in the group
    # digest of the domain's rewards that gave them; with other rewards they are not used
    rewards: str
    scores: list[RewardScore]  # of the rewards of the pools that have scored it


class Group(Message, frozen=True, tag="Group"):
    """The finished episodes of one ticket, completely scored when `pools` is empty."""

    ticket: int  # the ticket's number
    domain: str  # the ticket's domain
    task_index: int  # the ticket's task
    min_version: int  # the ticket's min_version
    hub: str  # id of the environment hub that ran it
    deliveries: int  # how often the ticket was delivered to any hub, from 1
    pools: list[str]  # reward pools still to visit, in order
    trajectories: list[Trajectory]  # at least one
    prompt: str = ""  # the question as text, for rewards that read text
    reference: str = ""  # the reference answer, for rewards that compare with one
    eval_step: int = -1  # of the EvalTicket, -1 for training
    policy: str = ACTOR  # the acting policy: `actor` or a baseline
    generate_s: float = 0.0  # seconds spent waiting for generation, mean over episodes
    env_step_s: float = 0.0  # seconds spent in the environment, mean over episodes
    env_step_max_s: float = 0.0  # of the episode that spent most
    reward_s: float = 0.0  # seconds spent in reward hubs
    reward_hubs: list[str] = []  # ids of the reward hubs that scored it, in order
    frames: list[str] = []  # text frames of episode 0, for replays; evaluation only
    temperature: float = 1.0  # sampling temperature of the trained tokens
    # not yet part of the rewards; the pools compute those that are missing
    scores: list[EpisodeScores] = []
    # the task's row in its data set, JSON values by column, for rewards that may read it; removed
    # with the last score
    row: dict[str, Any] = {}


class EpisodeScoreRequest(Message, frozen=True, tag="EpisodeScoreRequest"):
    """Asks an idle reward hub for the scores of one pool for an episode whose group is not complete
    yet.
    """

    ticket: int  # the ticket's number
    domain: str  # the ticket's domain
    task_index: int  # the ticket's task
    episode: int  # index of the episode in the group
    prompt: str  # the group's
    reference: str  # the group's
    response: str  # as in the episode's last trajectory, like the following
    reward: float  # total reward so far, with the scores of earlier pools
    reward_parts: dict[str, float]  # value of each reward so far
    success: bool  # whether the task was solved, as far as known
    end: EpisodeEnd  # why the episode ended
    metrics: dict[str, float]  # numbers from the environment
    num_turns: int  # turns of the episode
    num_tokens: int  # tokens in them
    eval_step: int = -1  # of the EvalTicket, -1 for training
    turns: list[Turn] = []  # of the episode, without anchors, if rewards may read them
    messages: list[EpisodeMessage] = []  # of all the episode's trajectories
    row: dict[str, Any] = {}  # the group's


class EpisodeScoreReply(Message, frozen=True, tag="EpisodeScoreReply"):
    """The scores, and the episode's reward with them; missing scores are left to the group."""

    rewards: str = ""  # digest of the domain's rewards
    scores: list[RewardScore] = []  # of the pool's rewards
    reward: float = 0.0  # total reward so far
    reward_parts: dict[str, float] = {}  # value of each reward so far
    success: bool = False  # whether the task was solved, as far as known
    busy: bool = False  # nothing was tried: ask again later, while the group is not complete
    # rewards of the pool failed: neither reward nor success is known, later pools are not asked
    partial: bool = False
    turn_rewards: list[float] = []  # of the request's turns, with the scores per turn


class Closed(Message, frozen=True, tag="Closed"):
    """Ends a ticket without a group."""

    ticket: int  # the ticket's number
    domain: str  # the ticket's domain
    reason: ClosedReason  # `late` counts as dropped, `filtered` as such, all others as dead
    detail: str  # one line for the operator
    by: str  # id of the process that gave up
    eval_step: int = -1  # of the EvalTicket, -1 for training


class RulesChange(Message, frozen=True, tag="RulesChange"):
    """The learner's rules from this record on; it appends one each time it starts or takes over the
    run.
    """

    epoch: int  # incarnation of the learner that appended it
    # steps, groups_per_step, max_staleness, domains …; see learner/credit/ticket_rules.py
    rules: dict[str, Any]


class Parted(Message, frozen=True, tag="Parted"):
    """Refers to a Group whose encoding is too large for one message; its parts, concatenated, are
    the encoding.

    Part i is at `rl.{run}.parts.{kind}.{ticket}.{upload}.{i}`, from 0, kind `t` for training and
    `e` for an evaluation.
    """

    ticket: int  # the group's ticket
    domain: str  # the group's domain
    upload: str  # id of this upload, unique per attempt to publish a group
    size: int  # bytes of the encoding
    part_bytes: int  # bytes of each part but the last, which has the rest
    digest: str  # of the encoding: the first 16 bytes of its SHA-256, as hex
    eval_step: int = -1  # the group's eval_step

    @property
    def num_parts(self) -> int:
        """The number of parts."""
        return -(-self.size // self.part_bytes)


# --------------------------------------------------------------------------------------------------
# weights


class Probe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fixed tokens and their logprobs under the new weights."""

    token_ids: Column  # <i4, shape (n,)
    logprobs: Column  # <f4, shape (n - 1,): log p(token[i + 1] | token[: i + 1]) at temperature 1
    tolerance: float  # largest absolute difference, in nine of ten tokens, of the same weights


class Adapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A low-rank adapter sent instead of a model: factors A and B, which change weights W to W + B
    A * scale.
    """

    base: str  # hex digest of the adapted model, in the layout of its bucket plan
    targets: list[str]  # names of the adapted weights, with * for each number in them
    rank: int  # columns of B, rows of A; of each expert where experts are stacked
    scale: float  # alpha / rank
    transposed: list[str] = []  # those of the targets that hold inputs x outputs of each expert


class WeightsOffer(Message, frozen=True, tag="WeightsOffer"):
    """The newest weights, offered until replaced; ordered by epoch, then version."""

    epoch: int  # incarnation of the learner
    version: int  # policy version, equal to the optimizer steps taken
    # hex digest over all buckets, see broker.weights.digest; empty while they are being packed
    digest: str
    plan: str  # hex digest of the bucket plan: names, shapes, dtypes, order
    size_bytes: int  # bytes on the wire
    carriers: list[Carrier]  # how the buckets can travel, best first
    probe: Probe  # checked after loading, before serving
    # if set, the buckets hold its factors instead of the whole model
    adapter: Adapter | None = None
    segment: str = ""  # process/file/name of memory that holds the buckets, for ipc or shared
    devices: list[str] = []  # UUIDs of the GPUs that send by nccl, which no other member may use


class WeightsJoin(Message, frozen=True, tag="WeightsJoin"):
    """A server's request to receive the offered version."""

    server: str  # id of the rollout server
    epoch: int  # epoch of the offer
    version: int  # version of the offer
    plan: str  # hex digest of the server's own bucket plan
    key: str  # the server's public CURVE key (Z85) of this epoch; admits it to the rendezvous
    carriers: dict[Carrier, int]  # those that it can take, best first, and the ranks that it brings


class WeightsSession(Message, frozen=True, tag="WeightsSession"):
    """The learner's reply: which communicator to join, or why none."""

    session: str  # id of the communicator; a known one is reused, an unknown one is created
    rank: int  # first rank of the server in it; the learner is 0
    world_size: int  # processes in it
    host: str  # address of the rendezvous
    port: int  # port of the rendezvous
    key: str  # public CURVE key (Z85) of the rendezvous
    version: int  # version that will be sent
    timeout_s: float  # longest wait for one bucket
    error: str = ""  # reason of a refusal, else empty
    # how the buckets travel; ranks that read the offer's segment start at world_size
    carrier: Carrier = "gloo"


# --------------------------------------------------------------------------------------------------
# generate


class Guide(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A required form of the output: a JSON value between two texts."""

    schema: str  # JSON schema of the value, as JSON
    before: str = ""  # may name special tokens
    after: str = ""  # may name special tokens


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample; returned logprobs are of the distribution after all of these."""

    max_tokens: int  # most tokens to sample
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # nucleus mass, 1 is off
    top_k: int = 0  # most candidates, 0 is off
    min_p: float = 0.0  # smallest probability relative to the best candidate, 0 is off
    seed: int | None = None  # the same seed, prompt and weights give the same tokens
    stop: list[str] = []  # strings that end generation; their tokens are kept
    # tokens that end generation, in addition to the model's own; kept in the output
    stop_token_ids: list[int] = []
    ignore_eos: bool = False  # whether to treat the model's end tokens as ordinary tokens
    # subtracted from a token's logit for each time it was sampled in this output
    frequency_penalty: float = 0.0
    # subtracted from a token's logit if it was sampled in this output
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}  # added to the logits of these tokens
    # forms of which the output must match one, ending after it; empty: any output
    guides: list[Guide] = []
    # number of likeliest tokens to return at each sampled one, if the engine can
    top_logprobs: int = 0

    @property
    def is_resumable(self) -> bool:
        """Whether another request can continue an output that ended early.

        Guides and penalties depend on the whole output, the columns for biases and likeliest tokens
        are of one reply, and a stop string may begin in one output and end in the next.
        """
        has_penalty = self.frequency_penalty or self.presence_penalty
        return not (self.guides or self.logit_bias or has_penalty or self.top_logprobs or self.stop)


class GenerateRequest(Message, frozen=True, tag="GenerateRequest"):
    """A request for one server to generate tokens; sent to another one if it does not answer."""

    request_id: str  # unique per attempt
    conversation_id: str  # requests of one conversation extend the same prefix
    token_ids: Column  # <i4, shape (n,): the whole context
    sampling: SamplingParams  # how to sample
    min_version: int = 0  # oldest version that may answer; the server waits for it
    deadline_s: float = 60.0  # seconds after receipt at which the partial output is returned
    expected_tokens: int = 0  # predicted length of this request's output, its median; 0 unknown
    # 0.9 quantile of the predicted length, at least expected_tokens; 0 unknown
    expected_high: int = 0
    # higher ones start first; a hub raises it for the last open episodes of a group
    priority: int = 0
    # training step that its group is expected in, as a policy version; later ones give way; -1
    # unknown
    step: int = -1
    # above 0: sample nothing, return this many likeliest tokens at each context position
    prompt_top_k: int = 0
    # sample nothing, return the logprob of each context token but the first
    prompt_logprobs: bool = False

    @property
    def scores_context(self) -> bool:
        """Whether the request samples nothing and scores its context."""
        return self.prompt_logprobs or self.prompt_top_k > 0


class LengthRecord(Message, frozen=True, tag="LengthRecord"):
    """What the hubs of a run have learnt about the lengths of a domain's turns; see envhub/lengths.

    All numbers are running means, so that a hub can average them with its own, by the turns that
    they come from.
    """

    domain: str  # the domain
    estimator: str  # its length_estimator; another one ignores the record
    turns: int  # turns that all hubs together learnt from
    values: Column  # <f4, shape (n,): the estimator's means, in its order
    # <i4, shape (k,): tasks by the hash of their first prompt, each once, at most 4096
    tasks: Column
    counts: Column  # <f4, shape (k,): turns that a task's mean is made of
    means: Column  # <f4, shape (k,): mean log length of a task relative to others


class AbortRequest(Message, frozen=True, tag="AbortRequest"):
    """Stops a request; its reply has finish_reason `abort` and the partial output."""

    request_id: str  # id of the GenerateRequest


class GenerateReply(Message, frozen=True, tag="GenerateReply"):
    """The generated tokens."""

    request_id: str  # id of the request
    server: str  # id of the rollout server
    token_ids: Column  # <i4, shape (k,): sampled tokens, including the stop token
    logprobs: Column  # <f4, shape (k,)
    version_runs: Column  # <i4, shape (2r,): pairs (policy_version, number of tokens)
    # `error`, or `busy` (no room for the request): no tokens, see error
    finish_reason: FinishReason
    policy_version: int  # the server's version when it replied
    prefix_hit_tokens: int = 0  # context tokens found in the cache
    error: str = ""  # one line, with finish_reason `error` or `busy`
    # With prompt_top_k, for each context token but the first, at temperature 1; with
    # sampling.top_logprobs, for each sampled token, under its distribution. If that has fewer
    # tokens, the last one is repeated.
    top_ids: Column | None = None  # <i4, top_logprobs or prompt_top_k for each token
    top_logprobs: Column | None = None  # <f4, of top_ids, in descending order
    # |u1, shape (k,): 1 where a guide, penalty or bias applied; None: nowhere
    reshaped: Column | None = None
    # <f4, with prompt_logprobs: of each context token but the first, at temperature 1
    prompt_logprobs: Column | None = None


# --------------------------------------------------------------------------------------------------
# operator


class Span(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """What a process did for a while; see ``broker.runtime.spans``."""

    kind: SpanKind  # what it did; `wait`: nothing of all this
    start: float  # unix seconds
    end: float  # unix seconds, of its end or of this report
    # busy time in it: more than its length if several went on at once, less if there were gaps
    seconds: float
    count: int = 0  # pieces of work that ended in it
    ticket: int = 0  # of the group, 0 unknown or several
    step: int = -1  # optimizer step, -1 unknown or several
    # one piece of work, as an example; another span of the report counts it too
    sample: bool = False


class Metrics(Message, frozen=True, tag="Metrics"):
    """Numbers of one process, published every second or once a step."""

    role: str  # learner, rollout, envhub, rewardhub, broker
    id: str  # the process
    time: float  # unix seconds, for display only
    values: dict[str, float]  # metric name to value
    text: dict[str, str] = {}  # other values: a state, the last error
    spans: list[Span] = []  # what the process did since the last report, at most 256


class DeadLetter(Message, frozen=True, tag="DeadLetter"):
    """A message that could not be used, kept for the operator."""

    stream: str  # stream of the message
    sequence: int  # its sequence there, 0 if none
    ticket: int  # its ticket, 0 if unknown
    reason: str  # one line
    by: str  # id of the process that gave up
    data: bytes  # the original bytes, cut to 1 MiB


class Attempt(Message, frozen=True, tag="Attempt"):
    """The state of a ticket that was delivered more than once, until it ends; written by a hub
    before it runs it.
    """

    deaths: int  # processes that may have died while running it
    hub: str = ""  # id of the environment hub that runs it, empty if none
    process: str = ""  # that hub's process, as in its Presence
    alone: bool = False  # that hub runs nothing else, so if it dies, the ticket is poisonous


class DesiredState(Message, frozen=True, tag="DesiredState"):
    """The state that the operator wants for the run."""

    state: Literal["running", "paused", "draining", "stopped"]  # every process follows it
    reason: str = ""  # one line


class OperatorRequest(Message, frozen=True, tag="OperatorRequest"):
    """Asks the learner for something outside its schedule; asking twice at the same version does it
    once.
    """

    # write a checkpoint; evaluate the policy on the held-out tasks
    action: Literal["checkpoint", "evaluate"]
    # step of an earlier reply, to learn how far it is; -1 begins at the current version
    step: int = -1


class OperatorReply(Message, frozen=True, tag="OperatorReply"):
    """The learner's answer to an OperatorRequest."""

    # waiting: it begins when the current step ends
    state: Literal["waiting", "running", "done", "refused"]
    step: int  # optimizer steps of the checkpoint or the evaluation
    detail: str  # one line for the operator


class DeviceClaim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One process's claim to a device that it shares with others."""

    holder: str  # one start of a process, for example rollout-1-9f86d0
    # a learner's: nothing else may be on the device; servers share it with each other
    exclusive: bool
    granted: bool  # whether it has the device; else it waits
    # raised by each renewal; a claim whose beat stays the same for the time limit has ended
    beat: int


class DeviceLease(Message, frozen=True, tag="DeviceLease"):
    """Who has a shared device and who waits for it; each process changes it by compare-and-swap."""

    claims: list[DeviceClaim] = []  # in the order in which they were made


class OfferRefusal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Why a rollout server cannot serve the weights on offer."""

    epoch: int  # of the offer
    version: int  # of the offer
    # other names or shapes; another base of adapters; loaded, and the probe's logprobs differ
    kind: RefusalKind
    difference: str  # the first one, one line
    loads: int = 0  # how often it was loaded, 0 unless kind is `logprobs`


class Presence(Message, frozen=True, tag="Presence"):
    """A heartbeat; the process is alive while the revision changes within the TTL on the reader's
    clock.
    """

    role: str  # rollout, envhub, rewardhub, learner
    id: str  # the process
    host: str  # machine name
    pid: int  # process id on the host
    state: Literal["starting", "serving", "draining", "failed"]  # what the process is doing
    # rollout: address of its request channel, for example tcp://10.0.0.2:41234 key=... host=...
    address: str = ""
    channel: str = ""  # name of the request channel: zmq, nats
    policy: str = ACTOR  # rollout: the policy it serves
    engine: str = ""  # rollout: engine name
    epoch: int = 0  # learner: its epoch; rollout: epoch of the served weights
    policy_version: int = -1  # newest version held, -1 none
    slots: int = 0  # requests or groups it handles at once
    running: int = 0  # requests or groups it is handling
    waiting: int = 0  # requests or groups queued in it
    serves: list[str] = []  # envhub: domains; rewardhub: pools
    speed: float = 0.0  # rollout: tokens per second when busy, 0 unknown
    idle_ratio: float = -1.0  # rollout: share of the last second without work, -1 unknown
    # seconds that one token (rollout), step (envhub) or score (rewardhub) takes, 0 unknown;
    base_s: float = 0.0
    each_s: float = 0.0  # with r at once it takes base_s + r * each_s
    at_once: int = 0  # rewardhub: scores that it computes at once
    carriers: list[str] = []  # rollout: how it can take weights, best first
    problem: str = ""  # one line: why it takes no work, empty while it does
    # learner, envhub: boot id, PID namespace, pid, start time; see
    # broker/system/process_identity.py
    process: str = ""
    # latest WARNING or ERROR logged, with its time, at most 300 characters; empty after 10 minutes
    said: str = ""
    key: str = ""  # envhub, learner: public CURVE key of its requests to rollout servers, in Z85
    asleep: bool = False  # rollout: others use its device, so its requests wait
    job: str = ""  # batch job that it runs in, for example Slurm job 4711_2; empty outside of one
    # proves that a process of this role announces what broker/runtime/vouching.py lists
    voucher: str = ""
    refusal: OfferRefusal | None = None  # rollout: set while it cannot serve the newest offer
    # hubs: training tickets they work on, in their entries only; null: not said
    tickets: list[int] | None = None


class RunSpec(Message, frozen=True, tag="RunSpec"):
    """Everything a process needs to join a run; a process that does not match it is refused."""

    run: str  # the run's name
    wire_version: int  # WIRE_VERSION of the learner
    epoch: int  # incarnation of the learner that wrote it
    config: PlainSettings  # the resolved configuration, every section
    model_path: str  # folder or hub name of the policy's first weights and tokenizer
    data_digests: dict[str, str] = {}  # file path to content digest, for data sets read by hubs
    created: float = 0.0  # unix seconds, for display only
    # digest of the stored ModelParts, for hosts without model_path; empty for a hub name
    model_files: str = ""


class ModelPart(Message, frozen=True, tag="ModelPart"):
    """One part of the configuration and the tokenizer of the run's model, for hosts that do not
    have its folder.

    The parts of one digest, concatenated, are a MessagePack map from file name to content,
    compressed with zlib.
    """

    digest: str  # of the files; see rlearner_text/model_files.py
    part: int  # number of this part, from 0
    num_parts: int  # parts of this digest
    data: bytes  # 1 byte to 1 MiB


MESSAGES: Final[tuple[type[Message], ...]] = (
    Ticket, EvalTicket, Group, EpisodeScoreRequest, EpisodeScoreReply, Closed, RulesChange, Parted,
    WeightsOffer,
    WeightsJoin, WeightsSession, GenerateRequest,
    AbortRequest, GenerateReply, LengthRecord, Metrics, DeadLetter, Attempt, DesiredState,
    OperatorRequest,
    OperatorReply, DeviceLease, Presence, RunSpec, ModelPart,
)  # fmt: skip

# only messages with columns, bytes or an episode's text may be large
MAX_BYTES: Final[dict[type[Message], int]] = {kind: MAX_SMALL_BYTES for kind in MESSAGES} | {
    Group: MAX_GROUP_BYTES, GenerateRequest: MAX_PAYLOAD_BYTES, GenerateReply: MAX_PAYLOAD_BYTES,
    EpisodeScoreRequest: MAX_PAYLOAD_BYTES,
    LengthRecord: 1 << 16, DeadLetter: (1 << 20) + MAX_SMALL_BYTES,
    ModelPart: (1 << 20) + MAX_SMALL_BYTES,
}  # fmt: skip
