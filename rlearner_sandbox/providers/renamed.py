"""Gives the members of an archive another root."""

from __future__ import annotations

import tarfile
from typing import IO


def rename_members(source: IO[bytes], target: IO[bytes], root: str | None, name: str) -> None:
    """Copy an archive; the first part of each member's name becomes ``name``.

    Args:
        root: the only first part that is expected; None: any.

    Raises:
        ValueError: if the archive is not valid.
    """
    try:
        with (
            tarfile.open(fileobj=source, mode="r|") as archive,
            tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as renamed,
        ):
            for member in archive:
                first, slash, rest = member.name.strip("/").partition("/")
                if root is not None and first != root:
                    raise ValueError(f"the copy holds the name {member.name!r}")
                member.name = f"{name}{slash}{rest}"
                member.pax_headers = {}
                content = archive.extractfile(member) if member.isreg() else None
                renamed.addfile(member, content)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"the copy is not a valid archive: {error}") from None
