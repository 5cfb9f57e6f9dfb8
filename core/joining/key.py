"""The key by which the processes of a joined run know each other."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from isotrain.core.contracts.environment import Place
from isotrain.core.contracts.rank_command import RankCommand
from isotrain.core.errors import PlanError

FILE = Path("~/.config/isotrain/key")
_READABLE_BY_OTHERS = 0o077


@dataclass(frozen=True)
class RunKey:
    """A key, and where it is from.

    Attributes:
        secret: Known to the processes of one run alone.
        is_secret: Whether it is made from something that nobody else knows.
    """

    secret: bytes
    is_secret: bool

    @classmethod
    def of(cls, place: Place, variables: Mapping[str, str], number: int) -> RunKey:
        """Makes the key of a run: the same on all its processes, and another one for every run.

        Args:
            place: Of this process.
            variables: All of it.
            number: Of the run among those that this program has joined.

        Raises:
            PlanError: The key file can be read by others, or not by this process, or is empty.
        """
        own = variables.get(RankCommand.key_variable, "").encode() or _from_file()
        run = f"{place.engine}\n{place.job}\n{place.world_size}\n{number}"
        return cls(hmac.digest(own or b"isotrain", run.encode(), "sha256"), bool(own))

    def derived(self, what: str) -> bytes:
        """Another key for another purpose."""
        return hmac.digest(self.secret, what.encode(), "sha256")

    def numbers(self, count: int, below: int) -> list[int]:
        """Numbers that follow from it, the same on all processes, none twice."""
        found: dict[int, None] = {}
        turn = 0
        while len(found) < count:
            drawn = hashlib.sha256(self.derived(f"number {turn}")).digest()
            found[int.from_bytes(drawn[:8], "big") % below] = None
            turn += 1
        return list(found)


def _from_file() -> bytes:
    try:
        path = FILE.expanduser()
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
