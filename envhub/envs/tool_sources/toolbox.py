"""The tools of an episode: its own sources, and those that the episodes of a hub share."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final

from pydantic import Field

from broker.errors import ConfigError
from broker.settings.config import PluginArguments, PluginMark, Section
from broker.settings.registry import resolve
from broker.settings.sections import parse
from envhub.envs.tool_sources import TOOL_SOURCES
from envhub.envs.tool_sources.base import (
    OnFailure,
    SlowTool,
    SourceFailed,
    ToolResult,
    ToolSource,
    ToolSpec,
    cut,
)
from envhub.envs.tool_sources.schemas import ArgumentChecker, check_specs

TABLE: Final = "envhub.envs.tool_sources:TOOL_SOURCES"


class SourceSection(Section):
    """One source of tools."""

    # a name of the registry in envhub/envs/tool_sources, or a dotted path to a class
    kind: Annotated[str, PluginMark("tool_sources", TABLE, "args")]
    args: PluginArguments = Field(default={})  # checked by its class
    only: tuple[str, ...] = ()  # the tools to offer; empty: all
    prefix: str = ""  # put before the name of each tool
    # one for all episodes of a hub that are configured alike, instead of one per episode
    shared: bool = False
    # when the source dies or hangs. fail: the episode fails and is tried again; observe: the policy
    # reads why, and the source is started again; null: as its kind says
    on_failure: OnFailure | None = None


@dataclass
class OpenSource:
    """A source and what it offers.

    Attributes:
        make: makes an instance, which is used until it fails or its episode ends.
        on_failure: what a failure means.
        source: the running instance.
        names: its own name of each tool, by the name that the policy knows.
    """

    name: str
    section: SourceSection
    make: Callable[[], ToolSource]
    on_failure: OnFailure
    source: ToolSource | None = None
    names: dict[str, str] = field(default_factory=dict)
    specs: list[ToolSpec] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_users: int = 0

    async def open(self) -> ToolSource:
        """Return a running instance.

        Raises:
            SourceFailed: if it does not start, or its tools cannot be offered.
        """
        async with self.lock:
            if self.source is not None:
                return self.source
            source = self.make()
            try:
                self._take(list(await source.open()))
            except BaseException:
                await source.close()
                raise
            self.source = source
            return source

    async def close(self, failed: ToolSource | None = None) -> None:
        """End the instance; with ``failed`` only if it is still that one."""
        source = self.source
        if source is None or failed not in (None, source):
            return
        self.source = None
        await source.close()

    def _take(self, specs: list[ToolSpec]) -> None:
        source = f"tools.{self.name}"
        check_specs(source, specs)
        section = self.section
        known = {spec.name for spec in specs}
        if missing := [name for name in section.only if name not in known]:
            raise SourceFailed(
                f"{source} has no tool {missing[0]!r}; it has {', '.join(sorted(known))}"
            )
        chosen = [spec for spec in specs if not section.only or spec.name in section.only]
        self.names = {f"{section.prefix}{spec.name}": spec.name for spec in chosen}
        self.specs = [
            ToolSpec(f"{section.prefix}{spec.name}", spec.description, spec.parameters)
            for spec in chosen
        ]


# those that episodes of this process share, by their settings
_shared_sources: dict[tuple[int, str], OpenSource] = {}


def load_source(name: str, section: SourceSection) -> OpenSource:
    """Return a source that is not open yet.

    Raises:
        ConfigError: if its kind is unknown, or an argument is not allowed.
    """
    key = f"tools.{name}"
    try:
        kind = resolve("tool_sources", section.kind, TOOL_SOURCES)
    except ConfigError as error:
        raise ConfigError(f"{key}.kind", section.kind, error.allowed) from None
    if not (isinstance(kind, type) and issubclass(kind, ToolSource)):
        allowed = "a class that derives from envhub.envs.tool_sources.base.ToolSource"
        raise ConfigError(f"{key}.kind", section.kind, allowed)
    args = parse(f"{key}.args", section.args, kind.Args)
    return OpenSource(
        name, section, partial(kind, name, args), section.on_failure or kind.on_failure
    )


def check_source(name: str, section: SourceSection) -> None:
    """Check a source's arguments; starts nothing.

    Raises:
        ConfigError: with the full key.
    """
    source = load_source(name, section).make()
    try:
        source.check(source.args)
    except ConfigError as error:
        raise ConfigError(f"tools.{name}.args.{error.key}", error.value, error.allowed) from None


class Toolbox:
    """The tools of one episode after another.

    Args:
        sections: the sources by name.
        shown: the tools that the policy was shown; None: whatever they list.
    """

    def __init__(
        self, sections: Mapping[str, SourceSection], shown: Sequence[ToolSpec] | None = None
    ) -> None:
        self._sections = sections
        self._shown = shown
        self._sources: list[OpenSource] = []
        self._by_tool: dict[str, OpenSource] = {}
        self._checker: ArgumentChecker | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def specs(self) -> list[ToolSpec]:
        """The tools of all sources, in order."""
        return [spec for source in self._sources for spec in source.specs]

    async def open(self) -> None:
        """Start the sources of an episode; shared ones that run stay.

        Raises:
            SourceFailed: if one does not start, or lists other tools than were shown.
            UserError: if a secret is missing, or two tools have the same name.
        """
        self.end_episode()
        if not self._sources:
            self._sources = [self._source(*item) for item in self._sections.items()]
        results = await asyncio.gather(
            *(source.open() for source in self._sources), return_exceptions=True
        )
        if errors := [error for error in results if isinstance(error, BaseException)]:
            raise errors[0]
        self._by_tool = {}
        for source in self._sources:
            for name in source.names:
                if name in self._by_tool:
                    other = self._by_tool[name].name
                    key = f"tools.{source.name}.prefix"
                    allowed = f"a prefix, as tools.{other} has a tool {name}, too"
                    raise ConfigError(key, source.section.prefix, allowed)
                self._by_tool[name] = source
        if self._shown is not None and self.specs != list(self._shown):
            raise SourceFailed(describe_change(self._shown, self.specs))
        if self._checker is None:
            self._checker = ArgumentChecker(self.specs)

    async def call(
        self, tool: str, arguments: dict[str, Any], until: float, limit: int
    ) -> tuple[ToolResult, bool]:
        """Run a tool. Return its result, and whether the call was valid.

        Args:
            until: on the monotonic clock.
            limit: of the result, in characters.

        Raises:
            SourceFailed: if its source failed, and the policy is not to read of that.
        """
        assert self._checker is not None
        if problem := self._checker.problem(tool, arguments):
            return ToolResult(problem, is_error=True), False
        source = self._by_tool[tool]
        if (left_s := until - time.monotonic()) <= 0:
            return ToolResult("no time is left for it in this turn", is_error=True), True
        # an earlier call may have ended it; that it does not start is never the policy's fault
        instance = await source.open()
        try:
            result = await instance.call(source.names[tool], arguments, left_s)
        except SlowTool as error:
            return ToolResult(str(error), is_error=True), True
        except SourceFailed as error:
            await source.close(instance)
            if source.on_failure == "fail":
                raise
            return ToolResult(f"{error}; it is started again", is_error=True), True
        return ToolResult(cut(result.text, limit), result.is_error), True

    def end_episode(self) -> None:
        """End the sources of this episode, in the background."""
        for source in self._sources:
            if not source.section.shared and source.source is not None:
                task = asyncio.create_task(source.source.close())
                source.source = None
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End all sources that no other episode uses."""
        sources = self._sources
        self._sources = []
        ending = []
        for source in sources:
            if source.section.shared:
                source.num_users -= 1
                if source.num_users:
                    continue
                _forget(source)
            ending.append(source.close())
        await asyncio.gather(*ending, *self._closing, return_exceptions=True)

    def _source(self, name: str, section: SourceSection) -> OpenSource:
        if not section.shared:
            return load_source(name, section)
        loop = id(asyncio.get_running_loop())
        key = (loop, json.dumps([name, section.to_plain()], sort_keys=True))
        source = _shared_sources.setdefault(key, load_source(name, section))
        source.num_users += 1
        return source


def _forget(source: OpenSource) -> None:
    for key in [key for key, each in _shared_sources.items() if each is source]:
        del _shared_sources[key]


def describe_change(shown: Sequence[ToolSpec], specs: Sequence[ToolSpec]) -> str:
    """Return in one line how tools differ from those that the policy was shown."""
    old = {spec.name: spec for spec in shown}
    new = {spec.name: spec for spec in specs}
    parts = []
    if gone := sorted(old.keys() - new.keys()):
        parts.append(f"{', '.join(gone)} gone")
    if added := sorted(new.keys() - old.keys()):
        parts.append(f"{', '.join(added)} new")
    if changed := sorted(name for name in old.keys() & new.keys() if old[name] != new[name]):
        parts.append(f"{', '.join(changed)} changed")
    what = "; ".join(parts) or "in another order"
    return f"the tools are not those that were checked at the start: {what}"


def list_tools(sections: Mapping[str, SourceSection]) -> list[ToolSpec]:
    """Start all sources, list their tools and end them; blocks, also within an event loop.

    Raises:
        SourceFailed: if one does not start, or its tools cannot be offered.
        UserError: if a secret is missing.
    """
    result: list[ToolSpec | BaseException] = []

    async def list_once() -> None:
        box = Toolbox({name: _unshared(section) for name, section in sections.items()})
        try:
            await box.open()
            result.extend(box.specs)
        finally:
            await box.close()

    def work() -> None:
        try:
            asyncio.run(list_once())
        except BaseException as error:  # noqa: BLE001 - raised below
            result[:] = [error]

    thread = threading.Thread(target=work, name="list-tools")
    thread.start()
    thread.join()
    if result and isinstance(result[0], BaseException):
        raise result[0]
    return [spec for spec in result if isinstance(spec, ToolSpec)]


def _unshared(section: SourceSection) -> SourceSection:
    return section.model_copy(update={"shared": False})
