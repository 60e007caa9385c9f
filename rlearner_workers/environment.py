"""Chooses the environment of processes that run users' code: no secret unless named."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Final

from broker.system.redaction import without_secrets

_INHERITED: Final = re.compile(
    # the session, and where programs, files and certificates are
    "PATH|HOME|USER|LOGNAME|SHELL|HOSTNAME|PWD|TERM|TZ|TMPDIR|TMP|TEMP|LANG|LANGUAGE|LC_.+"
    "|XDG_(CACHE|DATA|CONFIG)_HOME"
    "|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|NODE_PATH|NODE_EXTRA_CA_CERTS|JAVA_HOME"
    "|(?i:https?_proxy|all_proxy|no_proxy)"
    # Python, libraries and numerics
    "|PYTHON.+|VIRTUAL_ENV|CONDA_.+|LD_LIBRARY_PATH|LD_PRELOAD|MALLOC_.+|TRITON_CACHE_DIR"
    "|TOKENIZERS_PARALLELISM"
    "|(OMP|MKL|KMP|OPENBLAS|NUMEXPR|TORCH|PYTORCH|TORCHINDUCTOR|CUDA|NVIDIA|ROCR|HIP)_.+"
    "|HF_(HOME|HUB_CACHE|HUB_OFFLINE|DATASETS_CACHE|ENDPOINT)"
    "|TRANSFORMERS_(CACHE|OFFLINE|VERBOSITY)"
    # environments
    "|RL_HOST_RULES|SDL_.+|PYGAME_.+|DISPLAY|MPLBACKEND|ALFWORLD_DATA|APPWORLD_ROOT"
)


def worker_environment(
    names: Iterable[str] = (), environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables that a worker gets: listed ones without secrets, and ``names``.

    Args:
        named: variables that the user passes on, secret or not; those that do not exist are left
            out.
    """
    passed = {
        name: value
        for name, value in without_secrets(environ).items()
        if _INHERITED.fullmatch(name)
    }
    return passed | {name: environ[name] for name in names if name in environ}
