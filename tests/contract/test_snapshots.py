"""A rollout server whose learner is gone starts from a snapshot, over HTTP, and from nothing that
is not right to the byte.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import torch
from test_rollout_service import Fleet, ask, check, fleet, load, model_path, probe_of, stop  # noqa: F401  # fixtures

from broker.jetstream.core_messages import watch_metrics
from broker.weights.memory.staging import plan_of
from broker.weights.sender.send import WeightSender
from broker.weights.snapshots.publish import SnapshotPublisher
from learner.weights.snapshots import SnapshotServer

KEY = "a-key-of-sixteen-or-more"


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SnapshotServer]:
    monkeypatch.setenv("RL_API_KEY", KEY)
    server = SnapshotServer(tmp_path / "snapshots")
    await server.start("127.0.0.1", 0)
    yield server
    await server.close()


async def last_error(fleet: Fleet, text: str) -> None:  # noqa: F811
    """Until the server says so of itself."""
    async for report in watch_metrics(fleet.bus):
        if report.id == "h1" and text in report.text.get("last_error", ""):
            return


async def test_without_the_learner_it_serves_the_snapshot_and_follows_when_it_is_back(
    fleet: Fleet,  # noqa: F811
    model_path: str,  # noqa: F811
    served: SnapshotServer,
    tmp_path: Path,
) -> None:
    model, folder = load(model_path), tmp_path / "snapshots"

    def offer(sender: WeightSender, version: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.2)
        sender.offer(version, dict(model.named_parameters()), probe_of(model))

    gone = WeightSender(
        fleet.bus, plan_of(dict(model.named_parameters()), 32.0), epoch=3, roster=fleet.roster
    )
    gone.publisher = publisher = SnapshotPublisher(folder, fleet.bus.run, every=100)
    await gone.start()
    offer(gone, 7)
    while "weights/snapshot_version" not in gone.metrics():
        await fleet.roster.changed(0.1)
    await publisher.close()
    gone.publisher = None
    good, (weights,) = load(model_path), list(folder.glob("*.weights"))
    good.load_state_dict(model.state_dict())
    offer(gone, 8)
    while gone.metrics()["weights/version"] < 8:
        await fleet.roster.changed(0.1)
    await gone.close()

    data = weights.read_bytes()
    weights.write_bytes(data[:-100])
    server = await fleet.start("h1", "--snapshot", served.address)
    await last_error(
        fleet, f"{len(data) - 100} bytes, its plan has {len(data)}; nothing was loaded"
    )
    weights.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    await last_error(fleet, "its offer says")
    presence = fleet.roster.get("h1")
    assert presence is not None
    assert (presence.state, presence.policy_version) == ("failed", -1)
    weights.write_bytes(data)
    presence = await fleet.serving("h1")
    assert (presence.epoch, presence.policy_version) == (3, 7)
    reply = await fleet.client.generate(presence.address, ask("a"), timeout_s=100)
    assert reply.version_runs.array().tolist() == [7, 8]
    check(good, reply)

    back = WeightSender(fleet.bus, gone.plan, epoch=4, roster=fleet.roster)
    await back.start()
    try:
        offer(back, 8)
        await fleet.seen("h1", lambda p: p is not None and (p.epoch, p.policy_version) == (4, 8))
        reply = await fleet.client.generate(presence.address, ask("b"), timeout_s=100)
        check(model, reply)
    finally:
        await back.close()
    stop(server)
    code, said = await server.ended()
    assert code == 0, said
    assert "Traceback" not in said


async def test_only_what_belongs_to_snapshots_is_shown_and_only_with_the_key(
    served: SnapshotServer, tmp_path: Path
) -> None:
    folder = tmp_path / "snapshots"
    folder.mkdir()
    for name in ("newest.json", "1-000001.weights", "secret"):
        (folder / name).write_text(name)
    (tmp_path / "outside.weights").write_text("")
    right = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession() as client:
        for path, headers, status in (
            ("newest.json", right, 200),
            ("1-000001.weights", right, 200),
            ("secret", right, 404),
            ("1-000002.weights", right, 404),
            ("..%2foutside.weights", right, 404),
            ("newest.json", {}, 401),
            ("newest.json", {"Authorization": "Bearer wrong"}, 401),
        ):
            async with client.get(f"{served.address}/{path}", headers=headers) as answer:
                assert (answer.status, path) == (status, path)
                if status == 200:
                    assert await answer.text() == path


async def test_bad_places_end_the_server_in_one_line(fleet: Fleet) -> None:  # noqa: F811
    server = await fleet.start("h1", "--snapshot", "http://127.0.0.1:99999")
    code, said = await server.ended()
    assert code == 2
    assert (
        "error: snapshot 'http://127.0.0.1:99999' is not allowed; a folder, or http://host:port/path"
        in said
    )
    assert os.linesep.join(line for line in said.splitlines() if "Traceback" in line) == ""
