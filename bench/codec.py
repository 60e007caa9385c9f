"""Measure the cost of encoding and decoding a trajectory, checks included, compared with plain
lists.

    python -m bench.codec [--tokens 2048] [--group-size 8]

Times are per trajectory, the median over many repeats, measured on Trajectories inside a Group.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from broker.contract import checks, codec, wire


def trajectory(num_tokens: int, episode: int) -> wire.Trajectory:
    """Return a trajectory with one turn in its second half, sampled by two policy versions."""
    rng = np.random.default_rng(episode)
    start = num_tokens // 2
    sampled = num_tokens - start
    mask = np.arange(num_tokens) >= start
    turn = wire.Turn(
        start=start,
        end=num_tokens,
        reward=1.0,
        valid=True,
        finish_reason="stop",
        server="rollout-1",
    )
    token_ids = rng.integers(0, 151_936, num_tokens)
    logprobs = np.where(mask, -rng.exponential(1.0, num_tokens), 0.0)
    return wire.Trajectory(
        episode=episode,
        token_ids=wire.column(token_ids, "<i4"),
        loss_mask=wire.column(mask, "|u1"),
        logprobs=wire.column(logprobs, "<f4"),
        version_runs=wire.column([7, sampled // 2, 8, sampled - sampled // 2], "<i4"),
        turns=[turn],
        reward=1.0,
        reward_parts={"env": 1.0},
        success=True,
        end="terminated",
        metrics={"num_turns": 1.0},
    )


def group(num_tokens: int, group_size: int) -> wire.Group:
    """Return a scored group of such trajectories."""
    return wire.Group(
        ticket=1,
        domain="bench",
        task_index=0,
        min_version=7,
        hub="envhub-1",
        deliveries=1,
        pools=[],
        trajectories=[trajectory(num_tokens, episode) for episode in range(group_size)],
    )


class ListTrajectory(msgspec.Struct, forbid_unknown_fields=True):
    """The same columns as lists, without any check but the types."""

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    version_runs: list[int]


def as_lists(source: wire.Trajectory) -> ListTrajectory:
    """The columns of a trajectory as lists."""
    columns = (source.token_ids, source.loss_mask, source.logprobs, source.version_runs)
    return ListTrajectory(*(column.array().tolist() for column in columns))


def median_us(work: Callable[[], object], per_call: int, *, repeats: int) -> float:
    """Return microseconds per unit of work: the median over short calls, so that other processes do
    not count.
    """
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) / per_call * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", type=int, default=2048, help="tokens per trajectory")
    add("--group-size", type=int, default=8, help="trajectories per group")
    add("--repeats", type=int, default=4000, help="calls over which the median is taken")
    options = parser.parse_args()

    size = options.group_size
    message = group(options.tokens, size)
    data = codec.encode(message)
    lists = [as_lists(one) for one in message.trajectories]
    list_encoder = msgspec.msgpack.Encoder()
    list_decoder = msgspec.msgpack.Decoder(list[ListTrajectory])
    list_data = list_encoder.encode(lists)
    few = options.repeats // 20
    figures = {"encode_us": median_us(lambda: codec.encode(message), size, repeats=options.repeats)}
    decode = partial(codec.decode, data, wire.Group, wire.Closed)
    figures |= {"decode_us": median_us(decode, size, repeats=options.repeats)}
    figures |= {"check_us": median_us(lambda: checks.check(message), size, repeats=options.repeats)}
    figures |= {"lists_encode_us": median_us(lambda: list_encoder.encode(lists), size, repeats=few)}
    figures |= {
        "lists_decode_us": median_us(lambda: list_decoder.decode(list_data), size, repeats=few)
    }
    print(
        f"{size} trajectories of {options.tokens} tokens: {len(data)} bytes as columns, {len(list_data)} as lists"
    )
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
