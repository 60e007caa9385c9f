"""The reward of this project: whether an answer is right."""

from rewardhub.rewards.base import Sample


def right(sample: Sample) -> float:
    """Return 1 if the answer is that of the file, in letters of any case, else 0."""
    return float(sample.response.strip().lower() == sample.reference.lower())
