"""MPI under Horovod: started once in a process, and there until that ends."""

from __future__ import annotations

import atexit
import ctypes

from isotrain.adapters.horovod import build_info
from isotrain.plugin import UnsupportedError

_THREADS = 3
"""MPI_THREAD_MULTIPLE: Horovod speaks with MPI on a thread of its own."""


class _Process:
    """This process."""

    has_used_mpi = False


def begin(framework: str) -> None:
    """Starts MPI, unless it runs. Called by every process of a run.

    MPI starts only once in a process, and Horovod would end it with the first run that it has started it for.

    Args:
        framework: For which Horovod's library was built.

    Raises:
        UnsupportedError: No MPI launcher started this process.
    """
    if not build_info.started_by_mpi():
        raise UnsupportedError(
            "Horovod's mpi works only in processes that mpirun started, and this one was not. Use --launcher"
            " mpi (launcher= in Python), or the collective gloo."
        )
    _Process.has_used_mpi = True
    found = build_info.installed(framework)
    assert found is not None
    library = ctypes.CDLL(
        str(found.extension)
    )  # finds what is in MPI's library, which it has loaded
    runs = ctypes.c_int()
    library.MPI_Initialized(ctypes.byref(runs))
    if not runs:
        library.MPI_Init_thread(None, None, _THREADS, ctypes.byref(ctypes.c_int()))
        atexit.register(library.MPI_Finalize)


def require_unused() -> None:
    """Refuses what cannot follow a run over MPI in the same process: Horovod would abort it.

    Raises:
        UnsupportedError: There was one.
    """
    if _Process.has_used_mpi:
        raise UnsupportedError(
            "Horovod has run over mpi in this process, and cannot run over another collective after that. Use"
            " mpi again, or a program of its own for each."
        )
