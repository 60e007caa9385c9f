"""Try wrong inputs to every command and file: each must end with exit code 2, one or two lines, and
leave nothing.

    python -m bench.wrong_inputs [WORD …]      # only inputs whose command line contains one of the words

The last line is JSON: ``tried``, ``good``, and ``bad``, the other command lines and how they ended.
Needs neither broker nor network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import psutil

LIMIT_S: Final = 240.0
MARK: Final = "RL_WRONG_INPUT"  # in the environment of everything that an input starts
NOWHERE: Final = ("--broker", "nats://127.0.0.1:1", "--connect-deadline", "0.5")
MODULES: Final = {
    "rlearner": "rlearner.cli",
    "broker": "broker.cli",
    "rollout-server": "rollout.cli",
    "envhub": "envhub.cli",
    "rewardhub": "rewardhub.cli",
}

# Files, each wrong in its own way; those without a suffix are folders of a run with this
# config.yaml.
FILES: Final = {
    "dup.yaml": "inherit: quickstart.yaml\ntrain:\n  lr: 1\n  lr: 2\n",
    "empty_value.yaml": "inherit: quickstart.yaml\ntrain:\n  lr:\n",
    "empty_section.yaml": "inherit: quickstart.yaml\ntrain:\n",
    "list.yaml": "- a\n- b\n",
    "word.yaml": "hello\n",
    "tab.yaml": "train:\n\tlr: 1\n",
    "open.yaml": "train: {lr: 1\n",
    "unknown.yaml": "inherit: quickstart.yaml\ntrainer: {lr: 1}\n",
    "loop.yaml": "inherit: loop.yaml\n",
    "orphan.yaml": "inherit: gone.yaml\n",
    "number_parent.yaml": "inherit: {a: 1}\n",
    "no_domain.yaml": "train: {steps: 1}\n",
    "interpolation.yaml": "inherit: quickstart.yaml\nrun: {name: '${no.such.key}'}\n",
    "env_syntax.yaml": "domains: {d: {env: './broken.py:Env', max_context_tokens: 600}}\n",
    "env_missing.yaml": "domains: {d: {env: './gone.py:Env', max_context_tokens: 600}}\n",
    "env_class.yaml": "domains: {d: {env: './fine.py:Nothing', max_context_tokens: 600}}\n",
    "env_function.yaml": "domains: {d: {env: './fine.py:score', max_context_tokens: 600}}\n",
    "env_raises.yaml": "domains: {d: {env: './fine.py:Raises', max_context_tokens: 600}}\n",
    "reward_raises.yaml": "domains: {d: {env: './fine.py:Fine', max_context_tokens: 600, rewards: [{name: "
    "'./fine.py:score'}]}}\n",
    "reward_missing.yaml": "domains: {d: {env: './fine.py:Fine', max_context_tokens: 600, rewards: [{name: "
    "'./fine.py:gone'}]}}\n",
    "qa_gone.yaml": "domains: {d: {env: qa, env_args: {path: gone.jsonl}, max_context_tokens: 600, rewards: [{name: "
    "math_answer}]}}\n",
    "qa_bad.yaml": "domains: {d: {env: qa, env_args: {path: bad.jsonl}, max_context_tokens: 600, rewards: [{name: "
    "math_answer}]}}\n",
    "qa_column.yaml": "domains: {d: {env: qa, env_args: {path: column.jsonl}, max_context_tokens: 600, rewards: "
    "[{name: math_answer}]}}\n",
    "sft_gone.yaml": "data: {train: gone.jsonl}\n",
    "sft_bad.yaml": "data: {train: bad.jsonl}\n",
    "bad.jsonl": '{"question": "a", "answer": "b"}\nnot json\n',
    "column.jsonl": '{"q": "a"}\n',
    "broken.py": "def f(:\n",
    "fine.py": (
        "from envhub.envs.base import Environment, Observation, StepResult\n"
        "def score(sample):\n    return 1 / 0\n"
        "class Fine(Environment):\n"
        "    def reset(self, task_index, split, seed): return Observation('a')\n"
        "    def step(self, text): return StepResult(Observation('b'), reward=1.0, done=True)\n"
        "class Raises(Fine):\n"
        "    def reset(self, task_index, split, seed): raise KeyError('x')\n"
    ),
    "runs/torn/config.yaml": "run: {name: torn\n",
    "runs/nameless/config.yaml": "train: {steps: 1}\n",
    "runs/bare/config.yaml": "run: {name: bare}\ntrain: {steps: 3}\n",
    "runs/noise/config.yaml": "run: {name: noise}\ntrain: {steps: 3}\n",
    "runs/noise/ledger/step-000000.jsonl": "gibberish\n",
    "file": "",
}

SETTINGS: Final = [
    *(
        "train.stepz=3",
        "train.steps=0",
        "train.steps=-1",
        "train.steps=x",
        "train.steps=1.5",
        "train.steps=",
    ),
    *(
        "train.lr=fast",
        "train.lr=0",
        "train.lr=nan",
        "train.groups_per_step=0",
        "train.max_staleness=-1",
    ),
    *(
        "train.on_late=maybe",
        "train.lr_schedule=zigzag",
        "train.backend=nope",
        "train.micro_batch_tokens=0",
    ),
    *(
        "algorithm=nope",
        "algorithm.adv_estimator=nope",
        "algorithm.pg_variant=nope",
        "algorithm.clip=x",
    ),
    *(
        "model.path=/no/such/model",
        "model.dtype=int3",
        "model.tiny.hidden_size=-4",
        "domains.lake.env=pond",
    ),
    *(
        "domains.lake.group_size=0",
        "domains.lake.max_turns=0",
        "domains.lake.sampling.temperature=-1",
    ),
    *(
        "domains.lake.sampling.max_tokens=9999",
        "domains.lake.env_args.size=1",
        "domains.lake.env_args.nope=1",
    ),
    *(
        "domains.lake.weight=0",
        "domains.lake.rewards=[{name:nope}]",
        "domains.lake=null",
        "eval.tasks=0",
    ),
    *(
        "eval.tasks=100000",
        "eval.every_steps=-1",
        "eval.baseline=actor",
        "warm_start.noise=2",
        "warm_start.domain=sea",
    ),
    *("rollout.engine=vlm", "rollout.max_running=0", "rollout.max_context_tokens=8", "envhub.n=0"),
    *(
        "envhub.step_timeout_s=-1",
        "rewardhub.workers=0",
        "checkpoint.keep=1",
        "samples.max_file_mib=0",
    ),
    *(
        "trackers.use=[nope]",
        "broker.bind=0.0.0.0",
        "run.name=a/b",
        "run.name=..",
        "run.dir=file",
        "run=5",
        "train=3",
    ),
    *("nonsense", "=3", "train..lr=1", "nope.x=1"),
    *(
        "model.chat_template=gone.jinja",
        "model.chat_template=word.yaml",
        "model.path=file",
        "model.path=bad.jsonl",
        "model.dtype=fp8",
    ),
    *(
        "domains.lake.examples=[{question:a}]",
        "domains.lake.examples=hello",
        "rollout.dtype=int8",
        "rollout.dtype=fp8",
        "samples.keep=maybe",
    ),
    *(
        "train.lora.rank=0",
        "train.lora.rank=many",
        "train.profile.steps=x",
        "train.weights_dtype=int4",
        "run.seed=x",
        "eval.at_start=perhaps",
    ),
]


def inputs() -> list[list[str]]:
    """Yield every wrong command line of all commands; the working folder holds ``FILES``."""
    good = ["configs/quickstart.yaml"]
    found = [["rlearner", "check", *good, setting] for setting in SETTINGS]
    configs = [name for name in FILES if name.endswith(".yaml") and "/" not in name]
    found += [["rlearner", "check", name] for name in configs if not name.startswith("sft_")]
    found += [
        ["rlearner", command, name]
        for command in ("start", "up", "doctor")
        for name in ("gone.yaml", "dup.yaml", "list.yaml")
    ]
    found += [
        ["rlearner", "sft", name]
        for name in ("sft_gone.yaml", "sft_bad.yaml", "gone.yaml", "configs/quickstart.yaml")
    ]
    found += [["rlearner", command, "gone.yaml"] for command in ("dpo", "distill")]
    evaluate = ["rlearner", "eval", "/no/such/model"]
    found += [[*evaluate, *good], evaluate[:2], evaluate]
    operations = ("audit", "status", "pause", "resume", "drain", "stop")
    found += [
        ["rlearner", command, *arguments]
        for command in operations
        for arguments in ([], ["none-such", *NOWHERE], ["x", "--nope"])
        if arguments or command != "status"  # without a name, that of the newest run
    ]
    found.append(["rlearner", "status", "--dir", "gone"])
    found += [
        ["rlearner", command, run]
        for command in ("audit", "status")
        for run in ("torn", "nameless")
    ]
    found += [
        ["rlearner", "audit", "bare"],
        ["rlearner", "trace", "bare", "1"],
        ["rlearner", "show", "bare", "1"],
    ]
    found += [
        ["rlearner", command, "bare", *rest]
        for command in ("trace", "show")
        for rest in ([], ["x"], ["-1"])
    ]
    found.append(["rlearner", "audit", "bare", "--tap", "gone.jsonl"])
    found.append(["rlearner", "replay", "bare", "--from", "0", "--to", "1"])
    ranges: tuple[list[str], ...] = ([], ["--from", "3", "--to", "1"], ["--from", "a", "--to", "1"])
    found += [["rlearner", "replay", "bare", *rest] for rest in ranges]
    found += [
        ["rlearner"],
        ["rlearner", "bogus"],
        ["rlearner", "check"],
        ["rlearner", "start", *good, "--gpus", "x"],
    ]
    start = ["rlearner", "start", *good]
    found += [[*start, *NOWHERE], [*start, "--broker", "http://x"], ["rlearner", "up"]]
    for member in ("envhub", "rewardhub", "rollout-server"):
        found += [[member, *NOWHERE], [member, "--nope"], [member, "--connect-deadline", "0"]]
        found.append([member, *NOWHERE, "--run", "a.b"])
        found.append([member, *NOWHERE[2:], "--broker", "nats://no-such-host.invalid:4222"])
        found.append([member, "--log-level", "LOUD"])
    found += [
        ["envhub", "--n", "0"],
        ["envhub", "demos", "gone.yaml"],
        ["envhub", "render", "gone.yaml"],
        ["rewardhub", "--pools", "a.b"],
    ]
    found += [
        ["rollout-server", *NOWHERE, "--engine", "vlm"],
        ["rollout-server", *NOWHERE, "what"],
        ["rollout-server", "--gpus", "x", *NOWHERE],
    ]
    found += [["rlearner", "new", *rest] for rest in ([], ["runs"], ["x/y", "--kind", "chess"])]
    found += [["rlearner", command] for command in ("units", "export", "diff", "draw", "invite")]
    found += [
        ["rlearner", "settings", "train.stepz"],
        ["rlearner", "export", "gone", "out"],
        ["rlearner", "diff", "bare", "gone"],
        ["rlearner", "draw", "gone"],
        ["rlearner", "logs", "gone"],
        ["rlearner", "advise", "gone"],
        ["rlearner", "plan", "gone.yaml"],
        ["rlearner", "plan", *good, "--gpus", "0"],
        ["rlearner", "units", "gone.yaml"],
        ["rlearner", "invite", "none-such", *NOWHERE],
        ["rlearner", "revoke", "none-such", *NOWHERE],
        ["rlearner", "api-key", "bogus"],
    ]
    found += [
        ["broker"],
        ["broker", "bogus"],
        ["broker", "status", *NOWHERE],
        ["broker", "serve", "--port", "99999"],
    ]
    found += [
        ["broker", "serve", "--bind", "0.0.0.0"],
        ["broker", "serve", "--store", "file/x"],
        ["broker", "serve", "--store-max-gib", "-1"],
    ]
    found += [
        ["broker", "control", "sideways"],
        ["broker", "dead"],
        ["broker", "dead", "show", "x"],
        ["broker", "dead", "list", *NOWHERE],
    ]
    return found


def attempt(command: list[str], folder: Path, number: int) -> str:
    """Return how a command line failed badly, or an empty string."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RL_BROKER", "RL_RUN")
    }
    environment |= {MARK: str(number), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", MODULES[command[0]], *command[1:]]
    try:
        done = subprocess.run(
            program,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {LIMIT_S:g} s"
    notes = "still waiting"  # on a loaded machine
    lines = [line for line in done.stderr.splitlines() if not line.endswith(notes)]
    if done.returncode != 2:
        return f"exit code {done.returncode}: {' | '.join(lines[-2:])}"
    if "Traceback" in done.stderr + done.stdout:
        return "a traceback"
    if not 1 <= len(lines) <= 2:
        return f"{len(lines)} lines: {' | '.join(lines)[:300]}"
    left = [process.pid for process in psutil.process_iter() if _is_of(process, number)]
    return f"processes {left} are left" if left else ""


def _is_of(process: psutil.Process, number: int) -> bool:
    try:
        return (
            process.environ().get(MARK) == str(number) and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.Error:
        return False


def main(words: list[str]) -> int:
    """Try all inputs; return 1 if one failed badly."""
    commands = [
        command
        for command in inputs()
        if not words or any(word in " ".join(command) for word in words)
    ]
    with (
        tempfile.TemporaryDirectory(prefix="wrong-inputs-") as name,
        ThreadPoolExecutor(max_workers=2) as pool,
    ):
        folder = Path(name)
        for file, text in FILES.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        (folder / "quickstart.yaml").write_text(
            (Path(__file__).parents[1] / "configs" / "quickstart.yaml")
            .read_text()
            .replace("inherit: base.yaml\n", "")
        )
        first = os.getpid() * 1000
        ended = list(
            pool.map(lambda job: attempt(job[1], folder, first + job[0]), enumerate(commands))
        )
    bad = [
        {"command": " ".join(command), "how": how}
        for command, how in zip(commands, ended, strict=True)
        if how
    ]
    for each in bad:
        print(f"{each['command']}: {each['how']}")
    print(json.dumps({"tried": len(commands), "good": len(commands) - len(bad), "bad": bad}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
