"""Named API keys: made and revoked by the command line while a server answers, with limits that it
enforces.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from http_kit import KEY, Api, api

from broker.errors import UserError
from rlearner_text.config import TinyModel
from rlearner_text.openai.named_keys import MOST_KEYS, KeyStore, LiveKeys
from rlearner_text.tiny import _write_tokenizer

BODY = {"prompt": "hi", "max_tokens": 4, "ignore_eos": True}  # 2 tokens of prompt, 4 of answer


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "rlearner" / "api_keys")


@pytest.fixture
async def served(tmp_path: Path, store: KeyStore) -> AsyncIterator[Api]:
    _write_tokenizer(tmp_path, TinyModel())
    async with api(str(tmp_path), key_store=store) as made:
        yield made


def make(store: KeyStore, name: str = "alice", *, expires_s: float = 3600, **limits: int) -> str:
    every = {"requests_per_minute": 0, "tokens_per_minute": 0, "concurrent": 0} | limits
    return store.create(name, expires_s=expires_s, **every)[0]


def rlearner(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, "-m", "rlearner.cli", "api-key", *arguments], os.environ
    env = {**env, "XDG_CONFIG_HOME": str(tmp_path)}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)


def error_of(answer: Any) -> tuple[str, str]:
    return answer["error"]["code"], answer["error"]["message"]


async def test_keys_of_the_command_line_are_accepted_until_they_are_revoked(
    tmp_path: Path, served: Api, store: KeyStore
) -> None:
    out = tmp_path / "alice.key"
    made = await asyncio.to_thread(
        rlearner,
        tmp_path,
        "create",
        "alice",
        "--expires",
        "2h",
        "--requests-per-minute",
        "60",
        "--out",
        str(out),
    )
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.startswith(f"{out}: API key alice, until ")
    assert made.stdout.endswith(", 60 requests per minute; send it as Authorization: Bearer KEY\n")
    key = out.read_text().strip()
    assert key not in made.stdout
    assert [stat.S_IMODE(one.stat().st_mode) for one in (out, store.file, store.folder)] == [
        0o600,
        0o600,
        0o700,
    ]
    assert key not in store.file.read_text()
    assert len((await served.post("/completions", BODY, key=key))["choices"][0]["token_ids"]) == 4
    listed = await asyncio.to_thread(rlearner, tmp_path, "list")
    assert listed.stdout.startswith("alice, until ")
    assert listed.stderr == "1 API key\n"
    (plain,) = json.loads((await asyncio.to_thread(rlearner, tmp_path, "list", "--json")).stdout)[
        "keys"
    ]
    assert (plain["name"], plain["requests_per_minute"], plain["expired"]) == ("alice", 60, False)
    assert "sha256" not in plain
    revoked = await asyncio.to_thread(rlearner, tmp_path, "revoke", "alice")
    assert revoked.stdout == "alice: servers refuse it from now on\n"
    assert error_of(await served.post("/completions", BODY, 401, key=key))[0] == "invalid_api_key"
    await served.post("/completions", BODY)  # the key without name is not concerned


async def test_an_expired_key_gets_401_and_its_time(served: Api, store: KeyStore) -> None:
    key = make(store, expires_s=0.5)
    await served.post("/completions", BODY, key=key)
    await asyncio.sleep(0.6)
    code, message = error_of(await served.post("/completions", BODY, 401, key=key))
    assert code == "expired_api_key"
    assert message.startswith(f"the API key alice expired at {time.strftime('%Y-', time.gmtime())}")


async def test_requests_over_the_limit_get_429_with_the_time_to_wait(
    served: Api, store: KeyStore
) -> None:
    key, other = make(store, requests_per_minute=2), make(store, "bob", requests_per_minute=2)
    for _ in range(2):
        await served.post("/completions", BODY, key=key)
    headers = {"Authorization": f"Bearer {key}"}
    async with served.client.get(f"{served.address}/models", headers=headers) as response:
        answer = await response.json()
        assert response.status == 429
        assert 25 <= int(response.headers["Retry-After"]) <= 30
    assert answer["error"]["type"] == "rate_limit_error"
    assert (
        error_of(answer)[1]
        == "the API key alice is limited to 2 requests per minute; try again later"
    )
    await served.post("/completions", BODY, key=other)


async def test_tokens_count_as_they_are_used_not_as_they_were_asked_for(
    served: Api, store: KeyStore
) -> None:
    key = make(store, tokens_per_minute=20)
    stop = {"prompt": "hi", "max_tokens": 100, "ignore_eos": True}
    for count in (6, 12, 18):  # 2 + 4 each
        answer = await served.post("/completions", BODY, key=key)
        assert answer["usage"]["total_tokens"] == 6, count
    # a token or two are left, and one request may overdraw
    await served.post("/completions", stop, key=key)
    code, message = error_of(await served.post("/completions", BODY, 429, key=key))
    assert (code, "20 tokens per minute" in message) == ("rate_limit_exceeded", True)


async def test_a_client_that_leaves_pays_for_what_it_asked_for(
    served: Api, store: KeyStore
) -> None:
    key = make(store, tokens_per_minute=50)
    asked = {**BODY, "max_tokens": 100, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    release = asyncio.Event()
    handle = served.service.handle

    async def held(*arguments: Any) -> Any:
        await release.wait()
        return await handle(*arguments)

    desk = served.server._find_caller(f"Bearer {key}")
    assert desk is not None
    desk.backend._handle = held  # type: ignore[attr-defined]
    task = asyncio.create_task(
        served.client.post(f"{served.address}/completions", json=asked, headers=headers)
    )
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.sleep(0.2)
    release.set()
    assert (
        "50 tokens per minute" in error_of(await served.post("/completions", BODY, 429, key=key))[1]
    )


async def test_concurrent_requests_over_the_limit_get_429(served: Api, store: KeyStore) -> None:
    key = make(store, concurrent=2)
    asked = {"prompt": "hi", "max_tokens": 100, "ignore_eos": True}
    headers, url = {"Authorization": f"Bearer {key}"}, f"{served.address}/completions"
    answers = await asyncio.gather(
        *(served.client.post(url, json=asked, headers=headers) for _ in range(6))
    )
    said = sorted(answer.status for answer in answers)
    assert said[:2] == [200, 200]
    assert said[-1] == 429
    await served.post("/completions", BODY, key=key)


async def test_earlier_answers_are_kept_apart(served: Api, store: KeyStore) -> None:
    mine, other = make(store), make(store, "bob")
    made = await served.post("/responses", {"input": "hi", "max_output_tokens": 2}, key=mine)
    later = {"input": "more", "previous_response_id": made["id"], "max_output_tokens": 2}
    await served.post("/responses", later, key=mine)
    assert "previous_response_id" in json.dumps(
        await served.post("/responses", later, 400, key=other)
    )


async def test_the_access_log_names_the_key_and_its_tokens(
    served: Api, store: KeyStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    key = make(store, requests_per_minute=1)
    await served.post("/completions", BODY, key=key)
    await served.post("/completions", BODY, 429, key=key)
    await served.post("/completions", BODY, 401, key="wrong-key-of-a-stranger")
    await served.post("/completions", BODY)
    lines = [one.getMessage() for one in caplog.records if one.name.endswith(".access")]
    assert [" ".join(line.split()[:6]) for line in lines] == [
        "127.0.0.1 alice 2+4 POST '/v1/completions' 200",
        "127.0.0.1 alice - POST '/v1/completions' 429",
        "127.0.0.1 - - POST '/v1/completions' 401",
        "127.0.0.1 default 2+4 POST '/v1/completions' 200",
    ]
    assert key not in caplog.text
    assert KEY not in caplog.text


async def test_changed_limits_take_effect_while_the_server_runs(
    served: Api, store: KeyStore
) -> None:
    key = make(store, requests_per_minute=1)
    await served.post("/completions", BODY, key=key)
    await served.post("/completions", BODY, 429, key=key)
    store._write([replace(one, requests_per_minute=5) for one in store.read()])
    await served.post("/completions", BODY, key=key)


@pytest.mark.parametrize("content", [b"", b"{}", b"[{}]", b"[" * 100_000, b'[{"name": "a b", "sha256": "", '
    b'"expires_at": 1}]', b"\xff" * (2 << 20)])  # fmt: skip
async def test_a_file_that_is_not_valid_admits_no_key(
    served: Api, store: KeyStore, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    key = make(store)
    await served.post("/completions", BODY, key=key)
    store.file.write_bytes(content)
    for _ in range(3):
        await served.post("/completions", BODY, 401, key=key)
    said = [line for line in caplog.messages if "named API keys are refused" in line]
    assert said == [
        f"named API keys are refused: {store.file} is not a file of API keys that `rlearner api-key` wrote"
    ]
    with pytest.raises(UserError, match="is not a file of API keys"):
        store.read()
    await served.post("/completions", BODY)


@pytest.mark.parametrize("place", ["file", "folder"])
async def test_a_file_that_others_can_read_admits_no_key(
    served: Api, store: KeyStore, place: str
) -> None:
    key, path = make(store), store.file if place == "file" else store.folder
    await served.post("/completions", BODY, key=key)
    before = stat.S_IMODE(path.stat().st_mode)
    path.chmod(before | 0o044)
    await served.post("/completions", BODY, 401, key=key)
    with pytest.raises(
        UserError, match=f"{path} must belong to you alone; run chmod {before:o} {path}$"
    ):
        store.read()
    path.chmod(before)
    await served.post("/completions", BODY, key=key)


def test_mistakes_are_one_line(tmp_path: Path, store: KeyStore) -> None:
    make(store)
    taken = tmp_path / "taken"
    taken.write_text("mine")
    for arguments, said in (
        (
            ["create", "alice", "--out", str(tmp_path / "a")],
            "there is an API key alice already; `rlearner api-key",
        ),
        (["create", "bob", "--out", str(taken)], f"--out {taken}: File exists"),
        (
            ["create", "a/b", "--out", str(tmp_path / "a")],
            "NAME: 'a/b' is not allowed; use 1-64 letters",
        ),
        (
            ["create", "default", "--out", str(tmp_path / "a")],
            "NAME: 'default' is not allowed; any other",
        ),
        (
            ["create", "bob", "--out", str(tmp_path / "a"), "--expires", "soon"],
            "--expires: 'soon' is not allowed",
        ),
        (["revoke", "bob"], "there is no API key 'bob'; there is alice"),
    ):
        ended = rlearner(tmp_path, *arguments)
        assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), (
            ended.stderr
        )
        assert said in ended.stderr
    assert [key.name for key in store.read()] == ["alice"]
    assert taken.read_text() == "mine"


def test_keys_made_at_the_same_time_are_all_there(store: KeyStore) -> None:
    code = (
        "import sys; from pathlib import Path; from rlearner_text.openai.named_keys import KeyStore\n"
        "for n in range(8): KeyStore(Path(sys.argv[1])).create(f'{sys.argv[2]}-{n}', expires_s=60, "
        "requests_per_minute=0, tokens_per_minute=0, concurrent=0)"
    )
    command = [sys.executable, "-c", code, str(store.folder)]
    children = [subprocess.Popen([*command, name]) for name in ("a", "b", "c")]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    assert len({key.name for key in store.read()}) == 24


def test_there_is_a_limit_of_keys(store: KeyStore) -> None:
    secret = make(store)
    (first,) = store.read()
    store._write(
        [replace(first, name=f"k{n}", sha256=f"{n:064x}") for n in range(MOST_KEYS - 1)] + [first]
    )
    with pytest.raises(UserError, match=f"there are {MOST_KEYS} API keys already"):
        make(store, "one-more")
    live = LiveKeys(store)
    found = live.find(secret)
    assert found == first
    assert live.find("wrong") is None
    assert live.changes == 1
