"""Sokoban: rules and rewards, generated levels, level files, solver, pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import ConfigError, DataError
from envhub.envs.games import sokoban_levels as levels
from envhub.envs.games.sokoban import PIXELS, Sokoban, SokobanArgs
from envhub.envs.games.sokoban_board import (
    LETTERS,
    XSB,
    SokobanLevel,
    draw,
    move,
    push_distances,
    reachable,
)
from envhub.envs.games.sokoban_solver import solve

ROOM = "#######\n#@ $ .#\n#  #  #\n#######"  # the player at row 1, column 1; two more cells below
TWO = "########\n#@$ . .#\n#      #\n#  $   #\n#      #\n########"


def written(folder: Path, *texts: str) -> str:
    file = folder / "levels.txt"
    file.write_text("".join(f"; {number}\n{text}\n\n" for number, text in enumerate(texts)))
    return str(file)


def level(folder: Path, text: str) -> SokobanLevel:
    levels.read_levels.cache_clear()
    return levels.read_levels(written(folder, text))[0]


def placed(folder: Path, text: str, **kwargs: object) -> Sokoban:
    """The level, on its first training turn; another one is held out."""
    levels.read_levels.cache_clear()
    file = written(folder, text, "#####\n#@$.#\n#####")
    args = SokobanArgs(path=file, **kwargs)  # type: ignore[arg-type]
    Sokoban.check(args)
    env = Sokoban(args)
    env.reset(0, "train", 0)
    return env


def play(start: SokobanLevel, letters: str) -> tuple[int, int]:
    state = (start.player, start.boxes)
    for letter in letters:
        state = move(start.room, *state, LETTERS.index(letter))
    return state


def test_a_game_by_hand_has_the_rewards_of_gym_sokoban(tmp_path: Path) -> None:
    env = placed(tmp_path, ROOM, vocab="xsb")
    assert env.text_frame() == ROOM
    right = env.step("R")
    assert (right.reward, right.done, right.valid, right.success) == (-0.1, False, True, False)
    assert (
        right.observation.text == right.observation.anchor == "#######\n# @$ .#\n#  #  #\n#######"
    )
    wall = env.step(" up\n")
    assert (wall.reward, wall.valid, wall.metrics) == (
        -0.1,
        True,
        {"boxes_on_target": 0.0, "effective_moves": 0.5},
    )
    assert env.step("right").observation.text == "#######\n#  @$.#\n#  #  #\n#######"
    solved = env.step("R")
    assert (solved.reward, solved.done, solved.success) == (pytest.approx(10.9), True, True)
    assert env.text_frame() == "#######\n#   @*#\n#  #  #\n#######"
    assert solved.metrics == {"boxes_on_target": 1.0, "effective_moves": 0.75}


def test_a_box_pushed_off_its_target_costs_what_it_gave(tmp_path: Path) -> None:
    env = placed(tmp_path, TWO, vocab="xsb", step_penalty=0.0, box_reward=2.0)
    assert [env.step("R").reward for _ in range(3)] == [0.0, 2.0, -2.0]
    # then against a box that stands at the wall
    assert [env.step("R").reward for _ in range(2)] == [2.0, 0.0]
    assert env.text_frame().splitlines()[1] == "#   .@*#"


def test_text_that_is_no_move_moves_nothing(tmp_path: Path) -> None:
    env = placed(tmp_path, ROOM, vocab="xsb", format_penalty=0.25)
    for text in ("", "RR", "go right", "Ж"):
        step = env.step(text)
        assert (step.reward, step.done, step.valid, step.observation.text) == (
            -0.35,
            False,
            False,
            ROOM,
        )
    tagged = placed(tmp_path, ROOM, answer_tag=True)
    assert not tagged.step("R").valid
    assert (
        tagged.step("L <answer>D</answer> then <ANSWER> Right </ANSWER>").metrics["effective_moves"]
        == 0.5
    )


def test_the_difficulties_differ_in_size_boxes_and_characters() -> None:
    shown = {}
    for difficulty in ("simple", "larger", "different_vocab"):
        env = Sokoban(SokobanArgs.model_validate({"difficulty": difficulty}))
        shown[difficulty] = env.reset(3, "eval", 0).text
    assert [len(shown[name].split("\n")) for name in shown] == [6, 8, 6]
    assert [
        shown["simple"].count("X"),
        shown["larger"].count("X"),
        shown["different_vocab"].count("B"),
    ] == [1, 2, 1]
    assert shown["different_vocab"] == shown["simple"].translate(
        str.maketrans("#_O*XPS", "W.GCBA@")
    )
    bare = Sokoban(SokobanArgs(border=False)).reset(3, "eval", 0).text
    assert bare == "\n".join(row[1:-1] for row in shown["simple"].split("\n")[1:-1])


def test_the_map_may_be_shown_once_and_then_places(tmp_path: Path) -> None:
    env = placed(tmp_path, TWO, observe="cells")
    assert env.reset(0, "train", 0).text.split("\n")[-1] == "00 #_X# 01 22 03 05"
    step = env.step("R")
    assert step.observation.text == "01 __X# 02 22 03 05"
    assert step.observation.anchor == env.text_frame()


def test_ways_may_be_told_in_place_of_a_map(tmp_path: Path) -> None:
    env = placed(tmp_path, TWO, observe="ways")
    assert env.reset(0, "train", 0).text == "#_X# R1 P__# R2 D2R2 ____ U2R1"
    step = env.step("R")
    assert step.observation.text == "__X# R1 P_O# R1 D2R1 ____ U2R1"
    assert step.observation.anchor == env.text_frame()


@given(st.integers(0, 10**6), st.integers(0, 10**4), st.sampled_from([(6, 1), (8, 2), (7, 3)]))
@settings(max_examples=25, deadline=None)
def test_generated_levels_are_solvable_reproducible_and_never_held_out(
    seed: int, task_index: int, shape: tuple[int, int]
) -> None:
    made = levels.train_level(*shape, 20, None, seed, task_index)
    levels.train_level.cache_clear()
    assert levels.train_level(*shape, 20, None, seed, task_index) == made
    assert not levels.is_held_out(made.room)
    assert made.boxes.bit_count() == made.room.targets.bit_count() == shape[1]
    assert not made.boxes & (made.room.targets | 1 << made.player)
    solution = solve(made.room, made.player, made.boxes)
    assert solution is not None
    assert play(made, solution)[1] == made.room.targets


def test_held_out_levels_are_512_different_ones_and_never_long_where_that_is_asked() -> None:
    there = levels.held_out_levels(6, 1, 30, 10)
    levels.held_out_levels.cache_clear()
    assert levels.held_out_levels(6, 1, 30, 10) == there
    assert len(set(there)) == len(there) == 512
    lengths = [len(solve(one.room, one.player, one.boxes) or "x" * 99) for one in there]
    assert max(lengths) == 10
    assert all(levels.is_held_out(one.room) for one in there)


def test_the_first_task_stays_what_it_is() -> None:
    """Frozen, so that evaluations of different releases can be compared."""
    env = Sokoban(SokobanArgs())
    assert (
        env.reset(0, "eval", 1).text
        == env.reset(0, "eval", 2).text
        == "######\n#O___#\n#__X_#\n##___#\n#_P#_#\n######"
    )


@given(st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_solutions_are_shortest_ones(seed: int) -> None:
    """Against a breadth-first search over single moves."""
    made = levels.train_level(6, 2, 8, None, seed, 0)
    start = (made.player, made.boxes)
    far, frontier = {start: 0}, [start]
    for state in frontier:
        if state[1] == made.room.targets:
            break
        for direction in range(4):
            following = move(made.room, *state, direction)
            if following not in far:
                far[following] = far[state] + 1
                frontier.append(following)
    assert len(solve(made.room, *start) or "") == far[state]


def test_the_solver_gives_up_where_a_box_is_lost_or_the_states_run_out(tmp_path: Path) -> None:
    lost = level(tmp_path, "######\n#@  $#\n#   .#\n#    #\n######")
    # only along the target's row, for there is no room behind other cells
    assert push_distances(lost.room) == {16: 0, 15: 1, 14: 2}
    assert solve(lost.room, lost.player, lost.boxes) is None
    blocked = level(tmp_path, "#######\n#@ $$ #\n#  $$ #\n#..   #\n#..   #\n#######")
    assert solve(blocked.room, blocked.player, blocked.boxes) is None
    made = levels.train_level(8, 2, 30, None, 1, 1)
    assert solve(made.room, made.player, made.boxes, 1) is None


def test_the_demonstrator_solves_everything_without_noise_and_little_with_it() -> None:
    env, rng = Sokoban(SokobanArgs(max_solution=20)), np.random.default_rng(0)
    wins = {0.0: 0, 0.5: 0, 1.0: 0}
    for noise in wins:
        for index in range(60):
            env.reset(index, "train", index)
            wins[noise] += any(env.step(env.demonstrate(rng, noise)).done for _ in range(20))
    assert wins[0.0] == 60
    assert wins[0.0] > wins[0.5] > wins[1.0]


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("#####\n#@$.#\n####", 4, "a row of 4 characters in a level of 5"),
        ("#####\n#@$x#\n#####", 3, "'x' is none of"),
        ("#####\n#@$. \n#####", 3, "the outermost cells"),
        ("#####\n#@$.#\n## ##", 4, "the outermost cells"),
        ("#####\n# $.#\n#####", 2, "0 players"),
        ("######\n#@$.@#\n######", 2, "2 players"),
        ("######\n#@$  #\n######", 2, "1 boxes and 0 targets"),
        ("#####\n#@ *#\n#####", 2, "solved already"),
    ],
)
def test_malformed_levels_are_named_by_file_and_line(
    tmp_path: Path, text: str, line: int, problem: str
) -> None:
    file = written(tmp_path, text)
    levels.read_levels.cache_clear()
    with pytest.raises(DataError) as caught:
        levels.read_levels(file)
    assert str(caught.value).startswith(f"{file}:{line}: ")
    assert problem in str(caught.value)


def test_files_of_levels_in_a_folder_are_split_without_repeats(tmp_path: Path) -> None:
    one, other, third = ROOM, "#####\n#@$.#\n#####", "######\n#@ $.#\n######"
    for name, texts in (("000.txt", (one, other)), ("001.txt", (third, other))):
        (tmp_path / name).write_text("\n".join(f"; {n}\n{text}" for n, text in enumerate(texts)))
    levels.read_levels.cache_clear()
    args = SokobanArgs(path=str(tmp_path), eval_share=0.25, vocab="xsb")
    Sokoban.check(args)
    # what is held out stands twice in the files
    assert (Sokoban.num_tasks(args, "train"), Sokoban.num_tasks(args, "eval")) == (2, 1)
    assert Sokoban.data_files(args) == [str(tmp_path / "000.txt"), str(tmp_path / "001.txt")]
    env = Sokoban(args)
    assert [env.reset(index, "train", 0).text for index in range(3)] == [one, third, one]
    assert env.reset(5, "eval", 0).text == other


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, ROOM)
    for args, key in (
        ({"path": str(tmp_path / "none.txt")}, "path"),
        ({"path": file, "boxes": 2}, "boxes"),
        ({"path": file}, "eval_share"),
        ({"path": file, "eval_path": "none.txt"}, "eval_path"),
        ({"eval_path": file}, "eval_path"),
        ({"boxes": 6, "size": 5}, "boxes"),
    ):
        with pytest.raises(ConfigError) as caught:
            Sokoban.check(SokobanArgs.model_validate(args))
        assert caught.value.key == key


def test_pictures_show_what_stands_where(tmp_path: Path) -> None:
    env = placed(tmp_path, ROOM)
    before = env.render_frame()
    assert (before.shape, before.dtype) == ((4 * PIXELS, 7 * PIXELS, 3), np.uint8)
    env.step("R")
    changed = (
        (env.render_frame() != before).any(axis=2).reshape(4, PIXELS, 7, PIXELS).any(axis=(1, 3))
    )
    assert [tuple(cell) for cell in np.argwhere(changed)] == [(1, 1), (1, 2)]


def test_cells_are_drawn_by_kind_and_walks_stop_at_boxes(tmp_path: Path) -> None:
    made = level(tmp_path, "#######\n#+ $ *#\n#######")
    assert draw(made.room, made.player, made.boxes, XSB, True) == "#######\n#+ $ *#\n#######"
    assert reachable(made.room, made.boxes, made.player) == 1 << 8 | 1 << 9
