"""The config section ``envhub``, and checks of the domains before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from broker.errors import ConfigError
from broker.settings.run_settings import RunSettings
from broker.settings.schema.hubs import EnvhubSection
from rlearner_text.model_checks import check_trained_model

if TYPE_CHECKING:
    from envhub.domain import Domain
    from rlearner_text.tokenizer import Tokenizer

__all__ = [
    "EVAL_TASKS",
    "EnvhubSection",
    "check",
    "check_templates",
    "data_digests",
    "domain_eval_tasks",
    "num_eval_tasks",
]

# per domain, if `eval.tasks` is null and every domain has as many
EVAL_TASKS: Final = 256


def check(settings: RunSettings) -> RunSettings:
    """Refuse domains that cannot run: unknown environment, bad data, contradicting numbers.

    Returns:
        The settings, with the number of tasks of an evaluation.

    Raises:
        ConfigError: names the key, its value and what is allowed.
        DataError: if a row of a data file is malformed.
    """
    from envhub.domain import load_domains
    from envhub.task_catalogue import check_tasks

    domains = load_domains(settings)
    for domain in domains.values():
        _check_numbers(domain, settings)
        domain.check()
        check_tasks(domain)
    if settings.eval.every_steps:
        settings = settings.with_values("eval", tasks=num_eval_tasks(settings))
    _check_demonstrations(domains, settings)
    tokenizer = check_trained_model(settings.model)
    check_templates(settings, tokenizer)
    for name in settings.teachers:
        _check_teacher(name, settings, tokenizer)
    for name in settings.policies:
        _check_policy(name, settings, tokenizer)
    return settings


def _check_teacher(name: str, settings: RunSettings, tokenizer: Tokenizer | None) -> None:
    """Check that a teacher can read what its domains sample.

    Raises:
        ConfigError: if its vocabulary is another one, or an agent writes the prompts that it would
            change.
    """
    from envhub.envs import AGENTS

    teacher = settings.teachers[name]
    for domain_name, domain in settings.domains.items():
        if domain.teacher == name and domain.env in AGENTS:
            for field in ("hint", "tokenizer"):
                if (value := getattr(teacher, field)) not in ("", "same"):
                    allowed = f"left out for domain {domain_name}: an agent writes its own prompts"
                    raise ConfigError(f"teachers.{name}.{field}", value, allowed)
    if tokenizer is None or teacher.model_path is None:
        return
    key = f"teachers.{name}"
    difference = _vocabulary_difference(key, teacher.model_path, settings, tokenizer)
    if difference and teacher.tokenizer == "same":
        allowed = (
            f"a model with the policy's vocabulary ({difference}), or set {key}.tokenizer to "
            "aligned"
        )
        raise ConfigError(f"{key}.model_path", teacher.model_path, allowed)


def _vocabulary_difference(
    key: str, model_path: str, settings: RunSettings, tokenizer: Tokenizer
) -> str:
    """Return how a model's vocabulary differs from the trained policy's, empty if it does not."""
    from rlearner_text.tokenizer import Tokenizer
    from rlearner_text.vocabularies.difference import vocabulary_difference

    remote_code = settings.model.trust_remote_code
    loaded = Tokenizer.load(model_path, key=f"{key}.model_path", trust_remote_code=remote_code)
    return vocabulary_difference(tokenizer, loaded)


def _check_policy(name: str, settings: RunSettings, tokenizer: Tokenizer | None) -> None:
    """Check that a script can be loaded, and a served policy reads the trained policy's tokens.

    Raises:
        ConfigError: if not.
    """
    from broker.settings.sections import parse
    from envhub.envs import AGENTS
    from envhub.players.host import load_player

    key = f"policies.{name}"
    policy = settings.policies[name]
    for domain_name, domain in settings.domains.items():
        if domain.policy == name and domain.env in AGENTS:
            allowed = "actor: an agent calls the trained policy; give its program another endpoint"
            raise ConfigError(f"domains.{domain_name}.policy", name, allowed)
    if policy.script:
        parse(f"{key}.args", policy.args, load_player(f"{key}.script", policy.script).Args)
    if tokenizer is None or policy.model_path is None or policy.tokenizer == "own":
        return
    if difference := _vocabulary_difference(key, policy.model_path, settings, tokenizer):
        allowed = (
            f"a model with the trained policy's vocabulary ({difference}), or set {key}.tokenizer "
            "to own"
        )
        raise ConfigError(f"{key}.model_path", policy.model_path, allowed)


def check_templates(settings: RunSettings, tokenizer: Tokenizer | None) -> None:
    """Check that the model's chat template renders each domain's system prompt, tools, examples and
    turns, and that these leave room for an observation and an answer.

    Args:
        tokenizer: of the run's model; None if it is not known yet.

    Raises:
        ConfigError: if it does not; names the model, its template or the domain.
    """
    from envhub.domain import load_domains
    from rlearner_text.template_rules import rules_for

    for domain in load_domains(settings).values():
        if domain.has_program:
            if domain.section.examples:
                questions = [each.question for each in domain.section.examples]
                allowed = "[]: an agent writes its own messages"
                raise ConfigError(f"domains.{domain.name}.examples", questions, allowed)
        elif tokenizer is not None:
            length = len(rules_for(tokenizer, *domain.opening).start(""))
            if length >= (limit := domain.section.max_context_tokens):
                allowed = f"above {length}, the tokens of its system prompt, tools and examples"
                raise ConfigError(f"domains.{domain.name}.max_context_tokens", limit, allowed)
            # Rows that are too long are counted, and refuse no other.
            for history in domain.environment.histories(domain.args):
                rules_for(tokenizer, *domain.opening_after(history))


def data_digests(settings: RunSettings) -> dict[str, str]:
    """Return the digest of every data file that the hubs read, for ``RunSpec.data_digests``.

    Raises:
        UserError: if a file cannot be read.
    """
    from broker.settings.runspec import digest_file
    from envhub.domain import load_domains

    files = {
        file
        for domain in load_domains(settings).values()
        for file in domain.environment.data_files(domain.args)
    }
    return {file: digest_file(file) for file in sorted(files)}


def num_eval_tasks(settings: RunSettings) -> int:
    """Return how many tasks of each domain an evaluation measures, none of them twice.

    That is ``eval.tasks``; by default 256, or as many as every evaluated domain has that does not
    say it itself.

    Raises:
        ConfigError: if a domain has no held-out tasks, or fewer than its evaluation needs.
        UserError: as ``check``.
    """
    from envhub.domain import load_domains

    requested = settings.eval.tasks
    fewest = EVAL_TASKS
    domains = load_domains(settings)
    for name, section in settings.evaluated_domains.items():
        available = domains[name].num_tasks("eval")
        if available is None:
            continue
        if not available:
            allowed = (
                f"domain {name} has no held-out tasks; eval.domains without it, or "
                "eval.every_steps=0, measures none"
            )
            raise ConfigError("eval.tasks", requested or EVAL_TASKS, allowed)
        own = section.eval.tasks
        num_tasks = own or requested
        if num_tasks is not None and num_tasks > available:
            allowed = f"at most {available}, the held-out tasks of domain {name}"
            key = "eval.tasks" if own is None else f"domains.{name}.eval.tasks"
            raise ConfigError(key, num_tasks, allowed)
        if own is None:
            fewest = min(fewest, available)
    return fewest if requested is None else requested


def domain_eval_tasks(settings: RunSettings) -> dict[str, int | None]:
    """Return how many held-out tasks each domain of a validated config has; None: endless."""
    from envhub.domain import load_domains

    return {name: domain.num_tasks("eval") for name, domain in load_domains(settings).items()}


def _check_numbers(domain: Domain, settings: RunSettings) -> None:
    from envhub.envs.agent import AgentEnvironment, check_section

    section = domain.section
    key = f"domains.{domain.name}"
    context = section.max_context_tokens
    max_tokens = section.sampling.max_tokens
    min_group_size = section.min_group_size
    if min_group_size is not None and min_group_size > section.group_size:
        raise ConfigError(
            f"{key}.min_group_size",
            min_group_size,
            f"at most group_size, which is {section.group_size}",
        )
    if max_tokens >= context:
        raise ConfigError(
            f"{key}.sampling.max_tokens",
            max_tokens,
            f"less than max_context_tokens, which is {context}",
        )
    server_limit = settings.rollout.max_context_tokens
    if context > server_limit:
        allowed = f"at most rollout.max_context_tokens, which is {server_limit}"
        raise ConfigError(f"{key}.max_context_tokens", context, allowed)
    if issubclass(domain.environment, AgentEnvironment):
        check_section(domain.name, section, domain.args)
    try:
        domain.environment.check_domain(domain.args, section, settings.envhub)
    except ConfigError as error:
        place = "" if error.key.startswith("envhub.") else f"{key}."
        raise ConfigError(f"{place}{error.key}", error.value, error.allowed) from None
    if not domain.environment.has_reward and not section.rewards:
        allowed = f"environment {section.env} gives no reward of its own; name at least one reward"
        raise ConfigError(f"{key}.rewards", [], allowed)


def _check_demonstrations(domains: dict[str, Domain], settings: RunSettings) -> None:
    section = settings.warm_start
    if not section.steps or section.data:
        return
    from envhub.envs.base import can_demonstrate

    for name in settings.demonstrated_domains():
        if name not in domains:
            allowed = f"one of {', '.join(domains) or 'no domains'}"
            raise ConfigError("warm_start.domain", name, allowed)
        if not can_demonstrate(domains[name].environment):
            environment = domains[name].section.env
            allowed = f"environment {environment} has no solver; give warm_start.data instead"
            raise ConfigError("warm_start.domain", name, allowed)
