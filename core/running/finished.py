"""What is done with a model after its run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotrain.core.data.batches import DataSet
from isotrain.core.launching.look import look
from isotrain.core.plugins.host import plugin_host
from isotrain.core.running.data_loading import loaded
from isotrain.core.running.trained import RunLike, Trained
from isotrain.core.running.weights_file import read_weights
from isotrain.core.spec.files import Source

if TYPE_CHECKING:
    from isotrain.core.running.session import Session


def predict(
    run: RunLike,
    data: Any,
    *,
    spec: Source | None = None,
    backend: str | None = None,
    replicas: int | None = None,
) -> Any:
    """Predicts with a trained model, over replicas, in processes of its own.

    Args:
        run: A `RunResult`, or the directory of a finished run.
        data: What to predict for, in any form that a spec's `data` has; of a `DataSet` its validation part
            if it has one. Targets are ignored.
        spec: What was run; needed where the run directory cannot say which function made the model.
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
    trained = Trained.of(run, spec)
    wanted = trained.spec(functools.partial(_to_predict_for, data))
    work = functools.partial(_predict, weights=str(trained.weights.resolve()))
    host = plugin_host(wanted.plugins)
    return look(work, wanted, backend or trained.backend, host, replicas)


def _to_predict_for(data: Any) -> DataSet:
    found = loaded(data, {})
    return DataSet(found.train, found.train if found.validation is None else found.validation)


def _predict(session: Session, weights: str) -> Any:
    """What every process does; rank 0 alone keeps what comes of it."""
    session.write_state(read_weights(Path(weights)))
    if session.is_main:
        return session.predict()
    for _ in session.predictions():
        pass
    return None
