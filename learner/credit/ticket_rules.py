"""Decides the contents of the next ticket, purely from what has been issued so far."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from broker.settings.config import num_greedy
from broker.settings.timeouts import seconds
from learner.config import AlgorithmSection, TrainSection
from learner.credit.task_pool import TaskRule

# Exact as a float64, the only number of some languages.
_SEED_BITS = 53


@dataclass(frozen=True)
class DomainRule:
    """Settings of the tickets of one domain."""

    name: str
    weight: float  # share among the domains, any positive unit
    group_size: int
    min_group_size: int
    deadline_s: float
    num_greedy: int = 0  # additional baseline episodes
    num_redundant: int = 0  # additional episodes that replace slow ones
    # None: all tasks in turn, without end
    tasks: TaskRule | None = None


@dataclass(frozen=True)
class TicketRules:
    """Settings of the ledger, which a record of the log changes (``wire.RulesChange``)."""

    steps: int
    groups_per_step: int
    max_staleness: int
    on_late: Literal["drop", "wait"]
    seed: int
    domains: tuple[DomainRule, ...]
    filter_zero_variance: bool = False
    group_filter: str = ""  # by name, so that a reader of the log can apply it again
    max_replacements_per_step: int = 64
    # of a full step's groups; the rest count as filtered, and are not replaced
    keep_fraction: float = 1.0
    # least and largest share of successes of a group that is kept
    pass_rate: tuple[float, float] | None = None
    # tickets carry it, so that hubs close those that are certain to be filtered
    close_early: bool = False

    def has(self, name: str) -> bool:
        """Return whether there is a domain of that name."""
        return any(rule.name == name for rule in self.domains)

    def domain(self, name: str) -> DomainRule:
        """Return the rule of one domain.

        Raises:
            StopIteration: if there is none of that name.
        """
        return next(rule for rule in self.domains if rule.name == name)

    def plain(self) -> dict[str, Any]:
        """Return the rules as JSON-able values, for the log, the checkpoint and the ledger file."""
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return plain

    def outstanding(self, version: int) -> int:
        """Return the tickets of ``1 + max_staleness`` steps, which may be live at ``version``."""
        return max(0, min(1 + self.max_staleness, self.steps - version)) * self.groups_per_step


def rules_of(
    train: TrainSection,
    algorithm: AlgorithmSection,
    domains: dict[str, Any],
    seed: int,
    tasks: Mapping[str, TaskRule] = MappingProxyType({}),
) -> TicketRules:
    """Return the rules of a validated configuration; domains of weight 0 get no tickets.

    Args:
        tasks: of the domains whose tasks the ledger chooses, see ``learner.credit.task_sources``.
    """
    num_greedy_episodes = num_greedy(algorithm.adv_estimator)
    rules = []
    for name, domain in sorted(domains.items()):
        if not domain.weight:
            continue
        rules.append(
            DomainRule(
                name,
                domain.weight,
                domain.group_size,
                min_group_size=domain.min_group_size or domain.group_size,
                deadline_s=seconds(domain.deadline_s),
                num_greedy=num_greedy_episodes,
                num_redundant=domain.group_size_redundancy,
                tasks=tasks.get(name),
            )
        )
    pass_rate = algorithm.pass_rate
    return TicketRules(
        steps=train.steps,
        groups_per_step=train.groups_per_step,
        max_staleness=train.max_staleness,
        on_late=train.on_late,
        seed=seed,
        domains=tuple(rules),
        filter_zero_variance=algorithm.filter_zero_variance,
        group_filter=algorithm.group_filter,
        max_replacements_per_step=algorithm.max_replacements_per_step,
        pass_rate=None if pass_rate is None else (pass_rate[0], pass_rate[1]),
        close_early=algorithm.close_early,
        keep_fraction=algorithm.keep_fraction if algorithm.pg_variant == "starpo_s" else 1.0,
    )


def next_domain(domains: Sequence[DomainRule], issued: dict[str, int]) -> str:
    """Return the domain that is furthest behind its share, the first one on a tie.

    Exact (fractions, no rounding): after n tickets every domain has had its share of n to within
    one ticket for two domains, and to within the number of domains less one in general;
    replacements stay in their domain and do not count.

    Args:
        domains: the domains, in an order that does not change.
        issued: first-time tickets of each domain since the shares last changed.
    """
    weights = [Fraction(rule.weight) for rule in domains]
    num_tickets = sum(issued.get(rule.name, 0) for rule in domains) + 1
    total = sum(weights)
    deficits = [
        weight * num_tickets - total * issued.get(rule.name, 0)
        for rule, weight in zip(domains, weights, strict=True)
    ]
    return domains[deficits.index(max(deficits))].name


def due_horizon(
    dues: Iterable[tuple[int, int]], places: int, version: int, groups_per_step: int
) -> float:
    """Return the latest due step whose groups may be taken, so that all due earlier find room.

    See (*) in ``learner.credit.ledger``.

    Args:
        dues: (step, number of tickets that are due in it and that no step has taken), by step.
        places: free places of the current step after one more group.
        version: number of the current step.
    """
    num_live = 0
    for due, num_tickets in dues:
        num_live += num_tickets
        if num_live > places + max(due - version, 0) * groups_per_step:
            # Its own tickets fill all places up to then: nothing due later may pass them.
            return due
    return math.inf


def task_seed(run_seed: int, split: str, domain: str, task_index: int) -> int:
    """Return the seed of one task, from 0 to 2**53 - 1, the same on every machine."""
    digest = blake2b(f"{run_seed}/{split}/{domain}/{task_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)
