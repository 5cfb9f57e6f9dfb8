"""What a person calls from Python: run, launch, open_session, plan."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from isotrain.core.contracts.events import OnPlainEvent, RunFailed
from isotrain.core.contracts.job import Work
from isotrain.core.contracts.launcher import LOCAL, LauncherChoice
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.process import LOCALHOST, Peer, ProcessContext
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.contracts.state import ModelBytes
from isotrain.core.data.refusals import LOSS, RefusedError
from isotrain.core.errors import PlanError, RunFailedError, UnsupportedError
from isotrain.core.launching.probe_run import probe_run
from isotrain.core.launching.run_directory.run_directory import PLAN_FILE, RESULT_FILE
from isotrain.core.pipeline.profile import LayerCost
from isotrain.core.planning.cluster_environment import claim, detect_cluster_info
from isotrain.core.planning.model_stats import ModelStats, complete_plan
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.results.result import RunResult, result_from_dict
from isotrain.core.run.controller import RunRequest
from isotrain.core.run.start import PreviousRun
from isotrain.core.session.weights.weights_file import WEIGHTS_FILE
from isotrain.core.spec.loading import SpecLike, load_spec
from isotrain.core.spec.sections import StrategyLike
from isotrain.core.system.process import environ_set
from isotrain.core.worker.entry_points import LOST_WEIGHTS, measure_model, train

if TYPE_CHECKING:
    from isotrain.core.session.session import Session


def run(
    spec: SpecLike,
    *,
    backend: str,
    replicas: int | None = None,
    run_directory: str | os.PathLike[str] | None = None,
    on_event: OnPlainEvent | None = None,
    port: int | None = None,
    launcher: str = LOCAL,
    launcher_options: Mapping[str, Any] | None = None,
    resume: str | os.PathLike[str] | None = None,
    max_restarts: int = 0,
    ranks: Sequence[int] | Literal["all"] = (0,),
    interface: str | None = None,
) -> RunResult:
    """Trains a spec under a backend, in processes of its own on this machine.

    Args:
        spec: A `TrainingSpec`, a mapping of its fields, or a YAML, TOML or JSON file.
        backend: `NAME` or `NAME:COLLECTIVE`, such as `tf-multiworker:ring`.
        replicas: How many; left out: one per usable GPU, or one.
        run_directory: An empty or new folder for the run's files; left out: `runs/<name>-<time>`.
        on_event: Called with each event of the run as it happens; left out: a progress display.
        port: The first port that the backend may use; left out: free ones are found.
        launcher: What starts the processes; `local` starts them on this machine.
        launcher_options: The launcher's options, such as `{"hosts": "node1:2,node2:2"}`.
        resume: A checkpoint, a folder or URL of them, or a run directory, of which the newest is taken;
            `auto`: the newest of this very run directory or checkpoint folder, if it has one.
        max_restarts: How often the run may start again from its last checkpoint after a failure.
        ranks: Whose output is shown; that of all is in the run directory.
        interface: The network interface, by its name or address, over which processes on several hosts
            talk; left out: `ISOTRAIN_INTERFACE`, else the one over which each host reaches rank 0.

    Returns:
        History, metrics, timings, final weights, and where the run's files are.

    Raises:
        SpecError: The spec is wrong.
        PlanError: Spec, backend and replicas do not fit together.
        RunFailedError: A process failed; tells which, where and why.
    """
    chosen = LauncherChoice(launcher, launcher_options or {})
    asked = RunRequest(
        spec=spec,
        backend=backend,
        replicas=replicas,
        launcher=chosen,
        run_directory=run_directory,
        on_event=on_event,
        port=port,
        resume=resume,
        max_restarts=max_restarts,
        ranks=ranks,
        interface=interface,
    )
    with asked.execute(train) as ended:
        told = dict(ended.returned[0])
        lost = told.pop(LOST_WEIGHTS, None)  # where isotrain ran elsewhere, it has failed there
        result = result_from_dict({**told, "restarts": ended.restarts}, ended.directory.path)
        if ended.dispatcher is not None:
            ended.keep({PLAN_FILE: result.plan, RESULT_FILE: result.to_dict()}, result)
            ended.dispatcher.result = result.to_dict()
        if lost is not None:
            target = ended.directory.path / WEIGHTS_FILE
            words = f"all steps were taken, but {target} could not be written: {lost}. All else is there."
            if ended.dispatcher is not None:
                with contextlib.suppress(OSError):  # the failure itself is what has to be told
                    ended.directory.append_event(RunFailed(time=time.time(), message=words))
            failure = RunFailedError(words)
            failure.result = result
            raise failure
    return result


def launch(
    work: Work,
    spec: SpecLike,
    *,
    backend: str,
    replicas: int | None = None,
    run_directory: str | os.PathLike[str] | None = None,
    on_event: OnPlainEvent | None = None,
    port: int | None = None,
    launcher: str = LOCAL,
    launcher_options: Mapping[str, Any] | None = None,
    resume: str | os.PathLike[str] | None = None,
    max_restarts: int = 0,
    ranks: Sequence[int] | Literal["all"] = (0,),
    interface: str | None = None,
) -> list[Any]:
    """Runs your own training loop on every process of a run.

    Args:
        work: `work(session)`; see `Session`. It may be defined in the script that calls this.
        spec: As for `run`.
        backend: As for `run`.
        replicas: As for `run`.
        run_directory: As for `run`.
        on_event: As for `run`.
        port: As for `run`.
        launcher: As for `run`.
        launcher_options: As for `run`.
        resume: As for `run`: the session has gone on from the checkpoint when `work` gets it.
        max_restarts: As for `run`.
        ranks: As for `run`.
        interface: As for `run`.

    Returns:
        What `work` returned on each process, by rank: numbers, text, NumPy arrays, and lists and
        dicts of these.

    Raises:
        SpecError: The spec is wrong.
        PlanError: Spec, backend and replicas do not fit together.
        RunFailedError: A process failed; tells which, where and why.
    """
    chosen = LauncherChoice(launcher, launcher_options or {})
    asked = RunRequest(
        spec=spec,
        backend=backend,
        replicas=replicas,
        launcher=chosen,
        run_directory=run_directory,
        on_event=on_event,
        port=port,
        resume=resume,
        max_restarts=max_restarts,
        ranks=ranks,
        interface=interface,
    )
    with asked.execute(work) as ended:
        ended.keep({}, ended.returned)
        return ended.returned


def resume(
    run_directory: str | os.PathLike[str],
    *,
    spec: SpecLike | None = None,
    overrides: Sequence[str] = (),
    strategy: StrategyLike | None = None,
    backend: str | None = None,
    replicas: int | None = None,
    on_event: OnPlainEvent | None = None,
    port: int | None = None,
    launcher: str | None = None,
    launcher_options: Mapping[str, Any] | None = None,
    max_restarts: int = 0,
    ranks: Sequence[int] | Literal["all"] = (0,),
    interface: str | None = None,
) -> RunResult:
    """Goes on with a run of `run` in its own directory, from its newest checkpoint.

    Args:
        run_directory: Of the run.
        spec: What to train, where it is to differ or holds functions that no file can name; left out: the
            run's own, which `spec.json` has.
        overrides: Changes of it, as `load_spec` takes them: `["epochs=20"]`.
        strategy: In the place of its own, as `load_spec` takes it.
        backend: As for `run`; left out: the run's own.
        replicas: As for `run`; left out: the run's own number.
        on_event: As for `run`.
        port: As for `run`.
        launcher: As for `run`; left out: the run's own, with its options.
        launcher_options: As for `run`; with the run's own launcher, those of its options that change.
        max_restarts: As for `run`.
        ranks: As for `run`.
        interface: As for `run`.

    Raises:
        SpecError: The spec is wrong, or names what cannot be imported.
        PlanError: There is no such run, or none that can go on like this.
        IsotrainError: It has no checkpoint, or means something else than the run did.
        RunFailedError: A process failed; tells which, where and why.
    """
    before = PreviousRun.of(run_directory)
    own = load_spec(before.spec if spec is None else spec, overrides, strategy=strategy)
    chosen = LauncherChoice(launcher or LOCAL, launcher_options or {})
    if launcher is None and detect_cluster_info() is None:
        options = {**before.launcher.options, **chosen.options}
        chosen = LauncherChoice(before.launcher.name, options)
    return run(
        own,
        backend=backend or before.backend,
        replicas=replicas or before.replicas,
        run_directory=before.directory,
        on_event=on_event,
        port=port,
        launcher=chosen.name,
        launcher_options=chosen.options,
        resume=before.newest_folder(own),
        max_restarts=max_restarts,
        ranks=ranks,
        interface=interface,
    )


def open_session(spec: SpecLike, *, backend: str, replicas: int | None = None) -> Session:
    """Opens a session in this very process, for a loop of your own or a notebook cell.

    Works for every run that is one process: any backend with one replica, and backends that hold
    several replicas in one process. Use it in a `with` statement. For several processes, put your
    loop into a function and give it to `launch`.

    Args:
        spec: As for `run`.
        backend: As for `run`.
        replicas: As for `run`.

    Raises:
        UnsupportedError: An engine has started this process with others.
        PlanError: The run needs several processes, or Keras already runs on another framework here.
    """
    from isotrain.core.session.session import Session

    place = detect_cluster_info()
    if place is not None:
        raise UnsupportedError(
            f"open_session: {place.environment} has started {place.world_size} processes, and a"
            " session that is"
            " opened does not join them. Put the loop into a function and call isotrain.launch(function,"
            f" spec, backend=...), which does. {claim(place)}"
        )
    given = load_spec(spec)
    cast = ResolvedSpec(given, plugin_manager(given.plugins))
    plan = make_plan(cast, backend=backend, replicas=replicas)
    if len(plan.processes) > 1:
        raise PlanError(
            f"{plan.backend!r} with {plan.replicas} replicas takes {len(plan.processes)} processes,"
            " and open_session has this one. Put the loop into a function and call"
            " isotrain.launch(function, spec, backend=..., replicas=...)."
        )
    process = plan.processes[0]
    own = Peer(0, LOCALHOST, LOCALHOST, 0, 0, process.replicas)
    context = ProcessContext(
        0, plan.replicas, tempfile.gettempdir(), (own,), device_mesh=plan.device_mesh
    )
    with environ_set(plan.environment_variables):
        return Session(cast, plan, context, Reporter())


def plan(
    spec: SpecLike,
    *,
    backend: str,
    replicas: int | None = None,
    launcher: str = LOCAL,
    launcher_options: Mapping[str, Any] | None = None,
) -> Plan:
    """Resolves a run without starting it.

    Args:
        spec: As for `run`.
        backend: As for `run`.
        replicas: As for `run`.
        launcher: As for `run`.
        launcher_options: As for `run`.

    Raises:
        PlanError: Spec, backend and replicas do not fit together.
    """
    given = load_spec(spec)
    cast = ResolvedSpec(given, plugin_manager(given.plugins))
    chosen = LauncherChoice(launcher, launcher_options or {})
    return make_plan(cast, backend=backend, replicas=replicas, launcher=chosen)


def measured_plan(
    spec: SpecLike,
    *,
    backend: str,
    replicas: int | None = None,
    launcher: str = LOCAL,
    launcher_options: Mapping[str, Any] | None = None,
) -> Plan:
    """As `plan`, completed with the numbers of samples, parameters and exchanged bytes.

    The data is loaded and the model built for that, with one replica, in a process of its own.

    Args:
        spec: As for `run`.
        backend: As for `run`.
        replicas: As for `run`.
        launcher: As for `run`.
        launcher_options: As for `run`.

    Raises:
        SpecError: The loss or the transform fits one replica only.
    """
    given = load_spec(spec)
    cast = ResolvedSpec(given, plugin_manager(given.plugins))
    chosen = LauncherChoice(launcher, launcher_options or {})
    wanted = make_plan(cast, backend=backend, replicas=replicas, launcher=chosen)
    found = probe_run(measure_model, cast, wanted.backend)
    for code, detail in found.pop("refused").items():
        is_divided = wanted.replicas > 1 or (code == LOSS and given.gradient_accumulation_steps > 1)
        if is_divided and not given.silences(code):
            raise RefusedError(code, detail)
    layers = [LayerCost(**layer) for layer in found["layers"]]
    measured = ModelStats(**{**found, "model": ModelBytes(**found["model"]), "layers": layers})
    return complete_plan(wanted, cast, measured)
