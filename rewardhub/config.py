"""The section ``rewardhub``: how a hub scores."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from broker.config import Section


class RewardhubSection(Section):
    """Settings of a reward hub."""

    workers: PositiveInt = 2  # worker processes
    timeout_s: PositiveFloat = 10.0  # one score
    max_retries: PositiveInt = 2  # of one score after a timeout or a crash
    max_groups: PositiveInt = 16  # groups in work at once
    drain_timeout_s: PositiveFloat = 30.0
