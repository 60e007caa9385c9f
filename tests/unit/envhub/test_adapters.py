"""Environments of other libraries: gymnasium itself; the others' documented interfaces as small
doubles, for they are extras.
"""

from __future__ import annotations

import random
import sys
import types
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from broker.errors import ConfigError, NotInstalled
from envhub.envs.adapters.foreign import seed_of
from envhub.envs.adapters.gem_env import GemArgs, GemEnv
from envhub.envs.adapters.gymnasium_env import GymnasiumArgs, GymnasiumEnv, plain
from envhub.envs.adapters.reasoning_gym_env import ReasoningGymArgs, ReasoningGymEnv
from envhub.envs.adapters.textarena_env import TextArenaArgs, TextArenaEnv

LAKE = {
    "id": "FrozenLake-v1",
    "make_args": {"is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}


def gym(**args: Any) -> GymnasiumEnv:
    return GymnasiumEnv(GymnasiumArgs(**{**LAKE, **args}))


def install(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def test_seeds_keep_evaluation_apart_from_training() -> None:
    train = {seed_of(index, "train", seed) for index in range(50) for seed in range(4)}
    held_out = {seed_of(index, "eval", seed) for index in range(50) for seed in range(4)}
    assert (len(train), len(held_out)) == (200, 50)
    assert all(seed % 2 for seed in train)
    assert not any(seed % 2 for seed in held_out)
    assert max(train | held_out) < 1 << 31


# -------------------------------------------------------------------------------------------------
# gymnasium


def test_a_gymnasium_environment_is_played_by_names_of_actions() -> None:
    env = gym(anchors=True, format_penalty=0.5, success_return=1.0)
    seen = env.reset(0, "train", 0)
    assert (seen.text, seen.anchor) == ("0", "0")
    nothing = env.step("fly")
    assert (nothing.reward, nothing.done, nothing.valid, nothing.observation.text) == (
        -0.5,
        False,
        False,
        "0",
    )
    steps = [env.step(word) for word in ("down", " Down\n", "RIGHT", "right", "down", "right")]
    assert [step.observation.text for step in steps] == ["4", "8", "9", "10", "14", "15"]
    assert [(step.reward, step.done, step.success) for step in steps] == [
        (0.0, False, False)
    ] * 5 + [(1.0, True, True)]
    env.close()


def test_observations_become_text_by_a_function_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "say.py"
    file.write_text(
        "def say(observation, environment):\n    return f'cell {observation} of {environment.observation_space.n}'\n"
    )
    env = gym(observe=f"{file}:say", answer_tag=True, actions=[])
    assert env.reset(0, "eval", 0).text == "cell 0 of 16"
    assert (
        env.step("I go <answer>1</answer>").observation.text == env.text_frame() == "cell 4 of 16"
    )
    assert not env.step("1").valid
    env.close()


def test_a_time_limit_truncates_without_success() -> None:
    env = gym(make_args={"max_episode_steps": 2}, success_return=0.5)
    env.reset(0, "train", 0)
    assert not env.step("left").done
    last = env.step("left")
    assert (last.done, last.truncated, last.success) == (True, True, False)
    env.close()


class Echo(gymnasium.Env[str, str]):
    """Texts for observations and actions; says in ``info`` whether it went well."""

    observation_space = gymnasium.spaces.Text(20)
    action_space = gymnasium.spaces.Text(5)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.word = str(self.np_random.integers(10**5))
        return self.word, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"you said {action}", 1.0, True, False, {"is_success": action == self.word}


def test_actions_and_observations_may_be_texts() -> None:
    gymnasium.register("Echo-v0", entry_point=Echo)
    env = gym(id="Echo-v0", make_args={}, actions=[])
    word = env.reset(1, "train", 1).text
    assert word == env.reset(1, "train", 1).text != env.reset(2, "train", 1).text
    assert not env.step("much too long").valid
    assert not env.step(word).success  # that was another task's
    word = env.reset(1, "train", 1).text
    assert env.step(f" {word} ").success
    env.close()
    del gymnasium.registry["Echo-v0"]


def test_numbers_are_written_with_four_digits() -> None:
    assert plain((12, 3.14159), None) == "12\n3.142"
    assert (
        plain({"board": [[1, 0], [0, 2]], "turn": "white"}, None) == "board: 1 0\n0 2\nturn: white"
    )


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"id": "NoSuchLake-v0"}, "id"),
        ({"make_args": {"nonsense": 1}}, "id"),
        ({"actions": ["left", "right"]}, "actions"),
        ({"actions": ["left", "Left", "right", "up"]}, "actions"),
        ({"id": "Pendulum-v1", "make_args": {}}, "id"),
        ({"observe": "no.such.module:say"}, "observe"),
    ],
)
def test_what_gymnasium_cannot_make_is_refused(args: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GymnasiumEnv.check(GymnasiumArgs(**{**LAKE, **args}))
    assert caught.value.key == key


# -------------------------------------------------------------------------------------------------------
# GEM


class Guess:
    """As gem.core.Env: texts in and out, a seed for reset, the next question's line in ``info``."""

    def __init__(self, top: int) -> None:
        self.top = top

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.number = random.Random(seed).randint(1, self.top)
        return f"A number up to {self.top}.", {"suffix": "Guess."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == str(self.number):
            return "Yes.", 1.0, True, False, {}
        return "No.", -0.1, False, False, {"suffix": "Again."}


def make_guess(env_id: str, **args: Any) -> Guess:
    if env_id != "game:Guess-v0":
        raise ValueError(f"Environment {env_id} not found in registry.")
    return Guess(**args)


def test_gem_environments_plug_in_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "gem", make=make_guess)
    install(monkeypatch, "gem.envs")
    args = GemArgs(id="game:Guess-v0", make_args={"top": 5})
    GemEnv.check(args)
    env = GemEnv(args)
    assert env.reset(0, "train", 3).text == "A number up to 5.\nGuess."
    number = env._env.number
    wrong = env.step("0")
    assert (wrong.reward, wrong.done, wrong.success, wrong.observation.text) == (
        -0.1,
        False,
        False,
        "No.\nAgain.",
    )
    right = env.step(str(number))
    assert (right.reward, right.done, right.success, right.observation.text) == (
        1.0,
        True,
        True,
        "Yes.",
    )
    for bad in (GemArgs(id="game:None"), GemArgs(id="game:Guess-v0", make_args={"bottom": 1})):
        with pytest.raises(ConfigError, match=r"gem\.make makes"):
            GemEnv.check(bad)


# -------------------------------------------------------------------------------------------------
# TextArena


class Game:
    """As textarena.Env under its default wrapper, which repeats the whole game: count down from 3
    in turn; who says 0 wins.
    """

    def __init__(self, start: int = 3) -> None:
        self.start = start

    def reset(self, num_players: int, seed: int) -> None:
        self.players, self.left, self.told = (
            num_players,
            self.start,
            [f"[GAME] Count down from {self.start}."],
        )
        roles = {player: f"Player {player}" for player in range(num_players)}
        self.state = types.SimpleNamespace(current_player_id=0, error_count=0, role_mapping=roles)

    def get_observation(self) -> tuple[int, str]:
        return self.state.current_player_id, "\n" + "\n".join(self.told)

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.told.append(f"[Player {self.state.current_player_id}] {action}")
        if action != str(self.left - 1):
            self.state.error_count += 1
            self.told.append("[GAME] Invalid.")
            return False, {}
        self.state.error_count, self.left = 0, self.left - 1
        self.told.append(f"[GAME] {self.left} left.")
        if not self.left:
            return True, {}
        self.state.current_player_id = (self.state.current_player_id + 1) % self.players
        return False, {}

    def close(self) -> tuple[dict[int, int], dict[int, dict[str, Any]]]:
        winner = self.state.current_player_id
        return {player: 1 if player == winner else -1 for player in range(self.players)}, {
            winner: {"reason": "It is over."}
        }


def test_a_textarena_game_is_played_and_only_what_is_new_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "textarena", make=lambda env_id, **args: Game(**args))
    TextArenaEnv.check(TextArenaArgs(id="Down-v0"))
    env = TextArenaEnv(TextArenaArgs(id="Down-v0", make_args={"start": 2}))
    assert env.reset(0, "train", 0).text == "[GAME] Count down from 2."
    wrong = env.step("5")
    assert (wrong.valid, wrong.done, wrong.observation.text) == (False, False, "[GAME] Invalid.")
    assert env.step("1").observation.text == "[GAME] 1 left."
    last = env.step("0")
    assert (last.valid, last.done, last.reward, last.success, last.observation.text) == (
        True,
        True,
        1.0,
        True,
        "It is over.",
    )


def test_other_seats_are_played_by_an_opponent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, "textarena", make=lambda env_id, **args: Game(**args))
    file = tmp_path / "them.py"
    file.write_text(
        "def play(seen, rng):\n    return str(int(seen.split('left.')[-2].split()[-1]) - 1) if 'left' in seen else "
        "'2'\n"
    )
    env = TextArenaEnv(TextArenaArgs(id="Down-v0", num_players=2, seat=1, opponent=f"{file}:play"))
    assert (
        env.reset(0, "train", 0).text == "[GAME] Count down from 3.\n[Player 0] 2\n[GAME] 2 left."
    )
    lost = env.step("1")  # and the opponent says 0
    assert (lost.done, lost.valid, lost.reward, lost.success) == (True, True, -1.0, False)
    with pytest.raises(ConfigError) as caught:
        TextArenaEnv.check(TextArenaArgs(id="Down-v0", seat=1))
    assert caught.value.key == "seat"


def test_players_without_an_opponent_are_seats(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "textarena", make=lambda env_id, **args: Game(**args))
    args = TextArenaArgs(id="Down-v0", num_players=2)
    TextArenaEnv.check(args)
    assert TextArenaEnv.seats(args) == ("player_0", "player_1")
    assert TextArenaEnv.seats(TextArenaArgs(id="Down-v0")) == ()
    env = TextArenaEnv(args)
    first = env.reset(0, "train", 0)
    assert (first.seat, first.text) == ("player_0", "[GAME] Count down from 3.")
    second = env.step("2").observation
    assert (second.seat, second.text) == (
        "player_1",
        "[GAME] Count down from 3.\n[Player 0] 2\n[GAME] 2 left.",
    )
    # a player that has seen the beginning gets what is new
    third = env.step("1").observation
    assert (third.seat, third.text.split("\n")[-1]) == ("player_0", "[GAME] 1 left.")
    assert "Count down" not in third.text
    end = env.step("0")
    assert end.seat_rewards == {"player_0": 1.0, "player_1": -1.0}
    assert end.seat_successes == ("player_0",)


# ---------------------------------------------------------------------------------------------
# reasoning-gym


class Sums:
    """As reasoning_gym's ProceduralDataset: entries by index, scores of its own."""

    def __init__(self, seed: int, size: int, top: int = 10**6) -> None:
        self.seed, self.size, self.top = seed, size, top

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert 0 <= index < self.size
        number = random.Random(self.seed + index).randrange(self.top)
        return {"question": f"{number} + 1 = ?", "answer": str(number + 1), "metadata": {}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return 1.0 if answer == entry["answer"] else 0.5 if entry["answer"] in answer else 0.0


def create_dataset(name: str, **args: Any) -> Sums:
    if name != "sums":
        raise ValueError(f"Dataset '{name}' not registered")
    return Sums(**args)


def test_reasoning_gym_questions_are_scored_by_their_data_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "reasoning_gym", create_dataset=create_dataset)
    args = ReasoningGymArgs(
        dataset="sums", size=500, eval_size=40, dataset_seed=77, answer_tag=True
    )
    ReasoningGymEnv.check(args)
    assert (ReasoningGymEnv.num_tasks(args, "train"), ReasoningGymEnv.num_tasks(args, "eval")) == (
        500,
        40,
    )
    env = ReasoningGymEnv(args)
    assert env.reset(3, "train", 0).text == env.reset(503, "train", 9).text == env.prompt
    right = env.step(f"so <answer> {env.reference} </answer>")
    assert (right.reward, right.done, right.valid, right.success) == (1.0, True, True, True)
    half = env.step(f"<answer>perhaps {env.reference}</answer>")
    assert (half.reward, half.success) == (0.5, False)
    none = env.step(env.reference)
    assert (none.reward, none.valid) == (0.0, False)


def test_training_passes_over_questions_of_the_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "reasoning_gym", create_dataset=create_dataset)
    args = ReasoningGymArgs(
        dataset="sums", dataset_args={"top": 60}, size=300, eval_size=30, dataset_seed=5
    )
    env = ReasoningGymEnv(args)
    held_out = {env.reset(index, "eval", 0).text for index in range(30)}
    seen = {env.reset(index, "train", 0).text for index in range(300)}
    assert len(seen) > 20
    assert not seen & held_out
    for bad in (
        {"dataset": "nonsums"},
        {"dataset_args": {"bottom": 1}},
        {"dataset_args": {"top": 3}},
    ):
        with pytest.raises(ConfigError):
            ReasoningGymEnv.check(
                ReasoningGymArgs.model_validate({"dataset": "sums", "dataset_seed": 6, **bad})
            )


@pytest.mark.parametrize(
    ("module", "env", "args", "install"),
    [
        ("gem.envs", GemEnv, GemArgs(id="x"), r"pip install 'rlearner\[gem\]'.*--no-deps gem-llm"),
        ("textarena", TextArenaEnv, TextArenaArgs(id="x"), r"pip install 'rlearner\[textarena\]'"),
        (
            "reasoning_gym",
            ReasoningGymEnv,
            ReasoningGymArgs(dataset="x", dataset_seed=99),
            r"pip install 'rlearner\[reasoning-gym\]'",
        ),
    ],
)
def test_a_missing_library_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, module: str, env: Any, args: Any, install: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NotInstalled, match=install) as caught:
        env.check(args)
    assert "\n" not in str(caught.value)
