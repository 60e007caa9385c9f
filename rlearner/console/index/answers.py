"""Questions to the index of a run, and its answers.

Times are seconds since 1970, steps are completed optimizer steps, unless a field says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Order = Literal[
    "newest", "oldest", "reward_high", "reward_low", "longest", "shortest", "most_turns", "stalest"
]


@dataclass(frozen=True)
class IndexStatus:
    """Whether the answers are complete.

    Attributes:
        state: ``current``; ``building`` (for the first time) and ``rebuilding`` (the database was
            damaged) answer with what was read so far; ``waiting`` cannot write now and tries again;
            ``gone``: the run's folder is no longer there.
        problem: one line for the user, empty if there is none.
        notes: one line each about sources that are missing or cannot be read, such as a run without
            ``samples.keep``.
        done: share of the files' bytes that was read, 0 to 1.
        steps: of metrics.jsonl, 0 without a line.
        trajectories: in the index.
        database: path of the database.
    """

    state: Literal["current", "building", "rebuilding", "waiting", "gone"]
    problem: str = ""
    notes: tuple[str, ...] = ()
    done: float = 1.0
    steps: int = 0
    trajectories: int = 0
    database: str = ""


# -------------------------------------------------------------------------------------------------
# steps


@dataclass(frozen=True)
class Series:
    """One metric by step; with fewer points than steps, each bucket's lowest and highest.

    Attributes:
        steps: ascending.
        times: when each step's line was written.
        values: as in metrics.jsonl.
        total: number of points before sampling.
        means: of all values in the range of steps that each point is from; empty if all points are
            there.
    """

    name: str
    steps: list[int]
    times: list[float]
    values: list[float]
    total: int
    means: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Event:
    """Something that happened to the run.

    Attributes:
        time: 0 if unknown.
        step: completed before it, -1 if unknown.
        kind: epoch, checkpoint, evaluation, settings, start, stop, death, joined, left, failed,
            weights, note.
        text: one line.
        who: id of the process, empty if none.
        approximate: the time is that of the step's line.
    """

    time: float
    step: int
    kind: str
    text: str
    who: str = ""
    approximate: bool = False


# -------------------------------------------------------------------------------------------------
# timeline


@dataclass(frozen=True)
class TimelineSpan:
    """What a process did from ``start`` to ``end``.

    Attributes:
        lane: ``role.id`` of the process.
        kind: generate, env_step, reward, train, weights, wait, evaluate or checkpoint.
        seconds: busy time in it; more than its length if several went on at once, less if there
            were gaps.
        count: pieces of work that it stands for.
        ticket: 0 if none or several.
        step: -1 if none or several.
        sample: one piece of work as an example; another span counts it too.
    """

    lane: str
    kind: str
    start: float
    end: float
    seconds: float
    count: int = 1
    ticket: int = 0
    step: int = -1
    sample: bool = False


@dataclass(frozen=True)
class Timeline:
    """Spans of a range of time.

    Attributes:
        lanes: ``role.id`` of every process with spans in the range: learner, rollout servers, hubs,
            reward hubs.
        bucket_s: length of the buckets that spans were added up in, 0: single spans.
        live_since: since when processes' reports were recorded, 0: never. Before, and while no
            console ran, only the learner's phases are known.
    """

    start: float
    end: float
    lanes: list[str]
    spans: list[TimelineSpan]
    bucket_s: float = 0.0
    live_since: float = 0.0


# ------------------------------------------------------------------------------------------------
# trajectories


@dataclass(frozen=True)
class TrajectoryFilter:
    """Which trajectories; None or empty: any.

    Attributes:
        text: words that the prompt, the reference or the last response must hold; the last one may
            be the begin of a word, and a phrase stands in double quotes.
        min_step: trained in this optimizer step (from 1) or a later one; excludes what was not
            trained.
        min_version: the newest token is of this version or a later one; ``max_version`` likewise
            for the oldest token.
        state: what became of the group: trained, filtered, dropped, dead, arrived, duplicate.
    """

    text: str = ""
    min_step: int | None = None
    max_step: int | None = None
    domain: str = ""
    min_reward: float | None = None
    max_reward: float | None = None
    min_version: int | None = None
    max_version: int | None = None
    success: bool | None = None
    state: str = ""
    ticket: int | None = None
    task_index: int | None = None
    server: str = ""
    hub: str = ""


@dataclass(frozen=True)
class TrajectoryRow:
    """One trajectory in a list.

    Attributes:
        seq: sequence of its record in the samples log.
        ordinal: position in the group; an episode may have several trajectories.
        step: optimizer step that trained it, 0 if none has.
        tokens: of the whole sequence; ``sampled`` of them by the policy.
        oldest: oldest policy version of its tokens, -1 without tokens; ``newest`` likewise.
        prompt: begin of the task's text, if its environment gives one.
        preview: begin of the last response.
    """

    id: int
    seq: int
    ordinal: int
    ticket: int
    episode: int
    domain: str
    task_index: int
    step: int
    state: str
    reward: float
    success: bool
    end: str
    tokens: int
    sampled: int
    turns: int
    oldest: int
    newest: int
    hub: str
    servers: str
    greedy: bool
    prompt: str
    preview: str


@dataclass(frozen=True)
class TrajectoryPage:
    """A page of trajectories.

    Attributes:
        after: pass it to get the next page, empty: this is the last one.
        total: number of matches, None if not counted.
    """

    rows: list[TrajectoryRow]
    after: str = ""
    total: int | None = None


@dataclass(frozen=True)
class Token:
    """One token that the policy sampled.

    Attributes:
        mask: whether it is trained on.
        logprob: natural log of the sampling probability.
        version: policy version that sampled it.
        reward: given on this token.
        advantage: None if it is not known, see ``GroupView.unavailable``; so are entropy (nats) and
            importance ratio.
    """

    position: int
    id: int
    text: str
    mask: bool
    logprob: float | None = None
    version: int = -1
    reward: float = 0.0
    advantage: float | None = None
    entropy: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens: sampled in one turn with one version, or read (turn 0, only text)."""

    turn: int
    start: int
    end: int
    text: str
    tokens: list[Token]
    server: str = ""
    version: int = -1
    reward: float = 0.0
    valid: bool = True
    finish_reason: str = ""
    logprob: float = 0.0


@dataclass(frozen=True)
class TrajectoryView:
    """One trajectory turn by turn.

    Attributes:
        reward_parts: each reward by name; ``notes`` what reward hubs noted about them, by name.
        metrics: numbers from the environment.
    """

    ordinal: int
    episode: int
    reward: float
    reward_parts: dict[str, float]
    notes: dict[str, float]
    success: bool
    end: str
    greedy: bool
    response: str
    metrics: dict[str, float]
    pieces: list[Piece]


@dataclass(frozen=True)
class Provenance:
    """The way of one ticket, as ``rlearner trace`` shows it.

    Attributes:
        state: trained, filtered, dropped, dead, arrived or open.
        step: optimizer step that trained it, 0 if none has.
        seq: of its record, 0 if none is known.
        text: the lines that ``rlearner trace`` prints.
    """

    ticket: int
    state: str
    domain: str
    task_index: int
    step: int
    seq: int
    text: list[str]


@dataclass(frozen=True)
class GroupView:
    """One group with all its episodes.

    Attributes:
        prompt: the task as text, if its environment gives one; ``reference`` the expected answer.
        tokenizer: path of the tokenizer, or why there is none; then tokens are shown by their
            numbers.
        unavailable: per-token quantities that are not known, with the reason: ``advantage``,
            ``entropy``, ``ratio``.
        frames: text frames of episode 0; only evaluations record them.
    """

    ticket: int
    provenance: Provenance
    prompt: str
    reference: str
    temperature: float
    tokenizer: str
    trajectories: list[TrajectoryView]
    unavailable: dict[str, str]
    frames: list[str] = field(default_factory=list)


# -------------------------------------------------------------------------------------------------
# evaluations


@dataclass(frozen=True)
class EvaluationResult:
    """One evaluation of one policy on held-out tasks.

    Attributes:
        low, high: 95 % interval of the success rate.
    """

    step: int
    policy: str
    time: float
    tasks: int
    episodes: int
    success_rate: float
    low: float
    high: float
    reward_mean: float
    by_domain: dict[str, float]


@dataclass(frozen=True)
class EvaluatedTask:
    """One task of an evaluation.

    Attributes:
        number: position in its file.
        frames: recorded frames of its first episode.
    """

    step: int
    policy: str
    number: int
    domain: str
    task_index: int
    episodes: int
    successes: int
    reward_mean: float
    frames: int
    prompt: str


# -------------------------------------------------------------------------------------------------
# runs


@dataclass(frozen=True)
class RunRow:
    """One run in the list; see ``rlearner.ops.listing.RunSummary`` for the first fields.

    Attributes:
        last: newest value of a few metrics, by name.
        domains: names of the trained domains.
    """

    name: str
    folder: str
    state: str
    step: int
    steps: int
    changed: float
    last: dict[str, float]
    domains: list[str]
    model: str
    algorithm: str


@dataclass(frozen=True)
class SettingDifference:
    """A setting in which runs differ: its value in each, by run; a run without it is missing."""

    key: str
    values: dict[str, Any]
