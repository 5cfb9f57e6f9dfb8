"""TLS between two processes of a run, apart from what carries the bytes."""

from __future__ import annotations

import hashlib
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

from isotrain.core.errors import PlanError
from isotrain.core.transport.message_auth import Bytes

AUTHORITY, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
"""Files of a folder: whose certificates are trusted, the own one, and its private key."""
_READABLE_BY_OTHERS = 0o007
_CHUNK = 1 << 18


class Tls:
    """What a process encrypts with.

    Attributes:
        until: When its certificate expires, as text.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the files of a folder, and tries them on itself: others do with them what it does.

        Raises:
            PlanError: One cannot be read, or others would turn the certificate down.
        """
        for name in (AUTHORITY, CERTIFICATE, KEY):
            _require_readable(folder / name)
        _require_private(folder / KEY)
        try:
            self._contexts = {
                caller: _context(folder, is_caller=caller) for caller in (True, False)
            }
        except (ssl.SSLError, ValueError) as error:
            raise PlanError(
                f"{folder}: {_reason(error)}. Expected PEM files, and in {KEY} the key of {CERTIFICATE},"
                " without a password."
            ) from error
        ends = (TlsEndpoint(each, b"", is_caller=caller) for caller, each in self._contexts.items())
        self._certificate, self.until = _tried(folder, *ends)

    def begin(self, *, is_caller: bool) -> TlsEndpoint:
        """One end of a new connection."""
        return TlsEndpoint(self._contexts[is_caller], self._certificate, is_caller=is_caller)


class TlsEndpoint:
    """One end of a connection: what is to be sent, and what has come, pass through it.

    One thread may encrypt while another one decrypts: neither waits for anything.

    Attributes:
        is_ready: Whether the handshake is done.
        problem: Why it cannot be, or not go on; empty: nothing is wrong so far.
    """

    def __init__(self, context: ssl.SSLContext, certificate: bytes, *, is_caller: bool) -> None:
        self.is_ready = False
        self.problem = ""
        self._own = certificate
        self._is_caller = is_caller
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not is_caller)
        self._lock = threading.Lock()

    def do_handshake(self, heard: bytes) -> bytes:
        """Takes what the other end has said in the handshake; gives what to answer, an alert too."""
        self._incoming.write(heard)
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
        """The other end's, once the handshake is done."""
        return self._tls.getpeercert(binary_form=True) or b""

    @property
    def peer_certificate_expiry(self) -> str:
        """When the other end's certificate expires."""
        return str((self._tls.getpeercert() or {}).get("notAfter"))

    @property
    def binding(self) -> bytes:
        """What both ends see of this connection; somebody in between has another one with each of them."""
        seen = [hashlib.sha256(each).digest() for each in (self._own, self.peer_certificate)]
        return b"".join(seen if self._is_caller else reversed(seen))

    def encrypted(self, data: Bytes) -> Iterator[bytes]:
        """What is to be sent for some data, in parts."""
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK):
            with self._lock:
                part = view[start : start + _CHUNK]
                while part:
                    part = part[self._tls.write(part) :]
                made = self._outgoing.read()
            yield made

    def decrypted(self, chunk: bytes) -> bytes:
        """What has come with a chunk, as far as that is whole.

        Raises:
            OSError: It was changed on its way, or the other end has given up: that is the problem then.
        """
        found = []
        with self._lock:
            self._incoming.write(chunk)
            try:
                while part := self._tls.read(_CHUNK):
                    found.append(part)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                self.problem = _reason(error)
                if not found:  # else the next call tells
                    raise
        return b"".join(found)


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
            f"{path} is a private key, and others can read it: chmod o= {path}"
            " (of a Secret in a pod: defaultMode 0440)."
        )


def _tried(folder: Path, caller: TlsEndpoint, door: TlsEndpoint) -> tuple[bytes, str]:
    """The own certificate as others see it, and until when they accept it."""
    said = b""
    while not ((caller.is_ready and door.is_ready) or caller.problem or door.problem):
        said = door.do_handshake(caller.do_handshake(said))
    problem = caller.problem or door.problem
    if problem:
        raise PlanError(
            f"{folder / CERTIFICATE}: {problem}. It has to be signed by {AUTHORITY} beside it, for servers"
            " and for clients, and not to have expired."
        )
    return caller.peer_certificate, caller.peer_certificate_expiry


def _context(folder: Path, *, is_caller: bool) -> ssl.SSLContext:
    """Both ends show a certificate; which host it names does not count, the run's key does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if is_caller else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    if not is_caller:
        context.num_tickets = 0  # nobody comes back with one
    context.load_verify_locations(folder / AUTHORITY)
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY, _no_password)
    return context


def _no_password() -> str:
    """OpenSSL would ask at the terminal."""
    raise ValueError("the key has a password")


def _reason(error: ssl.SSLError | ValueError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not accepted: {error.verify_message}"
    reason = getattr(error, "reason", None) or str(error).partition(" (_ssl.c")[0]
    words = str(reason).lower().replace("_", " ")
    return f"the other end gave up: {words}" if " alert " in words else words
