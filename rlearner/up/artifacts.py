"""The end of ``rlearner up``: the pictures of the run, what happened, and what to do next."""

from __future__ import annotations

from pathlib import Path

from learner.credit import ledger_file, ledger_segments
from learner.reporting.metrics import read_lines, step_of
from rlearner.ops.drawing import Row, baseline_rates, draw_rewards, render_before_and_after
from rlearner.up.failed_groups import NO_FAULT, by_reason
from rlearner.up.live_state import format_duration
from rlearner.up.next_steps import next_steps
from rlearner.up.output import Output


def write_artifacts(
    folder: Path, seconds: float, cpu_s: dict[str, float], resume: str, say: Output
) -> None:
    """Draw the pictures of a run, and print what happened and ``resume``, the next command."""
    failed = failures_of(folder)
    lines = read_lines(folder / "metrics.jsonl")
    if not lines:
        text = f"stopped before the first step; logs are in {folder / 'logs'}"
        lines_of_text = [text, *failed, "", "next:", f"  {resume}"]
        say("ended", "\n".join(lines_of_text), run=folder.name, step=0, failed=failed, next=resume)
        return
    chart = draw_rewards(folder.name, lines, folder / "reward.png")
    pictures = [path for path in (chart, *render_before_and_after(folder)) if path]
    text = "\n".join(
        _summary_lines(
            folder,
            lines,
            pictures,
            seconds=seconds,
            cpu_s=cpu_s,
            failed=failed,
            resume=resume,
        )
    )
    figures = {
        "run": folder.name,
        "step": lines[-1]["step"],
        "seconds": round(seconds, 1),
        "cpu_s": cpu_s,
    }
    say(
        "ended",
        text,
        **figures,
        figures=lines[-1],
        failed=failed,
        files=list(map(str, pictures)),
        next=resume,
    )


def failures_of(folder: Path) -> list[str]:
    """Return one line that counts the run's failed groups, or nothing if none failed."""
    _, dead = ledger_file.final_counts(
        ledger_segments.read_newest(folder / ledger_segments.FOLDER)[0]
    )
    failed = {reason: count for reason, count in dead.items() if reason not in NO_FAULT}
    if not failed:
        return []
    return [
        f"failed groups: {by_reason(failed)}; see {folder / 'logs'}, "
        f"or rlearner trace {folder} TICKET"
    ]


def _summary_lines(
    folder: Path,
    lines: list[Row],
    pictures: list[Path],
    seconds: float,
    cpu_s: dict[str, float],
    failed: list[str],
    resume: str,
) -> list[str]:
    """Return the lines printed at the end.

    Args:
        seconds: since the start of the broker.
        cpu_s: processor seconds by process.
        failed: the result of ``failures_of``.
    """
    last = lines[-1]
    evals = [line for line in lines if "eval/success_rate" in line]
    texts = ["", f"{last['step']} steps in {format_duration(seconds)}"]
    if evals:
        rates = ", ".join(
            f"{line['eval/success_rate']:.3f} after step {step_of(line, 'eval/success_rate')}"
            for line in evals
        )
        texts.append(f"success on held-out tasks: {rates}")
    texts += [
        f"success of the {name} engine on the same tasks: {rate:.3f}"
        for name, rate in baseline_rates(lines).items()
    ]
    states = ("trained", "filtered", "dropped", "dead", "open")
    counts = " + ".join(f"{last.get(f'ticket/{name}', 0):.0f} {name}" for name in states)
    total = sum(cpu_s.values()) or 1.0
    shares = ", ".join(f"{name} {cpu:.1f} s ({cpu / total:.1%})" for name, cpu in cpu_s.items())
    texts.append(f"processor time: {shares}")
    texts += [f"tickets: {last.get('ticket/issued', 0):.0f} issued = {counts}", *failed, ""]
    newest = max((folder / "checkpoints").glob("step-*"), default=None)
    paths = [folder / "metrics.jsonl", *pictures]
    if newest:
        paths.append(newest)
    texts += [f"  {path}" for path in paths]
    texts += ["", "next:", *(f"  {text}" for text in next_steps(folder, lines, resume))]
    return texts
