"""A console in a process of its own, a browser's cookies without a browser, and a run full of
markup.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import run_folder_kit as kit
import yaml
from waits import LONG_S

from bench.support.localhost_names import local_connector
from broker.contract import wire
from rlearner.ops.run_kinds import RunKind

ROOT = Path(__file__).parents[2]
MARKUP = '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'
PASSWORD = "correct horse battery"


def hostile(ticket: wire.Ticket) -> list[wire.Message | bytes]:
    """A group whose texts are all markup."""
    texts: dict[str, Any] = {
        "response": f"answer {MARKUP}",
        "reward_parts": {"env": 0.25, "<b>bold</b>": 1.0},
    }
    pair = [
        kit.trajectory(number, reward, [ticket.min_version, 3])
        for number, reward in enumerate((0.25, 1.0))
    ]
    marked = [msgspec.structs.replace(one, **texts) for one in pair]
    return [kit.group(ticket, prompt=f"question {MARKUP} {{{{7*7}}}}", trajectories=marked)]


async def hostile_run(root: Path, name: str = "hostile", **settings: Any) -> Path:
    """A finished run of such groups."""
    folder = root / name
    await kit.World(folder, hostile).learn()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config |= {
        "domains": {"lake": {}},
        "samples": {"keep": True},
        "model": {"path": f"model{MARKUP}"},
    } | settings
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "logs").mkdir()
    (folder / "logs" / "learner.log").write_text(f"INFO {MARKUP}\n\x1b[31mred\n")
    return folder


# Kinds of runs, and the charts of their overview.
KINDS = {"training": 10, "sft": 7, "dpo": 9, "evaluation": 0}


def write_other_kinds(root: Path) -> None:
    """Write finished runs of each kind, without their models and records."""
    from rlearner.console.pages.curves import LAYOUTS  # which needs nicegui

    data = {"train": "rows.jsonl"}
    algorithm = {"adv_estimator": "grpo", "pg_variant": "gspo", "correction": "none"}
    sections: dict[RunKind, dict[str, Any]] = {
        "training": {"domains": {"lake": {}}, "algorithm": algorithm},
        "sft": {"data": data},
        "dpo": {"data": data, "dpo": {"loss": "ipo"}},
        "evaluation": {"domains": {"lake": {}}, "algorithm": algorithm},
    }
    for kind, settings in sections.items():
        folder = root / kind
        folder.mkdir()
        config = {"run": {"name": kind}, "train": {"steps": 3}} | settings
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        if kind != "evaluation":
            figures = dict.fromkeys(sorted(LAYOUTS[kind].metrics), 1.25)
            lines = [{"step": step, "time": float(step)} | figures for step in range(4)]
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            (folder / "metrics.jsonl").write_text(text)
    evaluation = root / "evaluation"
    rates = {"success_rate": 0.5, "success_interval": [0.1, 0.9], "reward_mean": 0.5}
    rates |= {"tasks": 1, "episodes": 2, "pass@2": 0.75}
    (evaluation / "result.json").write_text(json.dumps(rates | {"domains": {"lake": rates}}))
    task = {"domain": "lake", "task_index": 7, "success": [True, False], "reward": [1.0, 0.0]}
    task |= {"prompt": "go left", "frames": [], "text": "", "response": ""}
    (evaluation / "evals").mkdir()
    (evaluation / "evals" / "actor-step-000000.jsonl").write_text(f"{json.dumps(task)}\n")


class Console:
    """One console and a client of it."""

    def __init__(self, address: str, link_file: Path, output: list[str]) -> None:
        self.address, self.link_file, self.output = address, link_file, output

    @property
    def link(self) -> str:
        return self.link_file.read_text().strip()

    @asynccontextmanager
    async def client(self, *, logged_in: bool = True) -> AsyncIterator[aiohttp.ClientSession]:
        jar = aiohttp.CookieJar(unsafe=True)
        headers = {"Accept": "text/html"}
        async with aiohttp.ClientSession(
            self.address, cookie_jar=jar, headers=headers, connector=local_connector()
        ) as session:
            if logged_in:
                async with session.get(
                    self.link.removeprefix(self.address), allow_redirects=False
                ) as answer:
                    assert answer.status == 303, await answer.text()
            yield session


@asynccontextmanager
async def console(root: Path, cache: Path, *arguments: str) -> AsyncIterator[Console]:
    """A running ``rlearner console``; ends with a stop, which must be clean."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RL_BROKER", "RL_RUN")
    }
    environment |= {"XDG_RUNTIME_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
    words = ["-m", "rlearner.cli", "console", "--dir", str(root), "--port", "0", *arguments]
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        cwd=ROOT,
    )
    output: list[str] = []
    assert child.stdout is not None
    reading: asyncio.Task[None] | None = None
    try:
        address = ""
        async with asyncio.timeout(LONG_S):
            while not address:
                line = (await child.stdout.readline()).decode()
                assert line, output
                output.append(line)
                found = re.search(r" at (https?://\S+), ", line)
                address = found[1] if found else ""
        reading = asyncio.create_task(_read(child.stdout, output))
        port = address.rpartition(":")[2]
        link_file = cache / "rlearner" / f"console-{port}.url"
        async with asyncio.timeout(LONG_S):
            while True:
                try:
                    async with (
                        aiohttp.ClientSession(connector=local_connector()) as session,
                        session.get(f"{address}/login", ssl=False),
                    ):
                        break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.05)
        yield Console(address, link_file, output)
        child.terminate()
        assert await asyncio.wait_for(child.wait(), LONG_S) == 0, output
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        if reading is not None:
            await reading


async def _read(stream: asyncio.StreamReader, output: list[str]) -> None:
    while line := await stream.readline():
        output.append(line.decode())


def elements(page: str) -> list[dict[str, Any]]:
    """The elements of a page, as the browser gets them: a tag, its properties and its text."""
    found = re.search(r"parseElements\(String\.raw`(.*?)`\)", page, re.S)
    assert found, page[:2000]
    text = found[1]
    for coded, plain in (
        ("&#36;", "$"),
        ("&#96;", "`"),
        ("&gt;", ">"),
        ("&lt;", "<"),
        ("&amp;", "&"),
    ):
        text = text.replace(coded, plain)
    return list(json.loads(text).values())


def component(page: str, name: str) -> list[dict[str, Any]]:
    """The properties of the elements of one kind, for example ``grid``."""
    return [one["props"] for one in elements(page) if one["tag"] == f"nicegui-{name}"]


def texts(page: str) -> list[str]:
    """All texts of a page."""
    return [one["text"] for one in elements(page) if one.get("text")]
