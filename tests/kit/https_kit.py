"""An authority and certificates for HTTPS servers of tests, without the openssl command."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from rlearner_text.openai.certificates import server_tls


@dataclass(frozen=True)
class Issued:
    """Files of a certificate, its key, and the authority that signed it."""

    cert: str
    key: str
    authority: str

    def server(self) -> ssl.SSLContext:
        return server_tls(self.cert, self.key, cert_name="cert", key_name="key")

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.authority)


def issue(
    folder: Path, address: str = "127.0.0.1", *, begin_days: float = -1, end_days: float = 2
) -> Issued:
    """Make an authority and a certificate for an IP address, valid between two times from now."""
    folder.mkdir(exist_ok=True)
    root_key, root_name = ec.generate_private_key(ec.SECP256R1()), _name("authority of the tests")
    root = _builder(root_name, root_name, root_key.public_key(), -1, 2)
    root = root.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    key = ec.generate_private_key(ec.SECP256R1())
    made = _builder(_name("server"), root_name, key.public_key(), begin_days, end_days)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    issued = x509.AuthorityKeyIdentifier.from_issuer_public_key(root_key.public_key())
    made = made.add_extension(names, critical=False).add_extension(issued, critical=False)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for name, data in (
        ("cert", made.sign(root_key, hashes.SHA256()).public_bytes(Encoding.PEM)),
        ("key", private),
        ("authority", root.sign(root_key, hashes.SHA256()).public_bytes(Encoding.PEM)),
    ):
        (folder / f"{name}.pem").write_bytes(data)
        (folder / f"{name}.pem").chmod(0o600)
    return Issued(*(str(folder / f"{name}.pem") for name in ("cert", "key", "authority")))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, begin: float, end: float
) -> x509.CertificateBuilder:
    now, serial = datetime.datetime.now(datetime.UTC), x509.random_serial_number()
    builder = x509.CertificateBuilder(issuer, subject, key, serial)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    return builder.not_valid_before(now + datetime.timedelta(days=begin)).not_valid_after(
        now + datetime.timedelta(days=end)
    )
