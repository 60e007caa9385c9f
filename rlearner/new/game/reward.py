"""A reward for finished episodes, next to the environment's own."""

from rewardhub.rewards.base import Sample


def quick(sample: Sample, cost: float = 0.1) -> dict[str, float]:
    """Return a cost for each turn. The parts add up; each is a metric of its name."""
    return {"turns": -cost * sample.num_turns}
