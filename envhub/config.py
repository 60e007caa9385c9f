"""The section ``envhub``: how a hub runs its environments."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from broker.config import Section


class EnvhubSection(Section):
    """Settings of an environment hub; the domains stand in a section of their own."""

    n: PositiveInt = 64  # environments running at once
    step_timeout_s: PositiveFloat = 30.0  # one reset or step
    episode_timeout_s: PositiveFloat = 300.0
    generate_timeout_s: PositiveFloat = 120.0  # one turn, retries included
    max_retries: PositiveInt = 3  # of one turn on other servers
    drain_timeout_s: PositiveFloat = 30.0
