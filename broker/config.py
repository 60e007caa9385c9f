"""The configuration sections that several roles read: run, broker, domains. Each other role owns its own section."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    """Names the run and its folder ``<dir>/<name>``."""

    name: str | None = None  # None: the config file's name and the time
    dir: str = "runs"
    seed: Annotated[int, Field(ge=0)] = 0


class BrokerSection(Section):
    """How the processes talk."""

    channel: Literal["zmq", "nats"] = "zmq"
    bind: str = "127.0.0.1"
    sync_always: bool = False  # fsync every message before it is confirmed
    store_max_gib: PositiveFloat = 8.0


class Sampling(Section):
    """How training tokens are sampled."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_tokens: PositiveInt = 256  # per turn
    stop: list[str] = []


class Reward(Section):
    """One part of a domain's reward; the environment's own reward is always part of it."""

    name: str  # a name of the registry in rewardhub/rewards, or a dotted path or file path to a function
    weight: float = 1.0
    pool: str = "default"  # which reward hubs may compute it
    args: dict[str, Any] = {}


class DomainSection(Section):
    """One kind of task: which environment, how groups are run and scored."""

    env: str  # a name of the registry in envhub/envs, or a dotted path or file path to a class
    env_args: dict[str, Any] = {}
    system_prompt: str = ""
    weight: PositiveFloat = 1.0  # share among the domains
    group_size: PositiveInt = 8
    min_group_size: PositiveInt | None = None  # None: all of them
    max_turns: PositiveInt = 1
    max_context_tokens: PositiveInt = 4096
    deadline_s: PositiveFloat = 600.0  # per group
    sampling: Sampling = Sampling()
    rewards: list[Reward] = []
