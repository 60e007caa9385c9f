"""How many episodes a hub plays at once."""

from __future__ import annotations

import pytest

from broker.settings.schema.hubs import EnvhubSection
from envhub.service import limit_slots


@pytest.mark.parametrize(
    ("settings", "cores", "num_slots"),
    [
        ({}, 2.0, 64),
        ({"worker_cpus": 0.5}, 8.0, 16),
        ({"worker_cpus": 0.5, "worker_envs": 3}, 8.0, 48),
        ({"worker_cpus": 0.01}, 8.0, 64),
        ({"worker_cpus": 4.0}, 0.5, 1),
    ],
)
def test_slots_by_processors(settings: dict[str, float], cores: float, num_slots: int) -> None:
    assert limit_slots(64, EnvhubSection.model_validate(settings), cores) == num_slots
