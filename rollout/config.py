"""The configuration section ``rollout``, for this role's modules and for plug-ins."""

from broker.settings.schema.serving import RolloutSection

__all__ = ["RolloutSection"]
