"""Lets a shipped coding agent, unmodified, do a small task in a folder of its own.

    python harness.py claude_code < task.json     # or codex, opencode, mini_swe_agent

It reads its endpoint and key from ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, or OPENAI_BASE_URL and
OPENAI_API_KEY, writes the numbers to add up into a folder, starts the agent there without a
terminal, and prints whether the folder holds their sum. CLAUDE_CODE, CODEX, OPENCODE and
MINI_SWE_AGENT name the programs, if they are not ``claude``, ``codex``, ``opencode`` and ``mini``
on PATH.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

PROMPT = "Add up the numbers in numbers.txt and write their sum, digits only, to sum.txt."
# what they would ask other hosts than their endpoint for, such as updates and lists of models
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
# of OpenCode's model, which asks for no more than this; the run's own limits hold in any case
OPENCODE_LIMIT = {"context": 200_000, "output": 32_000}


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


def opencode() -> list[str]:
    """Return the command of OpenCode, whose endpoint is a provider of its configuration."""
    model = os.environ["OPENAI_MODEL"]
    options = {"baseURL": os.environ["OPENAI_BASE_URL"], "apiKey": "{env:OPENAI_API_KEY}"}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "rlearner",
        "options": options,
        "models": {model: {"name": model, "limit": OPENCODE_LIMIT}},
    }
    config = {
        "provider": {"rlearner": provider},
        "model": f"rlearner/{model}",
        "small_model": f"rlearner/{model}",
        "permission": "allow",
        "share": "disabled",
        "autoupdate": False,
    }
    # the key stays in its variable
    os.environ["OPENCODE_CONFIG_CONTENT"] = json.dumps(config)
    program = os.environ.get("OPENCODE", "opencode")
    return [program, "run", "--model", f"rlearner/{model}", PROMPT]


def mini_swe_agent() -> list[str]:
    """Return the command of mini-swe-agent, which finds its endpoint in the environment."""
    os.environ["MSWEA_CONFIGURED"] = "true"
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
    # a model that litellm does not know has no price
    os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
    # the hub tries again what can be tried again
    os.environ["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] = "1"
    program = os.environ.get("MINI_SWE_AGENT", "mini")
    model = f"openai/{os.environ['OPENAI_MODEL']}"
    return [program, "-y", "--exit-immediately", "-m", model, "-t", PROMPT]


HARNESSES = {
    "claude_code": claude_code,
    "codex": codex,
    "opencode": opencode,
    "mini_swe_agent": mini_swe_agent,
}


def main() -> None:
    """Play one task and print what it was worth."""
    task = json.load(sys.stdin)
    numbers = random.Random(task["seed"]).sample(range(100), 5)
    command = HARNESSES[sys.argv[1]]()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name, "home")
        work = Path(name, "work")
        home.mkdir()
        work.mkdir()
        (work / "numbers.txt").write_text("".join(f"{number}\n" for number in numbers))
        env = {**os.environ, **QUIET, "HOME": str(home), "CODEX_HOME": str(home)}
        env |= {"MSWEA_GLOBAL_CONFIG_DIR": str(home), "XDG_CONFIG_HOME": str(home / "config")}
        env |= {"XDG_DATA_HOME": str(home / "data"), "XDG_STATE_HOME": str(home / "state")}
        env["XDG_CACHE_HOME"] = str(home / "cache")
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
