"""What is done with a model after its run."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isotrain.core.checkpoints.parts import TensorPart
from isotrain.core.checkpoints.safetensors_file import write_safetensors
from isotrain.core.contracts.export import ExportForm
from isotrain.core.data.dataset import DataSet
from isotrain.core.errors import IsotrainError, UnsupportedError
from isotrain.core.launching.look import probe_run
from isotrain.core.planning.own_place import detect_cluster_info
from isotrain.core.plugins.cast import ResolvedSpec
from isotrain.core.plugins.host import PluginManager, plugin_manager
from isotrain.core.running.data_loading import load_dataset
from isotrain.core.running.portions import portions
from isotrain.core.running.targets import form_of, atomically_replaced
from isotrain.core.running.trained import RunLike, TrainedModel
from isotrain.core.running.weight_sources import stored_weights
from isotrain.core.spec.files import SpecLike

if TYPE_CHECKING:
    from isotrain.core.running.session import Session


def predict(
    run: RunLike,
    data: Any,
    *,
    spec: SpecLike | None = None,
    backend: str | None = None,
    replicas: int | None = None,
) -> Any:
    """Predicts with a trained model, over replicas, in processes of its own.

    Where an engine has started this process with others, each does all of it for itself, on its own host.

    Args:
        run: A `RunResult`, or the directory of a run, or a checkpoint; see `RunLike`.
        data: What to predict for, in any form that a spec's `data` has; of a `DataSet` its validation part
            if it has one. Targets are ignored.
        spec: What was run, or the directory of that run; needed for a checkpoint, which may come from
            anywhere, and where the run directory cannot say which function made the model.
        backend: `NAME` or `NAME:COLLECTIVE`; left out: the run's.
        replicas: How many; left out: one per usable GPU, or one. The result is the same.

    Returns:
        A NumPy array of shape `[samples, ...]` in the order of the samples; or, for a model with several
        outputs, such arrays in a dict or list.

    Raises:
        IsotrainError: The run has left no weights.
        SpecError: The model function cannot be found again.
        RunFailedError: A process failed; tells which, where and why.
    """
    trained = TrainedModel.of(run, spec)
    wanted = trained.spec(functools.partial(_to_predict_for, data))
    work = functools.partial(_predict, weights=trained.location)
    cast = ResolvedSpec(wanted, plugin_manager(wanted.plugins))
    return probe_run(work, cast, backend or trained.backend, replicas)


def export(
    run: RunLike,
    target: str | os.PathLike[str],
    *,
    to: ExportForm | None = None,
    spec: SpecLike | None = None,
    data: Any = None,
) -> Path:
    """Writes a trained model in a form that others open without isotrain, in a process of its own.

    Where an engine has started this process with others, rank 0 does it, and the others go on at once.

    Args:
        run: A `RunResult`, or the directory of a run, or a checkpoint; see `RunLike`.
        target: The file to write, for `saved-model` the folder; one that is there is replaced.
        to: The form; see `ExportForm`. Left out: what the name of `target` says.
        spec: As for `predict`.
        data: Samples that show what the inputs are like, for a native model `to` ONNX or a SavedModel; left
            out: the data that the run trained on.

    Returns:
        The path of what is written; on ranks above 0 perhaps before it is there.

    Raises:
        IsotrainError: The run has left no weights, or the target cannot be written.
        UnsupportedError: The model has no such form, or no backend that is installed writes it.
        RunFailedError: The process failed; tells where and why.
    """
    place, own = Path(target), detect_cluster_info()
    if own is not None and own.rank:
        return place
    trained = TrainedModel.of(run, spec)
    form = form_of(place, to)
    if form == "safetensors":
        with atomically_replaced(place) as new:
            _write_safetensors(trained.location, new)
        return place
    samples = trained.data if data is None else (data, {})
    known = samples if form in _BY_SAMPLES else None
    wanted = trained.spec(functools.partial(_samples, known)).replace(global_batch_size=2)
    host = plugin_manager(wanted.plugins)
    with atomically_replaced(place) as new:
        work = functools.partial(
            _export,
            weights=trained.location,
            form=form,
            target=str(new),
            known=known is not None,
        )
        probe_run(work, ResolvedSpec(wanted, host), _writer(trained, form, host))
    return place


def _write_safetensors(location: str, target: Path) -> None:
    weights = stored_weights(location)
    parts = {name: TensorPart(array, weights.dtypes[name]) for name, array in weights.items()}
    write_safetensors(target, parts)


_BY_SAMPLES: tuple[ExportForm, ...] = ("onnx", "saved-model")
"""Forms for which some models must be shown what their inputs are like."""


def _writer(trained: TrainedModel, form: ExportForm, host: PluginManager) -> str:
    """A backend that writes the form: the run's own, or one for which the spec has the same model.

    Raises:
        UnsupportedError: There is none.
    """
    names = sorted(host.backends.names(), key=lambda name: name != trained.backend)
    writers = [name for name in names if form in host.backend(name).exports]
    model = trained.model
    if isinstance(model, Mapping):  # another framework's model may have other weights
        own = host.backend(trained.backend).framework
        same = {name for name, each in model.items() if each == model.get(own)}
        writers = [name for name in writers if host.backend(name).framework in same]
    for name in writers:
        if host.backend(name).availability().available:
            return name
    raise UnsupportedError(
        f"export: no backend that is usable here writes this model as {form!r}. Known for it:"
        f" {', '.join(writers) or 'none'}."
    )


def _samples(found: tuple[Any, Mapping[str, Any]] | None) -> DataSet:
    """The data whose inputs are looked at; None for a place-holder."""
    if found is None:
        return DataSet((np.zeros((1, 1), np.float32),))
    return DataSet(load_dataset(*found).train)


def _take(session: Session, location: str) -> None:
    """Sets all weights of the model.

    Raises:
        IsotrainError: The run has left none for one of them: the model is not the one that it trained.
    """
    stored = stored_weights(location)
    needed = session.group.describe_state(("trainable", "non-trainable"))
    missing = [name for name in needed if name not in stored]
    if missing:
        raise IsotrainError(
            f"{location}: it has no weights for {len(missing)} of {len(needed)} names of this model,"
            f" {missing[0]!r} first. Was the model changed since the run?"
        )
    for portion in portions(needed, lambda name: needed[name].whole_bytes):
        session.write_state({name: stored[name] for name in portion})


def _export(session: Session, weights: str, form: ExportForm, target: str, known: bool) -> None:
    _take(session, weights)
    inputs = next(session.batches()).slices[0][0].inputs if known else None
    session.group.export(form, Path(target), inputs)


def _to_predict_for(data: Any) -> DataSet:
    found = load_dataset(data, {})
    return DataSet(found.train, found.train if found.validation is None else found.validation)


def _predict(session: Session, weights: str) -> Any:
    """What every process does; rank 0 alone keeps what comes of it."""
    _take(session, weights)
    if session.is_main:
        return session.predict()
    for _ in session.predictions():
        pass
    return None
