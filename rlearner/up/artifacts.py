"""The end of ``rlearner up``: the pictures of the run, what happened, and what to do next."""

from __future__ import annotations

from pathlib import Path

from learner.credit import ledger_file, ledger_segments
from learner.reporting.metrics import read_lines
from rlearner.ops.drawing import Row, baselines, draw_rewards, render_before_and_after
from rlearner.up.failed_groups import NO_FAULT, by_reason
from rlearner.up.live_state import duration


def write_artifacts(folder: Path, seconds: float, cpu_s: dict[str, float], resume: str) -> None:
    """Draw the pictures of a run's folder, and print what happened and what to do next.

    Args:
        resume: the command that continues the run.
    """
    failed = failures_of(folder)
    lines = read_lines(folder / "metrics.jsonl")
    if not lines:
        print(
            "\n".join(
                [f"stopped before the first step; logs are in {folder / 'logs'}", *failed, "", "next:", f"  {resume}"]
            )
        )
        return
    made = [draw_rewards(folder.name, lines, folder / "reward.png"), *render_before_and_after(folder)]
    print("\n".join(summary(folder, lines, [path for path in made if path], seconds, cpu_s, failed, resume)))


def failures_of(folder: Path) -> list[str]:
    """Return one line that counts the run's failed groups, or nothing if none failed."""
    _, dead = ledger_file.final_counts(ledger_segments.read_newest(folder / ledger_segments.FOLDER)[0])
    failed = {reason: count for reason, count in dead.items() if reason not in NO_FAULT}
    return (
        [f"failed groups: {by_reason(failed)}; see {folder / 'logs'}, or rlearner trace {folder} TICKET"]
        if failed
        else []
    )


def summary(
    folder: Path,
    lines: list[Row],
    made: list[Path],
    seconds: float,
    cpu_s: dict[str, float],
    failed: list[str],
    resume: str,
) -> list[str]:
    """Return the lines printed at the end.

    Args:
        made: the pictures.
        seconds: since the start of the broker.
        cpu_s: processor seconds by process.
        failed: the result of ``failures_of``.
        resume: the command that continues the run.
    """
    last = lines[-1]
    measured = [
        (line.get("eval/step", line["step"]), line["eval/success_rate"])
        for line in lines
        if "eval/success_rate" in line
    ]
    words = ["", f"{last['step']} steps in {duration(seconds)}"]
    if measured:
        words.append(
            "success on held-out tasks: " + ", ".join(f"{rate:.3f} after step {step:.0f}" for step, rate in measured)
        )
    words += [f"success of the {name} engine on the same tasks: {rate:.3f}" for name, rate in baselines(lines).items()]
    counts = " + ".join(
        f"{last.get(f'ticket/{name}', 0):.0f} {name}" for name in ("trained", "filtered", "dropped", "dead", "open")
    )
    total = sum(cpu_s.values()) or 1.0
    words.append(
        "processor time: " + ", ".join(f"{name} {used:.1f} s ({used / total:.1%})" for name, used in cpu_s.items())
    )
    words += [f"tickets: {last.get('ticket/issued', 0):.0f} issued = {counts}", *failed, ""]
    newest = max((folder / "checkpoints").glob("step-*"), default=None)
    words += [f"  {path}" for path in [folder / "metrics.jsonl", *made, *([newest] if newest else [])]]
    words += ["", "next:", f"  {resume}", f"  tensorboard --logdir {folder / 'tensorboard'}"]
    if newest:
        words.append(
            f"  python -c \"from transformers import AutoModelForCausalLM as M; print(M.from_pretrained('{newest}'))\""
        )
    words.append("  change a setting: rlearner up <the same file> algorithm.clip_high=0.28 train.max_staleness=4")
    return words
