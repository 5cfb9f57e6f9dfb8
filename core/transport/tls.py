"""TLS between two processes of a run, independent of the socket (`ssl.MemoryBIO`)."""

from __future__ import annotations

import hashlib
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

from isotrain.core.errors import PlanError
from isotrain.core.transport.message_auth import Bytes

AUTHORITY, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
"""Files of a folder: the trusted certificate authority, this host's certificate, and its private key."""
_READABLE_BY_OTHERS = 0o007
_CHUNK = 1 << 18


class Tls:
    """TLS contexts of a process, with the certificate that it shows.

    Attributes:
        certificate_expiry: Expiry date of its certificate, as OpenSSL writes it (`notAfter`).
    """

    def __init__(self, folder: Path) -> None:
        """Reads the files of a folder, and tests them in a handshake with itself.

        Raises:
            PlanError: A file cannot be read, or the certificate would be rejected.
        """
        for name in (AUTHORITY, CERTIFICATE, KEY):
            _require_readable(folder / name)
        _require_private(folder / KEY)
        try:
            self._contexts = {
                is_client: _context(folder, is_client=is_client) for is_client in (True, False)
            }
        except (ssl.SSLError, ValueError) as error:
            raise PlanError(
                f"{folder}: {_reason(error)}. Expected PEM files, and in {KEY} the key of {CERTIFICATE},"
                " without a password."
            ) from error
        client, server = (
            TlsEndpoint(context, b"", is_client=is_client)
            for is_client, context in self._contexts.items()
        )
        self._certificate, self.certificate_expiry = _test_handshake(folder, client, server)

    def new_endpoint(self, *, is_client: bool) -> TlsEndpoint:
        """One end of a new connection."""
        return TlsEndpoint(self._contexts[is_client], self._certificate, is_client=is_client)


class TlsEndpoint:
    """One end of an encrypted connection: encrypts bytes to send, decrypts received bytes, does no I/O.

    One thread may encrypt while another one decrypts: neither blocks.

    Attributes:
        is_ready: Whether the handshake is done.
        problem: Reason why the handshake or the connection failed; empty: no failure so far.
    """

    def __init__(self, context: ssl.SSLContext, certificate: bytes, *, is_client: bool) -> None:
        self.is_ready = False
        self.problem = ""
        self._certificate = certificate
        self._is_client = is_client
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not is_client)
        self._lock = threading.Lock()

    def do_handshake(self, received: bytes) -> bytes:
        """Takes handshake bytes of the other end; returns the bytes to reply, alerts included."""
        self._incoming.write(received)
        try:
            self._tls.do_handshake()
            self.is_ready = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self.problem = _reason(error)
        return self._outgoing.read()

    @property
    def peer_certificate(self) -> bytes:
        """The other end's certificate (DER), once the handshake is done."""
        return self._tls.getpeercert(binary_form=True) or b""

    @property
    def peer_certificate_expiry(self) -> str:
        """Date on which the other end's certificate expires."""
        return str((self._tls.getpeercert() or {}).get("notAfter"))

    @property
    def channel_binding(self) -> bytes:
        """SHA-256 of both certificates, client's first: the ends differ if a third party is in between."""
        certificates = (self._certificate, self.peer_certificate)
        digests = [hashlib.sha256(certificate).digest() for certificate in certificates]
        return b"".join(digests if self._is_client else reversed(digests))

    def encrypted(self, data: Bytes) -> Iterator[bytes]:
        """Encrypts data; yields the bytes to send, chunk by chunk."""
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK):
            with self._lock:
                part = view[start : start + _CHUNK]
                while part:
                    part = part[self._tls.write(part) :]
                records = self._outgoing.read()
            yield records

    def decrypted(self, chunk: bytes) -> bytes:
        """Decrypts a received chunk, as far as its TLS records are complete.

        Raises:
            OSError: The bytes were changed on their way, or the other end sent an alert; see `problem`.
        """
        parts = []
        with self._lock:
            self._incoming.write(chunk)
            try:
                while part := self._tls.read(_CHUNK):
                    parts.append(part)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                self.problem = _reason(error)
                if not parts:  # else the next call raises
                    raise
        return b"".join(parts)


def _require_readable(path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise PlanError(
            f"{path} cannot be read: {error.strerror}. Expected {AUTHORITY}, {CERTIFICATE} and {KEY} there."
        ) from error


def _require_private(path: Path) -> None:
    if path.stat().st_mode & _READABLE_BY_OTHERS:
        raise PlanError(
            f"{path} is a private key, and other users can read it: chmod o= {path}"
            " (for a Secret in a pod: defaultMode 0440)."
        )


def _test_handshake(folder: Path, client: TlsEndpoint, server: TlsEndpoint) -> tuple[bytes, str]:
    """This process's certificate as others see it (DER), and its expiry date."""
    reply = b""
    while not ((client.is_ready and server.is_ready) or client.problem or server.problem):
        reply = server.do_handshake(client.do_handshake(reply))
    problem = client.problem or server.problem
    if problem:
        raise PlanError(
            f"{folder / CERTIFICATE}: {problem}. It has to be signed by {AUTHORITY} beside it, for servers"
            " and for clients, and not to have expired."
        )
    return client.peer_certificate, client.peer_certificate_expiry


def _context(folder: Path, *, is_client: bool) -> ssl.SSLContext:
    """Mutual TLS without host names: the authority and the run's key decide who belongs to the run."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if is_client else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    if not is_client:
        context.num_tickets = 0  # no session is resumed
    context.load_verify_locations(folder / AUTHORITY)
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY, _no_password)
    return context


def _no_password() -> str:
    """Password callback: without it, OpenSSL would ask at the terminal."""
    raise ValueError("the key has a password")


def _reason(error: ssl.SSLError | ValueError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not accepted: {error.verify_message}"
    reason = getattr(error, "reason", None) or str(error).partition(" (_ssl.c")[0]
    text = str(reason).lower().replace("_", " ")
    return f"the other end gave up: {text}" if " alert " in text else text
