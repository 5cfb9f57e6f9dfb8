"""What an engine starts on every rank of a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True)
class RankCommand:
    """What an engine starts on every rank, which finds its place there by itself.

    Attributes:
        name: Of this run and of no other, as engines take it: small letters, digits, hyphens.
        spec: The spec's file.
        spec_text: What is in it, for hosts that do not see this one's files.
        options: Of `isotrain run`, but for the run directory.
        run_directory: Where rank 0 keeps the run's files.
        variables: What every rank must find set, as it is here; no secret is among them.
        key: A secret by which the processes of the run know each other.
        key_variable: The variable in which they are told it.
    """

    name: str
    spec: Path
    spec_text: str
    options: tuple[str, ...]
    run_directory: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    key: str = field(default="", repr=False)
    key_variable: ClassVar[str] = "ISOTRAIN_KEY"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The program and its arguments, where hosts have this one's files and interpreter."""
        return self.on_host(sys.executable, str(self.spec), str(self.run_directory))

    def on_host(self, python: str, spec: str, run_directory: str) -> tuple[str, ...]:
        """The same where these are elsewhere."""
        run = (python, "-m", "isotrain", "run", spec)
        return (*run, *self.options, "--run-dir", run_directory)
