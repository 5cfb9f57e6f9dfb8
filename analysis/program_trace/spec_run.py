"""A run of a spec as the trace of a program, from the initial weights of a program's trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from isotrain.analysis.parity.causes.clipping import clipped
from isotrain.analysis.parity.run_trace import RunTrace, StepTrace, assemble_trace
from isotrain.analysis.parity.targets import ParityTarget
from isotrain.analysis.parity.tensor_sketch import difference
from isotrain.analysis.parity.trace import INITIAL_FILE, Trace, Tracer, first_steps
from isotrain.analysis.parity.trace_runner import TraceRunner
from isotrain.analysis.program_trace.keras_axes import channels_first, in_torch_order, kernel_axes
from isotrain.analysis.program_trace.names import counterparts
from isotrain.analysis.program_trace.reading import GlobalStep, ProgramTrace, Step, Tensors
from isotrain.analysis.program_trace.recorder import sample_hashes
from isotrain.core.data.pytree import leaves
from isotrain.core.errors import IsotrainError, PlanError
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.reporting.status import OnProgress
from isotrain.core.spec.sections import Clip
from isotrain.core.spec.weight_name_map import MappedTensor, NameMap

if TYPE_CHECKING:
    import numpy as np

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

    def step(self, batch: Batch) -> dict[str, Any]:
        """Takes a step; hashes of each replica's samples, in both orders of axes, are in what it returns."""
        hashes = [self._hashes(slices) for slices in batch.slices]
        return {
            **super().step(batch),
            **{key: [each[key] for each in hashes] for key in _ROWS},
        }

    def _hashes(self, slices: Sequence[Slice]) -> dict[str, list[int]]:
        """Hashes of the samples of a replica's micro-batches, by order of axes."""
        hashes: dict[str, list[int]] = {key: [] for key in _ROWS}
        for micro_batch in slices:
            arrays = [
                self._array(leaf) for _, leaf in leaves(micro_batch.inputs, "inputs", lists=True)
            ]
            for key, convert in _ROWS.items():
                hashes[key] += sample_hashes([*map(convert, arrays)])[: micro_batch.count]
        return hashes

    def _array(self, leaf: Any) -> np.ndarray:
        import numpy as np

        return leaf if isinstance(leaf, np.ndarray) else self.group.numpy(leaf)


def _unchanged(batch: np.ndarray) -> np.ndarray:
    return batch


_ROWS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "rows": _unchanged,
    "moved_rows": channels_first,
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
        PlanError: The program has several optimizers, its trace has fewer steps or no initial weights, or the
            run cannot be planned.
        RunFailedError: The run failed, as where a weight has no counterpart.
    """
    initial = _initial_file(program)
    program.require_steps(steps or 0)
    runner = TraceRunner(
        host,
        target,
        steps or len(program.steps),
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
    rows = _rows(returned, program)
    names = returned[0]["names"]
    taken = [
        GlobalStep(0, step.step, _ranks(run, step, rows[i], names, target.spec.clip))
        for i, step in enumerate(run.steps)
    ]
    return ProgramTrace(Path(label), run.replicas, taken, [], run.notes)


def _initial_file(program: ProgramTrace) -> Path:
    """The file of the weights that a program with one optimizer starts from."""
    optimizers = {step.optimizer for step in program.steps}
    if len(optimizers) > 1:
        raise PlanError(
            f"{program.folder}: expected a program with one optimizer, found {len(optimizers)}. A spec is"
            " compared with the steps of one. Trace both programs, and compare the traces."
        )
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
    by_order = {
        key: [
            [replica for rank in returned for replica in rank["steps"][i][key]]
            for i in range(len(returned[0]["steps"]))
        ]
        for key in _ROWS
    }
    return max(
        by_order.values(),
        key=lambda steps: sum(h in known for step in steps for replica in step for h in replica),
    )


def _ranks(
    run: RunTrace,
    step: StepTrace,
    rows: Sequence[Sequence[int]],
    names: Mapping[str, str],
    clip: Clip | None,
) -> list[Step]:
    """A step of each replica, as a process of a program would have it."""
    is_first = step.step == 0
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
        "initial": run.start["weight"] if is_first else {},
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
