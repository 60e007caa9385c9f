"""What one seat sees of a table: an environment whose steps include the turns of all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from broker.contract import wire
from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.episodes.episode import WorkSpans
from envhub.episodes.seats.table import SeatTable
from rlearner_text.tool_calls import ToolCall


class SeatUnused(Exception):
    """The episode was over before the seat had a turn."""


class SeatView(Environment):
    """The environment as one seat sees it, for an ``Episode`` of its own.

    Args:
        check: refuses what the seat must not say; None: it may say anything.
    """

    isolation = "none"

    def __init__(
        self, table: SeatTable, seat: str, check: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(table.environment.args)
        self._table = table
        self._seat = seat
        self._check = check

    async def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        """Wait for the first turn; the table has reset the environment.

        Raises:
            SeatUnused: if it never comes.
        """
        turn = await self._table.wait_turn(self._seat)
        if turn.done:
            raise SeatUnused
        environment = self._table.environment
        self.prompt = environment.prompt
        self.reference = environment.reference
        self.row = environment.row
        return turn.observation

    async def step(self, text: str) -> StepResult:
        if self._check is not None:
            self._check(text)
        return await self._table.act(self._seat, "step", text)

    async def use(self, calls: Sequence[ToolCall]) -> StepResult:
        return await self._table.act(self._seat, "use", calls)

    async def text_frame(self) -> str:  # type: ignore[override]
        return await self._table.look()


class _NoCurve:
    """Measures nothing, as the table measures what the environment does."""

    def enter(self, now: float) -> None: ...
    def leave(self, piece: Any, now: float, units: float) -> None: ...


class SeatCalls:
    """Calls a seat's view; a wait for the others has no limit of its own."""

    curve = _NoCurve()

    async def call(self, environment: Environment, method: str, *args: Any) -> Any:
        return await getattr(environment, method)(*args)


class SeatSpans:
    """Records a seat's work except steps, which include the work of others."""

    def __init__(self, spans: WorkSpans) -> None:
        self._spans = spans

    def enter(self, kind: wire.SpanKind, step: int = -1) -> float:
        return 0.0 if kind == "env_step" else self._spans.enter(kind, step)

    def leave(self, kind: wire.SpanKind, began: float, ticket: int = 0, step: int = -1) -> None:
        if kind != "env_step":
            self._spans.leave(kind, began, ticket, step)
