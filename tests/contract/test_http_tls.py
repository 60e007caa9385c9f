"""The HTTP API over TLS: real handshakes, and a refusal in one line for each certificate that
cannot be used.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from http_kit import KEY, api
from https_kit import Issued, issue
from waits import LONG_S

from broker.contract import wire
from broker.errors import ConfigError
from broker.jetstream.bus import Bus
from broker.settings import runspec
from broker.settings.run_settings import RunSettings
from rlearner_text.config import TinyModel
from rlearner_text.openai.backends import ServedModel
from rlearner_text.openai.certificates import server_tls
from rlearner_text.tiny import _write_tokenizer
from rollout.checks import check
from rollout.config import RolloutSection
from rollout.http import prepare_http

BODY = {"prompt": "hi", "max_tokens": 3, "ignore_eos": True}


@pytest.fixture
def model_path(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    _write_tokenizer(tmp_path / "model", TinyModel())
    return str(tmp_path / "model")


def refused(given: Issued) -> str:
    with pytest.raises(ConfigError) as caught:
        server_tls(given.cert, given.key, cert_name="http_tls_cert", key_name="http_tls_key")
    message = str(caught.value)
    assert "\n" not in message
    return message


async def test_answers_and_streams_come_over_tls(tmp_path: Path, model_path: str) -> None:
    async with api(model_path, tls=issue(tmp_path / "tls")) as served:
        assert served.address.startswith("https://127.0.0.1:")
        answer = await served.post("/completions", BODY)
        assert len(answer["choices"][0]["token_ids"]) == 3
        async with served.client.post(
            f"{served.address}/completions", json={**BODY, "stream": True}
        ) as response:
            said = await response.text()
        assert said.rstrip().endswith("data: [DONE]")
        async with served.client.get(served.address.removesuffix("/v1") + "/health") as response:
            assert (await response.json())["status"] == "serving"


async def test_a_stranger_authority_and_another_address_fail_at_the_client(
    tmp_path: Path, model_path: str
) -> None:
    async with api(model_path, tls=issue(tmp_path / "tls", "192.0.2.7")) as served:
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="IP address mismatch"):
            await served.post("/completions", BODY)
        async with aiohttp.ClientSession() as stranger:
            with pytest.raises(
                aiohttp.ClientConnectorCertificateError, match="certificate verify failed"
            ):
                await stranger.get(served.address)


async def test_many_connections_at_once_lose_no_request(tmp_path: Path, model_path: str) -> None:
    """A client of TLS 1.3 sends its request together with the end of its handshake."""
    made = issue(tmp_path / "tls")
    async with api(model_path, tls=made) as served:
        connector = aiohttp.TCPConnector(ssl=made.client(), limit=64, force_close=True)
        async with aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {KEY}"}, connector=connector
        ) as client:

            async def one() -> int:
                async with client.post(f"{served.address}/completions", json=BODY) as response:
                    return len((await response.json())["choices"][0]["token_ids"])

            assert await asyncio.gather(*(one() for _ in range(64))) == [3] * 64
        assert (
            not served.server._connections._waiting.keys()
            - served.server._connections._peers.keys()
        )


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    made = issue(tmp_path)
    missing = str(tmp_path / "missing.pem")
    assert refused(Issued(missing, made.key, "")) == (
        f"http_tls_cert: {missing!r} is not allowed; a file in PEM that this process can read "
        "(No such file or directory)"
    )
    assert refused(Issued(made.cert, missing, "")).startswith(
        f"http_tls_key: {missing!r} is not allowed; a file in"
    )


def test_a_key_of_another_certificate_is_named(tmp_path: Path) -> None:
    made, other = issue(tmp_path / "a"), issue(tmp_path / "b")
    assert refused(Issued(made.cert, other.key, "")) == (
        f"http_tls_cert: {made.cert!r} is not allowed; a certificate in PEM that fits http_tls_key {other.key!r} "
        "(the key belongs to another certificate)"
    )


@pytest.mark.parametrize(("begin", "end", "when"), [(-3, -1, "expired at"), (1, 2, "begins at")])
def test_a_certificate_that_is_not_valid_now_is_refused(
    tmp_path: Path, begin: int, end: int, when: str
) -> None:
    pattern = rf"valid now \(this one {when} \d{{4}}-\d\d-\d\d \d\d:\d\d UTC; renew it or set the clock\)$"
    assert re.search(pattern, refused(issue(tmp_path, begin_days=begin, end_days=end)))


@pytest.mark.parametrize("mode", [0o604, 0o644])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    made = issue(tmp_path)
    Path(made.key).chmod(mode)
    assert refused(made).endswith(
        f"a file that other users cannot read (its mode is {mode:o}; run chmod 600)"
    )


def test_the_group_may_read_only_a_key_of_root(tmp_path: Path) -> None:
    made = issue(tmp_path)
    Path(made.key).chmod(0o640)
    if os.geteuid() == 0:
        assert isinstance(made.server(), ssl.SSLContext)
        os.chown(made.key, 65534, -1)
    assert "its mode is 640" in refused(made)


@pytest.mark.parametrize("option", ["http_tls_cert", "http_tls_key"])
def test_one_file_without_the_other_is_refused(option: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^rollout\.http_tls_cert: .* set together with rollout\.http_tls_key"
    ):
        check(RunSettings.of_config({"rollout": {option: "file.pem"}}))


def test_the_address_is_one_of_this_host() -> None:
    with pytest.raises(ValueError, match="an IP address of this host"):
        RolloutSection(http_bind="somewhere")
    assert RolloutSection(http_bind="::1").http_bind == "::1"


async def test_beyond_loopback_plain_http_needs_consent(
    tmp_path: Path, model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_API_KEY", KEY)
    monkeypatch.delenv("RL_INSECURE", raising=False)
    served = ServedModel("actor", model_path, 64, lambda: "serving", lambda: 0)
    made = issue(tmp_path / "tls")

    async def prepared(section: RolloutSection) -> None:
        handle: object = None
        ready = await prepare_http(
            handle, served, section, bind="0.0.0.0", port=0, trust_remote_code=False
        )  # type: ignore[arg-type]
        await ready.close()

    with pytest.raises(
        ConfigError,
        match=r"^rollout\.http_bind: '0\.0\.0\.0' is not allowed; an address of loopback",
    ):
        await prepared(RolloutSection())
    await prepared(RolloutSection(http_tls_cert=made.cert, http_tls_key=made.key))
    monkeypatch.setenv("RL_INSECURE", "1")
    await prepared(RolloutSection())


async def test_a_server_process_serves_tls_and_refuses_a_bad_key(
    bus: Bus, broker_url: str, model_path: str, tmp_path: Path
) -> None:
    domain = {"env": "frozenlake", "max_context_tokens": 64, "sampling": {"max_tokens": 4}}
    config = runspec.validate({"rollout": {"max_context_tokens": 128}, "domains": {"lake": domain}})
    spec = wire.RunSpec(
        run=bus.run, wire_version=wire.WIRE_VERSION, epoch=0, config=config, model_path=model_path
    )
    await runspec.publish_runspec(bus, spec)
    made = issue(tmp_path / "tls")
    command = [
        sys.executable,
        "-m",
        "rollout.cli",
        "--broker",
        broker_url,
        "--run",
        bus.run,
        "--gpus",
        "cpu",
    ]
    command += [
        "--http=0",
        "--engine",
        "random",
        "--policy",
        "random",
        "--tls-cert",
        made.cert,
        "--tls-key",
        made.key,
    ]
    env = {**os.environ, "RL_API_KEY": KEY, "RL_RUN": "", "RL_BROKER": ""}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
    )
    assert process.stdout is not None
    said = ""
    try:
        async with asyncio.timeout(LONG_S):
            while not (found := re.search(r"API at (https://\S+),", said)):
                line = (await process.stdout.readline()).decode()
                assert line, said
                said += line
        connector = aiohttp.TCPConnector(ssl=made.client(), force_close=True)
        async with aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {KEY}"}, connector=connector
        ) as client:
            sent = {**BODY, "model": "random"}
            answers = await asyncio.gather(
                *(client.post(f"{found[1]}/completions", json=sent) for _ in range(32))
            )
            assert [len((await one.json())["choices"][0]["token_ids"]) for one in answers] == [
                3
            ] * 32
    finally:
        process.terminate()
        said += (await process.stdout.read()).decode()
        assert await process.wait() == 0, said
    assert KEY not in said
    assert "Traceback" not in said
    os.chmod(made.key, 0o644)
    ended = await asyncio.to_thread(
        subprocess.run,
        command,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG_S,
    )
    errors = [
        line for line in ended.stderr.splitlines() if "error" in line.lower() or "Traceback" in line
    ]
    assert (ended.returncode, len(errors)) == (2, 1)
    assert "rollout.http_tls_key" in errors[0]
