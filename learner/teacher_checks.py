"""Checks of ``teachers``, ``domains.X.teacher`` and ``algorithm.distillation``. No torch."""

from __future__ import annotations

from broker.contract.wire import ACTOR
from broker.errors import ConfigError
from broker.settings.config import DomainSection, takes_steps
from broker.settings.run_settings import RunSettings
from learner.config import DistillationSection, TeacherSection


def check_teachers(settings: RunSettings) -> None:
    """Check that each teacher is used, and its settings fit each other and the algorithm.

    Engines, vocabularies and agents are checked where they are known: ``rollout.checks`` and
    ``envhub.config``.

    Raises:
        ConfigError: for the first setting that is not allowed.
    """
    names = list(settings.teachers)
    used: dict[str, list[str]] = {}
    for domain_name, domain in settings.trained_domains.items():
        if domain.teacher:
            used.setdefault(domain.teacher, []).append(domain_name)
        if domain.teacher and domain.teacher not in names:
            allowed = f"empty, or a name of section teachers: {', '.join(names) or 'it has none'}"
            raise ConfigError(f"domains.{domain_name}.teacher", domain.teacher, allowed)
    for name, section in settings.teachers.items():
        if name not in used:
            allowed = "nothing, or name it as the teacher of a trained domain (domains.X.teacher)"
            raise ConfigError(f"teachers.{name}", section.to_plain(), allowed)
        _check_teacher(name, section)
        for domain_name in used[name]:
            _check_domain(name, section, domain_name, settings)
    _check_distillation(settings)


def _check_teacher(name: str, section: TeacherSection) -> None:
    policy = section.policy or name
    key = f"teachers.{name}"
    if policy == ACTOR:
        if section.model_path is not None:
            allowed = "null with policy actor, whose weights come from the learner"
            raise ConfigError(f"{key}.model_path", section.model_path, allowed)
        if not section.hint:
            allowed = "a text with policy actor, which says the same without one"
            raise ConfigError(f"{key}.hint", section.hint, allowed)
    elif section.model_path is None:
        allowed = "a folder or hub name; null with teachers.X.policy actor"
        raise ConfigError(f"{key}.model_path", None, allowed)
    if section.tokenizer == "aligned" and section.top_k:
        allowed = "0 with tokenizer aligned: candidates are tokens of the teacher"
        raise ConfigError(f"{key}.top_k", section.top_k, allowed)
    if section.tokenizer == "aligned" and policy == ACTOR:
        raise ConfigError(f"{key}.tokenizer", "aligned", "same with policy actor")


def _check_domain(
    name: str, section: TeacherSection, domain_name: str, settings: RunSettings
) -> None:
    domain = settings.domains[domain_name]
    if section.tokenizer == "aligned" and not _has_single_turns(domain, settings):
        allowed = f"same, or samples of one turn in domain {domain_name} (max_turns, context)"
        raise ConfigError(f"teachers.{name}.tokenizer", "aligned", allowed)


def _has_single_turns(domain: DomainSection, settings: RunSettings) -> bool:
    is_cut = takes_steps(domain.context, settings.algorithm.adv_estimator)
    return domain.max_turns == 1 or is_cut


def _check_distillation(settings: RunSettings) -> None:
    section = settings.algorithm.distillation
    key = "algorithm.distillation"
    if not settings.teachers:
        for field, value in section.to_plain().items():
            if value != getattr(DistillationSection(), field):
                allowed = "left out without a teacher: no domain names one (domains.X.teacher)"
                raise ConfigError(f"{key}.{field}", value, allowed)
        return
    top_ks = {name: teacher.top_k for name, teacher in settings.teachers.items()}
    if len(set(top_ks.values())) > 1:
        first = next(iter(top_ks.values()))
        name = next(name for name, top_k in top_ks.items() if top_k != first)
        raise ConfigError(f"teachers.{name}.top_k", top_ks[name], f"{first}, as of the others")
    top_k = max(top_ks.values())
    if section.use == "advantage" and top_k:
        allowed = f"loss with top_k {top_k}: an advantage is of the sampled token alone"
        raise ConfigError(f"{key}.use", "advantage", allowed)
    if section.kl == "forward" and not top_k:
        allowed = "reverse, or teachers.X.top_k above 0: it needs tokens that were not sampled"
        raise ConfigError(f"{key}.kl", "forward", allowed)
    if section.use == "loss" and top_k and settings.train.backend == "megatron":
        allowed = f"0 with train.backend megatron and {key}.use loss: ranks hold parts of logits"
        raise ConfigError(f"teachers.{next(iter(top_ks))}.top_k", top_k, allowed)
    if not section.coef and not section.reward_coef:
        allowed = f"above 0, or {key}.reward_coef above 0: nothing would be trained"
        raise ConfigError(f"{key}.coef", section.coef, allowed)
    if settings.algorithm.filter_zero_variance and not section.reward_coef:
        allowed = f"false with {key}.reward_coef 0, where rewards do not train"
        raise ConfigError("algorithm.filter_zero_variance", True, allowed)
