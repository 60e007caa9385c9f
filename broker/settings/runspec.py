"""Loads and validates configurations, and publishes the RunSpec by which processes join a run."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from broker.contract import codec, wire
from broker.contract.streams import (
    CONTROL,
    EPISODES,
    EVALTICKETS,
    RUNS,
    TICKETS,
    ack_wait_s,
    check_token,
)
from broker.contract.wire import PlainSettings
from broker.errors import ConfigError, Fenced, UserError, WireError
from broker.jetstream.bus import Bus
from broker.settings import derived
from broker.settings.config import Section, UserSettings
from broker.settings.run_settings import NAMED_SECTIONS, RunSettings, section_types
from broker.settings.secret import refuse_literal
from broker.settings.sections import parse, unknown
from broker.system.reminders import Reminders

__all__ = [
    "CHECKS",
    "SECTIONS",
    "check_digests",
    "check_settings",
    "digest_file",
    "discover_run",
    "find_runs",
    "load",
    "newest_epoch",
    "parse_sections",
    "publish_runspec",
    "validate",
    "wait_for_runspec",
]

log = logging.getLogger(__name__)


def load(path: str, overrides: Sequence[str] = ()) -> UserSettings:
    """Load a configuration, see ``config_file.load``; imported late, since processes that join a
    run read no YAML.
    """
    from broker.settings.config_file import load as read

    return read(path, overrides, of_run=_as_configured)


def _as_configured(config: UserSettings) -> PlainSettings:
    """Return a run's resolved settings with derived ones null, so that they follow changes."""
    try:
        settings = check_settings(config)
    except UserError:
        # An override may correct it; else the validation of the whole reports it.
        return config
    return derived.release(settings, _load_attribute(SCORING)(settings)).to_plain()


def name_sections(types: Mapping[str, Any]) -> dict[str, str]:
    """Return the class of each section as ``module:name``."""
    return {name: f"{kind.__module__}:{kind.__name__}" for name, kind in types.items()}


# section -> pydantic model; `domains`, `teachers` and `policies` map names to it
SECTIONS: Final[dict[str, str]] = name_sections(section_types())

# sections of other configurations than a run's, the most specific first, and the command for them
OFFLINE: Final[dict[str, str]] = {
    "dpo": "rlearner dpo",
    "distill": "rlearner distill",
    "rm": "rlearner rm",
    "data": "rlearner sft",
}

# checks across sections: each a function of RunSettings that raises ConfigError, and may return the
# settings with a value filled in
CHECKS: Final[tuple[str, ...]] = (
    "broker.settings.run_settings:check_domains",
    "learner.checks:check",
    "rollout.checks:check",
    "envhub.config:check",
    "rewardhub.config:check",
)

# Longest time of rewards, for the timeouts.
SCORING: Final = "rewardhub.config:longest_scoring_s"

S = TypeVar("S", bound=Section)

POLL_S: Final = 0.25


def check_settings(config: UserSettings, checks: Sequence[str] | None = None) -> RunSettings:
    """Check all sections of a run together; return them with defaults and timeouts.

    Args:
        config: as returned by ``load``.
        checks: checks across sections; None: those of a run, after which timeouts are derived.

    Raises:
        ConfigError: if a value is not allowed or a secret; names the first key (``train.lr``), its
            value and what is allowed.
        UserError: if it is a configuration for another command.
    """
    settings = RunSettings(**parse_sections(config, SECTIONS))
    for check in CHECKS if checks is None else checks:
        settings = _load_attribute(check)(settings) or settings
    if checks is not None:
        return settings
    return derived.derive(settings, _load_attribute(SCORING)(settings))


def validate(config: UserSettings, checks: Sequence[str] | None = None) -> PlainSettings:
    """Check a run as ``check_settings``, and return the plain values that its RunSpec holds."""
    return check_settings(config, checks).to_plain()


def parse_sections(config: UserSettings, sections: Mapping[str, str]) -> dict[str, Any]:
    """Parse each section by its class; one that is left out has its defaults.

    Args:
        sections: the known sections: those of a run, or of offline training.

    Raises:
        ConfigError: for the first key or value that is not allowed, or a secret.
        UserError: if it is a configuration for another command.
    """
    refuse_literal(config)
    for name in config:
        if name not in sections:
            if sections is SECTIONS and (
                command := next((OFFLINE[key] for key in OFFLINE if key in config), "")
            ):
                raise UserError(
                    f"{name}: with that section it is a configuration for `{command}`, not for a "
                    "run"
                )
            raise ConfigError(name, config[name], unknown(name, sections, "", config[name]))
    return {name: _parse_section(name, config.get(name), sections[name]) for name in sections}


def _parse_section(name: str, value: Any, target: str) -> Any:
    """Return a section, of ``NAMED_SECTIONS`` all entries by name."""
    model: type[Section] = _load_attribute(target)
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise ConfigError(name, value, "expected a mapping")
    if name not in NAMED_SECTIONS:
        return parse(name, value, model)
    # null removes an inherited entry
    entries = {
        check_token(str(key), name): entry for key, entry in value.items() if entry is not None
    }
    return {key: parse(f"{name}.{key}", entry, model) for key, entry in entries.items()}


def _load_attribute(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


async def newest_epoch(bus: Bus, run: str) -> int:
    """Return the newest epoch of a run, 0 if the broker does not know the run.

    Raises:
        UserError: if its RunSpec has another wire version, or does not decode.
    """
    entry = await bus.key_value(RUNS, run).get_bytes(run)
    return 0 if entry is None else _decode_runspec(run, entry[0]).epoch


async def publish_runspec(
    bus: Bus, spec: wire.RunSpec, *, above: int = 0, known_epoch: int | None = None
) -> int:
    """Write the RunSpec with the next epoch above ``above``, compare-and-swap; return it.

    This fences the previous owner of the run. Replaces the ``epoch`` in ``spec``.

    Args:
        known_epoch: newest epoch that the caller knows; a newer one is not replaced. None: take
            over from any.

    Raises:
        Fenced: if there is a newer epoch than ``known_epoch``.
        UserError: if the run exists with another wire version.
    """
    await _ensure_consumers(bus, RunSettings.of_config(spec.config))
    runs = bus.key_value(RUNS)
    while True:
        entry = await runs.get_bytes(spec.run)
        newest = 0 if entry is None else _decode_runspec(spec.run, entry[0]).epoch
        if known_epoch is not None and newest > known_epoch:
            raise Fenced(f"run {spec.run}: another learner took epoch {newest}")
        epoch = max(above, newest) + 1
        mine = msgspec.structs.replace(spec, epoch=epoch)
        revision = await (
            runs.create(spec.run, mine) if entry is None else runs.update(spec.run, mine, entry[1])
        )
        if revision is not None:
            return epoch


async def _ensure_consumers(bus: Bus, settings: RunSettings) -> None:
    """Create the consumers that the hubs of this configuration use; they may not do so themselves."""
    pools = {reward.pool for domain in settings.domains.values() for reward in domain.rewards}
    train = settings.train
    steps = min(1 + train.max_staleness, train.steps)
    # all that are open may be in hand at once
    wait_s = ack_wait_s(steps * train.groups_per_step)
    for stream, keys in (
        (TICKETS, set(settings.domains)),
        (EVALTICKETS, set(settings.domains)),
        (EPISODES, pools),
    ):
        await bus.ensure_consumers(stream, keys, wait_s)


async def wait_for_runspec(bus: Bus, run: str) -> wire.RunSpec:
    """Wait for the RunSpec of a run and return it, logging every few seconds.

    Raises:
        UserError: if it has another wire version, or does not decode.
    """
    runs = bus.key_value(RUNS)
    reminders = Reminders()
    while True:
        if (entry := await runs.get_bytes(run)) is not None:
            return _decode_runspec(run, entry[0])
        if reminders.due(time.monotonic()):
            run_names = ", ".join(sorted(await find_runs(bus)))
            log.info(
                "waiting for the learner to start run %s%s",
                run,
                f"; the broker has {run_names}" if run_names else "",
            )
        await asyncio.sleep(POLL_S)


async def find_runs(bus: Bus) -> dict[str, str]:
    """Return every run on the broker with its desired state, by default ``running``."""
    states: dict[str, str] = {}
    for run in await bus.runs():
        if await bus.key_value(RUNS, run).get_bytes(run) is None:
            continue
        desired = await bus.key_value(CONTROL, run).get(run)
        states[run] = (
            desired[0].state if desired and isinstance(desired[0], wire.DesiredState) else "running"
        )
    return states


async def discover_run(bus: Bus) -> str:
    """Wait for a run that is not stopped and return its name.

    Raises:
        UserError: if there are several; names them.
    """
    reminders = Reminders()
    while True:
        active = sorted(run for run, state in (await find_runs(bus)).items() if state != "stopped")
        if len(active) == 1:
            return active[0]
        if active:
            choices = "choose one with --run or RL_RUN, or end one with `rlearner stop`"
            raise UserError(f"several runs on this broker: {', '.join(active)}; {choices}")
        if reminders.due(time.monotonic()):
            log.info("waiting for a run to start on the broker")
        await asyncio.sleep(POLL_S)


class _Versioned(msgspec.Struct):
    """The part of a RunSpec that all wire versions have."""

    wire_version: int = wire.WIRE_VERSION


def _decode_runspec(run: str, data: bytes) -> wire.RunSpec:
    """Decode a RunSpec; another wire version may have fields unknown here."""
    try:
        spec = codec.decode(data, wire.RunSpec)
        problem = ""
        version = spec.wire_version
    except WireError as error:
        spec = None
        problem = str(error)
        version = _wire_version(data)
    if version != wire.WIRE_VERSION:
        versions = f"run {run} uses wire version {version}, this program {wire.WIRE_VERSION}"
        remedy = "install the version that started the run, or see docs/operations.md#upgrading"
        raise UserError(f"{versions}; {remedy}")
    if spec is None:
        raise UserError(f"the RunSpec of run {run} does not decode: {problem}")
    return spec


def _wire_version(data: bytes) -> int:
    """Return the wire version in an encoded RunSpec, ours without one; decodes nothing else."""
    try:
        return msgspec.msgpack.decode(data, type=_Versioned).wire_version
    except (msgspec.MsgspecError, RecursionError):
        return wire.WIRE_VERSION


def digest_file(path: str) -> str:
    """Return the hex BLAKE2b digest of a data file, or of all files of a folder but hidden ones.

    Raises:
        UserError: if a file cannot be read.
    """
    try:
        if os.path.isdir(path):
            return _digest_folder(Path(path))
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _digest_folder(folder: Path) -> str:
    """Return a digest of the names and digests of its files."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.rglob("*")):
        place = file.relative_to(folder)
        if file.is_file() and not any(part.startswith(".") for part in place.parts):
            digest.update(f"{place}\0{digest_file(str(file))}\0".encode())
    return digest.hexdigest()


def check_digests(digests: Mapping[str, str]) -> None:
    """Check that data files are the ones with which the run was started.

    Raises:
        UserError: if a file is missing or differs; names it.
    """
    for path, expected in digests.items():
        if (digest := digest_file(path)) != expected:
            raise UserError(
                f"{path}: content differs from the run's (digest {digest}, expected {expected})"
            )
