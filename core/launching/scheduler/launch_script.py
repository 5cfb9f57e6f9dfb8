"""Writes what a person starts with: the skeleton of a spec, and a script that launches it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from string import Template

from isotrain.core.contracts.launcher import LOCAL
from isotrain.core.errors import PlanError

SPEC_FILE = "train.yaml"
SCRIPT_FILE = "launch.sh"
_SPEC = Template("""\
# What is trained: `isotrain check $spec --backend $backend` says what is still wrong here.
# docs/spec.md explains every field.
name: training
model: model.py:model        # a function that builds the model: FILE.py:NAME or package.module:NAME
data: data.py:data           # a function that gives the inputs and the targets
loss: sparse_categorical_crossentropy
metrics: [accuracy]
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
global_batch_size: 64             # over all replicas: what is computed does not depend on their number
epochs: 1
precision: $precision
checkpoint: {every_minutes: 10}
""")
_SCRIPT = Template("""\
#!/bin/sh
# Launches the training; options that follow it are those of `isotrain run`: ./$script --set epochs=3
set -eu
cd "$$(dirname "$$0")"
exec $command "$$@"
""")


@dataclass(frozen=True)
class Launch:
    """What is to be launched, as a person answered.

    Attributes:
        backend: `NAME` or `NAME:COLLECTIVE`.
        launcher: What starts the processes.
        launcher_options: Of the launcher, `NAME=VALUE` each.
        replicas: How many; None: as many as there are devices.
        precision: As in a spec.
        spec: A spec that is there already; None: write a skeleton.
    """

    backend: str
    launcher: str = LOCAL
    launcher_options: tuple[str, ...] = ()
    replicas: int | None = None
    precision: str = "float32"
    spec: str | None = None

    @property
    def command(self) -> list[str]:
        """The command that launches it."""
        words = ["isotrain", "run", self.spec or SPEC_FILE, "--backend", self.backend]
        if self.replicas is not None:
            words += ["--replicas", str(self.replicas)]
        if self.launcher != LOCAL:
            words += ["--launcher", self.launcher]
        for option in self.launcher_options:
            words += ["--launcher-option", option]
        return words


def write_launch(launch: Launch, folder: Path) -> list[Path]:
    """Writes the script, and the skeleton of a spec where none was given.

    Args:
        launch: What to launch.
        folder: Where to; it is made if need be.

    Returns:
        The files.

    Raises:
        PlanError: One of them is there already, or cannot be written.
    """
    texts = {SCRIPT_FILE: _script(launch)}
    if launch.spec is None:
        texts[SPEC_FILE] = _spec(launch)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in texts:
            if (folder / name).exists():
                raise PlanError(
                    f"config: {folder / name} exists already. Remove it, or write to another folder with"
                    " --directory."
                )
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / SCRIPT_FILE).chmod(0o755)
    except OSError as error:
        raise PlanError(f"config: {folder} cannot be written: {error}.") from error
    return [folder / name for name in texts]


def _script(launch: Launch) -> str:
    return _SCRIPT.substitute(script=SCRIPT_FILE, command=shlex.join(launch.command))


def _spec(launch: Launch) -> str:
    return _SPEC.substitute(
        spec=SPEC_FILE,
        backend=launch.backend,
        precision=launch.precision,
    )
