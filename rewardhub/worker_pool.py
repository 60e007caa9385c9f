"""Workers that score one sample at a time, replaced when a reward hangs, crashes or takes too much
memory.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from broker.errors import RlearnerError, UserError
from broker.settings.config import RewardConfig
from rewardhub import protocol
from rewardhub.rewards import loading
from rewardhub.rewards.base import Sample, Scored
from rlearner_workers.output import WorkerOutput
from rlearner_workers.patience import OutOfTime
from rlearner_workers.worker_pool import ProcessPool
from rlearner_workers.worker_process import WorkerGone, WorkerProcess

log = logging.getLogger(__name__)

# For a worker to load a reward, on its own clock; one attempt after the other when the hub starts.
START_S: Final = (60.0, 120.0, 240.0, 480.0)


class ScoreError(RlearnerError):
    """There is no score. ``retry``: a try may succeed. ``trace``: the reward's traceback."""

    def __init__(self, detail: str, *, retry: bool, trace: str = "") -> None:
        super().__init__(detail)
        self.retry = retry
        self.trace = trace


class NoWorkerError(RlearnerError):
    """No worker can start here now or load the reward; the group is not at fault."""


class SlowStartError(NoWorkerError):
    """A worker did not load its rewards in time."""


RewardWorkerProcess = WorkerProcess[protocol.RewardReply]


class RewardPool(ProcessPool[protocol.RewardReply]):
    """Processes that load the same rewards and score samples.

    Args:
        module: what a process runs.
        rewards: loaded in every process before it serves.
        timeout_s: for one score.
        start_s: for a process to load its rewards, on its own clock.
        passed: environment variables that they get besides the harmless ones and those that their
            rewards refer to.
        envs: variables added to the environment, by place.
    """

    def __init__(
        self,
        module: str,
        rewards: Sequence[RewardConfig],
        *,
        timeout_s: float,
        start_s: float,
        passed: Sequence[str] = (),
        envs: Sequence[Mapping[str, str]] = ({},),
        calls_at_once: int = 1,
        memory_mib: int | None = None,
    ) -> None:
        super().__init__(len(envs), calls_at_once=calls_at_once, memory_mib=memory_mib)
        self._module = module
        self._rewards = list(rewards)
        self._timeout_s = timeout_s
        self._start_s = start_s
        self._passed = passed
        self._envs = envs
        self._arguments = [str(memory_mib or 0)]
        self._output = WorkerOutput("a reward")

    async def score(self, reward: RewardConfig, sample: Sample) -> Scored:
        """Return the reward of one sample.

        Raises:
            ScoreError: if the reward raises, takes too long, crashes its process, or does not
                return numbers.
            NoWorkerError: if no process can be started here now.
        """
        request = protocol.ScoreRequest(reward.name, reward.args, sample)
        try:
            answer = await self.call(request, self._timeout_s, self._start_s)
        except OutOfTime:
            detail = f"{reward.name}: no score within {self._timeout_s:g} s"
            raise ScoreError(detail, retry=True) from None
        except WorkerGone as error:
            detail = f"{reward.name}: the worker process {error}"
            raise ScoreError(detail, retry=True) from None
        return score_of_reply(answer)

    async def close(self) -> None:
        await super().close()
        self._output.close()

    async def open_worker(self, index: int) -> RewardWorkerProcess:
        referred = (name for reward in self._rewards for name in loading.variables_of(reward))
        try:
            return await WorkerProcess.start(
                self._module,
                self._output.file,
                protocol.REPLIES,
                arguments=self._arguments,
                env=self._envs[index],
                passed={*self._passed, *referred},
            )
        except OSError as error:
            raise NoWorkerError(f"cannot start a worker process: {error}") from None

    async def prepare(self, worker: RewardWorkerProcess, limit_s: float) -> None:
        for reward in self._rewards:
            request = protocol.LoadRewardRequest(reward.name, reward.args)
            try:
                answer = await worker.call(request, limit_s, f"loading reward {reward.name}")
            except OutOfTime as error:
                detail = f"a worker process did not load its rewards: {error}"
                raise SlowStartError(detail) from None
            except WorkerGone as error:
                raise NoWorkerError(f"a worker process did not start: {error}") from None
            if isinstance(answer, protocol.ScoreFailureReply):
                raise NoWorkerError(answer.detail)


class RewardWorkerPool(RewardPool):
    """A fixed number of workers, each scoring one sample at a time.

    Args:
        num_workers: number of processes.
        timeout_s: for one score; a worker that takes longer is killed.
        memory_mib: memory of a worker beyond what its rewards load, None: no limit.
    """

    def __init__(
        self,
        num_workers: int,
        timeout_s: float,
        rewards: Sequence[RewardConfig],
        *,
        memory_mib: int | None = None,
        passed: Sequence[str] = (),
    ) -> None:
        super().__init__(
            "rewardhub.worker",
            rewards,
            timeout_s=timeout_s,
            start_s=START_S[-1],
            passed=passed,
            envs=[{}] * num_workers,
            memory_mib=memory_mib,
        )

    def adopt(self, rewards: Sequence[RewardConfig]) -> None:
        """Use these rewards from now on; each worker is replaced before its next score, as loading
        other rewards may take longer than a score.
        """
        if list(rewards) != self._rewards:
            self._rewards = list(rewards)
            self.retire_workers()

    async def start(self) -> None:
        """Start all workers, with a longer time limit at each attempt.

        Raises:
            UserError: if a reward cannot be loaded here, or no process can be started.
        """
        for attempt, (within_s, next_s) in enumerate(itertools.pairwise((*START_S, 0.0)), 1):
            errors = await self.start_workers(within_s)
            if not errors:
                return
            slow_start = next(
                (error for error in errors if isinstance(error, SlowStartError)), None
            )
            if slow_start is None:
                raise (
                    UserError(str(errors[0])) if isinstance(errors[0], NoWorkerError) else errors[0]
                )
            if not next_s:
                raise UserError(f"{slow_start}; {attempt} attempts failed")
            log.warning("%s; trying again with %g s", slow_start, next_s)


def score_of_reply(answer: protocol.RewardReply) -> Scored:
    """Return the score in a worker's answer.

    Raises:
        ScoreError: if there is no value.
    """
    if isinstance(answer, protocol.ScoreFailureReply):
        raise ScoreError(answer.detail, retry=answer.retry, trace=answer.trace)
    if answer.value is None:
        raise ScoreError("the worker process sent an answer without a value", retry=True)
    return Scored(answer.value, answer.notes)
