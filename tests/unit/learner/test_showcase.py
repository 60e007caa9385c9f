"""Sample texts and pictures for trackers: what is shown, when, and what happens where there is
nothing to show.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.support import made_up_hub
from broker.contract import wire
from broker.settings.schema.model import ModelSection
from learner.config import TrackersSection
from learner.reporting.showcase import EpisodeShowcase
from learner.reporting.trackers import TrackerGroup
from learner.reporting.transcripts import Transcript, TranscriptFactory
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny
from rlearner_text.tokenizer import Tokenizer


class Kept:
    """A tracker that remembers what it is given."""

    def __init__(self, *_: object) -> None:
        self.texts_of: list[tuple[int, dict[str, str]]] = []
        self.pictures: list[tuple[int, str, bytes]] = []
        self.tables: list[tuple[int, str, list[str], list[tuple[Any, ...]]]] = []
        made.append(self)

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def texts(self, step: int, texts: dict[str, str]) -> None:
        self.texts_of.append((step, dict(texts)))

    def picture(self, step: int, name: str, gif: bytes) -> None:
        self.pictures.append((step, name, gif))

    def table(self, step: int, name: str, columns: list[str], rows: list[tuple[Any, ...]]) -> None:
        self.tables.append((step, name, list(columns), rows))

    def close(self) -> None: ...


made: list[Kept] = []


def showcase(folder: Path, **settings: Any) -> tuple[EpisodeShowcase, Kept]:
    section = TrackersSection(use=[f"{__name__}:Kept"], **settings)
    trackers = TrackerGroup(section, folder, "demo", {})
    return EpisodeShowcase(
        trackers, section, TranscriptFactory(ModelSection(), folder), folder
    ), made[-1]


def group(number: int) -> wire.Group:
    """Two episodes of five tokens of prompt and three sampled ones."""
    asked: dict[str, Any] = {
        "group_size": 2,
        "min_group_size": 1,
        "deadline_s": 9.0,
        "max_staleness": 1,
    }
    ticket = wire.Ticket(number=number, domain="lake", task_index=7, seed=1, min_version=0, **asked)
    return made_up_hub.group(
        ticket,
        [
            made_up_hub.trajectory(i, range(6, 14), [-1.0] * 3, version=0, reward=float(i))
            for i in range(2)
        ],
    )


def test_a_transcript_is_the_whole_prompt_and_what_followed(tmp_path: Path) -> None:
    model = build_tiny(tmp_path / "model", TinyModel.model_validate({}))
    tokenizer = Tokenizer.load(model)
    prompt, text = tokenizer.encode("S F F H\nwhat now?"), tokenizer.encode("right")
    one = made_up_hub.trajectory(0, [*prompt, *text], [-1.0] * len(text), version=0, reward=1.0)
    assert TranscriptFactory(ModelSection(), tmp_path).of(one) == Transcript(
        "S F F H\nwhat now?", "right", 1.0, success=True
    )


def test_without_a_tokenizer_tokens_are_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = group(1).trajectories[0]
    ids = [str(number) for number in one.token_ids.array().tolist()]
    transcripts = TranscriptFactory(ModelSection(), tmp_path)
    assert [transcripts.of(one).prompt, transcripts.of(one).text] == [
        " ".join(ids[:5]),
        " ".join(ids[5:]),
    ]
    assert caplog.text.count("tokens are shown by their numbers") == 1


def test_markdown_shows_markup_as_it_is() -> None:
    shown = Transcript("<|user|>\n# no heading", "**bold**", 0.5, success=True).markdown("task 3")
    assert (
        shown == "**task 3**: reward 0.5, solved\n\n    <|user|>\n    # no heading\n\n    **bold**"
    )


def test_one_training_episode_of_each_domain_every_n_steps(tmp_path: Path) -> None:
    shows, kept = showcase(tmp_path, texts_every=2)
    shows.accepted(group(3))
    shows.step_completed(1)
    shows.accepted(group(4))
    shows.step_completed(2)
    shows.step_completed(4)  # nothing has come since
    ((step, texts),) = kept.texts_of
    assert (step, list(texts)) == (2, ["samples/lake"])
    assert texts["samples/lake"].startswith("**task 7, ticket 4**: reward 0, not solved\n\n    ")
    ((step, name, columns, rows),) = kept.tables
    assert (step, name) == (2, "trajectories/train")
    assert [dict(zip(columns, row, strict=True)) for row in rows] == [
        {
            "step": 2,
            "domain": "lake",
            "task": 7,
            "episode": i,
            "reward": float(i),
            "success": bool(i),
        }
        | {"prompt": "6 7 8 9 10", "text": "11 12 13"}
        for i in range(2)
    ]


class Texts:
    """A tracker that takes texts, and no tables."""

    def __init__(self, *_: object) -> None:
        self.texts_of: list[dict[str, str]] = []
        plain.append(self)

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def texts(self, step: int, texts: dict[str, str]) -> None:
        self.texts_of.append(dict(texts))

    def close(self) -> None: ...


plain: list[Texts] = []


def test_only_the_shown_episode_is_decoded_without_a_tracker_that_takes_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[float] = []
    of = TranscriptFactory.of

    def noted(self: TranscriptFactory, one: wire.Trajectory) -> Transcript:
        decoded.append(one.reward)
        return of(self, one)

    monkeypatch.setattr(TranscriptFactory, "of", noted)
    section = TrackersSection(use=[f"{__name__}:Texts"], texts_every=1)
    trackers = TrackerGroup(section, tmp_path, "demo", {})
    shows = EpisodeShowcase(
        trackers, section, TranscriptFactory(ModelSection(), tmp_path), tmp_path
    )
    shows.accepted(group(1))
    shows.step_completed(1)
    assert [list(texts) for texts in plain[-1].texts_of] == [["samples/lake"]]
    assert decoded == [0.0]


def row(
    task: int, success: bool, domain: str = "lake", frames: list[str] | None = None
) -> dict[str, Any]:
    texts = {
        "prompt": f"prompt {task}",
        "text": f"answer {task}",
        "response": "",
        "frames": frames or [],
    }
    return {
        "domain": domain,
        "task_index": task,
        "success": [success],
        "reward": [float(success)],
        **texts,
    }


def test_evaluated_episodes_solved_and_not(tmp_path: Path) -> None:
    shows, kept = showcase(tmp_path)
    shows.evaluated(
        4,
        [row(task, success=task > 2) for task in range(6)] + [row(9, success=False, domain="sea")],
    )
    ((step, texts),) = kept.texts_of
    assert (step, sorted(texts)) == (4, ["evaluated/lake", "evaluated/sea"])
    assert [line for line in texts["evaluated/lake"].splitlines() if line.startswith("**")] == [
        "**task 3**: reward 1, solved",
        "**task 4**: reward 1, solved",
        "**task 0**: reward 0, not solved",
        "**task 1**: reward 0, not solved",
    ]
    assert "    prompt 3\n\n    answer 3" in texts["evaluated/lake"]
    ((step, name, columns, rows),) = kept.tables
    assert (step, name) == (4, "trajectories/eval")
    found = [dict(zip(columns, row, strict=True)) for row in rows]
    assert [(one["domain"], one["task"], one["success"]) for one in found] == [
        ("lake", 3, True), ("lake", 4, True), ("lake", 0, False), ("lake", 1, False), ("sea", 9, False)
    ]  # fmt: skip
    assert (found[0]["prompt"], found[0]["text"]) == ("prompt 3", "answer 3")


def test_texts_and_pictures_can_be_turned_off(tmp_path: Path) -> None:
    shows, kept = showcase(tmp_path, texts_every=0, pictures=False)
    shows.accepted(group(3))
    shows.step_completed(10)
    shows.evaluated(4, [row(1, success=True, frames=['{"task_index": 1}'])])
    assert (kept.texts_of, kept.pictures) == ([], [])


def test_an_episode_is_drawn_and_a_domain_without_pictures_asked_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lake = {
        "env": "frozenlake",
        "group_size": 2,
        "max_turns": 4,
        "max_context_tokens": 64,
        "sampling": {"max_tokens": 4},
    }
    domains = {"lake": lake, "sums": {**lake, "env": "number_line"}}
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"run": {"name": "demo"}, "domains": domains})
    )
    frames = [
        json.dumps({"task_index": 1, "split": "eval", "seed": 5, "text": ""}),
        json.dumps({"action": "D", "text": ""}),
    ]
    shows, kept = showcase(tmp_path)
    rows = [
        row(1, success=False, frames=frames),
        row(1, success=False, domain="sums", frames=frames),
    ]
    caplog.set_level("INFO")
    shows.evaluated(4, rows)
    shows.evaluated(8, rows[1:])
    ((step, name, gif),) = kept.pictures
    assert (step, name, gif[:6]) == (4, "episodes/lake", b"GIF89a")
    assert (
        caplog.text.count("no pictures of domain sums: environment NumberLine draws no pictures")
        == 1
    )


def test_frames_of_another_kind_are_no_picture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shows, kept = showcase(tmp_path)
    caplog.set_level("INFO")
    shows.evaluated(4, [row(1, success=False, frames=["a drawing"])])
    assert kept.pictures == []
    assert (
        "no pictures of domain lake: its hub wrote frames of an unknown format: JSONDecodeError"
        in caplog.text
    )
