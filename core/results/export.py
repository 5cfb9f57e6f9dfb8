"""What is done with a model after its run."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isotrain.core.checkpoints.safetensors_file import write_safetensors
from isotrain.core.checkpoints.tensor_part import TensorPart
from isotrain.core.contracts.state import FORMS, SUFFIXES, ExportForm
from isotrain.core.data.dataset import DataSet
from isotrain.core.errors import IsotrainError, UnsupportedError, unknown_name
from isotrain.core.launching.probe_run import probe_run
from isotrain.core.planning.cluster_environment import detect_cluster_info
from isotrain.core.plugins.manager import PluginManager, plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.results.trained_model import RunLike, TrainedModel
from isotrain.core.session.training.dataloaders import load_dataset
from isotrain.core.session.weights.weight_readers import portions, stored_weights
from isotrain.core.spec.loading import SpecLike
from isotrain.core.system.files import removed_on_failure

if TYPE_CHECKING:
    from isotrain.core.session.session import Session


_OF_SAVED_MODEL = "saved_model.pb"


def form_of(target: Path, asked: ExportForm | None) -> ExportForm:
    """The form that is asked for, or that the name of a target says.

    Raises:
        IsotrainError: There is none of that name, or the target is not named as its files are.
    """
    if asked is None:
        found = [form for form in FORMS if SUFFIXES[form] and target.name.endswith(SUFFIXES[form])]
        if not found:
            raise IsotrainError(
                f"export: the name of {target} does not say the form. Give to= (--to): one of"
                f" {', '.join(FORMS)}."
            )
        return found[0]
    if asked not in FORMS:
        raise IsotrainError(f"export: {unknown_name('form', asked, FORMS)}")
    suffixes = SUFFIXES[asked]
    if suffixes and not target.name.endswith(suffixes):
        raise IsotrainError(
            f"export: {asked!r} is written to a file {' or '.join(suffixes)}, received {target}."
        )
    return asked


@contextlib.contextmanager
def atomically_replaced(target: Path) -> Iterator[Path]:
    """Gives a place of the same name beside a target, which takes that place if all went well.

    What was there before is removed after that; a folder only if it is empty or holds a SavedModel. The
    target's own folder is made if need be.

    Raises:
        IsotrainError: The folder cannot be made or written to, or the target is of another kind.
    """
    place = target.resolve()
    if place.is_dir() and any(place.iterdir()) and not (place / _OF_SAVED_MODEL).is_file():
        raise IsotrainError(
            f"export: {target} is a folder with other things than a SavedModel, which would be lost. Choose"
            " another name."
        )
    try:
        with removed_on_failure(place.parent):
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".export-", dir=place.parent) as folder:
                new = Path(folder) / place.name
                yield new
                if place.is_dir() and new.is_dir():
                    place.rename(Path(folder) / "before")
                new.replace(place)
    except OSError as error:
        reason = error.strerror or error  # without the name of a file that nobody has asked for
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
    for portion in portions(needed, lambda name: needed[name].full_nbytes):
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
