"""Rewards of one step and of several."""

from __future__ import annotations

import pytest

from envhub.tasks.rewards import (
    BadReward,
    combine_steps,
    falls_short,
    parse_rewards,
    scalar_reward,
)


@pytest.mark.parametrize(
    ("json_text", "text", "rewards"),
    [
        (None, b" 0.5\n", {"reward": 0.5}),
        (b"1", None, {"reward": 1.0}),
        (b'{"reward": true, "style": 2}', b"0", {"reward": 1.0, "style": 2.0}),
    ],
)
def test_rewards_of_files(
    json_text: bytes | None, text: bytes | None, rewards: dict[str, float]
) -> None:
    assert parse_rewards(json_text, text) == rewards


@pytest.mark.parametrize(
    ("json_text", "text"),
    [
        (None, None),
        (None, b""),
        (None, b"inf"),
        (None, b"\xff"),
        (b"{}", None),
        (b'{"a": 1e999}', None),
        (b'{"a": null}', None),
        (b"1" + b"0" * 400, None),
        (b"[" * 100_000, None),
    ],
)
def test_what_is_no_reward(json_text: bytes | None, text: bytes | None) -> None:
    with pytest.raises(BadReward) as caught:
        parse_rewards(json_text, text)
    assert len(str(caught.value)) < 200


def test_rewards_of_several_steps() -> None:
    steps = [{"reward": 1.0, "style": 0.5}, {"reward": 0.0}]
    assert combine_steps(steps, None) == {"reward": 0.5, "style": 0.25}
    assert combine_steps(steps, "final") == {"reward": 0.0}
    assert falls_short({"reward": 0.4}, 0.5)
    assert not falls_short({"reward": 0.5}, 0.5)
    assert falls_short({"reward": 1.0}, {"style": 0.0})
    assert not falls_short({}, None)
    with pytest.raises(BadReward, match="no reward named 'reward', only style"):
        scalar_reward({"style": 1.0})
