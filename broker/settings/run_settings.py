"""All settings of a run, typed: a section per attribute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self, TypeVar

from pydantic import Field

from broker.contract.wire import PlainSettings
from broker.errors import ConfigError
from broker.settings.config import (
    BrokerSection,
    DomainSection,
    RunSection,
    Section,
    SectionGroup,
    TelemetrySection,
)
from broker.settings.schema.algorithm import AlgorithmSection
from broker.settings.schema.evaluation import EvalSection, WarmStartSection
from broker.settings.schema.hubs import EnvhubSection, RewardhubSection
from broker.settings.schema.model import ModelSection
from broker.settings.schema.policies import PolicySection
from broker.settings.schema.records import (
    CheckpointSection,
    FailuresSection,
    SamplesSection,
    TrackersSection,
)
from broker.settings.schema.serving import RolloutSection
from broker.settings.schema.teaching import TeacherSection
from broker.settings.schema.training import TrainSection

S = TypeVar("S", bound=Section)

# sections that hold several of a kind, by names that the user chooses
NAMED_SECTIONS: Final[dict[str, type[Section]]] = {
    "domains": DomainSection,
    "teachers": TeacherSection,
    "policies": PolicySection,
}


class RunSettings(SectionGroup):
    """The settings of a run; a section that the configuration leaves out has its defaults.

    A RunSpec carries them as plain values, see ``of_config``.
    """

    run: RunSection = RunSection()
    broker: BrokerSection = BrokerSection()
    domains: dict[str, DomainSection] = Field(default_factory=dict)
    teachers: dict[str, TeacherSection] = Field(default_factory=dict)
    policies: dict[str, PolicySection] = Field(default_factory=dict)
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    warm_start: WarmStartSection = WarmStartSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    samples: SamplesSection = SamplesSection()
    trackers: TrackersSection = TrackersSection()
    telemetry: TelemetrySection = TelemetrySection()
    failures: FailuresSection = FailuresSection()
    rollout: RolloutSection = RolloutSection()
    envhub: EnvhubSection = EnvhubSection()
    rewardhub: RewardhubSection = RewardhubSection()

    @property
    def trained_domains(self) -> dict[str, DomainSection]:
        """The domains that get training tickets."""
        return {name: domain for name, domain in self.domains.items() if domain.weight}

    @property
    def evaluated_domains(self) -> dict[str, DomainSection]:
        """The domains that evaluations measure, sorted by name."""
        names = sorted(self.domains if self.eval.domains is None else self.eval.domains)
        return {name: self.domains[name] for name in names}

    def demonstrated_domains(self) -> list[str]:
        """Return the domains whose demonstrations the warm start trains on, as it names them."""
        name = self.warm_start.domain
        trained = list(self.trained_domains)
        if name == "*" or (not name and len(trained) == 1):
            return trained
        return [name]

    @classmethod
    def of_config(cls, values: PlainSettings) -> Self:
        """Return the settings in a validated configuration, as a RunSpec or a folder has it.

        Settings that this version does not know are left out: hubs and servers are upgraded before
        the learner, and a run's folder may be older than the program.

        Raises:
            pydantic.ValidationError: if a value is not allowed.
        """
        known = {}
        for name, section_type in section_types().items():
            if (section := values.get(name)) is None:
                continue
            if name in NAMED_SECTIONS and isinstance(section, dict):
                known[name] = {
                    key: _known_values(entry, section_type) for key, entry in section.items()
                }
            else:
                known[name] = _known_values(section, section_type)
        return cls.model_validate(known)


def section_types() -> dict[str, type[Section]]:
    """Return the class of every section by its name, of ``NAMED_SECTIONS`` that of each entry."""
    types: dict[str, Any] = {
        name: field.annotation for name, field in RunSettings.model_fields.items()
    }
    return types | NAMED_SECTIONS


def _known_values(values: Any, section_type: type[Section]) -> Any:
    if not isinstance(values, dict):
        return values  # refused by validation
    return {key: value for key, value in values.items() if key in section_type.model_fields}


def stored_section(config: PlainSettings, name: str, section_type: type[S]) -> S:
    """Return one section of a run's folder, whatever the others hold.

    Raises:
        pydantic.ValidationError: if a value is not allowed.
    """
    return section_type.model_validate(_known_values(config.get(name) or {}, section_type))


def stored_domains(config: PlainSettings) -> list[str]:
    """Return the names of the domains in a run's folder, which may be damaged, sorted."""
    domains = config.get("domains")
    return sorted(domains) if isinstance(domains, dict) else []


def stored_value(
    config: PlainSettings,
    section: str,
    field: str,
    types: Mapping[str, type[Section]] | None = None,
) -> Any:
    """Return one value of a run's folder, which may be damaged or of another version.

    Args:
        types: of the sections; None: of a run with a fleet.

    Returns:
        None if it is missing; it is not checked.

    Raises:
        TypeError: if there is no such setting, as after it was renamed.
    """
    if field not in (types or section_types())[section].model_fields:
        raise TypeError(f"{section} has no field {field}")
    values = config.get(section)
    return values.get(field) if isinstance(values, dict) else None


def check_domains(settings: RunSettings) -> None:
    """Check the domains' settings that must agree.

    Raises:
        ConfigError: if no domain is trained or one is never used, min_group_size exceeds group_size
            or lets no straggler be left out, a turn exceeds the context, or the memory is not used.
    """
    _check_use(settings)
    for name, domain in settings.domains.items():
        domain_key = f"domains.{name}"
        smallest = domain.min_group_size
        size = domain.group_size
        if smallest is not None and smallest > size:
            raise ConfigError(
                f"{domain_key}.min_group_size", smallest, f"at most group_size, which is {size}"
            )
        if domain.straggler_factor is not None and (smallest is None or smallest == size):
            rule = f"left out, or {domain_key}.min_group_size below group_size: only then can a group close early"
            raise ConfigError(f"{domain_key}.straggler_factor", domain.straggler_factor, rule)
        if domain.context == "full":
            for key, allowed in (("memory", "recent"), ("history_length", "left out")):
                if (value := getattr(domain, key)) != DomainSection.model_fields[key].default:
                    rule = f"{allowed} with context full, which shows the whole conversation"
                    raise ConfigError(f"{domain_key}.{key}", value, rule)
        tokens = domain.sampling.max_tokens
        context = domain.max_context_tokens
        if tokens >= context:
            raise ConfigError(
                f"{domain_key}.sampling.max_tokens",
                tokens,
                f"below max_context_tokens, which is {context}",
            )


def _check_use(settings: RunSettings) -> None:
    """Check that a domain is trained, and that those of weight 0 are evaluated."""
    section = settings.eval
    names = list(settings.domains)
    if section.domains is not None and (
        not set(section.domains) <= set(names) or len(set(section.domains)) < len(section.domains)
    ):
        allowed = f"names of domains, each once: {', '.join(names)}"
        raise ConfigError("eval.domains", section.domains, allowed)
    if names and not settings.trained_domains:
        allowed = "above 0 in one domain at least; with 0 a domain is only evaluated"
        raise ConfigError(f"domains.{names[0]}.weight", 0, allowed)
    for name in names:
        if name in settings.trained_domains:
            continue
        if name not in settings.evaluated_domains:
            allowed = "above 0, or name it in eval.domains: with 0 a domain is only evaluated"
            raise ConfigError(f"domains.{name}.weight", 0, allowed)
        if not section.every_steps and section.tasks is None:
            allowed = "above 0 without eval.every_steps: with 0 a domain is only evaluated"
            raise ConfigError(f"domains.{name}.weight", 0, allowed)
