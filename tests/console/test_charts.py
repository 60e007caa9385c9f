"""How charts are shown, in a real headless Chromium: smoothing, axis, lines that are off, places;
comparisons, tables that scroll, and addresses without a page.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import console_kit as kit
import pytest
import pytest_asyncio
import yaml
from waits import until

from bench.support.console_browser import CHROMIUM, FLAGS
from rlearner.ops.drawing import smooth_curve

playwright = pytest.importorskip(
    "playwright.async_api", reason="needs Playwright and Chromium: make test-console"
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

STEPS = 40
PAUSED_AFTER = 20
PAUSE_S = 36_000.0
START = 1_780_000_000.0
REWARDS = [float(step % 2) for step in range(1, STEPS + 1)]
TITLES = ("Reward", "Success rate")
CHARTS = """() => [...document.querySelectorAll('[data-chart]')].map((chart) => {
    const { left, top, width } = chart.parentElement.getBoundingClientRect();
    return { title: chart.dataset.chart, left, top, width }; })
    .filter((chart) => chart.width).sort((a, b) => a.top - b.top || a.left - b.left)"""


def write_curves(root: Path) -> None:
    """Write a finished run of 40 steps, which paused for ten hours after the 20th."""
    folder = root / "curves"
    folder.mkdir()
    config = {"run": {"name": "curves"}, "domains": {"lake": {}}, "train": {"steps": STEPS}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = []
    for step, reward in enumerate(REWARDS, start=1):
        time = START + 10.0 * step + (PAUSE_S if step > PAUSED_AFTER else 0.0)
        figures = {"reward/mean": reward, "reward/max": 5.0, "reward/min": -5.0}
        rows.append({"step": step, "time": time, "env/success_rate": 0.5} | figures)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_curves(root)
    kit.write_other_kinds(root)
    await kit.hostile_run(root)
    return root


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Any]:
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def console(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[kit.Console]:
    """A console whose user never arranged charts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    async with kit.console(root, tmp_path) as console:
        yield console


@asynccontextmanager
async def opened(
    chromium: Any, console: kit.Console, path: str, width: int = 1440
) -> AsyncIterator[Any]:
    """A page of a browser that was never here, logged in."""
    context = await chromium.new_context(viewport={"width": width, "height": 900})
    page = await context.new_page()
    await page.goto(console.link)
    await visit(page, console.address + path)
    yield page
    await context.close()


async def visit(page: Any, address: str) -> None:
    await page.goto(address)
    await page.wait_for_function("window.did_handshake === true")


async def titles(page: Any) -> list[str]:
    """Titles of the charts as they are seen, from the top left on."""
    return [chart["title"] for chart in await page.evaluate(CHARTS)]


async def tip(page: Any, title: str, key: str) -> str:
    """What a chart says of a step, by a key of the keyboard."""
    await page.focus(f"[data-chart='{title}'] canvas")
    await page.keyboard.press(key)
    return " ".join((await page.inner_text(f"[data-chart='{title}'] .tip")).split())


async def slide(page: Any, share: float) -> None:
    await page.locator("input[name=smoothing]").fill(str(share))
    await page.locator("input[name=smoothing]").dispatch_event("change")


async def test_smoothing_is_that_of_the_drawing(chromium: Any, console: kit.Console) -> None:
    async with opened(chromium, console, "/run/curves") as page:
        smooth = "([x, y, share]) => rlearner.charts.smooth(x, y, share)"
        steps = list(range(1, STEPS + 1))
        for values in (REWARDS, [step**1.5 for step in steps]):
            smoothed = await page.evaluate(smooth, [steps, values, 0.1])
            assert smoothed == pytest.approx(smooth_curve(values))
        assert await page.evaluate(smooth, [[1, 2], [3.0, 4.0], 0.5]) == [3.0, 4.0]
        at_end = f"reward/mean 0, around it {smooth_curve(REWARDS)[-1]:.4f}"
        assert at_end in await tip(page, "Reward", "End")
        before = await page.locator("[data-chart='Reward'] canvas").screenshot()
        await slide(page, 0)
        assert "around it" not in await tip(page, "Reward", "End")
        await page.keyboard.press("Escape")
        assert await page.locator("[data-chart='Reward'] canvas").screenshot() != before
        assert "smoothing: 0 %" in await page.inner_text(".controls")


async def test_lines_of_bounds_are_off_until_asked_for(chromium: Any, console: kit.Console) -> None:
    async with opened(chromium, console, "/run/curves") as page:
        pressed = "(b) => b.map((one) => [one.textContent.split(' ')[0], one.ariaPressed])"
        legend = "[data-chart='Reward'] .legend button"
        states = dict(await page.eval_on_selector_all(legend, pressed))
        assert states == {"reward/mean": "true", "reward/max": "false", "reward/min": "false"}
        assert "reward/max" not in await tip(page, "Reward", "End")
        await page.click(f"{legend}:has-text('reward/max')")
        assert "reward/max 5" in await tip(page, "Reward", "End")
        await page.reload()
        await page.wait_for_selector(f"{legend}[aria-pressed=true]:has-text('reward/max')")


async def test_time_axis_shows_a_pause(chromium: Any, console: kit.Console) -> None:
    async with opened(chromium, console, "/run/curves") as page:
        assert re.match(r"step 1, \d\d-\d\d \d\d:\d\d:\d\d ", await tip(page, "Reward", "Home"))
        canvas = page.locator("[data-chart='Reward'] canvas")
        box = await canvas.bounding_box()
        middle = {"x": box["width"] * 0.75, "y": 60}
        await canvas.hover(position=middle)
        by_step = await page.inner_text("[data-chart='Reward'] .tip")
        await page.click(".controls button:has-text('time')")
        await canvas.hover(position={**middle, "y": 70})
        by_time = await page.inner_text("[data-chart='Reward'] .tip")
    assert int(by_step.split()[1].strip(",")) in range(26, 34)  # three quarters of the steps
    assert int(by_time.split()[1].strip(",")) == PAUSED_AFTER + 1  # of the time: in the pause


async def test_arrangement_is_kept(
    chromium: Any, console: kit.Console, root: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "cache" / "rlearner" / "console" / "charts.json"
    async with opened(chromium, console, "/run/curves") as page:
        assert (await titles(page))[1:3] == list(TITLES)
        await page.click("[aria-label='move Success rate forward']")
        assert (await titles(page))[1:3] == list(TITLES[::-1])
        await page.drag_and_drop("[data-chart='Reward'] h2", "[data-chart='Success rate'] canvas")
        assert (await titles(page))[1:3] == list(TITLES)
        await page.click("[aria-label='move Success rate forward']")
        await page.click("[aria-label='Reward over the whole width']")
        places = {chart["title"]: chart["width"] for chart in await page.evaluate(CHARTS)}
        assert places["Reward"] > 2 * places["Success rate"]
        hidden = (await titles(page))[0]
        await page.click(f"[aria-label='hide {hidden}']")
        shown = ["Success rate", "Reward"]
        assert (await titles(page))[:2] == shown
        await page.reload()
        await page.wait_for_function("window.did_handshake === true")
        assert (await titles(page))[:2] == shown
        await until(lambda: kept.exists() and hidden in json.loads(kept.read_text())["hidden"])
    # a console of another address, and a browser that was never there
    (tmp_path / "other").mkdir()
    async with (
        kit.console(root, tmp_path / "other") as other,
        opened(chromium, other, "/run/curves") as page,
    ):
        assert other.address != console.address
        assert (await titles(page))[:2] == shown
        await page.click(f"[aria-label='show {hidden}']")
        assert hidden in await titles(page)
        await page.click("button:has-text('reset the charts')")
        assert (await titles(page))[:3] == [hidden, *TITLES]


async def test_runs_of_two_kinds_are_compared_by_what_both_have(
    chromium: Any, console: kit.Console
) -> None:
    async with opened(chromium, console, "/?compare=training,sft&metric=train/loss") as page:
        assert await page.input_value("input[name=metric]") == "perf/tokens_per_s"
        assert await page.is_visible("text=train/loss is only in sft; compared is what all")
        offers = await page.eval_on_selector_all(
            "#metrics option", "(all) => all.map((o) => o.value)"
        )
        assert offers == ["perf/tokens_per_s"]
        legend = await page.inner_text(".legend")
        assert legend.split() == ["training", "1.25", "sft", "1.25"]
        await page.click(".controls button:has-text('time')")
        await page.focus(".chart canvas")
        await page.keyboard.press("End")
        assert (await page.inner_text(".tip")).startswith("step 3, after 3 s")


async def test_a_table_that_scrolls_says_so(chromium: Any, console: kit.Console) -> None:
    async with opened(chromium, console, "/run/hostile/trajectories", width=400) as page:
        box = page.locator(".tablebox").first
        await page.wait_for_selector(".tablebox.more .cue >> text=scroll")
        region = box.locator(".tablewrap")
        assert await region.get_attribute("aria-label") == "trajectories, scrolls sideways"
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        await region.focus()
        await region.evaluate("(wrap) => { wrap.scrollLeft = wrap.scrollWidth; }")
        await page.wait_for_selector(".tablebox .cue", state="detached")
        heads = [text.strip() for text in await box.locator("th").all_inner_texts()]
        assert heads[-2:] == ["prompt", "last response"]
        cells = await box.locator("tbody tr").first.locator("td").all_inner_texts()
        assert cells[-2].startswith("question ")
        assert cells[-1].startswith("answer ")


async def test_an_address_without_a_page(chromium: Any, console: kit.Console) -> None:
    async with opened(chromium, console, "/") as page:
        answer = await page.goto(f"{console.address}/run/curves/nothing")
        assert answer.status == 404
        await page.wait_for_selector("text=no page '/run/curves/nothing' in this console")
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == "rgb(247, 248, 250)"  # the console's own
        await page.click("text=all runs")
        await page.wait_for_selector("h1 >> text=Runs")
