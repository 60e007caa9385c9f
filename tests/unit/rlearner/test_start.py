"""Where a replay begins, in a run that keeps its newest groups only."""

from __future__ import annotations

from pathlib import Path

import pytest
import run_folder_kit as kit

from broker.errors import UserError
from broker.settings.run_settings import RunSettings
from learner.checkpoints import checkpoint
from learner.credit.archive import archive_files
from learner.credit.ledger import Ledger
from rlearner.replay.start import find_start

LAKE = RunSettings.of_config({"domains": {"lake": {"env": "frozenlake"}}})
KEPT = "no longer there: the archive keeps the newest 4 groups (samples.keep)"


async def test_starts_whose_groups_were_removed_are_refused(tmp_path: Path) -> None:
    world = kit.World(tmp_path / "run", kit.group_only, keep=4, steps=12)
    await world.learn()
    path = checkpoint.list_checkpoints(world.folder / "checkpoints")[0]
    ledger = Ledger.load(checkpoint.read_checkpoint(path).ledger)
    needed = min([entry.seq for entry in ledger.arrived] + [ledger.state.position + 1])
    assert needed < archive_files(world.folder / "samples")[0][0]
    with pytest.raises(UserError) as refused:
        find_start(world.folder, LAKE, 2)
    assert str(refused.value) == f"--from 2: record {needed}, which it needs, is {KEPT}"
    with pytest.raises(UserError) as refused:
        find_start(world.folder, LAKE, 0)
    assert str(refused.value).endswith(f"record 1, which sets the run's rules, is {KEPT}")
    (world.folder / "model").mkdir()
    (world.folder / "model" / "config.json").write_text("{}")
    assert find_start(world.folder, LAKE, 10).ledger.state.version == 10
