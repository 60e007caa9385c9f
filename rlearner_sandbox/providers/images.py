"""Reads images of OCI and Docker, as an archive or a folder, into layers of a store."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import platform
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from rlearner_sandbox.providers.layers import Image, LayerStore
from rlearner_sandbox.providers.trees import MAX_UID, NOBODY, OPAQUE, remove_tree

WHITEOUT: Final = ".wh."
OPAQUE_NAME: Final = ".wh..wh..opq"
ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
MAX_JSON: Final = 8 << 20
_CHUNK: Final = 1 << 20


class ImageFile:
    """An OCI archive, an OCI layout folder, or an archive of ``docker save``."""

    def __init__(self, path: Path, archive: tarfile.TarFile | None) -> None:
        self._path = path
        self._archive = archive

    def open(self, name: str) -> IO[bytes]:
        """Open a member.

        Raises:
            ValueError: if it is not there.
        """
        try:
            if self._archive is None:
                return (self._path / name).open("rb")
            member = self._archive.extractfile(name)
        except (KeyError, OSError):
            member = None
        if member is None:
            raise ValueError(f"{self._path}: there is no {name}, so this is no image archive")
        return member

    def read_json(self, name: str) -> Any:
        """Return a JSON member."""
        with self.open(name) as file:
            try:
                return json.loads(file.read(MAX_JSON))
            except ValueError:
                raise ValueError(f"{self._path}: {name} is not valid JSON") from None

    def has(self, name: str) -> bool:
        """Return whether there is such a member."""
        if self._archive is None:
            return (self._path / name).is_file()
        return name in self._archive.getnames()


@contextmanager
def open_image(path: Path) -> Iterator[ImageFile]:
    """Open an image.

    Raises:
        ValueError: if it is neither an archive nor a folder.
    """
    if path.is_dir():
        yield ImageFile(path, None)
        return
    try:
        with tarfile.open(path) as archive:
            yield ImageFile(path, archive)
    except FileNotFoundError:
        raise ValueError(f"{path} is not there") from None
    except tarfile.TarError as error:
        raise ValueError(f"{path} is not an archive: {error}") from None


def import_image(path: Path, store: LayerStore) -> str:
    """Store the layers of an image and return its digest.

    Raises:
        ValueError: if it is not valid, damaged, or for another kind of machine.
    """
    with open_image(path) as image:
        config, blobs = _read_manifest(image, path)
        diff_ids = config.get("rootfs", {}).get("diff_ids", [])
        if len(diff_ids) != len(blobs):
            raise ValueError(f"{path}: {len(blobs)} layers, and a configuration of {len(diff_ids)}")
        layers = []
        for blob, diff_id in zip(blobs, diff_ids, strict=True):
            digest = str(diff_id).partition(":")[2]
            layers.append(_store_layer(image, blob, digest, store))
    settings = config.get("config") or {}
    pairs = [str(pair).partition("=") for pair in settings.get("Env") or ()]
    return store.add_image(
        Image(
            layers=tuple(reversed(layers)),
            env={name: value for name, _, value in pairs},
            workdir=str(settings.get("WorkingDir") or ""),
            user=str(settings.get("User") or ""),
        )
    )


def _read_manifest(image: ImageFile, path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration of an image and the members that are its layers."""
    if image.has("index.json"):
        manifest = _find_manifest(image, image.read_json("index.json"), path)
        blobs = [_blob_name(layer["digest"]) for layer in manifest["layers"]]
        return image.read_json(_blob_name(manifest["config"]["digest"])), blobs
    entries = image.read_json("manifest.json")
    if len(entries) != 1:
        raise ValueError(f"{path}: {len(entries)} images, and one is needed")
    return image.read_json(entries[0]["Config"]), list(entries[0]["Layers"])


def _find_manifest(image: ImageFile, index: dict[str, Any], path: Path) -> dict[str, Any]:
    entries = index.get("manifests", [])
    own = ARCHITECTURES.get(platform.machine(), platform.machine())
    fitting = [
        entry
        for entry in entries
        if entry.get("platform", {}).get("architecture", own) == own
        and entry.get("platform", {}).get("os", "linux") == "linux"
    ]
    if len(fitting) != 1:
        raise ValueError(f"{path}: {len(fitting)} images for linux/{own}, and one is needed")
    content = image.read_json(_blob_name(fitting[0]["digest"]))
    if "manifests" in content:
        return _find_manifest(image, content, path)
    return dict(content)


def _blob_name(digest: str) -> str:
    kind, _, value = str(digest).partition(":")
    if kind != "sha256" or not value.isalnum():
        raise ValueError(f"the digest {digest!r} is not allowed; sha256:… is")
    return f"blobs/{kind}/{value}"


def _store_layer(image: ImageFile, blob: str, digest: str, store: LayerStore) -> str:
    name = store.layer_name(digest)
    if (store.folder / "layers" / name).is_dir():
        return name
    draft = store.new_draft()
    try:
        with image.open(blob) as file:
            _check_compression(file, blob)
            extract_layer(_HashedStream(file, digest), draft, uid_shift=store.uid_shift)
    except BaseException:
        remove_tree(draft)
        raise
    return store.add_layer(draft, digest)


def _check_compression(file: IO[bytes], blob: str) -> None:
    if file.read(4) == b"\x28\xb5\x2f\xfd":
        raise ValueError(f"layer {blob} is compressed by zstd; save it with gzip or without")
    file.seek(0)


class _HashedStream:
    """The uncompressed bytes of a layer, whose hash is its name."""

    def __init__(self, file: IO[bytes], digest: str) -> None:
        is_packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        self._file: Any = gzip.GzipFile(fileobj=file) if is_packed else file
        self._hash = hashlib.sha256()
        self._digest = digest

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._file.read(size)
        self._hash.update(data)
        return data

    def check(self) -> None:
        """Raise ValueError if the content is not what its name says."""
        while self.read(_CHUNK):
            pass
        if self._hash.hexdigest() != self._digest:
            raise ValueError(
                f"a layer is damaged: sha256 {self._hash.hexdigest()}, expected {self._digest}"
            )


def extract_layer(stream: Any, folder: Path, *, uid_shift: int) -> None:
    """Write a layer's archive in the form of an overlay to a new folder.

    Removed files become devices 0/0, opaque folders get their mark, hard links stay links. As root
    owners are those of the image, shifted; else everything belongs to this user. Devices are left
    out.

    Raises:
        ValueError: if a name leaves the folder, or the archive is damaged.
    """
    folder.mkdir()
    # Explicit modes, since the umask of our processes keeps others out.
    folder.chmod(0o755)
    modes: dict[str, int] = {}
    is_root = os.geteuid() == 0
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                path = _layer_path(folder, member.name)
                mode = _extract_member(archive, member, folder, path)
                if mode is None:
                    continue
                if is_root:
                    uid, gid = (
                        number if number <= MAX_UID else NOBODY
                        for number in (member.uid, member.gid)
                    )
                    os.lchown(path, uid + uid_shift, gid + uid_shift)
                if mode >= 0:
                    modes[path] = mode
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"a layer is damaged: {error}") from None
    if hasattr(stream, "check"):
        stream.check()
    for path, mode in reversed(modes.items()):
        if os.path.lexists(path) and not os.path.islink(path):
            os.chmod(path, mode)


def _extract_member(
    archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, path: str
) -> int | None:
    """Write a member; return its mode, -1 for one without, None if nothing is there to own."""
    name = os.path.basename(path)
    if name == OPAQUE_NAME:
        os.setxattr(os.path.dirname(path), OPAQUE, b"y")
        return None
    if name.startswith(WHITEOUT):
        target = os.path.join(os.path.dirname(path), name[len(WHITEOUT) :])
        _clear(target)
        os.mknod(target, stat.S_IFCHR, 0)
        return None
    if member.isdir():
        if not os.path.isdir(path) or os.path.islink(path):
            _clear(path)
            os.mkdir(path)
        return member.mode & 0o7777
    if not (member.isreg() or member.issym() or member.islnk() or member.isfifo()):
        return None
    _clear(path)
    if member.issym():
        os.symlink(member.linkname, path)
        return -1
    if member.islnk():
        os.link(_layer_path(folder, member.linkname), path, follow_symlinks=False)
        return None
    if member.isfifo():
        os.mkfifo(path)
        return member.mode & 0o7777
    content = archive.extractfile(member)
    with open(path, "xb") as file:
        while content is not None and (piece := content.read(_CHUNK)):
            file.write(piece)
    return member.mode & 0o7777


def _layer_path(folder: Path, name: str) -> str:
    """Return where a member belongs; links among its parents are followed inside the folder."""
    parts = [part for part in PurePosixPath(name).parts if part not in ("/", ".")]
    if ".." in parts or "\0" in name:
        raise ValueError(f"a layer holds the name {name!r}, which leaves its folder")
    if not parts:
        return str(folder)
    path = str(folder)
    pending = parts[:-1]
    links = 0
    while pending:
        part = pending.pop(0)
        if part in ("", ".", "/"):
            continue
        if part == "..":
            path = path if path == str(folder) else os.path.dirname(path)
            continue
        step = os.path.join(path, part)
        if os.path.islink(step):
            links += 1
            if links > 40:
                raise ValueError(f"a layer holds the name {name!r}, with a circle of links")
            target = os.readlink(step)
            pending = [*PurePosixPath(target).parts, *pending]
            path = str(folder) if target.startswith("/") else path
            continue
        if not os.path.isdir(step):
            _clear(step)
            os.mkdir(step)
            os.chmod(step, 0o755)
            if os.geteuid() == 0:
                status = os.stat(path)
                os.lchown(step, status.st_uid, status.st_gid)
        path = step
    return os.path.join(path, parts[-1])


def _clear(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        remove_tree(Path(path))
    elif os.path.lexists(path):
        os.unlink(path)
