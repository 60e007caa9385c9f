"""A reward for finished episodes, next to the environment's own."""

from rewardhub.rewards.base import Sample


def careful(sample: Sample, cost: float = 0.1) -> dict[str, float]:
    """Return costs of calls and of wrong ones. The parts add up; each is a metric of its name."""
    calls = sample.metrics.get("calls", 0.0)
    errors = sample.metrics.get("errors", 0.0)
    return {"calls": -cost * calls, "errors": -cost * errors}
