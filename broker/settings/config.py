"""The configuration sections that several roles read: run, broker and domains."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, Self
from urllib.parse import urlsplit

import pydantic
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from broker.contract.streams import check_token
from broker.contract.wire import ACTOR, PlainSettings
from broker.errors import ConfigError

Harmless = tuple[str, ...] | None  # see Section
# Of a user's file or command line, before any check: keys and values may be anything.
UserSettings = dict[str, Any]
# Checked by the plug-in's own class.
PluginArguments = dict[str, Any]


class Section(BaseModel):
    """Base of every section: refuses unknown keys and infinite numbers; frozen.

    Attributes:
        harmless: fields that a host accepts, with any value, from an owner that it does not trust
            to run code. None, for the arguments of a plug-in: the plug-in itself needs trust. A
            field's default needs none, nor do fields that are sections or of the types below, which
            ``broker.settings.consent`` judges by their value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    harmless: ClassVar[Harmless] = None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy the section with other values.

        Raises:
            TypeError: if it has no field of that name, as after a setting was renamed.
        """
        if unknown := set(update or ()) - set(type(self).model_fields):
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        return super().model_copy(update=update, deep=deep)

    def to_plain(self) -> PlainSettings:
        """Return the section as plain values, for a message or a file."""
        return self.model_dump(mode="json")


class SectionGroup(Section):
    """A configuration: its fields are sections."""

    def with_values(self, section: str, **values: Any) -> Self:
        """Return the settings with other values in one section, which are not checked.

        Raises:
            TypeError: if there is no such field.
        """
        changed: Section = getattr(self, section).model_copy(update=values)
        return self.model_copy(update={section: changed})


@dataclass(frozen=True)
class DataMark:
    """Marks a field that names files: a joined host reads only those below its own folders.

    Attributes:
        may_be_missing: the value may name something else, such as a model on the hub, if there is
            no such file.
    """

    may_be_missing: bool = False


@dataclass(frozen=True)
class EndpointMark:
    """Marks a field with the address of a server that gets requests."""


@dataclass(frozen=True)
class PluginMark:
    """Marks the name of a plug-in; with a colon it is code.

    Attributes:
        kind: of the registry.
        table: the registry, as ``module:attribute``; empty if it need not be read.
        args: the field with the plug-in's arguments.
    """

    kind: str
    table: str = ""
    args: str = ""


def _check_token(value: str) -> str:
    try:
        return check_token(value, "name")
    except ConfigError as error:
        raise ValueError(error.allowed) from None


def loopback(value: str) -> str:
    """Return a loopback address.

    Raises:
        ValueError: if it is another one.
    """
    try:
        is_loopback = value == "localhost" or ipaddress.ip_address(value).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        reason = "traffic is neither encrypted nor authenticated yet"
        raise ValueError(f"only a loopback address such as 127.0.0.1, because {reason}")
    return value


def _check_device(value: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", value) is None:
        raise ValueError("auto, cpu, cuda, or one GPU as cuda:1")
    return value


def _http_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError(
            "expected http://host:port/v1 or https://…, without a user; api_key says where the "
            "key is"
        )
    return value


Token = Annotated[str, AfterValidator(_check_token)]  # can be one part of a subject
Device = Annotated[str, AfterValidator(_check_device)]  # as torch names it
# of an OpenAI-compatible endpoint
HttpUrl = Annotated[str, AfterValidator(_http_url), EndpointMark()]
DataPath = Annotated[str, DataMark()]  # of a data file or a folder of them
# a folder or file of a model, or another name
ModelPath = Annotated[str, DataMark(may_be_missing=True)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class NoArguments(Section):
    """The arguments of a plug-in that has none, and is harmless."""

    harmless = ()


class RunSection(Section):
    """The run's name and folder ``<dir>/<name>``."""

    name: Token | None = None  # null: the config file's name and the time
    # folder in which the run gets a folder of its own name
    dir: str = "runs"
    # of tasks, sampling and the order of data
    seed: Seed = 0


# Default of broker.store_max_gib for a private server.
PRIVATE_STORE_GIB: Final = 8.0


class TelemetrySection(Section):
    """Section ``telemetry``."""

    harmless = ("traces",)

    traces: NonNegativeInt = 0  # each ticket whose number is a multiple of this is traced, 0: none


class BrokerSection(Section):
    """How processes communicate."""

    harmless = ("bind", "sync_always", "store_max_gib", "replicas")

    # how generation requests travel: a name of the registry in broker/channel/carriers.py
    channel: Annotated[str, PluginMark("channels")] = "zmq"
    # where sockets without encryption listen: only on this host
    bind: Annotated[str, AfterValidator(loopback)] = "127.0.0.1"
    sync_always: bool = False  # fsync every message before it is confirmed
    # null: 8 if `rlearner up` starts the broker, else the broker's limit
    store_max_gib: PositiveFloat | None = None
    # servers that hold each message; null: three in a cluster, else one
    replicas: Literal[1, 3] | None = None


class Sampling(Section):
    """How training tokens are sampled."""

    harmless = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop")

    # divides the logits; 0: greedy
    temperature: Annotated[float, Field(ge=0)] = 1.0
    # sample from the most likely tokens with this share of the probability; 1: all
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    # sample from this many most likely tokens; 0: all
    top_k: Annotated[int, Field(ge=0)] = 0
    # leave out tokens less likely than this share of the most likely one; 0: none
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_tokens: PositiveInt = 256  # per turn
    # texts that end a turn
    stop: list[Annotated[str, Field(min_length=1)]] = []


class RewardConfig(Section):
    """One part of a domain's reward, in addition to the environment's own."""

    harmless = ("weight", "pool")

    # a name of the registry in rewardhub/rewards, or a dotted path or file path to a function
    name: Annotated[str, PluginMark("rewards", "rewardhub.rewards:REWARDS", "args")]
    # factor of its score in the sum
    weight: float = 1.0
    pool: Token = "default"  # which reward hubs may compute it
    # arguments of the reward, checked by its class
    args: PluginArguments = {}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _no_bare_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(f"write {{name: {value}}}")
        return value


class ExampleSection(Section):
    """A task and a right answer."""

    harmless = ("question", "answer")

    # user message that each conversation begins with
    question: Annotated[str, Field(min_length=1)]
    # reply to it, which is not trained on
    answer: Annotated[str, Field(min_length=1)]


# rewards of rewardhub/rewards that read no more of an episode than prompt, response and reference
RESPONSE_REWARDS: Final = ("math_answer", "code", "format", "length", "reward_model")
# the same unless their template shows the conversation
JUDGED_REWARDS: Final = ("judge", "verifier", "rubric")


class DomainEvalSection(Section):
    """How a domain is evaluated; null: as section ``eval`` says."""

    harmless = ("tasks", "group_size", "temperature")

    tasks: PositiveInt | None = None  # null: as in eval, like the following
    group_size: PositiveInt | None = None  # episodes per task
    temperature: NonNegativeFloat | None = None  # the rest of sampling is the domain's


Share = Annotated[float, Field(ge=0, le=1)]
# least and largest pass rate
Band = Annotated[list[Share], Field(min_length=2, max_length=2)]


class StageSection(Section):
    """A stage of a curriculum: another band from a step on."""

    harmless = ("from_step", "band")

    # first step whose tickets it chooses
    from_step: NonNegativeInt
    # least and largest pass rate of the tasks that are given from then on
    band: Band


class CurriculumSection(Section):
    """Which tasks a domain is given, by the policy's own pass rate on each of them."""

    # only the learner reads the pass rates
    harmless = (
        "tasks", "band", "stages", "priority", "explore", "newest_weight", "pass_rates",
    )  # fmt: skip

    # number of tasks; null: as many as the data set has. Environments that make tasks without end
    # need it
    tasks: Annotated[int, Field(gt=0, le=2**31 - 1)] | None = None
    # least and largest pass rate of the tasks that are given; those not measured yet always are
    band: Band = [0.0, 1.0]
    # other bands later, in the order of their steps
    stages: list[StageSection] = []
    # learnability: tasks of the band by p (1 - p), most often those near one half; uniform: each
    # as often as any other
    priority: Literal["learnability", "uniform"] = "learnability"
    # share of its turns that a task gets although it is outside the band, or always or never
    # solved, so that its pass rate is measured again
    explore: Share = 0.05
    # of the newest group in a task's pass rate, which is a moving average
    newest_weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    # pass rates to begin with: pass_rates.jsonl of another run of the same model, or its folder
    pass_rates: str | None = None


class DomainSection(Section):
    """One kind of task: its environment, and how groups are run and scored."""

    harmless = (
        "system_prompt", "examples", "weight", "group_size", "min_group_size",
        "group_size_redundancy", "straggler_factor", "max_turns", "context", "history_length",
        "anchors", "thinking", "max_context_tokens", "deadline_s", "score_ahead", "teacher",
        "policy", "seats", "rotate_seats",
    )  # fmt: skip

    # a name of the registry in envhub/envs, or a dotted path or file path to a class
    env: Annotated[str, PluginMark("envs", "envhub.envs:ENVS", "env_args")]
    # arguments of the environment, checked by its class
    env_args: PluginArguments = {}
    # null: the default of its class
    isolation: Literal["none", "thread", "process", "sandbox"] | None = None
    network: bool = False  # with isolation sandbox: whether the environment may use the network
    readable: list[str] = []  # with isolation sandbox: further files and folders that it may read
    # first message of each conversation; empty: none
    system_prompt: str = ""
    examples: list[ExampleSection] = []
    weight: NonNegativeFloat = 1.0  # share among the domains; 0: only evaluated, never trained
    curriculum: CurriculumSection | None = None  # null: all tasks in turn
    # episodes of one training task, whose rewards are compared
    group_size: PositiveInt = 8
    min_group_size: PositiveInt | None = None  # null: all of them
    # extra episodes; when group_size have finished, the rest are aborted
    group_size_redundancy: NonNegativeInt = 0
    # closes a group of at least min_group_size episodes when the others are expected to take more
    # than this many times as long again as the group has taken; null: never, they have until
    # deadline_s
    straggler_factor: PositiveFloat | None = None
    # turns of the model after which an episode ends
    max_turns: PositiveInt = 1
    # whole conversation or single turns; auto: by algorithm
    context: Literal["auto", "full", "steps"] = "auto"
    history_length: NonNegativeInt = 2  # previous turns in a prompt of context steps
    # by which gigpo finds equal states. environment: the environment's own anchors alone;
    # observation: where it gives none, the text that it shows; auto: observation with gigpo
    anchors: Literal["auto", "environment", "observation"] = "auto"
    # drop: hide text before </think> from environment and later prompts
    thinking: Literal["keep", "drop"] = "keep"
    # builds that prompt: recent, present (the observation alone), or your own function of (opening,
    # past, now, history_length)
    memory: Annotated[str, PluginMark("memories")] = "recent"
    # longest prompt and output of an episode together
    max_context_tokens: PositiveInt = 4096
    # per group; null: derived, see broker.settings.timeouts
    deadline_s: PositiveFloat | None = None
    sampling: Sampling = Sampling()
    eval: DomainEvalSection = DomainEvalSection()
    # predicts how long turns will be, because servers start the longest first: a name of the
    # registry in envhub/lengths, or a dotted path or file path to a class or function
    length_estimator: Annotated[
        str, PluginMark("length_estimators", "envhub.lengths:ESTIMATORS", "length_estimator_args")
    ] = "regression"
    # arguments of the estimator, checked by its class
    length_estimator_args: PluginArguments = {}
    rewards: list[RewardConfig] = []
    # score each episode when it ends, if a reward hub is idle; false: with its group
    score_ahead: bool = True
    # a name of section teachers, whose servers score the episodes that are trained on; empty: none
    teacher: str = ""
    # who plays it: actor, the policy that is trained, or a name of section policies, which is
    # allowed in domains of weight 0
    policy: Token = ACTOR
    # in environments with seats, who plays each of them: actor, or a name of section policies; of a
    # list, each group draws an entry
    seats: dict[Token, Token | list[Token]] = {}
    # task by task, each player moves on to the next seat
    rotate_seats: bool = False


def seat_policies(entry: str | list[str]) -> list[str]:
    """Return the policies that an entry of ``seats`` names."""
    return [entry] if isinstance(entry, str) else entry


def num_trained_seats(domain: DomainSection) -> int:
    """Return how many samples the trained policy makes of an episode at most, one for each seat."""
    seats = [ACTOR in seat_policies(entry) for entry in domain.seats.values()]
    return max(sum(seats), 1)


def reads_episode(rewards: Sequence[RewardConfig]) -> bool:
    """Return whether one of the rewards may read an episode's messages, or its task's row."""
    return any(_reads_episode(reward) for reward in rewards)


def _reads_episode(reward: RewardConfig) -> bool:
    if reward.name not in JUDGED_REWARDS:
        return reward.name not in RESPONSE_REWARDS
    if "{conversation}" in str(reward.args):
        return True
    return reward.name == "rubric" and reward.args.get("criteria") is None


def takes_steps(context: str, adv_estimator: str) -> bool:
    """Return whether each turn of a domain is a sample, as ``auto`` is for gigpo."""
    return context == "steps" or (context == "auto" and adv_estimator == "gigpo")


def shows_anchors(anchors: str, adv_estimator: str) -> bool:
    """Return whether a turn without an anchor gets the text that it answers, as ``auto`` is for
    gigpo.
    """
    return anchors == "observation" or (anchors == "auto" and adv_estimator == "gigpo")


def num_greedy(adv_estimator: str) -> int:
    """Return the baseline episodes added to a group: one for remax, sampled at temperature 0."""
    return 1 if adv_estimator == "remax" else 0
