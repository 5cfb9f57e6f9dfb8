"""What an engine starts on every rank of a run."""

from __future__ import annotations

import json
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
        spec: The spec's file here, which other hosts need not see.
        spec_text: What is in it.
        options: Of `isotrain run`, but for the run directory.
        run_directory: Where rank 0 keeps the run's files, on its own host.
        variables: What every rank must find set, as it is here; no secret is among them.
        key: A secret by which the processes of the run know each other.
        follow_options: Options for a run that is followed from here while it goes on.
        fewest_processes: With how few the run may go on; None: with no fewer than it began.
        key_variable: The variable in which they are told the key.
        spec_variable: The one in which they are told the spec.
        key_file_variable: The one that names a file with it, where everybody can read variables.
        key_file: The person's own, where processes look for one that they are not told of.
    """

    name: str
    spec: Path
    spec_text: str
    options: tuple[str, ...]
    run_directory: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    key: str = field(default="", repr=False)
    follow_options: tuple[str, ...] = ()
    fewest_processes: int | None = None
    key_variable: ClassVar[str] = "ISOTRAIN_KEY"
    spec_variable: ClassVar[str] = "ISOTRAIN_SPEC"
    key_file_variable: ClassVar[str] = "ISOTRAIN_KEY_FILE"
    key_file: ClassVar[Path] = Path("~/.config/isotrain/key")

    @property
    def arguments(self) -> tuple[str, ...]:
        """The program and its arguments, where hosts have this one's interpreter."""
        where = f"env:{self.spec_variable}"
        return self.on_host(sys.executable, where, str(self.run_directory))

    def on_host(self, python: str, spec: str, run_directory: str) -> tuple[str, ...]:
        """The same where these are elsewhere."""
        run = (python, "-m", "isotrain", "run", spec)
        return (*run, *self.options, *self.follow_options, "--run-dir", run_directory)

    @property
    def secret_variables(self) -> dict[str, str]:
        """Further variables that every rank must find set, and that stand on no command line."""
        spec = json.dumps(json.loads(self.spec_text))
        return {self.key_variable: self.key, self.spec_variable: spec}
