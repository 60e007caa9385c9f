"""``kind: functions``: Python functions as tools, in a process of their own.

    tools:
      sums: {kind: functions, args: {functions: ["./tools.py:add", "my_package.tools:lookup"]}}

Names, annotations and docstrings describe them to the policy; arguments are converted and checked
by pydantic. What a function raises is a result that the policy reads. A function that does not
return is killed with its process; as its arguments come from the policy, that is a result, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from broker.errors import ConfigError
from broker.settings.config import Section
from broker.settings.secret import SecretRef
from broker.system.fault import clean
from envhub.envs.tool_sources.base import (
    SourceFailed,
    ToolResult,
    ToolSource,
    ToolSpec,
)
from envhub.envs.tool_sources.function_messages import (
    REPLIES,
    CallFunction,
    FunctionReply,
    ListFunctions,
)
from envhub.envs.tool_sources.process import guarded
from envhub.envs.tool_sources.secret_values import find_values
from rlearner_workers.frames import MAX_ANSWER_BYTES
from rlearner_workers.link import InvalidMessage, LinkClosed, MessageLink
from rlearner_workers.output import WorkerOutput
from rlearner_workers.start import start

WORKER = "envhub.envs.tool_sources.function_worker"


class FunctionArgs(Section):
    """``args`` of a tool source of kind ``functions``."""

    # package.module:name or file.py:name of each; plain or async
    functions: Annotated[list[str], Field(min_length=1)]
    # added to the environment of their process
    env: dict[str, str | SecretRef] = Field(default_factory=dict)
    start_timeout_s: Annotated[float, Field(gt=0)] = 20.0  # to import them


class FunctionSource(ToolSource):
    """One process with the functions."""

    Args = FunctionArgs
    on_failure = "observe"

    args: FunctionArgs

    def __init__(self, name: str, args: FunctionArgs) -> None:
        super().__init__(name, args)
        self._link: MessageLink[FunctionReply] | None = None
        self._pid = 0
        self._output: WorkerOutput | None = None
        self._turn = asyncio.Lock()

    @classmethod
    def check(cls, args: FunctionArgs) -> None:
        for target in args.functions:
            place, _, name = target.rpartition(":")
            if not place or not name:
                allowed = "write 'package.module:name' or 'file.py:name'"
                raise ConfigError("functions", target, allowed)
            if place.endswith(".py") and not Path(place).is_file():
                raise ConfigError("functions", target, f"there is no file {place}")

    @classmethod
    def data_files(cls, args: FunctionArgs) -> list[str]:
        files = (target.rpartition(":")[0] for target in args.functions)
        return list(dict.fromkeys(file for file in files if file.endswith(".py")))

    async def open(self) -> Sequence[ToolSpec]:
        env = find_values(self.args.env, f"tools.{self.name}.env")
        ours, theirs = socket.socketpair()
        output = self._output = WorkerOutput(f"tools {self.name}")
        with theirs:
            try:
                child = await asyncio.to_thread(
                    start,
                    WORKER,
                    theirs,
                    output.file,
                    arguments=self.args.functions,
                    death_signal=signal.SIGTERM,
                    env=env,
                    within=guarded([]),
                )
            except OSError as error:
                ours.close()
                raise SourceFailed(f"functions {self.name}: {error.strerror}") from None
        self._pid = child.pid
        self._link = await MessageLink.open(ours, REPLIES, MAX_ANSWER_BYTES)
        try:
            async with asyncio.timeout(self.args.start_timeout_s):
                functions = (await self._link.call(ListFunctions())).functions
        except TimeoutError:
            await self.close()
            limit = self.args.start_timeout_s
            raise SourceFailed(
                f"functions {self.name} were not imported within {limit:g} s"
            ) from None
        except (LinkClosed, InvalidMessage) as error:
            await self.close()
            raise SourceFailed(f"functions {self.name}: the process ended: {error}") from None
        if functions is None or functions.problem:
            await self.close()
            problem = functions.problem if functions else "the process listed no functions"
            raise SourceFailed(f"functions {self.name}: {clean(problem)}")
        return functions.specs

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> ToolResult:
        # one process runs one call at a time
        async with self._turn:
            if self._link is None:
                raise SourceFailed(f"functions {self.name} are not running")
            try:
                async with asyncio.timeout(timeout_s):
                    result = (await self._link.call(CallFunction(tool, arguments))).result
                if result is None:
                    raise InvalidMessage("it sent no result")
                return result
            except TimeoutError:
                await self.close()
                detail = f"function {tool} did not return within {timeout_s:g} s"
                raise SourceFailed(detail) from None
            except (LinkClosed, InvalidMessage) as error:
                await self.close()
                raise SourceFailed(f"function {tool} ended its process: {error}") from None
            except asyncio.CancelledError:
                # the answer that is under way would be read as the next one's
                await self.close()
                raise

    async def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)
            self._pid = 0
        if self._output is not None:
            self._output.close()
            self._output = None
