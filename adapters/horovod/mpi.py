"""MPI under Horovod: initialized once in a process, and finalized when the process ends."""

from __future__ import annotations

import atexit
import ctypes

from isotrain.adapters.horovod import build_info
from isotrain.plugin import UnsupportedError

_THREADS = 3
"""MPI_THREAD_MULTIPLE: Horovod calls MPI on its own thread."""


class _ProcessState:
    """State of this process."""

    has_used_mpi = False


def init(framework: str) -> None:
    """Initializes MPI, unless it is. Called by every process of a run.

    MPI can be initialized only once in a process, and Horovod would finalize it with the first run.

    Args:
        framework: Framework whose Horovod library is used, `torch` or `tensorflow`.

    Raises:
        UnsupportedError: No MPI launcher started this process.
    """
    if not build_info.started_by_mpi():
        raise UnsupportedError(
            "Horovod's mpi works only in processes started by mpirun, and this one was not. Use --launcher"
            " mpi (launcher= in Python), or the collective gloo."
        )
    _ProcessState.has_used_mpi = True
    build = build_info.installed(framework)
    assert build is not None
    library = ctypes.CDLL(
        str(build.extension)
    )  # it has loaded the MPI library, whose functions are found through it
    is_initialized = ctypes.c_int()
    library.MPI_Initialized(ctypes.byref(is_initialized))
    if not is_initialized:
        library.MPI_Init_thread(None, None, _THREADS, ctypes.byref(ctypes.c_int()))
        atexit.register(library.MPI_Finalize)


def require_unused() -> None:
    """Refuses another collective after a run over MPI in the same process, which Horovod would abort.

    Raises:
        UnsupportedError: This process has run over MPI.
    """
    if _ProcessState.has_used_mpi:
        raise UnsupportedError(
            "Horovod has run over mpi in this process, and cannot run over another collective after that. Use"
            " mpi again, or a separate program for each."
        )
