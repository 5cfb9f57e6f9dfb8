"""Writes the files of `isotrain config`: a spec skeleton, and a script that launches it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from string import Template

from isotrain.core.contracts.launcher import LOCAL
from isotrain.core.errors import PlanError

SPEC_FILE = "train.yaml"
SCRIPT_FILE = "launch.sh"
_SPEC_TEMPLATE = Template("""\
# The training spec: `isotrain check $spec --backend $backend` lists what is still wrong.
# docs/spec.md explains every field.
name: training
model: model.py:model        # a function that builds the model: FILE.py:NAME or package.module:NAME
data: data.py:data           # a function that returns the inputs and the targets
loss: sparse_categorical_crossentropy
metrics: [accuracy]
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
global_batch_size: 64        # over all replicas: the result does not depend on their number
epochs: 1
precision: $precision
checkpoint: {every_minutes: 10}
""")
_SCRIPT_TEMPLATE = Template("""\
#!/bin/sh
# Launches the training. Arguments are passed to `isotrain run`: ./$script --set epochs=3
set -eu
cd "$$(dirname "$$0")"
exec $command "$$@"
""")


@dataclass(frozen=True)
class Launch:
    """Answers of the user for `isotrain config`.

    Attributes:
        backend: `NAME` or `NAME:COLLECTIVE`.
        launcher: Name of the launcher.
        launcher_options: Options of the launcher, each `NAME=VALUE`.
        replicas: Number of replicas; None: one per device.
        precision: `precision` of the spec.
        spec: Path of an existing spec; None: write a skeleton.
    """

    backend: str
    launcher: str = LOCAL
    launcher_options: tuple[str, ...] = ()
    replicas: int | None = None
    precision: str = "float32"
    spec: str | None = None

    @property
    def command(self) -> list[str]:
        """Arguments of the `isotrain run` command."""
        words = ["isotrain", "run", self.spec or SPEC_FILE, "--backend", self.backend]
        if self.replicas is not None:
            words += ["--replicas", str(self.replicas)]
        if self.launcher != LOCAL:
            words += ["--launcher", self.launcher]
        for option in self.launcher_options:
            words += ["--launcher-option", option]
        return words


def write_launch(launch: Launch, folder: Path) -> list[Path]:
    """Writes the script, and a spec skeleton unless there is a spec.

    Args:
        launch: Answers of the user.
        folder: Target folder, created if missing.

    Returns:
        Paths of the files.

    Raises:
        PlanError: One of them exists already, or cannot be written.
    """
    texts = {SCRIPT_FILE: _script_text(launch)}
    if launch.spec is None:
        texts[SPEC_FILE] = _spec_text(launch)
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


def _script_text(launch: Launch) -> str:
    return _SCRIPT_TEMPLATE.substitute(script=SCRIPT_FILE, command=shlex.join(launch.command))


def _spec_text(launch: Launch) -> str:
    return _SPEC_TEMPLATE.substitute(
        spec=SPEC_FILE,
        backend=launch.backend,
        precision=launch.precision,
    )
