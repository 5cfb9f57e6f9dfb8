"""The key by which the processes of a joined run know each other."""

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
from isotrain.core.planning.cluster_environment import claim
from isotrain.core.system.files import is_shared

FILE = RankCommand.key_file
_READABLE_BY_OTHERS = 0o077
_WRITABLE_BY_OTHERS = 0o022
_BYTES = 32
_MAKE = f"(umask 077; mkdir -p {FILE.parent}; openssl rand -hex {_BYTES} > {FILE})"


@dataclass(frozen=True)
class RunKey:
    """A key.

    Attributes:
        secret: Known to the processes of one run alone.
    """

    secret: bytes

    @classmethod
    def of(cls, place: ClusterInfo, own: bytes, number: int) -> RunKey:
        """Makes the key of a run: the same on all its processes, and another one for every run.

        Args:
            place: Of this process.
            own: What `shared_secret` found.
            number: Of the run among those that this program has joined.
        """
        run = f"{place.environment}\n{place.job}\n{place.world_size}\n{number}"
        return cls(hmac.digest(own, run.encode(), "sha256"))

    def derive(self, what: str) -> bytes:
        """Another key for another purpose."""
        return hmac.digest(self.secret, what.encode(), "sha256")

    def numbers(self, count: int, below: int) -> list[int]:
        """Numbers that follow from it, the same on all processes, none twice."""
        found: dict[int, None] = {}
        turn = 0
        while len(found) < count:
            drawn = hashlib.sha256(self.derive(f"number {turn}")).digest()
            found[int.from_bytes(drawn[:8], "big") % below] = None
            turn += 1
        return list(found)


def shared_secret(
    place: ClusterInfo, variables: Mapping[str, str], given: str | None, *, is_certified: bool
) -> bytes:
    """What the processes of one user share, and nobody else knows.

    Args:
        place: Of this process.
        variables: All of it.
        given: A secret that the engine has told all processes.
        is_certified: Whether they prove by certificates who they are: then nothing else is needed.

    Raises:
        PlanError: There is none, and none can be made that all processes would find; or the file that has it
            can be read by others, or not by this process, or is empty.
    """
    told = variables.get(RankCommand.key_variable, "").encode()
    found = told or _from_named(variables) or (given or "").encode() or _from_file(FILE)
    if found:
        return found
    for file in _places_for_one(place):
        with contextlib.suppress(OSError):
            _make(file)
            if made := _from_file(file):
                return made
    if is_certified:
        return b"isotrain"
    raise PlanError(
        f"the processes that {place.environment} has started share no secret by which they know each other."
        f" Make one, once, and copy it to hosts that do not share home directories: {_MAKE}."
        f" Or set {RankCommand.key_variable} for all of the processes, to what nobody can guess."
        f" {claim(place)}"
    )


def _from_named(variables: Mapping[str, str]) -> bytes:
    """From the file that a variable names: a path may be seen by everybody."""
    name = variables.get(RankCommand.key_file_variable, "").strip()
    if not name:
        return b""
    found = _from_file(Path(name))
    if not found:
        raise PlanError(
            f"{RankCommand.key_file_variable}: {socket.gethostname()} does not see {name}, which has the key"
            f" of this run. Put the same {FILE} on all hosts, and on the one where the run is asked for."
        )
    return found


def _places_for_one(place: ClusterInfo) -> Iterator[Path]:
    """Files that all processes find and that nobody else can read, in which a secret may be made."""
    with contextlib.suppress(RuntimeError):  # there is no home
        home = FILE.expanduser()
        if is_shared(home):
            yield home
        elif place.is_on_one_host:
            yield home.with_name(f"key-of-{socket.gethostname()}")
    if place.is_on_one_host:
        yield Path(tempfile.gettempdir()) / f"isotrain-{os.geteuid()}" / "key"


def _make(file: Path) -> None:
    """Makes a secret where there is none; of several processes that do so at once, one does.

    Raises:
        OSError: It cannot be made there, or somebody else could have made it.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_own(file.parent)
    own = file.with_name(f".{file.name}-{secrets.token_hex(8)}")
    own.touch(0o600, exist_ok=False)
    try:
        own.write_text(f"{secrets.token_hex(_BYTES)}\n", encoding="ascii")
        with contextlib.suppress(FileExistsError):
            os.link(own, file)
    finally:
        own.unlink()
    _require_own(file)


def _require_own(path: Path) -> None:
    """A link is looked at itself, and what it leads to."""
    found = path.stat()
    if {path.lstat().st_uid, found.st_uid} != {os.geteuid()} or found.st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(f"{path} is somebody else's, or others may write to it")


def _from_file(file: Path) -> bytes:
    try:
        path = file.expanduser()
        mode, key = path.stat().st_mode, path.read_bytes().strip()
    except (FileNotFoundError, NotADirectoryError, RuntimeError):  # or there is no home
        return b""
    except OSError as error:
        raise PlanError(
            f"{path} holds the key of your runs, and cannot be read: {error.strerror}. Make it readable for"
            f" you alone, or set {RankCommand.key_variable}, for all processes alike."
        ) from error
    if mode & _READABLE_BY_OTHERS:
        raise PlanError(
            f"{path} holds the key of your runs, and others can read it: chmod 600 {path}."
        )
    if not key:
        raise PlanError(
            f"{path} holds the key of your runs, and is empty. Remove it, or write one."
        )
    return key
