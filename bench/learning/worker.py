"""Run arms on one core: a JSON line per arm on standard input, results as files, a line for each
finished arm.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path

import torch

from bench.learning.arm import measure, run_arm
from bench.learning.settings import ArmSettings
from broker.system.private_files import private_write


def main() -> int:
    """Until standard input ends. An arm that fails leaves its traceback next to where its result
    would be.
    """
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        folder = Path(asked["folder"])
        warm_start = asked["warm_start"]
        arm = ArmSettings(**{**asked["arm"], "overrides": tuple(asked["arm"]["overrides"])})
        target = folder / arm.path
        began = time.monotonic()
        try:
            found = (measure if arm.sweep == "start" else run_arm)(arm.config(), warm_start)
        except Exception:  # noqa: BLE001 - written down; the other arms go on
            target.with_suffix(".failed").write_text(traceback.format_exc(), encoding="utf-8")
            print(json.dumps({"path": arm.path, "failed": True}), flush=True)
            continue
        target.with_suffix(".failed").unlink(missing_ok=True)
        private_write(target, (json.dumps(asked["arm"] | found) + "\n").encode())
        success = sum(found["solved"]) / len(found["solved"]) / found["episodes_per_map"]
        row = {
            "path": arm.path,
            "success": round(success, 4),
            "seconds": round(time.monotonic() - began, 1),
        }
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
