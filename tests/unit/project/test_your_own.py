"""docs/your-own.md: its files are written as they stand there, checked, played and scored by what a
run uses.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from envhub_kit import Scripted, write_tokenizer

from broker.contract import checks, wire
from broker.settings.config import RewardConfig
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import load, validate
from envhub.config import num_eval_tasks
from envhub.domain import Domain, load_domains
from envhub.episodes.runners import EpisodeLimits, EpisodeRunners
from envhub.lengths.base import UpcomingTurn
from envhub.lengths.selection import load_estimator
from envhub.task import EpisodeResult, EpisodeTask
from envhub.workers.calls import EnvironmentCalls
from rewardhub import protocol
from rewardhub.episode_samples import sample_of
from rewardhub.rewards.base import Scored
from rewardhub.routing import ForwardAction, GroupScoring, ScoreAction
from rewardhub.worker import RewardWorker
from rlearner.cli import main, make_parser
from rlearner_text.tokenizer import Tokenizer

PAGE = Path(__file__).parents[3] / "docs" / "your-own.md"
FILES = dict(
    re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
async def crew(tmp_path: Path) -> AsyncIterator[EpisodeRunners]:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "tokenizer"))
    made = EpisodeRunners(
        tokenizer,
        Scripted(tokenizer, lambda _: ""),
        EnvironmentCalls(60.0),
        EpisodeLimits(120.0, 60.0),
    )
    yield made
    await made.close()


async def play(
    crew: EpisodeRunners, domain: Domain, says: Mapping[int, str] | random.Random, index: int = 0
) -> EpisodeResult:
    """One episode; the policy says these at their turns, or digits by chance."""
    digits = says if isinstance(says, random.Random) else None

    def script(context: str) -> str:
        turn = context.count("<|im_assistant|>") - 1
        return str(digits.randint(0, 9)) if digits else says[turn]  # type: ignore[index]

    assert isinstance(crew.turns, Scripted)
    crew.turns.script = script
    return await crew.play(
        EpisodeTask("c", domain, task_index=index, split="train", seed=7, episode=0, record=False),
        lambda _: None,
    )


async def scored(domain: Domain, played: EpisodeResult) -> wire.Trajectory:
    """See below; a worker has a loop of its own, and so a thread."""
    return await asyncio.to_thread(score, domain, played)


def score(domain: Domain, played: EpisodeResult) -> wire.Trajectory:
    """The trajectory as it reaches the learner."""
    rewards: list[RewardConfig] = domain.section.rewards
    group = wire.Group(
        ticket=1, domain=domain.name, task_index=0, min_version=0, hub="h", deliveries=1, pools=["default"],
        trajectories=played.trajectories, prompt=played.prompt, reference=played.reference,
    )  # fmt: skip
    scoring = GroupScoring(group, rewards, 0)
    todo = scoring.start()
    with closing(RewardWorker()) as worker:
        while isinstance(ask := todo.pop(), ScoreAction):
            reward = rewards[ask.reward]
            reply = worker.answer(
                protocol.ScoreRequest(
                    reward.name, reward.args, sample_of(group, group.trajectories[ask.trajectory])
                )
            )
            assert isinstance(reply, protocol.ScoreReply), reply
            assert reply.value is not None
            todo += scoring.scored(ask, Scored(reply.value, reply.notes))
    assert isinstance(ask, ForwardAction)
    return ask.group.trajectories[-1]


def test_the_page_has_the_files_and_their_commands() -> None:
    assert list(FILES) == [
        "my_env.py",
        "my_reward.py",
        "guess.yaml",
        "my_lengths.py",
        "sums.jsonl",
        "sums.yaml",
    ]
    commands = re.findall(
        r"^    rlearner ([^#\n]*)", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [make_parser().parse_args(line.split()).command for line in commands] == [
        "check",
        "up",
        "show",
        "audit",
    ]


@pytest.mark.parametrize("name", ["guess.yaml", "sums.yaml"])
def test_both_configurations_pass_the_check(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (len(lines), lines[-1]) == (11, "ok")
    assert "groups of 8 episodes" in lines[5]


def test_the_estimators_of_lengths_predict() -> None:
    by_prompt = load_estimator("guess", "./my_lengths.py:by_prompt", {"factor": 0.25})()
    assert by_prompt.predict(UpcomingTurn([5] * 40, 64)) == 10
    last = load_estimator("guess", "./my_lengths.py:LastOfTask", {})()
    last.observe(UpcomingTurn([5], 64, task=3), 12)
    assert [last.predict(UpcomingTurn([5], 64, task=task)) for task in (3, 4)] == [12, None]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("./my_lengths.py:by_prompt", None),
        ("./my_lengths.py:LastOfTask", None),
        ("./my_lengths.py:Other", "no 'Other'"),
    ],
)
def test_a_configuration_names_an_estimator(
    name: str, says: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "sums.yaml", f"domains.sums.length_estimator={name}"]) == (
        2 if says else 0
    )
    if says:
        line = "error: domains.sums.length_estimator: './my_lengths.py:Other' is not allowed; "
        assert capsys.readouterr().err == f"{line}./my_lengths.py has {says}\n"


def test_paths_are_relative_to_the_working_folder_or_to_the_file(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert main(["check", "../guess.yaml"]) == 2
    line = (
        f"error: domains.guess.env: './my_env.py:Guess' is not allowed; there is no file my_env.py in "
        f"{here / 'elsewhere'}\n"
    )
    assert capsys.readouterr().err == line
    (here / "guess.yaml").write_text(FILES["guess.yaml"].replace("./my_", "${here}/my_"))
    assert main(["check", "../guess.yaml"]) == 0


async def test_the_game_is_played_in_a_process_and_scored(crew: EpisodeRunners) -> None:
    domain = load_domains(RunSettings.of_config(validate(load("guess.yaml"))))["guess"]
    secret = random.Random("train 0").randint(0, 9)
    other = (secret + 1) % 10
    right = await play(crew, domain, {0: "no", 1: str(other), 2: str(secret)})
    shown = crew.tokenizer.decode(right.trajectory.token_ids.array().tolist())
    assert "A number from 0 to 9?" in shown
    assert "A number!" in shown
    assert ("Lower." if other > secret else "Higher.") in shown
    assert right.trajectory.end == "terminated"
    found = await scored(domain, right)
    # 1 of the environment, and half of -0.1 for each of three turns and of 0.1 for the end.
    assert found.success
    assert found.reward == pytest.approx(1.0 + 0.5 * (-0.3 + 0.1))
    assert found.reward_parts == {
        "env": 1.0,
        "quick/turns": pytest.approx(-0.3),
        "quick/done": pytest.approx(0.1),
    }
    wrong = await scored(domain, await play(crew, domain, dict.fromkeys(range(4), str(other))))
    assert not wrong.success
    assert wrong.reward == pytest.approx(0.5 * -0.4)


async def test_a_policy_by_chance_meets_both_ends(crew: EpisodeRunners) -> None:
    config = validate(load("guess.yaml", ["domains.guess.isolation=none"]))
    domain = load_domains(RunSettings.of_config(config))["guess"]
    chance = random.Random(0)
    ends = [(await play(crew, domain, chance, index)).trajectory for index in range(12)]
    assert {one.success for one in ends} == {True, False}
    for one in ends:
        checks.check_trajectory(one)
        assert one.reward == float(one.success)
        assert one.success or len(one.turns) == 4


async def test_a_question_is_a_success_where_the_first_reward_is_one(crew: EpisodeRunners) -> None:
    settings = RunSettings.of_config(validate(load("sums.yaml")))
    assert num_eval_tasks(settings) == 1
    domain = load_domains(settings)["sums"]
    reference = (await play(crew, domain, {0: "?"})).reference
    for said, reward in ((reference, 1.0), ("x", 0.0)):
        found = await scored(domain, await play(crew, domain, {0: said}))
        assert (found.reward, found.success, found.reward_parts) == (
            reward,
            bool(reward),
            {"exact": reward},
        )
