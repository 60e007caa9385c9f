"""The sections ``envhub`` and ``rewardhub``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from broker.settings.config import Section


class EnvhubSection(Section):
    """Settings of an environment hub; the domains have their own section."""

    harmless = (
        "n", "step_timeout_s", "episode_timeout_s", "generate_timeout_s", "min_tokens_per_s",
        "max_retries", "max_hung_threads", "broken_after", "score_wait_s", "drain_timeout_s",
        "worker_envs", "worker_cpus", "worker_idle_s",
    )  # fmt: skip

    n: PositiveInt = 64  # environments running at once
    step_timeout_s: PositiveFloat = 30.0  # one reset or step
    episode_timeout_s: PositiveFloat | None = None  # null: derived, see broker.settings.timeouts
    # one turn, retries included; null: derived from the next one
    generate_timeout_s: PositiveFloat | None = None
    min_tokens_per_s: PositiveFloat = 10.0  # what a loaded server still samples for one request
    max_retries: PositiveInt = 3  # of one turn on other servers, and of one episode after an error
    # of one environment in a worker process; null: no limit
    worker_memory_mib: PositiveInt | None = 2048
    # environments that share a worker process; one that hangs or crashes ends the others' episodes
    worker_envs: Annotated[int, Field(ge=1, le=64)] = 1
    # processors that a worker process needs: a hub with environments in such processes plays no
    # more at once than its share of the machine has room for; null: n of them
    worker_cpus: PositiveFloat | None = None
    # how long a worker process waits for its next episode before it is stopped; null: for ever
    worker_idle_s: PositiveFloat | None = None
    # environment variables of the hub that environments and agents get, secret ones too
    pass_env: tuple[str, ...] = ()
    # a hub that has lost this many threads in environments exits
    max_hung_threads: PositiveInt = 256
    # failed tickets of a domain in a row (at most those played at once, at least 2), after which it
    # waits for a good trial
    broken_after: PositiveInt = 5
    # how long a complete group waits for scores that reward hubs are computing
    score_wait_s: PositiveFloat = 10.0
    # how long a hub that stops waits for running episodes
    drain_timeout_s: PositiveFloat = 30.0


class RewardhubSection(Section):
    """Settings of a reward hub."""

    harmless = (
        "workers", "timeout_s", "max_retries", "max_groups", "broken_after", "drain_timeout_s",
    )  # fmt: skip

    workers: PositiveInt = 2  # worker processes
    timeout_s: PositiveFloat = 10.0  # one score
    max_retries: PositiveInt = 2  # of one score after a timeout, a crash or an error
    # of one worker process, beyond what its rewards load; null: no limit
    worker_memory_mib: PositiveInt | None = 4096
    # environment variables of the hub that rewards get, secret ones too
    pass_env: tuple[str, ...] = ()
    max_groups: PositiveInt = 16  # groups in progress at once
    # failed groups of a pool in a row; the hub then takes none until a trial succeeds
    broken_after: PositiveInt = 5
    # how long a hub that stops waits for running groups
    drain_timeout_s: PositiveFloat = 30.0
