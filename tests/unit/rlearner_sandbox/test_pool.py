"""The pool: warm sandboxes, forgotten ones, and a provider that fails."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from rlearner_sandbox.providers import pool as pool_module
from rlearner_sandbox.providers.base import ExecResult, SandboxError, SandboxSpec
from rlearner_sandbox.providers.pool import SandboxPool


class FakeSandbox:
    def __init__(self, provider: FakeProvider) -> None:
        self.provider = provider
        self.is_dead = False

    async def run_command(self, command: Any, **keywords: Any) -> ExecResult:
        if self.is_dead:
            raise SandboxError("it is dead")
        return ExecResult(0, b"", b"")

    async def fork(self) -> FakeSandbox:
        return await self.provider.start(SandboxSpec())

    async def stop(self) -> None:
        self.provider.living.discard(self)


class FakeProvider:
    def __init__(self) -> None:
        self.living: set[FakeSandbox] = set()
        self.failures = 0
        self.starts = 0

    async def start(self, spec: SandboxSpec) -> FakeSandbox:
        self.starts += 1
        if self.failures:
            self.failures -= 1
            raise SandboxError("the daemon is gone")
        sandbox = FakeSandbox(self)
        self.living.add(sandbox)
        return sandbox

    async def close(self) -> None:
        self.living.clear()


async def settle(pool: SandboxPool) -> None:
    while pool._tasks:
        await asyncio.gather(*pool._tasks)


async def test_reserve_is_used_and_filled_again() -> None:
    provider = FakeProvider()
    pool = SandboxPool(provider, warm=2)  # type: ignore[arg-type]
    first = await pool.start(SandboxSpec())
    await settle(pool)
    assert provider.starts == 3
    sandbox = await pool.start(SandboxSpec())
    await settle(pool)
    assert provider.starts == 4
    assert len(provider.living) == 4
    await sandbox.stop()
    assert len(provider.living) == 3
    await first.stop()
    await pool.close()
    assert not provider.living


async def test_dead_sandbox_of_the_reserve_is_passed_over() -> None:
    provider = FakeProvider()
    pool = SandboxPool(provider, warm=1)  # type: ignore[arg-type]
    kept = await pool.start(SandboxSpec())
    await settle(pool)
    for living in provider.living:
        living.is_dead = living is not kept._sandbox
    fresh = await pool.start(SandboxSpec())
    assert (await fresh.run_command("true")).exit_code == 0
    await pool.close()


async def test_specs_have_reserves_of_their_own_and_few_are_kept() -> None:
    provider = FakeProvider()
    pool = SandboxPool(provider, warm=1)  # type: ignore[arg-type]
    for number in range(pool_module.MAX_KINDS + 3):
        await (await pool.start(SandboxSpec(workdir=f"/{number}"))).stop()
        await settle(pool)
    assert len(provider.living) == pool_module.MAX_KINDS
    await pool.close()


async def test_forgotten_sandbox_is_stopped() -> None:
    provider = FakeProvider()
    pool = SandboxPool(provider)  # type: ignore[arg-type]
    sandbox = await pool.start(SandboxSpec())
    assert len(provider.living) == 1
    del sandbox
    gc.collect()
    await asyncio.sleep(0)
    await settle(pool)
    assert not provider.living
    await pool.close()


async def test_breaker_spares_a_failing_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(pool_module.time, "monotonic", lambda: clock[0])
    provider = FakeProvider()
    provider.failures = 4
    pool = SandboxPool(provider)  # type: ignore[arg-type]
    for _ in range(pool_module.FAILURES):
        with pytest.raises(SandboxError, match="daemon is gone"):
            await pool.start(SandboxSpec())
    with pytest.raises(SandboxError, match=r"failed 3 times in a row \(the daemon is gone\)"):
        await pool.start(SandboxSpec())
    assert provider.starts == 3
    clock[0] += pool_module.FIRST_PAUSE_S
    with pytest.raises(SandboxError, match="daemon is gone"):
        await pool.start(SandboxSpec())
    assert provider.starts == 4
    clock[0] += 2 * pool_module.FIRST_PAUSE_S
    await (await pool.start(SandboxSpec())).stop()
    provider.failures = 1
    with pytest.raises(SandboxError):
        await pool.start(SandboxSpec())
    await (await pool.start(SandboxSpec())).stop()
    await pool.close()


async def test_failure_in_an_episode_counts_against_the_provider() -> None:
    provider = FakeProvider()
    pool = SandboxPool(provider)  # type: ignore[arg-type]
    sandboxes = [await pool.start(SandboxSpec()) for _ in range(pool_module.FAILURES)]
    for sandbox in sandboxes:
        sandbox._sandbox.is_dead = True  # type: ignore[attr-defined]
        with pytest.raises(SandboxError, match="dead"):
            await sandbox.run_command("true")
    with pytest.raises(SandboxError, match="3 times in a row"):
        await pool.start(SandboxSpec())
    await pool.close()
