"""Runs that are killed, ended or stopped, and go on from a checkpoint as if nothing had happened."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.in_process import command, script
from integration.resume_runs import STEPS, assert_same, chosen, data, network, plain, run, spec

import isotrain
from isotrain import sources
from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.checkpoints.folder import checkpoint_at
from isotrain.core.errors import IsotrainError, PlanError, RunFailedError
from isotrain.core.launching.run_directory.run_directory import RunDirectory
from isotrain.core.session.weights import weight_readers
from isotrain.testing.reference.network import Network

pytestmark = pytest.mark.usefixtures("reference")


@pytest.mark.slow
def test_other_numbers_of_replicas_continue_the_same_curve(tmp_path: Path) -> None:
    """Without dropout, whose masks depend on the replica, the curve is that of any number of replicas."""
    changes = {"model": {"numpy": plain}}
    whole = run(tmp_path / "whole", 1, changes=changes | {"checkpoint": None})
    folder = tmp_path / "resumed"
    for steps, replicas in ((4, 2), (9, 3), (STEPS, 1)):
        changes["steps"] = steps
        found = run(folder, replicas, resume="auto", changes=changes)
    for name, weight in whole.weights.items():
        np.testing.assert_allclose(found.weights[name], weight, rtol=0, atol=1e-13)
    assert found.metrics == pytest.approx(whole.metrics, abs=1e-12)
    assert found.history.loss == pytest.approx(whole.history.loss, abs=1e-12)
    assert [e["step"] for e in found.history.epochs][-1] == STEPS


def at_the_start(session: isotrain.Session) -> Any:
    """The weights that a resumed run begins with; then it trains."""
    weights = session.read_state(("trainable",))
    for batch in session.batches():
        session.step(batch)
    return weights


@pytest.mark.parametrize(
    ("strategy", "replicas", "lost"),
    [
        (
            {"name": "local-sgd", "options": {"every": 4}},
            2,
            "the weights of 3 replicas, which differed: all have their mean",
        ),
        (chosen("compressed"), 3, "compressed: starts without gradient residuals"),
    ],
    ids=["replicas", "strategy"],
)
def test_state_that_a_strategy_loses_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: Any,
    replicas: int,
    lost: str,
) -> None:
    """Replicas that had their own weights continue from the mean of them."""
    policy = {"every_steps": 3, "keep_last": None}
    run(
        tmp_path / "run",
        3,
        changes={"strategy": chosen("local-sgd"), "checkpoint": policy, "steps": 6},
    )
    saved = tmp_path / "run/checkpoints/step-000000003"
    told: list[Any] = []
    found = isotrain.launch(
        at_the_start,
        spec(strategy=strategy),
        backend="reference",
        replicas=replicas,
        output=tmp_path / "other",
        resume=saved,
        on_event=told.append,
    )
    (resumed,) = [event for event in told if event["event"] == "resumed"]
    assert any(text.startswith(lost) for text in resumed["lost"])
    assert any("3 replicas, which differed" in text for text in resumed["lost"])
    parts = [checkpoint_at(saved).read(f"replica-{number}", found[0]) for number in range(3)]
    for name in found[0]:
        mean = np.mean([part[name] for part in parts], axis=0)
        assert not np.allclose(parts[0][name], mean, atol=1e-9)
        for weights in found:
            np.testing.assert_allclose(weights[name], mean, atol=1e-14)
    read, sizes = Checkpoint.read, []

    def noting(*given: Any) -> Any:
        arrays = read(*given)
        sizes.append([array.nbytes for array in arrays.values()])
        return arrays

    monkeypatch.setattr(weight_readers, "PORTION_BYTES", 100)
    monkeypatch.setattr(Checkpoint, "read", noting)
    with isotrain.open_session(spec(strategy=strategy), backend="reference") as session:
        session.restore(saved)
        for name, weight in session.read_state(("trainable",)).items():
            np.testing.assert_array_equal(weight, found[0][name])
    assert all(len(portion) <= 1 or sum(portion) <= 100 for portion in sizes)


@dataclasses.dataclass
class Told:
    """A stream that notes each of its batches in a file, and goes on where its state says.

    Attributes:
        file: Where.
        position: Of the next batch; at its end an epoch begins anew.
    """

    file: Path
    position: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[Any]:
        inputs, labels = data().train
        while self.position < 30:
            start, self.position = self.position, self.position + 5
            with self.file.open("a") as stream:
                stream.write(f"{start}\n")
            yield inputs[start : self.position], labels[start : self.position]
        self.position = 0


@pytest.mark.slow
def test_a_stream_with_a_state_is_not_read_from_its_start(tmp_path: Path) -> None:
    def of(name: str) -> dict[str, Any]:
        return {"data": sources.stream(Told(tmp_path / name), 30), "model": {"numpy": plain}}

    whole = run(tmp_path / "whole", 1, changes=of("all"))
    run(tmp_path / "resumed", 1, changes=of("first") | {"steps": 7})
    found = run(tmp_path / "resumed", 1, resume="auto", changes=of("rest"))
    assert found.history.loss == whole.history.loss
    assert all(np.array_equal(found.weights[n], weight) for n, weight in whole.weights.items())
    every, rest = ((tmp_path / name).read_text().split() for name in ("all", "rest"))
    # The seventh step has samples 7 to 13 of the second epoch, the last of them in the batch from 10 on;
    # the stream is not asked at each batch where it is.
    assert rest in (every[6 + 1 :], every[6 + 2 :])


def test_a_run_with_another_spec_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run(tmp_path / "run", changes={"steps": 4})
    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.json*")}
    with pytest.raises(IsotrainError, match="global_batch_size: 7 in the checkpoint, 6 now"):
        run(tmp_path / "run", resume="auto", changes={"global_batch_size": 6})
    with pytest.raises(IsotrainError, match=r"(?s)seed: 0 in.*initial_weights"):
        isotrain.resume(tmp_path / "run", spec=spec(seed=1), on_event=lambda event: None)
    assert {path: path.read_bytes() for path in before} == before


def test_harmless_changes_are_reported(tmp_path: Path) -> None:
    run(tmp_path / "run", changes={"steps": 4, "schedule": "cosine"})
    told: list[Any] = []
    isotrain.resume(
        tmp_path / "run",
        overrides=[
            *("steps=6", "optimizer.lr=0.0625", f"checkpoint.folder={tmp_path / 'elsewhere'}"),
            *("loader.workers=0", "loader.prefetch=3"),
        ],
        strategy={"name": "local-sgd", "options": {"every": 1}},
        replicas=3,
        on_event=told.append,
    )
    (resumed,) = [event for event in told if event["event"] == "resumed"]
    assert resumed["done"] == 4
    assert "optimizer.lr: 0.125 in the checkpoint, 0.0625 now" in resumed["changes"]
    assert "replicas: 2 in the checkpoint, 3 now" in resumed["changes"]
    rate = "learning rate of step 4: 0 in the checkpoint, 0.015625 now; the step before it had 0.0183058"
    assert rate in resumed["changes"]
    assert any("'local-sgd'" in line for line in resumed["changes"])
    (of_loader,) = [line for line in resumed["changes"] if line.startswith("loader")]
    assert of_loader.startswith("loader.workers: None in the checkpoint, 0 now; the data set's own")
    assert (tmp_path / "elsewhere" / "step-000000006").is_dir()
    assert resumed["lost"] == []


def test_the_command_resumes_with_changed_options(tmp_path: Path) -> None:
    """It uses the run's own spec; the workers' masks are those of the run's steps, and nothing is lost."""
    module = "integration.resume_runs"
    fields = spec(model={"numpy": f"{module}:network"}, data=f"{module}:data", steps=4)
    fields |= {"plugins": ["isotrain.testing.reference"]}
    (tmp_path / "spec.json").write_text(json.dumps(fields))
    begun = command(
        *("run", "spec.json", "--backend", "reference", "--replicas", "2", "--output", "run"),
        *("--strategy", "parameter-server", "--quiet"),
        folder=tmp_path,
    )
    assert begun.returncode == 0, begun.stderr
    same, other = resumed_by(tmp_path, "--set", "steps=5"), resumed_by(tmp_path, *OTHERWISE)
    assert [event["lost"] for event in same if event["event"] == "resumed"] == [[]]
    (told,) = [event for event in other if event["event"] == "resumed"]
    assert told["done"] == 5
    assert "replicas: 2 in the checkpoint, 1 now" in told["changes"]
    (result,) = [event for event in other if event["event"] == "result"]
    plan = result["plan"]
    assert (plan["strategy"], plan["replicas"], plan["total_steps"]) == ("local-sgd", 1, 7)
    assert result["run_directory"] == str(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "step-000000007").is_dir()


@pytest.mark.slow
def test_a_script_resumes_with_its_own_functions(tmp_path: Path) -> None:
    """The run's files have the name of the script alone, which other programs cannot import."""
    program = tmp_path / "program.py"
    program.write_text(OF_A_SCRIPT)
    assert script(program, folder=tmp_path).returncode == 0
    assert (tmp_path / "run" / "checkpoints" / "step-000000005").is_dir()
    refused = command("resume", "run", "--set", "steps=6", folder=tmp_path)
    assert "Name the file that has it, as path/to/script.py:build" in refused.stderr
    given = command(
        *("resume", "run", "--set", "steps=6", "--spec", "program.py:SPEC", "--quiet"),
        folder=tmp_path,
    )
    assert given.returncode == 0, given.stderr


OF_A_SCRIPT = """
import isotrain
from integration.resume_runs import data, network, spec


def build():
    return network()


def read():
    return data()


SPEC = spec(model=build, data=read, steps=4)
if __name__ == "__main__":
    isotrain.run(SPEC, backend="reference", replicas=2, output="run")
    isotrain.resume("run", overrides=["steps=5"])
"""
OTHERWISE = ("--replicas", "1", "--strategy", "local-sgd,every=1", "--set", "steps=7")


def resumed_by(folder: Path, *options: str) -> list[dict[str, Any]]:
    """What the command prints of a run that goes on."""
    done = command("resume", "run", *options, "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_moved_project_resumes(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "own.py").write_text(
        "from integration.resume_runs import data, network\n"
    )

    def own(folder: str) -> dict[str, Any]:
        path = tmp_path / folder / "own.py"
        return {"model": {"numpy": f"{path}:network"}, "data": f"{path}:data"}

    run(tmp_path / "first" / "run", 1, changes={**own("first"), "steps": 4})
    shutil.move(tmp_path / "first", tmp_path / "second")
    folder = tmp_path / "second" / "run"
    told: list[Any] = []
    given = {"spec": spec(**own("second"), steps=6), "on_event": told.append}
    assert len(isotrain.resume(folder, **given).history.loss) == 6
    (resumed,) = [event for event in told if event["event"] == "resumed"]
    assert any(line.startswith("data: ") for line in resumed["changes"])


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    whole = run(tmp_path / "run")
    assert_same(isotrain.resume(tmp_path / "run", spec=spec(), on_event=lambda event: None), whole)


def network_or_none() -> Network:
    if "NO_NETWORK" in os.environ:
        raise LookupError("no such network")
    return network()


@pytest.mark.slow
def test_a_resumed_run_that_fails_keeps_the_result_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"model": {"numpy": network_or_none}}
    run(tmp_path / "run", changes={**changes, "steps": 4})
    had = (tmp_path / "run" / "result.json").read_text()
    monkeypatch.setenv("NO_NETWORK", "1")
    with pytest.raises(RunFailedError, match="no such network"):
        isotrain.resume(tmp_path / "run", spec=spec(**changes), on_event=lambda event: None)
    assert not (tmp_path / "run" / "result.json").exists()
    assert (tmp_path / "run" / "result-before.json").read_text() == had


def test_a_run_without_a_checkpoint_cannot_resume_and_may_start_again(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is no run directory"):
        isotrain.resume(tmp_path)
    with pytest.raises(PlanError, match="give the run directory"):
        isotrain.run(spec(), backend="reference", resume="auto")
    first = run(tmp_path / "run", changes={"checkpoint": None})
    for resume in (
        lambda: isotrain.resume(tmp_path / "run", spec=spec()),
        lambda: run(tmp_path / "other", resume=tmp_path / "run"),
    ):
        with pytest.raises(IsotrainError, match=r"no complete checkpoint.*has no `checkpoint`, so"):
            resume()
    with pytest.raises(IsotrainError, match=r"nor a folder or a run directory with one\.$"):
        run(tmp_path / "other", resume=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert_same(run(tmp_path / "run", resume="auto"), first)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(IsotrainError, match=r"{every_steps: 3}`: it ended before"):
        isotrain.resume(tmp_path / "run", spec=spec())


@pytest.mark.slow
def test_an_older_checkpoint_is_resumed_in_another_directory(tmp_path: Path) -> None:
    whole = run(tmp_path / "run", changes={"checkpoint": {"every_steps": 5, "keep_last": None}})
    older = tmp_path / "run/checkpoints/step-000000005"
    with pytest.raises(PlanError, match="newer checkpoints"):
        run(tmp_path / "run", resume=older)
    found = run(tmp_path / "other", resume=older)
    assert found.history.loss == whole.history.loss[5:]
    for name, weight in whole.weights.items():
        assert np.array_equal(found.weights[name], weight), name


def two_at_once(session: isotrain.Session) -> list[str]:
    """Rank 0 tries to take the directory of its own run."""
    if not session.is_main:
        return []
    try:
        with RunDirectory.reopen(session.run_directory).locked():
            return []
    except PlanError as error:
        return [str(error)]


def test_two_runs_in_one_directory_are_refused(tmp_path: Path) -> None:
    ((told,),) = isotrain.launch(
        two_at_once, spec(), backend="reference", output=tmp_path / "run", on_event=print
    )
    assert "a run is still running in" in told


def test_a_directory_that_is_not_empty_is_refused_with_a_way_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    run(folder, changes={"steps": 4})
    with pytest.raises(PlanError, match=r"is not empty\. Choose .* or empty it; or go on") as error:
        run(folder)
    words = shlex.split(str(error.value).split("`")[1])
    assert words == ["isotrain", "resume", str(folder)]
    done = command(*words[1:], folder=tmp_path)
    assert not done.returncode, done.stderr
    shutil.copy(folder / "spec.json", folder / "checkpoints")
    for files in (tmp_path, folder / "checkpoints"):  # neither is a run directory
        with pytest.raises(PlanError, match=r"is not empty\. Choose another, or empty it\.$"):
            run(files)


def own_loop(session: isotrain.Session) -> list[Any]:
    """Counts in `notes` how many batches it has seen in all, and saves in the middle of an epoch."""
    for batch in session.batches():
        session.step(batch)
        session.notes["seen"] = session.notes.get("seen", 0) + 1
        if session.steps_done == 8:
            session.save()
    return [session.notes["seen"], session.metrics(), session.read_state()]


def test_a_custom_loop_saves_and_resumes(tmp_path: Path) -> None:
    options = {"backend": "reference", "replicas": 2, "on_event": lambda event: None}
    given = spec(checkpoint=None)
    whole = isotrain.launch(own_loop, given, output=tmp_path / "run", **options)
    again = isotrain.launch(
        own_loop, given, output=tmp_path / "again", resume=tmp_path / "run", **options
    )
    for (seen, metrics, state), (seen_again, metrics_again, state_again) in zip(
        whole, again, strict=True
    ):
        assert seen == seen_again == STEPS
        assert metrics == metrics_again
        assert all(np.array_equal(state[name], state_again[name]) for name in state)


def test_a_session_in_this_process_resumes(tmp_path: Path) -> None:
    with isotrain.open_session(spec(), backend="reference") as session:
        batches = session.batches()
        for _ in range(6):
            session.step(next(batches))
        weights = session.read_state()
        session.notes["mine"] = [1, "two"]
        session.set_learning_rate(0.125)
        session.scale_learning_rate(0.5)
        folder = tmp_path / "kept"
        session.save(folder)
        session.set_learning_rate(0)
        session.step(next(batches))
        session.restore(folder)
        assert session.steps_done == 6
        assert session.notes == {"mine": [1, "two"]}
        assert session.learning_rate(6) == 0.0625
        assert all(np.array_equal(weights[name], v) for name, v in session.read_state().items())


def test_loggers_of_a_resumed_run_append_to_their_files(tmp_path: Path) -> None:
    changes = {"loggers": ["csv", "jsonl"], "steps": 4}
    run(tmp_path / "run", changes=changes)
    run(tmp_path / "run", resume="auto", changes=changes | {"steps": 9})
    rows = (tmp_path / "run/steps.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", *map(str, range(9))]
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [each["step"] for each in records if "epoch" not in each] == list(range(9))


def test_half_written_lines_do_not_prevent_resuming(tmp_path: Path) -> None:
    changes = {"steps": 6, "loggers": ["csv", "jsonl"]}
    run(tmp_path / "run", changes=changes)
    for name in ("events.jsonl", "steps.jsonl", "metrics.jsonl", "steps.csv"):
        with (tmp_path / "run" / name).open("a") as stream:
            stream.write('{"event": "ste')
    found = run(tmp_path / "run", resume="auto", changes=changes | {"steps": 8})
    assert len(found.history.loss) == 8
    events = (tmp_path / "run/events.jsonl").read_text()
    assert events.count('"resumed"') == 1


def back_once(session: isotrain.Session) -> list[int]:
    """Goes back to the checkpoint of step 3 when it has done six steps."""
    seen = []
    for batch in session.batches():
        seen.append(batch.step)
        session.step(batch)
        if session.steps_done == 3:
            session.save()
        if seen == list(range(6)):
            session.restore()
    return seen


def test_batches_continue_from_a_restored_session(tmp_path: Path) -> None:
    given = spec(checkpoint=None, steps=8)
    (seen,) = isotrain.launch(
        back_once, given, backend="reference", output=tmp_path / "run", on_event=print
    )
    assert seen == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]


@pytest.mark.slow
def test_a_plateau_goes_on_where_it_was(tmp_path: Path) -> None:
    """Every epoch but the first lowers the rate, as no value is so much better."""
    plateau = {"name": "plateau", "metric": "accuracy", "mode": "max", "patience": 1, "factor": 0.5}
    changes = {
        "schedule": {**plateau, "min_delta": 9.0},
        "checkpoint": {"every_steps": 1, "keep_last": None},
    }
    whole = run(tmp_path / "whole", changes=changes)
    rates = list(whole.history.learning_rate)
    assert rates[0] == 0.125
    assert len({*rates}) > 1
    for step in (STEPS // 2, STEPS - 2):
        checkpoint = tmp_path / "whole" / "checkpoints" / f"step-{step:09}"
        resumed = run(tmp_path / str(step), 3, resume=checkpoint, changes=changes)
        assert list(resumed.history.learning_rate)[-(STEPS - step) :] == rates[step:]


def test_a_resume_keeps_the_evaluation_at_its_own_step(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "evaluation": {"every_steps": 3, "every_epochs": 0},
        "checkpoint": {"every_steps": 3},
        "loggers": ["csv", "jsonl"],
    }
    whole = run(tmp_path / "whole", changes=changes)
    assert list(whole.history.scalars["validation_loss"]) == [3, 6, 9, 12, 15, STEPS]
    for steps in (9, STEPS):
        resumed = run(tmp_path / "resumed", resume="auto", changes=changes | {"steps": steps})
    assert resumed.history.scalars == whole.history.scalars
    table = "scalars.csv"
    assert (tmp_path / "resumed" / table).read_text() == (tmp_path / "whole" / table).read_text()


def test_a_plateau_of_a_metric_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsotrainError, match="accurcy"):
        run(tmp_path, changes={"schedule": {"name": "plateau", "metric": "accurcy", "mode": "max"}})
