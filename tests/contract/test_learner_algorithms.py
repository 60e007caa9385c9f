"""Algorithms that a step must wait for, in the real learner over a real nats-server; only the fleet
is made up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import learner_fleet as fleet
import msgspec
from safetensors.numpy import load_file
from test_learner_service import lines, plain, run, run_apart, tickets_of

from broker.contract import wire
from broker.jetstream.bus import Bus
from broker.runtime.process import Stop

PPO = {
    "adv_estimator": "gae", "critic": {"enabled": True, "lr": 1e-3}, "num_epochs": 2, "num_minibatches": 2,
    "correction": "tis",
    "kl_coef": 0.05, "kl_placement": "reward", "kl_target": 0.1, "kl_horizon": 100.0,
}  # fmt: skip


async def test_ppo_with_a_critic_resumes_bit_for_bit(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "train": {"max_staleness": 1, "steps": 4},
        "algorithm": PPO,
        "checkpoint": {"every_steps": 1},
    }
    whole = fleet.config(str(tmp_path), f"{run_name}-whole", **settings)
    await run_apart(broker_url, whole)

    stop = Stop()

    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        if ticket.number == 7:
            stop.request("test")
        return plain(ticket)

    config = fleet.config(str(tmp_path), run_name, **settings)
    await run(bus, broker_url, config, answer, stop)
    assert len(lines(config)) < 4
    await run(bus, broker_url, config)
    found = lines(config)
    assert tickets_of(found[-1]) == (8, 8, 0, 0, 0, 0)
    for line in found:
        assert line["actor/num_updates"] == 4
        assert line["critic/vf_loss"] > 0
    assert len({line["actor/kl_coef"] for line in found}) > 1  # it adapts
    folders = [
        tmp_path / name / "checkpoints" / "step-000004" for name in (run_name, f"{run_name}-whole")
    ]
    for path in sorted(folders[0].rglob("*.safetensors")):
        one, two = load_file(path), load_file(folders[1] / path.relative_to(folders[0]))
        assert one.keys() == two.keys()
        for name in one:
            assert (one[name] == two[name]).all(), name
    names = {name for path in folders[0].rglob("*.safetensors") for name in load_file(path)}
    assert any("critic.weight" in name for name in names)


async def test_starpo_s_counts_what_it_leaves_out_as_filtered(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        return [fleet.group(ticket, ticket.min_version, (0.0, float(ticket.number % 4)))]

    algorithm = {"pg_variant": "starpo_s", "keep_fraction": 0.5}
    config = fleet.config(
        str(tmp_path), run_name, train={"groups_per_step": 4, "steps": 2}, algorithm=algorithm
    )
    hub = await run(bus, broker_url, config, answer)
    assert [ticket.number for ticket in hub.tickets] == list(range(1, 9))  # nothing is replaced
    found = lines(config)
    assert tickets_of(found[-1]) == (8, 4, 4, 0, 0, 0)
    assert [line["filter/count"] for line in found] == [2.0, 2.0]
    assert [line["actor/num_rows"] for line in found] == [4.0, 4.0]


async def test_remax_asks_for_a_greedy_episode_and_does_not_train_on_it(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        group = fleet.group(ticket, ticket.min_version, (0.0, 1.0, 0.25))
        group.trajectories[2] = msgspec.structs.replace(group.trajectories[2], greedy=True)
        return [group]

    config = fleet.config(
        str(tmp_path), run_name, algorithm={"adv_estimator": "remax", "pg_variant": "reinforce"}
    )
    hub = await run(bus, broker_url, config, answer)
    assert {
        (ticket.group_size, ticket.min_group_size, ticket.num_greedy) for ticket in hub.tickets
    } == {(3, 3, 1)}
    for line in lines(config):
        assert line["reward/mean"] == 0.5  # of the sampled episodes
        assert line["actor/num_rows"] == 4
        assert json.dumps(line)


async def test_waiting_for_the_whole_step_changes_no_bit(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    configs = [
        fleet.config(str(tmp_path), name, train={"streaming": streaming})
        for name, streaming in ((run_name, "auto"), (f"{run_name}-w", "never"))
    ]
    await run(bus, broker_url, configs[0])
    await run_apart(broker_url, configs[1])
    one, two = (
        load_file(
            tmp_path / each["run"]["name"] / "checkpoints" / "step-000003" / "model.safetensors"
        )
        for each in configs
    )
    assert one.keys() == two.keys()
    assert all((one[name] == two[name]).all() for name in one)
