"""The small form of every bench that docs/performance.md names: a few seconds each, on a machine
without a GPU.

Their figures mean nothing; that every path still works, and that every key of the last line is
there, is what counts.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.support.console_browser import CHROMIUM
from bench.support.hosts import network_namespaces

ROWS: Final = "{rows}"  # argument: a file of questions and answers
FOLDER: Final = "{folder}"  # argument: a folder for results
ROOT: Final = Path(__file__).parents[2]

# Benches that `make test`, or a target of its own, runs: what each needs is not there everywhere,
# or takes minutes.
TESTED: Final = {
    "bench.gpu": "tests/unit/bench/test_gpu_runner.py",
    "bench.hosts": "tests/hosts/test_run_between_hosts.py",
    "bench.peers": "tests/peers/test_trl.py",
}


def _no_problem() -> str:
    return ""


def _sandbox_problem() -> str:
    return "" if shutil.which("bwrap") else "bubblewrap is not installed: make bubblewrap"


def _tools_problem() -> str:
    for package, extra in (("mcp", "tools"), ("usearch", "retriever")):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: pip install 'rlearner[{extra}]'"
    return ""


def _browser_problem() -> str:
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: make test-console"
    return "" if Path(CHROMIUM).exists() else f"no Chromium at {CHROMIUM}"


@dataclass(frozen=True)
class SmokeCase:
    """A bench in a small form.

    Attributes:
        module: that ``python -m`` runs.
        keys: of the JSON object that it prints last; all of them must be there.
        arguments: of the command.
        constants: of modules, by ``module:NAME``, that make it small where no argument does; a
            function returns the small value for the full one.
        exit_codes: that are allowed; 1 where a small form misses a goal of its figures.
        problem: returns why it cannot run here, empty if it can.
    """

    module: str
    keys: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    exit_codes: tuple[int, ...] = (0,)
    problem: Callable[[], str] = _no_problem

    @property
    def name(self) -> str:
        """The name by which one case is chosen."""
        module = self.module.removeprefix("bench.")
        return f"{module} {self.arguments[-1]}" if module == "scale" else module


def _scale(
    name: str, keys: tuple[str, ...], problem: Callable[[], str] = _no_problem, **constants: Any
) -> SmokeCase:
    values = {f"bench.scale.{name}:{constant}": value for constant, value in constants.items()}
    return SmokeCase("bench.scale", keys, ("--one", name), values, problem=problem)


TINY_MODEL: Final = ("--hidden", "128", "--layers", "1")
FEW_REQUESTS: Final = ("--requests", "4", *TINY_MODEL, "--others", "1")  # also next to other work

CASES: Final = (
    SmokeCase(
        "bench.codec",
        ("encode_us", "decode_us", "check_us", "lists_encode_us"),
        ("--repeats", "40"),
    ),
    SmokeCase(
        "bench.bus",
        ("cycle_per_s", "cycle_per_s_sync_always"),
        ("--seconds", "0.3", "--repeats", "1"),
    ),
    SmokeCase("bench.engine", ("turns_per_s",), ("--requests", "4", "--repeats", "1", *TINY_MODEL)),
    SmokeCase(
        "bench.exact",
        ("equal", "tokens", "is_mean", "kl", "cost"),
        ("--pairs", "1", "--requests", "8", *TINY_MODEL),
    ),
    SmokeCase(
        "bench.weights", ("ratio_transfer",), ("--pairs", "7", "--layers", "1", "--bucket-mib", "8")
    ),
    SmokeCase(
        "bench.server",
        ("ratio_hf",),
        ("--only", "hf", "--pairs", "1", "--starts", "1", "--warm-up", "0", *FEW_REQUESTS),
    ),
    SmokeCase(
        "bench.update",
        ("tokens_lost_share",),
        ("--engine", "hf", "--rounds", "1", "--window", "2", "--settle", "0", *FEW_REQUESTS),
    ),
    SmokeCase(
        "bench.tools",
        ("mcp_call_ms", "mcp_http_call_ms", "function_call_ms", "retriever_qps", "recall_at_10"),
        ("--calls", "3", "--vectors", "300", "--queries", "10"),
        problem=_tools_problem,
    ),
    SmokeCase("bench.curves", ("rows",), ("--tiny", "--only", "number_line")),
    SmokeCase("bench.distill", ("teacher", "samples_ratio", "lost"), ("--small",)),
    SmokeCase("bench.selfplay", ("selfplay_random_loss", "lost"), ("--small",)),
    SmokeCase("bench.shared", ("lost",), ("--params-m", "1", "--steps", "2")),
    SmokeCase(
        "bench.first_day",
        ("reward_forms", "lines_yaml", "failed"),
        ("rewards",),
        {"bench.first_day:REWARD_FORMS": ("trl",)},
    ),
    SmokeCase(
        "bench.learner",
        ("share", "stages_ms", "pairs"),
        ("--only", "quickstart", "--case", "quickstart"),
        {
            "bench.learner:MAX_PAIRS": 1,
            "bench.learner:MIN_PAIRS": 1,
            "bench.learner:STAGES_REPEATS": 1,
        },
    ),
    SmokeCase(
        "bench.packing", ("quickstart", "long_tail", "groups"), ("--pairs", "1", "--samples", "6")
    ),
    SmokeCase(
        "bench.plan",
        ("plan_error", "kv_error"),
        ("--largest", "0.5"),
        {"bench.plan:cases": lambda cases: lambda sizes: list(cases(sizes))[:3]},
        exit_codes=(0, 1),
    ),
    SmokeCase(
        "bench.lengths",
        ("estimator", "ratio", "synthetic"),
        ("--seeds", "1"),
        {"bench.lengths:_EPOCHS": 2, "bench.lengths:_GROUP_SIZE": 2},
    ),
    SmokeCase(
        "bench.advice",
        ("median_error", "worst_error", "bottleneck_right", "rows"),
        ("--virtual",),
        {
            "bench.advice.__main__:VIRTUAL_STEPS": 14,
            "bench.advice.__main__:CASES": lambda cases: cases[:2],
        },
        exit_codes=(0, 1),
    ),
    SmokeCase(
        "bench.tail",
        ("gain_over_fifo", "share_1", "share_4", "oracle_share"),
        ("1",),
        {
            "bench.tail.scene:STEPS": 4,
            "bench.tail.scene:WARM_UP": 1,
            "bench.tail.__main__:STEPS": 4,
            "bench.tail.scene:GROUPS": 8,
        },
    ),
    SmokeCase(
        "bench.curriculum",
        ("samples_ratio", "seeds"),
        (
            *("--seeds", "1", "--every", "1", "--out", FOLDER),
            *("train.steps=2", "train.groups_per_step=2", "train.warmup_steps=0"),
            *("warm_start.steps=2", "warm_start.episodes=8", "eval.tasks=4"),
            *("domains.sokoban.group_size=2", "domains.sokoban.curriculum.tasks=4"),
        ),
        exit_codes=(0, 1),
    ),
    SmokeCase(
        "bench.answers",
        ("voided", "over_2_s", "wrong_verdicts", "per_s"),
        ("--every", "97"),
        exit_codes=(0, 1),
    ),
    SmokeCase("bench.score_references", ("rows", "correct", "scores_per_s"), (ROWS,)),
    SmokeCase("bench.attacks", ("attempts", "succeeded"), ("--only", "expired_key")),
    SmokeCase(
        "bench.sandbox",
        ("pairs", "escapes_tried"),
        ("--pairs", "1", "--no-escapes"),
        problem=_sandbox_problem,
    ),
    SmokeCase(
        "bench.tasks",
        ("tasks", "scripted", "cheating", "cheats"),
        ("--per-kind", "1", "--cheated-tasks", "1", "--no-provider"),
        problem=_sandbox_problem,
    ),
    SmokeCase(
        "bench.sandboxes",
        ("starts_per_s", "reset_ms", "live", "disk_mib_per_task", "provider_kills", "leaked"),
        ("--live", "4", "--kills", "2", "--starts", "4"),
        problem=_sandbox_problem,
    ),
    SmokeCase(
        "bench.cheats",
        ("forms", "tried", "succeeded", "canonical"),
        constants={"bench.cheats:FORMS": ("pairs",)},
        problem=_sandbox_problem,
    ),
    SmokeCase("bench.envhub", ("rows",), ("--sizes", "1@0.1", "--seconds", "1", "--no-hangs")),
    SmokeCase("bench.overlap", ("rows",), ("--seconds", "0.2", "--steps", "2", "--ratios", "1:1")),
    SmokeCase("bench.per_sample", ("load",), ("--groups", "1", "--steps", "1")),
    SmokeCase(
        "bench.exporter",
        ("exporter",),
        ("--sizes", "3"),
        {
            "bench.exporter:SETTLE_S": 1.0,
            "bench.exporter:WINDOW_S": 2.0,
            "bench.exporter:SCRAPE_EVERY_S": 1.0,
        },
    ),
    SmokeCase(
        "bench.console_index",
        ("steps", "search_ms", "query_ms"),
        ("--steps", "40"),
        {"bench.console_index:LIVE_STEPS": 5, "bench.console_index:REPEATS": 1},
    ),
    SmokeCase(
        "bench.console",
        ("page_ms", "search_ms"),
        constants={"bench.console:STEPS": 20, "bench.console:LOADS": 1, "bench.console:CPU_S": 1.0},
        problem=_browser_problem,
    ),
    SmokeCase(
        "bench.stripes",
        ("stripes_ratio",),
        ("--pairs", "1", "--layers", "1"),
        problem=network_namespaces.why_not,
    ),
    _scale("processes", ("processes",), SIZES=(20,), SETTLE_S=1.0, WINDOW_S=1.0),
    _scale("throughput", ("tickets_per_s", "tickets_group_kib"), STEPS=12),
    _scale("spreads", ("spreads",), ROWS=((4, 20),), WARM_UP_S=5.0, WINDOW_S=5.0),
    _scale("resume", ("resume_s", "resume_extra_mib"), GROUPS=3_000),
    _scale("groups", ("groups",), SIZES_MIB=(1, 8), TOTAL_MIB={1: 4, 8: 8}, ROUNDS={1: 1, 8: 1}),
    _scale(
        "intake",
        ("intake",),
        network_namespaces.why_not,
        SMALL_GROUPS=40,
        BEFORE_GROUPS=5,
        LARGE_GROUPS=4,
    ),
    _scale("marks", ("marks_per_s", "marks_in_hand"), IN_HAND=500, HUBS=2, WINDOW_S=2.0),
    _scale("soak", ("soak",), STEPS=8, RENAME_AT=4, PAUSE_AT=(2,), AWAY_AT=(3,)),
)
