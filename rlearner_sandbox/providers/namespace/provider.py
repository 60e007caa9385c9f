"""The provider ``namespace``: a warden, a folder of layers, and the sandboxes over them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, TypeVar, get_args

from rlearner_sandbox.providers.base import SandboxError, SandboxSpec
from rlearner_sandbox.providers.layers import Image, LayerStore
from rlearner_sandbox.providers.namespace import cgroups, host_layer
from rlearner_sandbox.providers.namespace.forward import endpoint_address
from rlearner_sandbox.providers.namespace.link import WardenLink
from rlearner_sandbox.providers.namespace.plan import FIRST_UID, NUM_UIDS
from rlearner_sandbox.providers.namespace.sandbox import NamespaceSandbox
from rlearner_sandbox.providers.owner import OwnedFolder, default_folder, remove_leftovers
from rlearner_sandbox.providers.trees import remove_tree

log = logging.getLogger(__name__)

T = TypeVar("T")
Layering = Literal["auto", "overlay", "copy"]
_numbers: Final = itertools.count(1)


class NamespaceProvider:
    """Starts sandboxes of this host's namespaces.

    Args:
        folder: where layers and sandboxes are; None: in this user's XDG_STATE_HOME.
        layering: ``overlay``; ``copy``, which copies the whole image for each sandbox; ``auto``:
            the second only where the first does not work.
    """

    def __init__(self, folder: Path | str | None = None, layering: Layering = "auto") -> None:
        if layering not in get_args(Layering):
            raise ValueError(
                f"layering: {layering!r} is not allowed; one of {get_args(Layering)} is"
            )
        self.store = open_store(None if folder is None else Path(folder))
        self.state = self.store.folder
        self.has_range = self.store.uid_shift > 0
        self.cgroup = cgroups.delegated_folder()
        self.layering = layering
        self._owner: OwnedFolder | None = None
        self._snapshots: LayerStore | None = None
        self._link: WardenLink | None = None
        self._sandboxes: dict[int, NamespaceSandbox] = {}
        self._host_image: Image | None = None
        self._opening = asyncio.Lock()

    async def start(self, spec: SandboxSpec) -> NamespaceSandbox:
        """Return a running sandbox, see ``SandboxProvider``."""
        self._check_spec(spec)
        image = await self._find_image(spec)
        sandbox = NamespaceSandbox(self, next(_numbers), spec, image)
        await self.launch(sandbox)
        return sandbox

    async def launch(self, sandbox: NamespaceSandbox, source: Path | None = None) -> None:
        """Start a new sandbox, with what the folder ``source`` of another has written."""
        await self.open_link()
        self._sandboxes[sandbox.key] = sandbox
        try:
            await sandbox.launch(source)
        except BaseException:
            await sandbox.stop()
            raise

    def forget(self, sandbox: NamespaceSandbox) -> None:
        """Stop knowing a sandbox."""
        self._sandboxes.pop(sandbox.key, None)

    def next_key(self) -> int:
        """Return a number that no sandbox has."""
        return next(_numbers)

    def adopt(self, sandbox: NamespaceSandbox, key: int) -> None:
        """Know a sandbox by another key."""
        self._sandboxes.pop(sandbox.key, None)
        self._sandboxes[key] = sandbox

    @property
    def link(self) -> WardenLink:
        """The warden.

        Raises:
            SandboxError: if it has ended.
        """
        if self._link is None or not self._link.is_alive:
            raise SandboxError("the process that makes sandboxes has ended")
        return self._link

    @property
    def folder(self) -> Path:
        """Where this process's sandboxes are."""
        assert self._owner is not None
        return self._owner.path

    @property
    def snapshots(self) -> LayerStore:
        """Where this process's snapshots are, until it closes the provider."""
        assert self._snapshots is not None
        return self._snapshots

    async def open_link(self) -> WardenLink:
        """Return the warden, started again if it has ended."""
        async with self._opening:
            if self._owner is None:
                await self.run_blocking(lambda: remove_leftovers(self.state))
                self._owner = OwnedFolder(self.state)
                self._snapshots = LayerStore(
                    self._owner.path / "store", uid_shift=self.store.uid_shift, parent=self.store
                )
            if self._link is None or not self._link.is_alive:
                self._link = WardenLink(self._end_sandbox)
                self._owner.note_process(self._link.pid)
            return self._link

    def _end_sandbox(self, key: int) -> None:
        sandbox = self._sandboxes.get(key)
        if sandbox is not None:
            sandbox.note_end(key)

    def _check_spec(self, spec: SandboxSpec) -> None:
        if spec.network == "endpoint":
            endpoint_address(spec.endpoint)
        if not spec.workdir.startswith("/"):
            raise ValueError(f"workdir: {spec.workdir!r} is not allowed; an absolute path is")
        self.check_user(spec.user)

    def check_user(self, user: str | None) -> None:
        """Raise ValueError if commands cannot run as this user of the sandbox."""
        is_root = (user or "root").split(":")[0] in ("root", "0")
        if not is_root and not self.has_range:
            raise ValueError(
                f"user: {user!r} is not allowed; without root on the host a sandbox of the "
                "provider namespace has the user root alone"
            )

    async def _find_image(self, spec: SandboxSpec) -> Image:
        await self.open_link()
        name = spec.image
        if name is not None:
            return await self.run_blocking(lambda: self.snapshots.find_image(name))
        if self._host_image is None:
            self._host_image = await self.run_blocking(self._make_host_image)
        return self._host_image

    def _make_host_image(self) -> Image:
        draft = self.store.new_draft()
        try:
            host_layer.write_host_root(draft)
            layer = self.store.add_layer(self.store.import_tree(draft))
        finally:
            remove_tree(draft)
        return Image((layer,), shows_host=True)

    async def run_blocking(self, work: Callable[[], T]) -> T:
        """Do file work in a thread; what the system refuses becomes SandboxError."""
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise SandboxError(f"the sandboxes' folder: {error}") from None

    async def close(self) -> None:
        """Stop every sandbox and leave nothing behind but layers."""
        for sandbox in list(self._sandboxes.values()):
            await sandbox.stop()
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._owner is not None:
            await asyncio.to_thread(self._owner.release)
            self._owner = None
            self._snapshots = None


def open_store(folder: Path | None = None) -> LayerStore:
    """Return the store of layers and images of this user; None: in XDG_STATE_HOME."""
    folder = folder or default_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    has_range = os.geteuid() == 0 and _are_ids_mapped()
    return LayerStore(folder, uid_shift=FIRST_UID if has_range else 0)


def _are_ids_mapped() -> bool:
    for name in ("uid", "gid"):
        lines = Path(f"/proc/self/{name}_map").read_text(encoding="ascii").splitlines()
        ranges = [[int(number) for number in line.split()] for line in lines]
        if not any(
            first <= FIRST_UID and first + count >= FIRST_UID + NUM_UIDS
            for first, _, count in ranges
        ):
            return False
    return True
