"""What a ticket of either kind asks for, and the messages that end it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from broker.contract import wire
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
    split: Split = "train"
    policy: str = wire.ACTOR
    temperature: float | None = None
    eval_step: int = -1

    @property
    def key(self) -> str:
        """Unique among all tickets of the run."""
        return ticket_key(self.number, evaluation=self.stream is EVALTICKETS)

    def is_greedy(self, episode: int) -> bool:
        """Whether an episode is one of the baseline's, sampled at temperature 0: the group's last ones are."""
        return episode >= self.group_size - self.num_greedy

    def job(self, num_delivered: int, *, drop_late: bool) -> GroupJob:
        """The ticket as the slots see it; with ``drop_late`` it is given up when it cannot be in time any more."""
        staleness = self.max_staleness if drop_late else None
        return GroupJob(
            self.key,
            self.group_size,
            self.min_group_size,
            self.deadline_s,
            staleness,
            num_delivered,
            self.num_redundant,
        )


def task(asked: TicketAssignment, domain: Domain, episode: int, name: str) -> EpisodeTask:
    """What one episode of an assignment is to play; ``name`` tells it from all others that the servers see."""
    return EpisodeTask(
        id=name,
        domain=domain,
        task_index=asked.task_index,
        split=asked.split,
        seed=asked.seed,
        episode=episode,
        policy=asked.policy,
        min_version=asked.min_version,
        temperature=0.0 if asked.is_greedy(episode) else asked.temperature,
        greedy=asked.is_greedy(episode),
        record=asked.split == "eval" and episode == 0,
    )


def assignment(ticket: wire.Message) -> TicketAssignment:
    """A ticket of either kind."""
    if isinstance(ticket, wire.Ticket):
        return TicketAssignment(
            TICKETS,
            ticket.number,
            ticket.domain,
            ticket.task_index,
            ticket.seed,
            ticket.min_version,
            ticket.group_size,
            ticket.min_group_size,
            ticket.deadline_s,
            max_staleness=ticket.max_staleness,
            num_greedy=ticket.num_greedy,
            num_redundant=ticket.num_redundant,
        )
    assert isinstance(ticket, wire.EvalTicket), f"{type(ticket).__name__} is no ticket"
    return TicketAssignment(
        EVALTICKETS,
        ticket.number,
        ticket.domain,
        ticket.task_index,
        ticket.seed,
        ticket.min_version,
        ticket.group_size,
        min_group_size=ticket.group_size,
        deadline_s=ticket.deadline_s,
        split="eval",
        policy=ticket.policy,
        temperature=ticket.temperature,
        eval_step=ticket.eval_step,
    )


def reward_pools(section: DomainSection) -> list[str]:
    """The pools a domain's groups visit, each once, in the order of the rewards."""
    return list(dict.fromkeys(reward.pool for reward in section.rewards))


def destination(asked: TicketAssignment, pools: Sequence[str]) -> tuple[Stream, str]:
    """Stream and key to publish a group to: its first reward pool, or its log."""
    return (EPISODES, pools[0]) if pools else (result_log(evaluation=asked.stream is EVALTICKETS), "")


def group(
    asked: TicketAssignment,
    played: Sequence[EpisodeResult],
    *,
    pools: Sequence[str],
    hub: str,
    deliveries: int,
    temperature: float,
) -> wire.Group:
    """The group of an assignment's episodes.

    Args:
        asked: the ticket.
        played: at least one episode, in order.
        pools: reward pools to visit.
        hub: id of this process.
        deliveries: of the ticket.
        temperature: of the domain's sampling, where the assignment names none.
    """
    return wire.Group(
        ticket=asked.number,
        domain=asked.domain,
        task_index=asked.task_index,
        min_version=asked.min_version,
        hub=hub,
        deliveries=deliveries,
        pools=list(pools),
        trajectories=[trajectory for one in played for trajectory in one.trajectories],
        prompt=played[0].prompt,
        reference=played[0].reference,
        eval_step=asked.eval_step,
        policy=asked.policy,
        generate_s=sum(one.generate_s for one in played) / len(played),
        env_step_s=sum(one.env_step_s for one in played) / len(played),
        frames=played[0].frames,
        temperature=temperature if asked.temperature is None else asked.temperature,
    )
