"""ALFWorld's household games in text (Shridhar et al. 2021, arXiv:2010.03768), run by TextWorld.

The games (https://github.com/alfworld/alfworld) are the files that ``alfworld-download`` fetches,
in the order of their paths; evaluation has its own files. A won game gives ``success_reward`` and
ends. A command that is not admissible is answered by the game and counts as invalid.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from broker.errors import ConfigError, NotInstalled
from broker.settings.config import DataPath, Section
from envhub.envs.adapters.foreign import library
from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.envs.text.answers import tagged

INSTALL: Final = "pip install alfworld, then alfworld-download"
PATHS: Final = {
    "data_path": "train",
    "eval_id_data_path": "valid_seen",
    "eval_ood_data_path": "valid_unseen",
}


class AlfworldArgs(Section):
    """``env_args`` of ``alfworld``."""

    harmless = (
        "task_types", "eval_split", "show_commands", "max_steps", "success_reward",
        "format_penalty", "answer_tag",
    )  # fmt: skip

    # folder with json_2.1.1 in it; None: $ALFWORLD_DATA, else ~/.cache/alfworld
    data: DataPath | None = None
    # as ALFWorld numbers them
    task_types: list[Annotated[int, Field(ge=1, le=6)]] = Field(default=[1, 2, 3, 4, 5, 6])
    # rooms seen in training, or not
    eval_split: Literal["eval_in_distribution", "eval_out_of_distribution"] = (
        "eval_out_of_distribution"
    )
    show_commands: bool = True  # list the admissible commands below each observation
    max_steps: PositiveInt = 50
    success_reward: NonNegativeFloat = 1.0
    # taken from the reward for a command that is not admissible
    format_penalty: NonNegativeFloat = 0.0
    # read the command from the last <answer>…</answer> instead of the whole text
    answer_tag: bool = False


class AlfworldEnv(Environment):
    """One game at a time."""

    Args = AlfworldArgs

    args: AlfworldArgs

    def __init__(self, args: AlfworldArgs) -> None:
        super().__init__(args)
        self._game: Any = None
        self._commands: list[str] = []
        self._turns = 0
        self._shown = ""

    @classmethod
    def check(cls, args: AlfworldArgs) -> None:
        for split in ("train", "eval"):
            if not _split_files(args, split):
                allowed = f"a folder of ALFWorld's games; it has none for {split}; {INSTALL}"
                raise ConfigError("data", args.data, allowed)

    @classmethod
    def num_tasks(cls, args: AlfworldArgs, split: Split) -> int | None:
        return len(_split_files(args, split))

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        if not _split_files(AlfworldArgs(), "train"):
            raise NotInstalled(f"environment alfworld: there are no games; {INSTALL}")
        return {}

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        """Start the game of the task's file; the seed has no effect."""
        self.close()
        files = _split_files(self.args, split)
        self._game = _start_game(files[task_index % len(files)])
        self._turns = 0
        return self._observe(self._game.reset())

    def step(self, text: str) -> StepResult:
        command = tagged(text, self.args.answer_tag).lower()
        is_valid = command in self._commands
        state, _, is_done = self._game.step(command)
        self._turns += 1
        has_won = bool(state["won"])
        is_done = bool(is_done) or has_won
        is_cut = not is_done and self._turns >= self.args.max_steps
        reward = self.args.success_reward * has_won - self.args.format_penalty * (not is_valid)
        return StepResult(
            self._observe(state), reward, is_done or is_cut, is_valid, has_won, truncated=is_cut
        )

    def text_frame(self) -> str:
        return self._shown

    def close(self) -> None:
        if self._game is not None:
            self._game.close()
            self._game = None

    def _observe(self, state: Any) -> Observation:
        self._commands = list(state["admissible_commands"] or [])
        self._shown = str(state["feedback"]).strip()
        text = self._shown
        if self.args.show_commands:
            text += f"\nAdmissible commands: {', '.join(self._commands)}"
        return Observation(text)


def _start_game(file: str) -> Any:
    textworld = library("alfworld", "textworld", INSTALL)
    wrappers = library("alfworld", "alfworld.agents.environment.alfred_tw_env", INSTALL)
    infos = textworld.EnvInfos(feedback=True, won=True, admissible_commands=True)
    return textworld.start(
        file, request_infos=infos, wrappers=[wrappers.AlfredDemangler(shuffle=False)]
    )


def _split_files(args: AlfworldArgs, split: Split) -> tuple[str, ...]:
    alfworld_split = "train" if split == "train" else args.eval_split
    return _game_files(args.data, tuple(args.task_types), alfworld_split)


@lru_cache(maxsize=8)
def _game_files(data: str | None, task_types: tuple[int, ...], split: str) -> tuple[str, ...]:
    """Return the solvable games of a split, as ALFWorld collects them."""
    info = library("alfworld", "alfworld.info", INSTALL)
    games = library("alfworld", "alfworld.agents.environment.alfred_tw_env", INSTALL)
    root = Path(data or info.ALFWORLD_DATA).expanduser() / "json_2.1.1"
    paths = {key: str(root / folder) for key, folder in PATHS.items()}
    config = {
        "env": {"goal_desc_human_anns_prob": 0.0, "task_types": list(task_types)},
        "dataset": {**paths, "num_train_games": -1, "num_eval_games": -1},
    }
    return tuple(sorted(games.AlfredTWEnv(config, train_eval=split).game_files))
