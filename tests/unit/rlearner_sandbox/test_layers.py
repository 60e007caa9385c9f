"""Layers, images, and what dead processes have left."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlearner_sandbox.providers import images, trees
from rlearner_sandbox.providers.archive import read_archive, write_archive
from rlearner_sandbox.providers.build import build_image
from rlearner_sandbox.providers.layers import LayerStore
from rlearner_sandbox.providers.owner import OwnedFolder, remove_leftovers

Entry = tuple[str, dict[str, Any], bytes]


def layer_archive(entries: list[Entry]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, attributes, content in entries:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o644
            for key, value in attributes.items():
                setattr(member, key, value)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def image_archive(path: Path, layers: list[bytes], config: dict[str, Any]) -> Path:
    """Write an OCI archive."""
    blobs = {}

    def add(data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return f"sha256:{digest}"

    packed = [{"digest": add(gzip.compress(layer))} for layer in layers]
    diff_ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    settings = {"config": config, "rootfs": {"diff_ids": diff_ids}}
    manifest = {"config": {"digest": add(json.dumps(settings).encode())}, "layers": packed}
    index = {"manifests": [{"digest": add(json.dumps(manifest).encode())}]}
    blobs["index.json"] = json.dumps(index).encode()
    with tarfile.open(path, "w") as archive:
        for name, data in blobs.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


FIRST: list[Entry] = [
    ("etc", {"type": tarfile.DIRTYPE, "mode": 0o755}, b""),
    ("etc/name", {}, b"base\n"),
    ("etc/alias", {"type": tarfile.LNKTYPE, "linkname": "etc/name"}, b""),
    ("opt", {"type": tarfile.DIRTYPE, "mode": 0o700, "uid": 1000}, b""),
    ("opt/tool", {"mode": 0o755, "uid": 1000, "gid": 100000}, b"#!"),
    ("lib", {"type": tarfile.SYMTYPE, "linkname": "/opt"}, b""),
]
SECOND: list[Entry] = [
    ("etc/.wh.name", {}, b""),
    ("opt", {"type": tarfile.DIRTYPE, "mode": 0o755}, b""),
    ("opt/.wh..wh..opq", {}, b""),
    ("opt/new", {}, b"new\n"),
]


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "store", uid_shift=0)


def test_image_becomes_layers_of_an_overlay(store: LayerStore, tmp_path: Path) -> None:
    config = {"Env": ["A=b=c"], "WorkingDir": "/opt", "User": "agent"}
    layers = [layer_archive(FIRST), layer_archive(SECOND)]
    digest = build_image(image_archive(tmp_path / "image.tar", layers, config), store)
    image = store.find_image(digest)
    assert (image.env, image.workdir, image.user) == ({"A": "b=c"}, "/opt", "agent")
    upper, lower = (store.layer_folder(layer) for layer in image.layers)
    assert (lower / "etc" / "name").stat().st_ino == (lower / "etc" / "alias").stat().st_ino
    assert trees.is_whiteout((upper / "etc" / "name").lstat())
    assert trees.is_opaque(str(upper / "opt"))
    assert not trees.is_opaque(str(lower / "opt"))
    assert stat.S_IMODE((lower / "opt").stat().st_mode) == 0o700
    if os.geteuid() == 0:
        status = (lower / "opt" / "tool").stat()
        assert (status.st_uid, status.st_gid) == (1000, trees.NOBODY)
    merged = tmp_path / "merged"
    trees.merge_layers([lower, upper], merged, keeps_whiteouts=False)
    names = sorted(str(path.relative_to(merged)) for path in merged.rglob("*"))
    assert names == ["etc", "etc/alias", "lib", "opt", "opt/new"]
    assert build_image(tmp_path / "image.tar", store) == digest


def test_implied_folders_are_open_whatever_the_umask(store: LayerStore, tmp_path: Path) -> None:
    archive = image_archive(tmp_path / "image.tar", [layer_archive([("a/b/c", {}, b"x")])], {})
    former = os.umask(0o077)
    try:
        build_image(archive, store)
    finally:
        os.umask(former)
    [layer] = (store.folder / "layers").iterdir()
    for path in (layer, layer / "a", layer / "a" / "b"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_layers_are_shared_between_images(store: LayerStore, tmp_path: Path) -> None:
    layers = [layer_archive(FIRST), layer_archive(SECOND)]
    first = build_image(image_archive(tmp_path / "a.tar", layers[:1], {}), store)
    second = build_image(image_archive(tmp_path / "b.tar", layers, {}), store)
    assert first != second
    assert store.find_image(first).layers[0] == store.find_image(second).layers[1]
    assert len(list((store.folder / "layers").iterdir())) == 2
    assert not list((store.folder / "drafts").iterdir())


def test_member_written_through_a_link_stays_inside(store: LayerStore, tmp_path: Path) -> None:
    entries: list[Entry] = [
        ("away", {"type": tarfile.SYMTYPE, "linkname": str(tmp_path)}, b""),
        ("away/file", {}, b"stays\n"),
        ("up", {"type": tarfile.SYMTYPE, "linkname": "../../../.."}, b""),
        ("up/top", {}, b"stays\n"),
    ]
    build_image(image_archive(tmp_path / "image.tar", [layer_archive(entries)], {}), store)
    layer = next((store.folder / "layers").iterdir())
    assert (layer / "top").read_text() == "stays\n"
    assert (layer / str(tmp_path).lstrip("/") / "file").read_text() == "stays\n"
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("name", ["../out", "a/../../out"])
def test_name_that_leaves_the_layer_is_refused(
    store: LayerStore, tmp_path: Path, name: str
) -> None:
    archive = image_archive(tmp_path / "image.tar", [layer_archive([(name, {}, b"x")])], {})
    with pytest.raises(ValueError, match="leaves its folder"):
        build_image(archive, store)
    assert not list((store.folder / "drafts").iterdir())
    assert not list((store.folder / "layers").iterdir())


def test_damaged_layer_is_refused(store: LayerStore, tmp_path: Path) -> None:
    archive = image_archive(tmp_path / "image.tar", [layer_archive(FIRST)], {})
    with images.open_image(archive) as image:
        manifest = image.read_json(
            "blobs/sha256/" + image.read_json("index.json")["manifests"][0]["digest"][7:]
        )
        blob = "blobs/sha256/" + manifest["layers"][0]["digest"][7:]
    folder = tmp_path / "layout"
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (folder / blob).write_bytes(gzip.compress(layer_archive(SECOND)))
    with pytest.raises(ValueError, match="a layer is damaged: sha256"):
        build_image(folder, store)
    assert not list((store.folder / "layers").iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x1f\x8bnonsense", "is not an archive"),
        (b"\0" * 2048, "there is no manifest.json|is not an archive"),
    ],
)
def test_other_file_is_refused(
    store: LayerStore, tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        build_image(tmp_path / "file", store)


def test_dockerfile_with_network_is_refused_in_one_line(store: LayerStore, tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text("FROM base\n\nADD https://example.com/x /x\n")
    message = r"Dockerfile:3: ADD https://.* without the network"
    with pytest.raises(ValueError, match=message) as error:
        build_image(tmp_path, store, tool="true")
    assert "\n" not in str(error.value)


def test_dockerfile_without_a_builder_says_what_to_install(
    store: LayerStore, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text("FROM base\n")
    with pytest.raises(ValueError, match="no-such-builder, which is not on PATH"):
        build_image(tmp_path, store, tool="no-such-builder")


def test_unknown_image_is_refused(store: LayerStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not built on this host"):
        store.find_image("sha256:" + "1" * 64)
    with pytest.raises(ValueError, match="is not a folder of this host"):
        store.find_image("debian:13")


def test_archive_with_escaping_names_is_refused(tmp_path: Path) -> None:
    for name in ("root/../../out", "/etc/passwd", "other/file"):
        with pytest.raises(ValueError, match="does not stay below"):
            read_archive(
                io.BytesIO(layer_archive([(name, {}, b"x")])), str(tmp_path / "t"), trusted=False
            )
    assert not (tmp_path / "out").exists()


def test_archive_from_inside_brings_no_links_devices_or_privileges(tmp_path: Path) -> None:
    entries: list[Entry] = [
        ("root", {"type": tarfile.DIRTYPE, "mode": 0o777}, b""),
        ("root/link", {"type": tarfile.SYMTYPE, "linkname": "/etc"}, b""),
        ("root/hard", {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"}, b""),
        ("root/null", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}, b""),
        ("root/pipe", {"type": tarfile.FIFOTYPE}, b""),
        ("root/root", {"mode": 0o6777}, b"x"),
    ]
    read_archive(io.BytesIO(layer_archive(entries)), str(tmp_path / "t"), trusted=False)
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["root"]
    assert stat.S_IMODE((tmp_path / "t" / "root").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == 0o755


def test_archive_keeps_links_but_no_pipes_on_the_way_in(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "link").symlink_to("/etc")
    (folder / "file").write_text("x")
    os.mkfifo(folder / "pipe")
    packed = io.BytesIO()
    write_archive(str(folder), packed, links=True)
    packed.seek(0)
    read_archive(packed, str(tmp_path / "out"), trusted=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["file", "link"]
    assert os.readlink(tmp_path / "out" / "link") == "/etc"


OWNER = """import sys, time
from pathlib import Path
from rlearner_sandbox.providers.owner import OwnedFolder
import subprocess
owned = OwnedFolder(Path(sys.argv[1]))
child = subprocess.Popen(["sleep", "3251"], start_new_session=True)
owned.note_process(child.pid)
(owned.path / "sandbox" / "closed").mkdir(parents=True)
(owned.path / "sandbox" / "closed").chmod(0)
print(child.pid, flush=True)
time.sleep(3600)
"""


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    mine = OwnedFolder(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert remove_leftovers(tmp_path) == []
        process.kill()
    ended: list[str] = []
    removed = remove_leftovers(tmp_path, ended.append)
    assert len(removed) == 1
    assert ended == removed
    assert [path.name for path in (tmp_path / "live").iterdir()] == [mine.id]
    process_of_child = psutil.Process(child) if psutil.pid_exists(child) else None
    if process_of_child is not None:
        process_of_child.wait(20)
    mine.release()
    assert not list((tmp_path / "live").iterdir())
