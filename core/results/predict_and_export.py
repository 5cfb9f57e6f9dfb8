"""Prediction with a trained model, and its export to other formats."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isotrain.core.checkpoints.safetensors_file import write_safetensors
from isotrain.core.checkpoints.tensor_part import TensorPart
from isotrain.core.contracts.backend.group_protocols import ExportingGroup
from isotrain.core.contracts.state import FORMS, SUFFIXES, ExportForm
from isotrain.core.data.dataset import DataSet
from isotrain.core.errors import (
    IsotrainError,
    SpecError,
    UnsupportedError,
    first_of,
    unknown_name,
)
from isotrain.core.launching.probe_run import probe_run
from isotrain.core.planning.cluster_environment import detect_cluster_info
from isotrain.core.plugins.manager import PluginManager, plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.reporting.status import noting_interrupt, waiting
from isotrain.core.results.trained_model import RunLike, TrainedModel
from isotrain.core.session.training.dataloaders import load_dataset
from isotrain.core.session.weights.weight_readers import portions, stored_weights
from isotrain.core.spec.initial_weights import is_selected, matches, patterns_of
from isotrain.core.spec.loading import SpecLike
from isotrain.core.system.files import removed_on_failure

if TYPE_CHECKING:
    from isotrain.core.session.session import Session


_SAVED_MODEL_FILE = "saved_model.pb"
_INTERRUPTED = (
    "Nothing was written, and the run is as it was. To start again, use the same command."
)
_MAX_NAMES = 10
"""Number of weights that an error names."""


def form_of(target: Path, requested: ExportForm | None) -> ExportForm:
    """The export form: the requested one, else the one of the target's suffix.

    Raises:
        IsotrainError: The form is unknown, or the target's suffix does not fit it.
    """
    if requested is None:
        forms = [form for form in FORMS if SUFFIXES[form] and target.name.endswith(SUFFIXES[form])]
        if not forms:
            raise IsotrainError(
                f"export: the name of {target} does not say the form. Give to= (--to): one of"
                f" {', '.join(FORMS)}."
            )
        return forms[0]
    if requested not in FORMS:
        raise IsotrainError(f"export: {unknown_name('form', requested, FORMS)}")
    suffixes = SUFFIXES[requested]
    if suffixes and not target.name.endswith(suffixes):
        raise IsotrainError(
            f"export: {requested!r} is written to a file {' or '.join(suffixes)}, received {target}."
        )
    return requested


@contextlib.contextmanager
def atomically_replaced(target: Path) -> Iterator[Path]:
    """Yields a temporary path beside the target, which replaces the target if the block succeeds.

    An existing target is removed; a folder only if it is empty or holds a SavedModel. Missing parent folders
    are created.

    Raises:
        IsotrainError: The parent folder cannot be created or written to, or the target is a folder with
            other content.
    """
    path = target.resolve()
    if path.is_dir() and any(path.iterdir()) and not (path / _SAVED_MODEL_FILE).is_file():
        raise IsotrainError(
            f"export: {target} is a folder with other things than a SavedModel, which would be lost. Choose"
            " another name."
        )
    try:
        with removed_on_failure(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as folder:
                new = Path(folder) / path.name
                yield new
                if path.is_dir() and new.is_dir():
                    path.rename(Path(folder) / "before")
                new.replace(path)
    except OSError as error:
        reason = error.strerror or error  # without the name of the temporary file
        raise IsotrainError(
            f"export: {target} cannot be written: {reason}. Choose another place."
        ) from error


def predict(
    run: RunLike,
    data: Any,
    *,
    spec: SpecLike | None = None,
    backend: str | None = None,
    replicas: int | None = None,
    quiet: bool = False,
) -> Any:
    """Predicts with a trained model, with one or several replicas, in worker processes.

    If a launcher has started this process together with others, each of them computes all predictions on its
    own host.

    Args:
        run: `RunResult`, directory of a run, or checkpoint; see `RunLike`.
        data: Data to predict for, in any form that a spec's `data` has; of a `DataSet` the validation part
            if it has one. Targets are ignored.
        spec: Spec of the run, or directory of the run. Needed for a checkpoint, whose origin is not trusted,
            and where the run directory does not name the model's function.
        backend: `NAME` or `NAME:COLLECTIVE`; the run's when left out.
        replicas: Number of replicas; one per available GPU, or one, when left out. The result is the same.
        quiet: Whether to show nothing meanwhile, also in a terminal or notebook.

    Returns:
        A NumPy array of shape `[samples, ...]` in the order of the samples; or, for a model with several
        outputs, such arrays in a dict or list.

    Raises:
        IsotrainError: The run has no weights.
        SpecError: The function of the model cannot be found.
        RunFailedError: A worker process failed; the message says which, on which host, and why.
    """
    trained = TrainedModel.of(run, spec)
    predict_spec = trained.spec(functools.partial(_prediction_data, data))
    work = functools.partial(_predict, weights=trained.location)
    resolved_spec = ResolvedSpec(predict_spec, plugin_manager(predict_spec.plugins))
    with waiting("predicting", quiet=quiet), noting_interrupt(_INTERRUPTED):
        return probe_run(work, resolved_spec, backend or trained.backend, replicas)


def evaluate(
    run: RunLike,
    data: Any = None,
    *,
    metrics: Any = None,
    metrics_over_all: Mapping[str, Any] | None = None,
    spec: SpecLike | None = None,
    backend: str | None = None,
    replicas: int | None = None,
    quiet: bool = False,
) -> dict[str, float]:
    """Evaluates a trained model, with one or several replicas, in worker processes.

    Args:
        run: `RunResult`, directory of a run, or checkpoint; see `RunLike`.
        data: Data to evaluate on, in any form that a spec's `data` has; of a `DataSet` the validation part
            if it has one. The run's validation data when left out.
        metrics: Metrics as in a spec, in place of the run's.
        metrics_over_all: Metrics of all samples at once as in a spec, in place of the run's.
        spec: Spec of the run, or directory of the run; needed as for `predict`.
        backend: `NAME` or `NAME:COLLECTIVE`; the run's when left out.
        replicas: Number of replicas; one per available GPU, or one, when left out. The result is the same.
        quiet: Whether to show nothing meanwhile, also in a terminal or notebook.

    Returns:
        `loss` and each metric by name, exact means over all samples. With named updates `loss` is the sum of
        theirs, and their own losses and metrics have their names: `critic_loss`.

    Raises:
        IsotrainError: The run has no weights.
        SpecError: The functions of model, loss or data cannot be found.
        RunFailedError: A worker process failed; the message says which, on which host, and why.
    """
    trained = TrainedModel.of(run, spec)
    changes = {"metrics": metrics, "metrics_over_all": metrics_over_all}
    evaluation_spec = trained.evaluation_spec(
        None if data is None else functools.partial(_prediction_data, data),
        {name: value for name, value in changes.items() if value is not None},
    )
    work = functools.partial(_evaluate, weights=trained.location)
    resolved_spec = ResolvedSpec(evaluation_spec, plugin_manager(evaluation_spec.plugins))
    with waiting("evaluating", quiet=quiet), noting_interrupt(_INTERRUPTED):
        returned = probe_run(work, resolved_spec, backend or trained.backend, replicas)
    return dict(returned)


def export(
    run: RunLike,
    output: str | os.PathLike[str],
    *,
    to: ExportForm | None = None,
    spec: SpecLike | None = None,
    data: Any = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    quiet: bool = False,
) -> Path:
    """Exports a trained model to a format that needs no isotrain, in a worker process.

    If a launcher has started this process together with others, rank 0 exports and the others return at once.

    Args:
        run: `RunResult`, directory of a run, or checkpoint; see `RunLike`.
        output: Path of the file to write, for `saved-model` of the folder; replaced if it exists.
        to: Export form; see `ExportForm`. Left out: the one of the output's suffix.
        spec: Spec of the run, or directory of the run; needed as for `predict`.
        data: Samples with the shapes and dtypes of the inputs, for a native model exported to ONNX or a
            SavedModel; the run's training data when left out.
        include: Patterns of the names of the weights to write, such as `*lora_*`; all when left out. For
            safetensors only.
        exclude: Patterns of the names of weights not to write.
        quiet: Whether to show nothing meanwhile, also in a terminal or notebook.

    Returns:
        Path of the output; on ranks above 0 it may not be written yet.

    Raises:
        IsotrainError: The run has no weights, or the output cannot be written.
        SpecError: The patterns select no weight.
        UnsupportedError: The model does not have that form, no installed backend writes it, or it cannot
            have a part of the weights.
        RunFailedError: The worker process failed; the message says on which host and why.
    """
    path, cluster_info = Path(output), detect_cluster_info()
    if cluster_info is not None and cluster_info.rank:
        return path
    trained = TrainedModel.of(run, spec)
    form = form_of(path, to)
    if form == "safetensors":
        with atomically_replaced(path) as new:
            _write_safetensors(trained.location, new, patterns_of(include), patterns_of(exclude))
        return path
    if include or exclude:
        raise UnsupportedError(
            f"export: {form} holds the whole model. Export a part of the weights (include, exclude) as"
            " safetensors."
        )
    samples = trained.data if data is None else (data, {})
    if form not in _TRACED_FORMS:
        samples = None
    export_spec = trained.spec(functools.partial(_sample_data, samples)).replace(
        global_batch_size=2
    )
    host = plugin_manager(export_spec.plugins)
    with (
        noting_interrupt(_INTERRUPTED),
        atomically_replaced(path) as new,
        waiting("exporting", quiet=quiet),
    ):
        work = functools.partial(
            _export,
            weights=trained.location,
            form=form,
            target=str(new),
            has_samples=samples is not None,
        )
        probe_run(work, ResolvedSpec(export_spec, host), _export_backend(trained, form, host))
    return path


def _write_safetensors(
    location: str, target: Path, include: Sequence[str], exclude: Sequence[str]
) -> None:
    """Writes the weights whose names `include` matches, all if it is empty, and `exclude` does not.

    Raises:
        SpecError: A pattern of `include` matches no weight, or none is left.
    """
    weights = stored_weights(location)
    unmatched = [p for p in include if not any(matches(name, (p,)) for name in weights)]
    names = [name for name in weights if is_selected(name, include, exclude)]
    if unmatched or not names:
        raise SpecError(
            f"export: {', '.join(map(repr, unmatched)) or 'include and exclude'} matches none of the weights,"
            f" which are {first_of([*weights], _MAX_NAMES)}."
        )
    write_safetensors(
        target, {name: TensorPart(weights[name], weights.dtypes[name]) for name in names}
    )


_TRACED_FORMS: tuple[ExportForm, ...] = ("onnx", "saved-model")
"""Forms for which native models are traced with sample inputs."""


def _export_backend(trained: TrainedModel, form: ExportForm, host: PluginManager) -> str:
    """Name of a backend that writes the form: the run's, or one for which the spec has the same model.

    Raises:
        UnsupportedError: No available backend does.
    """
    names = sorted(host.backends.names(), key=lambda name: name != trained.backend)
    writers = [name for name in names if form in host.backend(name).exports]
    model = trained.model
    if isinstance(model, Mapping):  # another framework's model may have other weights
        framework = host.backend(trained.backend).framework
        same = {name for name, each in model.items() if each == model.get(framework)}
        writers = [name for name in writers if host.backend(name).framework in same]
    for name in writers:
        if host.backend(name).availability().available:
            return name
    raise UnsupportedError(
        f"export: no backend that is available here writes this model as {form!r}. Supported by:"
        f" {', '.join(writers) or 'none'}."
    )


def _sample_data(data: tuple[Any, Mapping[str, Any]] | None) -> DataSet:
    """A data set with the sample inputs, and its `data_args`; shape [1, 1] for None."""
    if data is None:
        return DataSet((np.zeros((1, 1), np.float32),))
    return DataSet(load_dataset(*data).train)


def _load_weights(session: Session, location: str) -> None:
    """Sets all weights of the model.

    Raises:
        IsotrainError: The run has no weight of a name: it trained a different model.
    """
    stored = stored_weights(location)
    needed = session.group.describe_state(("trainable", "non-trainable"))
    missing = [name for name in needed if name not in stored]
    if missing:
        raise IsotrainError(
            f"{location}: it has no weights for {len(missing)} of {len(needed)} names of this model,"
            f" {missing[0]!r} first. Was the model changed since the run?"
        )
    for portion in portions(needed, lambda name: needed[name].full_nbytes):
        session.write_state({name: stored[name] for name in portion})


def _export(
    session: Session, weights: str, form: ExportForm, target: str, has_samples: bool
) -> None:
    """Exports the model in a worker process."""
    _load_weights(session, weights)
    inputs = next(session.batches()).slices[0][0].inputs if has_samples else None
    if not isinstance(session.group, ExportingGroup):
        raise UnsupportedError(f"export: backend {session.plan.backend!r} writes no {form}.")
    session.group.export(form, Path(target), inputs)


def _prediction_data(data: Any) -> DataSet:
    """A data set whose validation part is the data to predict for."""
    dataset = load_dataset(data, {})
    validation = dataset.train if dataset.validation is None else dataset.validation
    return DataSet(dataset.train, validation)


def _evaluate(session: Session, weights: str) -> dict[str, float]:
    """Evaluates in a worker process. Collective."""
    _load_weights(session, weights)
    return session.evaluate()


def _predict(session: Session, weights: str) -> Any:
    """Predicts in a worker process; returns the predictions on rank 0, None on the others. Collective."""
    _load_weights(session, weights)
    if session.is_main:
        return session.predict()
    for _ in session.predictions():
        pass
    return None
