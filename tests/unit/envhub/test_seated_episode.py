"""Episodes with several speakers: whose tokens, whose rewards, whose turn, and whose fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from envhub_kit import Scripted, domain, write_tokenizer

from broker.contract import checks, wire
from broker.settings.config import Section
from broker.settings.run_settings import RunSettings
from envhub.domain import Domain
from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.episodes.runners import EpisodeLimits, EpisodeRunners
from envhub.episodes.seats.policies import PlayedPolicies
from envhub.players.base import Player, PlayerView
from envhub.servers.turn import SampledTurn, TurnFailed, TurnRequest
from envhub.task import EpisodeFailed, EpisodeResult, EpisodeTask
from envhub.workers.calls import EnvironmentCalls
from envhub.workers.worker_pool import WorkerPools
from rlearner_text.tokenizer import Tokenizer

SELF_PLAY = {"X": "actor", "O": "actor"}
HERE = Path(__file__)


class ChatArgs(Section):
    """``env_args`` of the chat."""

    turns: int = 4
    wrong_seat: bool = False


class Chat(Environment):
    """Passes what one seat says to the other, and pays each 1 for what the other says."""

    Args = ChatArgs
    isolation = "none"
    args: ChatArgs

    @classmethod
    def seats(cls, args: Any) -> tuple[str, ...]:
        return "user", "agent"

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        self._count = 0
        return Observation("begin", seat="user")

    def step(self, text: str) -> StepResult:
        self._count += 1
        seats = ("user", "agent")
        other = seats[self._count % 2]
        next_seat = "nobody" if self.args.wrong_seat else other
        done = self._count == self.args.turns
        return StepResult(
            Observation(text, seat=next_seat),
            0.0,
            done,
            seat_rewards={other: 1.0},
            seat_successes=("agent",) if done else (),
        )


class Cheat(Player):
    """Makes illegal moves."""

    isolation = "none"

    def act(self, view: PlayerView) -> str:
        return "99"


class Chatterer(Player):
    """Says several things at once, nothing, or what others should say."""

    class Args(Section):
        """What goes wrong."""

        trouble: str

    isolation = "none"

    def act(self, view: PlayerView) -> Any:
        match self.args.trouble:
            case "list":
                return ["hello", "and this"]
            case "nothing":
                return "  "
            case "raises":
                raise ValueError("no idea")
        return "I am hungry.\nAgent: here is a table"


class Patient(Player):
    """Runs in a process of its own."""

    def act(self, view: PlayerView) -> str:
        return f"heard {view.text}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class Policies:
    """Answers for each policy by its own script, as its rollout servers would."""

    def __init__(self, tokenizer: Tokenizer, **scripts: Callable[[str], str]) -> None:
        self.samplers = {
            name: Scripted(tokenizer, script, version=3 if name == "actor" else 0)
            for name, script in scripts.items()
        }
        self.asks: list[TurnRequest] = []

    async def turn(self, ask: TurnRequest) -> SampledTurn:
        self.asks.append(ask)
        if ask.policy not in self.samplers:
            raise TurnFailed(f"there is no rollout server (policy {ask.policy})")
        return await self.samplers[ask.policy].turn(ask)

    def forget(self, episode: str) -> None: ...


def runners(tokenizer: Tokenizer, turns: Policies, policies: dict[str, Any]) -> EpisodeRunners:
    crew = EpisodeRunners(
        tokenizer, turns, EnvironmentCalls(10.0), EpisodeLimits(30.0, 10.0), WorkerPools(None)
    )
    settings = RunSettings.of_config({"policies": policies, "envhub": {"max_retries": 1}})
    crew.policies = PlayedPolicies(settings, tokenizer, timeout_s=4.0)
    return crew


async def play(
    crew: EpisodeRunners, chosen: Domain, *, episode: int = 0, on_tokens: list[int] | None = None
) -> EpisodeResult:
    task = EpisodeTask("h.t.0.0", chosen, 0, "train", seed=7, episode=episode, ticket=1)
    seen: list[int] = [] if on_tokens is None else on_tokens
    try:
        return await crew.play(task, seen.append)
    finally:
        await crew.close()


def game(seats: dict[str, Any], env: str = "tic_tac_toe", **section: Any) -> Domain:
    return domain(env, max_turns=10, sampling={"max_tokens": 8}, seats=seats, **section)


def first_free(context: str) -> str:
    """Play the first free square of the last board."""
    board = context.rpartition("<|im_user|>")[2].partition("<|im_end|>")[0]
    return next(character for character in board if character.isdigit())


def sampled_text(tokenizer: Tokenizer, trajectory: wire.Trajectory) -> str:
    ids = trajectory.token_ids.array()
    return tokenizer.decode(ids[trajectory.loss_mask.array() == 1].tolist())


@pytest.mark.parametrize(("context", "memory"), [("full", "recent"), ("steps", "present")])
async def test_self_play_makes_samples_of_each_seat(
    context: str, memory: str, tokenizer: Tokenizer
) -> None:
    turns = Policies(tokenizer, actor=first_free)
    crew = runners(tokenizer, turns, {})
    result = await play(crew, game(SELF_PLAY, context=context, memory=memory), episode=3)
    # X takes 1, 3, 5 and 7, which are a diagonal; O takes 2, 4 and 6
    by_seat = {
        seat: [each for each in result.trajectories if each.seat == seat] for seat in ("X", "O")
    }
    for trajectory in result.trajectories:
        checks.check_trajectory(trajectory)
    texts = {
        seat: "".join(sampled_text(tokenizer, each) for each in parts)
        for seat, parts in by_seat.items()
    }
    assert texts == {"X": "1357", "O": "246"}
    assert {seat: {each.episode for each in parts} for seat, parts in by_seat.items()} == {
        "X": {6},
        "O": {7},
    }
    assert {seat: {each.reward for each in parts} for seat, parts in by_seat.items()} == {
        "X": {1.0},
        "O": {-1.0},
    }
    assert {seat: parts[-1].success for seat, parts in by_seat.items()} == {"X": True, "O": False}
    assert {seat: parts[-1].end for seat, parts in by_seat.items()} == dict.fromkeys(
        SELF_PLAY, "terminated"
    )
    assert result.num_seats == 2
    # each seat has a conversation of its own, and the hub can hurry the whole episode
    assert {ask.episode for ask in turns.asks} == {"h.t.0.0"}
    assert len({ask.conversation_id.split(".")[4] for ask in turns.asks}) == 2
    assert len({ask.sampling.seed for ask in turns.asks}) == len(turns.asks)


async def test_a_past_version_plays_and_is_not_trained_on(tokenizer: Tokenizer) -> None:
    turns = Policies(tokenizer, actor=first_free, past=first_free)
    crew = runners(tokenizer, turns, {"past": {"model_path": "runs/a/step-1", "temperature": 0.5}})
    seen: list[int] = []
    result = await play(crew, game({"X": "past", "O": "actor"}), on_tokens=seen)
    (trajectory,) = result.trajectories
    assert (trajectory.seat, trajectory.episode, trajectory.reward) == ("O", 0, -1.0)
    assert sampled_text(tokenizer, trajectory) == "246"
    # versions of others say nothing about the age of the sample
    assert set(seen) == {3}
    temperatures = {ask.policy: ask.sampling.temperature for ask in turns.asks}
    assert temperatures == {"past": 0.5, "actor": 1.0}
    assert {ask.min_version for ask in turns.asks} == {0}


async def test_seats_rotate_by_task_and_leagues_draw_by_group(tokenizer: Tokenizer) -> None:
    rotated = game({"X": "actor", "O": "chance"}, rotate_seats=True)
    assert rotated.seat_players(0, 1) == {"X": "actor", "O": "chance"}
    assert rotated.seat_players(1, 1) == {"X": "chance", "O": "actor"}
    league = game({"X": "actor", "O": ["actor", "old", "older"]})
    drawn = [league.seat_players(0, seed)["O"] for seed in range(200)]
    assert drawn == [league.seat_players(0, seed)["O"] for seed in range(200)]
    assert all(45 < drawn.count(name) < 90 for name in ("actor", "old", "older"))


async def test_a_script_plays_legal_moves(tokenizer: Tokenizer) -> None:
    turns = Policies(tokenizer, actor=first_free)
    crew = runners(tokenizer, turns, {"chance": {"script": "random"}})
    result = await play(crew, game({"X": "actor", "O": "chance"}))
    assert result.trajectory.seat == "X"
    assert all(turn.valid for turn in result.trajectory.turns)


async def test_rewards_between_two_turns_belong_to_the_first(tokenizer: Tokenizer) -> None:
    chat = domain(
        f"{HERE}:Chat", max_turns=4, isolation="none", seats={"user": "talker", "agent": "actor"}
    )
    turns = Policies(tokenizer, actor=lambda context: "ok", talker=lambda context: "hi")
    crew = runners(tokenizer, turns, {"talker": {"model_path": "other"}})
    result = await play(crew, chat)
    (trajectory,) = result.trajectories
    # begin -> user; the agent is paid by the user's first words before it has acted
    assert [turn.reward for turn in trajectory.turns] == [2.0, 0.0]
    assert (trajectory.reward, trajectory.success, trajectory.end) == (2.0, True, "terminated")


async def test_a_seat_out_of_turns_ends_the_episode_for_all(tokenizer: Tokenizer) -> None:
    chat = domain(
        f"{HERE}:Chat",
        env_args={"turns": 100},
        max_turns=2,
        isolation="none",
        seats={"user": "actor", "agent": "actor"},
    )
    result = await play(runners(tokenizer, Policies(tokenizer, actor=lambda _: "hi"), {}), chat)
    assert [(each.seat, each.end, len(each.turns)) for each in result.trajectories] == [
        ("user", "truncated", 2),
        ("agent", "truncated", 2),
    ]


async def test_a_script_in_a_process_of_its_own(tokenizer: Tokenizer) -> None:
    chat = domain(
        f"{HERE}:Chat", max_turns=4, isolation="none", seats={"user": "p", "agent": "actor"}
    )
    turns = Policies(tokenizer, actor=lambda context: "ok")
    crew = runners(tokenizer, turns, {"p": {"script": f"{HERE}:Patient"}})
    result = await play(crew, chat)
    text = tokenizer.decode(result.trajectory.token_ids.array().tolist())
    assert "heard begin" in text
    assert "heard ok" in text


@pytest.mark.parametrize(
    ("trouble", "problem"),
    [
        ("list", "it must be one text, said in its own turn"),
        ("nothing", "it said nothing in its turn"),
        ("raises", "no idea"),
        ("others", "it spoke out of turn: 'Agent: here is a table' is a line of another seat"),
    ],
)
async def test_a_simulator_out_of_turn_is_named(
    trouble: str, problem: str, tokenizer: Tokenizer
) -> None:
    chat = domain(
        f"{HERE}:Chat", max_turns=4, isolation="none", seats={"user": "p", "agent": "actor"}
    )
    policies = {"p": {"script": f"{HERE}:Chatterer", "args": {"trouble": trouble}}}
    crew = runners(tokenizer, Policies(tokenizer, actor=lambda _: "ok"), policies)
    with pytest.raises(EpisodeFailed) as failure:
        await play(crew, chat)
    assert failure.value.kind == "env"
    assert failure.value.detail.startswith("policy p, seat user: ")
    assert problem in failure.value.detail
    assert "\n" not in failure.value.detail


async def test_an_illegal_move_of_a_script_is_its_fault(tokenizer: Tokenizer) -> None:
    crew = runners(
        tokenizer, Policies(tokenizer, actor=first_free), {"c": {"script": f"{HERE}:Cheat"}}
    )
    with pytest.raises(EpisodeFailed, match="policy c, seat X: it made an illegal move: '99'"):
        await play(crew, game({"X": "c", "O": "actor"}))


async def test_an_illegal_move_of_the_policy_costs_it_alone(tokenizer: Tokenizer) -> None:
    crew = runners(tokenizer, Policies(tokenizer, actor=lambda _: "99"), {})
    result = await play(crew, game(SELF_PLAY))
    # O never had a turn, so there is nothing of it to train on
    assert [(each.seat, each.reward) for each in result.trajectories] == [("X", -1.0)]
    assert not result.trajectory.turns[0].valid


async def test_an_opponent_that_is_away_is_named(tokenizer: Tokenizer) -> None:
    crew = runners(
        tokenizer, Policies(tokenizer, actor=first_free), {"past": {"model_path": "gone"}}
    )
    with pytest.raises(EpisodeFailed) as failure:
        await play(crew, game({"X": "actor", "O": "past"}))
    assert failure.value.kind == "generate"
    assert failure.value.detail == "policy past, seat O: there is no rollout server (policy past)"


async def test_an_episode_over_before_a_trained_seat(tokenizer: Tokenizer) -> None:
    crew = runners(
        tokenizer,
        Policies(tokenizer, actor=first_free, past=lambda _: "99"),
        {"past": {"model_path": "bad"}},
    )
    with pytest.raises(EpisodeFailed, match="over before seat O had a turn") as failure:
        await play(crew, game({"X": "past", "O": "actor"}))
    assert failure.value.kind == "fatal"


async def test_an_environment_that_names_no_seat(tokenizer: Tokenizer) -> None:
    chat = domain(
        f"{HERE}:Chat",
        env_args={"wrong_seat": True},
        max_turns=4,
        isolation="none",
        seats={"user": "actor", "agent": "actor"},
    )
    crew = runners(tokenizer, Policies(tokenizer, actor=lambda _: "hi"), {})
    expected = "step gave the turn to seat 'nobody'; the environment has user, agent"
    with pytest.raises(EpisodeFailed, match=expected):
        await play(crew, chat)


class Endpoint:
    """A chat endpoint whose answers are given."""

    def __init__(self, *messages: Any) -> None:
        self.messages = list(messages)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization", ""))
        message = self.messages.pop(0) if len(self.messages) > 1 else self.messages[0]
        return web.json_response({"choices": [{"message": message}]})

    async def start(self) -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"


async def play_with(endpoint: Endpoint, tokenizer: Tokenizer, **policy: Any) -> EpisodeResult:
    server, url = await endpoint.start()
    chat = domain(
        f"{HERE}:Chat", max_turns=4, isolation="none", seats={"user": "gpt", "agent": "actor"}
    )
    policies = {"gpt": {"base_url": url, "model": "gpt-x", **policy}}
    crew = runners(tokenizer, Policies(tokenizer, actor=lambda _: "ok"), policies)
    try:
        return await play(crew, chat)
    finally:
        await server.cleanup()


async def test_an_endpoint_plays_a_seat(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEAT_KEY", "sk-1")
    endpoint = Endpoint({"role": "assistant", "content": "hello"})
    result = await play_with(
        endpoint, tokenizer, api_key={"env": "SEAT_KEY"}, system_prompt="You are a guest."
    )
    assert result.trajectory.seat == "agent"
    assert endpoint.keys == ["Bearer sk-1"] * 2
    assert endpoint.bodies[1]["messages"] == [
        {"role": "system", "content": "You are a guest."},
        {"role": "user", "content": "begin"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "ok"},
    ]
    assert (endpoint.bodies[0]["model"], endpoint.bodies[0]["temperature"]) == ("gpt-x", 1.0)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": "hi"}, "it spoke out of turn: as 'user', not as assistant"),
        ({"role": "assistant", "content": ""}, "it said nothing in its turn"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "it called tools"),
        ("hello", "has no choices[0].message"),
    ],
)
async def test_an_endpoint_with_a_wrong_answer(
    message: Any, problem: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(EpisodeFailed) as failure:
        await play_with(Endpoint(message), tokenizer)
    assert failure.value.kind == "env"
    assert problem in failure.value.detail


async def test_a_whole_domain_by_another_policy_is_masked(tokenizer: Tokenizer) -> None:
    lake = domain("frozenlake", max_turns=3, sampling={"max_tokens": 4}, policy="other", weight=0)
    crew = runners(
        tokenizer, Policies(tokenizer, other=lambda _: "R"), {"other": {"model_path": "weights"}}
    )
    result = await play(crew, lake)
    checks.check_trajectory(result.trajectory)
    assert len(result.trajectory.turns) == 3
    assert not result.trajectory.loss_mask.array().any()
    assert len(result.trajectory.version_runs.data) == 0
    assert result.trajectory.seat == ""


async def test_a_whole_domain_by_a_script(tokenizer: Tokenizer) -> None:
    lake = domain("frozenlake", max_turns=3, policy="chance", weight=0)
    policies = {"chance": {"script": "random", "args": {"choices": ["R", "D"]}}}
    result = await play(runners(tokenizer, Policies(tokenizer), policies), lake)
    checks.check_trajectory(result.trajectory)
    assert 1 <= len(result.trajectory.turns) <= 3
    assert result.trajectory.response in ("R", "D")


async def test_a_cancelled_episode_leaves_no_task(tokenizer: Tokenizer) -> None:
    class Waiting(Policies):
        async def turn(self, ask: TurnRequest) -> SampledTurn:
            began.set()
            await asyncio.Event().wait()
            raise AssertionError

    began = asyncio.Event()
    crew = runners(tokenizer, Waiting(tokenizer), {})
    task = EpisodeTask("h.t.0.0", game(SELF_PLAY), 0, "train", seed=7, episode=0)
    playing = asyncio.create_task(crew.play(task, lambda _: None))
    await began.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await crew.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
