"""The hub's processes for rewards that score many samples at once: one per reward, or per GPU."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from broker.errors import UserError
from broker.settings.config import RewardConfig
from broker.system.children import cpu_s
from broker.system.workers import limits, line
from broker.system.workers.output import WorkerOutput
from broker.system.workers.start import start
from broker.system.workers.work_clock import OutOfTime, answer_within
from rewardhub import protocol
from rewardhub.rewards import loading
from rewardhub.rewards.base import Sample, Scored
from rewardhub.worker_pool import NoWorkerError, ScoreError, score_of_reply

log = logging.getLogger(__name__)

LOAD_S: Final = 900.0  # to load a reward model, on its process's own clock
GRACE_S: Final = 5.0  # after a reward's own timeout, if it does not keep it


class _Gone(Exception):
    """The process exited or closed the connection."""


class RewardProcess:
    """One process and the connection to it, with any number of concurrent requests."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.child = child
        self._writer = writer
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[protocol.ScoreReply | protocol.ScoreFailureReply]] = {}
        self._heard = time.monotonic()
        self.gone = ""  # how it ended
        self._listening = asyncio.create_task(self._listen(reader))

    @classmethod
    async def start(
        cls, output: WorkerOutput, env: Mapping[str, str], passed: Collection[str]
    ) -> RewardProcess:
        """Start a process.

        Args:
            env: variables added to its environment.
            passed: further variables of this process that it gets.

        Raises:
            OSError: if it cannot be started.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                child = await asyncio.to_thread(
                    start,
                    "rewardhub.reward_process",
                    theirs,
                    output.file,
                    env=env,
                    passed=passed,
                )
        except BaseException:
            ours.close()
            raise
        return cls(child, *await asyncio.open_unix_connection(sock=ours))

    @property
    def num_open(self) -> int:
        """Requests without an answer yet."""
        return len(self._open)

    async def ask(
        self,
        request: protocol.LoadRewardRequest | protocol.ScoreRequest,
        timeout_s: float,
        name: str = "",
    ) -> protocol.ScoreReply | protocol.ScoreFailureReply:
        """Send one request and return its answer.

        Args:
            timeout_s: on the process's own clock.
            name: of what it does, to log that it is slow.

        Raises:
            OutOfTime: if no answer comes in time; a process that has sent nothing at all since is
                killed.
            _Gone: if the process has exited.
        """
        if self.gone:
            raise _Gone(self.gone)
        number = next(self._numbers)
        asked_at = time.monotonic()
        answer: asyncio.Future[protocol.ScoreReply | protocol.ScoreFailureReply] = (
            asyncio.get_running_loop().create_future()
        )
        self._open[number] = answer
        try:
            self._send(protocol.NumberedRequest(number, request))
            return await answer_within(_await_value(answer), self.child.pid, timeout_s, name)
        except OutOfTime:
            if self._heard < asked_at:
                self.kill(f"was killed: it answered nothing for {timeout_s:g} s")
            raise
        finally:
            del self._open[number]
            if not self.gone and not (answer.done() and not answer.cancelled()):
                self._send(protocol.CancelScoreRequest(number))

    def _send(self, message: protocol.NumberedRequest | protocol.CancelScoreRequest) -> None:
        self._writer.write(line.frame(protocol.encode_message(message)))

    def kill(self, cause: str) -> None:
        """Kill it and its descendants."""
        self.gone = self.gone or cause
        limits.kill_tree(self.child.pid)

    async def close(self) -> None:
        """Kill it and wait for it."""
        self.kill("was closed")
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        self._writer.close()
        await asyncio.to_thread(self.child.wait)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        cause = ""
        try:
            while True:
                (size,) = line.HEADER.unpack(await reader.readexactly(line.HEADER.size))
                if size > line.MAX_ANSWER_BYTES:
                    raise msgspec.DecodeError(f"{size} bytes, the limit is {line.MAX_ANSWER_BYTES}")
                message = protocol.decode_numbered_reply(await reader.readexactly(size))
                self._heard = time.monotonic()
                if (answer := self._open.get(message.number)) is not None and not answer.done():
                    answer.set_result(message.content)
        except (asyncio.IncompleteReadError, ConnectionError):
            cause = limits.how_ended(await asyncio.to_thread(self.child.wait))
        except msgspec.DecodeError as error:
            cause = f"sent an answer that cannot be decoded: {error}"
        self.kill(cause)
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(_Gone(self.gone))


@dataclass
class _Kind:
    """One reward: its processes (None: not started yet), and how many samples it takes at once."""

    reward: RewardConfig
    envs: Sequence[Mapping[str, str]]
    timeout_s: float
    num_places: int
    room: asyncio.Semaphore
    processes: list[RewardProcess | None]
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_asked: int = 0  # samples that are being scored or wait for room


class RewardProcesses:
    """The processes of all such rewards of a hub.

    Args:
        gpus: GPUs to use, one process of each model on each; empty: what the environment allows.
        passed: environment variables that they get besides the harmless ones and those that their
            rewards refer to.

    Attributes:
        num_killed: processes that ended too early.
        num_busy: samples that are being scored.
    """

    def __init__(self, gpus: Sequence[int] = (), passed: Sequence[str] = ()) -> None:
        self._gpus = list(gpus)
        self._passed = passed
        self._kinds: dict[str, _Kind] = {}
        self._output: WorkerOutput | None = None
        self._reaped_cpu_s = 0.0
        self.num_killed = self.num_busy = 0

    async def start(self, rewards: Mapping[str, RewardConfig]) -> None:
        """Start all processes of these rewards, given by their configuration keys.

        Raises:
            UserError: if a reward cannot be loaded here; names its key.
        """
        for key, reward in rewards.items():
            try:
                kind = self._kind(reward)
                await asyncio.gather(
                    *(self._process(kind, index) for index in range(len(kind.processes)))
                )
            except NoWorkerError as error:
                raise UserError(f"{key}: {error}") from None

    async def score(self, reward: RewardConfig, sample: Sample) -> Scored:
        """Return the reward of one sample.

        Raises:
            ScoreError: if there is none.
            NoWorkerError: if no process can be started here now.
        """
        kind = self._kind(reward)
        kind.num_asked += 1
        try:
            async with kind.room:
                return score_of_reply(await self._ask(kind, reward, sample))
        finally:
            kind.num_asked -= 1

    async def _ask(
        self, kind: _Kind, reward: RewardConfig, sample: Sample
    ) -> protocol.ScoreReply | protocol.ScoreFailureReply:
        self.num_busy += 1
        try:
            index = min(
                range(len(kind.processes)), key=lambda place: _process_load(kind.processes[place])
            )
            process = await self._process(kind, index)
            return await process.ask(
                protocol.ScoreRequest(reward.name, reward.args, sample), kind.timeout_s
            )
        except OutOfTime:
            raise ScoreError(
                f"{reward.name}: no score within {kind.timeout_s:g} s", retry=True
            ) from None
        except _Gone as error:
            raise ScoreError(f"{reward.name}: its process {error}", retry=True) from None
        finally:
            self.num_busy -= 1

    def num_free(self, reward: RewardConfig) -> int:
        """Return how many more samples would be scored at once; negative: as many wait."""
        kind = self._kind(reward)
        return kind.num_places - kind.num_asked

    async def close(self) -> None:
        """Kill all of them."""
        living = [
            process
            for kind in self._kinds.values()
            for process in kind.processes
            if process is not None
        ]
        self._reaped_cpu_s = self.cpu_s()
        self._kinds.clear()
        await asyncio.gather(*(process.close() for process in living))
        if self._output is not None:
            self._output.close()

    def cpu_s(self) -> float:
        """Return the CPU seconds of all of them so far."""
        living = [process for kind in self._kinds.values() for process in kind.processes if process]
        return self._reaped_cpu_s + sum(cpu_s(process.child.pid) for process in living)

    def _kind(self, reward: RewardConfig) -> _Kind:
        key = kind_key(reward)
        if key not in self._kinds:
            concurrency = loading.concurrency_of(reward)
            assert concurrency is not None, f"{reward.name} scores one sample at a time"
            envs: list[Mapping[str, str]] = [{}]
            if concurrency.on_gpu and self._gpus:
                envs = [
                    {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(gpu)}
                    for gpu in self._gpus
                ]
            num_places = concurrency.at_once * len(envs)
            room = asyncio.Semaphore(num_places)
            self._kinds[key] = _Kind(
                reward,
                envs,
                concurrency.timeout_s + GRACE_S,
                num_places=num_places,
                room=room,
                processes=[None] * len(envs),
            )
        return self._kinds[key]

    async def _process(self, kind: _Kind, index: int) -> RewardProcess:
        async with kind.starting:
            process = kind.processes[index]
            if process is not None and not process.gone:
                return process
            if process is not None:
                self.num_killed += 1
                log.warning("%s: its process %s; starting another", kind.reward.name, process.gone)
                kind.processes[index] = None
                await process.close()
            self._output = self._output or WorkerOutput("a reward")
            try:
                passed = {*self._passed, *loading.variables_of(kind.reward)}
                process = await RewardProcess.start(self._output, kind.envs[index], passed)
            except OSError as error:
                raise NoWorkerError(
                    f"cannot start a process for {kind.reward.name}: {error}"
                ) from None
            try:
                loading_it = protocol.LoadRewardRequest(kind.reward.name, kind.reward.args)
                answer = await process.ask(loading_it, LOAD_S, f"loading reward {kind.reward.name}")
                if isinstance(answer, protocol.ScoreFailureReply):
                    raise NoWorkerError(answer.detail)
            except (OutOfTime, _Gone) as error:
                await process.close()
                raise NoWorkerError(
                    f"the process of {kind.reward.name} did not start: {error}"
                ) from None
            except BaseException:
                await process.close()
                raise
            kind.processes[index] = process
            return process


async def _await_value(
    answer: asyncio.Future[protocol.ScoreReply | protocol.ScoreFailureReply],
) -> Any:
    return await answer


def kind_key(reward: RewardConfig) -> str:
    """Return the key of the processes for this reward; equal for equal names and arguments."""
    return json.dumps([reward.name, reward.args], sort_keys=True)


def _process_load(process: RewardProcess | None) -> int:
    return 0 if process is None else process.num_open
