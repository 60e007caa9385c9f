"""Tells the C library to keep freed memory instead of returning it to the system after every pass."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_TRIM_THRESHOLD: Final = -1  # from malloc.h
_TOP_PAD: Final = -2
_MMAP_THRESHOLD: Final = -3
_LARGEST_MMAP_THRESHOLD: Final = 32 << 20  # glibc rejects more


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory in this process; return False if there is no such setting.

    Each forward pass allocates and frees megabytes. By default glibc returns them to the kernel and
    gets new, zeroed pages for the next pass: 30-80 page faults per short turn, up to a third of its
    time where faults are expensive (virtual machines). With this setting the process stays as large
    as its largest pass.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    settings = (
        (_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_TRIM_THRESHOLD, 2**31 - 1),
        (_TOP_PAD, 16 << 20),
    )
    return all(mallopt(option, value) == 1 for option, value in settings)
