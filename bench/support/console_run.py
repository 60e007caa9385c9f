"""Writes the folder of a made-up run through the learner's own writers, one step at a time, for
benches of the console.

    python -m bench.support.console_run FOLDER --steps 10000

Everything is as a learner writes it: settings, metrics.jsonl, ledger, archive, evaluations,
tokenizer; only the tokens, their logprobs and the losses are made up. Checkpoints have no weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from broker.contract import codec, wire
from broker.jetstream.bus import LogRecord
from broker.runtime.process import Stop
from broker.settings.runspec import check_settings, load
from broker.system.private_files import private_folder, private_write
from learner.config import SamplesSection
from learner.credit.ledger import Action, IssueTicket, Ledger
from learner.credit.record_intake import read_record
from learner.credit.records import LedgerRecorder
from learner.credit.ticket_rules import rules_of
from learner.prepare import write_config
from learner.reporting.metrics import MetricsFile, count_tickets, finite_values, step_metrics
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny
from rlearner_text.tokenizer import Tokenizer

TINY: Final = TinyModel(
    hidden_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=8,
    vocab="chars",
)
SYLLABLES: Final = [
    "ba",
    "de",
    "fi",
    "go",
    "ku",
    "la",
    "me",
    "ni",
    "po",
    "ru",
    "sa",
    "te",
    "vi",
    "wo",
    "xa",
    "yu",
]
NUM_WORDS: Final = 4000
LOSSES: Final = (
    *(
        f"actor/{name}"
        for name in ("pg_loss", "entropy", "ppo_kl", "pg_clipfrac", "grad_norm", "lr", "kl_loss")
    ),
    *(
        f"rollout_corr/{name}"
        for name in ("kl", "k3_kl", "is_mean", "is_max", "ess", "clipped_fraction")
    ),
    *(f"weights/{name}" for name in ("seconds", "gbytes_per_s", "failures", "members")),
    *(f"queue/{name}/depth" for name in ("tickets", "episodes", "evaltickets", "samples")),
    *(f"made_up/{name}" for name in range(20)),
)
STEP_S: Final = 9.0  # mean
SERVERS: Final = ("rollout-1", "rollout-2", "rollout-3", "rollout-4")


class MadeUpRun:
    """One run, from its first step on.

    Args:
        folder: of the run; its last part is the run's name.
        steps: of the whole run.
        groups_per_step: groups of a step; with ``group_size`` episodes each.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        groups_per_step: int = 2,
        group_size: int = 5,
        seed: int = 0,
    ) -> None:
        self.folder = folder
        self.steps = steps
        self._random = np.random.default_rng(seed)
        given = [
            f"run.name={folder.name}",
            f"run.dir={folder.parent}",
            f"train.steps={steps}",
            f"train.groups_per_step={groups_per_step}",
            f"domains.lake.group_size={group_size}",
            "samples.keep=true",
        ]
        settings = check_settings(load("configs/quickstart.yaml", given))
        private_folder(folder)
        write_config(folder, settings.to_plain())
        if not (folder / "model").exists():
            build_tiny(folder / "model", TINY)
        self.tokenizer = Tokenizer.load(folder / "model")
        words = self._random.choice(SYLLABLES, (NUM_WORDS, 3))
        self._words = ["".join(parts) for parts in words]
        self.ledger = Ledger(
            rules_of(settings.train, settings.algorithm, settings.domains, settings.run.seed)
        )
        self.records = LedgerRecorder(folder, self.ledger, SamplesSection(keep=True), Stop())
        self.metrics = MetricsFile(folder / "metrics.jsonl")
        self._log: list[bytes] = []
        self._first = 1  # sequence of the first record in ``_log``
        self._groups: dict[int, wire.Group] = {}
        self._began = False
        self.time = 1.7e9

    async def step(self) -> None:
        """Write one step: the records that fill it, the ledger's lines, the line of metrics."""
        ledger = self.ledger
        if not self._began:
            self._began = True
            change = wire.RulesChange(epoch=1, rules=ledger.rules.plain())
            self._log.append(codec.encode(change))
            opened = ledger.open_credit()
            await self.records.began(opened)
            self._answer(opened)
        while not ledger.full:
            seq = ledger.state.position + 1
            data = self._log.pop(0)
            message = codec.decode(data, wire.Group, wire.Closed, wire.RulesChange)
            entry = LogRecord(seq, message, "", getattr(message, "ticket", 0), data)
            read = read_record(entry, ledger, self.tokenizer.vocab_size)
            actions = ledger.apply(read.record, seq)
            await self.records.consumed(entry, read, actions)
            if read.group is not None:
                self._groups[read.group.ticket] = read.group
            self._answer(actions)
        taken = list(ledger.state.taken)
        groups = [self._groups.pop(entry.number) for entry in taken]
        actions = ledger.complete_step()
        await self.records.completed(taken, [entry.number for entry in taken], actions)
        self._answer(actions)
        self._write_line(groups)
        for number in [number for number in self._groups if number not in ledger.state.live]:
            del self._groups[number]

    def evaluate(self, num_tasks: int = 50) -> None:
        """Write an evaluation of the newest step."""
        step = self.ledger.state.version
        rows = [self._evaluated(index) for index in range(num_tasks)]
        path = private_folder(self.folder / "evals") / f"actor-step-{step:06d}.jsonl"
        private_write(path, "".join(json.dumps(row) + "\n" for row in rows).encode())

    def checkpoint(self) -> None:
        """Write a checkpoint of the newest step that has no weights."""
        step = self.ledger.state.version
        private_folder(self.folder / "checkpoints")
        own = self.folder / "checkpoints" / f"step-{step:06d}" / "learner"
        own.mkdir(parents=True, mode=0o700)
        private_write(
            own / "learner.json", json.dumps({"step": step, "ledger": self.ledger.dump()}).encode()
        )

    def close(self) -> None:
        self.records.close()
        self.metrics.close()

    # -- what hubs would send

    def _answer(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, IssueTicket):
                self._log.append(codec.encode(self._record(action.ticket)))

    def _record(self, ticket: wire.Ticket) -> wire.Group | wire.Closed:
        if ticket.number % 101 == 0:
            detail = "KeyError: 'lake' in frozenlake.py:88"
            return wire.Closed(
                ticket=ticket.number,
                domain=ticket.domain,
                reason="env_error",
                detail=detail,
                by="envhub-1",
            )
        prompt = f"Task {ticket.task_index}: {self._text(8)}?"
        skill = min(0.9, 0.2 + ticket.number / (4 * max(self.steps, 1)))
        trajectories = [
            self._trajectory(ticket, episode, prompt, skill) for episode in range(ticket.group_size)
        ]
        return wire.Group(
            ticket=ticket.number,
            domain=ticket.domain,
            task_index=ticket.task_index,
            min_version=ticket.min_version,
            hub=f"envhub-{1 + ticket.number % 2}",
            deliveries=1,
            pools=[],
            trajectories=trajectories,
            prompt=prompt,
            reference=self._words[ticket.task_index % NUM_WORDS],
            generate_s=float(self._random.gamma(2.0, 1.5)),
            env_step_s=float(self._random.gamma(2.0, 0.2)),
        )

    def _trajectory(
        self, ticket: wire.Ticket, episode: int, prompt: str, skill: float
    ) -> wire.Trajectory:
        ids = array("i")
        mask = bytearray()
        turns = []
        response = ""
        server = SERVERS[int(self._random.integers(len(SERVERS)))]
        for number in range(2):
            seen = self.tokenizer.encode(
                f"<|im_user|>{prompt if not number else self._text(3)}<|im_end|><|im_assistant|>"
            )
            response = f"{self._text(6)} needle{ticket.number}" if episode == 0 else self._text(7)
            said = self.tokenizer.encode(response + "<|im_end|>")
            ids.extend(seen)
            start = len(ids)
            ids.extend(said)
            mask += bytes(len(seen)) + b"\1" * len(said)
            valid = bool(self._random.random() < 0.95)
            turns.append(
                wire.Turn(
                    start=start,
                    end=len(ids),
                    reward=0.0,
                    valid=valid,
                    finish_reason="stop",
                    server=server,
                )
            )
        success = bool(self._random.random() < skill)
        sampled = np.frombuffer(bytes(mask), np.uint8)
        logprobs = np.where(sampled == 1, -self._random.exponential(0.4, len(ids)), 0.0).astype(
            "<f4"
        )
        total = int(sampled.sum())
        half = int(sampled.sum()) // 2
        newest = min(ticket.min_version + 1, self.ledger.state.version)
        runs = (
            [ticket.min_version, half, newest, total - half]
            if newest > ticket.min_version
            else [newest, total]
        )
        reward = float(success) + 0.1 * round(float(self._random.random()), 2)
        return wire.Trajectory(
            episode=episode,
            token_ids=wire.column(ids, "<i4"),
            loss_mask=wire.column(mask, "|u1"),
            logprobs=wire.column(logprobs, "<f4"),
            version_runs=wire.column(runs, "<i4"),
            turns=turns,
            reward=reward,
            reward_parts={"env": float(success), "style": reward - float(success)},
            success=success,
            end="terminated",
            response=response,
            metrics={"num_turns": 2.0},
        )

    def _text(self, num_words: int) -> str:
        # a few words are very common
        ranks = np.minimum(self._random.zipf(1.3, num_words), NUM_WORDS) - 1
        return " ".join(self._words[rank] for rank in ranks)

    def _evaluated(self, index: int) -> dict[str, Any]:
        success = bool(self._random.random() < 0.5)
        frames = [
            json.dumps({"task_index": index, "seed": index, "split": "eval", "text": "SFFF\nFHFH"})
        ] * 4
        row = {
            "domain": "lake",
            "task_index": index,
            "success": [success],
            "reward": [float(success)],
        }
        return {
            **row,
            "prompt": self._text(12),
            "text": self._text(20),
            "response": self._text(6),
            "frames": frames,
        }

    def _write_line(self, groups: Sequence[wire.Group]) -> None:
        ledger = self.ledger
        step = ledger.state.version
        wall = STEP_S * float(self._random.uniform(0.7, 1.3))
        self.time += wall
        train = wall * float(self._random.uniform(0.4, 0.7))
        values = step_metrics(groups, step - 1) | {
            name: float(self._random.normal()) for name in LOSSES
        }
        values |= {
            "time/step": wall,
            "time/train": train,
            "time/offer_weights": 0.05 * wall,
            "time/wait_for_batch": 0.5 * wall,
        }
        values |= {
            "trainer/idle_ratio": 1 - train / wall - 0.05,
            "perf/tokens_per_s": 4000.0 + step % 100,
        }
        counts = {
            name: int(count)
            for name, count in count_tickets(ledger).items()
            if name.startswith("ticket/")
        }
        head = {"step": step, "policy_version": step, "time": self.time}
        self.metrics.write(head | finite_values(values) | counts)


async def write_run(
    folder: Path, steps: int, *, until: int | None = None, **more: Any
) -> MadeUpRun:
    """Write a run up to a step, with an evaluation and a checkpoint every 500 steps; the caller
    closes it.
    """
    run = MadeUpRun(folder, steps=steps, **more)
    for step in range(1, (until or steps) + 1):
        await run.step()
        if step % 500 == 0:
            run.evaluate()
            run.checkpoint()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    asyncio.run(write_run(options.folder, options.steps)).close()


if __name__ == "__main__":
    main()
