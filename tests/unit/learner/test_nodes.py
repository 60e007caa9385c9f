"""Who is there, what they differ in, their key, and their model folders."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.errors import UserError
from learner.backends.ranks.messages import FoldersCommand
from learner.nodes.encrypted_link import OTHER_RANKS, RANK_0
from learner.nodes.gathering import own_address
from learner.nodes.hello import Hello, Roll, first_difference
from learner.nodes.key import NodeKey, read_key
from learner.nodes.local_ranks import worst_code
from learner.nodes.meeting_keys import Arrival, arrival_line, parse_arrivals
from learner.nodes.model_folders import compare_folders, list_folder

VERSIONS = {"python": "3.11.7", "torch": "2.13.0"}


def hello(node: int, local_rank: int, size: int = 2, **other: Any) -> Hello:
    config = {"run": {"name": f"made-up-{node}"}, "train": {"lr": 1e-3, "ranks": 4}}
    made = Hello(
        node, local_rank, size, f"host-{node}", 100 + 10 * node + local_rank, VERSIONS, config
    )
    return msgspec.structs.replace(made, **other)


def test_the_roll_says_who_is_missing_and_numbers_ranks_node_by_node() -> None:
    roll = Roll(3, hello(0, 0))
    assert (
        roll.describe()
        == "here: node 0 (host-0); missing: rank 1 of node 0 (host-0), node 1, node 2"
    )
    for one in (hello(2, 1), hello(0, 1), hello(2, 0)):
        assert (roll.conflict(one), roll.enter(one)) == ("", "")
    assert not roll.complete
    assert (
        roll.conflict(hello(2, 0, host="other"))
        == "--node-rank 2 is taken by host-2 (pid 120); each node has its own"
    )
    assert roll.conflict(hello(3, 0)) == "--node-rank 3: node 0 waits for 3 nodes, 0 to 2"
    roll.leave((2, 1))
    assert (
        roll.describe()
        == "here: node 0 (host-0), node 2 (host-2); missing: node 1, rank 1 of node 2 (host-2)"
    )
    assert roll.conflict(hello(2, 1)) == ""  # restarted
    roll.enter(hello(2, 1))
    roll.enter(hello(1, 0, size=1))
    assert roll.complete
    assert [one.seat for one in roll.in_order()] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    assert roll.wrong_size(5) == ""
    counts = "2 on node 0, 1 on node 1, 2 on node 2"
    assert (
        roll.wrong_size(6)
        == f"train.ranks: 6 is not allowed; it counts the ranks of all nodes, which are {counts}"
    )


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({}, ""),  # another name of the run is its own
        (
            {"versions": {**VERSIONS, "torch": "2.12.0"}, "config": {}},
            "torch is 2.12.0 on node 1 (host-1, pid 110), but 2.13.0 on node 0 (host-0, pid 100)",
        ),
        (
            {"config": {"run": {"name": "b"}, "train": {"lr": 2e-3, "ranks": 2}}},
            "train.lr is 0.002 on node 1 (host-1, pid 110), but 0.001 on node 0 (host-0, pid 100)",
        ),
        (
            {"config": {"run": {}, "train": {"lr": 1e-3, "ranks": 4, "extra": "x" * 100}}},
            f"train.extra is {'x' * 80}… on node 1 (host-1, pid 110), but null on node 0 (host-0, pid 100)",
        ),
        (
            {"shared": ["GPU-1"]},
            "--share-gpus is given on node 1 (host-1, pid 110), but not on node 0 (host-0, pid 100)",
        ),
    ],
)
def test_the_first_difference_is_named(other: dict[str, Any], line: str) -> None:
    assert first_difference(hello(0, 0), hello(1, 0, **other)) == line
    assert Roll(2, hello(0, 0)).enter(hello(1, 0, **other)) == line


def test_ranks_of_a_node_agree_on_their_number() -> None:
    roll = Roll(2, hello(0, 0))
    line = "node 0 (host-0, pid 101) says that its node has 3 ranks, node 0 (host-0, pid 100) 2"
    assert roll.enter(hello(0, 1, size=3)) == line


def test_a_key_is_made_once_and_only_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "rlearner" / "nodes.key"
    with pytest.raises(
        UserError, match=r"no key of the nodes at .*: node 0 makes it; copy it from there"
    ):
        read_key(path, make=False, wait_s=0)
    made = read_key(path, make=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_key(path, make=True) == read_key(path, make=False, wait_s=0) == made
    assert path.read_text().strip() == made.secret.hex()
    assert [one.name for one in path.parent.iterdir()] == ["nodes.key"]
    assert "secret" not in repr(made)
    path.chmod(0o640)
    with pytest.raises(UserError, match="can be read by other users"):
        read_key(path, make=True)
    path.chmod(0o600)
    path.write_text("abc")
    with pytest.raises(UserError, match="expected 64 hexadecimal digits"):
        read_key(path, make=False)


def test_both_ends_have_keys_of_their_own() -> None:
    one, other = NodeKey(bytes(32)), NodeKey(b"\1" + bytes(31))
    keys = {key.curve_public(end) for key in (one, other) for end in (RANK_0, OTHER_RANKS)}
    assert len(keys) == 4
    assert one.curve_secret(RANK_0) == NodeKey(bytes(32)).curve_secret(RANK_0)


def test_a_key_that_appears_late_is_read(tmp_path: Path) -> None:
    path, naps = tmp_path / "nodes.key", list[float]()

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            read_key(path, make=True)

    found = read_key(path, make=False, nap=nap)
    assert len(naps) == 2
    assert found == read_key(path, make=False)


def test_arrivals_cross_unchanged() -> None:
    lines = arrival_line(1, 0, "ab") + arrival_line(2, 3, "cd")
    assert parse_arrivals(lines) == [Arrival(1, 0, "ab"), Arrival(2, 3, "cd")]
    assert parse_arrivals(b"") == []


def test_exit_code_of_a_node() -> None:
    assert [worst_code(codes) for codes in ([0, 0], [0, 130], [130, -9], [1, 2], [0, 3])] == [
        0,
        130,
        1,
        2,
        1,
    ]


def _folder(path: Path, **files: bytes) -> Path:
    path.mkdir()
    for name, data in files.items():
        (path / name.replace("_", ".")).write_bytes(data)
    return path


def test_a_folder_that_is_missing_or_differs_is_named(tmp_path: Path) -> None:
    source = _folder(
        tmp_path / "model",
        config_json=b"{}",
        model_safetensors=b"weights",
        empty_txt=b"",
        notes_log=b"x",
    )
    (source / "learner").mkdir()
    (source / "learner" / "state.safetensors").write_bytes(b"only rank 0's")
    (source / "adapter").mkdir()
    (source / "adapter" / "adapter.json").write_bytes(b"[]")
    listing = list_folder(source)
    assert {name: size for name, (size, _) in listing.items()} == {
        "adapter/adapter.json": 2, "config.json": 2, "empty.txt": 0, "model.safetensors": 7,
    }  # fmt: skip
    same = FoldersCommand({str(source): listing})
    assert compare_folders(same, "node 1").problem == ""
    missing = compare_folders(FoldersCommand({"/only/on/node/0": listing}), "node 1").problem
    assert (
        missing
        == "node 1 has no /only/on/node/0: run.dir and model folders must be there on all nodes"
    )
    (source / "config.json").write_bytes(b"[]")
    differs = f"{source} on node 1 is not the folder of node 0: the content of config.json differs"
    assert compare_folders(same, "node 1").problem == differs
    (source / "model.safetensors").write_bytes(b"")
    (source / "config.json").unlink()
    assert compare_folders(same, "node 1").problem.endswith("config.json is only there")


def test_node_0_listens_at_an_address_of_its_own() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(
        UserError, match=r"--rendezvous 192.0.2.1: node 0 must be there, but this host has"
    ):
        own_address("192.0.2.1")
