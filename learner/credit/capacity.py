"""Computes how large groups can become, and what they cost in the broker's store and in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import psutil

from broker.contract.sizes import MAX_GROUP_BYTES
from broker.errors import ConfigError
from broker.settings.config import (
    PRIVATE_STORE_GIB,
    DomainSection,
    num_greedy,
    num_trained_seats,
    takes_steps,
)
from broker.settings.run_settings import RunSettings

# Of the wire's encoding; tests/unit/learner/test_capacity.py compares them with it.
# token_ids 4, loss_mask 1, logprobs 4.
TOKEN_BYTES: Final = 9
# Of a token's text, which the response and the anchors hold again.
TEXT_BYTES: Final = 4
TURN_BYTES: Final = 128
SAMPLE_BYTES: Final = 512
GROUP_BYTES: Final = 1024


@dataclass(frozen=True)
class LargestGroup:
    """Largest group of a domain: all episodes take all turns, all samples their whole context."""

    domain: str
    episodes: int  # redundant ones and the greedy baseline included
    samples: int  # of one episode: one conversation, or one for each turn
    tokens: int  # of one sample
    turns: int  # of one sample

    @property
    def num_tokens(self) -> int:
        return self.episodes * self.samples * self.tokens

    @property
    def size_bytes(self) -> int:
        """Size of its encoding."""
        per_sample = (
            self.tokens * (TOKEN_BYTES + TEXT_BYTES) + self.turns * TURN_BYTES + SAMPLE_BYTES
        )
        return self.episodes * self.samples * per_sample + GROUP_BYTES


def largest_group(name: str, domain: DomainSection, adv_estimator: str) -> LargestGroup:
    """Return the largest group of a domain, which is a section of a checked configuration."""
    episodes = domain.group_size + domain.group_size_redundancy + num_greedy(adv_estimator)
    # each seat of the trained policy is an episode of the record
    episodes *= num_trained_seats(domain)
    turns = domain.max_turns
    tokens = domain.max_context_tokens
    if takes_steps(domain.context, adv_estimator):
        return LargestGroup(name, episodes, turns, tokens, 1)
    return LargestGroup(name, episodes, 1, tokens, turns)


def check_groups(settings: RunSettings) -> None:
    """Refuse groups that are too large to send.

    Raises:
        ConfigError: if the largest group of a domain is larger than MAX_GROUP_BYTES.
    """
    for group in (*_largest_groups(settings), *_evaluated_groups(settings)):
        if group.size_bytes > MAX_GROUP_BYTES:
            key = f"domains.{group.domain}.max_context_tokens"
            sample_bytes = (MAX_GROUP_BYTES - GROUP_BYTES) // (group.episodes * group.samples)
            token_room = sample_bytes - group.turns * TURN_BYTES - SAMPLE_BYTES
            max_tokens = max(token_room // (TOKEN_BYTES + TEXT_BYTES), 0)
            limit = f"at most {max_tokens:,} for {_describe_shape(group)}"
            allowed = (
                f"{limit}: such a group takes {_format_size(group.size_bytes)}, the limit is 1 GiB"
            )
            raise ConfigError(key, group.tokens, allowed)


def capacity_notes(settings: RunSettings) -> list[str]:
    """Return lines for the operator on what the largest groups of a checked configuration cost."""
    groups = _largest_groups(settings)
    train = settings.train
    domains = settings.trained_domains
    only_evaluated = [group for group in _evaluated_groups(settings) if group.domain not in domains]
    weights = sum(domain.weight for domain in domains.values())
    mean = sum(group.size_bytes * domains[group.domain].weight for group in groups) / weights
    step_bytes = math.ceil(mean * train.groups_per_step)
    num_steps = min(1 + train.max_staleness, train.steps)
    store_gib = settings.broker.store_max_gib or PRIVATE_STORE_GIB
    memory = psutil.virtual_memory().total
    lines = [
        f"domains.{group.domain}: a group takes at most {_format_size(group.size_bytes)}: "
        f"{_describe_shape(group)} of {group.tokens:,} tokens"
        for group in (*groups, *only_evaluated)
    ]
    open_size = _format_size(num_steps * step_bytes)
    tickets = f"the open tickets {open_size} ({num_steps} x train.groups_per_step)"
    places = "in the broker's store and in the learner's memory"
    lines.append(f"a step takes at most {_format_size(step_bytes)}, {tickets}, {places}")
    if num_steps * step_bytes > store_gib * (1 << 30):
        advice = (
            "tickets wait for room; raise it, or lower train.groups_per_step or train.max_staleness"
        )
        lines.append(
            f"that is more than broker.store_max_gib, which is {store_gib:g}: with such groups "
            f"{advice}"
        )
    if num_steps * step_bytes > memory:
        lines.append(
            f"that is more than the memory of this machine, {_format_size(memory)}: such groups "
            "need a larger one"
        )
    return lines


def _largest_groups(settings: RunSettings) -> list[LargestGroup]:
    estimator = settings.algorithm.adv_estimator
    domains = settings.trained_domains
    return [largest_group(name, domain, estimator) for name, domain in domains.items()]


def _evaluated_groups(settings: RunSettings) -> list[LargestGroup]:
    estimator = settings.algorithm.adv_estimator
    return [
        replace(
            largest_group(name, domain, estimator),
            episodes=settings.eval.of_domain(domain).group_size * num_trained_seats(domain),
        )
        for name, domain in settings.evaluated_domains.items()
    ]


def _describe_shape(group: LargestGroup) -> str:
    samples = f" of {group.samples} samples" if group.samples > 1 else ""
    return f"{group.episodes} episodes{samples}"


def _format_size(size: float) -> str:
    """Format a number of bytes in a readable unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.3g} {unit}"
