"""`isotrain runs`, `logs` and `join`: run directories, what ranks print, and a rank more."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from isotrain.core.cli.argument_types import RUN_HELP, non_negative_int, run_location
from isotrain.core.cli.command import Command
from isotrain.core.contracts.events import Output
from isotrain.core.errors import IsotrainError
from isotrain.core.json_format import FORMAT, json_page
from isotrain.core.quantities import counted
from isotrain.core.system.standard_streams import has_colours, visible_output

if TYPE_CHECKING:
    from isotrain.core.launching.run_directory.run_directory import RunDirectory

_POLL_SECONDS = 0.2


def runs(options: argparse.Namespace) -> None:
    """Lists runs."""
    from isotrain.core.launching.run_directory.run_directory import runs_folder
    from isotrain.core.launching.run_directory.run_listing import runs_in

    folder = runs_folder() if options.folder is None else options.folder
    entries = [run.to_dict() for run in runs_in(folder)]
    if options.json:
        print(json_page({"format": FORMAT, "runs": entries}))
        return
    from isotrain.core.reporting import text

    sys.stdout.write(text.runs(entries))


def logs(options: argparse.Namespace) -> None:
    """Prints the log of a rank; with `--json`, one object per line."""
    line = ""
    for line in _log_lines(Path(options.run), options.rank, options.follow):
        if options.json:
            line = Output(rank=options.rank, text=line).to_line().decode()
        else:
            line = visible_output(line, colours=has_colours(sys.stdout))
        sys.stdout.write(line)
        sys.stdout.flush()
    if not line:
        print(f"isotrain: rank {options.rank} of {options.run} printed nothing.", file=sys.stderr)


def _log_lines(folder: Path, rank: int, follow: bool) -> Iterator[str]:
    from isotrain.core.launching.run_directory.pipes import LogTail
    from isotrain.core.launching.run_directory.run_directory import RunDirectory, rank_log

    directory = RunDirectory.reopen(folder)
    log = rank_log(directory.path, rank)
    if not log.exists():
        _raise_no_log(directory.path, rank)
    tail = LogTail(log, from_start=True)
    while follow and directory.is_locked():
        yield from tail.lines()
        time.sleep(_POLL_SECONDS)
    yield from tail.rest()


def _raise_no_log(folder: Path, rank: int) -> None:
    names = (path.stem.removeprefix("rank-") for path in folder.glob("rank-*.log"))
    ranks = ", ".join(map(str, sorted(int(name) for name in names if name.isdecimal()))) or "none"
    raise IsotrainError(
        f"--rank {rank}: {folder} has no output of this rank. Available: {ranks}. The logs of ranks on"
        " other hosts may be in a folder of that name there."
    )


def join(options: argparse.Namespace) -> None:
    """Adds a replica to a running elastic run.

    Waits until it has joined; where the run's processes were started from outside, this process is the
    replica, and trains until the run ends.
    """
    from isotrain.core.launching.run_directory.run_directory import RunDirectory

    directory = RunDirectory.reopen(options.run)
    try:
        _request_replica(directory.path, options)
        return
    except OSError:  # no run of this machine takes requests there
        rank_zero = _directory_of_rank_zero(directory.path)
    if rank_zero is None:
        raise IsotrainError(_why_none_joins(directory))
    _join_from_here(rank_zero, options)


def _request_replica(run_directory: Path, options: argparse.Namespace) -> None:
    """Has a run of this machine start a replica, and waits until it has joined.

    Raises:
        OSError: No such run listens.
    """
    from isotrain.core.launching.supervision.join_requests import request_join

    rank = None
    for answer in request_join(run_directory):
        if "refused" in answer:
            raise IsotrainError(f"{options.run}: no replica joins: {answer['refused']}.")
        if "failed" in answer:
            raise IsotrainError(f"{options.run}: {answer['failed']}")
        if "joined" in answer:
            _say_joined(answer, options)
            return
        rank = answer["starts"]
        if not options.json:
            print(f"rank {rank} starts", flush=True)
    newcomer = "a replica" if rank is None else f"rank {rank}"
    raise IsotrainError(f"{options.run}: the run has ended before {newcomer} joined it.")


def _directory_of_rank_zero(run_directory: Path) -> Path | None:
    """Run directory of rank 0 where processes join; None if there is none.

    Where a launcher has started the ranks, it is in the run's directory. A start that was killed leaves its
    file behind, so that the newest one counts.
    """
    from isotrain.core.launching.run_directory.run_directory import JOIN_FILE

    files = [*run_directory.glob(JOIN_FILE), *run_directory.glob(f"launcher/*/{JOIN_FILE}")]
    with contextlib.suppress(FileNotFoundError):  # the run has just ended
        newest = max(files, key=lambda file: file.stat().st_mtime_ns, default=None)
        return None if newest is None else newest.parent
    return None


def _join_from_here(run_directory: Path, options: argparse.Namespace) -> None:
    """Trains in this process as a replica of a run, until its end."""
    from isotrain.core.rendezvous.joining_rank import join_run

    # the process's own output goes to the run's logs
    with open(os.dup(1), "w", encoding="utf-8") as output:

        def say(answer: Mapping[str, Any]) -> None:
            if "joined" in answer:
                _say_joined(answer, options, output)
            elif "starts" in answer and not options.json:
                print(f"rank {answer['starts']} starts", file=output, flush=True)

        join_run(run_directory, say)
        if not options.json:
            print("the run has ended", file=output)


def _say_joined(
    answer: Mapping[str, Any], options: argparse.Namespace, file: IO[str] | None = None
) -> None:
    rank, done, replicas = (answer[name] for name in ("joined", "done", "replicas"))
    if options.json:
        fields = {"format": FORMAT, "rank": rank, "done": done, "replicas": replicas}
        print(json_page(fields), file=file, flush=True)
        return
    text = f"rank {rank} has joined: {counted(replicas, 'replica')} go on after step {done}"
    print(text, file=file, flush=True)


def _why_none_joins(directory: RunDirectory) -> str:
    """Reason why a run takes no request to join."""
    from isotrain.core.launching.run_directory.run_directory import SPEC_FILE, read_fields

    path = directory.path
    if not directory.is_locked():
        return f"{path}: the run has ended. `isotrain resume` goes on with it, with --replicas."
    if read_fields(path, SPEC_FILE).get("elastic") is None:
        return (
            f"{path}: the run is not elastic, so that no replica can join it. Start it with `elastic` in its"
            " spec, such as --set elastic.min=1 --set elastic.max=8."
        )
    return f"{path}: the run is starting, or runs on another machine. Ask there, once it trains."


def _add_runs_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "folder",
        metavar="DIR",
        nargs="?",
        help="folder of run directories, or one of them (default: ISOTRAIN_RUNS, else runs)",
    )


def _add_logs_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", type=run_location, metavar="RUN", help=RUN_HELP)
    command.add_argument(
        "--rank",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="rank whose log is printed (default: 0)",
    )
    command.add_argument(
        "--follow", action="store_true", help="keep printing new lines until the run has ended"
    )


def _add_join_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", type=run_location, metavar="RUN", help=RUN_HELP)


RUNS = Command(
    "runs",
    "list runs with their outcome and progress",
    "Lists the runs whose directories are in a folder: their outcome, and how far they came.",
    """\
examples:
  isotrain runs
  isotrain runs /scratch/me/runs --json""",
    add_arguments=_add_runs_arguments,
    module=__name__,
)
LOGS = Command(
    "logs",
    "print the log of a rank",
    "Prints the log of a rank: all that it has printed, also while the run goes on.",
    """\
examples:
  isotrain logs last
  isotrain logs digits-20260102-030405 --rank 3 --follow""",
    add_arguments=_add_logs_arguments,
    module=__name__,
)
JOIN = Command(
    "join",
    "add a replica to a running elastic run",
    "Adds a replica to a running run whose spec has `elastic`, up to `elastic.max` replicas.\n"
    "On this machine the run starts the replica, and the command waits until it has joined.\n"
    "Under SLURM, Ray or a script of yours the command is the replica: start it on the\n"
    "host that is to join. It trains until the run ends.",
    """\
examples:
  isotrain join last
  srun --ntasks 1 isotrain join /shared/runs/digits
  isotrain join digits-20260102-030405 --json""",
    add_arguments=_add_join_arguments,
    module=__name__,
)
