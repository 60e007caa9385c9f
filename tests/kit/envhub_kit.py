"""What the environment hub's tests share: a character tokenizer, a policy that answers from a
script, odd environments.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from broker.settings.config import DomainSection, Section
from envhub.domain import Domain, load_domain
from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.servers.turn import SampledTurn, TurnRequest
from rlearner_text.config import TinyModel
from rlearner_text.tiny import _write_tokenizer
from rlearner_text.tokenizer import Tokenizer


def write_tokenizer(folder: Path) -> Path:
    """A folder with the quickstart's tokenizer and no model."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, TinyModel())
    return folder


def domain(env: str, name: str = "d", **section: object) -> Domain:
    return load_domain(name, DomainSection.model_validate({"env": env, **section}))


class Scripted:
    """Samples each turn's text from a function of the conversation so far; end-of-turn token
    included.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Callable[[str], str],
        *,
        version: int = 3,
        close: bool = True,
    ) -> None:
        self.tokenizer, self.script, self.version, self.close = tokenizer, script, version, close
        self.asks: list[TurnRequest] = []

    async def turn(self, ask: TurnRequest) -> SampledTurn:
        self.asks.append(ask)
        context = self.tokenizer.decode(ask.token_ids, skip_special_tokens=False)
        end = self.tokenizer.token_id("<|im_end|>")
        assert end is not None
        ids = (self.tokenizer.encode(self.script(context)) + [end] * self.close)[
            : ask.sampling.max_tokens
        ]
        reason = "stop" if ids and ids[-1] == end else "length"
        return SampledTurn.of(ids, [-0.5] * len(ids), [self.version, len(ids)], reason, "server-1")  # type: ignore[arg-type]

    def forget(self, episode: str) -> None: ...


class Silent(Environment):
    """Gives no anchors, and no text at first and after the second action."""

    isolation = "thread"

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        self.prompt = "seven"
        self._at = 0
        return Observation("")

    def step(self, text: str) -> StepResult:
        self._at += 1
        return StepResult(Observation("text 1" if self._at == 1 else ""), 0.0, done=False)


class CountArgs(Section):
    """``env_args`` of the counting environment."""

    until: int = 2
    trouble: str = ""  # what goes wrong, and where
    seconds: float = 0.0


class Count(Environment):
    """Says 1, 2, 3, … and ends at ``until``; goes wrong on demand."""

    Args = CountArgs
    isolation = "thread"
    args: CountArgs
    made = 0
    closed = 0
    released = threading.Event()  # ends a hang early

    def __init__(self, args: CountArgs) -> None:
        super().__init__(args)
        type(self).made += 1
        self._at = 0

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        self._at = 0
        self._trouble("reset")
        return Observation("0", anchor="0")

    def step(self, text: str) -> StepResult:
        self._at += 1
        self._trouble("step")
        reward = float("nan") if self.args.trouble == "nan" else 0.5
        done = self._at >= self.args.until
        anchor = str(self._at) if self.args.trouble != "large" else "x" * 3_000_000
        return StepResult(
            Observation(str(self._at), anchor=anchor),
            reward,
            done,
            bool(text),
            done,
            metrics={"at": self._at},
        )

    def close(self) -> None:
        type(self).closed += 1

    def _trouble(self, where: str) -> None:
        if self.args.trouble == f"raise in {where}":
            raise ValueError(f"broken\nin {where}")
        if self.args.trouble == f"hang in {where}":
            self.released.wait(self.args.seconds)


class Unrewarded(Count):
    """A reward function decides about success."""

    has_reward = False


class AsyncCount(Count):
    """The same, asynchronous."""

    async def reset(self, task_index: int, split: Split, seed: int) -> Observation:  # type: ignore[override]
        return super().reset(task_index, split, seed)

    async def step(self, text: str) -> StepResult:  # type: ignore[override]
        if self.args.trouble == "await in step":
            await asyncio.sleep(self.args.seconds)
        return super().step(text)


class NoEnvironment:
    """Derives from nothing."""
