"""A broker as it was before accounts: what could be done to it, and how its runs go on after the
change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from former_broker import former_broker, former_configuration
from reply_attacks import ANSWERED, harm_done
from waits import LONG_S, until

from bench.scale import null
from bench.support.fleet import RunFleet
from broker.contract import wire
from broker.contract.examples import EXAMPLES
from broker.contract.streams import CONTROL, EPISODES, EVALS, RUNS, SAMPLES, TICKETS, WEIGHTS
from broker.errors import UserError
from broker.identity.login import find_login, keys_of
from broker.jetstream.bus import Bus
from broker.server.stored_accounts import move_streams

STEPS = 40  # of two groups
SUCCEEDED = {
    "rollout": ("pull", "push", "flow control", "self grant"),
    "envhub": ("empty pull", "pull", "push", "self grant", "answer", "ack next"),
    "rewardhub": (
        "empty pull",
        "pull",
        "push",
        "direct get",
        "empty direct get",
        "self grant",
        "ack next",
    ),
}


async def connect(url: str, run: str, role: str = "operator") -> Bus:
    return await Bus.connect(
        url, run, name=role, role=role, login=find_login(url, role, run), deadline_s=60
    )


async def fill(bus: Bus) -> None:
    await bus.ensure_streams()
    await bus.ensure_consumers(TICKETS, ["lake"])
    await bus.ensure_consumers(EPISODES, ["default"])
    await bus.publish(TICKETS, EXAMPLES[wire.Ticket], key="lake")
    for log in (SAMPLES, EVALS):
        await bus.publish(log, EXAMPLES[wire.Closed])
    await bus.publish(WEIGHTS, EXAMPLES[wire.WeightsOffer])
    await bus.key_value(RUNS).put(bus.run, EXAMPLES[wire.RunSpec])
    await bus.key_value(CONTROL).put(bus.run, wire.DesiredState(state="running"))


@pytest.mark.parametrize("whose", ["own", "other"])
@pytest.mark.parametrize(
    ("role", "kind"), [(role, kind) for role, kinds in SUCCEEDED.items() for kind in kinds]
)
async def test_a_reply_got_anywhere(role: str, kind: str, whose: str, tmp_path: Path) -> None:
    with former_broker(tmp_path / "store") as server:
        runs = [await connect(server.url, run) for run in ("quick", "other")]
        for each in runs:
            await fill(each)
        responder = (
            await connect(server.url, "quick", ANSWERED[role][2]) if kind == "answer" else None
        )
        victim = runs[whose == "other"]
        assert await harm_done(server.url, role, kind, runs[0], victim, responder) != set()
        for each in (*runs, *([responder] if responder else [])):
            await each.close()


class ChangedFleet(RunFleet):
    """A fleet whose broker is of the former kind until it is started again."""

    is_former = True

    def start_broker(self) -> None:
        if not self.is_former:
            super().start_broker()
            return
        with former_configuration():
            super().start_broker()
            keys = keys_of(self.url)
            keys.owner(self.run)
            # so that no process makes its own, and tells the server
            for role in ("learner", "rollout", "envhub"):
                keys.role(role, self.run)


async def test_a_running_run_goes_on_after_the_change(tmp_path: Path) -> None:
    fleet = ChangedFleet(tmp_path / "fleet", "changed")
    lake = {"env": "frozenlake", "env_args": {"observe": "cell"}, "group_size": 2, "max_turns": 4}
    lake |= {"max_context_tokens": 64, "sampling": {"max_tokens": 4}}
    train: dict[str, Any] = {
        "backend": f"{null.__file__}:NullBackend",
        "steps": STEPS,
        "groups_per_step": 2,
    }
    config: dict[str, Any] = {
        "run": {"name": fleet.run, "dir": str(tmp_path / "runs")},
        "model": {"path": None},
    }
    config |= {
        "domains": {"lake": lake},
        "train": train | {"num_threads": 1, "max_staleness": STEPS},
    }
    config |= {
        "rollout": {"engine": "random", "max_context_tokens": 64},
        "envhub": {"n": 4},
        "trackers": {"use": []},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    async with fleet:
        fleet.add("learner", "learner", "start", str(tmp_path / "run.yaml"))
        fleet.add("rollout", "rollout-0", "--gpus", "cpu")
        fleet.add("envhub", "envhub-0")
        watch = await connect(fleet.url, fleet.run)
        await watch.ensure_streams()
        await until(lambda: _at_least(watch, 20), 3 * LONG_S)
        jetstream = fleet.folder / "broker" / "jetstream"
        assert sorted(one.name for one in jetstream.iterdir()) == ["$G"]
        fleet.is_former = False
        await fleet.restart_broker()
        assert sorted(one.name for one in jetstream.iterdir()) == ["RLEARNER"]
        await fleet.wait_done(fleet.children, 4 * LONG_S)
        assert fleet.crashes == []
        assert await watch.last_seq(SAMPLES) >= 2 * STEPS
        await watch.close()
    last = json.loads(
        (tmp_path / "runs" / fleet.run / "metrics.jsonl").read_text().splitlines()[-1]
    )
    assert (last["ticket/trained"], last["ticket/open"], last["ticket/dead"]) == (2 * STEPS, 0, 0)


async def _at_least(bus: Bus, records: int) -> bool:
    return await bus.last_seq(SAMPLES) >= records


# -----------------------------------------------------------------------------------------------------
# what is moved


def test_streams_are_moved_once(tmp_path: Path) -> None:
    (tmp_path / "$G" / "streams" / "rl_quick_samples").mkdir(parents=True)
    (tmp_path / "RLEARNER" / "streams").mkdir(parents=True)  # of a start without runs
    for _ in range(2):
        move_streams(tmp_path, is_clustered=False)
        assert [str(one.relative_to(tmp_path)) for one in tmp_path.glob("*/streams/*")] == [
            "RLEARNER/streams/rl_quick_samples"
        ]


@pytest.mark.parametrize("state", ["cluster", "former cluster", "both"])
def test_streams_that_cannot_be_moved_are_refused_in_words(state: str, tmp_path: Path) -> None:
    (tmp_path / "$G" / "streams" / "rl_quick_samples").mkdir(parents=True)
    other = {
        "cluster": "none",
        "former cluster": "$SYS/_js_",
        "both": "RLEARNER/streams/rl_quick_samples",
    }[state]
    (tmp_path / other).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    says = (
        "streams of both an older and this rlearner"
        if state == "both"
        else "is of a cluster that an older rlearner"
    )
    with pytest.raises(UserError, match=says):
        move_streams(tmp_path, is_clustered=state == "cluster")
    assert sorted(tmp_path.rglob("*")) == before
