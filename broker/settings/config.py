"""The configuration sections that several roles read: run, broker, domains. Each other role owns its own section."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from broker.contract.streams import token
from broker.errors import ConfigError


class Section(BaseModel):
    """Base of every section: unknown keys are refused, numbers are finite, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _token(value: str) -> str:
    try:
        return token(value, "name")
    except ConfigError as error:
        raise ValueError(error.allowed) from None


def loopback(value: str) -> str:
    """Return a loopback address.

    Raises:
        ValueError: if it is another one, because traffic is neither encrypted nor authenticated yet.
    """
    try:
        is_loopback = value == "localhost" or ipaddress.ip_address(value).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ValueError(
            "only a loopback address such as 127.0.0.1, because traffic is neither encrypted nor authenticated yet"
        )
    return value


def _device(value: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", value) is None:
        raise ValueError("auto, cpu, cuda, or one GPU as cuda:1")
    return value


def _http_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError(
            "expected http://host:port/v1 or https://…, without a user in it; the key stands in api_key_env"
        )
    return value


Token = Annotated[str, AfterValidator(_token)]  # may stand between the dots of a subject
Device = Annotated[str, AfterValidator(_device)]  # as torch names it
HttpUrl = Annotated[str, AfterValidator(_http_url)]  # of an OpenAI-compatible endpoint
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class RunSection(Section):
    """Names the run and its folder ``<dir>/<name>``."""

    name: Token | None = None  # None: the config file's name and the time
    dir: str = "runs"
    seed: Seed = 0


PRIVATE_STORE_GIB: Final = 8.0  # what a private server may store unless broker.store_max_gib says otherwise


class BrokerSection(Section):
    """How the processes talk."""

    channel: str = "zmq"  # how generation requests travel: a name of the registry in broker/channel/carriers.py
    bind: Annotated[str, AfterValidator(loopback)] = "127.0.0.1"
    sync_always: bool = False  # fsync every message before it is confirmed
    # most that the broker may store; null: 8 where `rlearner up` starts it, else as it says
    store_max_gib: PositiveFloat | None = None
    replicas: Literal[1, 3] | None = None  # servers that hold each message; None: three in a cluster, else one


class Sampling(Section):
    """How training tokens are sampled."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_tokens: PositiveInt = 256  # per turn
    stop: list[Annotated[str, Field(min_length=1)]] = []


class RewardConfig(Section):
    """One part of a domain's reward; the environment's own reward is always part of it."""

    name: str  # a name of the registry in rewardhub/rewards, or a dotted path or file path to a function
    weight: float = 1.0
    pool: Token = "default"  # which reward hubs may compute it
    args: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _no_bare_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(f"write {{name: {value}}}")
        return value


class DomainSection(Section):
    """One kind of task: which environment, how groups are run and scored."""

    env: str  # a name of the registry in envhub/envs, or a dotted path or file path to a class
    env_args: dict[str, Any] = {}
    # where environments run; None: as the environment's class says
    isolation: Literal["none", "thread", "process"] | None = None
    system_prompt: str = ""
    weight: PositiveFloat = 1.0  # share among the domains
    group_size: PositiveInt = 8
    min_group_size: PositiveInt | None = None  # None: all of them
    # extra episodes: the group closes with the first group_size to finish, the rest are aborted
    group_size_redundancy: NonNegativeInt = 0
    max_turns: PositiveInt = 1
    # whole conversation, or each turn for itself; auto: as the algorithm wants it
    context: Literal["auto", "full", "steps"] = "auto"
    history_length: NonNegativeInt = 2  # turns before the present one that a prompt of context steps shows
    # drop: neither the environment nor later prompts see what stands before </think>
    thinking: Literal["keep", "drop"] = "keep"
    memory: str = "recent"  # what makes that prompt, or your own function of (opening, past, now, history_length)
    max_context_tokens: PositiveInt = 4096
    deadline_s: PositiveFloat | None = None  # per group; null: derived, see broker.settings.timeouts
    sampling: Sampling = Sampling()
    rewards: list[RewardConfig] = []


def takes_steps(context: str, adv_estimator: str) -> bool:
    """Whether each turn of a domain is a sample of its own; ``auto`` is so for gigpo, which compares steps."""
    return context == "steps" or (context == "auto" and adv_estimator == "gigpo")


def num_greedy(adv_estimator: str) -> int:
    """Baseline episodes on top of a group: remax compares with one that is sampled at temperature 0."""
    return 1 if adv_estimator == "remax" else 0


def check(config: dict[str, Any]) -> None:
    """What the sections here cannot say alone.

    Raises:
        ConfigError: a group smaller than its smallest size, no room for a turn in the context, or a memory that nobody
        would ask.
    """
    for name, domain in config["domains"].items():
        smallest, size = domain["min_group_size"], domain["group_size"]
        if smallest is not None and smallest > size:
            raise ConfigError(f"domains.{name}.min_group_size", smallest, f"at most group_size, which is {size}")
        if domain["context"] == "full":
            for key, allowed in (("memory", "recent"), ("history_length", "left out")):
                if (value := domain[key]) != DomainSection.model_fields[key].default:
                    raise ConfigError(
                        f"domains.{name}.{key}",
                        value,
                        f"{allowed} with context full, which shows the whole conversation",
                    )
        tokens, context = domain["sampling"]["max_tokens"], domain["max_context_tokens"]
        if tokens >= context:
            raise ConfigError(
                f"domains.{name}.sampling.max_tokens", tokens, f"below max_context_tokens, which is {context}"
            )
