"""References to secrets: a configuration, which is stored and sent around, says where a secret is,
never what it is.

api_key: {env: JUDGE_KEY}             # an environment variable of the process that uses it
api_key: {file: /run/secrets/judge}   # a file on its host that only its user can read
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from typing import Any, Final, Self

import pydantic

from broker.errors import ConfigError, UserError
from broker.settings.config import Section, UserSettings
from broker.settings.host_rules import enforced_rules
from broker.system.redaction import HIDDEN, is_secret_name, why_secret

ALLOWED: Final = "write {env: NAME} or {file: PATH}, which say where the secret is"
MAX_SECRET_BYTES: Final = 1 << 16
_ENV: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SecretRef(Section):
    """Where a secret is: an environment variable or a file, of the process that uses it."""

    env: str | None = None  # name of the variable
    file: str | None = None  # path of the file, which others must not be able to read

    @pydantic.model_validator(mode="before")
    @classmethod
    def _is_reference(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(ALLOWED)
        return value

    @pydantic.model_validator(mode="after")
    def _names_one(self) -> Self:
        if (self.env is None) == (self.file is None) or not (
            self.env is None or _ENV.fullmatch(self.env)
        ):
            raise ValueError(ALLOWED)
        return self

    def __str__(self) -> str:
        return f"the environment variable {self.env}" if self.env else f"the file {self.file}"

    @property
    def source(self) -> str:
        """The name of the variable, or the absolute path of the file."""
        return self.env or os.path.abspath(os.path.expanduser(self.file or ""))

    def find(self, url: str = "") -> str:
        """Return the stripped secret; empty without one, or for this destination.

        Args:
            url: where it is sent; empty: it is used by code of the run. In a process that joined
                with a token, the host's rules decide, see ``host_rules``.

        Raises:
            UserError: if it is not usable: unreadable, readable by other users, or not one line of
                text.
        """
        rules = enforced_rules()
        if rules is not None and not rules.allow_secret(self.source, url):
            return ""
        text = os.environ.get(self.env, "") if self.env else self._read()
        secret = text.strip()
        if not secret.isprintable():
            raise UserError(f"{self} must hold one line of text")
        return secret

    def require(self, key: str, url: str = "") -> str:
        """Return the secret that the setting ``key`` needs, as ``find``.

        Raises:
            UserError: if there is none, or it is not usable.
        """
        if secret := self.find(url):
            return secret
        rules = enforced_rules()
        if rules is not None and not rules.allow_secret(self.source, url):
            raise UserError(
                f"{key} needs {self}, which this host's rules do not allow; see --allow-secret"
            )
        raise UserError(
            f"{key} needs {self}, which is {'not set' if self.env else 'missing or empty'}"
        )

    def _read(self) -> str:
        path = os.path.expanduser(self.file or "")
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_mode & stat.S_IRWXO:
                    raise UserError(f"{self} must not be open to other users; run chmod o= {path}")
                data = file.read(MAX_SECRET_BYTES + 1)
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise UserError(f"cannot read {self}: {error.strerror}") from None
        if len(data) > MAX_SECRET_BYTES:
            raise UserError(f"{self} is larger than {MAX_SECRET_BYTES} bytes")
        return data.decode("utf-8", "replace")


def refuse_copied(key: str, variable: str) -> None:
    """Check that no secret of the environment would be copied into the configuration.

    Args:
        key: of the setting, for example ``domains.a.rewards[0].args.api_key``.

    Raises:
        UserError: if one would; names the key and the variable.
    """
    value = os.environ.get(variable, "")
    last = key.rpartition(".")[2].partition("[")[0]
    if is_secret_name(last) or is_secret_name(variable) or why_secret("", value):
        raise UserError(
            f"{key}: ${{oc.env:{variable}}} would store a secret with the run; "
            f"write {{env: {variable}}}"
        )


def refuse_literal(config: UserSettings) -> None:
    """Check that a configuration holds no secret: folder, broker and trackers store it.

    Raises:
        ConfigError: if it seems to hold one; names the key, never the value.
    """
    for path, key, value in _find_strings(config):
        if reason := why_secret(key, value):
            raise ConfigError(
                path, HIDDEN, f"{reason}, and would be stored with the run; {ALLOWED}"
            )


def resolved(value: Any, place: str) -> Any:
    """Return a plug-in's arguments with each reference to a secret replaced by the secret.

    Args:
        place: the key of the arguments, for messages.

    Raises:
        UserError: if a secret is missing or not usable.
    """
    if isinstance(value, list):
        return [resolved(item, f"{place}.{index}") for index, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    return {
        key: SecretRef.model_validate(item).require(f"{place}.{key}")
        if is_secret_name(str(key)) and _is_reference(item)
        else resolved(item, f"{place}.{key}")
        for key, item in value.items()
    }


def variables(value: Any) -> set[str]:
    """Return the environment variables that arguments, parsed or not, refer to as secrets."""
    if isinstance(value, SecretRef):
        return {value.env} if value.env else set()
    if isinstance(value, pydantic.BaseModel):
        return variables([getattr(value, name) for name in type(value).model_fields])
    if isinstance(value, Mapping):
        if _is_reference(value) and isinstance(name := value.get("env"), str):
            return {name}
        value = list(value.values())
    return set[str]().union(*map(variables, value)) if isinstance(value, (list, tuple)) else set()


def _is_reference(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) == 1 and set(value) <= {"env", "file"}


def _find_strings(value: Any, path: str = "", key: str = "") -> list[tuple[str, str, str]]:
    """Return path, innermost key and value of every string; elements of a list have its key."""
    if isinstance(value, str):
        return [(path, key, value)]
    if isinstance(value, list):
        return [
            entry
            for index, item in enumerate(value)
            for entry in _find_strings(item, f"{path}.{index}", key)
        ]
    if not isinstance(value, Mapping):
        return []
    parts = [(f"{path}.{name}".lstrip("."), str(name), item) for name, item in value.items()]
    return [entry for below, name, item in parts for entry in _find_strings(item, below, name)]
