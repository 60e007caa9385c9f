"""``rlearner rescore``: scores the archived groups of a run with changed rewards.

Nothing of the run is changed. The archive has no rows and no conversations: rows are read again
from the data set, and rewards that read conversations are refused.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from broker.contract import wire
from broker.errors import ConfigError, UserError
from broker.settings.config import (
    DomainSection,
    RewardConfig,
    UserSettings,
    reads_episode,
)
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import check_settings, load
from broker.system.private_files import draft_of
from broker.system.visible_text import visible, visible_json
from envhub.domain import Domain, load_domains
from learner.algorithm.episodes import final_trajectories
from learner.credit import archive
from learner.credit.ticket_rules import task_seed
from learner.run_folder import RunPlace, find_run
from rewardhub.config import reward_labels
from rewardhub.rescoring import open_dispatcher, score_again
from rewardhub.score_dispatcher import ScoreDispatcher

PREFIX: Final = "reward."
OWN_KEYS: Final = ("weight", "pool")
# Groups that are scored at the same time.
AT_ONCE: Final = 16


@dataclass
class DomainFigures:
    """Figures of a domain's groups, old and new.

    Attributes:
        failed: groups that could not be scored.
        gained: episodes that solve the task only by the new rewards.
        lost: episodes that solved it only by the old ones.
    """

    groups: int = 0
    failed: int = 0
    episodes: int = 0
    old_reward: float = 0.0
    new_reward: float = 0.0
    old_success: float = 0.0
    new_success: float = 0.0
    gained: int = 0
    lost: int = 0
    problem: str = field(default="")

    def add(self, old: wire.Group, new: wire.Group | wire.Closed) -> None:
        """Count a group; until ``divide`` the rewards and successes are sums."""
        if isinstance(new, wire.Closed):
            self.failed += 1
            self.problem = self.problem or f"ticket {new.ticket}: {new.detail}"
            return
        self.groups += 1
        for before, after in zip(final_trajectories(old), final_trajectories(new), strict=True):
            self.episodes += 1
            self.old_reward += before.reward
            self.new_reward += after.reward
            self.old_success += before.success
            self.new_success += after.success
            self.gained += after.success and not before.success
            self.lost += before.success and not after.success

    def divide(self) -> None:
        """Make means of the sums."""
        count = max(self.episodes, 1)
        for name in ("old_reward", "new_reward", "old_success", "new_success"):
            setattr(self, name, round(getattr(self, name) / count, 6))


async def rescore_run(options: argparse.Namespace) -> int:
    """Score the archive and return the exit code: 1 if a group could not be scored.

    Raises:
        UserError: if the run kept no records, or the rewards cannot be used.
    """
    place = find_run(options.run_name, options.dir)
    if not archive.archive_files(place.folder / archive.FOLDER):
        raise UserError(
            f"{place.folder / archive.FOLDER}: no records to score; "
            "a run keeps them with samples.keep=true"
        )
    settings = check_settings(changed_config(place, options.overrides))
    scenes = _open_scenes(settings, place.settings.run.seed)
    out = Path(options.out) if options.out else _free_file(place.folder)
    scorers = open_dispatcher(settings, options.workers)
    figures: dict[str, DomainFigures] = {}
    try:
        await scorers.start()
        with draft_of(out) as draft, draft.open("w", encoding="utf-8") as file:
            for batch in _read_batches(place.folder / archive.FOLDER, scenes):
                work = (scenes[group.domain].score(group, scorers) for group in batch)
                for group, scored in zip(batch, await asyncio.gather(*work), strict=True):
                    figures.setdefault(group.domain, DomainFigures()).add(group, scored)
                    file.write(json.dumps(describe_group(group, scored)) + "\n")
    finally:
        await scorers.close()
    for row in figures.values():
        row.divide()
    _print_figures(options, place, out, figures)
    return int(any(row.failed for row in figures.values()))


def changed_config(place: RunPlace, overrides: Sequence[str]) -> UserSettings:
    """Return a run's settings with other rewards.

    ``reward.NAME.ARG=VALUE`` sets an argument of the reward of that name in each domain that has
    it, ``reward.NAME.weight=VALUE`` its weight; ``domains.NAME.rewards=[…]`` replaces all.

    Raises:
        UserError: if an override changes something else, or no domain has such a reward.
    """
    own = [override for override in overrides if override.startswith(PREFIX)]
    others = [override for override in overrides if not override.startswith(PREFIX)]
    for override in others:
        parts = override.partition("=")[0].split(".")
        if parts[0] != "domains" or parts[2:3] != ["rewards"]:
            allowed = "reward.NAME.ARG=VALUE or domains.NAME.rewards=[…]"
            raise UserError(f"override {override!r} is not allowed; {allowed}")
    config = copy.deepcopy(load(str(place.folder / "config.yaml"), others))
    for override in own:
        _set_argument(config, override)
    return config


def _set_argument(config: UserSettings, override: str) -> None:
    key, equals, text = override.partition("=")
    name, _, argument = key.removeprefix(PREFIX).partition(".")
    if not equals or not argument:
        raise UserError(f"override {override!r} is not allowed; write {PREFIX}NAME.ARG=VALUE")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"override {override!r} is not allowed; its value is not YAML") from None
    known = []
    is_known = False
    for domain in config["domains"].values():
        rewards = domain.get("rewards") or []
        labels = reward_labels([RewardConfig.model_validate(reward) for reward in rewards])
        known += labels
        for reward, label in zip(rewards, labels, strict=True):
            if label == name:
                is_known = True
                values = reward if argument in OWN_KEYS else reward.setdefault("args", {})
                values[argument] = value
    if not is_known:
        rewards_text = ", ".join(dict.fromkeys(known)) or "none"
        raise UserError(f"{key}: the rewards of this run are {rewards_text}")


@dataclass(frozen=True)
class RescoreScene:
    """What a domain's groups are scored with.

    Attributes:
        domain: with an environment that shows rows, if the rewards read them; None: they do not.
        seed: of the run.
    """

    section: DomainSection
    domain: Domain | None
    seed: int

    async def score(self, group: wire.Group, scorers: ScoreDispatcher) -> wire.Group | wire.Closed:
        """Return the group with new scores."""
        return await score_again(group, self.section, scorers, self._read_row(group))

    def _read_row(self, group: wire.Group) -> Mapping[str, Any]:
        if self.domain is None:
            return {}
        environment = self.domain.make()
        seed = task_seed(self.seed, "train", group.domain, group.task_index)
        environment.reset(group.task_index, "train", seed)
        if environment.prompt != group.prompt:
            raise UserError(
                f"domains.{group.domain}.env_args: the data set has another question for task "
                f"{group.task_index} than ticket {group.ticket}; restore it"
            )
        return environment.row


def _open_scenes(settings: RunSettings, seed: int) -> dict[str, RescoreScene]:
    """Return the scene of each domain with rewards.

    Raises:
        ConfigError: if a judge reads conversations.
    """
    domains = load_domains(settings)
    scenes = {}
    for name, section in settings.domains.items():
        for index, reward in enumerate(section.rewards):
            if "{conversation}" in str(reward.args.get("template")):
                key = f"domains.{name}.rewards.{index}.args.template"
                allowed = "a template without {conversation}: the archive keeps none"
                raise ConfigError(key, reward.args["template"], allowed)
        reads_rows = reads_episode(section.rewards)
        shows_rows = domains[name].isolation in ("none", "thread") and bool(
            domains[name].environment.row_digests(domains[name].args)
        )
        domain = domains[name] if reads_rows and shows_rows else None
        if section.rewards:
            scenes[name] = RescoreScene(section, domain, seed)
    return scenes


def _read_batches(samples: Path, scenes: Mapping[str, RescoreScene]) -> Iterator[list[wire.Group]]:
    """Yield the archived groups of these domains, the first of each ticket, some at a time.

    Raises:
        UserError: if a file of the archive is damaged.
    """
    batch: list[wire.Group] = []
    tickets = set[int]()
    for frame in archive.read_frames(samples):
        if frame.error:
            raise UserError(f"{samples}: {frame.error}")
        message = frame.record().message
        if not isinstance(message, wire.Group) or message.domain not in scenes:
            continue
        if message.ticket in tickets:
            continue
        tickets.add(message.ticket)
        batch.append(message)
        if len(batch) == AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def describe_group(old: wire.Group, new: wire.Group | wire.Closed) -> dict[str, Any]:
    """Return the line of a group: old and new reward and success of each episode."""
    line: dict[str, Any] = {
        "ticket": old.ticket,
        "domain": old.domain,
        "task_index": old.task_index,
    }
    if isinstance(new, wire.Closed):
        return line | {"failed": new.detail}
    episodes = [
        {
            "episode": before.episode,
            "old": before.reward,
            "new": after.reward,
            "old_success": before.success,
            "new_success": after.success,
            "old_parts": before.reward_parts,
            "new_parts": after.reward_parts,
        }
        for before, after in zip(final_trajectories(old), final_trajectories(new), strict=True)
    ]
    return line | {"episodes": episodes}


def _free_file(folder: Path) -> Path:
    """Return ``RUN-rescored-N.jsonl`` next to a run's folder, which is left alone."""
    number = 1
    while (path := folder.parent / f"{folder.name}-rescored-{number}.jsonl").exists():
        number += 1
    return path


def _print_figures(
    options: argparse.Namespace, place: RunPlace, out: Path, figures: Mapping[str, DomainFigures]
) -> None:
    if options.json:
        rows = {name: asdict(row) for name, row in figures.items()}
        print(visible_json({"run": place.name, "out": str(out), "domains": rows}))
        return
    lines = []
    for name, row in figures.items():
        lines.append(
            f"{name}: {row.groups} groups, {row.episodes} episodes; "
            f"mean reward {row.old_reward:.4g} -> {row.new_reward:.4g}, "
            f"success {row.old_success:.4g} -> {row.new_success:.4g}; "
            f"flips: {row.gained} solved now, {row.lost} no longer"
        )
        if row.failed:
            lines.append(f"{name}: {row.failed} groups were not scored: {row.problem}")
    print(visible("\n".join([*lines, f"wrote {out}"]), newlines=True))
