"""Lets a shipped coding agent, unmodified, do a small task in a folder of its own.

    python harness.py claude_code < task.json
    python harness.py codex < task.json

It reads its endpoint and key from ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, or OPENAI_BASE_URL and
OPENAI_API_KEY, writes the numbers to add up into a folder, starts the agent there without a
terminal, and prints whether the folder holds their sum. CLAUDE_CODE and CODEX name the programs, if
they are not ``claude`` and ``codex`` on PATH.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

PROMPT = "Add up the numbers in numbers.txt and write their sum, digits only, to sum.txt."
# what Claude Code would send to other hosts than its endpoint
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
}


def claude_code() -> list[str]:
    """Return the command of Claude Code in print mode."""
    program = os.environ.get("CLAUDE_CODE", "claude")
    tools = "Bash,Read,Write,Edit"
    return [program, "-p", PROMPT, "--output-format", "json", "--allowedTools", tools]


def codex() -> list[str]:
    """Return the command of Codex, whose endpoint is a provider of its configuration."""
    provider = {
        "name": "rlearner",
        "base_url": os.environ["OPENAI_BASE_URL"],
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
    }
    # JSON strings are TOML strings
    fields = [
        f"model_providers.rlearner.{key}={json.dumps(value)}" for key, value in provider.items()
    ]
    # updates, statistics and the list of plug-ins would be asked for at other hosts
    silent = ["check_for_update_on_startup", "analytics.enabled", "features.plugins"]
    settings = ['model_provider="rlearner"', *[f"{name}=false" for name in silent], *fields]
    command = [os.environ.get("CODEX", "codex"), "exec", "--skip-git-repo-check"]
    command += ["--dangerously-bypass-approvals-and-sandbox", "-m", os.environ["OPENAI_MODEL"]]
    for setting in settings:
        command += ["-c", setting]
    return [*command, PROMPT]


def main() -> None:
    """Play one task and print what it was worth."""
    task = json.load(sys.stdin)
    numbers = random.Random(task["seed"]).sample(range(100), 5)
    command = {"claude_code": claude_code, "codex": codex}[sys.argv[1]]()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name, "home")
        work = Path(name, "work")
        home.mkdir()
        work.mkdir()
        (work / "numbers.txt").write_text("".join(f"{number}\n" for number in numbers))
        env = {**os.environ, **QUIET, "HOME": str(home), "CODEX_HOME": str(home)}
        ended = subprocess.run(
            command, cwd=work, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if ended.returncode:
            # a request that was refused; the hub knows whether the policy is to blame
            sys.exit(f"{ended.stderr[-2000:]}{ended.stdout[-2000:]}")
        answer = work / "sum.txt"
        is_right = answer.is_file() and answer.read_text().strip() == str(sum(numbers))
    print(json.dumps({"reward": float(is_right), "success": is_right}))


if __name__ == "__main__":
    main()
