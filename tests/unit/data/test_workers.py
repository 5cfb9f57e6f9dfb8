"""Worker processes of a loader: the same batches as without them, and what is told of one that fails."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from helpers.waiting import wait_until
from unit.data import worker_data
from unit.data.loaded_batches import facts, loader, samples
from unit.data.worker_data import LENGTH, Columns, Drawing, Faulty, Initialized, Large, Pids, Wide

from isotrain.core.data import sources
from isotrain.core.data.loader import Loader
from isotrain.core.data.map_style import with_collate
from isotrain.core.data.order.order import equal_batches
from isotrain.core.data.order.samples import Samples
from isotrain.core.data.refusals import RefusedError
from isotrain.core.data.sources import as_source, source_workers
from isotrain.core.data.worker_settings import WorkerSettings
from isotrain.core.data.workers import pool
from isotrain.core.errors import DataError, IsotrainError
from isotrain.core.spec import import_strings
from isotrain.core.system.process import poll_readable

TORCH = ("torch.utils.data",)
open_loaders: list[Loader] = []


@pytest.fixture(autouse=True)
def no_workers_left() -> Iterator[None]:
    yield
    while open_loaders:
        open_loaders.pop().close()


def worked(data: Any, count: int | None, **options: Any) -> Loader:
    settings = {
        name: options.pop(name) for name in ("start", "initialize", "timeout") if name in options
    }
    workers = None if count is None else WorkerSettings(count, **settings)
    made = loader(0, source=as_source(data), workers=workers, **options)
    open_loaders.append(made)
    return made


def all_facts(made: Loader) -> list:
    return [facts(batch) for batch in made]


@pytest.mark.parametrize(
    ("start", "with_torch"), [pytest.param("spawn", True, marks=pytest.mark.slow), ("fork", False)]
)
def test_samples_do_not_depend_on_the_number_of_workers(start: str, with_torch: bool) -> None:
    options = {"epochs": 2, "transform": worker_data.draws, "start": start}
    drawing = Drawing(with_torch=with_torch)
    expected = all_facts(worked(drawing, 0, **options))
    assert len({str(fact) for fact in expected}) == len(expected) == 10
    for count, depth in ((1, 0), (3, 2)):
        assert all_facts(worked(drawing, count, prefetch=depth, **options)) == expected


def rows(made: Loader) -> list[list[float]]:
    """All samples in their order."""
    slices = [s for batch in made for replica in batch.slices for s in replica]
    return [row for s in slices for row in s.inputs[: s.count].tolist()]


@pytest.mark.slow
def test_samples_do_not_depend_on_replicas_or_where_a_run_resumes() -> None:
    one = rows(worked(Drawing(), 2))
    for replicas in (2, 3):
        accumulated = {"gradient_accumulation_steps": 2}
        assert rows(worked(Drawing(), 2, replicas=replicas, **accumulated)) == one
    last = worked(Drawing(), 2, replicas=3, local_replicas=[2])
    assert rows(last) == [row for row in rows(last) if row in one]
    assert rows(worked(Drawing(), 0, start_step=3)) == one[24:]
    assert rows(worked(Drawing(), 1, start_step=3)) == one[24:]


def test_occurrences_of_a_sample_draw_anew() -> None:
    data = Samples.of(as_source(Drawing()), global_batch_size=8, seed=5, drop_remainder=False)
    order = equal_batches(data, lambda _: np.array([3, 3 + LENGTH, 5]), 3, repeats=True)
    first, second, _ = rows(worked(Drawing(), 1, order=order, shuffle=False))
    assert first[0] == second[0] == 3
    assert first[1] != second[1]


def mixed(inputs: Any, targets: Any, random: Any) -> Any:
    """Adds half of another sample of the global batch."""
    other, _, _ = random.partner()
    return inputs + 0.5 * other, targets


def pad(samples: list[Any]) -> Any:
    """A batch with the largest sample in each row."""
    width = max(index for _, index in samples)
    rows = [np.append(values, width) for values, _ in samples]
    return np.array(rows), np.array([index for _, index in samples])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["partners", "mixture", "collated"])
def test_what_makes_batches_otherwise_has_workers_too(kind: str) -> None:
    data: Any = Drawing()
    options: dict[str, Any] = {"gradient_accumulation_steps": 2}
    if kind == "partners":
        options["transform"] = mixed
    if kind == "mixture":
        parts = {"one": data, "other": Drawing(20)}
        data = sources.mixture(parts, {"one": 2.0, "other": 1.0})
    if kind == "collated":
        data = with_collate(sources.mixture({"one": data, "other": Drawing(20)}), pad)
    expected = all_facts(worked(data, 0, replicas=2, **options))
    assert all_facts(worked(data, 2, replicas=2, **options)) == expected
    if kind != "collated":
        alone = rows(worked(data, 1, **options))
        assert rows(worked(data, 0, replicas=3, **options)) == alone


class Keeping:
    """A transform that keeps all batches, and requires that they stay as they are."""

    def __init__(self) -> None:
        self.kept: list[tuple[np.ndarray, np.ndarray]] = []

    def __call__(self, inputs: Any, targets: Any, random: Any) -> Any:
        self.kept.append((inputs, inputs.copy()))
        for batch, copy in self.kept:
            np.testing.assert_array_equal(batch, copy)
        return inputs, targets


def test_batches_that_a_transform_keeps_do_not_change() -> None:
    """A model may change the inputs that it is given."""
    expected = rows(worked(Wide(), 0, epochs=2))
    seen = []
    for batch in worked(Wide(), 1, epochs=2, transform=Keeping()):
        for part in (s for replica in batch.slices for s in replica):
            seen += part.inputs[: part.count].tolist()
            part.inputs[:] = -1.0
    assert seen == expected


def test_every_epoch_and_seed_draws_anew() -> None:
    drawing = Drawing(with_torch=True)
    epochs = rows(worked(drawing, 0, epochs=2, shuffle=False))
    first, second = epochs[:LENGTH], epochs[LENGTH:]
    other = rows(worked(drawing, 0, seed=6, shuffle=False))
    for index in range(LENGTH):
        assert first[index][0] == second[index][0] == other[index][0] == index
        numbers = {*first[index][1:], *second[index][1:], *other[index][1:]}
        assert len(numbers) == 3 * (len(first[index]) - 1)
    assert len({row[1] for row in first}) == LENGTH


def test_without_workers_the_generators_are_left_as_they_are() -> None:
    random.seed(3)
    np.random.seed(3)
    states = random.getstate(), np.random.get_state()[1].tolist()
    rows(worked(Drawing(), 0))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    first = rows(worked(Drawing(), None))
    random.seed(3)
    np.random.seed(3)
    assert [row[1:4] for row in rows(worked(Drawing(), None))] == [row[1:4] for row in first]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_draws_that_are_not_seeded_are_warned_about(count: int) -> None:
    with pytest.warns(
        UserWarning, match="sample 0 was made twice from the same seeds, and differs"
    ):
        list(worked(worker_data.Unseeded(), count, shuffle=False))


def test_workers_are_processes_and_stay_for_the_next_pass() -> None:
    made = worked(Pids(), 2)
    pids = {row[0] for row in rows(made)}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert {row[0] for row in rows(made)} == pids
    made.close()
    assert not any(os.path.exists(f"/proc/{int(pid)}") for pid in pids)
    assert pids.isdisjoint({row[0] for row in rows(made)})
    inline = worked(Pids(), 0)
    assert {row[0] for row in rows(inline)} == {os.getpid()}


def test_sources_of_all_kinds(tmp_path: Any) -> None:
    expected = [samples(batch) for batch in loader(LENGTH)]
    np.save(tmp_path / "x.npy", np.arange(LENGTH * 2.0).reshape(LENGTH, 2))
    np.save(tmp_path / "y.npy", np.arange(LENGTH))
    for source in (
        sources.BatchIndexed(Columns(), "x", "y"),
        sources.npy(tmp_path / "x.npy", tmp_path / "y.npy"),
        as_source((np.arange(LENGTH * 1.0), np.arange(LENGTH))),
        as_source(Drawing()),
    ):
        made = worked(source, 1)
        assert [samples(batch) for batch in made] == expected


def test_plain_arrays_in_memory_have_no_workers() -> None:
    before = psutil.Process().children()
    batches = iter(worked((np.zeros((LENGTH, 2)), np.arange(LENGTH)), 2))
    next(batches)
    assert psutil.Process().children() == before


def test_a_large_array_is_in_memory_once() -> None:
    for row in rows(worked(Large(), 2, shuffle=False)):
        assert row[0] % 1 == 0.5
        assert row[1] == row[0] + 1


def test_sample_weights_and_structure_arrive() -> None:
    source = as_source((({"a": np.arange(9), "b": np.arange(9.0)},), np.arange(9), np.ones(9)))
    made = worked(source, 1, transform=lambda inputs, targets, random: (inputs, targets))
    for with_workers, without in zip(made, worked(source, None), strict=True):
        one, other = with_workers.slices[0][0], without.slices[0][0]
        assert type(one.targets) is type(other.targets)
        assert one.targets.weights.tolist() == other.targets.weights.tolist()
        assert one.inputs[0]["a"].dtype == np.int64
        assert one.inputs[0]["b"].tolist() == other.inputs[0]["b"].tolist()


def steps_before(made: Loader) -> tuple[int, BaseException]:
    """The number of batches before an error, and the error."""
    steps = 0
    try:
        for _ in made:
            steps += 1
    except Exception as error:
        return steps, error
    raise AssertionError("no error")


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_an_exception_names_worker_sample_and_step(start: str) -> None:
    steps, error = steps_before(worked(Faulty("raises"), 2, shuffle=False, start=start))
    assert steps == 2
    assert isinstance(error, DataError)
    text = str(error)
    assert "raised ValueError: this sample is broken" in text
    assert "It was raised for sample 20 of the data set." in text
    assert "samples 16, 17, 18, 19, 20, 21, 22, 23 of step 2" in text
    assert "worker_data.py" in str(error.__cause__)
    assert "in raises" in str(error.__cause__)


def test_an_exception_without_workers_is_itself() -> None:
    steps, error = steps_before(worked(Faulty("raises"), 0, shuffle=False))
    assert (steps, type(error)) == (2, ValueError)
    assert error.__notes__ == ["It was raised for sample 20 of the data set."]


def test_an_error_of_isotrain_is_itself() -> None:
    made = worked(Drawing(), 1, transform=worker_data.mixes, tries_transform=True)
    with pytest.raises(RefusedError, match="mixes samples"):
        next(iter(made))
    assert len(list(worked(Drawing(), 1, transform=worker_data.mixes))) == 5


@pytest.mark.parametrize("start", ["spawn", "fork"])
@pytest.mark.parametrize(
    ("fault", "end"),
    [
        ("exits", "ended with exit code 3 before its work was done"),
        ("killed", "was ended by SIGKILL (kill -9, or the system ran out of memory)"),
        ("crashes", "was ended by SIGSEGV"),
    ],
)
def test_the_end_of_a_worker_is_told(
    fault: str, end: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # its channel closes before its exit code is there: a moment later, or more on a busy machine
    monkeypatch.setattr("isotrain.core.data.processes.child_process._END_SECONDS", 60.0)
    steps, error = steps_before(worked(Faulty(fault), 2, shuffle=False, start=start))
    assert steps == 2
    assert isinstance(error, DataError)
    assert end in str(error)
    assert "it was making samples 16, 17, 18, 19, 20, 21, 22, 23 of step 2" in str(error)


def test_a_worker_that_hangs_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """However long the worker takes to start: its time-out is over when it hangs."""
    hangs = tmp_path / "hangs"

    def readable(files: Any, seconds: float) -> list[Any]:
        while not hangs.exists():
            if ready := poll_readable(files, 0.05):
                return ready
        return poll_readable(files, 0.0)  # what it had sent before

    monkeypatch.setattr(pool, "poll_readable", readable)
    data = Faulty("hangs", hangs)
    steps, error = steps_before(worked(data, 1, shuffle=False, timeout=2.0))
    assert steps == 2
    assert "has not answered for 2 s" in str(error)
    shown = ""

    def has_stack() -> bool:
        nonlocal shown
        shown += capfd.readouterr().err
        return "in hangs" in shown

    wait_until(has_stack, 60, "the worker does not show its stack")


def test_answers_of_other_workers_give_one_that_hangs_no_more_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the first batches above all: the others are still making those that follow."""
    hangs = tmp_path / "hangs"
    limits: list[float] = []

    def readable(files: Any, seconds: float) -> list[Any]:
        limits.append(seconds)
        wait_until(hangs.exists, 60)
        return poll_readable(files, 60.0) if len(limits) == 1 else []

    monkeypatch.setattr(pool, "poll_readable", readable)
    made = worked(Faulty("hangs", hangs), 2, shuffle=False, start_step=2, timeout=900.0)
    steps, error = steps_before(made)
    assert (steps, len(limits)) == (0, 2)
    assert limits[1] < limits[0] <= 900.0
    assert "has not answered for 900 s" in str(error)


def test_a_worker_that_is_killed_from_outside() -> None:
    made = worked(Pids(1000), 2, steps=1000)
    batches = iter(made)
    pid = int(next(batches).slices[0][0].inputs[0, 0])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(DataError, match=f"pid {pid}.*was ended by SIGKILL"):
        list(batches)


FILE = """
import functools

@functools.cache
def squared(index):
    return float(index * index)

class Squares:
    def __len__(self):
        return 9

    def __getitem__(self, index):
        return squared(index), index
"""


def test_a_data_set_of_a_file_that_cannot_be_imported_by_name(tmp_path: Path) -> None:
    (tmp_path / "squares.py").write_text(FILE)
    squares = import_strings.resolve(f"{tmp_path}/squares.py:Squares")
    batches = worked(squares(), 1, shuffle=False)
    values = [value for batch in batches for value in batch.slices[0][0].inputs.tolist()]
    assert values == [index**2 for index in range(9)]


def test_a_data_set_that_cannot_be_pickled() -> None:
    _, error = steps_before(worked(worker_data.WithLock(), 1))
    assert isinstance(error, IsotrainError)
    for part in ("cache.lock cannot be sent to the worker processes", "loader: {start: fork}"):
        assert part in str(error)
    assert len(list(worked(worker_data.WithLock(), 1, start="fork"))) == 5


def test_a_data_set_that_cannot_be_made_in_a_worker() -> None:
    _, error = steps_before(worked(worker_data.BadInWorker(os.getpid()), 2))
    assert isinstance(error, DataError)
    assert "raised OSError: no such folder" in str(error)


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_a_data_set_that_starts_threads(start: str) -> None:
    made = worked(worker_data.WithThread(), 1, start=start)
    assert len(list(made)) == 5
    made.close()


def test_an_iteration_that_is_left_early() -> None:
    made = worked(Drawing(1000), 2)
    expected = facts(next(iter(made)))
    for _ in range(3):
        assert facts(next(iter(made))) == expected


@pytest.mark.slow
def test_settings_of_a_data_loader() -> None:
    from torch.utils.data import DataLoader

    options = {"batch_size": 4, "worker_init_fn": worker_data.initialize}
    source = as_source(DataLoader(Initialized(), num_workers=2, prefetch_factor=3, **options))
    settings = source_workers(source)
    assert settings == WorkerSettings(2, 3, "spawn", worker_data.initialize, TORCH)
    part, _ = sources_split(source)
    assert source_workers(part) == settings
    forking = DataLoader(Initialized(), num_workers=1, multiprocessing_context="fork")
    assert source_workers(as_source(forking)) == WorkerSettings(1, 2, "fork", None, TORCH)
    assert source_workers(as_source(DataLoader(Initialized(), batch_size=4))) is None
    made = loader(0, source=as_source(Initialized()), workers=settings)
    open_loaders.append(made)
    told = {tuple(row) for row in rows(made)}
    assert told == {(0, 0, 2, LENGTH), (1, 1, 2, LENGTH)}


def sources_split(source: Any) -> Any:
    from isotrain.core.data.subset import split

    return split(source, 0.25)
