"""The error of a task that cannot be played or graded."""

from __future__ import annotations

from broker.errors import RlearnerError


class TaskError(RlearnerError):
    """The task is at fault, not the policy: its group is closed with this reason."""
