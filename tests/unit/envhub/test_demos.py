"""Demonstrations, replays and the checks before anything starts, without a broker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import envhub_kit
import pytest
from PIL import Image, ImageDraw
from recorded_frames import read_frames

from broker.errors import ConfigError, DataError, UserError
from broker.settings.run_settings import RunSettings
from envhub import cli
from envhub.config import check, data_digests
from envhub.demos import write_demonstrations
from envhub.domain import load_domains
from envhub.envs.base import NotSupported, Observation, StepResult
from envhub.episodes.frames import first_frame, frame
from envhub.episodes.render import (
    FAILED_COLOUR,
    MARGIN_PX,
    SOLVED_COLOUR,
    load_font,
    outcome,
    write_gif,
)
from learner.offline.data import load_examples
from rlearner_text.config import TinyModel
from rlearner_text.incremental_tokenization import Conversation
from rlearner_text.rows.messages import check_messages
from rlearner_text.supervised_masks import encode_supervised
from rlearner_text.tiny import _write_tokenizer, tiny_tokenizer
from rlearner_text.tokenizer import Tokenizer


def config(**changes: Any) -> RunSettings:
    lake = {"env": "frozenlake", "max_turns": 12, "system_prompt": "Cross."}
    return RunSettings.of_config({"domains": {"lake": lake}, **changes})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_demonstrations_are_conversations_of_the_hubs_own_prompts(tmp_path: Path) -> None:
    out = tmp_path / "sub" / "demos.jsonl"
    assert (
        write_demonstrations(config(), "lake", episodes=5, noise=0.0, out=str(out), seed=1) == 1.0
    )
    rows = lines(out)
    assert len(rows) == 5
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["system"] + ["user", "assistant"] * ((len(roles) - 1) // 2)
        assert row["messages"][0]["content"] == "Cross."
        assert row["messages"][1]["content"].startswith("P")
        assert all(message["content"] in "LDRU" for message in row["messages"][2::2])
    assert len({row["messages"][1]["content"] for row in rows}) > 1


@pytest.mark.parametrize("context", ["full", "steps"])
def test_demonstrations_begin_with_the_examples_that_rollouts_show(
    context: str, tmp_path: Path
) -> None:
    examples = [{"question": "up", "answer": "U"}, {"question": "left", "answer": "L"}]
    lake = {"env": "frozenlake", "max_turns": 12, "system_prompt": "Cross.", "context": context}
    settings = config(domains={"lake": lake | {"examples": examples}})
    write_demonstrations(settings, "lake", episodes=3, noise=0.0, out=str(tmp_path / "demos.jsonl"))
    _write_tokenizer(tmp_path, TinyModel())
    tokenizer = Tokenizer.load(tmp_path)
    opening = load_domains(settings)["lake"].opening
    for row in lines(tmp_path / "demos.jsonl"):
        rollout = Conversation(tokenizer, *opening)
        rollout.observe(row["messages"][5]["content"])
        ids, mask = encode_supervised(tokenizer, check_messages(row["messages"]))
        assert ids[: len(rollout)] == list(rollout.token_ids)
        assert not any(mask[: len(rollout)])
        assert mask[len(rollout) :][:2] == [1, 1]  # one letter, and its end


def test_demonstrations_are_a_function_of_their_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_demonstrations(
            config(), None, episodes=20, noise=0.5, out=str(tmp_path / name), seed=seed
        )
    assert (
        (tmp_path / "a").read_bytes()
        == (tmp_path / "b").read_bytes()
        != (tmp_path / "c").read_bytes()
    )


def test_noise_makes_the_solver_imperfect_and_max_turns_ends_it(tmp_path: Path) -> None:
    out = tmp_path / "demos.jsonl"
    solved = write_demonstrations(config(), "lake", episodes=300, noise=0.5, out=str(out))
    assert 0.3 < solved < 0.65
    assert max(len(row["messages"]) for row in lines(out)) == 1 + 2 * 12


def test_the_command_writes_the_file_and_one_line_about_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demos.jsonl"
    arguments = [
        "demos",
        "configs/quickstart.yaml",
        "--domain",
        "lake",
        "--episodes",
        "3",
        "--noise",
        "0.5",
        "--out",
        str(out),
    ]
    assert cli.main([*arguments, "domains.lake.max_turns=2"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 3
    assert max(len(row["messages"]) for row in lines(out)) <= 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demos", "nowhere.yaml", "--episodes", "3", "--out", "x"], "nowhere.yaml: no such file"),
        (
            [
                "demos",
                "configs/quickstart.yaml",
                "--domain",
                "sea",
                "--episodes",
                "3",
                "--out",
                "x",
            ],
            "--domain: 'sea' is not allowed; one of lake",
        ),
        (
            ["demos", "configs/quickstart.yaml", "--episodes", "3", "--out", "/proc/no/x"],
            "/proc/no/x: ",
        ),
        (
            [
                "demos",
                "configs/quickstart.yaml",
                "--episodes",
                "3",
                "--out",
                "x",
                "domains.lake.env=frozenlak",
            ],
            "domains.lake.env: 'frozenlak' is not allowed; did you mean 'frozenlake'? known: agent, alfworld, ",
        ),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}")
    assert error.count("\n") == 1


def test_an_environment_without_a_solver_demonstrates_nothing(tmp_path: Path) -> None:
    counting = config(domains={"d": {"env": "envhub_kit:Count"}})
    with pytest.raises(ConfigError, match="has no solver"):
        write_demonstrations(counting, "d", episodes=1, noise=0, out=str(tmp_path / "x"))
    assert envhub_kit.Count.__name__ == "Count"


def test_a_replay_is_a_picture_of_each_state(tmp_path: Path) -> None:
    out = tmp_path / "x.gif"
    assert write_gif(config(), "lake", 0, 77, list("RRDDDRLL"), str(out), title="before") == 7
    with Image.open(out) as gif:
        assert (gif.n_frames, gif.size) == (7, (256, 310))
        gif.seek(6)
        assert gif.info["duration"] == 1500


def test_long_captions_are_cut_in_few_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = list[str]()
    measured = list[str]()
    measure = ImageDraw.ImageDraw.textlength
    monkeypatch.setattr(
        ImageDraw.ImageDraw,
        "textlength",
        lambda draw, text: measured.append(text) or measure(draw, text),
    )
    monkeypatch.setattr(
        ImageDraw.ImageDraw, "text", lambda _draw, _place, text, **_: drawn.append(text)
    )
    out = str(tmp_path / "x.gif")
    assert write_gif(config(), "lake", 0, 77, ["i" * 2000], out, title="two\nlines → ü") == 2
    assert len(measured) < 40
    assert drawn[:3] == ["two lines → ü", "start", ""]
    action = drawn[4]
    assert action == f"turn 1: {'i' * (len(action) - 11)}..."
    draw = ImageDraw.Draw(Image.new("L", (1, 1)))
    draw.font = load_font()
    limit_px = 256 - 2 * MARGIN_PX
    assert draw.textlength(action) <= limit_px < draw.textlength(action.replace("...", "i..."))


@pytest.mark.parametrize(
    ("actions", "colours"),
    [
        ("RRRD", ["black"] * 4 + [FAILED_COLOUR]),
        ("RRDDDR", ["black"] * 6 + [SOLVED_COLOUR]),
        ("RR", ["black"] * 2 + [FAILED_COLOUR]),
    ],
)
def test_the_end_has_a_colour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, actions: str, colours: list[str]
) -> None:
    fills: list[str] = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda *_, fill: fills.append(fill))
    write_gif(config(), "lake", 0, 77, list(actions), str(tmp_path / "x.gif"))
    assert fills[2::3] == colours


@pytest.mark.parametrize(
    ("step", "is_last", "said"),
    [
        (
            StepResult(Observation("x"), 0.0, done=False, valid=True, success=False),
            False,
            "reward +0",
        ),
        (
            StepResult(Observation("x"), 0.5, done=False, valid=True, success=False),
            True,
            "reward +0.5, out of turns",
        ),
        (
            StepResult(Observation("x"), -0.1, done=False, valid=False, success=False),
            False,
            "reward -0.1, not a valid action",
        ),
        (
            StepResult(Observation("x"), 0.99, done=True, valid=True, success=True),
            True,
            "reward +0.99, solved",
        ),
        (
            StepResult(Observation("x"), 0.0, done=True, valid=True, success=False),
            False,
            "reward +0, failed",
        ),
    ],
)
def test_the_caption_says_what_came_of_an_action(
    step: StepResult, is_last: bool, said: str
) -> None:
    assert outcome(step, is_last=is_last) == said


def test_an_environment_without_pictures_is_not_even_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envhub_kit.Count, "__init__", lambda *_: pytest.fail("it was built"))
    with pytest.raises(NotSupported, match="environment Count draws no pictures"):
        write_gif(
            config(domains={"d": {"env": "envhub_kit:Count"}}),
            "d",
            0,
            1,
            [],
            str(tmp_path / "x.gif"),
        )


def test_the_render_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.gif"
    arguments = [
        "render",
        "configs/quickstart.yaml",
        "--domain",
        "lake",
        "--task-index",
        "0",
        "--seed",
        "77",
        "--out",
        str(out),
    ]
    assert cli.main([*arguments, "--actions", "R,oops", "--title", "step 3"]) == 0
    assert json.loads(capsys.readouterr().out)["frames"] == 3
    assert cli.main([*arguments, "--actions", json.dumps(["R", "let me think, D"])]) == 0
    with pytest.raises(SystemExit) as caught:
        cli.main([*arguments, "--actions", "[1]"])
    assert caught.value.code == 2


def test_recorded_frames_read_back() -> None:
    frames = [first_frame(3, "eval", 77, "P\nG"), frame("go, R\n", "S\n*")]
    recorded = read_frames(frames)
    assert (recorded.task_index, recorded.split, recorded.seed, recorded.actions) == (
        3,
        "eval",
        77,
        ["go, R\n"],
    )
    with pytest.raises(UserError, match="no recorded frames"):
        read_frames(["P\nG"])


def test_quickstart_and_frozenlake_pass_the_check() -> None:
    from broker.settings.runspec import load

    for name in ("quickstart", "frozenlake"):
        check(RunSettings.of_config(load(f"configs/{name}.yaml")))


QA = {"env": "qa", "rewards": [{"name": "math"}]}
# Of the generated model's tokens: user, 60 letters, end; assistant, 27 letters, end; user, end;
# assistant.
LONG_EXAMPLES: dict[str, Any] = {
    "env": "frozenlake",
    "examples": [{"question": "U" * 60, "answer": "L" * 29}],
    "max_context_tokens": 97,
    "sampling": {"max_tokens": 4},
}


def test_examples_that_leave_room_pass_the_check() -> None:
    check(config(domains={"d": LONG_EXAMPLES}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"domains": {"d": {"env": "envhub_kit:NoEnvironment"}}},
            "domains.d.env: .*a class that derives from envhub.envs.base.Environment",
        ),
        (
            {"domains": {"d": {"env": "frozenlake", "env_args": {"sise": 4}}}},
            r"domains.d.env_args.sise: 4 is not allowed; unknown key, did you mean 'domains.d.env_args.size'\?",
        ),
        (
            {"domains": {"d": {"env": "frozenlake", "env_args": {"size": "4"}}}},
            "domains.d.env_args.size: '4' is not allowed; input should be a valid integer",
        ),
        (
            {"domains": {"d": {"env": "frozenlake", "env_args": {"size": 99}}}},
            "domains.d.env_args.size: 99 is not allowed",
        ),
        ({"domains": {"d": QA}}, "domains.d.env_args.path: None is not allowed; it must be given"),
        (
            {"domains": {"d": {**QA, "env_args": {"path": "no.jsonl"}}}},
            "domains.d.env_args.path: 'no.jsonl' is not allowed; there is no such file",
        ),
        (
            {"domains": {"d": {"env": "frozenlake", "group_size": 2, "min_group_size": 3}}},
            "domains.d.min_group_size: 3 .* at most group_size, which is 2",
        ),
        (
            {"domains": {"d": {"env": "frozenlake", "max_context_tokens": 256}}},
            "domains.d.sampling.max_tokens: 256 .* less than max_context_tokens",
        ),
        (
            {"domains": {"d": LONG_EXAMPLES | {"max_context_tokens": 96}}},
            "domains.d.max_context_tokens: 96 is not allowed; above 96, the tokens of its system "
            "prompt, tools and examples",
        ),
        (
            {"domains": {"d": LONG_EXAMPLES | {"examples": [], "system_prompt": "U" * 300}}},
            "domains.d.max_context_tokens: 97 is not allowed; above 305, the tokens of its system",
        ),
        (
            {"rollout": {"max_context_tokens": 512}},
            "domains.lake.max_context_tokens: 4096 .* at most rollout.max_context_tokens, which is 512",
        ),
        (
            {"eval": {"every_steps": 5, "tasks": 513}},
            "eval.tasks: 513 is not allowed; at most 512, the held-out tasks of domain lake",
        ),
        (
            {"warm_start": {"steps": 5, "domain": "sea"}},
            "warm_start.domain: 'sea' is not allowed; one of lake",
        ),
        (
            {"domains": {"d": {"env": "envhub_kit:Count"}}, "warm_start": {"steps": 5}},
            "warm_start.domain: 'd' .* has no solver; give warm_start.data",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check(config(**changes))


def test_questions_need_a_reward_and_sound_rows(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n')
    args = {"path": str(path), "eval_share": 0}
    with pytest.raises(ConfigError, match=r"domains\.d\.rewards: .* name at least one reward"):
        check(config(domains={"d": {"env": "qa", "env_args": args}}))
    check(config(domains={"d": {**QA, "env_args": args}}))
    path.write_text('{"question": "q"}\n')
    with pytest.raises(
        DataError, match=r"q\.jsonl:1: no column 'answer'; it has question \(domain d\)"
    ):
        check(config(domains={"d": {**QA, "env_args": {**args, "eval_share": 0.1}}}))


def test_the_digests_name_every_data_file_of_the_run(tmp_path: Path) -> None:
    one, two = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    one.write_text("one")
    two.write_text("two")
    given = config(
        domains={
            "lake": {"env": "frozenlake"},
            "d": {**QA, "env_args": {"path": str(one), "eval_path": str(two)}},
        }
    )
    digests = data_digests(given)
    assert sorted(digests) == [str(one), str(two)]
    assert len(set(digests.values())) == 2
    one.write_text("three")
    assert data_digests(given)[str(one)] != digests[str(one)]


SHOP = Path(__file__).parents[3] / "rlearner" / "new" / "tools" / "environment.py"


def test_tool_calls_are_demonstrated(tmp_path: Path) -> None:
    """Rows in OpenAI's form, whose calls and answers are trained on and results are not."""
    out = tmp_path / "demos.jsonl"
    shop = {"env": f"{SHOP}:Shop", "max_turns": 3}
    run = RunSettings.of_config({"domains": {"shop": shop}})
    assert write_demonstrations(run, None, episodes=20, noise=0.0, out=str(out)) == 1.0
    rows = lines(out)
    for row in rows:
        question, call, result, answer = row["messages"]
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant", "tool", "assistant"]
        (function,) = [each["function"] for each in call["tool_calls"]]
        assert function["arguments"]["item"] in question["content"]
        assert result["content"] == answer["content"]
        assert [tool["function"]["name"] for tool in row["tools"]] == ["count", "price"]
    tokenizer = tiny_tokenizer(TinyModel(vocab="chars"))
    example = load_examples(out, tokenizer, 512)[0]
    trained = [
        token
        for token, is_trained in zip(example.token_ids, example.loss_mask, strict=True)
        if is_trained
    ]
    call, result = rows[0]["messages"][1:3]
    called = json.dumps(call["tool_calls"][0]["function"])
    assert tokenizer.decode(trained) == f"{called}{result['content']}"
    noisy = write_demonstrations(run, None, episodes=200, noise=0.5, out=str(out))
    assert 0.2 < noisy < 0.7


def test_tool_calls_in_context_steps_are_refused(tmp_path: Path) -> None:
    shop = {"env": f"{SHOP}:Shop", "max_turns": 3, "context": "steps"}
    run = RunSettings.of_config({"domains": {"shop": shop}})
    expected = "domains.shop.context: demonstrations of tool calls need whole conversations"
    with pytest.raises(UserError, match=expected):
        write_demonstrations(run, None, episodes=1, noise=0.0, out=str(tmp_path / "out"))
