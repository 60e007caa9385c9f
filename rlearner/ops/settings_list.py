"""``rlearner settings``: what a setting means, its default and the values that it takes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from broker.errors import UserError
from broker.settings.foreign_names import OWN_NAMES
from broker.settings.reference import REQUIRED, SettingDescription, describe_settings


def list_settings(options: argparse.Namespace) -> int:
    """Print the settings that have a word in their key or meaning.

    Raises:
        UserError: if none has.
    """
    settings = find_settings(options.word)
    if options.json:
        print(json.dumps([asdict(setting) for setting in settings], ensure_ascii=False))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for setting in settings:
        console.print(Text(setting.key, style="bold"), end="")
        console.print(Text(f": {describe_value(setting)}\n    {setting.meaning}"))
    return 0


def find_settings(word: str) -> Sequence[SettingDescription]:
    """Return the settings whose key or meaning has a word, and what TRL and verl call so.

    Raises:
        UserError: if there are none.
    """
    settings = list(describe_settings())
    own_key = OWN_NAMES.get(word, word).lower()
    matches = [setting for setting in settings if own_key in setting.key.lower()]
    matches = matches or [setting for setting in settings if own_key in setting.meaning.lower()]
    if not matches:
        raise UserError(f"settings: {word!r} is in no setting's name or meaning; leave it out")
    return matches


def describe_value(setting: SettingDescription) -> str:
    """Return the values that a setting takes, with unit and default."""
    values = f"{setting.allowed} ({setting.unit})" if setting.unit else setting.allowed
    if setting.default == REQUIRED:
        return f"{values}; {REQUIRED}"
    return f"{values}; default {setting.default}"
