"""Reading, merging, overriding and validating a configuration."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from broker.errors import ConfigError, UserError
from broker.settings import runspec
from broker.settings.config import RunSection, Sampling


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


# -------------------------------------------------------------------------------------------------------
# load


def test_the_file_wins_over_what_it_inherits_and_overrides_over_all(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "train: {steps: 1, lr: 0.1, betas: [0.9, 0.99]}\nrun: {seed: 5}\n")
    write(tmp_path, "more/second.yaml", "train: {steps: 2}\neval: {tasks: 8}\n")
    path = write(
        tmp_path,
        "more/x.yaml",
        "inherit: [../base.yaml, second.yaml]\ntrain: {lr: 0.3, betas: [0.5, 0.6]}\n",
    )
    assert runspec.load(path, ["train.lr=1e-3", "run.name=abc", "eval.every_steps=4"]) == {
        "train": {"steps": 2, "lr": 0.001, "betas": [0.5, 0.6]},
        "run": {"seed": 5, "name": "abc"},
        "eval": {"tasks": 8, "every_steps": 4},
    }


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.x=50", 50),
        ("train.x=1.0e-3", 0.001),
        ("train.x=true", True),
        ("train.x=null", None),
        ("train.x=a=b", "a=b"),
        ("train.x=''", ""),
        ("train.x='50'", "50"),
        ("train.x=[1, 2]", [1, 2]),
        ("train.x={a: 1}", {"a": 1}),
        ("train.x=${run.seed}", 5),
    ],
)
def test_override_values_are_yaml(tmp_path: Path, override: str, value: object) -> None:
    assert (
        runspec.load(write(tmp_path, "x.yaml", "run: {seed: 5}\n"), [override])["train"]["x"]
        == value
    )


def test_overrides_merge_into_mappings_and_reach_into_lists(tmp_path: Path) -> None:
    path = write(tmp_path, "x.yaml", "domains: {d: {sampling: {top_k: 5}, rewards: [{name: a}]}}\n")
    config = runspec.load(path, ["domains.d.sampling={top_p: 0.5}", "domains.d.rewards.0.weight=2"])
    assert config == {
        "domains": {
            "d": {"sampling": {"top_k": 5, "top_p": 0.5}, "rewards": [{"name": "a", "weight": 2}]}
        }
    }


def test_shipped_configurations_are_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    by_path = runspec.load("configs/quickstart.yaml")
    assert by_path["domains"]["lake"]["env"] == "frozenlake"
    assert runspec.load("quickstart.yaml") == runspec.load("quickstart") == by_path
    write(tmp_path, "configs/quickstart.yaml", "run: {seed: 99}\n")
    # the user's own comes first
    assert runspec.load("configs/quickstart.yaml") == {"run": {"seed": 99}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "train:\n  lr: 1\n  steps: 4\n  lr: 2\n",
            "x.yaml:4: train.lr is given twice, first in line 2; keep one of them",
        ),
        (
            "train: {lr: 1}\nrun: {seed: 1}\ntrain: {lr: 1}\n",
            "x.yaml:3: train is given twice, first in line 1; keep one of them",
        ),
        (
            "train: {lr: 1, lr: 1}\n",
            "x.yaml:1: train.lr is given twice, first in line 1; keep one of them",
        ),
        (
            "train:\n  lr:\n  steps: 4\n",
            "x.yaml:2: train.lr has no value; give one, write null, or remove the key",
        ),
        (
            "run: {seed: 1}\ntrain:\n  # lr: 1\n",
            "x.yaml:2: train has no value; give one, write null, or remove the key",
        ),
        (
            "a:\n- b: 1\n- c:\n",
            "x.yaml:3: a.1.c has no value; give one, write null, or remove the key",
        ),
    ],
)
def test_keys_given_twice_and_empty_values_are_refused_with_their_line(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(UserError) as caught:
        runspec.load(write(tmp_path, "x.yaml", text))
    assert str(caught.value).endswith(f"/{says}")
    write(tmp_path, "y.yaml", "inherit: x.yaml\n")
    with pytest.raises(UserError, match=re.escape(says)):
        runspec.load(str(tmp_path / "y.yaml"))


def test_an_empty_override_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "x.yaml", "train: {lr: null, name: '', each: [null]}\n")
    assert runspec.load(path) == {"train": {"lr": None, "name": "", "each": [None]}}
    with pytest.raises(UserError) as caught:
        runspec.load(path, ["train.lr="])
    assert (
        str(caught.value)
        == """override 'train.lr=' has no value; give one, or write train.lr=null or train.lr="''\""""
    )


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"nothing\.yaml: no such file; the package has .*quickstart, "
    ):
        runspec.load("nothing.yaml")
    with pytest.raises(UserError, match=r"inherit: 'gone\.yaml': no such file"):
        runspec.load(write(tmp_path, "x.yaml", "inherit: gone.yaml\n"))
    with pytest.raises(UserError, match=r"inherit: 'configs/gone\.yaml': no such file"):
        runspec.load(write(tmp_path, "x.yaml", "inherit: configs/gone.yaml\n"))
    with pytest.raises(
        UserError,
        match=r"^quikstart: no such file; did you mean quickstart\? the package has agent, ",
    ):
        runspec.load("quikstart")


def test_a_file_may_inherit_from_one_of_the_package_and_its_own_folder_comes_first(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, "x.yaml", "inherit: configs/frozenlake.yaml\ntrain: {steps: 7}\n")
    expected = runspec.load("configs/frozenlake.yaml", ["train.steps=7"])
    assert runspec.load(path) == expected
    write(tmp_path, "configs/frozenlake.yaml", "train: {lr: 0.5}\n")
    assert runspec.load(path) == {"train": {"lr": 0.5, "steps": 7}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "train: {steps: 1\n",
            r"x\.yaml:2: not valid YAML: expected ',' or '}', but got '<stream end>'",
        ),
        (
            "train:\n\tsteps: 1\n",
            r"x\.yaml:2: not valid YAML: found character '\\t' that cannot start any token",
        ),
        (
            "run: {}\nhello world: a: b\n",
            r"x\.yaml:2: not valid YAML: mapping values are not allowed here",
        ),
        ("- a\n- b\n", "expected a mapping of sections at the top"),
        ("train:\n  steps: ${nowhere}\n", "Interpolation key 'nowhere' not found"),
        ("train: 1\ntrain: 2\n", "train is given twice"),
        (
            "inherit: 3\n",
            r"inherit: 3 is not allowed; a file name relative to this one, or a list of them",
        ),
        ("inherit: {a: 1}\n", r"inherit: \{'a': 1\} is not allowed; a file name relative"),
        ("inherit: x.yaml\n", r"inherits itself through x\.yaml -> x\.yaml"),
    ],
)
def test_malformed_files_are_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, "x.yaml", text)
    with pytest.raises(UserError, match=says) as caught:
        runspec.load(path)
    assert "x.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"run:\n  name: \xff\n")
    with pytest.raises(UserError, match=r"x\.yaml: not valid YAML: byte 13 is not UTF-8"):
        runspec.load(str(tmp_path / "x.yaml"))


def test_of_overrides_of_one_key_the_last_wins(tmp_path: Path) -> None:
    path = write(tmp_path, "x.yaml", "run: {seed: 5}\n")
    assert runspec.load(path, ["train.steps=3", "run.seed=6", "train.steps=4"]) == {
        "run": {"seed": 6},
        "train": {"steps": 4},
    }


@pytest.mark.parametrize("override", ["train.steps", "=5", "a b=1", ".x=1", "x.=1", "train.lr=[1"])
def test_malformed_overrides_are_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(UserError) as caught:
        runspec.load(write(tmp_path, "x.yaml", "run: {seed: 5}\n"), [override])
    assert str(caught.value).startswith(f"override {override!r} is not allowed; ")


# ---------------------------------------------------------------------------------------------------
# validate


@pytest.fixture
def no_role_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runspec, "CHECKS", ("broker.settings.run_settings:check_domains",))


DOMAIN: dict[str, Any] = {"env": "frozenlake"}


def test_defaults_are_filled_in_and_the_result_validates_to_itself() -> None:
    loaded = runspec.load("quickstart", ["train.steps=61"])
    config = runspec.validate(loaded)
    assert set(config) == set(runspec.SECTIONS)
    assert config["train"]["steps"] == 61
    assert config["domains"]["lake"]["env_args"] == loaded["domains"]["lake"]["env_args"]
    assert config["train"]["betas"] == [0.9, 0.999]
    assert config["domains"]["lake"]["sampling"]["top_p"] == 1.0
    assert runspec.validate(config) == config
    assert json.loads(json.dumps(config)) == config


def test_typed_sections() -> None:
    config = runspec.load("quickstart")
    settings = runspec.check_settings(config)
    assert settings.run == RunSection(dir="runs", seed=0)
    assert settings.domains["lake"].sampling == Sampling(
        max_tokens=config["domains"]["lake"]["sampling"]["max_tokens"]
    )


@pytest.mark.usefixtures("no_role_checks")
@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"tarin": {}}, "tarin: {} is not allowed; unknown key, did you mean 'train'?"),
        (
            {"train": {"lrr": 1}},
            "train.lrr: 1 is not allowed; unknown key, did you mean 'train.lr'?",
        ),
        (
            {"train": {"stepz": 1, "steps": "x"}},
            "train.stepz: 1 is not allowed; unknown key, did you mean 'train.steps'?",
        ),
        (
            {"run": {"xyzzy": 1}},
            "run.xyzzy: 1 is not allowed; unknown key, known here: name, dir, seed",
        ),
        (
            {"train": {"steps": "ten"}},
            "train.steps: 'ten' is not allowed; input should be a valid integer",
        ),
        (
            {"train": {"steps": "10"}},
            "train.steps: '10' is not allowed; input should be a valid integer",
        ),
        (
            {"train": {"steps": True}},
            "train.steps: True is not allowed; input should be a valid integer",
        ),
        ({"train": {"steps": 0}}, "train.steps: 0 is not allowed; input should be greater than 0"),
        (
            {"train": {"on_late": "no"}},
            "train.on_late: 'no' is not allowed; input should be 'drop' or 'wait'",
        ),
        ({"train": 3}, "train: 3 is not allowed; expected a mapping"),
        (
            {"model": {"tiny": {"hidden": 3}}},
            "model.tiny.hidden: 3 is not allowed; unknown key, did you mean 'model.tiny.hidden_size'?",
        ),
        ({"domains": {"d": {}}}, "domains.d.env: None is not allowed; it must be given"),
        (
            {"domains": {"a b": DOMAIN}},
            "domains: 'a b' is not allowed; use 1-64 letters, digits, '_' or '-'",
        ),
        ({"domains": {"d": 5}}, "domains.d: 5 is not allowed; input should be an object"),
        (
            {"domains": {"d": {**DOMAIN, "sampling": {"topp": 1}}}},
            "domains.d.sampling.topp: 1 is not allowed; unknown key, did you mean 'domains.d.sampling.top_p'?",
        ),
        (
            {"domains": {"d": {**DOMAIN, "rewards": [{"name": "a"}, {"name": "b", "wight": 2}]}}},
            "domains.d.rewards.1.wight: 2 is not allowed; unknown key, did you mean 'domains.d.rewards.1.weight'?",
        ),
        (
            {"run": {"name": "a.b"}},
            "run.name: 'a.b' is not allowed; use 1-64 letters, digits, '_' or '-'",
        ),
        (
            {"broker": {"bind": "0.0.0.0"}},
            "broker.bind: '0.0.0.0' is not allowed; only a loopback address such as 127.0.0.1, "
            "because traffic is neither encrypted nor authenticated yet",
        ),
        (
            {"domains": {"d": {**DOMAIN, "group_size": 4, "min_group_size": 5}}},
            "domains.d.min_group_size: 5 is not allowed; at most group_size, which is 4",
        ),
        (
            {"domains": {"d": {**DOMAIN, "group_size": 4, "straggler_factor": 2.0}}},
            "domains.d.straggler_factor: 2.0 is not allowed; "
            "left out, or domains.d.min_group_size below group_size: only then can a group close early",
        ),
        (
            {
                "domains": {
                    "d": {**DOMAIN, "max_context_tokens": 64, "sampling": {"max_tokens": 64}}
                }
            },
            "domains.d.sampling.max_tokens: 64 is not allowed; below max_context_tokens, which is 64",
        ),
    ],
)
def test_bad_configurations(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        runspec.validate(config)
    assert str(caught.value) == says


def test_here_is_the_folder_of_the_file_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "in ner: #1").mkdir()
    base = "a: ['${here}/x.py', 3, null]\nb: {c: '${here}:${here}'}\nkept: '${run.seed}'\nrun: {seed: 5}\n"
    write(tmp_path, "in ner: #1/base.yaml", base)
    child = write(tmp_path, "child.yaml", "inherit: 'in ner: #1/base.yaml'\nd: ${here}\n")
    inner = f"{tmp_path}/in ner: #1"
    assert runspec.load(child) == {
        "a": [f"{inner}/x.py", 3, None], "b": {"c": f"{inner}:{inner}"}, "kept": 5, "run": {"seed": 5},
        "d": str(tmp_path),
    }  # fmt: skip


@pytest.mark.usefixtures("no_role_checks")
def test_an_inherited_domain_is_taken_out_by_null(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "domains: {lake: {env: frozenlake}, other: {env: frozenlake}}\n")
    child = write(tmp_path, "child.yaml", "inherit: base.yaml\ndomains: {lake: null}\n")
    assert list(runspec.validate(runspec.load(child))["domains"]) == ["other"]
    assert list(
        runspec.validate(runspec.load(child, ["domains.lake.env=sokoban", "domains.other=null"]))[
            "domains"
        ]
    ) == ["lake"]


@pytest.mark.usefixtures("no_role_checks")
def test_empty_sections_are_their_defaults() -> None:
    assert runspec.validate({"train": None}) == runspec.validate({})


def test_every_section_and_check_exists() -> None:
    for name, target in runspec.SECTIONS.items():
        assert hasattr(runspec._load_attribute(target), "model_fields"), name
    for check in runspec.CHECKS:
        assert callable(runspec._load_attribute(check)), check


# -----------------------------------------------------------------------------------------------
# data digests


def test_digests_tell_other_content(tmp_path: Path) -> None:
    path = write(tmp_path, "data.jsonl", '{"a": 1}\n')
    digests = {path: runspec.digest_file(path)}
    runspec.check_digests(digests)
    write(tmp_path, "data.jsonl", '{"a": 2}\n')
    with pytest.raises(UserError, match=r"data\.jsonl: content differs from the run's"):
        runspec.check_digests(digests)
    Path(path).unlink()
    with pytest.raises(UserError, match=r"data\.jsonl: No such file"):
        runspec.check_digests(digests)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x81\xa1x" * 100_000 + b"\xc0", "does not decode"),
        (b"\x81\xa1x\xdd\x00\x60\x00\x00" + b"\xc0" * 0x600000, "the limit is"),
        (b"\x82\xa4type\xa7RunSpec\xacwire_version\xcd\x10\x00", "uses wire version 4096"),
        (b"", "does not decode"),
    ],
    ids=["deep", "large", "newer", "empty"],
)
def test_a_runspec_that_is_no_runspec_is_one_line_and_costs_little(data: bytes, says: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=says):
            runspec._decode_runspec("demo", data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
