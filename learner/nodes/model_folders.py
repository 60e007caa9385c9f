"""Model folders on nodes, compared file by file with rank 0's."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Final

from learner.backends.ranks.messages import FoldersCommand, FoldersReply

# Of the files from which ranks load models and tokenizers; other files may differ.
SUFFIXES: Final = {".json", ".safetensors", ".txt", ".model", ".jinja", ".py"}
# Folder of a checkpoint from which no rank loads its model.
STATE: Final = "learner"
# Files up to this size are compared by content; weights would take minutes to read.
SMALL_BYTES: Final = 1 << 20

# By file its size, and its digest if it is small.
Listing = dict[str, tuple[int, str]]


def list_folder(folder: Path) -> Listing:
    """Return the files of a model folder that ranks load."""
    listing: Listing = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        if file.suffix in SUFFIXES and name.parts[0] != STATE and file.is_file():
            size = file.stat().st_size
            digest = ""
            if size <= SMALL_BYTES:
                digest = sha256(file.read_bytes()).hexdigest()[:32]
            listing[str(name)] = (size, digest)
    return listing


def listing_difference(rank_0: Listing, local: Listing) -> str:
    """Return how a folder differs from rank 0's, as a line; empty if it does not."""
    for name in dict.fromkeys([*rank_0, *local]):
        theirs = rank_0.get(name)
        ours = local.get(name)
        if theirs is None:
            return f"{name} is only here"
        if ours is None:
            return f"{name} is only there"
        if theirs[0] != ours[0]:
            return f"{name} has {ours[0]} bytes, there {theirs[0]}"
        if theirs != ours:
            return f"the content of {name} differs"
    return ""


def compare_folders(command: FoldersCommand, node: str) -> FoldersReply:
    """Compare this host's folders with rank 0's.

    Args:
        node: name of this host's, for messages.
    """
    for path, listing in command.folders.items():
        if not Path(path).is_dir():
            return FoldersReply(
                f"{node} has no {path}: run.dir and model folders must be there on all nodes"
            )
        if differs := listing_difference(listing, list_folder(Path(path))):
            return FoldersReply(f"{path} on {node} is not the folder of node 0: {differs}")
    return FoldersReply("")
