"""Reads back what ``write_run.py`` wrote, with each package's own reader where it has one. Prints
one JSON object:

the runs by id, each with ``config``, ``values`` (pairs of step and value by name), ``texts``,
``tables`` (columns and rows) and ``pictures`` (sha256 of the bytes) by step.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(sys.argv[2])
# of a W&B file: blocks of records, each with crc, length and kind
BLOCK, HEADER, START = 32768, 7, 7
TEXT, TABLE, PICTURE = "samples/lake", "trajectories/eval", "episodes/lake"


def new() -> dict[str, Any]:
    """Return a run of which nothing is known."""
    return {"config": {}, "values": defaultdict(list), "texts": {}, "tables": {}, "pictures": {}}


def sha(data: bytes) -> str:
    """Return the digest of a picture."""
    return hashlib.sha256(data).hexdigest()


def wandb() -> dict[str, Any]:
    """Return the runs in the offline files, which ``wandb sync`` would send."""
    from wandb.proto.wandb_internal_pb2 import Record

    runs: dict[str, Any] = defaultdict(new)
    for file in sorted(FOLDER.glob("wandb/offline-run-*/run-*.wandb")):
        media, run = file.parent / "files", ""
        for data in records(file.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run"):
                run = record.run.run_id
                found = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                runs[run]["config"] |= {
                    key: value for key, value in found.items() if key != "_wandb"
                }
            row: dict[str, Any] = {}
            for item in record.history.item:
                *outer, last = item.nested_key or [item.key]
                place = row
                for part in outer:
                    place = place.setdefault(part, {})
                place[last] = json.loads(item.value_json)
            step = row.get("_step")
            for name, value in row.items():
                if name.startswith(("reward/", "eval/")):
                    runs[run]["values"][name].append((step, value))
            if TEXT in row:
                runs[run]["texts"][step] = (media / row[TEXT]["path"]).read_text()
            if TABLE in row:
                table = json.loads((media / row[TABLE]["path"]).read_text())
                runs[run]["tables"][step] = [table["columns"], table["data"]]
            if PICTURE in row:
                runs[run]["pictures"][step] = sha((media / row[PICTURE]["path"]).read_bytes())
    return runs


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a W&B file, which LevelDB's log format holds."""
    assert data[:4] == b":W&B"
    at, parts = START, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def swanlab() -> dict[str, Any]:
    """Return the runs that ``swanlab watch`` shows; each life is one of its own, of the same id."""
    run = new()
    database = sqlite3.connect(FOLDER / "swanlab" / "runs.swanlab")
    lives = database.execute("select id, run_id from experiment order by id").fetchall()
    assert [life.rpartition("-")[2] for _, life in lives] == ["demo"] * len(lives)
    for number, life in lives:
        place = FOLDER / "swanlab" / life
        settings = yaml.safe_load((place / "files" / "config.yaml").read_text())
        run["config"] |= {name: entry["value"] for name, entry in settings.items()}
        tags = database.execute(
            "select name, folder, type from tag where experiment_id = ?", (number,)
        ).fetchall()
        for name, folder, kind in tags:
            for line in (place / "logs" / (folder or name)).glob("*.log"):
                for entry in map(json.loads, line.read_text().splitlines()):
                    step, value = entry["index"], entry["data"]
                    if name.startswith(("reward/", "eval/")):
                        run["values"][name].append((step, value))
                    elif name == TEXT:
                        run["texts"][step] = value[0]
                    elif name == PICTURE:
                        run["pictures"][step] = sha(
                            (place / "media" / kind / value[0]).read_bytes()
                        )
        # which its local page does not show
        for file in (place / "media" / "echarts").glob("*.json"):
            table = json.loads(file.read_text())
            columns = [column["field"] for column in table["colDefs"]]
            rows = [[row[column] for column in columns] for row in table["rowData"]]
            run["tables"][int(file.name.partition("-")[0])] = [columns, rows]
    return {"demo": run}


def trackio() -> dict[str, Any]:
    """Return the runs that ``trackio show`` shows."""
    os.environ["TRACKIO_DIR"] = str(FOLDER / "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    runs: dict[str, Any] = defaultdict(new)
    for record in SQLiteStorage.get_run_records("lakes"):
        run = runs[str(record["id"])]
        run["config"] = SQLiteStorage.get_run_config("lakes", record["name"], run_id=record["id"])
        for row in SQLiteStorage.get_logs("lakes", record["name"], run_id=record["id"]):
            step = row["step"]
            for name, value in row.items():
                if name.startswith(("reward/", "eval/")):
                    run["values"][name].append((step, value))
                elif name == TEXT:
                    run["texts"][step] = value["_value"]
                elif name == TABLE:
                    columns = list(value["_value"][0])
                    run["tables"][step] = [
                        columns,
                        [list(line.values()) for line in value["_value"]],
                    ]
                elif name == PICTURE:
                    run["pictures"][step] = sha(
                        (FOLDER / "trackio" / "media" / value["file_path"]).read_bytes()
                    )
    return runs


def mlflow() -> dict[str, Any]:
    """Return the runs that ``mlflow server`` shows; ``params`` is what their first life logged."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{FOLDER / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("lakes")
    runs: dict[str, Any] = {}
    for found in client.search_runs([experiment.experiment_id]):
        identity, run = found.info.run_id, new()

        def read(path: str, identity: str = identity) -> bytes:
            return Path(client.download_artifacts(identity, path)).read_bytes()

        run["config"] = json.loads(read("config.json"))
        run["params"], run["status"] = found.data.params, found.info.status
        for name in found.data.metrics:
            run["values"][name] = [
                (one.step, one.value) for one in client.get_metric_history(identity, name)
            ]
        for place, kind in ((TEXT, "texts"), (TABLE, "tables"), (PICTURE, "pictures")):
            for file in client.list_artifacts(identity, place):
                step, data = int(Path(file.path).stem.rpartition("-")[2]), read(file.path)
                table = json.loads(data) if kind == "tables" else {}
                shown = {"texts": data.decode("utf-8", "replace"), "pictures": sha(data)}
                run[kind][step] = [table["columns"], table["data"]] if table else shown[kind]
        listed = json.loads(found.data.tags["mlflow.loggedArtifacts"])
        assert {entry["path"] for entry in listed} == {
            file.path for file in client.list_artifacts(identity, TABLE)
        }
        runs[identity] = run
    return runs


if __name__ == "__main__":
    print(
        json.dumps(
            {"wandb": wandb, "swanlab": swanlab, "trackio": trackio, "mlflow": mlflow}[
                sys.argv[1]
            ]()
        )
    )
