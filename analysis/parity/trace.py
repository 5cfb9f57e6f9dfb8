"""The work of every process of a traced run: training steps whose tensors are fingerprinted."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from isotrain.analysis.parity.records import Stage
from isotrain.core.contracts.backend.group_protocols import GradientKeepingGroup
from isotrain.core.contracts.job import InternalWork
from isotrain.core.errors import PlanError
from isotrain.core.spec.weight_name_map import MappedTensor, NameMap, require_counterparts

if TYPE_CHECKING:
    import numpy as np

    from isotrain.core.contracts.backend.replica import Tensor
    from isotrain.core.contracts.backend.replica_group import ReplicaGroup
    from isotrain.core.contracts.plan import Plan
    from isotrain.core.contracts.state import StateKind
    from isotrain.core.data.batch import Batch
    from isotrain.core.session.session import Session

INITIAL_FILE = "initial.npz"
"""File of initial weights and buffers, each as `KIND/NAME`."""
STATE: tuple[tuple[Stage, StateKind], ...] = (
    ("weight", "trainable"),
    ("optimizer", "optimizer"),
    ("state", "non-trainable"),
)
"""Stages with the state after a step, and the kinds of state that are compared there."""
_STARTING: tuple[StateKind, ...] = ("trainable", "non-trainable")
Prints = dict[str, list[Any]]
"""Fingerprints as lists, by common name."""


@dataclass(frozen=True)
class Trace(InternalWork):
    """A traced run's work; called with the session on every process of the run.

    Attributes:
        steps: Number of steps to trace.
        names: Map from the model's weight names to common names.
        initial: File with initial weights and non-trainable state by common name; None: the run starts
            from its own, and rank 0 writes them to its run directory.
        collects_notes: Whether to collect the replica group's notes on its steps.
        marker: Marker file in the shared folder of `initial`, which every process must see; None: all
            processes run on this machine.
    """

    name: ClassVar[str] = "trace"
    steps: int
    names: NameMap
    initial: str | None = None
    collects_notes: bool = False
    marker: str | None = None

    def __call__(self, session: Session) -> dict[str, Any]:
        """Traces the run. Collective.

        Returns:
            Plain values: `replicas` of this process, `kept` (whether the gradients after the reduction
            are available), `initializer_start`, `start` and `steps` as fingerprints, `probe` (see
            `_probe`), `plan` and `notes`.

        Raises:
            PlanError: This process does not see the shared folder.
        """
        require_shared_folder(self.marker)
        return self.tracer_of(session).run()

    def tracer_of(self, session: Session) -> Tracer:
        """The tracer of the run on this process."""
        return Tracer(session, self)

    def fields(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        targets = fields["names"]["targets"]
        names = NameMap({name: MappedTensor(**target) for name, target in targets.items()})
        return cls(**{**fields, "names": names})


def require_shared_folder(marker: str | None) -> None:
    """Checks that this process sees a marker file, if there is one, and so the folder of the reference.

    Raises:
        PlanError: It does not.
    """
    if marker is not None and not Path(marker).is_file():
        host, folder = socket.gethostname(), Path(marker).parent
        raise PlanError(
            f"parity: {host} does not see {folder}, where every process reads what the reference has written."
            " Give --output (output= in Python) a folder that all hosts share."
        )


def first_steps(plan: Plan, count: int) -> list[int]:
    """Indices of the first `count` steps, or of all where the run has fewer."""
    return list(range(min(count, plan.total_steps or count)))


def steps_to_trace(plan: Plan, count: int) -> list[int]:
    """Indices of the steps to trace: the first `count`, the last replaced by a later partial batch."""
    steps = first_steps(plan, count)
    if plan.samples is None or not plan.steps_per_epoch:
        return steps
    smaller = plan.steps_per_epoch - 1
    is_smaller = plan.samples < plan.steps_per_epoch * plan.global_batch_size
    if is_smaller and len(steps) > 1 and steps[-1] < smaller < (plan.total_steps or 0):
        steps[-1] = smaller
    return steps


def gradient_keeper(group: ReplicaGroup) -> GradientKeepingGroup | None:
    """The group, which from now on keeps the gradients of each step; None for one that cannot."""
    if isinstance(group, GradientKeepingGroup) and group.keep_gradients():
        return group
    return None


class Tracer:
    """Traces a run on one process.

    Attributes:
        steps_of: Function from a plan and a number of steps to the indices of the steps to trace.
    """

    steps_of = staticmethod(steps_to_trace)

    def __init__(self, session: Session, request: Trace) -> None:
        self.session = session
        self.group = session.group
        self._names = self.name_map(request)
        self._collects_notes = request.collects_notes
        self._notes: list[str] = []
        self._probe_results: dict[str, Any] = {}
        self._steps = self.steps_of(session.plan, request.steps)
        self._initializer_start = self._state()
        self._start_from(request.initial)
        self._weights = list(session.read_state(("trainable",)))
        self._gradient_keeper = gradient_keeper(self.group)

    def name_map(self, request: Trace) -> NameMap:
        """The map from the model's names to common names."""
        return request.names

    def _start_from(self, initial: str | None) -> None:
        """Loads the initial state from a file; without one, rank 0 writes its own to a file."""
        import numpy as np

        local = {kind: self.session.read_state((kind,)) for kind in _STARTING}
        if initial is None:
            common = {
                f"{kind}/{self._names.common(name)}": self._names.to_common(name, array)
                for kind, arrays in local.items()
                for name, array in arrays.items()
            }
            if self.session.is_main:
                np.savez(self.session.run_directory / INITIAL_FILE, **common)  # type: ignore[arg-type]
            return
        with np.load(Path(initial), allow_pickle=False) as archive:
            loaded = {name: archive[name] for name in archive.files}
        weights = [n.removeprefix("trainable/") for n in loaded if n.startswith("trainable/")]
        require_counterparts(list(local["trainable"]), weights, self._names)
        for kind, arrays in local.items():
            keys = {name: f"{kind}/{self._names.common(name)}" for name in arrays}
            shared = {name: loaded[key] for name, key in keys.items() if key in loaded}
            self.session.write_state(
                {name: self._names.to_model(name, array) for name, array in shared.items()}
            )

    def run(self) -> dict[str, Any]:
        """Traces the run; returns plain values. Collective."""
        start = self._state()
        steps = self._taken_steps()
        return {
            "replicas": list(self.group.local_replicas),
            "kept": self._gradient_keeper is not None,
            "initializer_start": self._initializer_start,
            "start": start,
            "steps": steps,
            "probe": self._probe_results,
            "plan": self.session.plan.to_dict(),
            "notes": self._notes,
        }

    def _taken_steps(self) -> list[dict[str, Any]]:
        """Takes the steps to trace; returns what `step` does."""
        return [self.step(batch) for batch in self._batches()]

    def _batches(self) -> Iterator[Batch]:
        """Yields the batches of the steps to trace, skipping those in between."""
        following = -1
        batches: Iterator[Batch] = iter(())
        for step in self._steps:
            if step != following:
                self.session.seek(step)
                batches = self.session.batches()
            yield next(batches)
            following = step + 1

    def step(self, batch: Batch, update: str | None = None) -> dict[str, Any]:
        """Takes a step, or does a named update; returns its fingerprints and facts as plain values."""
        with self.group.preserving_training_state():
            local, loss = self.group.gradients(batch)
            gradient = [self._gradients(tensors) for tensors in local]
            if not self._probe_results:
                self._probe(batch)
                self._notes = self.group.step_notes(batch) if self._collects_notes else []
        trained = self.session.step(batch, update)
        reduced = self._gradient_keeper.kept_gradients() if self._gradient_keeper else []
        return {
            "step": batch.step,
            "size": batch.size,
            "even": batch.even,
            "local_batch_sizes": [
                sum(micro_batch.count for micro_batch in slices) for slices in batch.slices
            ],
            "loss": float(trained),
            "local_loss": float(loss),
            "learning_rate": self.session.learning_rate(batch.step, update),
            "gradient": gradient,
            "reduced": [self._gradients(tensors) for tensors in reduced],
            **self._state(),
        }

    def _probe(self, batch: Batch) -> None:
        """Measures whether the model draws random numbers, and its loss in evaluation mode.

        Stores in `_probe_results` the gradients of the batch computed a second time, with the random streams
        advanced by the first, and the batch's loss in evaluation mode.
        """
        again, _ = self.group.gradients(batch)
        self.group.evaluation_step(batch)
        evaluated = self.group.collect_metrics("evaluation")
        self._probe_results = {
            "again": [self._gradients(tensors) for tensors in again],
            "evaluation_loss": evaluated["loss"],
        }

    def _gradients(self, tensors: Sequence[Tensor]) -> Prints:
        """Fingerprints of gradients, each of its weight's shape, in the order of the weights."""
        arrays = (self.group.numpy(tensor) for tensor in tensors)
        return self._prints(dict(zip(self._weights, arrays, strict=True)))

    def _state(self) -> dict[str, Prints]:
        return {stage: self._prints(self._read(kind)) for stage, kind in STATE}

    def _read(self, kind: StateKind) -> dict[str, np.ndarray]:
        """State of a kind by the model's names, arrays of any shapes."""
        return self.session.read_state((kind,))

    def _prints(self, arrays: Mapping[str, np.ndarray]) -> Prints:
        """Fingerprints, by common name, of arrays of any shapes by the model's names."""
        from isotrain.analysis.parity.tensor_sketch import fingerprint

        return {
            self._names.common(name): fingerprint(self._names.to_common(name, array)).to_list()
            for name, array in arrays.items()
        }
