"""Counts the attacks of tests/attacks that were tried and those that succeeded.

    python -m bench.attacks [--only TEXT]

Every test there is one attempt by a stranger, a compromised process, or a model's words, judged
from outside. An attempt whose test does not pass counts as succeeded; a skipped one does not count
as tried. ``reply_attacks`` are those that name a forbidden subject as the place of a reply.
``loop_stall_ms`` is the longest silence of a server that reads a prompt of 8 MB.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.support.long_prompt import TEXTS, measure

ATTACKS = Path(__file__).parents[1] / "tests" / "attacks"


class AttackCounter:
    """A pytest plugin that counts tests by file and outcome."""

    def __init__(self) -> None:
        self.attempts: Counter[str] = Counter()
        self.succeeded: list[str] = []
        self.skipped = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test once: when it was called, or when its setup ended it."""
        if report.skipped:
            self.skipped += 1
        elif report.when == "call" or report.failed:
            self.attempts[Path(report.nodeid.partition("::")[0]).stem.removeprefix("test_")] += 1
            if report.failed:
                self.succeeded.append(report.nodeid)


def main() -> int:
    """Run the attacks and print one JSON line last; return 1 if one succeeded or none was tried.

    ``loop_stall_ms`` is the longest silence of a server that reads a prompt of 8 MB.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only attacks whose name contains this"
    )
    options = parser.parse_args()
    counter = AttackCounter()
    pytest.main(
        ["-q", str(ATTACKS), "-k", options.only, "-p", "no:cacheprovider"], plugins=[counter]
    )
    for attack in counter.succeeded:
        print(f"succeeded: {attack}", file=sys.stderr)
    figures = {
        "attempts": counter.attempts.total(),
        "run_code_attacks": counter.attempts["run_code_attacks"],
        "reply_attacks": counter.attempts["reply_attacks"],
        "succeeded": len(counter.succeeded),
        "skipped": counter.skipped,
        "loop_stall_ms": max(measure(text)["loop_stall_ms"] for text in TEXTS.values()),
        "by_file": dict(sorted(counter.attempts.items())),
    }
    print(json.dumps(figures))
    return int(bool(counter.succeeded) or not counter.attempts)


if __name__ == "__main__":
    sys.exit(main())
