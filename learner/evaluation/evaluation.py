"""Issues evaluation tickets and collects their results, always of the same tasks. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from broker.contract import wire
from broker.contract.wire import ACTOR
from broker.settings.config import DomainSection
from broker.settings.timeouts import seconds
from learner.algorithm.episodes import final_trajectories
from learner.config import EvalSection
from learner.credit.ticket_rules import task_seed
from learner.evaluation import pass_at_k
from learner.evaluation.task_results import TaskResult, domain_figures
from learner.reporting.transcripts import Transcript


@dataclass(frozen=True)
class EvaluationRow:
    """Full result of one task, kept until it is written to a file."""

    result: TaskResult
    first: wire.Trajectory  # the first episode; the last of its trajectories if cut into several
    frames: list[str]  # of the first episode, for a replay; empty if the environment has none

    def plain(self, transcript: Transcript) -> dict[str, Any]:
        """Return the row for the file, with the transcript of the first episode."""
        return {
            **self.result.plain(),
            "prompt": transcript.prompt,
            "text": transcript.text,
            "response": self.first.response,
            "frames": self.frames,
        }


@dataclass
class Evaluation:
    """One evaluation of one policy."""

    step: int  # the optimizer step after which it began
    policy: str
    waiting: set[int]  # numbers of the tickets without a result
    moved_s: float  # when it began or was last seen to have a new result, of any monotonic clock
    measured: list[TaskResult] = field(default_factory=list)  # the finished tasks
    # of the finished tasks, until they are in a file
    rows: list[EvaluationRow] = field(default_factory=list)
    # reason -> number of tickets that ended without a group
    closed: dict[str, int] = field(default_factory=dict)
    seen_waiting: int = 0  # tickets without a result at that time

    def add(self, group: wire.Group) -> None:
        """Add the group of a finished task."""
        result = TaskResult.of_group(group)
        self.measured.append(result)
        self.rows.append(EvaluationRow(result, final_trajectories(group)[0], group.frames))

    def values(self) -> dict[str, float]:
        """Return the metrics, empty without results.

        They are ``eval/<name>`` for the actor, with avg@k and pass@k if tasks have several
        episodes, and ``eval/<policy>/<name>`` for another policy. Their label is ``step``. The
        actor's domains have more: see ``domain_figures``.
        """
        successes = [success for task in self.tries() for success in task]
        if not successes:
            return {}
        prefix = "eval" if self.policy == ACTOR else f"eval/{self.policy}"
        values = {
            f"{prefix}/step": float(self.step),
            f"{prefix}/success_rate": sum(successes) / len(successes),
            f"{prefix}/reward_mean": sum(self.rewards()) / len(successes),
        }
        for domain in self.domains:
            domain_successes = [success for task in self.tries(domain) for success in task]
            rate = sum(domain_successes) / len(domain_successes)
            values[f"{prefix}/domain/{domain}/success_rate"] = rate
        if self.policy != ACTOR:
            return values
        versions = [task.versions for task in self.measured if task.versions is not None]
        versions = versions or [(self.step, self.step)]
        values |= {
            "eval/policy_version_min": float(min(oldest for oldest, _ in versions)),
            "eval/policy_version_max": float(max(newest for _, newest in versions)),
            "eval/num_episodes": float(len(successes)),
            "eval/num_closed": float(sum(self.closed.values())),
        }
        values |= {
            f"eval/{name}": value
            for name, value in pass_at_k.pass_at_k_metrics(self.tries()).items()
        }
        for domain in self.domains:
            own_tasks = [task for task in self.measured if task.domain == domain]
            values |= {
                f"eval/domain/{domain}/{name}": value
                for name, value in domain_figures(own_tasks).items()
            }
        return values

    def ahead(self, other: Evaluation) -> dict[str, float]:
        """Return the lead in success rate over another policy on common tasks, and its error.

        Tasks and seeds are the same: it is the error of the mean of the differences per task. Empty
        below two tasks.
        """
        own_shares = self._by_task()
        other_shares = other._by_task()
        leads = [
            own_shares[task] - other_shares[task]
            for task in sorted(own_shares.keys() & other_shares.keys())
        ]
        if len(leads) < 2:
            return {}
        return {
            "ahead": statistics.fmean(leads),
            "ahead_stderr": statistics.stdev(leads) / math.sqrt(len(leads)),
        }

    def _by_task(self) -> dict[tuple[str, int], float]:
        """Return the share of each task's episodes that succeeded."""
        return {
            (task.domain, task.task_index): statistics.fmean(task.successes)
            for task in self.measured
        }

    @property
    def domains(self) -> list[str]:
        """Names of the domains with a finished task, sorted."""
        return sorted({task.domain for task in self.measured})

    def tries(self, domain: str | None = None) -> list[list[bool]]:
        """Return the successes of each task's episodes, of one domain or all."""
        return [list(task.successes) for task in self.measured if domain in (None, task.domain)]

    def rewards(self, domain: str | None = None) -> list[float]:
        """Return the reward of every episode, of one domain or all."""
        return [
            reward
            for task in self.measured
            if domain in (None, task.domain)
            for reward in task.rewards
        ]


class EvaluationQueue:
    """Evaluations of a run: tickets out, records in. Pure.

    Args:
        seed: of the run.
        first_number: of the next evaluation ticket.
        num_tasks: tasks of each domain; None: by its own section ``eval``, else ``eval.tasks``.
    """

    def __init__(
        self,
        section: EvalSection,
        domains: Mapping[str, DomainSection],
        seed: int,
        first_number: int = 1,
        num_tasks: Mapping[str, int] | None = None,
    ) -> None:
        self._section = section
        names = sorted(domains if section.domains is None else section.domains)
        self._domains = {name: domains[name] for name in names}
        self._sections = {name: section.of_domain(domains[name]) for name in names}
        self._seed = seed
        self._next = first_number
        self._num_tasks = num_tasks
        self.pending: list[Evaluation] = []

    def due(self, step: int, last_step: int) -> bool:
        """Return whether the actor is evaluated after ``step``; always after the last one."""
        every = self._section.every_steps
        if every == 0:
            return False
        if step == 0:
            return self._section.at_start
        return step % every == 0 or step == last_step

    def start(
        self, step: int, policy: str, min_version: int, now_s: float
    ) -> list[wire.EvalTicket]:
        """Begin an evaluation, and return its tickets."""
        tickets = [
            wire.EvalTicket(
                number=number,
                domain=name,
                task_index=index,
                seed=task_seed(self._seed, "eval", name, index),
                eval_step=step,
                policy=policy,
                min_version=min_version,
                group_size=self._sections[name].group_size,
                temperature=self._sections[name].temperature,
                deadline_s=seconds(self._domains[name].deadline_s),
            )
            for number, (name, index) in enumerate(self._tasks(), start=self._next)
        ]
        self._next += len(tickets)
        numbers = {ticket.number for ticket in tickets}
        self.pending.append(Evaluation(step, policy, numbers, now_s, seen_waiting=len(numbers)))
        return tickets

    def restore(self, step: int, policy: str, rows: Iterable[Mapping[str, Any]]) -> Evaluation:
        """Return a finished evaluation from the rows of its file.

        Raises:
            KeyError, TypeError, ValueError: if a row is not as ``EvaluationRow.plain`` makes it.
        """
        evaluation = Evaluation(step, policy, waiting=set(), moved_s=0.0)
        evaluation.measured = [TaskResult.of_row(row) for row in rows]
        if num_missing := len(self._tasks()) - len(evaluation.measured):
            evaluation.closed["unknown"] = max(0, num_missing)
        return evaluation

    def apply(self, record: wire.Group | wire.Closed) -> Evaluation | None:
        """Apply a ticket's first record, and return the evaluation that it completed."""
        evaluation = next(
            (pending for pending in self.pending if record.ticket in pending.waiting), None
        )
        if evaluation is None:
            return None
        evaluation.waiting.discard(record.ticket)
        if isinstance(record, wire.Closed):
            evaluation.closed[record.reason] = evaluation.closed.get(record.reason, 0) + 1
        else:
            evaluation.add(record)
        return self._finish(evaluation) if not evaluation.waiting else None

    def may_come(self, number: int) -> bool:
        """Return whether a group of this ticket will count: it is expected, or not issued yet."""
        return number >= self._next or any(
            number in evaluation.waiting for evaluation in self.pending
        )

    def expire(self, now_s: float) -> list[Evaluation]:
        """End and return the evaluations without a new result for ``eval.timeout_s``."""
        late = []
        for evaluation in self.pending:
            if evaluation.seen_waiting != len(evaluation.waiting):
                evaluation.seen_waiting = len(evaluation.waiting)
                evaluation.moved_s = now_s
            elif now_s - evaluation.moved_s >= seconds(self._section.timeout_s):
                late.append(evaluation)
        for evaluation in late:
            evaluation.closed["timeout"] = evaluation.closed.get("timeout", 0) + len(
                evaluation.waiting
            )
        return [self._finish(evaluation) for evaluation in late]

    def _finish(self, evaluation: Evaluation) -> Evaluation:
        self.pending.remove(evaluation)
        return evaluation

    def _tasks(self) -> list[tuple[str, int]]:
        """Return (domain, index) of all tasks; domains alternate, so all see similar weights."""
        counts = self._num_tasks
        if counts is None:
            # Validation fills it in wherever tasks are measured.
            counts = {name: own.tasks or 0 for name, own in self._sections.items()}
        num_rounds = max((counts[name] for name in self._domains), default=0)
        return [
            (name, index)
            for index in range(num_rounds)
            for name in self._domains
            if index < counts[name]
        ]
