"""FrozenLake: maps, moves, rewards, solver, pictures."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import ConfigError
from envhub.envs.games import lakes
from envhub.envs.games.frozenlake import FALL_COLOUR, FrozenLake, FrozenLakeArgs


def lake(**kwargs: object) -> FrozenLake:
    return FrozenLake(FrozenLakeArgs(**kwargs))  # type: ignore[arg-type]


def placed(rows: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, **kwargs: object) -> FrozenLake:
    monkeypatch.setattr(lakes, "train_map", lambda *_: rows)
    env = lake(size=len(rows), **kwargs)
    env.reset(0, "train", 0)
    return env


@given(st.integers(0, 10**6), st.integers(0, 10**4), st.sampled_from([4, 5, 8]))
@settings(max_examples=40, deadline=None)
def test_training_maps_are_solvable_reproducible_and_never_held_out(
    seed: int, task_index: int, size: int
) -> None:
    rows = lakes.train_map(size, 0.2, seed, task_index)
    lakes.train_map.cache_clear()
    assert lakes.train_map(size, 0.2, seed, task_index) == rows
    assert [len(row) for row in rows] == [size] * size
    assert rows[0][0] == "S"
    assert rows[-1][-1] == "G"
    assert set("".join(rows)[1:-1]) <= {"F", "H"}
    assert lakes.distances(rows)[0] >= 2 * (size - 1)
    assert not lakes.is_held_out(rows)


def test_held_out_maps_are_at_least_256_different_ones_and_always_the_same() -> None:
    maps = lakes.held_out_maps(4, 0.2)
    lakes.held_out_maps.cache_clear()
    assert lakes.held_out_maps(4, 0.2) == maps
    assert len(set(maps)) == len(maps) >= 256
    assert all(lakes.is_held_out(rows) and lakes.distances(rows)[0] > 0 for rows in maps)


def test_the_first_task_stays_what_it_is() -> None:
    """Frozen, so that evaluations of different releases can be compared."""
    env = lake()
    assert env.reset(0, "eval", 1).text == env.reset(0, "eval", 2).text
    assert env.reset(0, "eval", 0).text == "PFFF\nFFFH\nFFFF\nFFFG"
    assert env.reset(0, "train", 7).text == "PFFF\nFFHF\nFFFF\nFFFG"


def test_distances_by_hand() -> None:
    assert lakes.distances(("SFH", "HFF", "FFG")) == (4, 3, -1, -1, 2, 1, 2, 1, 0)
    assert lakes.best_moves(("SFH", "HFF", "FFG"), 0) == ["R"]
    assert lakes.best_moves(("SFH", "HFF", "FFG"), 4) == ["D", "R"]


def test_a_walk_to_the_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    env = placed(("SF", "HG"), monkeypatch)
    step = env.step("R")
    assert (step.reward, step.done, step.valid, step.success) == (0.0, False, True, False)
    assert step.observation.text == step.observation.anchor == "SP\nHG"
    step = env.step(" down\n")
    assert (step.reward, step.done, step.valid, step.success) == (1.0, True, True, True)
    assert env.text_frame() == "SF\nH*"


def test_a_hole_ends_it_without_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    step = placed(("SF", "HG"), monkeypatch).step("D")
    assert (step.reward, step.done, step.success, step.observation.text) == (
        0.0,
        True,
        False,
        "SF\nXG",
    )


def test_text_that_is_no_move_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    env = placed(("SF", "HG"), monkeypatch, format_penalty=0.25, step_penalty=0.125)
    for text in ("", "RD", "go right", "Ж"):
        step = env.step(text)
        assert (step.reward, step.done, step.valid, step.observation.text) == (
            -0.375,
            False,
            False,
            "PF\nHG",
        )
    assert env.step("l").valid
    assert env.step("R").reward == -0.125
    assert env.step("D").reward == 0.875


def test_the_map_may_be_shown_once_and_then_only_where_the_player_is() -> None:
    env = lake(observe="cell", size=12)
    first = env.reset(0, "eval", 0)
    assert first.text == f"{first.anchor}\n0 0 #FF#"
    assert env.step("nowhere").observation.text == "0 0 #FF#"
    env._cell = 11 * 12 + 10
    step = env.step("nowhere")
    assert step.observation.text.startswith("11 10 ")
    assert step.observation.text.endswith(f"{env.map[11][9]}#G{env.map[10][10]}")
    assert step.observation.anchor == env.text_frame()
    assert env.reset(0, "eval", 0).text == first.text


def test_the_move_may_stand_in_a_tag() -> None:
    env = lake(answer_tag=True)
    assert env.parse("L U <answer>D</answer> then <ANSWER> Right </ANSWER>") == "R"
    assert env.parse("R") is None
    assert env.parse("<answer>no</answer>") is None


def test_slippery_ice_is_seeded() -> None:
    def walk(seed: int) -> list[str]:
        env = lake(is_slippery=True, size=8)
        env.reset(3, "eval", seed)
        return [env.step("R").observation.text for _ in range(10)]

    assert walk(1) == walk(1)
    assert len({tuple(walk(seed)) for seed in range(8)}) > 1


def test_two_lakes_of_one_map_do_not_meet() -> None:
    one, two = lake(), lake()
    one.reset(0, "eval", 0)
    two.reset(0, "eval", 0)
    one.step("R")
    assert one.text_frame() != two.text_frame()


def test_the_solver_is_perfect_without_noise_and_random_with_it() -> None:
    env, rng = lake(), np.random.default_rng(0)
    wins = {0.0: 0, 0.5: 0, 1.0: 0}
    for noise in wins:
        for index in range(200):
            env.reset(index, "train", index)
            wins[noise] += _play(env, rng, noise)
    assert wins[0.0] == 200
    assert 60 < wins[0.5] < 130
    assert wins[1.0] < 20


def _play(env: FrozenLake, rng: np.random.Generator, noise: float) -> bool:
    for _ in range(12):
        step = env.step(env.demonstrate(rng, noise))
        if step.done:
            return step.success
    return False


def test_pictures_follow_the_player(monkeypatch: pytest.MonkeyPatch) -> None:
    env = placed(("SF", "HG"), monkeypatch)
    before = env.render_frame()
    assert before.shape == (128, 128, 3)
    assert before.dtype == np.uint8
    env.step("R")
    after = env.render_frame()
    assert (before[:64, :64] != after[:64, :64]).any()  # it left this cell
    assert (before[:64, 64:] != after[:64, 64:]).any()  # for this one
    assert (before[64:, 64:] == after[64:, 64:]).all()


def test_a_fall_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    env = placed(("SF", "HG"), monkeypatch)
    before = env.render_frame()
    env.step("D")
    after = env.render_frame()
    red = (after == FALL_COLOUR).all(axis=2)
    assert red[64:, :64].sum() > 200
    assert red.sum() == red[64:, :64].sum()
    assert not (before == FALL_COLOUR).all(axis=2).any()


def test_arguments_that_leave_no_maps_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"hole_probability: 0\.99 is not allowed"):
        FrozenLake.check(FrozenLakeArgs(size=8, hole_probability=0.99))
    with pytest.raises(ConfigError, match="hole_probability"):
        FrozenLake.check(FrozenLakeArgs(hole_probability=0.0))


def test_observing_cells_shows_the_map_once_and_then_the_surroundings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = placed(("SFH", "HFF", "FFG"), monkeypatch, observe="cell")
    first = env.reset(0, "train", 0)
    # left edge, hole below, ice to the right, upper edge
    assert first.text == "PFH\nHFF\nFFG\n0 0 #HF#"
    moved = env.step("R").observation
    assert moved.text == "0 1 SFH#"
    assert moved.anchor == "SPH\nHFF\nFFG"
    assert env.step("D").observation.text == "1 1 HFFF"


@given(st.integers(0, 10**6), st.lists(st.sampled_from("LDRU"), min_size=1, max_size=15))
@settings(max_examples=60, deadline=None)
def test_moves_on_firm_ice_are_those_of_gymnasium(seed: int, moves: list[str]) -> None:
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

    env = lake()
    env.reset(0, "train", seed)
    peer = FrozenLakeEnv(desc=list(env.map), is_slippery=False)
    assert peer.reset(seed=seed)[0] == env._cell
    for move in moves:
        cell, gained, done, _, _ = peer.step(lakes.LETTERS.index(move))
        mine = env.step(move)
        assert (env._cell, mine.reward, mine.done) == (cell, gained, done)
        assert env._lake.lastaction == peer.lastaction
        if done:
            break
