"""docs/settings.md is up to date and has every setting."""

from __future__ import annotations

from tools import settings_page


def test_settings_page_is_up_to_date() -> None:
    page = settings_page.TARGET.read_text(encoding="utf-8")
    assert page == settings_page.render_page(), "run `python -m tools.settings_page`"


def test_settings_page_has_defaults_values_and_units() -> None:
    page = settings_page.render_page()
    assert "\n## train\n\nNumber, size and staleness of the steps" in page
    row = "| `train.weights_timeout_s` | `30.0` | number above 0 | seconds | longest wait for one"
    assert row in page
    assert "| `train.lora` | `null` | mapping or null |  | null: all weights are trained |" in page
    assert '| `train.lora.send` | `"adapter"` | adapter, merged |' in page
    assert "| `domains.DOMAIN.rewards[].name` | `required` | text |" in page
