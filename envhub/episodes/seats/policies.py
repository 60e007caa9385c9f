"""The policies of a run besides the trained one, as a hub reaches them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from broker.contract.wire import ACTOR
from broker.settings.config import DomainSection, seat_policies
from broker.settings.run_settings import RunSettings
from broker.settings.schema.policies import PolicySection
from envhub.domain import Domain, load_domain
from envhub.envs.base import Environment
from envhub.episodes.seats.text_players import EndpointPlayer, ScriptPlayer, TextPlayer
from envhub.players.host import load_player
from envhub.workers.calls import EnvironmentCalls
from rlearner_text.openai.client import EndpointClient
from rlearner_text.tokenizer import Tokenizer

# before the second try of a request to an endpoint
BACKOFF_S: Final = 1.0
SCRIPTS: Final = "policies."  # before the names of the domains of scripts


@dataclass(frozen=True)
class PlayerServices:
    """What text players are made with.

    Attributes:
        lease: returns an environment of a domain.
        release: takes it back, and whether it may be used again.
    """

    calls: EnvironmentCalls
    lease: Callable[[Domain], Awaitable[Environment]]
    release: Callable[[Domain, Environment, bool], None]


class PlayedPolicies:
    """The section ``policies`` of a run, with its tokenizers and connections.

    Args:
        tokenizer: of the policy that is trained.
        timeout_s: longest wait for an answer of an endpoint, retries included.

    Raises:
        ConfigError: if a tokenizer cannot be loaded.
        UserError: if the key of an endpoint is missing on this host.
    """

    def __init__(
        self, settings: RunSettings, tokenizer: Tokenizer, *, timeout_s: float = 120.0
    ) -> None:
        self._sections = settings.policies
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._retries = settings.envhub.max_retries
        self._clients: dict[str, EndpointClient] = {}
        self._keys = {
            name: section.api_key.require(f"policies.{name}.api_key", section.base_url or "")
            for name, section in settings.policies.items()
            if section.api_key is not None
        }
        self._tokenizers = {
            name: load_tokenizer(name, settings)
            for name, section in settings.policies.items()
            if section.tokenizer == "own"
        }
        self._script_domains: dict[tuple[str, str], Domain] = {}

    def served_by(self, section: DomainSection) -> set[str]:
        """Return the policies on rollout servers that a domain cannot be played without."""
        names = {name for entry in section.seats.values() for name in seat_policies(entry)}
        names.add(section.policy)
        return {
            name
            for name in names - {ACTOR}
            if name in self._sections and self._sections[name].model_path is not None
        }

    def tokenizer_of(self, policy: str) -> Tokenizer:
        """Return the tokenizer of a policy that is served."""
        return self._tokenizers.get(policy, self._tokenizer)

    def temperature_of(self, policy: str) -> float | None:
        """Return a policy's temperature, None if it has none of its own."""
        section = self._sections.get(policy)
        return None if section is None else section.temperature

    def text_player(
        self, policy: str, seat: str, services: PlayerServices, temperature: float
    ) -> TextPlayer | None:
        """Return a player that exchanges text; None for a policy that is served.

        Args:
            temperature: of the domain's sampling.
        """
        section = self._sections.get(policy)
        if section is None or section.model_path is not None:
            return None
        if section.base_url is not None:
            return EndpointPlayer(self._client(policy, section), section, temperature)
        domain = self._script_domains.get((policy, seat))
        if domain is None:
            domain = self._script_domains[policy, seat] = script_domain(policy, seat, section)
        return ScriptPlayer(
            services.calls,
            lambda: services.lease(domain),
            lambda host, is_healthy: services.release(domain, host, is_healthy),
        )

    def _client(self, policy: str, section: PolicySection) -> EndpointClient:
        if policy not in self._clients:
            self._clients[policy] = EndpointClient(
                str(section.base_url),
                self._keys.get(policy, ""),
                timeout_s=self._timeout_s / (self._retries + 1),
                retries=self._retries,
                base_s=BACKOFF_S,
            )
        return self._clients[policy]

    async def close(self) -> None:
        """Close the connections to endpoints."""
        clients = list(self._clients.values())
        self._clients.clear()
        await asyncio.gather(*(client.close() for client in clients))


def load_tokenizer(name: str, settings: RunSettings) -> Tokenizer:
    """Return the tokenizer of a policy's own model.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    return Tokenizer.load(
        str(settings.policies[name].model_path),
        trust_remote_code=settings.model.trust_remote_code,
        key=f"policies.{name}.model_path",
    )


def script_domain(policy: str, seat: str, section: PolicySection) -> Domain:
    """Return the domain whose environment is a script.

    Raises:
        ConfigError: if there is no such script.
    """
    player_class = load_player(f"policies.{policy}.script", section.script)
    host_section = DomainSection(
        env="envhub.players.host:PlayerHost",
        env_args={"script": section.script, "script_args": section.args, "seat": seat},
        isolation=player_class.isolation,
    )
    # with a dot, which names of domains do not have
    return load_domain(f"{SCRIPTS}{policy}.{seat}", host_section)
