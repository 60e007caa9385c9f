"""The doctor and the disk: what checkpoints of adapters take, and folders that are not there yet."""

from __future__ import annotations

from pathlib import Path

from rlearner.doctor.machine import GIB, MachineResources, machine_findings, nearest_folder
from rlearner.doctor.requirements import MachineRequirements


def test_adapters_have_no_optimizer_of_the_whole_model() -> None:
    machine = MachineResources(2, 24 * GIB, 12 * GIB, (1024, 4096), 30 * GIB, "/d", 8 * GIB)

    def disk(needs: MachineRequirements) -> str:
        return next(
            finding.status
            for finding in machine_findings(machine, needs, (8 * GIB, 2))
            if finding.name == "disk"
        )

    assert disk(MachineRequirements(checkpoints=3)) == "missing"  # 3 times 8 + 48 GiB
    # 3 times 8 GiB, and 2 to spare
    assert disk(MachineRequirements(checkpoints=3, plugins={"train.lora": "lora"})) == "ok"


def test_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path
    assert nearest_folder(tmp_path) == tmp_path
    assert nearest_folder(tmp_path / "file" / "below") == tmp_path / "file"
