"""The console in a real headless Chromium, on a run that trains and on one of markup only. By
``make test-console``.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import console_kit as kit
import pytest
import pytest_asyncio
from waits import LONG_S, until

from bench.support.console_browser import CHROMIUM, FLAGS
from broker.contract import codec, wire
from broker.contract.streams import DEAD, TICKETS
from broker.jetstream.bus import Bus
from broker.settings.run_address import broker_address, is_held

playwright = pytest.importorskip(
    "playwright.async_api", reason="needs Playwright and Chromium: make test-console"
)

WIDTHS = (360, 800, 1440)
SCREENSHOTS = os.environ.get("RL_CONSOLE_SCREENSHOTS")  # a folder that gets one of each page
STEPS = 2000
IS_DRAWN = (
    "(c) => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((value) => value)"
)
SMALL = [
    f"train.steps={STEPS}", "train.groups_per_step=4", "warm_start.steps=20", "warm_start.episodes=64", "eval.tasks=16",
    "eval.every_steps=20", "checkpoint.every_steps=5", "samples.keep=true", "eval.baseline=''",
]  # fmt: skip

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


class Browser:
    """A browser that is logged in; it notes what it asked of other hosts, and its errors."""

    def __init__(self, context: Any, console: kit.Console) -> None:
        self.context, self.console = context, console
        self.strange: list[str] = []
        self.errors: list[str] = []
        context.on("request", self._requested)
        context.on("weberror", lambda error: self.errors.append(str(error.error)))
        context.on(
            "console", lambda said: self.errors.append(said.text) if said.type == "error" else None
        )

    def _requested(self, request: Any) -> None:
        if not request.url.startswith((self.console.address, "data:", "blob:")):
            self.strange.append(request.url)

    @asynccontextmanager
    async def page(self, path: str, width: int = 1440, theme: str = "light") -> AsyncIterator[Any]:
        page = await self.context.new_page()
        try:
            await page.set_viewport_size({"width": width, "height": 800})
            await page.add_init_script(f"localStorage.setItem('rlearner-theme', '{theme}')")
            await page.goto(self.console.address + path)
            await page.wait_for_selector("main h1")
            await page.wait_for_function("window.did_handshake === true")
            yield page
        finally:
            await page.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Path]:
    """The folder of a run that trains, as ``rlearner up`` starts it, and of one full of markup."""
    root = tmp_path_factory.mktemp("runs")
    await kit.hostile_run(root)
    async with up(root) as child:
        await until(lambda: len(lines(root)) >= 6 or child.returncode is not None, 240)
        assert child.returncode is None, (root / "up.log").read_text()[-2000:]
        yield root


@asynccontextmanager
async def up(root: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """The run, from its newest checkpoint on."""
    words = [
        "-m",
        "rlearner.cli",
        "up",
        "configs/quickstart.yaml",
        "run.name=live",
        f"run.dir={root}",
        *SMALL,
    ]
    log = (root / "up.log").open("ab")
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RL_BROKER", "RL_RUN")
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=log, stderr=log, env=environment
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
            await asyncio.wait_for(child.wait(), LONG_S)
        log.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    cache = tmp_path_factory.mktemp("cache")
    async with (
        kit.console(runs, cache, "live", "--actions") as console,
        playwright.async_playwright() as driver,
    ):
        chromium = await driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        context = await chromium.new_context()
        page = await context.new_page()
        await page.goto(console.link)
        assert page.url == f"{console.address}/run/live"
        await page.close()
        yield Browser(context, console)
        await chromium.close()


def lines(root: Path) -> list[dict[str, Any]]:
    path = root / "live" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def command(*words: str) -> str:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rlearner.cli", *words, stdout=pipe, stderr=pipe
    )
    out, err = await asyncio.wait_for(child.communicate(), 90)
    assert child.returncode == 0, err.decode()
    return out.decode()


async def stat(page: Any, key: str) -> str:
    return str(await page.inner_text(f'[data-stat="{key}"] .v'))


async def body(page: Any) -> str:
    return str(await page.inner_text("main"))


async def trained_ticket(root: Path) -> int:
    """A ticket of the newest steps with sampled tokens."""
    from rlearner.console.index.answers import TrajectoryFilter
    from rlearner.console.index.queries import RunQueries

    rows = RunQueries(root / "live").search(TrajectoryFilter(min_step=1), limit=1).rows
    return rows[0].ticket


# -------------------------------------------------------------------------------------------------
# every page

PAGES = {
    "runs": ("/?compare=live", ["Runs", "live", "hostile", "training", "reward/mean"]),
    "overview": (
        "/run/live",
        ["training", "Reward", "env/success_rate", "Idle share", "staleness/max", "Events"],
    ),
    "timeline": ("/run/live/timeline", ["learner.learner", "train", "wait", "whole run"]),
    "fleet": (
        "/run/live/fleet",
        ["environment hubs", "rollout-1", "envhub-1", "serving", "tickets", "learner.log"],
    ),
    "trajectories": ("/run/live/trajectories", ["in the index", "lake", "terminated", "Search"]),
    "group": (
        "/run/live/group/1",
        ["episode 0", "turn 1", "logprob", "ticket 1: trained", "side by side"],
    ),
    "dead-letters": ("/run/live/dead-letters", ["Dead letters", "none"]),
    "actions": (
        "/run/live/actions",
        ["Pause", "Checkpoint now", "Evaluate now", "the operator wants it running"],
    ),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
async def test_page(browser: Browser, name: str, width: int) -> None:
    path, wanted = PAGES[name]
    theme = "dark" if width == 800 else "light"
    async with browser.page(path, width, theme) as page:
        label = "canvas[aria-label]"  # names of lanes are drawn, and said by the label

        async def content() -> str:
            said = [
                str(await one.get_attribute("aria-label"))
                for one in await page.query_selector_all(label)
            ]
            return "\n".join([await body(page), *said])

        async def complete() -> bool:
            text = await content()
            return all(one in text for one in wanted)

        try:
            await until(complete, 15.0)
        except TimeoutError:
            text = await content()
            pytest.fail(f"{[one for one in wanted if one not in text]} not in {text[:1500]}")
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, (
            "wider than the screen"
        )
        assert await page.evaluate("document.documentElement.dataset.theme") == theme
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(15, 20, 27)" if theme == "dark" else "rgb(247, 248, 250)")
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == "Skip to the content"
        for canvas in await page.query_selector_all("canvas"):  # something is drawn on it
            assert await canvas.evaluate(IS_DRAWN)
        if SCREENSHOTS:
            await page.screenshot(path=f"{SCREENSHOTS}/{name}-{width}.png")
    assert browser.strange == []
    assert browser.errors == []


# --------------------------------------------------------------------------------------------------
# end to end


async def test_the_newest_step_is_shown_within_two_seconds(browser: Browser, runs: Path) -> None:
    delays = []
    async with browser.page("/run/live") as page:
        keep = "(e) => { if (e.detail.kind === 'points') (window.news ??= []).push(e.detail.what['reward/mean']); }"
        await page.evaluate(f"addEventListener('charts', {keep})")
        for _ in range(4):
            before = lines(runs)[-1]["step"]
            await until(lambda known=before: lines(runs)[-1]["step"] > known)
            line = lines(runs)[-1]

            async def shown(step: int = line["step"]) -> bool:
                return int((await stat(page, "step")).replace(",", "")) >= step

            await until(shown, 10.0)
            delays.append(time.time() - line["time"])
        label = "[...document.querySelectorAll('.legend button')].find((b) => b.textContent.includes('reward/mean'))"
        pushed, legend = await page.evaluate(f"[window.news, {label}.textContent]")
        news = {step: value for one in pushed for step, value in zip(*one, strict=True)}
    assert max(delays) <= 2.0, delays
    assert line["step"] in news
    written = {row["step"]: row["reward/mean"] for row in lines(runs)}
    assert news == {step: pytest.approx(written[step], rel=1e-5) for step in news}
    assert float(legend.split()[-1]) == pytest.approx(news[max(news)], abs=1e-4)


async def test_a_token_shows_the_logprob_of_the_command(browser: Browser, runs: Path) -> None:
    ticket = await trained_ticket(runs)
    told = await command(
        "show", "live", str(ticket), "--dir", str(runs), "--episode", "0", "--tokens"
    )
    number = r"(-?[\d.]+)"
    figures = rf"logprob +{number}  version (\d+).*  entropy {number}  ratio {number}"
    expected = re.findall(rf"^ +(\d+) +(\d+)  .*{figures}", told, re.M)
    assert expected
    async with browser.page(f"/run/live/group/{ticket}?episode=0") as page:
        await page.focus(".episodes")
        for position, token, logprob, version, entropy, ratio in expected[:6]:
            await page.keyboard.press("ArrowRight")
            detail = await page.inner_text("[data-token-detail]")
            said = {"position": position, "id": token, "logprob": logprob, "version": version}
            for name, value in (said | {"entropy": entropy, "importance ratio": ratio}).items():
                assert f"{name} {value}" in " ".join(detail.split()), detail
        colours = "[...document.querySelectorAll('.tok')].map((t) => t.style.background)"
        for name in ("policy version", "entropy", "importance ratio"):
            before = await page.evaluate(colours)
            await page.click(f".segment button:has-text('{name}')")
            assert await page.evaluate(colours) != before, name


async def test_pause_and_resume(browser: Browser, runs: Path) -> None:
    async def desired() -> str:
        return str(
            json.loads(await command("status", "live", "--dir", str(runs), "--json"))["desired"]
        )

    async with browser.page("/run/live/actions") as page:
        await page.fill("input[name=reason]", "a look at the disk")
        await page.click("button:has-text('Pause')")
        await page.wait_for_selector("[data-output] >> text=live: paused")
        assert await desired() == "paused"
        await page.wait_for_selector("text=the operator wants it paused (a look at the disk)")
        async with browser.page("/run/live") as overview:
            await overview.wait_for_selector('[data-stat="state"] >> text=paused')
        await page.click("button:has-text('Resume')")
        await page.wait_for_selector("[data-output] >> text=live: running")
        assert await desired() == "running"
        await page.click("button:has-text('Checkpoint now')")
        await page.wait_for_selector(
            "[data-output] >> text=/done, step \\d+ is on disk/", timeout=60_000
        )
    assert re.search(
        r"pause of run live from the console, by session [0-9a-f]{8}",
        "".join(browser.console.output),
    )


async def test_reloads_in_mid_stream_and_a_broken_connection(browser: Browser, runs: Path) -> None:
    async with browser.page("/run/live") as page:
        for _ in range(3):
            await page.reload(wait_until="commit")
            await asyncio.sleep(0.15)
        await page.wait_for_selector('[data-stat="step"]')
        await browser.context.set_offline(True)
        await page.evaluate("socket.io.engine.close()")
        await asyncio.sleep(1.0)
        await browser.context.set_offline(False)
        before = lines(runs)[-1]["step"]
        await until(lambda: lines(runs)[-1]["step"] > before)

        async def shown() -> bool:
            found = await page.query_selector('[data-stat="step"] .v')
            return found is not None and int((await found.inner_text()).replace(",", "")) > before

        await until(shown, 60.0)
    browser.errors.clear()  # of the connection that was broken on purpose


async def test_a_wrong_link_and_a_stranger(browser: Browser) -> None:
    context = await browser.context.browser.new_context()
    page = await context.new_page()
    await page.goto(f"{browser.console.address}/login?token=wrong")
    assert "This link is wrong or was used already." in await page.inner_text("[role=alert]")
    await page.goto(f"{browser.console.address}/run/live")
    assert page.url.startswith(f"{browser.console.address}/login?next=")
    await page.fill("[name=secret]", "wrong")
    await page.click("button")
    assert "Wrong password or token." in await page.inner_text("[role=alert]")
    token = browser.console.link.split("token=")[1].split("&")[0]
    await page.fill("[name=secret]", token)
    await page.click("button")
    await page.wait_for_selector("main h1")
    await context.close()
    assert token not in "".join(browser.console.output)


async def test_markup_of_a_run_is_text(browser: Browser) -> None:
    for path in ("", "/group/1", "/trajectories", "/fleet", "/timeline"):
        async with browser.page(f"/run/hostile{path}") as page:
            await asyncio.sleep(0.3)
            assert await page.evaluate("window.hacked") is None
            assert await page.query_selector("img[src=x]") is None
            if path == "/group/1":
                assert kit.MARKUP in await body(page)
    blocked = """() => new Promise((done) => {
        document.addEventListener('securitypolicyviolation', (e) => done(e.violatedDirective));
        const one = document.createElement('script'); one.textContent = 'window.hacked = 3'; document.body.append(one);
        setTimeout(() => done('none'), 1000); })"""
    async with browser.page("/run/hostile") as page:
        assert await page.evaluate(blocked) == "script-src-elem"
        assert await page.evaluate("window.hacked") is None
    browser.errors.clear()  # the refused script


async def test_shortcuts(browser: Browser) -> None:
    async with browser.page("/run/live") as page:
        await page.keyboard.press("?")
        assert await page.is_visible("dialog >> text=Keyboard shortcuts")
        await page.keyboard.press("Escape")
        before = await page.evaluate("document.documentElement.dataset.theme")
        await page.keyboard.press("t")
        assert await page.evaluate("document.documentElement.dataset.theme") != before
        await page.keyboard.press("/")
        assert await page.evaluate("document.activeElement.name") == "metrics"
        await page.keyboard.press("Escape")
        await page.keyboard.press("4")
        await page.wait_for_url("**/run/live/fleet")
        await page.wait_for_selector("h1 >> text=Fleet")


async def test_zoom_to_a_step_and_back(browser: Browser, runs: Path) -> None:
    step = lines(runs)[-1]["step"] - 2
    async with browser.page(f"/run/live/timeline?step={step}") as page:
        near = await page.inner_text("[data-range]")
        await page.focus(".lanes canvas")
        await page.keyboard.press("f")

        async def is_wider() -> bool:
            return bool(await page.inner_text("[data-range]") != near)

        await until(is_wider, 10.0)


# ------------------------------------------------------------------- an operator at work; these end
# the run


async def bus_of(root: Path) -> Bus:
    return await Bus.connect(
        broker_address(None, root / "live"), "live", name="test", deadline_s=20.0
    )


async def test_evaluate_now(browser: Browser, runs: Path) -> None:
    async with browser.page("/run/live/actions") as page:
        await page.click("button:has-text('Evaluate now')")
        await page.wait_for_selector("[data-output] >> text=/done, .*success/", timeout=90_000)
        said = re.search(r"evaluation after step (\d+)", await page.inner_text("[data-output]"))
    assert said
    assert (runs / "live" / "evals" / f"actor-step-{int(said[1]):06d}.jsonl").exists()


async def test_a_dead_letter_is_run_again_and_deleted(browser: Browser, runs: Path) -> None:
    ticket = wire.Ticket(
        number=900_000, domain="lake", task_index=3, seed=5, min_version=0, max_staleness=1000, group_size=2,
        min_group_size=2, deadline_s=60.0,
    )  # fmt: skip
    bus = await bus_of(runs)
    try:
        reason = f"it broke {kit.MARKUP}"
        await bus.dead_letter(
            TICKETS, seq=0, ticket=900_000, reason=reason, data=codec.encode(ticket)
        )
        async with browser.page("/run/live/dead-letters") as page:
            row = "table.t tr:has-text('900,000')"
            assert reason in await page.inner_text(row)
            await page.click(f"{row} >> button")
            await page.click("button:has-text('Run it again')")
            await page.wait_for_selector("text=for inspection only", timeout=90_000)
            assert "last response: " in await body(page)
            page.once("dialog", lambda dialog: dialog.dismiss())
            await page.click("button:has-text('Delete…')")
            assert (await bus.depth(DEAD))[""] == 1
            page.once("dialog", lambda dialog: dialog.accept())
            await page.click("button:has-text('Delete…')")
            await page.wait_for_selector("text=1 dead letters deleted")
            await page.wait_for_selector(".empty >> text=none")
        assert (await bus.depth(DEAD)).get("", 0) == 0
    finally:
        await bus.close()


async def test_a_drain_and_a_resume_while_a_page_is_open(browser: Browser, runs: Path) -> None:
    async with browser.page("/run/live") as overview:
        await overview.wait_for_selector('[data-stat="state"] >> text=training')
        async with browser.page("/run/live/actions") as page:
            page.once("dialog", lambda dialog: dialog.accept())
            await page.click("button:has-text('Drain')")
            await page.wait_for_selector("[data-output] >> text=live: draining")
        await overview.wait_for_selector('[data-stat="state"] >> text=not running', timeout=120_000)
        assert await overview.inner_text('[data-stat="state"] .s') != "training"
        before = lines(runs)[-1]["step"]
        await until(lambda: not is_held(runs / "live"))
        async with up(runs):
            await until(lambda: lines(runs)[-1]["step"] > before + 1, 240)
            step = lines(runs)[-1]["step"]

            async def shown() -> bool:
                return int((await stat(overview, "step")).replace(",", "")) >= step

            await until(shown, 60)
            await overview.wait_for_selector('[data-stat="state"] >> text=training', timeout=60_000)
            await overview.wait_for_selector(
                "table.t >> text=/learner started, epoch 2/", timeout=60_000
            )
            async with browser.page("/run/live/actions") as page:
                page.once("dialog", lambda dialog: dialog.accept())
                await page.click("button:has-text('Stop')")
                await page.wait_for_selector("[data-output] >> text=live: stopped")
            await overview.wait_for_selector(
                '[data-stat="state"] >> text=not running', timeout=120_000
            )
    browser.errors.clear()
