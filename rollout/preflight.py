"""Checks this role's part of a configuration on a machine before anything starts."""

from __future__ import annotations

from broker.settings.preflight import PreflightFinding
from broker.settings.run_settings import RunSettings
from rlearner_text import hub
from rlearner_text.model_checks import check_trained_model
from rollout.engines.args import OpenAIArgs


def preflight_findings(settings: RunSettings) -> list[PreflightFinding]:
    """Check hub models, and the endpoint of the engine ``openai``, whose server exits if the
    endpoint is not available.

    Raises:
        ConfigError: if a model on the hub cannot be trained.
    """
    section = settings.rollout
    paths = {
        "model.path": settings.model.path,
        "rollout.model_path": section.model_path,
    }
    models = [
        finding
        for key, path in paths.items()
        if path is not None
        for finding in hub.check_hub_name(path, key)
    ]
    if all(finding.status == "ok" for finding in models):
        check_trained_model(settings.model, has_weights=False, from_hub=True)
    if section.engine != "openai":
        return models
    args = OpenAIArgs.model_validate(section.engine_args)
    from rlearner_text.openai.endpoint_check import check_endpoint

    is_named = "api_key" in args.model_fields_set
    return [
        *models,
        check_endpoint(
            "rollout.engine_args", args.base_url, args.api_key, is_named=is_named, is_needed=True
        ),
    ]
