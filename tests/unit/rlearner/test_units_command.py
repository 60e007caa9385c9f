"""``rlearner units``: what each host of a plan gets, what is refused, and what is never
overwritten.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlearner.cli import main
from rlearner.plan.candidates import Plan
from rlearner.plan.facts import Machine, Memory, Part
from rlearner.plan.launches import Launch, host_launches
from rlearner.plan.serving_memory import ServerLayout
from rlearner.plan.throughput import StepTimes
from rlearner.plan.training_memory import LearnerLayout
from rlearner.units.host_files import Fleet, host_files, units_of
from rlearner.units.services import static_files

QUICK = "configs/quickstart.yaml"
Captured = pytest.CaptureFixture[str]
NOTHING = Memory((Part("weights", 1, ""),), "")
HOSTS = {"train": "10.0.0.1", "gen1": "10.0.0.2", "gen2": "fd00::3"}


def plan(ranks: int, rewards: int = 0, servers: int = 2, *, shared: bool = False) -> Plan:
    layout = LearnerLayout("ddp", ranks)
    return Plan(
        layout,
        NOTHING,
        ServerLayout(),
        None,
        servers,
        rewards,
        None,
        StepTimes(1.0, 1.0),
        shared=shared,
    )


def files_of(host: str, starts: list[Launch], hosts: dict[str, str] = HOSTS) -> dict[str, str]:
    return host_files(
        Fleet("lake", hosts, ("rollout", "rewardhub"), "run: {name: lake}\n", "/opt/r/bin"),
        host,
        starts,
    )


def test_the_launches_of_each_host_become_units() -> None:
    machine, fleet = Machine(12, 1.0, 3), Fleet("lake", HOSTS, (), "", "/opt/r/bin")
    units = [
        units_of(fleet, host_launches(plan(6, rewards=2), machine, host, 8)) for host in range(3)
    ]
    assert units == [
        ["rlearner-broker.service", "envhub@1.service", "rlearner@lake.service"],
        ["rollout-server@2-3.service", "rlearner@lake.service"],
        ["rollout-server@0-1.service", "rewardhub@1.service"],
    ]


def test_the_first_host_has_the_broker_and_writes_the_tokens() -> None:
    found = files_of("train", host_launches(plan(6, rewards=2), Machine(12, 1.0, 3), 0, 8))
    assert found["etc/rlearner/rlearner-broker.env"] == 'OPTIONS="--bind 10.0.0.1 --port 4222"\n'
    assert found["etc/rlearner/rlearner.env"] == 'RL_RUN="lake"\nRL_BROKER="tls://10.0.0.1:4222"\n'
    assert found["etc/rlearner/envhub@1.env"] == 'OPTIONS="--n 8"\n'
    options = "--gpus 0-3 --nnodes 2 --node-rank 0 --rendezvous 10.0.0.1:29400"
    assert found["etc/rlearner/rlearner@lake.env"] == f'OPTIONS="{options}"\n'
    assert found["etc/rlearner/lake.yaml"] == "run: {name: lake}\n"
    assert "ExecStart=/opt/r/bin/envhub " in found["etc/systemd/system/envhub@.service"]
    assert not any("join.conf" in name or "node.conf" in name for name in found)
    for role, name in (("rollout", "rollout-server"), ("rewardhub", "rewardhub")):
        assert f"invite {role} --run lake --broker tls://10.0.0.1:4222" in found["README.md"]
        assert f"--out /var/lib/rlearner/{name}.token" in found["README.md"]


def test_other_hosts_join_with_tokens_and_a_further_node_does_not_report() -> None:
    machine = Machine(12, 1.0, 3)
    second = files_of("gen1", host_launches(plan(6, rewards=2), machine, 1, 8))
    assert (
        second["etc/systemd/system/rollout-server@.service.d/join.conf"]
        == static_files()["join.conf"]
    )
    assert second["etc/systemd/system/rlearner@lake.service.d/node.conf"].startswith(
        "[Service]\nType=exec\n"
    )
    assert "--gpus 0-1 --nnodes 2 --node-rank 1" in second["etc/rlearner/rlearner@lake.env"]
    assert "rollout-server.token" in second["README.md"]
    assert "nodes.key" in second["README.md"]
    third = files_of("gen2", host_launches(plan(6, rewards=2), machine, 2, 8))
    assert third["etc/rlearner/rewardhub@1.env"] == 'OPTIONS="--gpus 2-3"\n'
    assert "etc/rlearner/lake.yaml" not in third
    assert "rewardhub.token and rollout-server.token" in third["README.md"]


def test_learner_and_server_share_the_only_gpu() -> None:
    found = files_of(
        "one", host_launches(plan(1, servers=1, shared=True), Machine(1, 1.0), 0, 8), {"one": ""}
    )
    assert found["etc/rlearner/rollout-server@0.env"] == 'OPTIONS="--share-gpus"\n'
    assert found["etc/rlearner/rlearner@lake.env"] == 'OPTIONS="--gpus 0 --share-gpus"\n'
    assert found["etc/rlearner/rlearner.env"] == 'RL_RUN="lake"\n'


def test_a_host_without_gpus_runs_everything(capsys: Captured, tmp_path: Path) -> None:
    words = ["units", QUICK, "run.name=lake", "train.steps=7"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = ["rlearner-broker", "envhub@1", "rollout-server@cpu", "rewardhub@1", "rlearner@lake"]
    assert found["units"] == [f"{name}.service" for name in names]
    assert found["run"] == "lake"
    assert "steps: 7," in found["files"]["etc/rlearner/lake.yaml"]
    for name in ("envhub@.service", "rlearner-broker.service", "rlearner.target"):
        assert found["files"][f"etc/systemd/system/{name}"] == static_files()[name]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert all(f"{name}\n{text}" in printed for name, text in found["files"].items())

    assert main([*words, "--write", str(tmp_path)]) == 0
    there = {
        str(file.relative_to(tmp_path)): file.read_text()
        for file in tmp_path.rglob("*")
        if file.is_file()
    }
    assert there == found["files"]
    assert {oct(file.stat().st_mode & 0o777) for file in tmp_path.rglob("*") if file.is_file()} == {
        "0o644"
    }
    assert main([*words, "--write", str(tmp_path)]) == 0  # the same again
    capsys.readouterr()
    assert main([*words[:-1], "train.steps=8", "--write", str(tmp_path)]) == 2
    file = tmp_path / "etc/rlearner/lake.yaml"
    expected = f"error: --write {tmp_path}: {file} holds something else; remove it, or name another folder\n"
    assert capsys.readouterr() == ("", expected)
    assert file.read_text() == found["files"]["etc/rlearner/lake.yaml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hosts", "a=10.0.0.1,b=10.0.0.2", "--host", "a"], "--hosts: several hosts need --gpus"),
        (
            ["--gpus", "4", "--hosts", "a=10.0.0.1,b=10.0.0.2"],
            "--host: which one; --hosts has a, b",
        ),
        (
            ["--gpus", "4", "--hosts", "a=10.0.0.1,b=10.0.0.2", "--host", "c"],
            "--host: 'c' is not allowed; one of a, b",
        ),
        (
            ["--gpus", "3", "--hosts", "a=10.0.0.1,b=10.0.0.2", "--host", "a"],
            "it must divide --gpus 3",
        ),
        (
            ["--gpus", "4", "--hosts", "a=127.0.0.1,b=10.0.0.2", "--host", "a"],
            "by which the other hosts reach a",
        ),
        (
            ["--gpus", "4", "--hosts", "a,b", "--host", "a"],
            "--hosts: 'a' is not allowed; NAME=ADDRESS",
        ),
        (["--gpus", "4", "--hosts", "a=10.0.0.1,a=10.0.0.2", "--host", "a"], "each name once"),
        (
            ["--gpus", "4", "--hosts", "a=10.0.0.1,b=10.0.0.1", "--host", "a"],
            "another host has this address",
        ),
        (
            ["--bin", "/root/.venv/bin"],
            "--bin: '/root/.venv/bin' is not allowed; units do not see /home, /root",
        ),
        (["--bin", "bin"], "--bin: 'bin' is not allowed; an absolute path"),
        (["--write", QUICK], "--write configs/quickstart.yaml: expected a folder"),
        (
            ["--bin", "/opt/../tmp/bin"],
            "--bin: '/opt/../tmp/bin' is not allowed; units do not see /home, /root",
        ),
        (["train.lr=fast"], "train.lr: 'fast' is not allowed"),
        (["envhub.pass_env=[1]"], "envhub.pass_env"),
    ],
)
def test_what_cannot_be_is_one_line(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / QUICK).write_text("inherit: quickstart\n") if "--write" in words else None
    assert main(["units", QUICK, "run.name=lake", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


HIDDEN_VALUES = [
    ("run.dir=/tmp/runs", "run.dir: '/tmp/runs'"),
    ("model.path=/home/ada/model", "model.path: '/home/ada/model'"),
    ("model.tiny.corpus=/var/tmp/words.txt", "model.tiny.corpus: '/var/tmp/words.txt'"),
    ("domains.lake.env=/root/lake.py:Lake", "domains.lake.env: '/root/lake.py:Lake'"),
    ("domains.lake.readable=[/usr/share,/tmp/x]", "domains.lake.readable.1: '/tmp/x'"),
    ("train.weights_snapshot_key=/run/user/7/key", "train.weights_snapshot_key: '/run/user/7/key'"),
]


@pytest.mark.parametrize(("setting", "problem"), HIDDEN_VALUES)
def test_a_path_that_units_do_not_see_is_refused(
    capsys: Captured, setting: str, problem: str
) -> None:
    assert main(["units", QUICK, "run.name=lake", setting]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    advice = (
        " is not allowed; units do not see /home, /root, /run/user, /tmp, /var/tmp "
        "(ProtectHome, PrivateTmp): put it below /var/lib/rlearner or /opt, or name it relative "
        "to /var/lib/rlearner\n"
    )
    assert err == f"error: {problem}{advice}"


def test_a_link_to_a_hidden_folder_is_refused(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = tmp_path / "home"
    (hidden / "ada").mkdir(parents=True)
    (tmp_path / "model").symlink_to(hidden / "ada")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(hidden / "ada" / "python3.12")
    monkeypatch.setattr("rlearner.units.hidden_paths.HIDDEN", (str(hidden),))
    link = tmp_path / "model"
    assert main(["units", QUICK, "run.name=lake", f"model.path={link}"]) == 2
    assert f"model.path: '{link}' is not allowed; it leads to {hidden}/ada, " in (
        capsys.readouterr().err
    )
    # A virtual environment of uv or pyenv: its folder is seen, its Python is not.
    assert main(["units", QUICK, "run.name=lake", "--bin", str(tmp_path / "bin")]) == 2
    assert f"its python leads to {hidden}/ada/python3.12, " in capsys.readouterr().err


def test_words_that_are_no_path_pass(capsys: Captured) -> None:
    prompt = "domains.lake.system_prompt=/tmp is where programs write. Answer with a letter."
    assert main(["units", QUICK, "run.name=lake", prompt, "run.dir=/srv/runs"]) == 0
    assert "dir: /srv/runs" in capsys.readouterr().out
