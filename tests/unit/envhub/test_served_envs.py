"""OpenEnv against a server that speaks its protocol; ALFWorld and AppWorld, which are not here,
against doubles of what they document.
"""

from __future__ import annotations

import sys
import types
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from broker.errors import ConfigError, NotInstalled
from envhub.envs.adapters import alfworld_env, appworld_env
from envhub.envs.adapters.alfworld_env import AlfworldArgs, AlfworldEnv
from envhub.envs.adapters.appworld_env import AppworldArgs, AppworldEnv
from envhub.envs.adapters.foreign import seed_of
from envhub.envs.adapters.openenv_env import OpenEnv, OpenEnvArgs, ServerError

# ---------------------------------------------------------------------------------------------------
# OpenEnv


class Counting:
    """A server of one environment: it counts the characters of messages; each connection has a
    count of its own.
    """

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.connections = 0

    async def ws(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.connections += 1
        count = 0
        async for raw in socket:
            assert raw.type is WSMsgType.TEXT
            message = raw.json()
            self.received.append(message)
            if message["type"] == "close":
                break
            data = message.get("data", {})
            if message["type"] == "reset":
                count = 0
            elif not isinstance(data.get("message"), str):
                await self.error(socket, "Field required: message", "VALIDATION_ERROR")
                continue
            elif data["message"] == "boom":
                await self.error(socket, "it broke", "EXECUTION_ERROR")
                continue
            elif data["message"] == "hang up":
                break
            elif data["message"] == "nonsense":
                await socket.send_str('{"type": "observation"}')
                continue
            else:
                count += len(data["message"])
            seen = {
                "observation": {"text": f"count {count}", "count": count},
                "reward": float(count),
                "done": count > 5,
            }
            await socket.send_json({"type": "observation", "data": seen})
        return socket

    @staticmethod
    async def error(socket: web.WebSocketResponse, message: str, code: str) -> None:
        await socket.send_json({"type": "error", "data": {"message": message, "code": code}})

    async def schema(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "action": {"properties": {"message": {}, "metadata": {}}},
                "observation": {},
                "state": {},
            }
        )


@pytest.fixture
async def served() -> AsyncIterator[tuple[str, Counting]]:
    counting, app = Counting(), web.Application()
    app.router.add_get("/ws", counting.ws)
    app.router.add_get("/schema", counting.schema)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", counting
    await runner.cleanup()


async def test_a_served_environment_is_played_over_one_connection(
    served: tuple[str, Counting],
) -> None:
    url, server = served
    env = OpenEnv(
        OpenEnvArgs(
            url=url,
            observation_field="text",
            reset_args={"size": 3},
            action_args={"metadata": {}},
            success_reward=6.0,
        )
    )
    assert (await env.reset(7, "train", 1)).text == "count 0"
    step = await env.step("abc")
    assert (step.observation.text, step.reward, step.done, step.valid, step.success) == (
        "count 3",
        3.0,
        False,
        True,
        False,
    )
    last = await env.step("def")
    assert (last.reward, last.done, last.success) == (6.0, True, True)
    assert env.text_frame() == "count 6"
    assert (await env.reset(8, "eval", 1)).text == "count 0"
    await env.close()
    assert server.connections == 1
    assert server.received[:2] == [
        {"type": "reset", "data": {"size": 3, "seed": seed_of(7, "train", 1)}},
        {"type": "step", "data": {"metadata": {}, "message": "abc"}},
    ]
    assert server.received[-1] == {"type": "close"}


async def test_actions_in_json_that_are_malformed_are_counted(served: tuple[str, Counting]) -> None:
    env = OpenEnv(OpenEnvArgs(url=served[0], action="json", format_penalty=0.5))
    assert (await env.reset(0, "train", 0)).text == '{"text": "count 0", "count": 0}'
    for text in ("no json", "[1]", "[" * 100_000):
        step = await env.step(text)
        assert (step.reward, step.done, step.valid, step.observation.text) == (
            -0.5,
            False,
            False,
            '{"text": "count 0", "count": 0}',
        )
    refused = await env.step('{"text": "x"}')
    assert (refused.valid, refused.observation.text) == (
        False,
        "Field required: message (VALIDATION_ERROR)",
    )
    assert (await env.step('{"message": "x"}')).reward == 1.0
    await env.close()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("boom", "step: the server answered: it broke"),
        ("hang up", "closed the connection"),
        ("nonsense", "not OpenEnv's protocol"),
    ],
)
async def test_errors_of_the_server_fail_the_episode_and_the_next_one_connects_anew(
    served: tuple[str, Counting], text: str, problem: str
) -> None:
    env = OpenEnv(OpenEnvArgs(url=served[0]))
    await env.reset(0, "train", 0)
    with pytest.raises(ServerError, match=problem):
        await env.step(text)
    assert (await env.reset(1, "train", 0)).text
    await env.close()


async def test_a_field_that_observations_lack_is_named(served: tuple[str, Counting]) -> None:
    env = OpenEnv(OpenEnvArgs(url=served[0], observation_field="picture"))
    with pytest.raises(ServerError, match="'picture': the server's observation has text, count"):
        await env.reset(0, "train", 0)
    await env.close()
    shown = OpenEnv(OpenEnvArgs(url=served[0], observe=f"{__file__}:shout"))
    assert (await shown.reset(0, "train", 0)).text == "COUNT 0"
    await shown.close()


def shout(observation: dict[str, Any]) -> str:
    return str(observation["text"]).upper()


async def test_what_a_server_takes_is_checked_before_anything_starts(
    served: tuple[str, Counting],
) -> None:
    import asyncio

    url = served[0]
    await asyncio.to_thread(OpenEnv.check, OpenEnvArgs(url=url))
    await asyncio.to_thread(OpenEnv.check, OpenEnvArgs(url=url.replace("http", "ws")))
    for args, key in (
        ({"url": url, "action_field": "text"}, "action_field"),
        ({"url": "ftp://x"}, "url"),
        ({"url": f"{url}/x"}, "url"),
    ):
        with pytest.raises(ConfigError) as caught:
            await asyncio.to_thread(OpenEnv.check, OpenEnvArgs.model_validate(args))
        assert caught.value.key == key


async def test_a_server_that_is_not_there_fails_the_episode() -> None:
    env = OpenEnv(OpenEnvArgs(url="http://127.0.0.1:9"))
    with pytest.raises(ServerError, match=r"no OpenEnv server at http://127\.0\.0\.1:9/ws"):
        await env.reset(0, "train", 0)


# --------------------------------------------------------------------------------------------------
# ALFWorld


def install(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    parts = name.split(".")
    for depth in range(1, len(parts)):
        parent = ".".join(parts[:depth])
        if parent not in sys.modules:
            module = types.ModuleType(parent)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, parent, module)
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


class Game:
    """What ``textworld.start`` gives: ``reset`` to a state, ``step`` to (state, score, done)."""

    open_games = 0

    def __init__(self, file: str) -> None:
        self.file = file
        Game.open_games += 1

    def state(self, feedback: str, won: bool = False) -> dict[str, Any]:
        return {
            "feedback": feedback,
            "won": won,
            "admissible_commands": ["look", "put mug 1 in/on desk 1"],
        }

    def reset(self) -> dict[str, Any]:
        return self.state(f"\nYou are in {self.file}. Your task is to: put a mug on the desk.\n")

    def step(self, command: str) -> tuple[dict[str, Any], float, bool]:
        won = command.startswith("put mug")
        return self.state("You won!" if won else "Nothing happens.", won), float(won), won

    def close(self) -> None:
        Game.open_games -= 1


@pytest.fixture
def alfworld(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    configs: list[dict[str, Any]] = []

    class AlfredTWEnv:
        def __init__(self, config: dict[str, Any], train_eval: str = "train") -> None:
            configs.append(config)
            self.game_files = (
                []
                if config["env"]["task_types"] == [6]
                else [f"{train_eval}/{name}.tw-pddl" for name in "cab"]
            )

    def start(path: str, request_infos: Any, wrappers: list[Any]) -> Game:
        assert (request_infos.won, request_infos.admissible_commands, wrappers) == (
            True,
            True,
            ["demangler"],
        )
        return Game(path)

    install(monkeypatch, "alfworld.info", ALFWORLD_DATA="/data/alfworld")
    install(
        monkeypatch,
        "alfworld.agents.environment.alfred_tw_env",
        AlfredTWEnv=AlfredTWEnv,
        AlfredDemangler=lambda shuffle: "demangler",
    )
    install(
        monkeypatch,
        "textworld",
        start=start,
        EnvInfos=lambda **wanted: types.SimpleNamespace(**wanted),
    )
    alfworld_env._game_files.cache_clear()
    return configs


def test_an_alfworld_game_by_hand(alfworld: list[dict[str, Any]]) -> None:
    args = AlfworldArgs(max_steps=3, format_penalty=0.25, success_reward=10.0)
    AlfworldEnv.check(args)
    assert (AlfworldEnv.num_tasks(args, "train"), AlfworldEnv.num_tasks(args, "eval")) == (3, 3)
    assert alfworld[0]["dataset"]["data_path"] == "/data/alfworld/json_2.1.1/train"
    env = AlfworldEnv(args)
    seen = env.reset(3, "train", 0)  # a fourth one is the first again, in the order of the paths
    assert seen.text == (
        "You are in train/a.tw-pddl. Your task is to: put a mug on the desk.\nAdmissible commands: look, put mug 1 "
        "in/on desk 1"
    )
    lost = [env.step(text) for text in ("dance", "look", "look")]
    assert [(step.reward, step.done, step.valid) for step in lost] == [
        (-0.25, False, False),
        (0.0, False, True),
        (0.0, True, True),
    ]
    assert (lost[-1].truncated, lost[-1].success) == (True, False)
    assert "eval_out_of_distribution/b" in env.reset(1, "eval", 0).text
    won = env.step(" Put mug 1 in/on desk 1 ")
    assert (won.reward, won.done, won.success, won.truncated) == (10.0, True, True, False)
    assert env.text_frame() == "You won!"
    env.close()
    assert Game.open_games == 0


def test_alfworld_without_games_or_without_itself_says_what_to_do(
    alfworld: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match="it has none for train; pip install alfworld, then alfworld-download"
    ):
        AlfworldEnv.check(AlfworldArgs(task_types=[6]))
    monkeypatch.setitem(sys.modules, "alfworld.info", None)
    alfworld_env._game_files.cache_clear()
    with pytest.raises(
        NotInstalled,
        match=r"environment alfworld: .*; pip install alfworld, then alfworld-download",
    ):
        AlfworldEnv.check(AlfworldArgs())


# --------------------------------------------------------------------------------------------------
# AppWorld


class World:
    """What ``appworld.AppWorld`` documents: task, execute, task_completed, evaluate, close."""

    def __init__(self, task_id: str, experiment_name: str) -> None:
        person = types.SimpleNamespace(
            first_name="Ann", last_name="Lee", email="a@x.org", phone_number="1"
        )
        self.task = types.SimpleNamespace(
            instruction=f"Do {task_id} of {experiment_name}.", supervisor=person
        )
        self.codes: list[str] = []
        self.closed = False

    def execute(self, code: str) -> str:
        self.codes.append(code)
        return f"ran {code}"

    def task_completed(self) -> bool:
        return any("complete_task" in code for code in self.codes)

    def evaluate(self) -> Any:
        right = any("right" in code for code in self.codes)
        return types.SimpleNamespace(
            success=right, passes=[{}] * (4 if right else 3), failures=[] if right else [{}]
        )

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def appworld(monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        monkeypatch,
        "appworld",
        AppWorld=World,
        load_task_ids=lambda name: [] if name == "test_normal" else [f"{name}_1", f"{name}_2"],
    )
    appworld_env._tasks.cache_clear()


@pytest.mark.usefixtures("appworld")
def test_an_appworld_task_by_hand() -> None:
    args = AppworldArgs(max_interactions=3)
    AppworldEnv.check(args)
    assert AppworldEnv.num_tasks(args, "eval") == 2
    env = AppworldEnv(args)
    seen = env.reset(0, "train", 0)
    assert (
        seen.text
        == "My name is Ann Lee, my e-mail is a@x.org, my phone number 1.\nTask: Do train_1 of rlearner."
    )
    step = env.step("Let me see.\n```python\nprint(1)\n```\nSo")
    assert (step.observation.text, step.reward, step.done, step.valid) == (
        "ran print(1)",
        0.0,
        False,
        True,
    )
    assert not env.step("``` ```".replace("` `", "`\n`")).valid
    last = env.step("apis.supervisor.complete_task()")
    assert (last.reward, last.done, last.success, last.truncated) == (0.75, True, False, False)
    world = env._world
    env.reset(1, "eval", 0)
    assert world.closed
    done = env.step("right(); apis.supervisor.complete_task()")
    assert (done.reward, done.success, done.metrics) == (1.0, True, {"tests_passed": 1.0})
    whole = AppworldEnv(AppworldArgs(max_interactions=1, reward="success"))
    whole.reset(0, "train", 0)
    cut = whole.step("print(2)")
    assert (cut.reward, cut.done, cut.truncated, cut.success, cut.metrics) == (
        0.0,
        True,
        True,
        False,
        {"tests_passed": 0.75},
    )
    env.close()


@pytest.mark.usefixtures("appworld")
def test_appworld_without_tasks_or_without_itself_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for args, key in (
        ({"eval_tasks": "train"}, "eval_tasks"),
        ({"eval_tasks": "test_normal"}, "eval_tasks"),
    ):
        with pytest.raises(ConfigError) as caught:
            AppworldEnv.check(AppworldArgs.model_validate(args))
        assert caught.value.key == key
    monkeypatch.setitem(sys.modules, "appworld", None)
    appworld_env._tasks.cache_clear()
    with pytest.raises(NotInstalled, match=r"environment appworld: .*; pip install appworld"):
        AppworldEnv.check(AppworldArgs())
