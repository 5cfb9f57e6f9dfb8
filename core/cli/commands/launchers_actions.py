"""What the commands about launchers do; `launching_arguments` has their texts."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    """Prints this process's place; as JSON in one line, for many processes print theirs at once."""
    from isotrain.core.planning.cluster_environment import cluster_info_of
    from isotrain.core.transport.encryption import TLS_VARIABLE, EncryptionOffer

    found = cluster_info_of(os.environ, plugin_manager())
    tls = EncryptionOffer.of(os.environ.get(TLS_VARIABLE, "")).facts()
    if options.json:
        shown = None if found is None else asdict(found)
        print(json_line({"format": FORMAT, "cluster_info": shown, "tls": tls}))
        return
    from isotrain.core.reporting import launcher_text

    sys.stdout.write(launcher_text.cluster_info(found, tls))


def launchers(options: argparse.Namespace) -> None:
    """Lists the launchers and engines, and the backends that they fit."""
    from isotrain.core.planning import launcher_support

    host = plugin_manager()
    launchers, environments = launcher_support.launchers(host), launcher_support.environments(host)
    if options.json:
        listed = {"launchers": launchers, "environments": environments}
        print(json_page({"format": FORMAT, **listed, "plugin_faults": dict(host.faults)}))
        return
    from isotrain.core.reporting import launcher_text

    sys.stdout.write(launcher_text.launchers(launchers, environments))


def dry_run(spec: TrainingSpec, options: argparse.Namespace) -> None:
    """Writes what a run would give to its engine, and says what to do with it; starts nothing."""
    from dataclasses import replace

    from isotrain.core import api
    from isotrain.core.launching.scheduler import scheduler_run
    from isotrain.core.planning.launcher_support import require_interface_used
    from isotrain.core.run.start import locked_run_directory

    _require_only_written(options)
    how = {"launcher": options.launcher, "launcher_options": dict(options.launcher_option)}
    plan = api.plan(spec, backend=options.backend, replicas=options.replicas, **how)
    launcher = _scheduler_launcher(spec, plan)
    if launcher is None:
        raise PlanError(
            f"--dry-run: launcher {plan.launcher!r} gives nothing to an engine. `isotrain plan` shows what it"
            " would do."
        )
    require_interface_used(options.interface, plan)
    with locked_run_directory(spec, options.run_dir, options.resume) as given:
        resume = _resume(spec, given, options.resume)
        where = given.path.absolute()
        found = _submission(spec, plan, where, resume, interface=options.interface)
        files = scheduler_run.write(*found)
    shown = _plain(launcher.submission(replace(found[1], key="KEY")), found[1])
    if options.json:
        print(json_page({"format": FORMAT, "folder": str(given.path), **shown}))
        return
    print("".join(f"{path}\n" for path in files), end="")
    if shown["submission"]["commands"]:
        command = found[1]
        print(f'export {command.spec_variable}="$(cat {shlex.quote(str(command.spec))})"')
    print("".join(f"{line}\n" for line in shown["submission"]["commands"]), end="")


def _require_only_written(options: argparse.Namespace) -> None:
    """Refuses options that only who starts and follows a run can honour."""
    for name, left_out in (("--port", None), ("--max-restarts", 0), ("--ranks", (0,))):
        if getattr(options, name.strip("-").replace("-", "_")) != left_out:
            raise PlanError(
                f"{name}: it is for who starts a run and follows it; --dry-run does neither. Leave it out."
            )


def _resume(spec: TrainingSpec, directory: RunDirectory, asked: str | None) -> str | None:
    """From which checkpoint the ranks are told to go on; which is the newest, is seen when they start."""
    from isotrain.core.run.start import AUTO, starting_checkpoint
    from isotrain.core.system.files import is_url

    if asked == AUTO:
        return AUTO
    found = starting_checkpoint(spec, directory, asked)
    if found is None:
        return None
    return found.location if is_url(found.location) else str(Path(found.location).absolute())


def submission_preview(spec: TrainingSpec, plan: Plan) -> dict[str, Any]:
    """What a run by this plan would give to its engine, without a key; nothing where there is no engine."""
    if _scheduler_launcher(spec, plan) is None:
        return {}
    directory = Path("runs").absolute() / f"{spec.name}-TIME"
    submission, command = _submission(spec, plan, directory, key="KEY")
    return _plain(submission, command)


def _scheduler_launcher(spec: TrainingSpec, plan: Plan) -> SchedulerLauncher | None:
    from isotrain.core.launching.scheduler.scheduler_launcher import SchedulerLauncher

    found = plugin_manager(spec.plugins).launcher(plan.launcher, plan.launcher_options)
    return found if isinstance(found, SchedulerLauncher) else None


def _submission(
    spec: TrainingSpec,
    plan: Plan,
    directory: Path,
    resume: str | None = None,
    key: str | None = None,
    interface: str | None = None,
) -> tuple[Submission, RankCommand]:
    from dataclasses import replace

    from isotrain.core.launching.scheduler.scheduler_run import rank_command

    launcher = _scheduler_launcher(spec, plan)
    assert launcher is not None
    plugins = selection.for_workers(selection.current())
    command = rank_command(spec, plan, plugins, directory, resume, interface)
    command = command if key is None else replace(command, key=key)
    return launcher.submission(command), command


def _plain(submission: Submission, command: RankCommand) -> dict[str, Any]:
    commands = [shlex.join(each) for each in submission.commands]
    files = {str(command.spec.with_name(name)): text for name, text in submission.files.items()}
    return {"submission": {"commands": commands, "files": files}}
