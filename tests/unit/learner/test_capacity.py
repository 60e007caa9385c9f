"""The largest group of a configuration against the real encoding, and what is said and refused of
it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import yaml

from broker.contract import wire
from broker.contract.sizes import MAX_GROUP_BYTES
from broker.errors import ConfigError
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import validate
from learner.credit.capacity import LargestGroup, capacity_notes, largest_group
from rlearner.cli import main

LAKE: dict[str, Any] = {
    "env": "frozenlake",
    "group_size": 8,
    "max_context_tokens": 256,
    "sampling": {"max_tokens": 4},
    "max_turns": 10,
}


def config(domain: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """One of a context of any length."""
    lake = {**LAKE, **(domain or {})}
    longest = lake["max_context_tokens"]
    rest = {
        "rollout": {"max_context_tokens": longest},
        "model": {"tiny": {"max_position_embeddings": longest}},
    }
    train = {"micro_batch_tokens": max(longest, 8192), **sections.pop("train", {})}
    return validate({"domains": {"lake": lake}, "train": train, **rest, **sections})


def encoded(group: LargestGroup) -> int:
    """Bytes of a group in which everything is as large as it may be: long numbers, long ids, and
    all text once more.
    """
    text = "four" * (group.tokens // group.turns)

    def sample(episode: int) -> wire.Trajectory:
        turns = [
            wire.Turn(
                start=100_000 + turn, end=100_001 + turn, reward=0.5, valid=True, finish_reason="deadline",
                server="rollout-" + 24 * "0",
                anchor=text,
            )
            for turn in range(group.turns)
        ]  # fmt: skip
        return wire.Trajectory(
            episode=300 + episode,
            token_ids=wire.column(np.full(group.tokens, 151_000), "<i4"),
            loss_mask=wire.column(np.ones(group.tokens), "|u1"),
            logprobs=wire.column(np.full(group.tokens, -0.1), "<f4"),
            version_runs=wire.column([100_000, group.tokens], "<i4"),
            turns=turns,
            reward=0.5,
            reward_parts={"env": 0.5, "math_answer": 1.0},
            success=True,
            end="terminated",
            metrics={"valid_action_rate": 1.0, "num_turns": 30.0},
        )

    samples = [sample(episode) for episode in range(group.episodes) for _ in range(group.samples)]
    made = wire.Group(
        ticket=10**6, domain=group.domain, task_index=10**6, min_version=10**5, hub="envhub-" + 24 * "0", deliveries=1,
        pools=[],
        trajectories=samples, reward_hubs=["rewardhub-" + 24 * "0"],
    )  # fmt: skip
    return len(msgspec.msgpack.encode(made))


@pytest.mark.parametrize(
    ("group", "share"),
    [
        (LargestGroup("math", 16, 1, 65_536, 1), 0.99),
        (LargestGroup("agent", 8, 1, 32_768, 50), 0.99),
        (LargestGroup("shop", 8, 30, 2048, 1), 0.98),
        (LargestGroup("lake", 8, 1, 256, 10), 0.8),
    ],
)
def test_the_estimate_is_just_above_the_real_encoding(group: LargestGroup, share: float) -> None:
    assert share < encoded(group) / group.size_bytes <= 1


def test_which_group_is_the_largest() -> None:
    full = RunSettings.of_config(config()).domains["lake"]
    assert largest_group("lake", full, "grpo") == LargestGroup("lake", 8, 1, 256, 10)
    # and its greedy episode
    assert largest_group("lake", full, "remax") == LargestGroup("lake", 9, 1, 256, 10)
    # each turn is a sample
    assert largest_group("lake", full, "gigpo") == LargestGroup("lake", 8, 10, 256, 1)
    assert (
        largest_group("lake", full.model_copy(update={"group_size_redundancy": 2}), "grpo").episodes
        == 10
    )
    assert largest_group("lake", full.model_copy(update={"context": "steps"}), "grpo").samples == 10
    # 8 x (256 x 13 + 10 x 128 + 512) + 1,024
    assert largest_group("lake", full, "grpo").size_bytes == 41_984
    assert largest_group("lake", full, "gigpo").size_bytes == 80 * (256 * 13 + 128 + 512) + 1024


def test_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = config(
        {"group_size": 16, "max_context_tokens": 65_536, "max_turns": 1},
        train={"groups_per_step": 64, "max_staleness": 3},
    )
    # 16 x (65,536 x 13 + 128 + 512) + 1,024 = 13,642,752 bytes; 64 of them; 4 x 64 of them
    lines = capacity_notes(RunSettings.of_config(checked))
    assert lines[0] == "domains.lake: a group takes at most 13 MiB: 16 episodes of 65,536 tokens"
    assert lines[1].startswith(
        "a step takes at most 833 MiB, the open tickets 3.25 GiB (4 x train.groups_per_step), in the broker's store "
        "and "
    )
    assert len(lines) == 2 + (psutil.virtual_memory().total < 4 * 64 * 13_642_752)
    small = capacity_notes(RunSettings.of_config(checked | {"broker": {"store_max_gib": 3.0}}))
    assert small[2].startswith(
        "that is more than broker.store_max_gib, which is 3: with such groups tickets wait for room"
    )
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"total": 2 << 30}))
    assert capacity_notes(RunSettings.of_config(checked))[2].startswith(
        "that is more than the memory of this machine, 2 GiB: "
    )


def test_domains_count_by_their_share() -> None:
    pond = {**LAKE, "weight": 3.0, "group_size": 80}
    checked = validate(
        {
            "domains": {"lake": LAKE, "pond": pond},
            "train": {"groups_per_step": 4, "max_staleness": 0},
        }
    )
    # 41,984 bytes in one group of four, 80 x 5,120 + 1,024 = 410,624 in three
    assert capacity_notes(RunSettings.of_config(checked))[2].startswith(
        f"a step takes at most {(41_984 + 3 * 410_624) / (1 << 20):.3g} MiB, the open tickets 1.21 MiB (1 x "
    )


def test_a_group_that_cannot_travel_is_refused() -> None:
    fits = {"group_size": 80, "max_context_tokens": 1_032_000, "max_turns": 1}
    domain = RunSettings.of_config(config(fits)).domains["lake"]
    assert largest_group("lake", domain, "grpo").size_bytes <= MAX_GROUP_BYTES
    # (2**30 - 1,024) // 80 = 13,421,759 bytes for a sample, of which 640 are no tokens, 13 bytes
    # for each
    with pytest.raises(ConfigError) as caught:
        config(fits | {"max_context_tokens": 1_048_576})
    assert str(caught.value) == (
        "domains.lake.max_context_tokens: 1048576 is not allowed; "
        "at most 1,032,393 for 80 episodes: such a group takes 1.02 GiB, the limit is 1 GiB"
    )
    config(fits | {"max_context_tokens": 1_032_393})
    with pytest.raises(ConfigError, match=r"at most 1,032,393 for 80 episodes"):
        config(fits | {"max_context_tokens": 1_032_394})
    # 2**30 - 1,024 for 800 samples: 1,342,176 bytes each
    with pytest.raises(ConfigError, match=r"at most 103,195 for 8 episodes of 100 samples: "):
        config({"context": "steps", "max_turns": 100, "max_context_tokens": 131_072})


def test_the_command_check_notes_sizes_and_timeouts_and_prints_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "--all", "configs/quickstart.yaml"]) == 0
    out, err = capsys.readouterr()
    assert "note: domains.lake: a group takes at most 41 KiB: 8 episodes of 256 tokens\n" in err
    assert (
        "note: timeouts: a turn 120 s, an episode 1560 s, a group 3120 s, a ticket 6240 s in one hub"
        in err
    )
    resolved = yaml.safe_load(out)
    assert resolved["envhub"]["episode_timeout_s"] == 1560.0
    assert resolved["train"]["ticket_timeout_s"] == resolved["eval"]["timeout_s"] == 6240.0
