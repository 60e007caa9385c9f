"""Steps of a text, and what is made of their scores."""

from __future__ import annotations

import pytest

from rewardhub.rewards.models.step_scores import combine_steps, split_steps


def test_steps_by_hand() -> None:
    assert split_steps("first\n\n second \n\n\n\n\n\nthird\nline", "\n\n") == [
        "first",
        "second",
        "third\nline",
    ]
    assert split_steps(" \n\n ", "\n\n") == []


@pytest.mark.parametrize(
    ("aggregate", "turns", "episode"),
    [
        # Turns of (0.5, 0.8), none, and (0.25): 0.5 * 0.8 = 0.4; a turn without steps is a 0 of the
        # episode; (0.5 + 0.8 + 0 + 0.25) / 4 = 0.3875.
        ("min", [0.5, 0.0, 0.25], 0.0),
        ("product", [0.4, 0.0, 0.25], 0.0),
        ("last", [0.8, 0.0, 0.25], 0.25),
        ("mean", [0.65, 0.0, 0.25], 0.3875),
    ],
)
def test_aggregates_by_hand(aggregate: str, turns: list[float], episode: float) -> None:
    scores = [[0.5, 0.8], [], [0.25]]
    assert combine_steps(scores, aggregate, per_turn=True) == pytest.approx(turns)
    assert combine_steps(scores, aggregate, per_turn=False) == pytest.approx([episode])
    assert combine_steps([scores[0]], aggregate, per_turn=False) == pytest.approx([turns[0]])
