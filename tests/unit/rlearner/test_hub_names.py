"""Models named as on the hub: what is said of a name before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from broker.errors import ConfigError
from broker.settings.run_settings import RunSettings
from rlearner.doctor import preflight
from rlearner_text.config import check_model_path
from rollout import preflight as rollout_looks


def test_a_hub_name_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    config = {
        "model": {"path": "Nobody/Nothing"},
        "rollout": {"policy": "judge", "model_path": str(tmp_path)},
    }
    (found,) = rollout_looks.preflight_findings(RunSettings.of_config(config))
    assert (found.name, found.status) == ("model.path", "missing")
    assert preflight.format_finding(found) == (
        "model.path: Nobody/Nothing: no such folder here, not in the hub's cache, and the hub cannot be reached "
        "-> hf download Nobody/Nothing  # or a folder with the model"
    )
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    assert [
        finding.status
        for finding in rollout_looks.preflight_findings(RunSettings.of_config(config))
    ] == ["ok"]


@pytest.mark.parametrize("name", ["a b/c", "a/b/c", "a/", "-a/b", "a/b.", "C:\\m"])
def test_what_cannot_be_a_hub_name_is_taken_for_a_folder(name: str) -> None:
    with pytest.raises(
        ConfigError, match="no such folder; give a Hugging Face model folder or hub name"
    ):
        check_model_path(name)
