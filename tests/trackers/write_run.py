"""One life of a run, as a learner logs it: two steps, a text, a table and a picture, from a thread.
Prints its id.

Arguments: the tracker's name, the run's folder, the first step, the configuration as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from learner.config import TrackersSection
from learner.reporting.trackers import TrackerGroup

ARGS = {"wandb": {"mode": "offline"}, "swanlab": {"mode": "local"}}
GIF = Path(__file__).with_name("two_frames.gif")


def main() -> None:
    """Log the life."""
    name, folder, first, config = (
        sys.argv[1],
        Path(sys.argv[2]),
        int(sys.argv[3]),
        json.loads(sys.argv[4]),
    )
    folder.mkdir(exist_ok=True)
    section = TrackersSection(use=[name], project="lakes", args={name: ARGS.get(name, {})})
    group = TrackerGroup(section, folder, "demo", config)
    last = first + 1
    for step in (first, last):
        group.log(step, {"reward/mean": step / 10, "eval/avg@8": 0.5})
    group.texts(last, {"samples/lake": f"step {last}: a < b **x** ü"})
    columns = ("step", "domain", "reward", "success", "text")
    rows = [(last, "lake", 0.5, True, "hi <b>\nthere"), (last, "lake", 0.0, False, "ü")]
    group.table(last, "trajectories/eval", columns, rows)
    group.picture(last, "episodes/lake", GIF.read_bytes())
    tracker = group._open[name]  # gone if it failed
    print("id", getattr(tracker, "_run_id", None) or tracker._run.id, flush=True)  # type: ignore[attr-defined]
    group.close()


if __name__ == "__main__":
    work = threading.Thread(target=main)  # a learner's trackers are never in its main thread
    work.start()
    work.join()
