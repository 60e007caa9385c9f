"""Runs a script as if it were an environment, so that it is isolated, limited and ended like one.

Its ``reset`` begins an episode; ``step`` gets a ``PlayerView`` as JSON and returns an observation
with what the script says.
"""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import Field

from broker.errors import ConfigError
from broker.settings.config import PluginArguments, Section
from broker.settings.registry import check_method, resolve
from broker.settings.sections import parse
from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.players import PLAYERS
from envhub.players.base import Player, PlayerView


class HostArgs(Section):
    """What a script is made of."""

    script: str
    script_args: PluginArguments = Field(default_factory=dict)
    seat: str = ""


class PlayerHost(Environment):
    """One player in one seat."""

    Args = HostArgs

    args: HostArgs

    def __init__(self, args: HostArgs) -> None:
        super().__init__(args)
        player_class = load_player("script", args.script)
        arguments = parse("args", args.script_args, player_class.Args)
        self._player = player_class(arguments)

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        self._player.begin(self.args.seat, seed)
        return Observation("")

    def step(self, text: str) -> StepResult:
        reply: Any = self._player.act(msgspec.json.decode(text, type=PlayerView))
        if not isinstance(reply, str):
            kind = type(reply).__name__
            raise TypeError(f"act returned {kind}; it must be one text, said in its own turn")
        return StepResult(Observation(reply), 0.0, done=False)


def load_player(key: str, name: str) -> type[Player]:
    """Return the class of a script.

    Args:
        key: the setting that names it.

    Raises:
        ConfigError: if there is none, or it is no player.
    """
    try:
        player_class = resolve("players", name, PLAYERS)
    except ConfigError as error:
        raise ConfigError(key, name, error.allowed) from None
    if not (isinstance(player_class, type) and issubclass(player_class, Player)):
        raise ConfigError(key, name, "a class that derives from envhub.players.base.Player")
    check_method(key, name, player_class, "act", ("view",), base=Player)
    return player_class
