"""`isotrain launchers` and `isotrain cluster-info`; the submissions of `run --dry-run` and `plan`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotrain.core.cli.command import Command
from isotrain.core.errors import PlanError
from isotrain.core.json_format import FORMAT, json_line, json_page
from isotrain.core.plugins import selection
from isotrain.core.plugins.manager import plugin_manager

if TYPE_CHECKING:
    from isotrain.core.contracts.launcher import RankCommand, Submission
    from isotrain.core.contracts.plan import Plan
    from isotrain.core.launching.run_directory.run_directory import RunDirectory
    from isotrain.core.launching.scheduler.scheduler_launcher import SchedulerLauncher
    from isotrain.core.spec.training_spec import TrainingSpec


def cluster_info(options: argparse.Namespace) -> None:
    """Prints the cluster info of this process; JSON on one line, since many processes print at once."""
    from isotrain.core.planning.cluster_environment import cluster_info_of
    from isotrain.core.transport.encryption import TLS_VARIABLE, EncryptionOffer

    info = cluster_info_of(os.environ, plugin_manager())
    tls = EncryptionOffer.from_folder(os.environ.get(TLS_VARIABLE, "")).facts()
    if options.json:
        fields = None if info is None else asdict(info)
        print(json_line({"format": FORMAT, "cluster_info": fields, "tls": tls}))
        return
    from isotrain.core.reporting import launcher_text

    sys.stdout.write(launcher_text.cluster_info(info, tls))


def launchers(options: argparse.Namespace) -> None:
    """Lists the launchers and cluster environments, and the backends each supports."""
    from isotrain.core.planning import launcher_support

    host = plugin_manager()
    launchers, environments = launcher_support.launchers(host), launcher_support.environments(host)
    if options.json:
        lists = {"launchers": launchers, "environments": environments}
        print(json_page({"format": FORMAT, **lists, "plugin_faults": dict(host.faults)}))
        return
    from isotrain.core.reporting import launcher_text

    sys.stdout.write(launcher_text.launchers(launchers, environments))


def dry_run(spec: TrainingSpec, options: argparse.Namespace) -> None:
    """Writes the files of a run's submission and prints the command that submits it; starts nothing."""
    from isotrain.core import api
    from isotrain.core.launching.scheduler import scheduler_run
    from isotrain.core.planning.launcher_support import require_interface_used
    from isotrain.core.run.start import locked_run_directory

    _refuse_run_options(options)
    launcher_choice = {
        "launcher": options.launcher,
        "launcher_options": dict(options.launcher_option),
    }
    plan = api.plan(spec, backend=options.backend, replicas=options.replicas, **launcher_choice)
    launcher = _scheduler_launcher(spec, plan)
    if launcher is None:
        raise PlanError(
            f"--dry-run: launcher {plan.launcher!r} submits nothing to a scheduler. `isotrain plan` shows"
            " what it would do."
        )
    require_interface_used(options.interface, plan)
    with locked_run_directory(spec, options.output, options.resume) as directory:
        resume = _resume(spec, directory, options.resume)
        folder = directory.path.absolute()
        submission, command = _submission(spec, plan, folder, resume, interface=options.interface)
        files = scheduler_run.write(submission, command)
    preview = _preview(launcher.submission(replace(command, key="KEY")), command)
    if options.json:
        print(json_page({"format": FORMAT, "folder": str(directory.path), **preview}))
        return
    from isotrain.core.reporting import launcher_text

    export = f'export {command.spec_variable}="$(cat {shlex.quote(str(command.spec))})"'
    sys.stdout.write(
        launcher_text.prepared_submission(
            [str(path) for path in (*files, command.spec)], preview["submission"], export
        )
    )


def _refuse_run_options(options: argparse.Namespace) -> None:
    """Refuses options that need a run that is started and supervised."""
    for name, default in (("--port", None), ("--max-restarts", 0), ("--ranks", (0,))):
        if getattr(options, name.strip("-").replace("-", "_")) != default:
            raise PlanError(f"{name}: --dry-run starts no run that could use it. Leave it out.")


def _resume(spec: TrainingSpec, directory: RunDirectory, resume: str | None) -> str | None:
    """The `--resume` option of the ranks; `auto` is resolved only when they start."""
    from isotrain.core.run.start import AUTO, starting_checkpoint
    from isotrain.core.system.files import is_url

    if resume == AUTO:
        return AUTO
    checkpoint = starting_checkpoint(spec, directory, resume)
    if checkpoint is None:
        return None
    location = checkpoint.location
    return location if is_url(location) else str(Path(location).absolute())


def submission_preview(spec: TrainingSpec, plan: Plan) -> dict[str, Any]:
    """The submission of a plan, with a placeholder for its key; empty where no scheduler is used."""
    if _scheduler_launcher(spec, plan) is None:
        return {}
    from isotrain.core.launching.run_directory.run_directory import runs_folder

    directory = runs_folder().absolute() / f"{spec.name}-TIME"
    submission, command = _submission(spec, plan, directory, key="KEY")
    return _preview(submission, command)


def _scheduler_launcher(spec: TrainingSpec, plan: Plan) -> SchedulerLauncher | None:
    from isotrain.core.launching.scheduler.scheduler_launcher import SchedulerLauncher

    launcher = plugin_manager(spec.plugins).launcher(plan.launcher, plan.launcher_options)
    return launcher if isinstance(launcher, SchedulerLauncher) else None


def _submission(
    spec: TrainingSpec,
    plan: Plan,
    directory: Path,
    resume: str | None = None,
    key: str | None = None,
    interface: str | None = None,
) -> tuple[Submission, RankCommand]:
    from isotrain.core.launching.scheduler.scheduler_run import rank_command

    launcher = _scheduler_launcher(spec, plan)
    assert launcher is not None
    plugins = selection.for_workers(selection.current())
    command = rank_command(spec, plan, plugins, directory, resume, interface)
    command = command if key is None else replace(command, key=key)
    return launcher.submission(command), command


def _preview(submission: Submission, command: RankCommand) -> dict[str, Any]:
    """Commands that isotrain starts, and those to submit by hand, as shell text; files as text by path."""
    from isotrain.core.launching.scheduler.scheduler_run import manual_commands

    return {
        "submission": {
            "commands": [shlex.join(words) for words in submission.commands],
            "submit": manual_commands(submission, command),
            "files": {
                str(command.spec.with_name(name)): text for name, text in submission.files.items()
            },
        }
    }


LAUNCHERS = Command(
    "launchers",
    "list which launcher starts which backend",
    "Lists which launcher starts runs of which backend, and which schedulers and launchers may start\n"
    "the same command on every rank instead. Read from what they declare; nothing is loaded.",
    """\
examples:
  isotrain launchers
  isotrain launchers --json""",
    module=__name__,
)
CLUSTER_INFO = Command(
    "cluster-info",
    "show the rank of this process and which scheduler set it",
    "Shows which rank of which job this process would be, from its environment variables alone, and\n"
    "whether it could use TLS: `srun isotrain cluster-info` shows that of each task of a step.",
    """\
examples:
  isotrain cluster-info
  isotrain cluster-info --json""",
    module=__name__,
)
