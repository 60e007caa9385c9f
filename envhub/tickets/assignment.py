"""Turns tickets of either kind into assignments, and played episodes into the ticket's group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import asdict

from broker.contract import wire
from broker.contract.staleness import due_step
from broker.contract.streams import EPISODES, EVALTICKETS, TICKETS, Stream
from broker.jetstream.ticket_results import result_log, ticket_key
from broker.settings.config import DomainSection
from envhub.domain import Domain
from envhub.envs.base import Split
from envhub.scheduling.line import GroupJob
from envhub.task import EpisodeResult, EpisodeTask


@dataclass(frozen=True)
class TicketAssignment:
    """A training or evaluation ticket in one shape."""

    stream: Stream
    number: int
    domain: str
    task_index: int
    seed: int
    min_version: int
    group_size: int
    min_group_size: int
    deadline_s: float
    max_staleness: int | None = None
    num_greedy: int = 0
    num_redundant: int = 0
    pass_rate: Sequence[float] = ()
    split: Split = "train"
    policy: str = wire.ACTOR
    temperature: float | None = None
    eval_step: int = -1

    @property
    def key(self) -> str:
        """Unique among all tickets of the run."""
        return ticket_key(self.number, evaluation=self.stream is EVALTICKETS)

    def is_greedy(self, episode: int) -> bool:
        """Return whether an episode is a baseline at temperature 0: the group's last ones are."""
        return episode >= self.group_size - self.num_greedy

    def step(self, groups_per_step: int) -> int:
        """Return the step, as a policy version, that the group is expected in; -1: unknown.

        A ticket issued at version v counts in one of the steps v to v + max_staleness. Its number
        tells which one, except that replacements of other tickets raise it.

        Args:
            groups_per_step: of the run, 0 unknown.
        """
        if self.max_staleness is None or not groups_per_step:
            return -1
        steps_before = (self.number - 1) // groups_per_step
        return min(
            max(steps_before, self.min_version),
            due_step(self.min_version, self.max_staleness),
        )

    def job(
        self, num_delivered: int, *, drop_late: bool, straggler_factor: float | None = None
    ) -> GroupJob:
        """Return the ticket as the slots see it.

        Args:
            drop_late: whether it is given up once it cannot be in time.
            straggler_factor: of the domain.
        """
        return GroupJob(
            self.key,
            self.group_size,
            self.min_group_size,
            deadline_s=self.deadline_s,
            max_staleness=self.max_staleness if drop_late else None,
            num_delivered=num_delivered,
            num_redundant=self.num_redundant,
            straggler_factor=straggler_factor,
            num_greedy=self.num_greedy,
            pass_rate=tuple(self.pass_rate),
        )


def task(
    assignment: TicketAssignment, domain: Domain, episode: int, name: str, *, step: int = -1
) -> EpisodeTask:
    """Return the task of one episode; its ``name`` must be unique at the servers."""
    is_greedy = assignment.is_greedy(episode)
    return EpisodeTask(
        name,
        domain,
        assignment.task_index,
        split=assignment.split,
        seed=assignment.seed,
        episode=episode,
        policy=assignment.policy,
        min_version=assignment.min_version,
        temperature=0.0 if is_greedy else assignment.temperature,
        greedy=is_greedy,
        record=assignment.split == "eval" and episode == 0,
        ticket=assignment.number if assignment.split == "train" else 0,
        step=step,
        draw=assignment.number if assignment.split == "train" and domain.has_chosen_tasks else 0,
    )


def assignment(ticket: wire.Message) -> TicketAssignment:
    """Return the assignment of a ticket of either kind."""
    if isinstance(ticket, wire.Ticket):
        return TicketAssignment(TICKETS, **asdict(ticket))
    assert isinstance(ticket, wire.EvalTicket), f"{type(ticket).__name__} is not a ticket"
    return TicketAssignment(
        EVALTICKETS, min_group_size=ticket.group_size, split="eval", **asdict(ticket)
    )


def reward_pools(section: DomainSection) -> list[str]:
    """Return the pools that a domain's groups visit, each once, in the order of the rewards."""
    return list(dict.fromkeys(reward.pool for reward in section.rewards))


def destination(assignment: TicketAssignment, pools: Sequence[str]) -> tuple[Stream, str]:
    """Return the stream and key to publish a group to: its first reward pool, or its log."""
    if pools:
        return EPISODES, pools[0]
    return result_log(evaluation=assignment.stream is EVALTICKETS), ""


def group(
    assignment: TicketAssignment,
    results: Sequence[EpisodeResult],
    *,
    pools: Sequence[str],
    hub: str,
    deliveries: int,
    temperature: float,
    scores: Sequence[wire.EpisodeScores] = (),
) -> wire.Group:
    """Return the group of an assignment's episodes.

    Args:
        results: of at least one episode, in order.
        pools: reward pools to visit.
        hub: id of this process.
        deliveries: of the ticket.
        temperature: of the domain's sampling, used if the assignment has none.
        scores: that episodes have already.
    """
    return wire.Group(
        ticket=assignment.number,
        domain=assignment.domain,
        task_index=assignment.task_index,
        min_version=assignment.min_version,
        hub=hub,
        deliveries=deliveries,
        pools=list(pools),
        trajectories=[trajectory for result in results for trajectory in result.trajectories],
        prompt=results[0].prompt,
        reference=results[0].reference,
        eval_step=assignment.eval_step,
        policy=assignment.policy,
        generate_s=sum(result.generate_s for result in results) / len(results),
        env_step_s=sum(result.env_step_s for result in results) / len(results),
        env_step_max_s=max(result.env_step_s for result in results),
        frames=results[0].frames,
        temperature=temperature if assignment.temperature is None else assignment.temperature,
        scores=list(scores),
        row=results[0].row,
    )
