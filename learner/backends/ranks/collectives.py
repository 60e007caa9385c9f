"""Collective operations on lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

# All ranks send as many bytes in one collective, so a text has a fixed size.
TEXT_BYTES: Final = 512
# Reduced at once, 32 MiB of float32: the memory of the copy that a transfer needs.
_BUCKET_ELEMENTS: Final = 8 << 20


@torch.no_grad()
def sum_over_ranks(tensors: Sequence[Tensor], device: torch.device, group: Any = None) -> None:
    """Sum tensors in place over the ranks of a group, or all ranks."""
    bucket: list[Tensor] = []
    for index, tensor in enumerate(tensors):
        bucket.append(tensor)
        room = _BUCKET_ELEMENTS - sum(member.numel() for member in bucket)
        if index + 1 == len(tensors) or tensors[index + 1].numel() > room:
            flat = torch.cat([member.flatten() for member in bucket]).to(device)
            dist.all_reduce(flat, group=group)
            for member, part in zip(
                bucket, torch.split(flat, [member.numel() for member in bucket]), strict=True
            ):
                member.copy_(part.view_as(member))
            bucket = []


def gather_texts(text: str, device: torch.device) -> list[str]:
    """Return every rank's text, in the order of the ranks, cut to ``TEXT_BYTES``."""
    data = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return [bytes(part.tolist()).rstrip(b"\0").decode(errors="ignore") for part in parts]
