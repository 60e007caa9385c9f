"""Measures the console in a real Chromium; the last line is JSON.

    python -m bench.console                      # writes a run of 10,000 steps and 100,000 trajectories first
    python -m bench.console --run runs/big       # one that bench.support.console_run has written

page_ms: median of full loads of the slowest page, with a warm cache of files, until its content is
there and the page is connected. search_ms: median of a search by words, from the request to the
last byte of the answer. newest_step_s: longest time from a step's line to its number on an open
page. console_cpu_share: CPU time of the console, divided by that of all processes of the run, with
one page open, after its start; the last two are of a small run that trains.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil

from bench.support.console_browser import CHROMIUM, FLAGS, async_playwright
from bench.support.console_process import console, until
from bench.support.console_run import write_run
from bench.support.localhost_names import local_connector
from learner.reporting.metrics import newest_line

STEPS: Final = 10_000
LOADS: Final = 9
SEARCHES: Final = 15
PAGES: Final = {
    "runs": ("/?compare={run}&metric=reward/mean", ".chart canvas"),
    "overview": ("/run/{run}", ".chart canvas"),
    "timeline": ("/run/{run}/timeline", ".lanes canvas"),
    "fleet": ("/run/{run}/fleet", ".flow .node"),
    "trajectories": ("/run/{run}/trajectories", "table.t tbody tr a"),
    "group": ("/run/{run}/group/{ticket}", ".tok"),
    "dead letters": ("/run/{run}/dead-letters", "h1"),
}
SMALL: Final = [
    "configs/quickstart.yaml", "run.name=live", "train.steps=4000", "train.groups_per_step=4", "warm_start.steps=20",
    "warm_start.episodes=64", "eval.tasks=16", "samples.keep=true", "eval.baseline=''",
]  # fmt: skip
START_S: Final = 240.0
SETTLE_S: Final = 10.0  # after the first steps
CPU_S: Final = 60.0
WATCHED_STEPS: Final = 12


async def big(root: Path, run: str) -> dict[str, Any]:
    """Return the figures of a big run."""
    async with (
        console(root, run) as (address, link, _),
        async_playwright() as driver,
        aiohttp.ClientSession(
            address, cookie_jar=aiohttp.CookieJar(unsafe=True), connector=local_connector()
        ) as session,
    ):
        with tempfile.TemporaryDirectory() as profile:
            context = await driver.chromium.launch_persistent_context(
                profile, executable_path=CHROMIUM, args=list(FLAGS)
            )
            page = await context.new_page()
            await page.goto(link)
            cookies = {one["name"]: one["value"] for one in await context.cookies()}
            session.cookie_jar.update_cookies(cookies)
            await _indexed(session, run)
            ticket = await _ticket(session, run)
            loads = {name: await _load(page, address, *PAGES[name], run, ticket) for name in PAGES}
            await context.close()
        searches = []
        for number in range(SEARCHES):
            began = time.monotonic()
            async with session.get(f"/run/{run}/trajectories?text={_word(number)}") as answer:
                await answer.read()
            searches.append((time.monotonic() - began) * 1000)
    return {
        "pages": loads,
        "page_ms": max(loads.values()),
        "search_ms": round(statistics.median(searches), 1),
    }


def _word(number: int) -> str:
    return "".join("badefigokulamenipo"[2 * ((number * k + k) % 9) :][:2] for k in (1, 2, 4))


async def _indexed(session: aiohttp.ClientSession, run: str) -> None:
    """Wait until the index of a run is complete."""
    while True:
        async with session.get(f"/run/{run}/trajectories") as answer:
            text = await answer.text()
        if "being built" not in text and "0 in the index" not in re.findall(
            r"[\d,]+ in the index", text
        ):
            return
        await asyncio.sleep(1.0)


async def _ticket(session: aiohttp.ClientSession, run: str) -> str:
    async with session.get(f"/run/{run}/trajectories?state=trained") as answer:
        found = re.search(r"/group/(\d+)", await answer.text())
    assert found
    return found[1]


async def _load(page: Any, address: str, path: str, content: str, run: str, ticket: str) -> float:
    """Return the median of several loads in milliseconds, after one that fills the browser's cache."""
    times = []
    for _ in range(LOADS + 1):
        await page.goto("about:blank")
        began = time.monotonic()
        await page.goto(address + path.format(run=run, ticket=ticket), wait_until="commit")
        await page.wait_for_selector(content, state="attached")
        await page.wait_for_function("window.did_handshake === true")
        times.append((time.monotonic() - began) * 1000)
    return round(statistics.median(times[1:]), 1)


async def live(root: Path) -> dict[str, Any]:
    """Return the figures of a small run that trains."""
    log = (root / "up.log").open("wb")
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RL_BROKER", "RL_RUN")
    }
    words = ["-m", "rlearner.cli", "up", *SMALL, f"run.dir={root}"]
    child = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=log, stderr=log, env=environment
    )
    lines = root / "live" / "metrics.jsonl"
    try:
        async with asyncio.timeout(START_S):
            await until(lambda: _step(lines) >= 3 or child.returncode is not None)
        assert child.returncode is None, (root / "up.log").read_text()[-2000:]
        async with console(root, "live") as (_, link, process), async_playwright() as driver:
            chromium = await driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
            page = await (await chromium.new_context()).new_page()
            await page.goto(link)
            await page.wait_for_selector('[data-stat="step"] .v')
            await asyncio.sleep(SETTLE_S)
            before = cpu_s(process), cpu_s(psutil.Process(child.pid))
            delays = await _delays(page, lines)
            after = cpu_s(process), cpu_s(psutil.Process(child.pid))
            await chromium.close()
    finally:
        if child.returncode is None:
            child.terminate()
            await child.wait()
        log.close()
    used = after[0] - before[0]
    of_run = after[1] - before[1]
    return {
        "newest_step_s": round(max(delays), 3), "newest_step_median_s": round(statistics.median(delays), 3),
        "console_cpu_share": round(used / of_run, 5), "console_cpu_s": round(used, 2), "run_cpu_s": round(of_run, 2),
        "steps_watched": len(delays),
    }  # fmt: skip


async def _delays(page: Any, lines: Path) -> list[float]:
    """Return how long each new step took to be on the page, for at least a minute."""
    delays = list[float]()
    end = time.monotonic() + CPU_S
    known = _step(lines)
    while len(delays) < WATCHED_STEPS or time.monotonic() < end:
        await until(lambda known=known: _step(lines) > known)  # type: ignore[misc]
        line = newest_line(lines)
        known = int(line["step"])
        text = f"Number(document.querySelector('[data-stat=\"step\"] .v').textContent.replace(/,/g, '')) >= {known}"
        await page.wait_for_function(text, polling=20, timeout=30_000)
        delays.append(time.time() - float(line["time"]))
    return delays


def _step(lines: Path) -> int:
    return int(newest_line(lines).get("step", 0))


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and its living descendants."""
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


async def measure(run: Path | None) -> dict[str, Any]:
    """Measure both runs, writing the big one if there is none."""
    async_playwright()  # says what is missing before minutes of work
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if run is None:
            run = root / "big" / "big"
            run.parent.mkdir()
            (await write_run(run, STEPS)).close()
        found = await big(run.parent.absolute(), run.name)
        print(json.dumps(found), flush=True)
        (root / "small").mkdir()
        return found | await live(root / "small")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", type=Path, metavar="FOLDER", help="a big run (default: one is made up)"
    )
    print(json.dumps(asyncio.run(measure(parser.parse_args().run))))


if __name__ == "__main__":
    main()
