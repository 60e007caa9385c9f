"""Snapshots leave the learner's host only over TLS, and a server takes them only from the host of
the certificate.
"""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
import torch

from broker.contract import wire
from broker.errors import ConfigError, TransferFailed, UserError
from broker.weights.memory.staging import FlatBuffer, plan_of
from broker.weights.probe import make_probe
from broker.weights.snapshots import snapshot
from broker.weights.snapshots.snapshot_source import SnapshotSource
from learner.weights.snapshots import SnapshotServer, load_certificate

KEY = "a-key-of-sixteen-or-more"
PLAN = plan_of({"a": torch.zeros(3000)}, 4096 / 2**20)
needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl makes the certificate"
)


def certificate(folder: Path, name: str = "127.0.0.1", *more: str) -> tuple[str, str]:
    """Files of a certificate and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-days",
        "2",
    ]
    command += [
        "-subj",
        f"/CN={name}",
        "-addext",
        f"subjectAltName=IP:{name}",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    subprocess.run([*command, *(more or ("-nodes",))], check=True, capture_output=True)
    return str(cert), str(key)


def write(folder: Path) -> str:
    """Write a snapshot of version 20; its digest."""
    flat = FlatBuffer(PLAN)
    flat.fill({"a": torch.arange(3000.0)})
    offer = wire.WeightsOffer(
        epoch=1,
        version=20,
        digest=flat.digest(),
        plan=PLAN.digest,
        size_bytes=PLAN.size_bytes,
        carriers=["gloo"],
        probe=make_probe([1, 2], [-1.0], tolerance=0.1),
    )
    assert snapshot.write(folder, "r", offer, PLAN, flat.buffer)
    return offer.digest


@needs_openssl
async def test_snapshots_are_read_over_tls_by_those_who_know_the_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_API_KEY", KEY)
    cert, key = certificate(tmp_path)
    digest, server = write(tmp_path / "snapshots"), SnapshotServer(tmp_path / "snapshots")
    await server.start("127.0.0.1", 0, load_certificate(cert, key))
    try:
        assert server.address.startswith("https://127.0.0.1:")
        with pytest.raises(TransferFailed, match="certificate verify failed"):
            await asyncio.to_thread(SnapshotSource(server.address, KEY).newest)
        monkeypatch.setenv("SSL_CERT_FILE", cert)
        newest = await asyncio.to_thread(SnapshotSource(server.address, KEY).newest)
        assert newest is not None
        assert newest.offer.digest == digest
        with pytest.raises(TransferFailed, match="the API key is missing or wrong"):
            await asyncio.to_thread(SnapshotSource(server.address, "another").newest)
    finally:
        await server.close()


@needs_openssl
async def test_a_certificate_of_another_host_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_API_KEY", KEY)
    cert, key = certificate(tmp_path, "192.0.2.7")
    monkeypatch.setenv("SSL_CERT_FILE", cert)
    server = SnapshotServer(tmp_path)
    await server.start("127.0.0.1", 0, load_certificate(cert, key))
    try:
        with pytest.raises(TransferFailed, match="IP address mismatch"):
            await asyncio.to_thread(SnapshotSource(server.address, KEY).newest)
    finally:
        await server.close()


async def test_without_tls_they_stay_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_API_KEY", KEY)
    with pytest.raises(ConfigError) as caught:
        await SnapshotServer(tmp_path).start("0.0.0.0", 8100)
    assert str(caught.value) == (
        "train.weights_snapshot_port: 8100 is not allowed; null at 0.0.0.0 without TLS; "
        "set train.weights_snapshot_cert and train.weights_snapshot_key"
    )


@pytest.mark.parametrize("where", ["http://192.0.2.1:8100", "http://elsewhere/NAME"])
def test_http_of_another_host_is_refused(where: str) -> None:
    with pytest.raises(
        UserError, match="to other hosts only https://, because http proves neither the sender"
    ):
        SnapshotSource(where)
    SnapshotSource(where.replace("http:", "https:"))
    SnapshotSource("http://localhost:8100")


def test_a_certificate_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    assert load_certificate(None, None) is None
    (tmp_path / "odd.pem").write_text("no certificate")
    missing, odd = str(tmp_path / "missing.pem"), str(tmp_path / "odd.pem")
    with pytest.raises(
        ConfigError,
        match=r"train\.weights_snapshot_cert: .*missing.pem' is not allowed; .*No such file",
    ):
        load_certificate(missing, missing)
    with pytest.raises(
        ConfigError, match=r"a certificate in PEM that fits train\.weights_snapshot_key"
    ):
        load_certificate(odd, odd)


@needs_openssl
def test_an_encrypted_key_does_not_ask_at_the_terminal(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "127.0.0.1", "-passout", "pass:secret-words")
    with pytest.raises(
        ConfigError, match=r"a certificate in PEM that fits train\.weights_snapshot_key"
    ):
        load_certificate(cert, key)
    assert isinstance(load_certificate(*certificate(tmp_path)), ssl.SSLContext)
