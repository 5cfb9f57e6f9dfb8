"""The work of every process of `parity --bits`: training steps whose numbers are compared to the bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from isotrain.analysis.parity.records import Stage
from isotrain.analysis.parity.trace import STATE, require_shared_folder
from isotrain.core.contracts.job import InternalWork

if TYPE_CHECKING:
    import numpy as np

    from isotrain.core.contracts.state import StateInfo
    from isotrain.core.session.session import Session

ORDER: tuple[Stage, ...] = ("loss", "weight", "optimizer", "state")
"""Compared numbers of a step, in the order in which a difference is looked for."""
_SHAPE, _OFFSET = "shape of ", "offset of "
"""Prefixes in the reference's files: of the tensor of a shard, and of the shard's first element in it."""


@dataclass(frozen=True)
class BitTrace(InternalWork):
    """Work of a run of `parity --bits`; called with the session on every process of the run.

    Attributes:
        steps: Number of steps to take.
        folder: Folder with the numbers of the reference's steps, a file for each step and process.
        is_reference: Whether this run writes these files.
        marker: Marker file in a shared folder, as in `Trace`.
    """

    name: ClassVar[str] = "bit-trace"
    steps: int
    folder: str
    is_reference: bool
    marker: str | None = None

    def __call__(self, session: Session) -> dict[str, Any]:
        """Trains, and compares with the reference. Collective.

        Returns:
            Plain values: `steps`, the indices of the steps; `differences`, for each differing tensor of the
            first step and stage that differ on this process `step`, `stage`, `name`, `bits` and `difference`;
            `names` of this process and `expected`, those of all processes of the reference, each as
            `STAGE/NAME`; and `plan`.
        """
        import numpy as np

        require_shared_folder(self.marker)
        folder = Path(self.folder)
        steps, differences = [], list[dict[str, Any]]()
        numbers, expected = dict[str, np.ndarray](), dict[str, np.ndarray]()
        shards = _shards(session)
        for batch in itertools.islice(session.batches(), self.steps):
            numbers = _numbers(session, float(session.step(batch)))
            steps.append(batch.step)
            if self.is_reference:
                folder.mkdir(exist_ok=True)
                shapes = {f"{_SHAPE}{key}": np.array(info.shape) for key, info in shards.items()}
                offsets = {f"{_OFFSET}{key}": np.array(info.offset) for key, info in shards.items()}
                file = folder / f"{batch.step}-{session.rank}.npz"
                np.savez(file, **numbers, **shapes, **offsets)  # type: ignore[arg-type]
            elif not differences:
                expected = _read(folder, batch.step, session.rank)
                for key in shards.keys() & expected.keys():
                    slices = _shard_slices(shards[key].offset, numbers[key].shape)
                    expected[key] = expected[key][slices]
                differences = stage_differences(batch.step, numbers, expected)
        return {
            "steps": steps,
            "differences": differences,
            "names": list(numbers),
            "expected": list(expected),
            "plan": session.plan.to_dict(),
        }

    def fields(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        return cls(**fields)


def _numbers(session: Session, loss: float) -> dict[str, np.ndarray]:
    """Loss and state of this process after a step, in their shapes, by `STAGE/NAME`. Local."""
    import numpy as np

    states = {stage: session.read_state((kind,)) for stage, kind in STATE}
    numbers = {f"{stage}/{n}": array for stage in states for n, array in states[stage].items()}
    return {"loss/loss": np.array(loss), **numbers}


def _shards(session: Session) -> dict[str, StateInfo]:
    """Infos of the tensors of which this process has a part, by `STAGE/NAME`. Local."""
    return {
        f"{stage}/{name}": info
        for stage, kind in STATE
        for name, info in session.group.describe_state((kind,)).items()
        if info.offset is not None and info.shard_shape != info.shape
    }


def _shard_slices(offset: Iterable[int] | None, shape: Iterable[int]) -> tuple[slice, ...]:
    """Slices of the whole tensor that a shard of this shape has."""
    assert offset is not None
    return tuple(slice(at, at + count) for at, count in zip(offset, shape, strict=True))


def _read(folder: Path, step: int, rank: int) -> dict[str, np.ndarray]:
    """Numbers of all processes of the reference after a step, with the tensors that its shards make up.

    What several have in full is that of the given rank.
    """
    import numpy as np

    numbers: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob(f"{step}-*.npz"), key=lambda f: f.stem == f"{step}-{rank}"):
        with np.load(file, allow_pickle=False) as archive:
            for name in archive.files:
                if name.startswith((_SHAPE, _OFFSET)):
                    continue
                array = archive[name]
                if f"{_OFFSET}{name}" not in archive:
                    numbers[name] = array
                    continue
                shape = tuple(archive[f"{_SHAPE}{name}"])
                whole = numbers.setdefault(name, np.zeros(shape, array.dtype))
                whole[_shard_slices(archive[f"{_OFFSET}{name}"], array.shape)] = array
    return numbers


def stage_differences(
    step: int, numbers: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> list[dict[str, Any]]:
    """Tensors of the first stage in which numbers, of any shapes, differ from the reference's."""
    for stage in ORDER:
        differing = [
            {"step": step, "stage": stage, "name": key.partition("/")[2], **distance(array, other)}
            for key, array in numbers.items()
            if key.startswith(f"{stage}/") and (other := expected.get(key)) is not None
            if not _is_equal(array, other)
        ]
        if differing:
            return differing
    return []


def _is_equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays have one shape, one dtype and the same bits."""
    return _is_alike(one, other) and one.tobytes() == other.tobytes()


def _is_alike(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def distance(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Differing bits and relative difference of two arrays.

    Of another shape or dtype, all bits of the larger one differ, and the difference is infinite.
    """
    import numpy as np

    if not _is_alike(one, other):
        return {"bits": 8 * max(one.nbytes, other.nbytes), "difference": math.inf}
    first, second = (np.frombuffer(each.tobytes(), np.uint8) for each in (one, other))
    floats = one.astype(float), other.astype(float)
    norms = [float(np.linalg.norm(each)) for each in (*floats, floats[0] - floats[1])]
    return {
        "bits": int(np.unpackbits(first ^ second).sum()),
        "difference": norms[2] / (max(norms[:2]) or 1.0),
    }
