"""Refuses curricula that cannot work, before anything starts."""

from __future__ import annotations

from broker.errors import ConfigError
from broker.settings.config import CurriculumSection
from broker.settings.run_settings import RunSettings
from learner.credit.model_identity import identify_model
from learner.credit.pass_rate_file import read_pass_rates


def check_curricula(settings: RunSettings) -> None:
    """Check the curriculum of each domain.

    Raises:
        ConfigError: if bands or stages are out of order, no group could be observed, or the pass
            rates are of another model.
    """
    for name, domain in settings.trained_domains.items():
        if (section := domain.curriculum) is None:
            continue
        key = f"domains.{name}.curriculum"
        if settings.algorithm.close_early:
            allowed = f"false with {key}: a group that is closed early measures no pass rate"
            raise ConfigError("algorithm.close_early", True, allowed)
        _check_bands(key, section, settings.train.steps)
        if section.pass_rates is not None:
            model = identify_model(settings.model, settings.warm_start)
            read_pass_rates(section.pass_rates, f"{key}.pass_rates", model)


def _check_bands(key: str, section: CurriculumSection, steps: int) -> None:
    bands = {f"{key}.band": section.band}
    first = 0
    for number, stage in enumerate(section.stages):
        place = f"{key}.stages.{number}"
        bands[f"{place}.band"] = stage.band
        if not first < stage.from_step < steps:
            allowed = f"above {first}, the stage before, and below train.steps, which is {steps}"
            raise ConfigError(f"{place}.from_step", stage.from_step, allowed)
        first = stage.from_step
    for place, (low, high) in bands.items():
        if low > high:
            raise ConfigError(place, [low, high], "the lower pass rate first")
