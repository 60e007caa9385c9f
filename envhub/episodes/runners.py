"""Plays a hub's episodes, several at a time, and reuses their environments."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from broker.runtime.spans import SpanRecorder
from envhub.domain import Domain
from envhub.envs.base import WORKER, Environment
from envhub.episodes.episode import Episode, EpisodeContext, TurnSampler
from envhub.episodes.seats.policies import PlayedPolicies, PlayerServices
from envhub.episodes.seats.seated_episode import SeatedEpisode, is_seated
from envhub.lengths.predictor import HubLengths, LengthPredictor
from envhub.scheduling.slots import FailureKind
from envhub.servers.awake_clock import AwakeClock
from envhub.servers.turn import TurnFailed
from envhub.task import EpisodeFailed, EpisodeResult, EpisodeTask
from envhub.tasks.errors import TaskError
from envhub.workers.calls import CallFailed, EnvironmentCalls
from envhub.workers.returned import ReturnedValueError
from envhub.workers.worker_pool import NoWorker, RemoteEnvironment, WorkerPools
from rlearner_sandbox.providers.base import SandboxError
from rlearner_text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from envhub.agents.run_episode import AgentRunner


@dataclass(frozen=True)
class EpisodeLimits:
    """Timeouts in seconds, from the section ``envhub``."""

    episode_timeout_s: float
    generate_timeout_s: float


@dataclass
class EpisodeRunners:
    """What all episodes of a hub share.

    Attributes:
        worker_pools: for environments in worker processes.
        max_workers: worker processes, including idle ones, beyond which an idle one makes way for
            another domain's.
        worker_idle_s: after which the process of an idle environment is ended; None: never.
        idle: environments of finished episodes, by domain, for the next ones.
        lengths: predicts how long turns will be.
        spans: of the hub, for the timeline.
    """

    tokenizer: Tokenizer
    turns: TurnSampler
    calls: EnvironmentCalls
    limits: EpisodeLimits
    worker_pools: WorkerPools = field(default_factory=lambda: WorkerPools(None))
    max_workers: int = 64
    worker_idle_s: float | None = None
    idle: dict[str, list[Environment]] = field(default_factory=dict)
    lengths: HubLengths = field(default_factory=HubLengths)
    clock: AwakeClock = field(default_factory=AwakeClock)  # of the timeouts of episodes
    agents: AgentRunner | None = None  # made for the first episode of an agent
    spans: SpanRecorder = field(default_factory=SpanRecorder)
    policies: PlayedPolicies | None = None  # who else plays; None: nobody

    async def play(self, task: EpisodeTask, on_tokens: Callable[[int], None]) -> EpisodeResult:
        """Play one episode.

        Args:
            on_tokens: called after each sampled turn with its oldest policy version.

        Raises:
            EpisodeFailed: if environment or generation fail, or it takes longer than
                ``episode_timeout_s``.
        """
        environment: Environment | None = None
        try:
            async with self.clock.timeout(self.limits.episode_timeout_s) as limit:
                lengths = self.lengths.of(task.domain.name, task.domain.make_estimator, task.policy)
                if task.domain.has_program:
                    return await self._play_agent(task, lengths, on_tokens)
                environment = await self._environment(task.domain)
                context = EpisodeContext(
                    self.tokenizer,
                    self.turns,
                    self.calls,
                    lengths=lengths,
                    generate_timeout_s=self.limits.generate_timeout_s,
                    spans=self.spans,
                )
                if is_seated(task):
                    result = await self._play_seats(task, environment, context, on_tokens)
                else:
                    result = await Episode(task, environment, context, on_tokens).run()
        except CallFailed as error:
            raise EpisodeFailed(_failure_kind(error), str(error), error.trace) from error
        except ReturnedValueError as error:
            raise EpisodeFailed("env", str(error)) from error
        except NoWorker as error:
            raise EpisodeFailed("machine", str(error)) from error
        except TurnFailed as error:
            raise EpisodeFailed("generate", str(error)) from error
        except TimeoutError:
            if not limit.expired():
                raise
            detail = f"the episode took longer than {self.limits.episode_timeout_s:g} s"
            raise EpisodeFailed("timeout", detail) from None
        else:
            # only a healthy environment is used again; else it is retired below
            self._release(task.domain, environment, is_healthy=True)
            environment = None
            return result
        finally:
            self.turns.forget(task.id)
            if environment is not None:
                self.calls.retire(environment)

    async def close(self) -> None:
        """Close the idle environments and end all worker processes."""
        idle = [environment for environments in self.idle.values() for environment in environments]
        self.idle.clear()
        await asyncio.gather(
            *(self.calls.call(environment, "close") for environment in idle), return_exceptions=True
        )
        self.calls.close()
        await self.worker_pools.close()
        if self.agents is not None:
            await self.agents.close()
        if self.policies is not None:
            await self.policies.close()

    async def _play_agent(
        self, task: EpisodeTask, lengths: LengthPredictor, on_tokens: Callable[[int], None]
    ) -> EpisodeResult:
        # a web server, which other hubs need not load
        from envhub.agents.run_episode import AgentRunner
        from envhub.agents.session import SessionContext

        self.agents = self.agents or AgentRunner(self.tokenizer, self.worker_pools.passed)
        context = SessionContext(
            self.tokenizer,
            self.turns.turn,
            lengths,
            generate_timeout_s=self.limits.generate_timeout_s,
            spans=self.spans,
        )
        return await self.agents.play(task, context, on_tokens)

    async def _play_seats(
        self,
        task: EpisodeTask,
        environment: Environment,
        context: EpisodeContext,
        on_tokens: Callable[[int], None],
    ) -> EpisodeResult:
        domain = task.domain
        assert self.policies is not None, f"domain {domain.name} needs the section policies"
        services = PlayerServices(self.calls, self._environment, self._release)

        def predictor(policy: str) -> LengthPredictor:
            return self.lengths.of(domain.name, domain.make_estimator, policy)

        episode = SeatedEpisode(
            task,
            environment,
            context,
            policies=self.policies,
            services=services,
            predictor=predictor,
            on_tokens=on_tokens,
        )
        return await episode.run()

    def _release(self, domain: Domain, environment: Environment, is_healthy: bool) -> None:
        """Keep an environment for the next episode, unless it has failed or is used up."""
        is_spent = isinstance(environment, RemoteEnvironment) and environment.spent
        if is_healthy and not is_spent:
            if isinstance(environment, RemoteEnvironment):
                environment.idle_since = time.monotonic()
            self.idle.setdefault(domain.name, []).append(environment)
        else:
            self.calls.retire(environment)

    async def _environment(self, domain: Domain) -> Environment:
        idle = self.idle.get(domain.name)
        while idle:
            environment = idle.pop()
            if not (isinstance(environment, RemoteEnvironment) and environment.is_reaped):
                return environment
            self.calls.retire(environment)
        if domain.isolation not in WORKER:
            return await self.calls.make(domain.make, in_thread=domain.isolation == "thread")
        if self.worker_pools.living >= self.max_workers:
            self._make_way()
        environment = await self.worker_pools.environment(domain)
        try:
            await self.calls.call(environment, "constructor")
        except BaseException:
            # a cancellation, too, must not leave its process behind
            self.calls.retire(environment)
            raise
        return environment

    def stop_idle_workers(self, now: float) -> None:
        """End worker processes that have waited for their next episode for too long.

        Args:
            now: monotonic seconds.
        """
        if self.worker_idle_s is None:
            return
        for name, environments in self.idle.items():
            for environment in list(environments):
                if (
                    isinstance(environment, RemoteEnvironment)
                    and now - environment.idle_since > self.worker_idle_s
                ):
                    self.idle[name].remove(environment)
                    self.calls.retire(environment)

    def _make_way(self) -> None:
        """End the process of an idle environment, of the domain that has most of them."""
        idle_workers = {
            name: [
                environment for environment in idle if isinstance(environment, RemoteEnvironment)
            ]
            for name, idle in self.idle.items()
        }
        name = max(idle_workers, key=lambda name: len(idle_workers[name]), default="")
        if idle_workers.get(name):
            environment = idle_workers[name][0]
            self.idle[name].remove(environment)
            self.calls.retire(environment)


def _failure_kind(error: CallFailed) -> FailureKind:
    """Return who is to blame: sandboxes that fail are the machine's, and another hub may have
    better ones; a task that cannot be graded fails everywhere.
    """
    if isinstance(error.__cause__, SandboxError):
        return "machine"
    return "fatal" if isinstance(error.__cause__, TaskError) else "env"
