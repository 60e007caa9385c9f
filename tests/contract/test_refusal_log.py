"""Who tried what is not allowed is named by the process that runs the broker."""

from __future__ import annotations

from pathlib import Path

import pytest
from broker_strangers import stranger
from waits import until

from broker.identity import tokens
from broker.identity.login import keys_of
from broker.server import refusal_log
from broker.server.private_server import BrokerServer
from broker.server.refusal_log import RefusalLog
from broker.server.server_supervisor import ServerSupervisor

KEY = "U" + "A" * 55
LINE = (
    f'[1] 2026/11/26 10:00:00.0 [ERR] 127.0.0.1:1 - cid:7 - "x" - "RLEARNER_q_envhub/nkey:{KEY}" - '
)


async def test_a_refused_publish_is_named_with_its_identity(tmp_path: Path) -> None:
    with BrokerServer(str(tmp_path / "store"), store_max_gib=64) as server:
        supervisor = ServerSupervisor(server)
        tokens.make_join_token(
            keys_of(server.url), server.url, "envhub", "quick", name="host-2", expires_s=600
        )
        async with stranger(server.url, "rewardhub", "quick") as one:
            for _ in range(3):
                await one.publish("rl.other.samples")
            await one.publish("$JS.API.STREAM.PURGE.rl_quick_samples")
            await one.client.subscribe("rl.quick.samples")
            await one.client.flush()
        lines: list[str] = []

        def told() -> bool:
            lines.extend(supervisor.look())
            return len(lines) >= 3

        await until(told)
        who = "refused: rewardhub of run quick may not"
        assert lines[0].startswith(f"{who} publish to rl.other.samples")
        assert lines[1:] == [
            f"{who} publish to $JS.API.STREAM.PURGE.rl_quick_samples",
            f"{who} subscribe to rl.quick.samples",
        ]
        assert supervisor.look() == []


def test_a_token_is_named(tmp_path: Path) -> None:
    server_log = tmp_path / "log"
    server_log.write_text(f'{LINE}Publish Violation - Subject "old"\n')
    refusals, user = RefusalLog(server_log), refusal_log.BrokerUser(KEY, "envhub", "q", "host-2")
    with server_log.open("a") as file:
        file.write(f'{LINE}Publish Violation - Subject "RLJS.STREAM.NAMES"\n' * 2 + LINE)
    news = refusals.news(lambda: [user])
    assert news == [
        "refused: envhub host-2 of run q may not publish to $JS.API.STREAM.NAMES (2 times)"
    ]
    with server_log.open("a") as file:
        # the end of the line that was half written
        file.write('Publish Violation - Subject "a\x1b[2Jb"\n')
    assert refusals.news(lambda: []) == [rf"refused: key {KEY} may not publish to a\x1b[2Jb"]


def test_a_rotated_log_and_the_form_of_older_servers(tmp_path: Path) -> None:
    server_log = tmp_path / "log"
    server_log.write_text("x" * 500)
    refusals = RefusalLog(server_log)
    server_log.rename(tmp_path / "log.1")
    server_log.write_text(
        f'[1] [ERR] 127.0.0.1:1 - cid:7 - Publish Violation - Nkey "{KEY}", Subject "a"\n'
    )
    assert refusals.news(lambda: []) == [f"refused: key {KEY} may not publish to a"]
    assert refusals.news(lambda: []) == []


def test_a_flood_is_told_in_few_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_log, "MOST_KNOWN", 30)
    server_log = tmp_path / "log"
    refusals = RefusalLog(server_log)
    for expected in (20, 10, 0):
        with server_log.open("a") as file:
            file.writelines(
                f'{LINE}Publish Violation - Subject "{expected}.{n}"\n' for n in range(1000)
            )
        assert len(refusals.news(lambda: [])) == expected
