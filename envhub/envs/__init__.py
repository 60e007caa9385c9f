"""Environments by name; a new one is one file plus one line here."""

from __future__ import annotations

from typing import Final

ENVS: Final[dict[str, str]] = {
    "alfworld": "envhub.envs.adapters.alfworld_env:AlfworldEnv",
    "appworld": "envhub.envs.adapters.appworld_env:AppworldEnv",
    "arithmetic": "envhub.envs.text.arithmetic:Arithmetic",
    "blackjack": "envhub.envs.games.blackjack:Blackjack",
    "booking": "envhub.envs.dialogues.booking:Booking",
    "connect_four": "envhub.envs.games.connect_four:ConnectFour",
    "constraints": "envhub.envs.text.constraints:ConstraintTasks",
    "ez_points": "envhub.envs.games.points:EZPoints",
    "frozenlake": "envhub.envs.games.frozenlake:FrozenLake",
    "gem": "envhub.envs.adapters.gem_env:GemEnv",
    "gymnasium": "envhub.envs.adapters.gymnasium_env:GymnasiumEnv",
    "instructions": "envhub.envs.text.instructions:Instructions",
    "negotiation": "envhub.envs.dialogues.negotiation:Negotiation",
    "number_line": "envhub.envs.games.number_line:NumberLine",
    "openenv": "envhub.envs.adapters.openenv_env:OpenEnv",
    "points24": "envhub.envs.games.points:Points24",
    "programs": "envhub.envs.text.programs:ProgramTasks",
    "python": "envhub.envs.tools.python_qa:PythonQA",
    "qa": "envhub.envs.text.qa:QuestionAnswer",
    "reasoning_gym": "envhub.envs.adapters.reasoning_gym_env:ReasoningGymEnv",
    "search": "envhub.envs.tools.search_qa:SearchQA",
    "sokoban": "envhub.envs.games.sokoban:Sokoban",
    "tau2": "envhub.envs.adapters.tau2_env:Tau2Env",
    "task": "envhub.envs.tools.terminal_task:TerminalTask",
    "textarena": "envhub.envs.adapters.textarena_env:TextArenaEnv",
    "tic_tac_toe": "envhub.envs.games.tic_tac_toe:TicTacToe",
    "tools": "envhub.envs.tools.tool_tasks:ToolTasks",
    "webshop": "envhub.envs.tools.webshop:WebShop",
    "word_problems": "envhub.envs.text.word_problems:WordProblems",
}

# The user's programs that act by themselves; see ``envhub.agents``.
AGENTS: Final[dict[str, str]] = {"agent": "envhub.envs.agent:AgentEnvironment"}
