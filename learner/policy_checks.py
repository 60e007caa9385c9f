"""Checks of ``policies``, ``domains.X.policy`` and ``domains.X.seats``. No torch."""

from __future__ import annotations

from broker.contract.wire import ACTOR
from broker.errors import ConfigError
from broker.settings.config import DomainSection, seat_policies
from broker.settings.run_settings import RunSettings


def check_policies(settings: RunSettings) -> None:
    """Check that each policy that is named exists and is used, and that trained domains are played
    by the trained policy.

    Engines, scripts and the seats that an environment has are checked where they are known:
    ``rollout.checks`` and ``envhub.config``.

    Raises:
        ConfigError: for the first setting that is not allowed.
    """
    used: set[str] = set()
    for name, domain in settings.domains.items():
        used |= _check_domain(name, domain, settings)
    for name, section in settings.policies.items():
        if name == ACTOR:
            allowed = "another name: actor is the policy that is trained"
            raise ConfigError("policies", name, allowed)
        if section.model_path is not None and name in settings.teachers:
            allowed = f"another name than that of teachers.{name}: servers are found by it"
            raise ConfigError("policies", name, allowed)
        if name not in used:
            allowed = "nothing, or name it in domains.X.seats or domains.X.policy"
            raise ConfigError(f"policies.{name}", section.to_plain(), allowed)


def _check_domain(name: str, domain: DomainSection, settings: RunSettings) -> set[str]:
    """Return the other policies that a domain names."""
    key = f"domains.{name}"
    named = {(f"{key}.policy", domain.policy)}
    for seat, entry in domain.seats.items():
        if not entry:
            raise ConfigError(f"{key}.seats.{seat}", entry, "at least one policy")
        named |= {(f"{key}.seats.{seat}", policy) for policy in seat_policies(entry)}
    for place, policy in sorted(named):
        if policy != ACTOR and policy not in settings.policies:
            names = ", ".join(settings.policies) or "it has none"
            raise ConfigError(place, policy, f"actor, or a name of section policies: {names}")
    if domain.seats and domain.policy != ACTOR:
        allowed = f"left out with {key}.seats, which says who plays"
        raise ConfigError(f"{key}.policy", domain.policy, allowed)
    if domain.weight:
        _check_trained(key, domain)
    return {policy for _, policy in named} - {ACTOR}


def _check_trained(key: str, domain: DomainSection) -> None:
    if domain.policy != ACTOR:
        allowed = f"actor, or {key}.weight 0: what another policy says is not trained on"
        raise ConfigError(f"{key}.policy", domain.policy, allowed)
    entries = [seat_policies(entry) for entry in domain.seats.values()]
    if entries and not any(set(entry) == {ACTOR} for entry in entries):
        allowed = f"actor alone in one seat at least, or {key}.weight 0"
        raise ConfigError(f"{key}.seats", domain.seats, allowed)
