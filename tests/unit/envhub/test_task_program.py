"""Agent programs in the sandbox of their task: what they ask is recorded, the tests decide."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from agent_kit import Policy, agent_runners
from envhub_kit import domain, write_tokenizer
from task_kit import write_task

from envhub.servers.turn import SampledTurn, TurnFailed, TurnRequest
from envhub.task import EpisodeFailed, EpisodeResult, EpisodeTask
from envhub.tasks.folder import read_task
from rlearner_text.tokenizer import Tokenizer

pytestmark = pytest.mark.sandbox
PROGRAM = """
import json, os, socket, sys, time, urllib.request

def ask(text):
    body = {"model": "x", "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
               "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]

def reaches(host, port):
    try:
        socket.create_connection((host, port), 0.5).close()
        return True
    except OSError:
        return False

instruction, how = sys.argv[1:]
assert sys.stdin.read() == instruction
if how != "silent":
    with open("/app/answer.txt", "w") as file:
        file.write(ask(instruction))
outside = [reaches("127.0.0.1", 22), reaches("192.0.2.1", 80), os.path.exists("/tests")]
with open("/logs/artifacts/outside", "w") as file:
    file.write(str(any(outside)))
if how in ("silent", "fails"):
    sys.exit("I give up")
if how == "endless":
    if os.fork() == 0:
        os.setsid()
    while True:
        time.sleep(1)
"""
CHECK = (
    '#!/bin/sh\n[ "$(cat /app/answer.txt)" = yes ] && '
    '[ "$(cat /logs/artifacts/outside)" = False ] && r=1 || r=0\n'
    "echo $r > /logs/verifier/reward.txt\n"
)
Play = Callable[..., Awaitable[EpisodeResult]]


class NoServer(Policy):
    """A policy that no server serves."""

    async def turn(self, ask: TurnRequest) -> SampledTurn:
        raise TurnFailed("all servers are gone")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path / "tokenizer"))


@pytest.fixture
async def play(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Play]:
    """Plays one episode of the program, which the policy answers with yes."""
    read_task.cache_clear()
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "agent.py").write_text(PROGRAM)
    table = "[agent]\ntimeout_sec = 2.0\n[verifier]\ntimeout_sec = 5.0\n"
    folder = write_task(tmp_path / "t", **{"task.toml": table, "tests/test.sh": CHECK})
    runners: list[Any] = []

    async def run(how: str, policy: Any = None, **args: object) -> EpisodeResult:
        env_args = {
            "path": str(folder),
            "images": {"*": "host"},
            "eval_share": 0.0,
            "agent": ["/usr/bin/python3", "/opt/agent/agent.py", "{instruction}", how],
            "agent_files": {"/opt/agent": str(tmp_path / "agent")},
            "provider_args": {"folder": str(tmp_path / "sandboxes")},
            **args,
        }
        section = {"context": "steps", "max_turns": 8, "max_context_tokens": 400}
        of = domain("task", env_args=env_args, sampling={"max_tokens": 12}, **section)
        of.check()
        task = EpisodeTask(
            id="hub.1", domain=of, task_index=0, split="train", seed=1, episode=2, min_version=1
        )
        runners.append(agent_runners(tokenizer, policy or Policy(tokenizer, lambda _: "yes")))
        return await runners[-1].play(task, lambda _: None)

    yield run
    for each in runners:
        await each.close()


@pytest.mark.parametrize("how", ["ends", "fails", "endless"])
async def test_tests_decide_whatever_the_exit_status(
    play: Play, tokenizer: Tokenizer, how: str
) -> None:
    episode = await play(how)
    (sample,) = episode.trajectories
    assert (sample.reward, sample.success, sample.response) == (1.0, True, "yes")
    assert episode.prompt == "Write yes to /app/answer.txt."
    text = tokenizer.decode(sample.token_ids.array(), skip_special_tokens=False)
    assert "Write yes to /app/answer.txt." in text
    assert text.endswith("yes<|im_end|>")
    assert sample.metrics["broken_tests"] == 0.0


async def test_wrong_answers_get_nothing(play: Play, tokenizer: Tokenizer) -> None:
    episode = await play("ends", Policy(tokenizer, lambda _: "no"))
    assert (episode.trajectory.reward, episode.trajectory.success) == (0.0, False)


@pytest.mark.parametrize(
    ("how", "args", "expected"),
    [
        ("silent", {}, "the agent ended with exit code 1: I give up, without a call to the policy"),
        ("ends", {"agent": ["no-such-program"]}, "no-such-program: not found, without a call"),
    ],
)
async def test_programs_that_never_call_fail(
    play: Play, how: str, args: dict[str, object], expected: str
) -> None:
    with pytest.raises(EpisodeFailed) as caught:
        await play(how, **args)
    assert caught.value.kind == "env"
    assert expected in caught.value.detail


async def test_policy_that_no_server_serves_is_no_reward(play: Play, tokenizer: Tokenizer) -> None:
    with pytest.raises(EpisodeFailed) as caught:
        await play("ends", NoServer(tokenizer, lambda _: "yes"))
    assert (caught.value.kind, caught.value.detail) == ("generate", "all servers are gone")


async def test_outage_is_the_machines(play: Play) -> None:
    with pytest.raises(EpisodeFailed) as caught:
        await play(
            "ends", provider="folder_sandbox:FolderProvider", provider_args={"fails_after": 2}
        )
    assert caught.value.kind == "machine"
