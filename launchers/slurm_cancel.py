"""Program that cancels SLURM job steps by job and name, even if the `srun` that started them is gone."""

from __future__ import annotations

import subprocess
import sys


def main(job: str, name: str) -> None:
    """Cancels every step of that name.

    Args:
        job: Job ID.
        name: Step name, which is `--job-name` of an `srun` inside a job.
    """
    listing = ("squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i %j")
    output = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    for line in output.splitlines():
        step, _, step_name = line.partition(" ")
        if step_name.strip() == name:
            subprocess.run(("scancel", step), check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
