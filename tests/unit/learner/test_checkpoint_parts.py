"""Slices in files: what each rank writes, what any rank reads, and what is wrong with a file."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from broker.errors import UserError
from learner.backends.parts.hugging_face import shards_of
from learner.backends.parts.part_file import DamagedFileError, PartFile
from learner.backends.parts.slices import Slice, copy_slices
from learner.backends.parts.stored import StoredTensors
from learner.backends.parts.stored_model import StoredModel
from learner.backends.parts.writing import write_part
from learner.backends.ranks.link import RankLink, SocketFrames
from learner.backends.ranks.messages import SumsReply, VerifiedReply, WrittenReply
from learner.backends.staged_part import StagedPart


def parts(folder: Path, tensor: torch.Tensor, size: int) -> list[PartFile]:
    """A tensor that every rank holds, as they write it."""
    whole = [Slice.whole("w", tensor), Slice.whole("count", torch.tensor(7))]
    return [
        write_part(folder / f"{rank}.safetensors", copy_slices(whole, rank, size))
        for rank in range(size)
    ]


def test_what_all_hold_is_written_once_in_equal_ranges(tmp_path: Path) -> None:
    tensor = torch.arange(35.0).view(5, 7)
    made = parts(tmp_path, tensor, 3)
    found = [load_file(part.path) for part in made]
    assert [one["w"].tolist() for one in found] == [
        list(range(11)),
        list(range(11, 23)),
        list(range(23, 35)),
    ]
    assert [one.get("count") for one in found] == [None, None, torch.tensor([7])]
    stored = StoredTensors(part.path for part in made)
    assert torch.equal(stored["w"], tensor)
    assert stored["count"].shape == ()
    assert int(stored["count"]) == 7
    middle = torch.zeros(4, 5, dtype=torch.float64).T  # of another dtype, and not contiguous
    stored.read("w", 9, middle)
    assert middle.flatten().tolist() == list(range(9, 29))


def test_training_does_not_change_the_copies() -> None:
    live = torch.zeros(4, requires_grad=True)
    (copied,) = copy_slices([Slice("w", (8,), 4, live)], 1, 2)
    with torch.no_grad():
        live.add_(1)
    assert (copied.start, copied.tensor.tolist()) == (4, [0, 0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.int64, torch.float8_e4m3fn])
def test_bits_of_any_dtype_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(96, dtype=torch.uint8).view(dtype)
    (part,) = parts(tmp_path, tensor, 1)
    assert torch.equal(StoredTensors([part.path])["w"].view(torch.uint8), tensor.view(torch.uint8))


def test_a_part_too_few_is_named_by_its_tensor(tmp_path: Path) -> None:
    made = parts(tmp_path, torch.arange(6.0), 3)
    with pytest.raises(DamagedFileError, match=r"element 2 of 6 of w is in none of its parts"):
        StoredTensors([made[0].path, made[2].path])


def test_damage_is_named(tmp_path: Path) -> None:
    (part,) = parts(tmp_path, torch.arange(6.0), 1)
    part.verify()
    file = Path(part.path)
    data = file.read_bytes()
    file.write_bytes(data[:-1] + b"?")
    part.check_size()
    with pytest.raises(DamagedFileError, match=rf"^{file} is damaged: its digest"):
        part.verify()
    file.write_bytes(data[:-1])
    with pytest.raises(
        DamagedFileError, match=rf"^{file} is damaged: {len(data) - 1} bytes instead of {len(data)}"
    ):
        part.check_size()
    with pytest.raises(
        DamagedFileError, match=rf"^{file} cannot be read: not safetensors: w is not where"
    ):
        StoredTensors([file])
    file.unlink()
    with pytest.raises(DamagedFileError, match=rf"^{file} cannot be read: No such file"):
        part.verify()


def test_files_of_two_models_do_not_mix(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, 3)}, tmp_path / "a")
    save_file({"w": torch.zeros(3, 2)}, tmp_path / "b")
    with pytest.raises(
        DamagedFileError, match=r"w has another shape or dtype than in another file"
    ):
        StoredTensors([tmp_path / "a", tmp_path / "b"])


def test_weights_are_divided_among_files_in_order() -> None:
    sizes = {"a": 2, "b": 2, "large": 9, "c": 1}
    like = {
        name: torch.empty(size, dtype=torch.uint8, device="meta") for name, size in sizes.items()
    }
    assert shards_of(like, 4) == [["a", "b"], ["large"], ["c"]]
    assert shards_of(like, 100) == [["a", "b", "large", "c"]]
    model = StoredModel({name: ("U8", [size]) for name, size in sizes.items()}, same_names=True)
    assert model.nbytes == 14


def test_a_rank_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=rf"^rank 2 on {socket.gethostname()} does not see {tmp_path}/gone"
    ):
        StagedPart([], 2, 4).write(tmp_path / "gone")


def test_reports_of_checkpoints_and_replies_of_training_come_to_who_waits_for_them() -> None:
    ours, theirs = (RankLink(SocketFrames(end)) for end in socket.socketpair())
    written: list[WrittenReply] = []
    waiting = threading.Thread(target=lambda: written.append(ours.receive_written()))
    waiting.start()
    for number in range(50):
        theirs.send(SumsReply([{"tokens": float(number)}]))
        if number == 30:
            theirs.send(WrittenReply(PartFile("p", 3, "d")))
    found = [ours.receive_reply() for _ in range(50)]
    assert [one.slices[0]["tokens"] for one in found if isinstance(one, SumsReply)] == list(
        np.arange(50.0)
    )
    waiting.join(10)
    assert written == [WrittenReply(PartFile("p", 3, "d"))]
    theirs.send(VerifiedReply("bad"))
    assert ours.receive_reply() == VerifiedReply("bad")
    ours.close()
    theirs.close()


def test_the_header_says_where_slices_are(tmp_path: Path) -> None:
    file = tmp_path / "part"
    write_part(file, [Slice("w", (4, 5), 10, torch.arange(5.0))])
    data = file.read_bytes()
    about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert json.loads(about["DCP_SHARDING_INFO"]) == {"w": {"saved_offsets": [10]}}
    assert json.loads(about["shapes"]) == {"w": [4, 5]}
