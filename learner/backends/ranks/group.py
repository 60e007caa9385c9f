"""This process among the ranks that train together, and how work is shared out among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from learner.backends.parts.part_file import PartFile
from learner.backends.ranks.children import ChildRanks
from learner.backends.ranks.dealing import (
    Job,
    Share,
    deal_jobs,
    merge_in_order,
    own_jobs,
    pack_slices,
)
from learner.backends.ranks.leader import OtherRanks, RankLeader
from learner.backends.ranks.messages import (
    BackendArguments,
    Command,
    Reply,
    SampleMessage,
    VerifiedReply,
    VerifyCommand,
    results_of,
)
from learner.backends.ranks.rendezvous import Meeting, join_group, join_single_group

T = TypeVar("T")
# Ranks of several nodes, which meet before there is a backend.
_elsewhere: list[OtherRanks] = []


@contextmanager
def use_other_ranks(ranks: OtherRanks) -> Iterator[None]:
    """Build backends of several ranks on these instead of on children of this process."""
    _elsewhere.append(ranks)
    try:
        yield
    finally:
        _elsewhere.remove(ranks)


@dataclass(frozen=True)
class RankLayout:
    """How copies of the model lie on the ranks."""

    copies: Sequence[int]  # for each rank, the copy of the model that it holds or is a part of
    speakers: Sequence[int]  # for each copy, the rank that reports the results of its slices
    num_at_once: int  # slices that are worked on at the same time
    num_per_cut: int  # slices that one micro-batch is cut for
    same_number: bool = False  # whether all ranks must run as many slices as each other

    @classmethod
    def plain(cls, size: int, *, same_number: bool = False) -> RankLayout:
        """A copy, or as much of one as FSDP gives it, on each rank."""
        return cls(range(size), range(size), size, size, same_number)

    def deal(self, jobs: Sequence[Job]) -> list[list[Share]]:
        """Return for each rank the slices that it runs."""
        dealt = deal_jobs(jobs, len(self.speakers), same_number=self.same_number)
        return [dealt[copy] for copy in self.copies]


class RankGroup:
    """This process among the ranks; rank 0 of several has a leader of the others."""

    def __init__(
        self,
        size: int = 1,
        rank: int = 0,
        *,
        meeting: Meeting | None = None,
        leader: RankLeader | None = None,
    ) -> None:
        self.size = size
        self.rank = rank
        self.leader = leader
        self._meeting = meeting
        # Ranks of this host; known on rank 0 only.
        self.num_here = 1 if leader is None else leader.ranks.num_here
        # Called before the process group is destroyed.
        self.before_leaving: Callable[[], None] = lambda: None
        self._joined = False

    @property
    def hosts_address(self) -> str:
        """Address of this host for ranks on other hosts; empty if all ranks are on this host."""
        if self._meeting is not None and self.num_here < self.size:
            return self._meeting.address
        return ""

    @classmethod
    def start(cls, target: str, size: int, settings: BackendArguments) -> RankGroup:
        """Have the other ranks build the backend ``target`` ("module:attribute") from ``settings``.

        They are children of this process, unless ``others_elsewhere`` names ranks of several nodes.
        """
        if size == 1:
            return cls()
        other_ranks = _elsewhere[-1] if _elsewhere else ChildRanks(size)
        try:
            other_ranks.build(target, settings)
        except BaseException:
            # The ranks have started already, and must not outlive a failed build.
            other_ranks.close()
            raise
        return cls(size, meeting=other_ranks.meeting(), leader=RankLeader(other_ranks))

    def join(self, device: torch.device, *, alone: bool = False) -> None:
        """Join the process group; with ``alone`` a single process makes a group of one."""
        if self._meeting is not None:
            with self.leader.working() if self.leader is not None else nullcontext():
                if self.leader is not None:
                    self.leader.ranks.arm()
                join_group(self._meeting, self.rank, self.size, device)
        elif alone:
            join_single_group(device)
        else:
            return
        self._joined = True

    def together(self, command: Command, work: Callable[[], T]) -> T:
        """Return ``work()``, while the other ranks, if there are any, execute ``command``."""
        if self.leader is None:
            return work()
        with self.leader.working():
            self.leader.send_to_all(command)
            return work()

    def all_done(self, command: Command, work: Callable[[], None]) -> None:
        """Do ``work()`` here and execute ``command`` elsewhere; return once every rank is done."""
        self.together(command, work)
        if self.leader is not None:
            with self.leader.working():
                self.leader.receive_replies()

    def ask(self, command: Command) -> list[Reply]:
        """Return the other ranks' replies to a command, in their order."""
        if self.leader is None:
            return []
        with self.leader.working():
            self.leader.send_to_all(command)
            return self.leader.receive_replies()

    def send_to(self, rank: int, command: Command) -> None:
        """Send a command to another rank."""
        assert self.leader is not None, "rank 0 of several commands the others"
        with self.leader.working():
            self.leader.send_to(rank, command)

    def verify(self, parts: list[PartFile], work: Callable[[Sequence[PartFile]], str]) -> str:
        """Return the first problem that a rank finds in its share of the files; empty if none."""
        if self.leader is None:
            return work(parts)
        with self.leader.working():
            self.leader.send_to_all(VerifyCommand(parts))
            problems = [work(parts)]
            problems += [
                reply.problem
                for reply in self.leader.receive_replies()
                if isinstance(reply, VerifiedReply)
            ]
        return next(filter(None, problems), "")

    def share_out(
        self,
        jobs: Sequence[Job],
        layout: RankLayout,
        command: Callable[[list[list[SampleMessage]], list[bool]], Command],
        work: Callable[[Sequence[Job]], list[T]],
    ) -> list[T]:
        """Run jobs here by ``work``, on other ranks by ``command``; return results in order.

        Args:
            command: takes a rank's slices, and for each whether it is trained.
        """
        if self.leader is None:
            return work(jobs)
        dealt = layout.deal(jobs)
        with self.leader.working():
            for rank, shares in enumerate(dealt[1:], 1):
                self.leader.send_to(
                    rank, command(pack_slices(jobs, shares), [train for _, train in shares])
                )
            results: list[Any] = [work(own_jobs(jobs, dealt[0]))]
            results += [results_of(reply) for reply in self.leader.receive_replies()]
        return merge_in_order(
            [dealt[rank] for rank in layout.speakers], [results[rank] for rank in layout.speakers]
        )

    def leave(self) -> None:
        """Leave the process group."""
        if self._joined and dist.is_initialized():
            self.before_leaving()
            if dist.is_initialized():
                dist.destroy_process_group()
        self._joined = False

    def close(self) -> None:
        """Have the other ranks leave, and leave."""
        if self.leader is not None:
            self.leader.close()
            self.leader = None
        self.leave()
