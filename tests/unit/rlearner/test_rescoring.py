"""``rlearner rescore``: which rewards change, and what is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from bench.support import made_up_hub
from broker.contract import codec, wire
from broker.errors import UserError
from broker.jetstream.bus import LogRecord
from broker.settings.config import DomainSection
from learner.credit import archive
from learner.credit.ledger_file import digest_record
from learner.run_folder import RunPlace
from rewardhub.rescoring import remove_scores
from rlearner.cli import main
from rlearner.ops.rescoring import DomainFigures, changed_config

REWARDS: list[dict[str, Any]] = [
    {"name": "format", "weight": 0.5, "args": {"pattern": "[0-9]+"}},
    {"name": "length", "args": {"max_tokens": 8, "cache_tokens": 4}},
]


def config_of(rows: Path, rewards: list[dict[str, Any]]) -> dict[str, Any]:
    domain = {"env": "qa", "env_args": {"path": str(rows)}, "rewards": rewards}
    return {"run": {"name": "quick", "dir": str(rows.parent)}, "domains": {"math": domain}}


def trajectory(episode: int, response: str, reward: float, *, success: bool) -> wire.Trajectory:
    sampled = made_up_hub.trajectory(
        episode, [7, 8, 9], [-1.0], version=0, reward=reward, success=success
    )
    return msgspec.structs.replace(sampled, response=response, reward_parts={"math_answer": reward})


def scored_group(number: int) -> wire.Group:
    ticket = wire.Ticket(
        number=number,
        domain="math",
        task_index=0,
        seed=0,
        min_version=0,
        max_staleness=0,
        group_size=2,
        min_group_size=2,
        deadline_s=9.0,
    )
    trajectories = [
        trajectory(0, "12", 1.0, success=True),
        trajectory(1, "no", 0.0, success=False),
        trajectory(2, "34", 0.0, success=False),
    ]
    group = made_up_hub.group(ticket, trajectories)
    return msgspec.structs.replace(group, prompt="q", reference="12")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose archive holds two groups."""
    rows = tmp_path / "rows.jsonl"
    lines = (json.dumps({"question": f"q{n}", "answer": "12"}) + "\n" for n in range(9))
    rows.write_text("".join(lines))
    folder = tmp_path / "quick"
    folder.mkdir()
    config = config_of(rows, [{"name": "math_answer"}])
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    writer = archive.SampleArchive(folder / archive.FOLDER, 0, 1 << 30)
    for seq in (1, 2):
        group = scored_group(seq)
        data = codec.encode(group)
        writer.append(LogRecord(seq, group, "", seq, data), digest_record(data))
    writer.close()
    return folder


def test_scores_are_removed_but_not_the_environments_part() -> None:
    section = DomainSection.model_validate({"env": "qa", "rewards": [{"name": "math_answer"}]})
    bare = remove_scores(scored_group(1), section, {"level": 3})
    assert [(t.reward, t.reward_parts, t.success) for t in bare.trajectories] == [
        (0, {}, False)
    ] * 3
    assert (bare.pools, bare.row) == (["default"], {"level": 3})
    group = scored_group(1)
    played = msgspec.structs.replace(
        group.trajectories[0], reward=3.0, reward_parts={"env": 2.0, "math_answer": 1.0}
    )
    group = msgspec.structs.replace(group, trajectories=[played])
    (kept,) = remove_scores(group, section, {}).trajectories
    assert (kept.reward, kept.reward_parts, kept.success) == (2.0, {"env": 2.0}, True)


def test_overrides_by_the_name_of_a_reward(tmp_path: Path) -> None:
    config = config_of(tmp_path / "rows.jsonl", REWARDS)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    place = RunPlace("quick", tmp_path, config)
    changed = changed_config(place, ["reward.length.cache_tokens=2", "reward.format.weight=0.25"])
    rewards = changed["domains"]["math"]["rewards"]
    assert rewards[1]["args"] == {"max_tokens": 8, "cache_tokens": 2}
    assert rewards[0]["weight"] == 0.25
    replaced = changed_config(place, ["domains.math.rewards=[{name: math_answer}]"])
    assert replaced["domains"]["math"]["rewards"] == [{"name": "math_answer"}]
    for override, problem in {
        "reward.judge.weight=1": "the rewards of this run are format, length",
        "reward.length=1": "write reward.NAME.ARG=VALUE",
        "train.lr=1": "reward.NAME.ARG=VALUE or domains.NAME.rewards",
    }.items():
        with pytest.raises(UserError, match=problem):
            changed_config(place, [override])


def test_figures_count_flips() -> None:
    old = scored_group(1)
    turned = [
        msgspec.structs.replace(each, reward=1.0 - each.reward, success=not each.success)
        for each in old.trajectories[:2]
    ]
    new = msgspec.structs.replace(old, trajectories=[*turned, old.trajectories[2]])
    figures = DomainFigures()
    figures.add(old, new)
    figures.divide()
    assert (figures.groups, figures.episodes, figures.gained, figures.lost) == (1, 3, 1, 1)
    assert (figures.old_reward, figures.new_reward) == (0.333333, 0.333333)


def test_archived_groups_are_scored_by_other_rewards(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers alone count now: episodes 0 and 2 of each group."""
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    rewards = "[{name: format, args: {pattern: '[0-9]+'}}]"
    arguments = ["rescore", "quick", "--dir", str(run.parent), f"domains.math.rewards={rewards}"]
    assert main([*arguments, "--workers", "1"]) == 0
    out = run.parent / "quick-rescored-1.jsonl"
    assert capsys.readouterr().out.splitlines() == [
        (
            "math: 2 groups, 6 episodes; mean reward 0.3333 -> 0.6667, success 0.3333 -> 0.6667; "
            "flips: 2 solved now, 0 no longer"
        ),
        f"wrote {out}",
    ]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["ticket"] for row in rows] == [1, 2]
    assert [episode["new"] for episode in rows[0]["episodes"]] == [1.0, 0.0, 1.0]
    assert rows[0]["episodes"][0]["new_parts"] == {"format": 1.0}
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_run_without_records_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "quick"
    folder.mkdir()
    config = config_of(tmp_path / "rows.jsonl", REWARDS)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    arguments = ["rescore", "quick", "--dir", str(tmp_path), "reward.length.cache_tokens=2"]
    assert main(arguments) == 2
    assert "a run keeps them with samples.keep=true" in capsys.readouterr().err
