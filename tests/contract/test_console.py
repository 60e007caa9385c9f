"""The console over HTTP: who gets in, what the pages hold, and what happens to text that is markup."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import stat
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import aiohttp
import console_kit as kit
import pytest
import pytest_asyncio
from waits import until

from learner.reporting.metrics import read_lines
from rlearner.console import server

pytest.importorskip("nicegui")

WS = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def console(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[kit.Console]:
    root, cache = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("cache")
    password = cache / "password"
    password.write_text(kit.PASSWORD)
    password.chmod(0o600)
    await kit.hostile_run(root)
    await kit.hostile_run(root, "other", train={"steps": 9, "lr": 0.5})
    kit.write_other_kinds(root)
    (root / "damaged").mkdir()
    (root / "damaged" / "config.yaml").write_text("run: [")
    async with kit.console(root, cache, "--password-file", str(password)) as found:
        yield found


async def page(console: kit.Console, path: str, status: int = 200) -> str:
    async with console.client() as client, client.get(path) as answer:
        assert answer.status == status
        return await answer.text()


async def holds_index(console: kit.Console, run: str) -> bool:
    """Return whether the index of a run is complete, by what a page says above its content."""
    return "being built" not in await page(console, f"/run/{run}/timeline")


async def indexed(console: kit.Console, *runs: str) -> None:
    """Wait until the indexes of these runs are complete, on a machine that is busy."""
    for run in runs:

        async def complete(run: str = run) -> bool:
            text = await page(console, f"/run/{run}/trajectories")
            return "being built" not in text and " 0 in the index" not in " ".join(
                ["", *kit.texts(text)]
            )

        await until(complete)


# -------------------------------------------------------------------------------------------------------
# access


@pytest.mark.asyncio(loop_scope="module")
async def test_nothing_is_shown_without_a_login(console: kit.Console) -> None:
    async with console.client(logged_in=False) as client:
        for path in (
            "/",
            "/run/hostile",
            "/run/hostile/group/1",
            "/_nicegui/none",
            "/assets/chart.js",
        ):
            async with client.get(path, allow_redirects=False) as answer:
                assert (answer.status, answer.headers["location"].split("?")[0]) == (303, "/login")
            async with client.get(path, headers={"Accept": "*/*"}) as answer:
                assert (answer.status, await answer.text()) == (401, "log in first\n")
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await client.ws_connect(WS, origin=console.address)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_link_works_once_and_is_in_a_private_file_not_in_a_log(
    console: kit.Console,
) -> None:
    link = console.link
    token = re.search(r"token=([\w-]+)", link)
    assert token
    assert stat.S_IMODE(console.link_file.stat().st_mode) == 0o600
    async with console.client(logged_in=False) as client:
        async with client.get("/login?token=wrong", allow_redirects=False) as answer:
            assert answer.status == 403
            assert "wrong or was used already" in await answer.text()
        async with client.get(link.removeprefix(console.address), allow_redirects=False) as answer:
            assert answer.status == 303
            cookie = answer.headers["set-cookie"]
            assert re.fullmatch(
                r"rlearner_console_\d+=[\w-]{43}; Path=/; HttpOnly; SameSite=Strict", cookie
            )
        async with client.get("/") as answer:
            assert answer.status == 200
    await until(lambda: console.link != link)
    async with (
        console.client(logged_in=False) as client,
        client.get(link.removeprefix(console.address), allow_redirects=False) as answer,
    ):
        assert answer.status == 403
    said = "".join(console.output)
    assert token[1] not in said
    assert cookie.split(";")[0].split("=")[1] not in said
    assert re.search(r"login from 127\.0\.0\.1, session [0-9a-f]{8}", said)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_password_logs_in_only_from_the_own_page(console: kit.Console) -> None:
    form = {"secret": kit.PASSWORD, "next": "/run/hostile"}
    async with console.client(logged_in=False) as client:
        for origin in ("https://evil.example", "null", ""):
            headers = {"Origin": origin} if origin else {}
            async with client.post(
                "/login", data=form, headers=headers, allow_redirects=False
            ) as answer:
                assert (answer.status, await answer.text()) == (
                    403,
                    "only pages of this console may do this\n",
                )
        headers = {"Origin": console.address}
        async with client.post("/login", data={"secret": "wrong"}, headers=headers) as answer:
            assert answer.status == 403
        async with client.post(
            "/login", data=form, headers=headers, allow_redirects=False
        ) as answer:
            assert (answer.status, answer.headers["location"]) == (303, "/run/hostile")
        async with client.post("/logout", headers=headers, allow_redirects=False) as answer:
            assert "Max-Age=0" in answer.headers["set-cookie"]
        async with client.get("/", allow_redirects=False) as answer:
            assert answer.status == 303


@pytest.mark.asyncio(loop_scope="module")
async def test_other_names_and_origins_are_refused(console: kit.Console) -> None:
    async with console.client() as client:
        async with client.get("/", headers={"Host": "evil.example:8870"}) as answer:
            assert answer.status == 403
            assert (await answer.text()).startswith(
                "this console answers only under the name in its link"
            )
        for origin in ("http://evil.example", "http://127.0.0.1:1"):
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await client.ws_connect(WS, origin=origin)
        socket_ = await client.ws_connect(WS, origin=console.address)
        assert (await socket_.receive_str()).startswith("0{")  # the handshake of engine.io
        await socket_.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_headers_allow_only_own_code(console: kit.Console) -> None:
    async with console.client() as client, client.get("/run/hostile") as answer:
        text, rules = await answer.text(), answer.headers["content-security-policy"]
        nonce = re.search(r"script-src 'self' 'nonce-([\w-]+)' 'unsafe-eval'", rules)
        assert nonce, rules
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert set(re.findall(r"<script[^>]*?nonce=\"([\w-]+)\"", text)) == {nonce[1]}
    assert not re.search(r"<script(?! nonce=)", text)
    assert not re.findall(r"(?:src|href|url\()=?[\"'(]?(?:https?:)?//(?!127\.0\.0\.1)", text)


# --------------------------------------------------------------------------------------------------------
# pages


@pytest.mark.asyncio(loop_scope="module")
async def test_markup_of_a_run_stays_text_on_every_page(console: kit.Console) -> None:
    await indexed(console, "hostile")
    paths = (
        "",
        "/trajectories",
        "/trajectories?text=answer",
        "/group/1",
        "/fleet?log=learner.log",
        "/timeline",
    )
    for path in paths:
        text = await page(console, f"/run/hostile{path}")
        assert "<script>window" not in text
        assert "<img src=x" not in text
        assert "{{7*7}}" not in re.sub(r"String\.raw`.*?`", "", text, flags=re.S)
    assert any(kit.MARKUP in one for one in kit.texts(await page(console, "/run/hostile/group/1")))
    assert any(
        kit.MARKUP in one
        for one in kit.texts(await page(console, "/run/hostile/fleet?log=learner.log"))
    )
    assert "\\x1b[31mred" in "".join(kit.texts(await page(console, "/run/hostile/fleet")))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", kit.KINDS)
async def test_first_visit_shows_what_the_second_does(console: kit.Console, kind: str) -> None:
    first = await page(console, f"/run/{kind}")
    await until(partial(holds_index, console, kind))
    second = await page(console, f"/run/{kind}")
    charts = [
        [chart["title"] for chart in kit.component(text, "chart")] for text in (first, second)
    ]
    assert charts[0] == charts[1]
    assert len(charts[0]) == kit.KINDS[kind]
    tiles = [
        {
            tile["key"]
            for tile in kit.component(text, "stats")[0]["stats"]
            if tile["value"] is not None
        }
        for text in (first, second)
    ]
    assert tiles[0] == tiles[1] >= {"state"}
    assert [grid["label"] for grid in kit.component(first, "grid")] == [
        *(["result", "tasks"] if kind == "evaluation" else []),
        "events",
    ]
    notes = [text for text in kit.texts(first) if text.startswith("no trajectories")]
    assert len(notes) == (kind == "training")


@pytest.mark.asyncio(loop_scope="module")
async def test_pages_of_an_evaluation_and_of_offline_training(console: kit.Console) -> None:
    rows = {row["name"]: row for row in kit.component(await page(console, "/"), "grid")[0]["rows"]}
    assert [rows[kind]["algorithm"] for kind in kit.KINDS] == [
        "grpo with gspo",
        "sft",
        "dpo with ipo",
        "",
    ]
    assert (rows["evaluation"]["state"], rows["evaluation"]["eval"]) == ("evaluation", 0.5)
    assert rows["sft"]["loss"] == 1.25
    text = await page(console, "/run/evaluation")
    result, tasks, _ = kit.component(text, "grid")
    assert (result["rows"][0]["success_rate"], result["rows"][0]["pass@2"]) == (0.5, 0.75)
    assert [(row["task"], row["solved"], row["prompt"]) for row in tasks["rows"]] == [
        (7, "1/2", "go left")
    ]
    tabs = [one["text"] for one in kit.elements(text) if "data-key" in one.get("props", {})]
    assert tabs == ["rlearner", "Overview", "Fleet"]
    compared = await page(console, "/?compare=sft,dpo")
    assert [line["name"] for line in kit.component(compared, "chart")[0]["series"]] == [
        "sft",
        "dpo",
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_runs_of_two_kinds_are_compared_by_common_metrics(console: kit.Console) -> None:
    text = await page(console, "/?compare=training,sft&metric=reward/mean")
    (chart,) = kit.component(text, "chart")
    assert chart["title"] == "perf/tokens_per_s"
    assert [line["name"] for line in chart["series"]] == ["training", "sft"]
    assert [line["times"] for line in chart["series"]] == [[0.0, 1.0, 2.0, 3.0]] * 2
    said = "reward/mean is only in training; compared is what all of them have"
    assert said in kit.texts(text)
    options = [one["props"]["value"] for one in kit.elements(text) if one["tag"] == "option"]
    assert options == ["perf/tokens_per_s"]
    alone = await page(console, "/?compare=evaluation")
    assert kit.component(alone, "chart") == []
    assert "no metric that all of these runs have" in kit.texts(alone)


@pytest.mark.asyncio(loop_scope="module")
async def test_runs_are_listed_and_compared(console: kit.Console) -> None:
    grid, *_ = kit.component(await page(console, "/"), "grid")
    states = {row["name"]: (row["state"], row["steps"]) for row in grid["rows"]}
    assert states["damaged"][0] == "unreadable"
    assert states["other"][1].endswith("/9")
    await indexed(console, "hostile", "other")
    text = await page(console, "/?compare=hostile,other,none&metric=ticket/trained")
    (chart,) = kit.component(text, "chart")
    assert [one["name"] for one in chart["series"]] == ["hostile", "other"]
    differences = kit.component(text, "grid")[1]["rows"]
    assert {"key": "train.lr", "setting": "train.lr", "run_0": "–", "run_1": "0.5"} in differences


@pytest.mark.asyncio(loop_scope="module")
async def test_curves_are_the_lines_of_metrics(
    console: kit.Console, tmp_path_factory: pytest.TempPathFactory
) -> None:
    await indexed(console, "hostile")
    text = await page(console, "/run/hostile?metrics=ticket/trained,staleness/max")
    charts = {chart["title"]: chart for chart in kit.component(text, "chart")}
    root = next(one for one in kit.texts(await page(console, "/")) if " in /" in one).split(" in ")[
        1
    ]
    rows = read_lines(Path(root) / "hostile" / "metrics.jsonl")
    (one,) = charts["ticket/trained"]["series"]
    assert (one["x"], one["y"]) == (
        [row["step"] for row in rows],
        [row["ticket/trained"] for row in rows],
    )
    (stats,) = kit.component(text, "stats")
    assert next(one for one in stats["stats"] if one["key"] == "step")["value"] == str(
        rows[-1]["step"]
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_trajectories_are_searched(console: kit.Console) -> None:
    await indexed(console, "hostile")
    rows = kit.component(
        await page(console, "/run/hostile/trajectories?order=oldest&max_step=1"), "grid"
    )[0]["rows"]
    assert rows
    assert {row["step"] for row in rows} == {1}
    assert {row["reward"] for row in rows} == {0.25, 1.0}
    assert (
        kit.component(await page(console, "/run/hostile/trajectories?text=nothing"), "grid")[0][
            "rows"
        ]
        == []
    )
    for query in ("min_step=x", "min_reward=nan", "ticket=1e999"):
        text = await page(console, f"/run/hostile/trajectories?{query}")
        assert any("is not allowed; use a number" in one for one in kit.texts(text)), query


@pytest.mark.asyncio(loop_scope="module")
async def test_tokens_are_those_of_the_command(console: kit.Console) -> None:
    await indexed(console, "hostile")
    text = await page(console, "/run/hostile/group/1")
    (tokens,) = kit.component(text, "tokens")
    root = next(one for one in kit.texts(await page(console, "/")) if " in /" in one).split(" in ")[
        1
    ]
    words = ["show", "hostile", "1", "--dir", root, "--json"]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rlearner.cli", *words, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    expected = json.loads(out)["trajectories"][0]
    episode = tokens["episodes"][0]
    for shown, known in zip(episode["pieces"], expected["pieces"], strict=True):
        assert shown["text"] == known["text"]
        for one, other in zip(shown["tokens"], known.get("tokens", []), strict=True):
            for name, theirs in (
                ("id", "id"),
                ("logprob", "logprob"),
                ("version", "policy_version"),
                ("text", "text"),
            ):
                assert one[name] == other[theirs]
    # a run without a learner records none
    assert tokens["unavailable"].keys() >= {"entropy", "ratio"}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "status", "line"),
    [
        ("/run/none", 404, "no run 'none' below"),
        ("/run/..%2f..%2fetc", 404, ""),
        ("/run/damaged", 404, "cannot be read"),
        (f"/run/{300 * 'a'}", 404, f"no run '{60 * 'a'}' below"),
        ("/run/a%00b", 404, "no run 'a\\x00b' below"),
        ("/run/hostile/group/x", 404, "use a number"),
        ("/run/hostile/group/99999", 200, "has no ticket 99999; its tickets are 1-"),
        ("/run/hostile/timeline?step=999", 200, "no step 999 in this run"),
        ("/run/hostile/dead-letters", 200, "no live data"),
        ("/run/hostile/actions", 404, "no page '/run/hostile/actions' in this console"),
        ("/nothing/here", 404, "no page '/nothing/here' in this console"),
    ],
)
async def test_what_is_not_there_is_one_line(
    console: kit.Console, path: str, status: int, line: str
) -> None:
    said = kit.texts(await page(console, path, status))
    assert any(line in one and "\n" not in one for one in said)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_address_that_is_too_long_is_refused(console: kit.Console) -> None:
    async with console.client() as client:
        for path in (f"/run/{13_000 * 'a'}", f"/run/hostile/trajectories?text={13_000 * 'a'}"):
            async with client.get(path) as answer:
                assert (answer.status, await answer.text()) == (
                    414,
                    "the address is longer than 8192 characters\n",
                )
        async with client.get(f"/run/hostile/trajectories?text={8_000 * 'a'}") as answer:
            assert answer.status == 200


# -----------------------------------------------------------------------------------------------------
# the start


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["none"], "no run 'none' below"),
        (["--dir", "/none"], "/none: no such folder"),
        (["--port", "70000"], "'70000' is not a port"),
        (
            ["--bind", "0.0.0.0"],
            "--bind: '0.0.0.0' is not allowed; an address of loopback without TLS",
        ),
        (["--tls-cert", "c.pem"], "--tls-cert: 'c.pem' is not allowed; with --tls-key"),
        (
            ["--host-name", "evil host"],
            "--host-name: 'evil host' is not allowed; a host name or an address",
        ),
        (
            ["--host-name", "gen1:8870"],
            "--host-name: 'gen1:8870' is not allowed; a host name or an address",
        ),
        (
            ["--password-file", "/none"],
            "--password-file: '/none' is not allowed; it cannot be read",
        ),
    ],
)
async def test_a_bad_start_is_one_line(tmp_path: Path, words: list[str], problem: str) -> None:
    (tmp_path / "run").mkdir()
    given = words if "--dir" in words else [*words, "--dir", str(tmp_path)]
    code, error = await start(*given)
    assert (code, error.count("\n")) == (2, 1), error
    assert problem in error


async def test_a_port_in_use_and_a_password_that_others_can_read(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("twelve characters")
    password.chmod(0o640)
    code, error = await start("--dir", str(tmp_path), "--password-file", str(password))
    assert (code, "mode 0640 lets others read it" in error) == (2, True)
    password.chmod(0o600)
    assert server.read_password(password) == "twelve characters"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, error = await start("--dir", str(tmp_path), "--port", str(port))
    assert code == 2
    assert (
        f"error: --port: {port} is not allowed; not available on 127.0.0.1 (Address already in use)"
        in error
    )


async def start(*words: str) -> tuple[int, str]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rlearner.cli", "console", *words, stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    _, error = await asyncio.wait_for(child.communicate(), 60)
    assert child.returncode is not None
    return child.returncode, error.decode()
