"""Grades in real sandboxes: what crosses over to the tests, and whose fault a missing reward is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from task_kit import task_args, write_task

from envhub.tasks.errors import TaskError
from envhub.tasks.folder import read_task
from envhub.tasks.host import TaskHost
from envhub.tasks.providers import load_provider
from envhub.tasks.trial import Trial
from rlearner_sandbox.providers.base import SandboxError

pytestmark = pytest.mark.sandbox
Play = Callable[..., object]
REWARD = "echo 1 > /logs/verifier/reward.txt\n"


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[TaskHost]:
    read_task.cache_clear()
    provider_args = {"folder": str(tmp_path / "sandboxes")}
    args = task_args(tmp_path)
    host = TaskHost(load_provider(args.model_copy(update={"provider_args": provider_args})))
    yield host
    await host.close()


async def grade(host: TaskHost, folder: Path, *commands: str, **fields: object) -> Trial:
    """Run one command in each step of a task, and grade it."""
    trial = Trial(host, read_task(folder), task_args(folder, **fields))
    try:
        await trial.begin()
        for command in commands:
            await trial.run(command, 10.0, max_output=1000)
            if await trial.grade():
                break
        return trial
    finally:
        await trial.close()


@pytest.mark.parametrize(("command", "reward"), [("echo yes > answer.txt", 1.0), ("true", 0.0)])
async def test_tests_see_the_work(
    host: TaskHost, tmp_path: Path, command: str, reward: float
) -> None:
    trial = await grade(host, write_task(tmp_path / "t"), command)
    assert (trial.rewards(), trial.problems) == ({"reward": reward}, {})


async def test_only_the_working_folder_and_artifacts_cross_over(
    host: TaskHost, tmp_path: Path
) -> None:
    script = (
        "#!/bin/sh\nexec > /logs/verifier/reward.json\n"
        'has() { if [ -e $2 ]; then echo "\\"$1\\": 1$3"; else echo "\\"$1\\": 0$3"; fi; }\n'
        "echo {\nhas reward /app/new ,\nhas kept /app/kept ,\nhas gone /app/gone ,\n"
        "has linked /app/linked ,\nhas folder /app/gone-folder ,\nhas system /opt/mine ,\n"
        "has artifact /var/out/a.txt ,\nhas excluded /var/out/b.log ,\n"
        "has convention /logs/artifacts/x ,\nhas retyped /app/retyped/inside\necho }\n"
    )
    files = {
        "task.toml": "artifacts = [{source = '/var/out', exclude = ['*.log']}]\n"
        "[verifier]\ntimeout_sec = 5.0\n",
        "environment/Dockerfile": "FROM a\nWORKDIR /app\nCOPY files/ /app/\n",
        "environment/files/kept": "1",
        "environment/files/gone": "1",
        "environment/files/gone-folder/x": "1",
        "environment/files/retyped": "1",
        "tests/test.sh": script,
    }
    command = (
        "touch new; rm -r gone gone-folder; ln -s /tests linked; touch /opt/mine; "
        "mkdir /var/out; touch /var/out/a.txt /var/out/b.log /logs/artifacts/x; "
        "rm retyped; mkdir retyped; touch retyped/inside"
    )
    trial = await grade(host, write_task(tmp_path / "t", **files), command)
    assert trial.rewards() == {
        "reward": 1.0,
        "kept": 1.0,
        "gone": 0.0,
        "linked": 0.0,
        "folder": 0.0,
        "system": 0.0,
        "artifact": 1.0,
        "excluded": 0.0,
        "convention": 1.0,
        "retyped": 1.0,
    }


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("true", "the tests wrote neither reward.txt nor reward.json"),
        ("echo nan > /logs/verifier/reward.txt", "a reward is not finite: nan"),
        ("echo much > /logs/verifier/reward.txt", "reward.txt is not a number: 'much"),
        ("echo '{' > /logs/verifier/reward.json", "reward.json is not JSON"),
        ('echo \'{"a": "b"}\' > /logs/verifier/reward.json', "a reward is not a number"),
        ("mkdir /logs/verifier/reward.txt", "is a folder"),
        ("echo oops >&2; exit 3", "they printed 'oops' last"),
        ("sleep 60", "the tests did not end within verifier.timeout_sec, 1 s"),
    ],
)
async def test_tests_without_a_reward_are_the_tasks_fault(
    host: TaskHost, tmp_path: Path, script: str, expected: str
) -> None:
    table = "[verifier]\ntimeout_sec = 1.0\n"
    files = {"task.toml": table, "tests/test.sh": f"#!/bin/sh\n{script}\n"}
    with pytest.raises(TaskError) as caught:
        await grade(host, write_task(tmp_path / "t", **files), "true")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("command", ["touch break", "touch hang"])
async def test_tests_that_the_policy_breaks_are_its_fault(
    host: TaskHost, tmp_path: Path, command: str
) -> None:
    script = f"#!/bin/sh\n[ -e break ] && exit 1\n[ -e hang ] && sleep 60\n{REWARD}"
    files = {"task.toml": "[verifier]\ntimeout_sec = 1.0\n", "tests/test.sh": script}
    folder = write_task(tmp_path / "t", **files)
    trial = await grade(host, folder, command)
    assert trial.rewards() == {"reward": 0.0}
    assert list(trial.problems) == [0]
    assert (await grade(host, folder, "true")).rewards() == {"reward": 1.0}


async def test_more_than_the_tests_are_given_is_the_policys_fault(
    host: TaskHost, tmp_path: Path
) -> None:
    command = "head -c 3000000 /dev/urandom > answer.txt"
    trial = await grade(host, write_task(tmp_path / "t"), command, max_artifacts_mib=1)
    assert trial.rewards() == {"reward": 0.0}
    assert "answer.txt" in trial.problems[0] or "/app" in trial.problems[0]


async def test_steps_share_a_sandbox_and_have_rewards_of_their_own(
    host: TaskHost, tmp_path: Path
) -> None:
    table = (
        "[verifier]\ntimeout_sec = 5.0\n"
        '[[steps]]\nname = "one"\nmin_reward = 0.5\n[[steps]]\nname = "two"\n'
    )
    check = "#!/bin/sh\n[ -e {0} ] && [ ! -e /tests/of-{1} ] && r=1 || r=0\n"
    check += "touch /tests/of-{0}; echo $r > /logs/verifier/reward.txt\n"
    files: dict[str, str | None] = {"task.toml": table, "instruction.md": None}
    files |= {"tests/test.sh": None, "steps/two/workdir/setup.sh": "touch prepared"}
    for name, other in (("one", "two"), ("two", "one")):
        files[f"steps/{name}/instruction.md"] = f"make {name}"
        files[f"steps/{name}/tests/test.sh"] = check.format(name, other)
    folder = write_task(tmp_path / "t", **files)
    trial = await grade(host, folder, "touch one", "[ -e prepared ] && [ -e one ] && touch two")
    assert trial.grades == [{"reward": 1.0}, {"reward": 1.0}]
    # a step that falls short of its min_reward ends the task
    trial = await grade(host, folder, "true", "touch two")
    assert (trial.grades, trial.rewards()) == ([{"reward": 0.0}], {"reward": 0.0})


async def test_hook_runs_in_the_agents_sandbox(host: TaskHost, tmp_path: Path) -> None:
    table = (
        "[verifier]\ntimeout_sec = 5.0\n[[verifier.collect]]\n"
        "command = 'sh program.sh > /logs/artifacts/out; touch /tmp/ran'\n"
    )
    script = '#!/bin/sh\n[ "$(cat /logs/artifacts/out)" = 7 ] && [ ! -e /tmp/ran ]\n'
    script += "echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    files = {"task.toml": table, "tests/test.sh": script}
    folder = write_task(tmp_path / "t", **files)
    trial = await grade(host, folder, "echo 'echo 7; ls /tests' > program.sh")
    assert trial.rewards() == {"reward": 1.0}


async def test_shared_verifier_runs_in_the_agents_files(host: TaskHost, tmp_path: Path) -> None:
    script = "#!/bin/sh\n[ -e /opt/mine ] && r=1 || r=0\npgrep sleep >/dev/null && r=2\n"
    script += "echo $r > /logs/verifier/reward.txt\n"
    folder = write_task(tmp_path / "t", **{"tests/test.sh": script})
    command = "touch /opt/mine; (setsid sleep 100 >/dev/null 2>&1 &)"
    assert (await grade(host, folder, command)).rewards() == {"reward": 0.0}
    assert (await grade(host, folder, command, verifier="shared")).rewards() == {"reward": 1.0}


async def test_health_check_and_failing_setup_are_the_tasks_fault(
    host: TaskHost, tmp_path: Path
) -> None:
    table = (
        "[environment.healthcheck]\ncommand = 'test -e /app/up'\ninterval_sec = 0.01\nretries = 2\n"
    )
    with pytest.raises(TaskError, match="its health check failed 2 times: test -e /app/up"):
        await grade(host, write_task(tmp_path / "a", **{"task.toml": table}), "true")
    built = {"environment/Dockerfile": "FROM x\nWORKDIR /app\nRUN echo no >&2 && exit 4\n"}
    with pytest.raises(TaskError, match=r"Dockerfile:3: RUN ended with exit code 4: no"):
        await grade(host, write_task(tmp_path / "b", **built), "true")


async def test_dockerfile_steps_and_variables(host: TaskHost, tmp_path: Path) -> None:
    table = "[environment.env]\nB = '${WORD:-two}'\n[verifier]\ntimeout_sec = 5.0\n"
    docker = "FROM x\nARG N=3\nENV A=one C=$N\nWORKDIR /app/sub\nRUN echo $C-$A > made\n"
    script = '#!/bin/sh\n[ "$(cat made)$A$B$(cat out)" = 3-oneonetwoonetwo ] && r=1 || r=0\n'
    script += "echo $r > /logs/verifier/reward.txt\n"
    files = {"task.toml": table, "environment/Dockerfile": docker, "tests/test.sh": script}
    trial = await grade(host, write_task(tmp_path / "t", **files), "echo $A$B > out")
    assert trial.rewards() == {"reward": 1.0}


async def test_outage_is_never_a_reward(tmp_path: Path) -> None:
    from folder_sandbox import FolderProvider

    read_task.cache_clear()
    folder = write_task(tmp_path / "t")
    outages = 0
    for commands in range(40):
        host = TaskHost(FolderProvider(fails_after=commands))
        try:
            trial = await grade(host, folder, "echo yes > answer.txt")
        except SandboxError:
            outages += 1
        else:
            assert trial.rewards() == {"reward": 1.0}
            break
        finally:
            host.provider.commands_left = None  # type: ignore[attr-defined]
            await host.close()
    assert outages >= 10
