"""The login for a user's own NATS cluster, from files that environment variables name; never from a
command line.

    RL_BROKER_NKEY                           file with the seed of a user (nkeys)
    RL_BROKER_CREDS                          file with a JWT and its seed, as nsc writes it
    RL_BROKER_USER, RL_BROKER_PASSWORD_FILE  user, and file of the password
    RL_BROKER_CERT, RL_BROKER_KEY            client certificate and key as PEM, with any of these
    RL_BROKER_CA                             authority of the servers' certificates as PEM
"""

from __future__ import annotations

import base64
import json
import os
import re
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from broker.errors import UserError
from broker.identity.keys import Key
from broker.system.private_files import is_open_to_others

NKEY = "RL_BROKER_NKEY"
CREDS = "RL_BROKER_CREDS"
USER = "RL_BROKER_USER"
PASSWORD = "RL_BROKER_PASSWORD_FILE"
CERT = "RL_BROKER_CERT"
CERT_KEY = "RL_BROKER_KEY"
CA = "RL_BROKER_CA"
MOST_BYTES: Final = 65_536
# with it, the command to connect approaches the 4096 bytes that servers take by default
LONG_JWT: Final = 3500
_JWT: Final = re.compile(r"-----BEGIN NATS USER JWT-----\s+(\S+)\s+-+END NATS USER JWT-+")
_SEED: Final = re.compile(r"-----BEGIN USER NKEY SEED-----\s+(\S+)\s+-+END USER NKEY SEED-+")


@dataclass(frozen=True)
class ClusterLogin:
    """What a process shows to the servers of a user's own cluster.

    Attributes:
        named_by: the variable that names it, for messages; empty without any login but TLS.
        key: signs the server's nonce.
        jwt: says what the key may do; empty: the servers' configuration does.
        user: logs in with ``password``.
        certificate: file of the client certificate; empty: none.
        certificate_key: file of its key.
        authority: file of the authority of the servers; empty: those of the system.
    """

    named_by: str = ""
    key: Key | None = None
    jwt: str = field(default="", repr=False)
    user: str = ""
    password: str = field(default="", repr=False)
    certificate: str = ""
    certificate_key: str = ""
    authority: str = ""

    @property
    def shows_something(self) -> bool:
        """Whether it has any login, so more than an authority."""
        return bool(self.named_by)

    def tls_context(self) -> ssl.SSLContext | None:
        """Return a context with the client certificate and the authority; None: the default one.

        Raises:
            UserError: if one of the files cannot be used.
        """
        if not self.certificate and not self.authority:
            return None
        try:
            context = ssl.create_default_context(cafile=self.authority or None)
        except OSError as error:
            raise _unusable_file(
                CA, self.authority, error, "the certificate of an authority"
            ) from None
        if self.certificate:
            read_secret(CERT_KEY, self.certificate_key)
            try:
                context.load_cert_chain(self.certificate, self.certificate_key, password=lambda: "")
            except OSError as error:
                files = f"{self.certificate} and {self.certificate_key}"
                expected = "a certificate and its key, unencrypted"
                raise _unusable_file(f"{CERT}, {CERT_KEY}", files, error, expected) from None
        return context

    def why_refused(self, *, by_certificate: bool = False) -> str:
        """Return what the servers refuse, and the remedy.

        Args:
            by_certificate: whether a server said that it is the certificate.
        """
        if by_certificate and not self.certificate:
            return f"a login without a client certificate; set {CERT} and {CERT_KEY}"
        if by_certificate or self.named_by == CERT:
            return f"the certificate of {CERT}{_why_no_certificate(self.certificate)}"
        if self.jwt:
            return f"the JWT of {CREDS}{_why_not(self.jwt)}"
        if self.key is not None:
            remedy = (
                "include the output of `broker permissions` in the configuration and reload the "
                "servers"
            )
            return f"the key {self.key.public} of {self.named_by}: they do not know it; {remedy}"
        file = PASSWORD if self.named_by == USER else self.named_by
        return (
            f"the user {self.user!r} of {self.named_by}: unknown, or not with this password; "
            f"check {file}"
        )


def from_environment(url: str) -> ClusterLogin | None:
    """Return the login that the environment, or a user and password in an address, names; None
    without any.

    Raises:
        UserError: if variables contradict each other or a file cannot be used.
    """
    logins = [name for name in (NKEY, CREDS, USER) if os.environ.get(name)] + ["RL_BROKER"] * (
        "@" in url
    )
    if len(logins) > 1:
        raise UserError(
            f"{' and '.join(logins)} each name a login for the broker; set only one of them"
        )
    for variable, partner in ((USER, PASSWORD), (CERT, CERT_KEY)):
        if bool(os.environ.get(variable)) != bool(os.environ.get(partner)):
            raise UserError(f"{variable} and {partner} go together; set both or neither")
    tls: dict[str, Any] = {name: os.environ.get(variable, "") for name, variable in _TLS.items()}
    if not logins:
        if not any(tls.values()):
            return None
        return ClusterLogin(CERT if tls["certificate"] else "", **tls)
    if logins == [NKEY]:
        file = os.environ[NKEY]
        return ClusterLogin(NKEY, key=Key.parse(read_secret(NKEY, file), f"{NKEY}: {file}"), **tls)
    if logins == [CREDS]:
        key, jwt = _read_credentials(os.environ[CREDS])
        return ClusterLogin(CREDS, key=key, jwt=jwt, **tls)
    if logins == [USER]:
        if not (password := read_secret(PASSWORD, os.environ[PASSWORD]).strip("\r\n")):
            raise UserError(
                f"{PASSWORD}: {os.environ[PASSWORD]} is empty; expected the password of {USER}"
            )
        return ClusterLogin(USER, user=os.environ[USER], password=password, **tls)
    user = url.partition("://")[2].partition("@")[0].partition(":")[0]
    # the client takes the password of each address
    return ClusterLogin("RL_BROKER", user=user, **tls)


_TLS: Final = {"certificate": CERT, "certificate_key": CERT_KEY, "authority": CA}


def named_authority() -> str:
    """Return the certificate of the authority that the environment names as PEM text, empty without
    one.

    Raises:
        UserError: if it cannot be read.
    """
    if not (file := os.environ.get(CA)):
        return ""
    try:
        return Path(file).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise _unusable_file(CA, file, error, "the certificate of an authority") from None


def read_secret(variable: str, file: str) -> str:
    """Return the content of a file that other users cannot read, but a group may read root's.

    Raises:
        UserError: if it cannot be read, or others can read it.
    """
    try:
        with Path(file).open("rb") as opened:
            if is_open_to_others(os.fstat(opened.fileno())):
                raise UserError(f"{variable}: other users can read {file}; run chmod 600 {file}")
            return opened.read(MOST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise UserError(f"{variable}: cannot read {file}: {error.strerror}") from None


def _read_credentials(file: str) -> tuple[Key, str]:
    text = read_secret(CREDS, file)
    jwt = _JWT.search(text)
    seed = _SEED.search(text)
    wrong = UserError(
        f"{CREDS}: {file} is not a credentials file; expected a user's JWT and seed, as nsc "
        "writes them"
    )
    if jwt is None or seed is None:
        raise wrong
    key = Key.parse(seed[1], f"{CREDS}: {file}")
    try:
        subject = _decode_claims(jwt[1]).get("sub")
    except ValueError:
        raise wrong from None
    if subject != key.public:
        raise UserError(f"{CREDS}: the seed in {file} is not that of its JWT; write the file again")
    return key, jwt[1]


def _decode_claims(jwt: str) -> dict[str, Any]:
    """Return what a JWT says, unchecked.

    Raises:
        ValueError: if it is none.
    """
    body = [*jwt.split("."), ""][1]
    claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    if not isinstance(claims, dict):
        raise ValueError
    return claims


def _why_not(jwt: str) -> str:
    """Return the likely reason why servers refuse a JWT; some of them only close the connection."""
    end = _decode_claims(jwt).get("exp") or 0
    if 0 < end <= time.time():
        expiry = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(end))
        return f", which expired at {expiry}; write a new file (nsc generate creds)"
    if len(jwt) > LONG_JWT:
        remedy = "give the permissions to a signing key of the account, or raise that limit"
        return f", whose {len(jwt)} characters may exceed their max_control_line; {remedy}"
    return ": its user was revoked, or its account is of another operator"


def _why_no_certificate(file: str) -> str:
    """Return the likely reason why servers refuse a client certificate; some of them only close the
    connection.
    """
    from cryptography import x509  # takes a third of a second to import

    try:
        end = x509.load_pem_x509_certificate(Path(file).read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        # It could be read for the attempt.
        return f", whose file {file} cannot be read any more"
    if end.timestamp() <= time.time():
        return f", which expired at {end:%Y-%m-%d %H:%M UTC}; renew it"
    return (
        ": it is of an authority that they do not know, or no user has its name; see "
        "`broker permissions --login certificate`"
    )


def _unusable_file(variable: str, file: str, error: OSError, expected: str) -> UserError:
    reason = getattr(error, "reason", None) or error.strerror or "not PEM"
    return UserError(f"{variable}: cannot use {file} ({reason}); expected {expected}")
