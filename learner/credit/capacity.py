"""Computes how large groups can become, and their cost in the broker's store and the learner's
memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import psutil

from broker.contract.sizes import MAX_GROUP_BYTES
from broker.errors import ConfigError
from broker.settings.config import PRIVATE_STORE_GIB, num_greedy, takes_steps

# Of the wire's encoding; tests/unit/learner/test_capacity.py compares them with it.
TOKEN_BYTES: Final = 9  # token_ids 4, loss_mask 1, logprobs 4
# of a token's text, which the response, or what step groups compare, holds again
TEXT_BYTES: Final = 4
TURN_BYTES: Final = 128
SAMPLE_BYTES: Final = 512
GROUP_BYTES: Final = 1024


@dataclass(frozen=True)
class LargestGroup:
    """The largest group of one domain: every episode takes all its turns, and every sample its
    whole context.
    """

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


def largest_group(name: str, domain: Mapping[str, Any], adv_estimator: str) -> LargestGroup:
    """Return the largest group that tickets of a domain can produce; ``domain`` is a section of a
    checked config.
    """
    episodes = domain["group_size"] + domain["group_size_redundancy"] + num_greedy(adv_estimator)
    turns = domain["max_turns"]
    tokens = domain["max_context_tokens"]
    if takes_steps(domain["context"], adv_estimator):
        return LargestGroup(name, episodes, turns, tokens, 1)
    return LargestGroup(name, episodes, 1, tokens, turns)


def check_groups(config: dict[str, Any]) -> None:
    """Refuse groups that are too large to send.

    Raises:
        ConfigError: if the largest group of a domain is larger than MAX_GROUP_BYTES.
    """
    for group in _groups(config):
        if group.size_bytes > MAX_GROUP_BYTES:
            key = f"domains.{group.domain}.max_context_tokens"
            sample_bytes = (MAX_GROUP_BYTES - GROUP_BYTES) // (group.episodes * group.samples)
            room = sample_bytes - group.turns * TURN_BYTES - SAMPLE_BYTES
            most = f"at most {max(room // (TOKEN_BYTES + TEXT_BYTES), 0):,} for {_shape(group)}"
            allowed = f"{most}: such a group takes {_size(group.size_bytes)}, the limit is 1 GiB"
            raise ConfigError(key, group.tokens, allowed)


def capacity_notes(config: dict[str, Any]) -> list[str]:
    """Return lines for the operator on what the largest groups of a checked configuration cost."""
    groups = _groups(config)
    train = config["train"]
    domains = config["domains"]
    weights = sum(domain["weight"] for domain in domains.values())
    mean = sum(group.size_bytes * domains[group.domain]["weight"] for group in groups) / weights
    step = math.ceil(mean * train["groups_per_step"])
    alive = min(1 + train["max_staleness"], train["steps"])
    store_gib = config["broker"]["store_max_gib"] or PRIVATE_STORE_GIB
    memory = psutil.virtual_memory().total
    lines = [
        f"domains.{one.domain}: a group takes at most {_size(one.size_bytes)}: {_shape(one)} of {one.tokens:,} tokens"
        for one in groups
    ]
    tickets = f"the open tickets {_size(alive * step)} ({alive} x train.groups_per_step)"
    where = "in the broker's store and in the learner's memory"
    lines.append(f"a step takes at most {_size(step)}, {tickets}, {where}")
    if alive * step > store_gib * (1 << 30):
        advice = (
            "tickets wait for room; raise it, or lower train.groups_per_step or train.max_staleness"
        )
        lines.append(
            f"that is more than broker.store_max_gib, which is {store_gib:g}: with such groups {advice}"
        )
    if alive * step > memory:
        lines.append(
            f"that is more than the memory of this machine, {_size(memory)}: such groups need a larger one"
        )
    return lines


def _groups(config: dict[str, Any]) -> list[LargestGroup]:
    estimator = config["algorithm"]["adv_estimator"]
    return [largest_group(name, domain, estimator) for name, domain in config["domains"].items()]


def _shape(group: LargestGroup) -> str:
    return f"{group.episodes} episodes" + (
        f" of {group.samples} samples" if group.samples > 1 else ""
    )


def _size(size: float) -> str:
    """Format a number of bytes in a readable unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.3g} {unit}"
