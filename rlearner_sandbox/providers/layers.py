"""Stores read-only layers and images by their digest, for sandboxes that mount them.

A layer is a folder in the form of an overlay: removed files are devices 0/0, and folders that hide
those below carry a mark. An image is a list of layers with what its configuration says.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from broker.system.private_files import private_write, replace
from rlearner_sandbox.providers.base import SandboxError
from rlearner_sandbox.providers.trees import copy_tree, remove_tree, tree_digest

DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
# The mount call takes 4,096 bytes for all layers, by their file descriptors.
MAX_LAYERS: Final = 100
# Bump when the form of stored layers changes.
_FORMAT: Final = 1


@dataclass(frozen=True)
class Image:
    """A root file system.

    Attributes:
        layers: folders below ``layers``, the topmost first.
        env, workdir, user: what its configuration says.
        shows_host: whether the host's programs are shown over it.
    """

    layers: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    user: str = ""
    shows_host: bool = False


class LayerStore:
    """Layers and images in a folder.

    Args:
        folder: private to this user; made if it is not there.
        uid_shift: what is added to owners of files; 0: owners are this user.
        parent: a store whose layers and images count as this one's.
    """

    def __init__(self, folder: Path, *, uid_shift: int, parent: LayerStore | None = None) -> None:
        self.folder = folder
        self.uid_shift = uid_shift
        self._parent = parent
        self._imported: dict[str, Image] = {}
        for name in ("layers", "images", "drafts"):
            (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)

    def layer_folder(self, layer: str) -> Path:
        """Return the folder of a layer.

        Raises:
            SandboxError: if it is not there.
        """
        path = self.folder / "layers" / layer
        if path.is_dir():
            return path
        if self._parent is None:
            raise SandboxError(f"layer {layer} is not in {self.folder / 'layers'}")
        return self._parent.layer_folder(layer)

    def find_image(self, image: str) -> Image:
        """Return an image by its digest or by a folder with a root file system, which is copied
        once.

        Raises:
            ValueError: if there is none.
        """
        if DIGEST.fullmatch(image):
            return self._read_image(image)
        folder = Path(image)
        if not folder.is_absolute() or not folder.is_dir():
            raise ValueError(
                f"image: {image!r} is not a folder of this host (an absolute path) and not a "
                "digest sha256:… that `rlearner tasks build` prints"
            )
        if image not in self._imported:
            layer = self.add_layer(self.import_tree(folder))
            self._imported[image] = Image((layer,))
        return self._imported[image]

    def _read_image(self, digest: str) -> Image:
        path = self.folder / "images" / f"{digest.partition(':')[2]}.json"
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if self._parent is not None:
                return self._parent._read_image(digest)
            raise ValueError(
                f"image: {digest!r} is not built on this host; run: rlearner tasks build"
            ) from None
        return Image(**(fields | {"layers": tuple(fields["layers"])}))

    def new_draft(self) -> Path:
        """Return a path for a layer that is being written."""
        return self.folder / "drafts" / secrets.token_hex(8)

    def import_tree(self, source: Path) -> Path:
        """Copy a folder of the host, with owners as sandboxes see them; return the draft."""
        draft = self.new_draft()
        try:
            copy_tree(source, draft, uid_shift=self.uid_shift or None)
        except BaseException:
            remove_tree(draft)
            raise
        return draft

    def add_layer(self, draft: Path, name: str | None = None) -> str:
        """Move a draft to its place; return its name.

        Args:
            name: the digest of what it was made of; None: computed from its content.
        """
        name = name or tree_digest(draft, uid_shift=self.uid_shift)
        layer = self.layer_name(name)
        target = self.folder / "layers" / layer
        try:
            replace(draft, target)
        except OSError:
            if not target.is_dir():
                raise
            # Another process has stored the same.
            remove_tree(draft)
        return layer

    def layer_name(self, digest: str) -> str:
        """Return the folder's name for the layer of this digest."""
        # Owners on disk depend on who runs the sandboxes.
        return f"{digest[:40]}-{_FORMAT}{'s' if self.uid_shift else 'u'}"

    def add_image(self, image: Image) -> str:
        """Store an image and return its digest.

        Raises:
            ValueError: if it has more layers than can be mounted.
        """
        if len(image.layers) > MAX_LAYERS:
            raise ValueError(f"image: {len(image.layers)} layers, and at most {MAX_LAYERS} can be")
        text = json.dumps(asdict(image), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        path = self.folder / "images" / f"{digest}.json"
        private_write(path, text.encode())
        return f"sha256:{digest}"
