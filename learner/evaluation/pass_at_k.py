"""Computes avg@k and pass@k of tasks that were tried several times. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(num_tries: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k tries is right.

    It is ``1 - C(n - c, k) / C(n, k)`` with n tries and c right ones. Source: Chen et al.,
    Evaluating Large Language Models Trained on Code (arXiv 2107.03374), equation 1.

    Raises:
        ValueError: if k is not from 1 to n, or c not from 0 to n.
    """
    if not 1 <= k <= num_tries or not 0 <= num_right <= num_tries:
        raise ValueError(f"pass@{k} of {num_right} right among {num_tries} tries is not defined")
    return 1.0 - math.comb(num_tries - num_right, k) / math.comb(num_tries, k)


def reported_ks(num_tries: int) -> list[int]:
    """Return the k to report for n tries: powers of two below n, and n."""
    powers = [2**i for i in range(num_tries.bit_length())]
    return [k for k in powers if k < num_tries] + [num_tries]


def pass_at_k_metrics(tasks: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Return ``avg@n`` and every ``pass@k`` over the tasks with the most tries, n; empty for n = 1.

    avg@n is the mean over tasks of the share of right tries.
    """
    num_tries = max((len(tries) for tries in tasks), default=0)
    complete_tasks = [tries for tries in tasks if len(tries) == num_tries]
    if num_tries < 2:
        return {}
    values = {
        f"avg@{num_tries}": sum(sum(tries) / num_tries for tries in complete_tasks)
        / len(complete_tasks)
    }
    for k in reported_ks(num_tries):
        values[f"pass@{k}"] = sum(
            pass_at_k(num_tries, sum(tries), k) for tries in complete_tasks
        ) / len(complete_tasks)
    return values


def success_interval(tasks: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """Return the 95 % interval of the mean success.

    It is Wilson's for tasks tried once, else the normal interval of the task means. Tries of one
    task are not independent, so they count as one measurement.

    Raises:
        ValueError: if there are no tasks.
    """
    if not tasks:
        raise ValueError("no tasks")
    means = [sum(tries) / len(tries) for tries in tasks]
    n = len(tasks)
    # The 97.5 % quantile of the normal distribution.
    z = 1.959964
    mean = sum(means) / n
    if all(len(tries) == 1 for tries in tasks) or n == 1:
        centre = mean + z * z / (2 * n)
        spread = z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
        return (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n)
    half_width = z * math.sqrt(sum((task_mean - mean) ** 2 for task_mean in means) / (n - 1) / n)
    return max(0.0, mean - half_width), min(1.0, mean + half_width)
