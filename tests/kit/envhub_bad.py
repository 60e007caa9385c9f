"""Environments that do everything an environment must not do, for the tests of the environment hub."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

from broker.settings.config import Section
from envhub.envs.base import Environment, Observation, Split, StepResult

_kept: list[bytearray] = []


class BadArgs(Section):
    """``env_args``: what it does and where, in that task; tasks beyond the last go well."""

    does: tuple[str, ...] = ()  # for example ``raises`` (in its second step), ``raises in reset``
    constructor: str = ""
    folder: str = ""  # where it leaves a trace


class Bad(Environment):
    """Counts to two, and misbehaves on the way."""

    Args = BadArgs
    args: BadArgs

    def __init__(self, args: BadArgs) -> None:
        super().__init__(args)
        self._at, self._task = 0, -1
        if args.constructor:
            self._misbehave(args.constructor)

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        self._at, self._task = 0, task_index
        self.prompt, self.reference = f"task {task_index}", str(os.getpid())
        fault, _, where = self._fault()
        done = self._misbehave(fault) if where == "reset" else None
        return Observation("0", anchor="0") if done is None else done

    def step(self, text: str) -> StepResult:
        self._at += 1
        fault, _, where = self._fault()
        done = self._misbehave(fault) if fault and not where and self._at == 2 else None
        if done is not None:
            return done  # type: ignore[no-any-return]
        return StepResult(
            Observation(str(self._at), anchor=str(self._at)),
            0.5,
            self._at >= 2,
            bool(text),
            self._at >= 2,
        )

    def _fault(self) -> tuple[str, str, str]:
        return (self.args.does[self._task] if self._task < len(self.args.does) else "").partition(
            " in "
        )

    def _misbehave(self, fault: str) -> Any:
        if self.args.folder:
            with open(
                os.path.join(self.args.folder, f"{fault}.{os.getpid()}"), "w", encoding="ascii"
            ):
                pass
        return getattr(self, f"_{fault}")()

    # -- does not come back

    def _sleeps(self) -> None:
        while True:
            time.sleep(0.05)

    def _spins(self) -> None:
        while True:
            pass

    def _holds_the_lock(self) -> None:
        ctypes.PyDLL(None).pause()  # of the interpreter: no other thread of its process goes on

    def _ignores_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._sleeps()

    def _waits_for_its_child(self) -> None:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open(os.path.join(self.args.folder, "child"), "w", encoding="ascii") as file:
            file.write(str(child.pid))
        child.wait()

    # -- ends its process, or a part of it

    def _raises(self) -> None:
        raise ValueError("broken\nin two lines")

    def _exits(self) -> None:
        sys.exit(3)

    def _leaves(self) -> None:
        os._exit(7)

    def _aborts(self) -> None:
        os.abort()

    def _reads_nowhere(self) -> None:
        ctypes.string_at(0)

    def _recurses(self) -> None:
        self._recurses()

    def _closes_everything(self) -> None:
        os.closerange(3, 256)
        time.sleep(600)

    def _answers_itself(self) -> None:
        for fd in range(3, 64):
            try:
                os.write(fd, b"\xff\xff\xff\x7fgarbage")
            except OSError:
                continue
        time.sleep(600)

    # -- takes too much

    def _leaks(self) -> None:
        while True:
            _kept.append(bytearray(b"x" * (1 << 20)))

    def _keeps_some(self) -> None:
        _kept.extend(bytearray(b"x" * (1 << 20)) for _ in range(120))

    def _leaks_through_children(self) -> None:
        code = (
            "import time; kept = [bytearray(b'x' * (1 << 20)) for _ in range(150)]; time.sleep(600)"
        )
        children = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
        children[0].wait()

    def _prints_to_both(self) -> None:
        print("said", flush=True)
        print("complained", file=sys.stderr, flush=True)

    def _starts_threads(self) -> None:
        for _ in range(20):
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()

    # -- returns what it must not

    def _returns_none(self) -> Any:
        return "no such thing"

    def _returns_nan(self) -> Any:
        return StepResult(Observation("x"), float("nan"), False)

    def _returns_infinite_metric(self) -> Any:
        return StepResult(Observation("x"), 0.0, False, metrics={"speed": float("inf")})

    def _returns_text_reward(self) -> Any:
        return StepResult(Observation("x"), "1.0", False)  # type: ignore[arg-type]

    def _returns_numpy(self) -> Any:
        done: Any = np.bool_(True)
        return StepResult(
            Observation("2"), np.float32(0.5), done, True, done, metrics={"at": np.int64(2)}
        )  # type: ignore[arg-type,dict-item]

    def _returns_text_done(self) -> Any:
        return StepResult(Observation("x"), 0.0, "False")  # type: ignore[arg-type]

    def _returns_number_observation(self) -> Any:
        return StepResult(Observation(17), 0.0, False)  # type: ignore[arg-type]

    def _returns_surrogates(self) -> Any:
        return StepResult(Observation("a\ud800b"), 0.0, False)

    def _returns_ten_megabytes(self) -> Any:
        return StepResult(Observation("x" * 10_000_000), 0.0, False)

    def _returns_ten_megabytes_of_anchor(self) -> Any:
        return StepResult(Observation("x", anchor="x" * 10_000_000), 0.0, False)

    def _returns_a_thousand_metrics(self) -> Any:
        return StepResult(Observation("x"), 0.0, False, metrics={str(n): 0.0 for n in range(1000)})


class AsyncBad(Bad):
    """The same, asynchronous."""

    async def step(self, text: str) -> StepResult:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(text)


class Straggler(Bad):
    """One instance of each task hangs: the first to make its file."""

    def step(self, text: str) -> StepResult:
        try:
            os.close(
                os.open(
                    os.path.join(self.args.folder, f"task.{self._task}"), os.O_CREAT | os.O_EXCL
                )
            )
        except FileExistsError:
            return super().step(text)
        with open(
            os.path.join(self.args.folder, f"straggler.{os.getpid()}"), "w", encoding="ascii"
        ):
            pass
        time.sleep(600)
        raise AssertionError
