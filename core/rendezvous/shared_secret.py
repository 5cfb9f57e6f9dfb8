"""The shared secret of a user's processes, and the key of a run that is derived from it."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from isotrain.core.contracts.cluster_environment import ClusterInfo
from isotrain.core.contracts.launcher import RankCommand
from isotrain.core.errors import PlanError
from isotrain.core.planning.cluster_environment import explain_rank
from isotrain.core.system.files import is_shared

FILE = RankCommand.key_file
_READABLE_BY_OTHERS = 0o077
_WRITABLE_BY_OTHERS = 0o022
_SECRET_BYTES = 32
_MAKE = f"(umask 077; mkdir -p {FILE.parent}; openssl rand -hex {_SECRET_BYTES} > {FILE})"


@dataclass(frozen=True)
class RunKey:
    """Secret key of one run, derived by HMAC-SHA256.

    Attributes:
        secret: Key bytes, known only to the processes of the run.
    """

    secret: bytes

    @classmethod
    def of(cls, cluster_info: ClusterInfo, shared: bytes, number: int) -> RunKey:
        """Derives the key of this program's run `number`, the same on all its processes."""
        run = f"{cluster_info.environment}\n{cluster_info.job}\n{cluster_info.world_size}\n{number}"
        return cls(hmac.digest(shared, run.encode(), "sha256"))

    def derive(self, purpose: str) -> bytes:
        """Derives a key for another purpose."""
        return hmac.digest(self.secret, purpose.encode(), "sha256")

    def numbers(self, count: int, below: int) -> list[int]:
        """Distinct pseudo-random numbers in [0, below), the same on all processes."""
        numbers: dict[int, None] = {}
        counter = 0
        while len(numbers) < count:
            digest = hashlib.sha256(self.derive(f"number {counter}")).digest()
            numbers[int.from_bytes(digest[:8], "big") % below] = None
            counter += 1
        return list(numbers)


def shared_secret(
    cluster_info: ClusterInfo,
    variables: Mapping[str, str],
    scheduler_secret: str | None,
    *,
    is_certified: bool,
) -> bytes:
    """The secret that the processes of one user share; made in a file if there is none.

    Args:
        cluster_info: Cluster info of this process.
        variables: Environment variables of this process.
        scheduler_secret: Secret that the scheduler gives all processes of a job.
        is_certified: Whether the processes authenticate by TLS certificates: then no secret is needed.

    Raises:
        PlanError: There is no secret, and none can be made that all processes would see; or its file is
            readable by others, not readable by this process, or empty.
    """
    from_variable = variables.get(RankCommand.key_variable, "").encode()
    secret = (
        from_variable
        or _read_named_file(variables)
        or (scheduler_secret or "").encode()
        or _read_secret(FILE)
    )
    if secret:
        return secret
    for file in _files_to_make(cluster_info):
        with contextlib.suppress(OSError):
            _make_secret(file)
            if made := _read_secret(file):
                return made
    if is_certified:
        return b"isotrain"
    raise PlanError(
        f"the processes that {cluster_info.environment} has started share no secret by which they know each"
        f" other. Make one, once, and copy it to hosts that do not share home directories: {_MAKE}."
        f" Or set {RankCommand.key_variable} for all of the processes, to a value that nobody can guess."
        f" {explain_rank(cluster_info)}"
    )


def _read_named_file(variables: Mapping[str, str]) -> bytes:
    """Secret from the file that an environment variable names: unlike the secret, a path may be public."""
    name = variables.get(RankCommand.key_file_variable, "").strip()
    if not name:
        return b""
    secret = _read_secret(Path(name))
    if not secret:
        raise PlanError(
            f"{RankCommand.key_file_variable}: {socket.gethostname()} does not see {name}, which has the key"
            f" of this run. Put the same {FILE} on all hosts, and on the one where you start the run."
        )
    return secret


def _files_to_make(cluster_info: ClusterInfo) -> Iterator[Path]:
    """Files in which a secret may be made: all processes see them, and no other user can read them."""
    with contextlib.suppress(RuntimeError):  # there is no home directory
        home = FILE.expanduser()
        if is_shared(home):
            yield home
        elif cluster_info.is_on_one_host:
            yield home.with_name(f"key-of-{socket.gethostname()}")
    if cluster_info.is_on_one_host:
        yield Path(tempfile.gettempdir()) / f"isotrain-{os.geteuid()}" / "key"


def _make_secret(file: Path) -> None:
    """Makes a secret file if there is none; if several processes do so at once, one wins (link).

    Raises:
        OSError: It cannot be made there, or another user could have made it.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_owned(file.parent)
    temporary = file.with_name(f".{file.name}-{secrets.token_hex(8)}")
    temporary.touch(0o600, exist_ok=False)
    try:
        temporary.write_text(f"{secrets.token_hex(_SECRET_BYTES)}\n", encoding="ascii")
        with contextlib.suppress(FileExistsError):
            os.link(temporary, file)
    finally:
        temporary.unlink()
    _require_owned(file)


def _require_owned(path: Path) -> None:
    """Requires that this user owns a path, and the target of a link, and that nobody else can write to it."""
    status = path.stat()
    if {path.lstat().st_uid, status.st_uid} != {
        os.geteuid()
    } or status.st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(f"{path} belongs to another user, or others can write to it")


def _read_secret(file: Path) -> bytes:
    try:
        path = file.expanduser()
        mode, key = path.stat().st_mode, path.read_bytes().strip()
    except (FileNotFoundError, NotADirectoryError, RuntimeError):  # or there is no home directory
        return b""
    except OSError as error:
        raise PlanError(
            f"{path} holds the key of your runs, and cannot be read: {error.strerror}. Make it readable for"
            f" you alone, or set {RankCommand.key_variable}, the same for all processes."
        ) from error
    if mode & _READABLE_BY_OTHERS:
        raise PlanError(
            f"{path} holds the key of your runs, and other users can read it: chmod 600 {path}."
        )
    if not key:
        raise PlanError(
            f"{path} holds the key of your runs, and is empty. Remove it, or write one."
        )
    return key
