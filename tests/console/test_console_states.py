"""Banners of runs that vanish, break or find no room, and TLS: in a real headless Chromium, without
a live run.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import console_kit as kit
import pytest
import pytest_asyncio
from waits import until

from bench.support.console_browser import CHROMIUM, FLAGS

playwright = pytest.importorskip(
    "playwright.async_api", reason="needs Playwright and Chromium: make test-console"
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
SEEN_MS = 30_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Any]:
    async with playwright.async_playwright() as driver:
        one = await driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield one
        await one.close()


@asynccontextmanager
async def opened(chromium: Any, console: kit.Console, path: str, **more: Any) -> AsyncIterator[Any]:
    """A page of a console, logged in."""
    context = await chromium.new_context(**more)
    page = await context.new_page()
    await page.goto(console.link)
    await page.goto(console.address + path)
    await page.wait_for_function("window.did_handshake === true")
    yield page
    await context.close()


async def call(*words: str) -> int:
    """Run a command, and return its exit code."""
    silent = asyncio.subprocess.DEVNULL
    return await (await asyncio.create_subprocess_exec(*words, stdout=silent, stderr=silent)).wait()


async def test_a_run_that_is_deleted_while_its_page_is_open(chromium: Any, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    await kit.hostile_run(root, "pruned")
    async with (
        kit.console(root, tmp_path) as console,
        opened(chromium, console, "/run/pruned") as page,
    ):
        await page.wait_for_selector('[data-stat="step"]')
        shutil.rmtree(root / "pruned")
        await page.wait_for_selector(
            "[role=status] >> text=is no longer there: the run was moved or", timeout=SEEN_MS
        )
        await page.goto(console.address + "/")
        await page.wait_for_selector("text=no runs in")


async def test_a_damaged_index_is_built_again(chromium: Any, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    await kit.hostile_run(root, "damaged")
    path, table = "/run/damaged/trajectories", "main table"
    async with kit.console(root, tmp_path) as console, opened(chromium, console, path) as page:

        async def there() -> bool:
            await page.reload()
            return bool(await page.query_selector("table.t tbody tr a"))

        await until(there)
        before = await page.inner_text(table)
    (root / "damaged" / "console.sqlite").write_bytes(b"not a database" * 5000)
    async with kit.console(root, tmp_path) as console, opened(chromium, console, path) as page:
        await until(there)
        assert await page.inner_text(table) == before
        assert (root / "damaged" / "console.damaged.sqlite").exists()
        assert "the console's index was damaged (file is not a database)" in "".join(console.output)


async def test_a_full_disk_is_a_banner_until_there_is_room(chromium: Any, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=65m", "none", str(root)]
    if await call(*mount):
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        await kit.hostile_run(root, "full")
        (root / "full" / "filler").write_bytes(bytes(2**21))
        async with (
            kit.console(root, tmp_path) as console,
            opened(chromium, console, "/run/full") as page,
        ):
            said = "the console's index cannot be written (62 MiB are free, it leaves 64 MiB to the run)"
            await page.wait_for_selector(f"[role=status] >> text={said}", timeout=SEEN_MS)
            assert await call("mount", "-o", "remount,size=200m", str(root)) == 0
            await page.wait_for_selector("[role=status]", state="detached", timeout=SEEN_MS)
            await page.wait_for_function(
                "document.querySelector('[data-stat=step] .v').textContent === '4'", timeout=SEEN_MS
            )
    finally:
        assert await call("umount", "-l", str(root)) == 0


async def test_tls(chromium: Any, tmp_path: Path) -> None:
    root, cert, key = tmp_path / "runs", tmp_path / "cert.pem", tmp_path / "key.pem"
    await kit.hostile_run(root, "run")
    request = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
    ]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    assert await call(*request, *names, "-keyout", str(key), "-out", str(cert)) == 0
    key.chmod(0o600)
    words = ["--tls-cert", str(cert), "--tls-key", str(key), "--host-name", "localhost"]
    async with (
        kit.console(root, tmp_path, *words) as console,
        opened(chromium, console, "/run/run", ignore_https_errors=True) as page,
    ):
        assert page.url == f"{console.address}/run/run"
        assert console.address.startswith("https://localhost:")
        (cookie,) = await page.context.cookies()
        assert (cookie["secure"], cookie["httpOnly"], cookie["sameSite"]) == (True, True, "Strict")
        await page.wait_for_selector(".chart canvas")
