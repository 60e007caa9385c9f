"""``env: tools``: MCP servers, Python functions and HTTP APIs as tools of an episode."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from envhub_kit import Scripted, domain
from template_models import make_tokenizer_folder
from tool_kit import RAW_SERVER, is_alive, raw_server, task_file

from broker.errors import ConfigError, UserError
from envhub.envs.base import StepResult
from envhub.envs.tool_sources import toolbox
from envhub.envs.tool_sources.base import SourceFailed
from envhub.envs.tools.tool_tasks import ToolTasks
from envhub.episodes.runners import EpisodeLimits, EpisodeRunners
from envhub.task import EpisodeFailed, EpisodeResult, EpisodeTask
from envhub.workers.calls import EnvironmentCalls
from rlearner_text.tokenizer import Tokenizer
from rlearner_text.tool_calls import ToolCall

pytest.importorskip("jsonschema", reason="needs rlearner[tools]")
pytest.importorskip("mcp.client", reason="needs rlearner[tools]")

Make = Callable[..., ToolTasks]
RAW_SOURCE = Path(RAW_SERVER).read_text(encoding="utf-8")


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[ToolTasks] = []

    def make_environment(tools: dict[str, Any], **args: Any) -> ToolTasks:
        env_args = {"path": task_file(tmp_path), "tools": tools, **args}
        of = domain("tools", env_args=env_args)
        of.check()
        environment = of.make()
        assert isinstance(environment, ToolTasks)
        made.append(environment)
        return environment

    yield make_environment
    for environment in made:
        await environment.close()


async def use(environment: ToolTasks, tool: str, /, **arguments: Any) -> StepResult:
    return await environment.use([ToolCall(tool, arguments)])


async def test_several_calls_of_a_turn_run_in_order(make: Make) -> None:
    environment = make({"raw": raw_server()})
    first = await environment.reset(0, "eval", 0)
    calls = [ToolCall("add", {"a": 2, "b": 3}), ToolCall("count", {}), ToolCall("count", {})]
    step = await environment.use(calls)
    assert step.observation.text == "1. add: 5\n2. count: 2\n3. count: 3"
    assert (step.done, step.valid, step.metrics) == (
        False,
        True,
        {"calls": 3.0, "call_errors": 0.0},
    )
    answer = environment.step(f"I think <answer>{environment.reference}</answer>")
    assert (answer.reward, answer.success, answer.done) == (1.0, True, True)
    assert first.text.endswith("= ?")


async def test_each_episode_has_a_server_of_its_own(make: Make) -> None:
    environment = make({"raw": raw_server()})
    for _ in range(2):
        await environment.reset(0, "train", 0)
        assert (await use(environment, "count")).observation.text == "1"
        environment.step("no")


async def test_a_shared_server_serves_all_episodes(make: Make) -> None:
    shared = {"raw": {**raw_server(), "shared": True}}
    one, other = make(shared), make(shared)
    await one.reset(0, "train", 0)
    await other.reset(1, "train", 0)
    assert (await use(one, "count")).observation.text == "1"
    assert (await use(other, "count")).observation.text == "2"
    one.step("no")
    await one.close()
    await one.close()
    assert (await use(other, "count")).observation.text == "3"
    await other.close()
    assert not toolbox._shared_sources


async def test_tools_are_listed_chosen_and_renamed(make: Make) -> None:
    section = {**raw_server(), "only": ["add"], "prefix": "calc_"}
    environment = make({"raw": section})
    (tool,) = ToolTasks.tools(environment.args)
    assert tool["function"]["name"] == "calc_add"
    assert tool["function"]["parameters"]["required"] == ["a", "b"]
    await environment.reset(0, "train", 0)
    assert (await use(environment, "calc_add", a=1, b=1)).observation.text == "2"


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("add", {"a": 1}, "error: the arguments of add are not valid: 'b' is a required property"),
        ("add", {"a": "1", "b": 2}, "at a: '1' is not of type 'integer'"),
        ("subtract", {}, "error: there is no tool 'subtract'; there are add, echo"),
    ],
)
async def test_wrong_arguments_are_an_observation(
    make: Make, name: str, arguments: dict[str, Any], expected: str
) -> None:
    environment = make({"raw": raw_server()}, format_penalty=0.5)
    await environment.reset(0, "train", 0)
    step = await use(environment, name, **arguments)
    assert expected in step.observation.text
    assert (step.valid, step.reward, step.metrics["call_errors"]) == (False, -0.5, 1.0)


async def test_long_results_are_cut_with_a_mark(make: Make) -> None:
    environment = make({"raw": raw_server()}, output_chars=10)
    await environment.reset(0, "train", 0)
    step = await use(environment, "trouble", kind="mib:3")
    assert step.observation.text == f"{'x' * 10}\n(cut: the result has {3 << 20} characters)"


@pytest.mark.parametrize("kind", ["mib:9", "unnamed"])
async def test_a_too_large_answer_is_an_error_that_costs_only_its_call(
    make: Make, kind: str
) -> None:
    environment = make({"raw": raw_server()})
    await environment.reset(0, "train", 0)
    step = await use(environment, "trouble", kind=kind)
    assert step.observation.text == f"error: the answer is larger than {8 << 20} bytes"
    assert (await use(environment, "add", a=1, b=2)).observation.text == "3"


async def test_no_more_calls_than_allowed_are_run(make: Make) -> None:
    environment = make({"raw": raw_server()}, max_calls=1)
    await environment.reset(0, "train", 0)
    step = await environment.use([ToolCall("count", {}), ToolCall("count", {})])
    assert step.observation.text == "1. count: 1\n2. count: error: no more calls are run"


async def test_a_server_that_dies_fails_the_episode_in_one_line_without_its_secrets(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_SECRET", "swordfish-77")
    environment = make({"raw": raw_server(env={"TOOL_KEY": {"env": "SOME_SECRET"}})})
    await environment.reset(0, "train", 0)
    assert (await use(environment, "env", name="TOOL_KEY")).observation.text == "swordfish-77"
    with pytest.raises(SourceFailed) as caught:
        await use(environment, "trouble", kind="die")
    assert str(caught.value) == "tool server raw ended with exit code 7: out of disk for ***"


async def test_a_server_that_hangs_fails_the_episode(make: Make) -> None:
    environment = make({"raw": raw_server()}, timeout_s=0.5)
    await environment.reset(0, "train", 0)
    with pytest.raises(SourceFailed, match="tool server raw hangs: trouble did not return within"):
        await use(environment, "trouble", kind="hang")


@pytest.mark.parametrize("kind", ["die", "hang"])
async def test_with_observe_the_policy_reads_of_a_failure_and_goes_on(
    make: Make, kind: str
) -> None:
    environment = make({"raw": {**raw_server(), "on_failure": "observe"}}, timeout_s=1.0)
    await environment.reset(0, "train", 0)
    step = await use(environment, "trouble", kind=kind)
    assert step.observation.text.startswith("error: tool server raw ")
    assert step.observation.text.endswith("; it is started again")
    assert (await use(environment, "count")).observation.text == "1"


async def test_a_server_that_changes_its_tools_fails_the_episode(make: Make) -> None:
    environment = make({"raw": raw_server()})
    await environment.reset(0, "train", 0)
    assert (await use(environment, "trouble", kind="change")).observation.text == "done"
    with pytest.raises(SourceFailed, match="raw changed its tools during an episode; it lists add"):
        await use(environment, "add", a=1, b=2)


async def test_a_server_with_other_tools_than_checked_is_refused_at_the_reset(
    make: Make, tmp_path: Path
) -> None:
    script = tmp_path / "server.py"
    source = RAW_SOURCE
    script.write_text(source, encoding="utf-8")
    section = raw_server()
    section["args"]["command"][1] = str(script)
    environment = make({"raw": section})
    script.write_text(source.replace('"echo": schema(text=TEXT)', '"say": schema(text=TEXT)'))
    with pytest.raises(SourceFailed, match=r"not those that were checked.*: echo gone; say new"):
        await environment.reset(0, "train", 0)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (raw_server("dies"), "tool server raw ended with exit code 3: no licence for key"),
        (raw_server("mute", start_timeout_s=0.5), "raw did not list its tools within 0.5 s"),
        (raw_server("bad_schema"), "tools.raw: the schema of tool add is not valid"),
        ({**raw_server(), "only": ["sub"]}, "tools.raw has no tool 'sub'; it has add, count"),
        ({"kind": "mcp", "args": {"url": "http://127.0.0.1:9/mcp"}}, "at http://127.0.0.1:9/mcp"),
    ],
)
async def test_bad_sources_are_refused_by_check(
    tmp_path: Path, section: dict[str, Any], expected: str
) -> None:
    of = domain("tools", env_args={"path": task_file(tmp_path), "tools": {"raw": section}})
    with pytest.raises(ConfigError) as caught:
        of.check()
    assert caught.value.key == "domains.d.env_args.tools"
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"kind": "mpc"}, "tools.raw.kind"),
        ({"kind": "mcp", "args": {}}, "tools.raw.args"),
        ({"kind": "mcp", "args": {"command": ["no-such-program-here"]}}, "tools.raw.args.command"),
        ({"kind": "mcp", "args": {"url": "ftp://host"}}, "tools.raw.args.url"),
        ({"kind": "functions", "args": {"functions": ["add"]}}, "tools.raw.args.functions"),
        ({"kind": "openapi", "args": {"document": "gone.json", "url": "http://h"}}, "document"),
    ],
)
async def test_bad_arguments_are_refused_before_anything_starts(
    tmp_path: Path, section: dict[str, Any], key: str
) -> None:
    of = domain("tools", env_args={"path": task_file(tmp_path), "tools": {"raw": section}})
    with pytest.raises(ConfigError) as caught:
        of.check()
    assert key in caught.value.key


async def test_two_tools_of_one_name_need_a_prefix(tmp_path: Path) -> None:
    tools = {"one": raw_server(), "two": raw_server()}
    of = domain("tools", env_args={"path": task_file(tmp_path), "tools": tools})
    with pytest.raises(UserError, match=r"tools.two.prefix: '' is not allowed; a prefix, as tools"):
        of.check()


async def test_lines_that_are_no_messages_are_passed_over(make: Make) -> None:
    environment = make({"raw": raw_server("noise")})
    await environment.reset(0, "train", 0)
    assert (await use(environment, "add", a=1, b=2)).observation.text == "3"


async def test_daemons_of_a_server_end_with_its_episode(make: Make, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    environment = make({"raw": raw_server("", str(pids))})
    pids.write_text("", encoding="ascii")
    await environment.reset(0, "train", 0)
    server, daemon = map(int, pids.read_text(encoding="ascii").split())
    assert is_alive(server)
    assert is_alive(daemon)
    await environment.close()
    assert not is_alive(server)
    assert not is_alive(daemon)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer_folder(tmp_path_factory.mktemp("hermes"), "hermes"))


async def play(tokenizer: Tokenizer, tmp_path: Path, call: ToolCall, **args: Any) -> EpisodeResult:
    """Play an episode in which the policy calls a tool and answers with what it returned."""

    def script(context: str) -> str:
        if "<tool_response>" in context:
            result = context.rpartition("<tool_response>")[2].partition("</tool_response>")[0]
            return f"<answer>{result.strip()}</answer>"
        text = json.dumps({"name": call.name, "arguments": call.arguments})
        return f"<tool_call>\n{text}\n</tool_call>"

    env_args = {"path": task_file(tmp_path), "tools": {"raw": {**raw_server(), **args}}}
    section = {"max_context_tokens": 4000, "sampling": {"max_tokens": 300}, "max_turns": 4}
    of = domain("tools", env_args=env_args, **section)
    of.check()
    task = EpisodeTask("hub.1", of, 0, "eval", 0, episode=0, min_version=1)
    runners = EpisodeRunners(
        tokenizer,
        Scripted(tokenizer, script),
        EnvironmentCalls(60.0),
        EpisodeLimits(120.0, 60.0),
    )
    try:
        return await runners.play(task, lambda _: None)
    finally:
        await runners.close()


async def test_an_episode_is_played_with_a_tool(tokenizer: Tokenizer, tmp_path: Path) -> None:
    # the held-out tasks are the last ones: 19 + 19
    result = await play(tokenizer, tmp_path, ToolCall("add", {"a": 19, "b": 19}))
    trajectory = result.trajectory
    assert (trajectory.reward, trajectory.success, len(trajectory.turns)) == (1.0, True, 2)
    assert trajectory.metrics["calls"] == 1.0


async def test_a_dead_server_is_a_failed_episode_and_no_reward(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(EpisodeFailed) as caught:
        await play(tokenizer, tmp_path, ToolCall("trouble", {"kind": "die"}))
    assert caught.value.kind == "env"
    assert "tool server raw ended with exit code 7: out of disk for" in str(caught.value)


async def test_an_observed_failure_ends_with_a_reward(tokenizer: Tokenizer, tmp_path: Path) -> None:
    call = ToolCall("trouble", {"kind": "die"})
    result = await play(tokenizer, tmp_path, call, on_failure="observe")
    assert result.trajectory.reward == 0.0
    assert result.trajectory.metrics["call_errors"] == 1.0
