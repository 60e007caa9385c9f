"""Run every bench of docs/performance.md in a small form, two at a time, and check exit codes and
keys.

    python -m bench.smoke [NAME ...]

The last line is one JSON object: benches, failed (with the reason), skipped (likewise), seconds and
processor seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from bench.support.smoke_cases import CASES, FOLDER, ROOT, ROWS, SmokeCase

AT_ONCE: Final = 2
LIMIT_S: Final = 900.0  # of one bench, which takes seconds: it hangs
QUESTIONS: Final = [
    (f"What is {number} + {number}?", f"It is double.\n#### {2 * number}") for number in range(6)
]
ONE: Final = "--one-small"
SHOWN_LINES: Final = 25  # of a bench that failed


@dataclass(frozen=True)
class SmokeResult:
    """What became of a bench."""

    case: SmokeCase
    cpu_s: float
    seconds: float
    failure: str = ""  # why it counts as failed
    skipped: str = ""  # why it did not run


def run_case(case: SmokeCase, folder: Path) -> SmokeResult:
    """Run a bench in a process of its own.

    Args:
        folder: for its output, and for the file of questions.
    """
    if problem := case.problem():
        return SmokeResult(case, 0.0, 0.0, skipped=problem)
    places = {ROWS: str(folder / "rows.jsonl"), FOLDER: str(folder / case.name)}
    words = [places.get(word, word) for word in case.arguments]
    start = ["-m", "bench.smoke", ONE, case.name] if case.constants else ["-m", case.module]
    began = time.monotonic()
    log = folder / f"{case.name}.log"
    output = folder / f"{case.name}.out"
    with log.open("wb") as errors, output.open("wb") as lines:
        child = subprocess.Popen(
            [sys.executable, *start, *words], cwd=ROOT, stdout=lines, stderr=errors
        )
        ending = threading.Timer(LIMIT_S, child.kill)
        ending.start()
        _, status, usage = os.wait4(child.pid, 0)  # with the processor time of its children
        ending.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
    printed = output.read_text(errors="replace")
    failure = find_failure(case, child.returncode, printed)
    if failure:
        lines_of_log = (printed + log.read_text(errors="replace")).splitlines()
        print(
            "\n".join([f"--- {case.name}: {failure}", *lines_of_log[-SHOWN_LINES:]]),
            file=sys.stderr,
            flush=True,
        )
    return SmokeResult(case, usage.ru_utime + usage.ru_stime, time.monotonic() - began, failure)


def find_failure(case: SmokeCase, exit_code: int, printed: str) -> str:
    """Return what is wrong with a bench that has ended, empty if nothing is."""
    if exit_code not in case.exit_codes:
        return f"exit code {exit_code}; must be {' or '.join(map(str, case.exit_codes))}"
    try:
        last: Any = json.loads(printed.splitlines()[-1])
    except (IndexError, ValueError):
        return "the last line is no JSON object"
    missing = [key for key in case.keys if not isinstance(last, Mapping) or key not in last]
    return f"no key {', '.join(missing)} in its last line" if missing else ""


def run_small(name: str, arguments: Sequence[str]) -> int:
    """Set the constants of a case and run its bench here; return its exit code."""
    (case,) = (case for case in CASES if case.name == name)
    for place, value in case.constants.items():
        module, _, constant = place.partition(":")
        if not hasattr(import_module(module), constant):
            print(f"error: {module} has no {constant}", file=sys.stderr)
            return 2
        full = getattr(import_module(module), constant)
        setattr(import_module(module), constant, value(full) if callable(value) else value)
    if case.module == "bench.scale":
        return import_module("bench.scale.__main__").run_one(case.arguments[-1])  # type: ignore[no-any-return]
    is_package = (ROOT / case.module.replace(".", "/")).is_dir()
    sys.argv = [case.module, *arguments]
    main = import_module(f"{case.module}.__main__" if is_package else case.module).main
    return main() or 0


def main(names: Sequence[str]) -> int:
    """Run the named benches (all by default); return 1 if one fails, 2 if there is no such bench."""
    known = [case.name for case in CASES]
    if unknown := [name for name in names if name not in known]:
        print(f"error: no bench {unknown[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="rl-smoke-") as place,
        ThreadPoolExecutor(AT_ONCE) as threads,
    ):
        rows = "".join(
            json.dumps({"question": asked, "answer": answer}) + "\n" for asked, answer in QUESTIONS
        )
        (Path(place) / "rows.jsonl").write_text(rows)
        results = []
        for result in threads.map(lambda case: run_case(case, Path(place)), chosen(names)):
            results.append(result)
            outcome = result.failure or (f"skipped: {result.skipped}" if result.skipped else "ok")
            print(
                f"{result.case.name}: {result.seconds:.1f} s, {result.cpu_s:.1f} s of processor time: {outcome}"
            )
            sys.stdout.flush()
    figures: dict[str, Any] = {"benches": sum(not result.skipped for result in results)}
    figures["failed"] = {result.case.name: result.failure for result in results if result.failure}
    figures["skipped"] = {result.case.name: result.skipped for result in results if result.skipped}
    figures |= {
        "seconds": round(time.monotonic() - began, 1),
        "cpu_s": round(sum(one.cpu_s for one in results), 1),
    }
    print(json.dumps(figures))
    return int(bool(figures["failed"]))


def chosen(names: Sequence[str]) -> list[SmokeCase]:
    """Return the cases of these names, all if there are none."""
    return [case for case in CASES if not names or case.name in names]


if __name__ == "__main__":
    sys.exit(run_small(sys.argv[2], sys.argv[3:]) if sys.argv[1:2] == [ONE] else main(sys.argv[1:]))
