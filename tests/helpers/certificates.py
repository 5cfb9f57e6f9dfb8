"""Certificates for tests, and the authority that signs them."""

from __future__ import annotations

import datetime
import secrets
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NAMES = ("ca.crt", "tls.crt", "tls.key")


class Authority:
    """Certificate authority."""

    def __init__(self) -> None:
        self._key = generate_private_key(SECP256R1())
        self._name = _named(f"isotrain's tests {secrets.token_hex(4)}")
        basic = x509.BasicConstraints(ca=True, path_length=None)
        made = _begun(self._name, self._key, self._name).add_extension(basic, critical=True)
        self._own = made.sign(self._key, hashes.SHA256())

    def folder(
        self,
        at: Path,
        *,
        days: float = 1.0,
        use: x509.ObjectIdentifier | None = None,
        password: bytes | None = None,
    ) -> str:
        """Creates a folder for ISOTRAIN_TLS with a new certificate; returns its path.

        Args:
            at: Path of the folder.
            days: Days until the certificate expires; negative for an expired one.
            use: Extended key usage; None for any.
            password: Password of the key.
        """
        key = generate_private_key(SECP256R1())
        made = _begun(_named("a host"), key, self._name, days)
        if use is not None:
            made = made.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        certificate = made.sign(self._key, hashes.SHA256())
        hidden = serialization.BestAvailableEncryption(password) if password else None
        pem = serialization.Encoding.PEM
        texts = (
            self._own.public_bytes(pem),
            certificate.public_bytes(pem),
            key.private_bytes(
                pem,
                serialization.PrivateFormat.PKCS8,
                hidden or serialization.NoEncryption(),
            ),
        )
        at.mkdir()
        for name, text in zip(NAMES, texts, strict=True):
            (at / name).touch(0o600)
            (at / name).write_bytes(text)
        return str(at)


SERVER = ExtendedKeyUsageOID.SERVER_AUTH


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _begun(
    name: x509.Name, key: EllipticCurvePrivateKey, issuer: x509.Name, days: float = 1.0
) -> x509.CertificateBuilder:
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(end - datetime.timedelta(days=30))
        .not_valid_after(end)
    )
