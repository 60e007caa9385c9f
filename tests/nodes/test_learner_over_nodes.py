"""A learner over nodes that are network namespaces: the losses of one process, and back after any
death.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest

from bench.support.hosts.network_namespaces import why_not
from bench.support.node_cluster import (
    LOSSES,
    Gate,
    NodeCluster,
    NodeProcess,
    hub,
    largest_difference,
    node_cluster,
    reach,
    small_run,
    steps_of,
)

WITHIN_S: Final = 30.0  # all nodes end after one has
AS_ONE: Final = 1e-5
ALL: Final = bool(os.environ.get("RL_NODES"))  # make nodes
pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there can be network namespaces"),
    pytest.mark.timeout(900),
]
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "ddp": {"backend": "ddp"},
    "fsdp2": {"backend": "fsdp2"},
    "zero1": {"backend": "deepspeed", "deepspeed": {"stage": 1}},
    "zero2": {"backend": "deepspeed", "deepspeed": {"stage": 2}},
    "zero3": {"backend": "deepspeed", "deepspeed": {"stage": 3, "param_persistence_threshold": 0}},
    "megatron": {"backend": "megatron", "megatron": {"tensor_parallel": 2}},
}
only_all = pytest.mark.skipif(not ALL, reason="takes minutes: make nodes")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeCluster]:
    with node_cluster(tmp_path_factory.mktemp("nodes")) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_left(cluster: NodeCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # as a rank in this process leaves it; nodes choose for themselves
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    cluster.network.set_link(1, up=True)
    cluster.clear()


async def one_process(cluster: NodeCluster) -> list[dict[str, Any]]:
    """The steps of one process, which all tests compare with."""
    if not steps_of(cluster.folder, "one"):
        async with hub(cluster.url, "one"):
            alone = await cluster.start(0, cluster.write(small_run(cluster.folder, "one")))
            assert await alone.exit_code() == 0, alone.log
    return steps_of(cluster.folder, "one")


async def end(
    processes: list[NodeProcess], codes: tuple[int, ...], within_s: float = WITHIN_S
) -> None:
    found = await asyncio.gather(*(one.exit_code(within_s) for one in processes))
    assert tuple(found) == codes, "\n\n".join(one.log for one in processes)


async def finish(cluster: NodeCluster, processes: list[NodeProcess], run: str) -> None:
    """The run ends on all nodes, with the losses of one process, and its books agree."""
    await end(processes, (0,) * len(processes), 200.0)
    steps = steps_of(cluster.folder, run)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert all(line[name] for line in steps for name in LOSSES)
    assert largest_difference(await one_process(cluster), steps) <= AS_ONE
    command = [sys.executable, "-m", "rlearner.cli", "audit", str(cluster.folder / run), "--json"]
    audit = await asyncio.create_subprocess_exec(
        *command,
        "--broker",
        cluster.url,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    report = json.loads((await audit.communicate())[0])
    assert audit.returncode == 0, report
    assert (report["lost"], report["trained_twice"]) == (0, 0), report


def _strike(cluster: NodeCluster, processes: list[NodeProcess], blow: str) -> list[NodeProcess]:
    """Kill what the blow names, or cut node 1 off; return those that must end by themselves."""
    if blow == "rank":
        processes[1].ranks()[-1].kill()
        return processes
    if blow == "cut":
        cluster.network.set_link(1, up=False)
        return processes
    dead = processes[{"node": 1, "rendezvous": 0}[blow]]
    dead.kill()
    return [one for one in processes if one is not dead]


@pytest.mark.parametrize(
    ("layout", "ranks", "blow"),
    [
        ("ddp", 2, "rank"),
        *(
            pytest.param(layout, 4, blow, marks=only_all)
            for layout in LAYOUTS
            for blow in ("rank", "node", "rendezvous", "cut")
            if layout in ("ddp", "megatron") or blow == "rank"
        ),
    ],
)
async def test_losses_of_one_process_although_a_part_dies(
    cluster: NodeCluster, layout: str, ranks: int, blow: str
) -> None:
    backend = LAYOUTS[layout]["backend"]
    package = {"deepspeed": "deepspeed", "megatron": "megatron"}.get(backend)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-{backend}")
    run = f"{layout}-{ranks}-{blow}"
    config = cluster.write(small_run(cluster.folder, run, ranks=ranks, **LAYOUTS[layout]))
    gate = Gate(2)
    async with hub(cluster.url, run, gate):
        nodes = await cluster.start_all(config)
        await reach(cluster.folder, run, 2, nodes)
        left = _strike(cluster, nodes, blow)
        struck_at = time.monotonic()
        await end(left, (1,) * len(left))
        assert time.monotonic() - struck_at < WITHIN_S
        cluster.clear()
        cluster.network.set_link(1, up=True)
        gate.opened.set()
        await finish(cluster, await cluster.start_all(config), run)


@only_all
async def test_under_torchrun(cluster: NodeCluster) -> None:
    config = cluster.write(small_run(cluster.folder, "torchrun", backend="ddp", ranks=4))
    options = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--master-addr",
        cluster.network.addresses[0],
    ]
    async with hub(cluster.url, "torchrun"):
        nodes = []
        for node in range(2):
            own = [*options, "--master-port", "7200", "--node-rank", str(node), "-m"]
            launcher = (sys.executable, "-m", "torch.distributed.run", *own)
            nodes.append(await cluster.start(node, config, *cluster.key_options, launcher=launcher))
        await finish(cluster, nodes, "torchrun")


@only_all
@pytest.mark.parametrize("tasks", [1, 2])
async def test_under_srun(cluster: NodeCluster, tasks: int) -> None:
    """With one task per node a task starts the ranks of its node, with two each is one."""
    run = f"srun-{tasks}"
    config = cluster.write(small_run(cluster.folder, run, backend="ddp", ranks=4))
    common = {
        "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": str(2 * tasks), "SLURM_JOB_ID": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x2)", "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": ",".join(cluster.network.addresses),
    }  # fmt: skip
    async with hub(cluster.url, run):
        started = []
        for number in range(2 * tasks):
            node, local = divmod(number, tasks)
            place = {
                "SLURM_PROCID": str(number),
                "SLURM_NODEID": str(node),
                "SLURM_LOCALID": str(local),
            }
            started.append(
                await cluster.start(node, config, *cluster.key_options, env={**common, **place})
            )
        await finish(cluster, started, run)


@only_all
async def test_stopped_nodes_come_back_as_one(cluster: NodeCluster) -> None:
    """A signal to all processes, as Slurm and systemd send it, ends them with 130; then one node
    goes on.
    """
    config, gate = (
        cluster.write(small_run(cluster.folder, "fewer", backend="fsdp2", ranks=4)),
        Gate(2),
    )
    async with hub(cluster.url, "fewer", gate):
        nodes = await cluster.start_all(config)
        await reach(cluster.folder, "fewer", 2)
        for one in reversed(nodes):
            one.process.terminate()
        gate.opened.set()
        await end(nodes, (130, 130))
        options = ("train.ranks=2", "--nnodes", "1")
        await finish(cluster, [await cluster.start(0, cluster.folder / "fewer", *options)], "fewer")


@only_all
@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
async def test_killed_node_comes_back_as_two(cluster: NodeCluster, backend: str) -> None:
    """What it had trained since its checkpoint is read again from the log, by twice as many ranks."""
    run, gate = f"more-{backend}", Gate(2)
    config = cluster.write(small_run(cluster.folder, run, backend=backend, ranks=2))
    async with hub(cluster.url, run, gate):
        alone = await cluster.start(0, config, "--nnodes", "1")
        await reach(cluster.folder, run, 2)
        alone.kill()
        await alone.exit_code()
        gate.opened.set()
        wider = cluster.write(small_run(cluster.folder, run, backend=backend, ranks=4))
        await finish(cluster, await cluster.start_all(wider), run)


async def test_a_node_with_another_configuration_ends_both_in_one_line(
    cluster: NodeCluster,
) -> None:
    config = cluster.write(small_run(cluster.folder, "differs", backend="ddp", ranks=2))
    nodes = [
        await cluster.start(node, config, *changed, *cluster.node_options(node, 2))
        for node, changed in enumerate([(), ("train.lr=0.002",)])
    ]
    await end(nodes, (2, 2), 60.0)
    for one in nodes:
        assert one.log.count("train.lr is 0.002 on node 1 (") == 1
        assert "Traceback" not in one.log
