"""The reward of this project: whether an answer is right."""

import re

from rewardhub.rewards.base import Sample


def right(sample: Sample) -> float:
    """Return 1 if the last number of the answer is that of the file, else 0."""
    numbers = re.findall(r"-?\d+", sample.response)
    return float(bool(numbers) and numbers[-1] == sample.reference)
