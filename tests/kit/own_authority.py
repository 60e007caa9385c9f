"""A user's own certificate authority: certificates of servers and of clients, also expired ones."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

DAY = datetime.timedelta(days=1)


class OwnAuthority:
    """Its certificate is in ``folder/ca.pem``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._key = folder, generate_private_key(SECP256R1())
        self._name = x509.Name(
            [x509.NameAttribute(x509.NameOID.COMMON_NAME, f"authority of {folder.name}")]
        )
        made = self._builder(self._name, self._key.public_key(), days=10)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.file = folder / "ca.pem"
        self.file.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def certificate(self, name: str, *, days: int = 10) -> tuple[Path, Path]:
        """Return the files of a certificate with a common name, valid for 127.0.0.1, and of its
        key.
        """
        key = generate_private_key(SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        made = self._builder(subject, key.public_key(), days=days)
        if name == "server":
            address = x509.SubjectAlternativeName(
                [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            )
            made = made.add_extension(address, critical=False)
        made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        made = made.add_extension(issuer, critical=False)
        file = self.folder / f"{name}_{days}.pem"
        file.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        key_file = file.with_suffix(".key")
        key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        key_file.chmod(0o600)
        return file, key_file

    def _builder(self, subject: x509.Name, key: object, *, days: int) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        made = x509.CertificateBuilder(self._name, subject, key, x509.random_serial_number())  # type: ignore[arg-type]
        made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)  # type: ignore[arg-type]
        return made.not_valid_before(now - 20 * DAY).not_valid_after(now + days * DAY)
