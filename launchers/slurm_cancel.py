"""Ends a step of SLURM, given its job and its name, whatever has become of the `srun` that made it."""

from __future__ import annotations

import subprocess
import sys


def main(job: str, name: str) -> None:
    """Ends every step of that name.

    Args:
        job: Its number.
        name: As `--job-name` of `srun` has it inside of a job.
    """
    listing = ("squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i %j")
    said = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    for line in said.splitlines():
        step, _, called = line.partition(" ")
        if called.strip() == name:
            subprocess.run(("scancel", step), check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
