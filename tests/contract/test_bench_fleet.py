"""The fleet of the chaos tests, with one real process in it."""

from __future__ import annotations

from pathlib import Path

from bench.support.fleet import RunFleet
from broker.contract import wire
from broker.contract.streams import CONTROL
from broker.jetstream.bus import Bus
from broker.settings.runspec import publish_runspec


async def test_who_comes_back_when_the_run_is_over_is_told_to_end(tmp_path: Path) -> None:
    """By itself it waits for a learner to resume the run, as it should."""
    async with RunFleet(tmp_path, "over") as fleet:
        bus = await Bus.connect(fleet.url, "over", name="test", deadline_s=60)
        await bus.ensure_streams()
        config = {"domains": {"lake": {"env": "frozenlake"}}}
        await publish_runspec(
            bus,
            wire.RunSpec(
                run="over", wire_version=wire.WIRE_VERSION, epoch=0, config=config, model_path=""
            ),
        )
        await bus.key_value(CONTROL).put(
            "over", wire.DesiredState(state="stopped", reason="all steps are done")
        )
        late = fleet.add("rewardhub", "late")
        await fleet.wait_done([late])
        await bus.close()
    assert fleet.crashes == []
    assert late.told
    assert "Traceback" not in late.log.read_text()
