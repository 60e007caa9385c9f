"""What the owner of one API key, or of none any more, can try; a second client and the engine tell
from outside.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from http_kit import Api, api

from rlearner_text.config import TinyModel
from rlearner_text.openai.named_keys import KeyStore
from rlearner_text.tiny import _write_tokenizer

BODY = {"prompt": "hi", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "api_keys")


@pytest.fixture
async def served(tmp_path: Path, store: KeyStore) -> AsyncIterator[Api]:
    _write_tokenizer(tmp_path, TinyModel())
    async with api(str(tmp_path), key_store=store) as made:
        yield made


def make(store: KeyStore, name: str, *, expires_s: float = 3600, **limits: int) -> str:
    every = {"requests_per_minute": 0, "tokens_per_minute": 0, "concurrent": 0} | limits
    return store.create(name, expires_s=expires_s, **every)[0]


async def tokens_sampled(served: Api, key: str, count: int, **more: object) -> int:
    """The tokens that the engine itself says it has sampled for requests sent at once with a key."""
    before = sum(served.engine.stats().finished.values())
    headers, url = {"Authorization": f"Bearer {key}"}, f"{served.address}/completions"
    body = BODY | more

    async def one() -> None:
        async with served.client.post(url, json=body, headers=headers) as response:
            await response.read()

    await asyncio.gather(*(one() for _ in range(count)))
    return int(sum(served.engine.stats().finished.values()) - before)


async def assert_healthy(served: Api) -> None:
    """Another client, with the key without name, gets its tokens within a second."""
    began = time.monotonic()
    made = await served.post("/completions", BODY)
    assert len(made["choices"][0]["token_ids"]) == 4
    assert time.monotonic() - began < 1


async def test_a_revoked_key_gets_nothing_on_a_connection_that_is_open(
    served: Api, store: KeyStore
) -> None:
    key = make(store, "alice")
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(
        headers=headers, connector=aiohttp.TCPConnector(limit=1)
    ) as client:
        async with client.post(f"{served.address}/completions", json=BODY) as response:
            assert response.status == 200
            await response.read()
        store.revoke("alice")
        async with client.post(f"{served.address}/completions", json=BODY) as response:
            assert response.status == 401
            assert "choices" not in await response.text()
    assert await tokens_sampled(served, key, 3) == 0
    await assert_healthy(served)


async def test_an_expired_key_samples_nothing(served: Api, store: KeyStore) -> None:
    key = make(store, "alice", expires_s=0.01)
    await asyncio.sleep(0.05)
    assert await tokens_sampled(served, key, 3) == 0
    await assert_healthy(served)


async def test_a_flood_over_the_requests_of_a_key_does_not_reach_the_engine(
    served: Api, store: KeyStore
) -> None:
    key = make(store, "alice", requests_per_minute=3)
    assert await tokens_sampled(served, key, 100) == 3
    await assert_healthy(served)


async def test_a_flood_over_the_tokens_of_a_key_does_not_reach_the_engine(
    served: Api, store: KeyStore
) -> None:
    key = make(store, "alice", tokens_per_minute=10)
    assert await tokens_sampled(served, key, 100, max_tokens=100) == 1
    await assert_healthy(served)


async def test_many_choices_count_each(served: Api, store: KeyStore) -> None:
    key = make(store, "alice", tokens_per_minute=30)
    assert await tokens_sampled(served, key, 1, n=8) == 8  # 2 + 32 tokens
    assert await tokens_sampled(served, key, 10) == 0
    await assert_healthy(served)


async def test_a_flood_of_one_key_leaves_slots_for_others(served: Api, store: KeyStore) -> None:
    key = make(store, "alice", concurrent=1)
    flood = asyncio.create_task(tokens_sampled(served, key, 200, max_tokens=100))
    await asyncio.sleep(0.05)
    await assert_healthy(served)
    assert await flood < 200


@pytest.mark.parametrize(
    "form", ["{hash}", "{name}", "{key} ", "{key}x", "{short}", "Bearer {key}", "{key},{key}"]
)
async def test_what_is_almost_a_key_is_none(served: Api, store: KeyStore, form: str) -> None:
    """The stored hash in particular, which a copy of the file would tell."""
    key = make(store, "alice")
    (stored,) = store.read()
    sent = form.format(hash=stored.sha256, name="alice", key=key, short=key[:-1])
    expected = 1 if sent.strip() == key else 0
    assert await tokens_sampled(served, sent, 1) == expected
    await assert_healthy(served)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
async def test_a_file_of_another_user_admits_nobody(served: Api, store: KeyStore) -> None:
    key = make(store, "alice")
    os.chown(store.file, 65534, -1)
    assert await tokens_sampled(served, key, 1) == 0
    os.chown(store.file, os.geteuid(), -1)
    os.chown(store.folder, 65534, -1)
    assert await tokens_sampled(served, key, 1) == 0
    os.chown(store.folder, os.geteuid(), -1)
    assert await tokens_sampled(served, key, 1) == 1
    await assert_healthy(served)


async def test_a_key_made_again_under_a_revoked_name_does_not_admit_the_old_one(
    served: Api, store: KeyStore
) -> None:
    old = make(store, "alice")
    assert await tokens_sampled(served, old, 1) == 1
    store.revoke("alice")
    new = make(store, "alice")
    assert [await tokens_sampled(served, key, 1) for key in (old, new)] == [0, 1]
    await assert_healthy(served)


async def test_a_changed_file_does_not_reset_what_a_key_has_used(
    served: Api, store: KeyStore
) -> None:
    key = make(store, "alice", requests_per_minute=2)
    assert await tokens_sampled(served, key, 5) == 2
    make(store, "bob")  # by somebody else
    assert await tokens_sampled(served, key, 5) == 0
    store._write([replace(one) for one in store.read()])
    assert await tokens_sampled(served, key, 5) == 0
    await assert_healthy(served)
