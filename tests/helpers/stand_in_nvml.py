"""A machine with NVIDIA GPUs, of which NVML tells: a library that is compiled from `nvml_stand_in.c`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from isotrain.core.system import nvml

SOURCE = Path(__file__).with_name("nvml_stand_in.c")


class StandInNvml:
    """Stands for NVIDIA's library where this process, or one that it starts, loads it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        """Keeps the folder for the library, and the file that tells it of the machine.

        Without a C compiler the test is skipped.
        """
        if shutil.which("cc") is None:
            pytest.skip("the stand-in for NVML is compiled, and there is no cc")
        self._monkeypatch = monkeypatch
        self._folder = folder
        self._machine = folder / "machine"

    def becomes(self, machine: str, *, is_old: bool = False) -> None:
        """Changes the machine; a process learns of it when it looks anew.

        Args:
            machine: Entries as in `nvml_stand_in.c`.
            is_old: Whether the library is older than MIG.
        """
        self._machine.write_text(machine, encoding="utf-8")
        library = self._folder / nvml.LIBRARY
        if not library.exists():
            options = ["-DBEFORE_MIG"] if is_old else []
            subprocess.run(["cc", "-shared", "-fPIC", *options, "-o", library, SOURCE], check=True)
            load = ctypes.CDLL
            self._monkeypatch.setattr(
                ctypes,
                "CDLL",
                lambda name, *args, **options: load(
                    str(library) if name == nvml.LIBRARY else name, *args, **options
                ),
            )
            self._monkeypatch.setattr(nvml, "report", nvml.report.__wrapped__)
            self._monkeypatch.setenv("NVML_STAND_IN", str(self._machine))
            self._monkeypatch.setenv("LD_LIBRARY_PATH", str(self._folder))
