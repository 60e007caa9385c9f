"""Where a process finds itself among nodes: options, torchrun's and Slurm's variables, and how
ranks are divided.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from broker.errors import ConfigError, UserError
from learner.nodes.layout import divide_ranks
from learner.nodes.placement import (
    Placement,
    find_placement,
    first_host,
    parse_rendezvous,
    tasks_per_node,
)

TORCHRUN: Final = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "gpu01", "MASTER_PORT": "29500",
}  # fmt: skip
SRUN: Final = {
    "SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4",
}  # fmt: skip
PORT: Final = 15_000 + 4711 * 31 % 16_000
ON_NODE_1: Final = Placement(1, 2, "10.0.0.1", 7100, "--nnodes 2")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (TORCHRUN, Placement(1, 2, "gpu01", 29500, "torchrun", 1, 4, 8)),
        (
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            Placement(1, 2, "gpu01", 29501, "torchrun", 1, 4, 8),
        ),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, None),
        # of something else, without LOCAL_RANK
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, None),
        (SRUN, Placement(1, 2, "gpu07", PORT, "srun", 1, 2, 4)),
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"},
            Placement(1, 2, "gpu07", PORT, "srun", 0, 1, 4),
        ),
        (
            {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
            Placement(1, 2, "gpu07", PORT, "srun"),
        ),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),  # srun --pty bash
        # a batch script
        ({"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
        # srun torchrun ...
        ({**SRUN, **TORCHRUN}, Placement(1, 2, "gpu01", 29500, "torchrun", 1, 4, 8)),
    ],
)
def test_place_in_an_environment(environ: dict[str, str], expected: Placement | None) -> None:
    assert find_placement(None, None, None, environ) == expected


def test_options_give_a_place_and_agree_with_the_environment() -> None:
    assert find_placement(2, 1, "10.0.0.1:7100", {}) == ON_NODE_1
    assert find_placement(1, None, None, SRUN) is find_placement(1, 0, "a:1", {}) is None
    moved = find_placement(2, 1, "[fd00::1]:99", TORCHRUN)
    assert moved == Placement(1, 2, "fd00::1", 99, "torchrun", 1, 4, 8)
    assert moved.where == "[fd00::1]:99"


@pytest.mark.parametrize(
    ("given", "environ", "line"),
    [
        (
            (2, None, None),
            {},
            "--nnodes without --node-rank and --rendezvous: several nodes need all three",
        ),
        (
            (None, 1, "a:1"),
            {},
            "--node-rank and --rendezvous without --nnodes: several nodes need all three",
        ),
        ((2, 2, "a:1"), {}, "--node-rank 2: with --nnodes 2 nodes are numbered 0 to 1"),
        ((1, 1, None), {}, "--node-rank 1: --nnodes 1 has only node 0"),
        (
            (2, 0, "a"),
            {},
            "--rendezvous a: expected HOST:PORT of node 0, for example 10.0.0.1:7100",
        ),
        (
            (3, None, None),
            TORCHRUN,
            "--nnodes 3: torchrun started this process with 2; leave --nnodes out",
        ),
        (
            (None, 0, None),
            SRUN,
            "--node-rank 0: srun started this process with 1; leave --node-rank out",
        ),
        (
            (None, None, None),
            {key: value for key, value in TORCHRUN.items() if key != "MASTER_PORT"},
            "torchrun: the environment has no MASTER_PORT; unset its variables or set them all",
        ),
        ((None, None, None), {**TORCHRUN, "RANK": "x"}, "torchrun: RANK=x is not a number"),
        (
            (None, None, None),
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "3"},
            "torchrun: RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=3 contradict each other; "
            "each node needs as many processes as the others",
        ),
    ],
)
def test_contradictions_give_one_line(
    given: tuple[Any, Any, Any], environ: dict[str, str], line: str
) -> None:
    with pytest.raises(UserError) as error:
        find_placement(*given, environ)
    assert str(error.value) == line


def test_texts_of_slurm_and_addresses() -> None:
    assert [first_host(one) for one in ("a", "a,b", "gpu[03-05,9],login", "x[1,3]-ib")] == [
        "a",
        "a",
        "gpu03",
        "x1-ib",
    ]
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert [parse_rendezvous(one) for one in ("h:1", "[::1]:65535")] == [("h", 1), ("::1", 65535)]
    for wrong in ("h:0", "h:65536", "::1:5", "h:1/x", ":1"):
        with pytest.raises(UserError, match="expected HOST:PORT"):
            parse_rendezvous(wrong)


UNDER_TORCHRUN: Final = Placement(1, 2, "gpu01", 29500, "torchrun", 1, 4, 8)


@pytest.mark.parametrize(
    ("placement", "train", "spec", "num_gpus", "expected"),
    [
        (ON_NODE_1, {}, "auto", 0, ({"ranks": 2}, 1)),
        (ON_NODE_1, {"ranks": 4}, "auto", 0, ({"ranks": 4}, 2)),
        (ON_NODE_1, {}, "0-3", 4, ({"ranks": 8, "device": "cuda"}, 4)),
        (ON_NODE_1, {"ranks": 6}, "0-1", 2, ({"ranks": 6, "device": "cuda"}, 2)),  # node 0 has four
        (ON_NODE_1, {"ranks": 4}, "cpu", 0, ({"ranks": 4, "device": "cpu"}, 2)),
        (UNDER_TORCHRUN, {}, "auto", 0, ({"ranks": 8}, 4)),
        (UNDER_TORCHRUN, {"ranks": 8}, "0-3", 4, ({"ranks": 8, "device": "cuda"}, 4)),
    ],
)
def test_ranks_are_divided(
    placement: Placement,
    train: dict[str, Any],
    spec: str,
    num_gpus: int,
    expected: tuple[dict[str, Any], int],
) -> None:
    config, here = divide_ranks({"train": train, "run": {}}, placement, spec, num_gpus)
    assert (config["train"], here) == expected


@pytest.mark.parametrize(
    ("placement", "train", "spec", "num_gpus", "text"),
    [
        (
            ON_NODE_1,
            {"ranks": 3},
            "auto",
            0,
            "train.ranks: 3 is not allowed; a multiple of 2 nodes, or --gpus on each",
        ),
        (
            ON_NODE_1,
            {"ranks": 1},
            "auto",
            0,
            "train.ranks: 1 is not allowed; at least 2, the ranks of all nodes",
        ),
        (
            ON_NODE_1,
            {"device": "cpu"},
            "0-1",
            2,
            "train.device: 'cpu' is not allowed; cuda with --gpus 0-1",
        ),
        (
            UNDER_TORCHRUN,
            {"ranks": 4},
            "auto",
            0,
            "train.ranks: 4 is not allowed; 8 under torchrun, or nothing",
        ),
    ],
)
def test_ranks_that_do_not_divide_are_refused(
    placement: Placement, train: dict[str, Any], spec: str, num_gpus: int, text: str
) -> None:
    with pytest.raises(ConfigError) as error:
        divide_ranks({"train": train}, placement, spec, num_gpus)
    assert str(error.value).startswith(text)


def test_a_launcher_with_more_ranks_than_gpus_is_refused() -> None:
    with pytest.raises(
        UserError, match="--gpus 0-1: torchrun starts 4 ranks on this node, which need a GPU each"
    ):
        divide_ranks({}, UNDER_TORCHRUN, "0-1", 2)
