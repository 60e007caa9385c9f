"""Another user of the machine gets neither the console's cookie nor keeps the operator out."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator

import aiohttp
import console_kit as kit
import pytest
import pytest_asyncio
from yarl import URL

from bench.support.localhost_names import local_connector
from rlearner.console.server import _login_links

pytest.importorskip("nicegui")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def console(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[kit.Console]:
    root, cache = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("cache")
    password = cache / "password"
    password.write_text(kit.PASSWORD)
    password.chmod(0o600)
    async with kit.console(root, cache, "--password-file", str(password)) as running:
        yield running


async def test_the_name_is_known_to_the_operator_alone(console: kit.Console) -> None:
    assert re.fullmatch(r"http://[0-9a-f]{16}\.localhost:\d+", console.address)
    assert console.link.startswith(f"{console.address}/login?token=")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "0123456789abcdef.localhost"])
async def test_no_other_program_of_the_host_gets_the_cookie(
    console: kit.Console, host: str
) -> None:
    """A browser sends a cookie to every port of the name that set it."""
    async with console.client() as client:
        assert client.cookie_jar.filter_cookies(URL(console.address))
        assert not client.cookie_jar.filter_cookies(URL(f"http://{host}:8871"))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "evil.example", "0123456789abcdef.localhost"]
)
@pytest.mark.parametrize("path", ["/", "/login", "/assets/console.js"])
async def test_it_answers_under_no_other_name(console: kit.Console, host: str, path: str) -> None:
    port = URL(console.address).port
    async with (
        aiohttp.ClientSession(connector=local_connector()) as client,
        client.get(f"{console.address}{path}", headers={"Host": f"{host}:{port}"}) as answer,
    ):
        said = await answer.text()
        assert answer.status == 403
        assert said.startswith("this console answers only under the name in its link")
        assert str(URL(console.address).host) not in said


async def test_wrong_passwords_do_not_keep_the_operator_out(console: kit.Console) -> None:
    async with console.client(logged_in=False) as client:
        for _ in range(12):
            form, headers = {"secret": "wrong password"}, {"Origin": console.address}
            async with client.post(
                "/login", data=form, headers=headers, allow_redirects=False
            ) as answer:
                assert answer.status in (403, 429)
        right = {"secret": kit.PASSWORD}
        async with client.post(
            "/login", data=right, headers=headers, allow_redirects=False
        ) as answer:
            assert answer.status == 429
        link = console.link.removeprefix(console.address)
        async with client.get(link, allow_redirects=False) as answer:
            assert answer.status == 303


async def test_the_link_is_shown_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also next to a password, which others can lock."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with _login_links("http://a.localhost:1", "/", 1) as say:
        say("t0ken")
    assert (
        capsys.readouterr().out
        == "log in (works once): http://a.localhost:1/login?token=t0ken&next=/\n"
    )
