"""Loads a run's domains for the hub: config section, environment class, checked arguments."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from broker.errors import ConfigError, DataError
from broker.settings.config import (
    DomainSection,
    Section,
    reads_episode,
    seat_policies,
    shows_anchors,
    takes_steps,
)
from broker.settings.registry import check_method, resolve
from broker.settings.run_settings import RunSettings
from broker.settings.sections import parse
from envhub.context import Memory, StepContext, load_memory
from envhub.envs import AGENTS, ENVS
from envhub.envs.agent import AgentEnvironment
from envhub.envs.base import Environment, History, Isolation, Split
from envhub.lengths.selection import EstimatorChoice, load_estimator
from envhub.servers.turn import mix
from envhub.tasks.settings import TaskArgs
from rlearner_text.template_rules import Examples


@dataclass(frozen=True)
class Domain:
    """One kind of task."""

    name: str
    section: DomainSection
    environment: type[Environment]
    args: Section
    memory: Memory | None = None  # with context steps: makes a turn's prompt
    # whether the text that a turn answers is its anchor, where the environment gives none
    shows_anchors: bool = False
    seat: str = ""  # as which it is played, see ``for_seat``

    @property
    def isolation(self) -> Isolation:
        """Where the environment's methods run: as configured, else as the class says."""
        return self.section.isolation or self.environment.isolation

    @property
    def has_program(self) -> bool:
        """Whether a program plays its episodes, and calls the policy by itself."""
        is_agent = issubclass(self.environment, AgentEnvironment)
        return is_agent or (isinstance(self.args, TaskArgs) and bool(self.args.agent))

    def make(self) -> Environment:
        """Return a new instance of the environment."""
        environment = self.environment(self.args)
        environment.isolation = self.isolation
        return environment

    def steps(self) -> StepContext | None:
        """Return a memory for one episode with context steps, None for whole conversations."""
        if self.memory is None:
            return None
        return StepContext(self.memory, self.section.history_length)

    def messages(self, observation: str, history: History = ()) -> list[dict[str, Any]]:
        """Return the conversation before the first action; weight 0: answers not to train on."""
        system_prompt, _, examples = self.opening_after(history)
        messages: list[dict[str, Any]] = []
        if system_prompt:
            messages.append({"role": "system", "content": system_prompt})
        for question, answer in examples:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer, "weight": 0})
        return [*messages, {"role": "user", "content": observation}]

    def opening_after(self, history: History) -> tuple[str, str, Examples]:
        """Return ``opening`` for a task with messages of its own before the first observation."""
        system, tools, examples = self.opening
        turns = history
        if history and history[0][0] == "system":
            system = history[0][1]
            turns = history[1:]
        contents = [content for _, content in turns]
        return system, tools, (*examples, *zip(contents[::2], contents[1::2], strict=True))

    @cached_property
    def opening(self) -> tuple[str, str, Examples]:
        """What conversations begin with: the system prompt, the tools as JSON, the examples."""
        examples = tuple((each.question, each.answer) for each in self.section.examples)
        return self.section.system_prompt, self.tools, examples

    @cached_property
    def tools(self) -> str:
        """The environment's tools as JSON, empty if it has none, or not for this seat."""
        if self.seat and self.seat not in self.environment.tool_seats(self.args):
            return ""
        functions = self.environment.tools(self.args)
        return json.dumps(functions) if functions else ""

    @cached_property
    def seats(self) -> tuple[str, ...]:
        """The environment's seats, empty if one policy plays all of it."""
        return self.environment.seats(self.args)

    @cached_property
    def _seat_domains(self) -> dict[str, Domain]:
        return {seat: replace(self, seat=seat) for seat in self.seats}

    def for_seat(self, seat: str) -> Domain:
        """Return the domain as one seat plays it; itself without seats."""
        return self._seat_domains[seat] if seat else self

    def first_seat(self, task_index: int) -> str:
        """Return where the player of the first seat sits in a task."""
        shift = task_index % len(self.seats) if self.section.rotate_seats else 0
        return self.seats[shift]

    def seat_players(self, task_index: int, seed: int) -> dict[str, str]:
        """Return the policy of each seat in a task, in the environment's order.

        Args:
            seed: of the ticket, by which policies of a list are drawn.
        """
        entries = [seat_policies(self.section.seats[seat]) for seat in self.seats]
        players = [entry[mix(seed, number) % len(entry)] for number, entry in enumerate(entries)]
        shift = self.seats.index(self.first_seat(task_index))
        moved = players[len(players) - shift :] + players[: len(players) - shift]
        return dict(zip(self.seats, moved, strict=True))

    @cached_property
    def make_estimator(self) -> EstimatorChoice:
        """Makes the estimator of the lengths of its turns; worker processes do not import it.

        Raises:
            ConfigError: if there is none of that name, or an argument is not allowed.
        """
        return load_estimator(
            self.name, self.section.length_estimator, self.section.length_estimator_args
        )

    @cached_property
    def sends_messages(self) -> bool:
        """Whether rewards may read the messages of an episode, and its row."""
        return reads_episode(self.section.rewards)

    def check(self) -> None:
        """Check that environment and length estimator can run; reads data files.

        Raises:
            ConfigError: names ``domains.<name>.env_args.<key>``, or the key of the estimator.
            DataError: if a row is malformed.
        """
        self.make_estimator  # noqa: B018 - resolves it
        try:
            self.environment.check(self.args)
        except ConfigError as error:
            raise ConfigError(
                f"domains.{self.name}.env_args.{error.key}", error.value, error.allowed
            ) from None
        except DataError as error:
            raise DataError(
                error.path, error.line, f"{error.problem} (domain {self.name})"
            ) from None

    @property
    def has_chosen_tasks(self) -> bool:
        """Whether the learner chooses its tasks, which then come back."""
        is_mixed = self.environment.is_mixed(self.args)
        return self.section.curriculum is not None or is_mixed

    def num_tasks(self, split: Split) -> int | None:
        """Return ``Environment.num_tasks``."""
        return self.environment.num_tasks(self.args, split)


def load_domain(name: str, section: DomainSection, adv_estimator: str = "") -> Domain:
    """Resolve the environment and validate its arguments; opens no file.

    Args:
        adv_estimator: of the run, for ``context: auto``.

    Raises:
        ConfigError: if the environment is unknown or lacks a method, or an argument is not allowed.
    """
    try:
        environment = resolve("envs", section.env, {**ENVS, **AGENTS})
    except ConfigError as error:
        raise ConfigError(f"domains.{name}.env", section.env, error.allowed) from None
    if not (isinstance(environment, type) and issubclass(environment, Environment)):
        raise ConfigError(
            f"domains.{name}.env",
            section.env,
            "a class that derives from envhub.envs.base.Environment",
        )
    _check_methods(f"domains.{name}.env", section.env, environment)
    arguments = parse(f"domains.{name}.env_args", section.env_args, environment.Args)
    _check_seats(name, section, environment.seats(arguments))
    memory = load_memory(f"domains.{name}.memory", section.memory)
    has_steps = takes_steps(section.context, adv_estimator)
    return Domain(
        name,
        section,
        environment,
        arguments,
        memory if has_steps else None,
        shows_anchors=shows_anchors(section.anchors, adv_estimator),
    )


def _check_seats(name: str, section: DomainSection, seats: tuple[str, ...]) -> None:
    """Check that each seat has a player."""
    key = f"domains.{name}"
    if set(section.seats) != set(seats):
        allowed = f"left out: environment {section.env} has no seats"
        if seats:
            allowed = f"who plays each seat of environment {section.env}: {', '.join(seats)}"
        raise ConfigError(f"{key}.seats", section.seats, allowed)
    if section.rotate_seats and len(seats) < 2:
        raise ConfigError(f"{key}.rotate_seats", True, "false without several seats")


def _check_methods(key: str, name: str, environment: type[Environment]) -> None:
    if issubclass(environment, AgentEnvironment):
        # its program acts
        return
    check_method(key, name, environment, "reset", ("task_index", "split", "seed"), base=Environment)
    check_method(key, name, environment, "step", ("text",), base=Environment)
    if environment.tools.__func__ is not Environment.tools.__func__:  # type: ignore[attr-defined]
        check_method(
            key,
            name,
            environment,
            "use",
            ("calls",),
            base=Environment,
            purpose=", which its tools need",
        )


def load_domains(settings: RunSettings) -> dict[str, Domain]:
    """Return every domain of a validated config by name.

    Raises:
        ConfigError: as ``load_domain``.
    """
    estimator = settings.algorithm.adv_estimator
    return {
        name: load_domain(name, section, estimator) for name, section in settings.domains.items()
    }
