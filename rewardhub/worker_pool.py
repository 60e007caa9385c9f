"""A pool of workers, replaced when a reward hangs, crashes or takes too much memory."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import subprocess
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from broker.errors import RlearnerError, UserError
from broker.settings.config import RewardConfig
from broker.system.children import cpu_s
from broker.system.workers import limits, line
from broker.system.workers.output import WorkerOutput
from broker.system.workers.start import start
from broker.system.workers.work_clock import OutOfTime, answer_within
from rewardhub import protocol
from rewardhub.rewards import loading
from rewardhub.rewards.base import Sample, Scored

log = logging.getLogger(__name__)

# For a worker to load a reward, on its own clock; one attempt after the other when the hub starts.
START_S: Final = (60.0, 120.0, 240.0, 480.0)
WATCH_EVERY_S: Final = 0.5


class ScoreError(RlearnerError):
    """There is no score. ``retry``: a try may succeed. ``trace``: the reward's traceback."""

    def __init__(self, detail: str, *, retry: bool, trace: str = "") -> None:
        super().__init__(detail)
        self.retry = retry
        self.trace = trace


class NoWorkerError(RlearnerError):
    """No worker can start here now or load the reward; the group is not at fault."""


class _SlowStartError(NoWorkerError):
    """A worker did not load its rewards in time."""


class _Died(RlearnerError):
    """The worker exited, or sent something that cannot be decoded."""


class RewardWorkerProcess:
    """One child process and the connection to it.

    Attributes:
        base_mib: memory of it and its children after its rewards were loaded.
        killed_for: why it was killed, empty if it was not.
        loaded: the rewards that it has loaded.
    """

    def __init__(self, child: subprocess.Popen[bytes], speech: line.WorkerSocket) -> None:
        self.child = child
        self._line = speech
        self.base_mib = 0.0
        self.killed_for = ""
        self.loaded: Sequence[RewardConfig] = ()

    @classmethod
    async def start(
        cls, output: WorkerOutput, memory_mib: int | None, passed: Collection[str] = ()
    ) -> RewardWorkerProcess:
        """Start a process.

        Args:
            passed: environment variables that it gets besides the harmless ones.

        Raises:
            OSError: if it cannot be started.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                child = await asyncio.to_thread(
                    start,
                    "rewardhub.worker",
                    theirs,
                    output.file,
                    arguments=(str(memory_mib or 0),),
                    passed=passed,
                )
        except BaseException:
            ours.close()
            raise
        return cls(child, await line.WorkerSocket.open(ours))

    async def ask(
        self,
        request: protocol.LoadRewardRequest | protocol.ScoreRequest,
        timeout_s: float,
        name: str = "",
    ) -> protocol.ScoreReply | protocol.ScoreFailureReply:
        """Send one request and return its answer. After an exception the worker is unusable.

        Args:
            timeout_s: on the worker's own clock: a machine without a free processor must not cost a
                score.
            name: of what it does, to log that it is slow.

        Raises:
            OutOfTime: if no answer comes in time.
            _Died: if the worker exits, or its answer cannot be decoded.
        """
        asking = self._line.ask(protocol.encode_message(request))
        try:
            return protocol.decode_reply(
                await answer_within(asking, self.child.pid, timeout_s, name)
            )
        except line.HungUp:
            raise _Died(f"the worker process {self.killed_for or await self._how()}") from None
        except (line.ProtocolError, msgspec.DecodeError) as error:
            raise _Died(
                f"the worker process sent an answer that cannot be decoded: {error}"
            ) from None

    async def _how(self) -> str:
        try:
            return limits.how_ended(await asyncio.to_thread(self.child.wait, 1.0))
        except subprocess.TimeoutExpired:
            return "closed its socket"

    def weigh(self, memory_mib: int) -> None:
        """Kill it if it and its descendants take more than ``memory_mib`` beyond ``base_mib``."""
        used_mib = limits.resident_mib(limits.tree(self.child.pid)) - self.base_mib
        if used_mib > memory_mib and self.child.poll() is None:
            self.killed_for = limits.too_much(used_mib, memory_mib)
            limits.kill_tree(self.child.pid)

    async def kill(self) -> None:
        """Kill it and its descendants."""
        self._line.close()
        # It leads its own session.
        limits.kill_tree(self.child.pid)
        await asyncio.to_thread(self.child.wait)


class RewardWorkerPool:
    """A fixed number of workers, each scoring one sample at a time.

    Args:
        num_workers: number of processes.
        timeout_s: for one score; a worker that takes longer is killed.
        rewards: loaded in every worker before it serves.
        memory_mib: memory of a worker beyond what its rewards load, None: no limit.
        passed: environment variables that they get besides the harmless ones and those that their
            rewards refer to.
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
        self._passed = passed
        self._timeout_s = timeout_s
        self._rewards = list(rewards)
        self._memory_mib = memory_mib
        self._output: WorkerOutput | None = None
        self._watching: asyncio.Task[None] | None = None
        # None: not started yet
        self._free: asyncio.LifoQueue[RewardWorkerProcess | None] = asyncio.LifoQueue()
        for _ in range(num_workers):
            self._free.put_nowait(None)
        self._living: set[RewardWorkerProcess] = set()
        self._reaped_cpu_s = 0.0
        self.num_killed = 0  # after a timeout or a crash
        self.num_busy = 0

    @property
    def num_idle(self) -> int:
        """Workers that can take a sample now."""
        return self._free.qsize()

    def adopt(self, rewards: Sequence[RewardConfig]) -> None:
        """Use these rewards from now on; each worker is replaced before its next score."""
        if list(rewards) != self._rewards:
            self._rewards = list(rewards)

    async def start(self) -> None:
        """Start all workers, with a longer time limit at each attempt.

        Raises:
            UserError: if a reward cannot be loaded here, or no process can be started.
        """
        for attempt, (within_s, next_s) in enumerate(itertools.pairwise((*START_S, 0.0)), 1):
            try:
                await self._start_all(within_s)
                return
            except _SlowStartError as error:
                if not next_s:
                    raise UserError(f"{error}; {attempt} attempts failed") from None
                log.warning("%s; trying again with %g s", error, next_s)

    async def _start_all(self, within_s: float) -> None:
        places = [self._free.get_nowait() for _ in range(self._free.qsize())]
        starting = (self._keep_or_start(worker, within_s) for worker in places)
        results = await asyncio.gather(*starting, return_exceptions=True)
        for worker in results:
            self._free.put_nowait(worker if isinstance(worker, RewardWorkerProcess) else None)
        for error in results:
            if isinstance(error, _SlowStartError):
                raise error
            if isinstance(error, NoWorkerError):
                raise UserError(str(error))
            if isinstance(error, BaseException):
                raise error

    async def _keep_or_start(
        self, worker: RewardWorkerProcess | None, within_s: float
    ) -> RewardWorkerProcess:
        return worker or await self._start_one(within_s)

    async def score(self, reward: RewardConfig, sample: Sample) -> Scored:
        """Return the reward of one sample, from the next free worker.

        Raises:
            ScoreError: if the reward raises, takes too long, crashes its process, or does not
                return numbers.
            NoWorkerError: if no process can be started here now.
        """
        worker = await self._free.get()
        self.num_busy += 1
        try:
            if worker is not None and worker.loaded is not self._rewards:
                # Loading other rewards may take longer than a score.
                await self._reap(worker)
                worker = None
            worker = worker or await self._start_one()
            healthy = worker
            worker = None  # until it answers
            try:
                answer = await healthy.ask(
                    protocol.ScoreRequest(reward.name, reward.args, sample), self._timeout_s
                )
            except OutOfTime:
                self.num_killed += 1
                await self._reap(healthy)
                raise ScoreError(
                    f"{reward.name}: no score within {self._timeout_s:g} s", retry=True
                ) from None
            except _Died as error:
                self.num_killed += 1
                await self._reap(healthy)
                raise ScoreError(f"{reward.name}: {error}", retry=True) from None
            except asyncio.CancelledError:
                await self._reap(healthy)  # it still computes
                raise
            if answer.is_spent:
                await self._reap(healthy)
            else:
                worker = healthy
        finally:
            self.num_busy -= 1
            self._free.put_nowait(worker)
        return score_of_reply(answer)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*(self._reap(worker) for worker in list(self._living)))
        if self._output is not None:
            self._output.close()

    def cpu_s(self) -> float:
        """Return the CPU seconds of all workers so far, including those that have exited."""
        return self._reaped_cpu_s + sum(cpu_s(worker.child.pid) for worker in self._living)

    async def _watch(self, memory_mib: int) -> None:
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            for worker in self._living:
                if worker.base_mib:
                    worker.weigh(memory_mib)

    async def _start_one(self, within_s: float = START_S[-1]) -> RewardWorkerProcess:
        self._output = self._output or WorkerOutput("a reward")
        if self._watching is None and self._memory_mib is not None:
            self._watching = asyncio.create_task(self._watch(self._memory_mib))
        try:
            referred = [name for reward in self._rewards for name in loading.variables_of(reward)]
            worker = await RewardWorkerProcess.start(
                self._output, self._memory_mib, {*self._passed, *referred}
            )
        except OSError as error:
            raise NoWorkerError(f"cannot start a worker process: {error}") from None
        self._living.add(worker)
        rewards = self._rewards
        try:
            for reward in rewards:
                loading_it = protocol.LoadRewardRequest(reward.name, reward.args)
                answer = await worker.ask(loading_it, within_s, f"loading reward {reward.name}")
                if isinstance(answer, protocol.ScoreFailureReply):
                    raise NoWorkerError(answer.detail)
        except OutOfTime as error:
            await self._reap(worker)
            raise _SlowStartError(f"a worker process did not load its rewards: {error}") from None
        except _Died as error:
            await self._reap(worker)
            raise NoWorkerError(f"a worker process did not start: {error}") from None
        except BaseException:
            await self._reap(worker)
            raise
        worker.base_mib = limits.resident_mib(limits.tree(worker.child.pid))
        worker.loaded = rewards
        return worker

    async def _reap(self, worker: RewardWorkerProcess) -> None:
        self._living.discard(worker)
        self._reaped_cpu_s += cpu_s(worker.child.pid)
        await worker.kill()


def score_of_reply(answer: protocol.ScoreReply | protocol.ScoreFailureReply) -> Scored:
    """Return the score in a worker's answer.

    Raises:
        ScoreError: if there is no value.
    """
    if isinstance(answer, protocol.ScoreFailureReply):
        raise ScoreError(answer.detail, retry=answer.retry, trace=answer.trace)
    if answer.value is None:
        raise ScoreError("the worker process sent an answer without a value", retry=True)
    return Scored(answer.value, answer.notes)
