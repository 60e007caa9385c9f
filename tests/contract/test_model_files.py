"""A host without the run's model folder gets configuration and tokenizer from the broker, over a
real nats-server.
"""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from broker.contract import wire
from broker.contract.streams import MODELS
from broker.errors import UserError, WireError
from broker.jetstream.bus import Bus
from rlearner_text.config import TinyModel
from rlearner_text.model_files import LocalModel, digest_of, local_model, read_files, share, unpack
from rlearner_text.tiny import build_tiny
from rlearner_text.tokenizer import Tokenizer
from rollout.engines.base import EngineConfig
from rollout.engines.hf.model import end_tokens, load_model

SMALL = TinyModel(
    hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16, intermediate_size=32
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = tmp_path / "model"
    build_tiny(made, SMALL, seed=3, dtype="float32")
    return made


def run_spec(path: Path, files: str, **model: Any) -> wire.RunSpec:
    return wire.RunSpec("r", wire.WIRE_VERSION, 1, {"model": model}, str(path), model_files=files)


async def test_a_host_without_the_folder_gets_all_but_the_weights(
    bus: Bus, folder: Path, tmp_path: Path
) -> None:
    digest = await share(bus, str(folder), with_code=False)
    expected = read_files(folder, with_code=False)
    assert digest == digest_of(expected)
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= expected.keys()
    elsewhere = shutil.move(folder, tmp_path / "elsewhere")
    found = await local_model(bus, run_spec(folder, digest))
    copy = tmp_path / "cache" / "rlearner" / "models" / digest
    assert found == LocalModel(str(copy), has_weights=False)
    assert {
        str(file.relative_to(copy)): file.read_bytes() for file in copy.rglob("*") if file.is_file()
    } == expected
    text = "a path, 2 + 2"
    assert Tokenizer.load(found.path).encode(text) == Tokenizer.load(str(elsewhere)).encode(text)
    await bus.key_value(MODELS).delete(f"{bus.run}.{digest}.0")  # the copy is enough from now on
    assert await local_model(bus, run_spec(folder, digest)) == found


async def test_the_same_folder_is_used_in_place_and_another_one_is_not(
    bus: Bus, folder: Path
) -> None:
    digest = await share(bus, str(folder), with_code=False)
    assert await local_model(bus, run_spec(folder, digest)) == LocalModel(str(folder))
    (folder / "tokenizer_config.json").write_text("{}")
    found = await local_model(bus, run_spec(folder, digest))
    assert not found.has_weights
    assert digest_of(read_files(Path(found.path), with_code=False)) == digest


async def test_a_damaged_copy_is_fetched_again(bus: Bus, folder: Path, tmp_path: Path) -> None:
    digest = await share(bus, str(folder), with_code=False)
    shutil.move(folder, tmp_path / "elsewhere")
    found = Path((await local_model(bus, run_spec(folder, digest))).path)
    (found / "config.json").write_text("{}")
    await local_model(bus, run_spec(folder, digest))
    assert digest_of(read_files(found, with_code=False)) == digest


async def test_code_travels_only_with_models_that_have_some(
    bus: Bus, folder: Path, tmp_path: Path
) -> None:
    (folder / "modeling_own.py").write_text("X = 1\n")
    plain, coded = [await share(bus, str(folder), with_code=code) for code in (False, True)]
    assert plain != coded
    shutil.move(folder, tmp_path / "elsewhere")
    without = await local_model(bus, run_spec(folder, plain))
    assert not (Path(without.path) / "modeling_own.py").exists()
    with_it = await local_model(bus, run_spec(folder, coded, trust_remote_code=True))
    assert (Path(with_it.path) / "modeling_own.py").read_text() == "X = 1\n"


async def test_a_hub_name_is_left_to_each_host(bus: Bus) -> None:
    assert await share(bus, "Qwen/Qwen3-0.6B", with_code=False) == ""
    assert await local_model(bus, run_spec(Path("Qwen/Qwen3-0.6B"), "")) == LocalModel(
        "Qwen/Qwen3-0.6B"
    )


async def test_other_bytes_of_the_same_digest_are_refused(
    bus: Bus, folder: Path, tmp_path: Path
) -> None:
    digest = await share(bus, str(folder), with_code=False)
    shutil.move(folder, tmp_path / "elsewhere")
    packed = zlib.compress(msgspec.msgpack.encode({"config.json": b"{}"}))
    await bus.key_value(MODELS).put(f"{bus.run}.{digest}.0", wire.ModelPart(digest, 0, 1, packed))
    with pytest.raises(
        UserError,
        match=r"this host has no .*model, .*cannot be used: their digest is wrong; copy the",
    ):
        await local_model(bus, run_spec(folder, digest))
    await bus.key_value(MODELS).delete(f"{bus.run}.{digest}.0")
    with pytest.raises(UserError, match="parts are missing"):
        await local_model(bus, run_spec(folder, digest))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "name", ["../config.json", "/etc/passwd", ".hidden", "a/b.json", "", "x" * 200, "a\nb"]
)
def test_names_outside_the_folder_are_refused(name: str) -> None:
    with pytest.raises(WireError, match="is not a file of a model"):
        unpack(zlib.compress(msgspec.msgpack.encode({name: b""})))


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"no zlib",
        zlib.compress(b"no map"),
        zlib.compress(b"\x81" * 100_000),
        zlib.compress(bytes(300 << 20)),
    ],
    ids=["empty", "no-zlib", "no-map", "deep", "bomb"],
)
def test_content_that_is_not_valid_is_refused(packed: bytes) -> None:
    with pytest.raises(WireError, match="not a model's files"):
        unpack(packed)


def test_an_engine_starts_without_weights(folder: Path, tmp_path: Path) -> None:
    expected = load_model(EngineConfig(str(folder)), torch.device("cpu"))
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(UserError, match="no causal language model could be loaded"):
        load_model(EngineConfig(str(copy)), torch.device("cpu"))
    found = load_model(EngineConfig(str(copy), has_weights=False), torch.device("cpu"))
    shapes = {name: (value.shape, value.dtype) for name, value in expected.state_dict().items()}
    assert {
        name: (value.shape, value.dtype) for name, value in found.state_dict().items()
    } == shapes
    assert end_tokens(found) == end_tokens(expected) != frozenset()
