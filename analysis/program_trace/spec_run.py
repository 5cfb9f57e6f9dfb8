"""A run of a spec as the trace of a program, from the initial weights of a program's trace."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from isotrain.analysis.parity.causes.clipping import clipped
from isotrain.analysis.parity.run_trace import RunTrace, StepTrace, assemble_trace, tensors_of
from isotrain.analysis.parity.targets import ParityTarget
from isotrain.analysis.parity.tensor_sketch import difference
from isotrain.analysis.parity.trace import (
    INITIAL_FILE,
    Trace,
    Tracer,
    first_steps,
    gradient_keeper,
)
from isotrain.analysis.parity.trace_runner import TraceRunner
from isotrain.analysis.program_trace.keras_axes import channels_first, in_torch_order, kernel_axes
from isotrain.analysis.program_trace.names import counterparts
from isotrain.analysis.program_trace.reading import GlobalStep, ProgramTrace, Step, Tensors
from isotrain.analysis.program_trace.recorder import sample_hashes
from isotrain.analysis.program_trace.update_match import (
    SampleRows,
    optimizer_of_updates,
    require_different_updates,
    require_optimizers,
)
from isotrain.core.data.pytree import leaves
from isotrain.core.errors import IsotrainError, PlanError
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.reporting.status import OnProgress
from isotrain.core.spec.sections import Clip
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.spec.weight_name_map import MappedTensor, NameMap

if TYPE_CHECKING:
    import numpy as np

    from isotrain.core.contracts.state import StateKind
    from isotrain.core.data.batch import Batch, Slice
    from isotrain.core.session.session import Session

_OPTIMIZER = "optimizer/"


class ProgramTraceWork(Trace):
    """A traced run's work, which starts from a program's weights and hashes samples as its trace does.

    Without a map, the model's weights are matched with the program's as `names.counterparts` says.
    """

    name: ClassVar[str] = "program-trace"

    def tracer_of(self, session: Session) -> Tracer:
        """The tracer of the run on this process."""
        return _ProgramTracer(session, self)


class _ProgramTracer(Tracer):
    """Traces a run on one process, by a program's names; each of its steps, as a program's trace has them."""

    steps_of = staticmethod(first_steps)

    def __init__(self, session: Session, request: Trace) -> None:
        self._whole = session.group
        super().__init__(session, request)
        self._count = request.steps
        self._trainable = set(session.read_state(("trainable",)))

    def name_map(self, request: Trace) -> NameMap:
        """The map of the user; else one from the model's names and shapes to those of the program."""
        import numpy as np

        self._matched: list[str] = []
        if request.names.targets or request.initial is None:
            return request.names
        recorded: dict[str, dict[str, Sequence[int]]] = {"trainable": {}, "non-trainable": {}}
        with np.load(request.initial, allow_pickle=False) as archive:
            for key in archive.files:
                kind, _, name = key.partition("/")
                recorded[kind][name] = archive[key].shape
        targets: dict[str, MappedTensor] = {}
        for kind, of_program in recorded.items():
            arrays = self.session.read_state((kind,))  # type: ignore[arg-type]
            shapes = {name: in_torch_order(name, array).shape for name, array in arrays.items()}
            match = counterparts(shapes, of_program)
            if kind == "trainable" and match.ambiguous:
                raise IsotrainError(
                    f"weights are {'; '.join(match.ambiguous)}. Name their counterparts with --map FILE."
                )
            self._matched += [*match.notes, *match.ambiguous]
            targets |= {
                name: MappedTensor(match.names.get(name, name), kernel_axes(name, array.ndim))
                for name, array in arrays.items()
            }
        return NameMap(targets)

    def run(self) -> dict[str, Any]:
        """Traces the run; the program's names are among what it returns."""
        names = {name: target.name for name, target in self._names.targets.items()}
        return {**super().run(), "names": names, "notes": self._matched}

    def _taken_steps(self) -> list[dict[str, Any]]:
        """Takes the steps to trace: of named updates, as many of each as are asked for."""
        updates = self.session.spec.updates
        if not updates:
            return super()._taken_steps()
        require_different_updates(
            {
                name: set(group.describe_state(("trainable",)))
                for name, group in self._whole.updates.items()
            }
        )
        keepers = {name: gradient_keeper(group) for name, group in self._whole.updates.items()}
        left = dict.fromkeys(updates, self._count)
        taken = []
        for batch in self.session.batches():
            for name, update in updates.items():
                if not update.is_due(batch.step, batch.epoch):
                    continue
                if not left[name]:
                    self.session.step(batch, name)
                    continue
                left[name] -= 1
                self.group, self._gradient_keeper = self._whole.updates[name], keepers[name]
                self._weights = list(self._read("trainable"))
                before = self._prints(self._read("trainable"))
                taken.append({**self.step(batch, name), "update": name, "before": before})
            if not any(left.values()):
                break
        return taken

    def _read(self, kind: StateKind) -> dict[str, np.ndarray]:
        """State of a kind by the model's names: that of the present update, without others' weights."""
        if self.group is self._whole:
            return super()._read(kind)
        state = self.group.read_state((kind,))
        return {
            name: array
            for name, array in state.items()
            if kind != "non-trainable" or name not in self._trainable
        }

    def step(self, batch: Batch, update: str | None = None) -> dict[str, Any]:
        """Takes a step; hashes of each replica's samples, by what is hashed, are in what it returns."""
        hashes = [self._hashes(slices) for slices in batch.slices]
        return {**super().step(batch, update), "rows": hashes}

    def _hashes(self, slices: Sequence[Slice]) -> dict[str, list[int]]:
        """Hashes of the samples of a replica's micro-batches, by order of axes and by what is hashed.

        That is all inputs together, as a model gets them; and, for updates that call parts of a model, each
        of inputs and targets.
        """
        hashes: dict[str, list[int]] = {}
        for micro_batch in slices:
            named = dict(leaves(micro_batch.inputs, "inputs", lists=True))
            hashed = {"": [self._array(leaf) for leaf in named.values()]}
            if self.group is not self._whole:
                named |= dict(leaves(micro_batch.targets, "targets", lists=True))
                hashed |= {name: [self._array(leaf)] for name, leaf in named.items()}
            for order, convert in _ORDERS.items():
                for what, each in hashed.items():
                    rows = sample_hashes([*map(convert, each)])[: micro_batch.count]
                    hashes.setdefault(f"{order} {what}", []).extend(rows)
        return hashes

    def _array(self, leaf: Any) -> np.ndarray:
        import numpy as np

        return leaf if isinstance(leaf, np.ndarray) else self.group.numpy(leaf)


def _unchanged(batch: np.ndarray) -> np.ndarray:
    return batch


_ORDERS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "unchanged": _unchanged,
    "channels-first": channels_first,
}
"""Orders of the axes of samples: the model may take channels last, and the program first."""


def trace_of_spec(
    program: ProgramTrace,
    target: ParityTarget,
    host: PluginManager,
    *,
    steps: int | None,
    label: str,
    maps: Mapping[str, NameMap],
    output: str | os.PathLike[str] | None,
    on_progress: OnProgress,
) -> ProgramTrace:
    """Runs a spec from the initial weights of a program.

    Args:
        program: Trace of the program.
        target: The run.
        host: Plugin manager.
        steps: Number of steps to take; None: as many as the program's trace has.
        label: What the run is called in place of a folder.
        maps: Maps of the weights' names to the program's, by framework or backend.
        output: Folder for the fingerprints, which all hosts must share; None: they are not kept.
        on_progress: Receives a line before the run.

    Raises:
        PlanError: The program's optimizers are not those of the spec, its trace has fewer steps or no initial
            weights, or the run cannot be planned.
        RunFailedError: The run failed, as where a weight has no counterpart.
    """
    initial = _initial_file(program)
    require_optimizers(program, target.spec)
    program.require_steps(steps or 0)
    runner = TraceRunner(
        host,
        target,
        steps or max(Counter(step.optimizer for step in program.steps).values()),
        maps,
        output,
        on_progress,
        initial=str(initial.resolve()),
        work=ProgramTraceWork,
    )
    runner.plan(target, target.spec)
    with runner.running():
        returned = runner.returned(target, target.spec, "")
    run = assemble_trace(target.name, returned)
    steps_of_spec = _steps_of_updates if target.spec.updates else _steps
    taken, notes = steps_of_spec(run, returned, program, target.spec)
    return ProgramTrace(Path(label), run.replicas, taken, [], [*run.notes, *notes])


def _steps(
    run: RunTrace,
    returned: Sequence[Mapping[str, Any]],
    program: ProgramTrace,
    spec: TrainingSpec,
) -> tuple[list[GlobalStep], list[str]]:
    """The steps of a run with one optimizer, and no notes."""
    rows = _rows(returned, program)
    names = returned[0]["names"]
    taken = []
    for i, step in enumerate(run.steps):
        initial = run.start["weight"] if step.step == 0 else {}
        taken.append(
            GlobalStep(0, step.step, _ranks(run, step, rows[i], names, spec.clip, initial))
        )
    return taken, []


def _steps_of_updates(
    run: RunTrace,
    returned: Sequence[Mapping[str, Any]],
    program: ProgramTrace,
    spec: TrainingSpec,
) -> tuple[list[GlobalStep], list[str]]:
    """The steps of the named updates of a run, as those of the program's optimizers; and notes on others."""
    names = returned[0]["names"]
    by_rank = [rank["steps"] for rank in returned]
    updates = [step["update"] for step in by_rank[0]]
    weights = {
        name: set(step.tensors["weight"]) for name, step in zip(updates, run.steps, strict=True)
    }
    optimizers, notes = optimizer_of_updates(program, weights)
    batches = [
        [hashes for part in parts for hashes in part["rows"]]
        for parts in zip(*by_rank, strict=True)
    ]
    samples = SampleRows(program, batches)
    of_program = {(step.optimizer, step.index): step for step in program.steps}
    done: Counter[str] = Counter()
    taken = []
    for name, step, first, batch in zip(updates, run.steps, by_rank[0], batches, strict=True):
        if name not in optimizers:
            continue
        key = optimizers[name], done[name]
        initial = {} if done[name] else tensors_of(first["before"])
        rows = samples.of_step(of_program.get(key), batch)
        clip = spec.for_update(name).clip
        taken.append(GlobalStep(*key, _ranks(run, step, rows, names, clip, initial)))
        done[name] += 1
    return taken, notes


def _initial_file(program: ProgramTrace) -> Path:
    """The file of the weights that a program starts from."""
    initial = program.folder / INITIAL_FILE
    if not initial.is_file():
        raise PlanError(
            f"{program.folder}: expected {INITIAL_FILE}, with the weights that the program starts from,"
            " found none. Trace the program again."
        )
    return initial


def _rows(returned: Sequence[Mapping[str, Any]], program: ProgramTrace) -> list[list[list[int]]]:
    """Hashes of samples by step and replica, in the order of axes in which the program has more of them."""
    known = set().union(*(step.rows() for step in program.steps))
    by_order = [
        [
            [hashes[f"{order} "] for rank in returned for hashes in rank["steps"][i]["rows"]]
            for i in range(len(returned[0]["steps"]))
        ]
        for order in _ORDERS
    ]
    return max(
        by_order,
        key=lambda steps: sum(h in known for step in steps for replica in step for h in replica),
    )


def _ranks(
    run: RunTrace,
    step: StepTrace,
    rows: Sequence[Sequence[int]],
    names: Mapping[str, str],
    clip: Clip | None,
    initial: Tensors,
) -> list[Step]:
    """A step of each replica, as a process of a program would have it."""
    is_random = any(
        difference(tensor, run.steps[0].tensors["gradient"][name]) > 0.0
        for name, tensor in run.again.items()
    )
    common: dict[str, Any] = {
        "groups": [
            {
                "optimizer": run.plan["backend"],
                "dtype": run.precision,
                "names": list(step.tensors["weight"]),
                "options": {"lr": step.learning_rate},
            }
        ],
        "initial": initial,
    }
    reduced = step.copies["reduced"] or [step.tensors["gradient"]]
    clips = (
        []
        if clip is None
        else [{"event": "clip", "norm": step.gradient_norm, "limit": _limit(clip)}]
    )

    def of(stage: Any, replica: int) -> Tensors:
        copies = step.copies[stage]
        return copies[min(replica, len(copies) - 1)]

    return [
        Step(
            events=[
                {
                    "event": "forward",
                    "rows": hashes,
                    "training": True,
                    "gradients": True,
                    "dropout": is_random,
                    "batch_norm": bool(step.tensors["state"]),
                    "autocast": False,
                    "wrapper": run.name,
                    "random": {"replica": replica},
                },
                {"event": "backward", "loss": step.loss},
                *clips,
            ],
            gradient=_clipped(reduced[min(replica, len(reduced) - 1)], clip),
            weight=of("weight", replica),
            optimizer_state={
                _slot(name, names): tensor for name, tensor in of("optimizer", replica).items()
            },
            state=of("state", replica),
            **common,
        )
        for replica, hashes in enumerate(rows)
    ]


def _clipped(gradients: Tensors, clip: Clip | None) -> Tensors:
    """Gradients as the optimizer gets them; those that fingerprints cannot tell are left out."""
    by_name = gradients if clip is None else clipped(dict(gradients), clip)
    return {name: tensor for name, tensor in by_name.items() if tensor.sketch}


def _limit(clip: Clip) -> float:
    return next(each for each in (clip.global_norm, clip.norm, clip.value) if each is not None)


def _slot(name: str, names: Mapping[str, str]) -> str:
    """The program's name of optimizer state `optimizer/WEIGHT/SLOT`: `WEIGHT/SLOT`."""
    owner, _, slot = name.removeprefix(_OPTIMIZER).rpartition("/")
    return f"{names.get(owner, owner)}/{slot}"
