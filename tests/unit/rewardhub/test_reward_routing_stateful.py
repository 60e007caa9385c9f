"""The reward hub's decisions under any interleaving of many groups, answers, failures and
hand-backs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_reward_routing import REWARDS, group, trajectory

from broker.contract import codec, wire
from broker.contract.streams import EPISODES, EVALS, MAX_DELIVERIES, SAMPLES
from broker.settings.config import DomainSection
from rewardhub.config import reward_labels
from rewardhub.routing import (
    Action,
    CloseAction,
    ForwardAction,
    GroupScoring,
    ScoreAction,
    find_refusal,
)

MAX_RETRIES = 2
DOMAINS = {"qa": DomainSection(env="qa", rewards=REWARDS)}
POOLS = ("default", "slow")


@dataclass
class Job:
    """A group in work, as the test knows it."""

    scoring: GroupScoring
    group: wire.Group
    delivered: int = 1
    waiting: list[ScoreAction] = field(default_factory=list)
    scored: dict[tuple[int, int], float] = field(default_factory=dict)
    failures: dict[tuple[int, int], int] = field(default_factory=dict)
    hopeless: bool = False
    ending: ForwardAction | CloseAction | None = None


class RewardHubMachine(RuleBasedStateMachine):
    """Groups come, may come again, are scored in any order; each ends once, in the right place,
    with the right sum.
    """

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[int, Job] = {}
        # group, pool whose queue it is in, deliveries so far
        self.queue: list[tuple[wire.Group, str, int]] = []
        self.records: dict[int, list[str]] = {}  # ticket -> what stands in its log
        self.expected: dict[int, list[float]] = {}  # ticket -> each trajectory's reward so far
        self.next_ticket = self.next_key = 0

    def perform(self, key: int, actions: list[Action]) -> None:
        job = self.jobs[key]
        for action in actions:
            if isinstance(action, ScoreAction):
                assert job.ending is None, "asks after the end"
                assert 0 <= action.attempt <= MAX_RETRIES
                assert REWARDS[action.reward].pool == job.group.pools[0], (
                    "scores what another pool must score"
                )
                assert (action.trajectory, action.reward) not in job.scored, "scores twice"
                job.waiting.append(action)
            else:
                assert job.ending is None, "ended twice"
                job.ending = action
                self.store(job)

    def store(self, job: Job) -> None:
        ending, ticket = job.ending, job.group.ticket
        log = EVALS if job.group.eval_step >= 0 else SAMPLES
        if isinstance(ending, CloseAction):
            assert job.hopeless or max(job.failures.values()) == MAX_RETRIES + 1, (
                "gave up too early"
            )
            self.records.setdefault(ticket, []).append("closed")
            return
        assert isinstance(ending, ForwardAction)
        codec.encode(ending.group)
        mine = [r for r in range(len(REWARDS)) if REWARDS[r].pool == job.group.pools[0]]
        assert set(job.scored) == {
            (t, r) for t in range(len(job.group.trajectories)) for r in mine
        }, "not all are scored"
        for t, one in enumerate(ending.group.trajectories):
            self.expected[ticket][t] += sum(REWARDS[r].weight * job.scored[t, r] for r in mine)
            assert abs(one.reward - self.expected[ticket][t]) < 1e-9
            assert {
                reward_labels(REWARDS)[r]: job.scored[t, r] for r in mine
            }.items() <= one.reward_parts.items()
        left = job.group.pools[1:]
        assert ending.group.pools == left
        assert (ending.stream, ending.key) == ((EPISODES, left[0]) if left else (log, ""))
        if left:
            self.queue.append((ending.group, left[0], 0))
        else:
            self.records.setdefault(ticket, []).append("group")

    @rule(num=st.integers(1, 3), both=st.booleans(), evaluated=st.booleans())
    def a_group_comes(self, num: int, both: bool, evaluated: bool) -> None:
        self.next_ticket += 1
        pools = list(POOLS) if both else [POOLS[0]]
        made = group(pools, *(trajectory(i) for i in range(num)), eval_step=5 if evaluated else -1)
        made = wire.Group(
            **{name: getattr(made, name) for name in made.__struct_fields__}
            | {"ticket": self.next_ticket}
        )
        self.expected[self.next_ticket] = [0.0] * num
        self.queue.append((made, pools[0], 0))

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def a_hub_takes_it(self, data: st.DataObject) -> None:
        made, pool, delivered = self.queue.pop(data.draw(st.integers(0, len(self.queue) - 1)))
        refused = find_refusal(made, pool, DOMAINS, delivered + 1)
        if delivered + 1 >= MAX_DELIVERIES:
            assert refused is not None
            assert refused.reason == "too_many_deliveries"
            self.records.setdefault(made.ticket, []).append("closed")
            return
        assert refused is None
        self.next_key += 1
        key = self.next_key
        self.jobs[key] = Job(GroupScoring(made, REWARDS, MAX_RETRIES), made, delivered + 1)
        self.perform(key, self.jobs[key].scoring.start())

    def pick(self, data: st.DataObject) -> tuple[int, Job, ScoreAction]:
        key = data.draw(st.sampled_from([key for key, job in self.jobs.items() if job.waiting]))
        job = self.jobs[key]
        return key, job, job.waiting.pop(data.draw(st.integers(0, len(job.waiting) - 1)))

    @precondition(lambda self: any(job.waiting for job in self.jobs.values()))
    @rule(data=st.data(), value=st.integers(-3, 3))
    def a_worker_answers(self, data: st.DataObject, value: int) -> None:
        key, job, ask = self.pick(data)
        if job.ending is None:
            job.scored[ask.trajectory, ask.reward] = float(value)
        self.perform(key, job.scoring.scored(ask, float(value)))

    @precondition(lambda self: any(job.waiting for job in self.jobs.values()))
    @rule(data=st.data(), retry=st.booleans())
    def a_worker_fails(self, data: st.DataObject, retry: bool) -> None:
        key, job, ask = self.pick(data)
        if job.ending is None:
            job.failures[ask.trajectory, ask.reward] = (
                job.failures.get((ask.trajectory, ask.reward), 0) + 1
            )
            job.hopeless = job.hopeless or not retry
        self.perform(key, job.scoring.failed(ask, "x", retry=retry))

    @precondition(lambda self: any(job.ending is None for job in self.jobs.values()))
    @rule(data=st.data())
    def a_hub_dies_or_hands_back(self, data: st.DataObject) -> None:
        """Nothing was stored: the group comes again as it was."""
        key = data.draw(
            st.sampled_from([key for key, job in self.jobs.items() if job.ending is None])
        )
        job = self.jobs.pop(key)
        self.queue.append((job.group, job.group.pools[0], job.delivered))

    @invariant()
    def a_ticket_ends_once(self) -> None:
        assert all(len(records) == 1 for records in self.records.values())

    @invariant()
    def nothing_is_lost(self) -> None:
        known = {made.ticket for made, _, _ in self.queue} | set(self.records)
        known |= {job.group.ticket for job in self.jobs.values() if job.ending is None}
        assert known == set(range(1, self.next_ticket + 1))

    @invariant()
    def a_group_in_work_waits_for_something(self) -> None:
        assert all(job.waiting for job in self.jobs.values() if job.ending is None)


TestRewardHubMachine = RewardHubMachine.TestCase
TestRewardHubMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
