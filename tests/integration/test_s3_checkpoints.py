"""A bucket is a path like any other: checkpoints on a server that speaks S3, and where other URLs lead."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from integration import test_resume
from integration.random_kills import Killer
from unit.checkpoints.saving import newest, save

import isotrain
from isotrain.core.checkpoints.folder import CheckpointFolder, checkpoint_at
from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.cli.main import main
from isotrain.core.errors import CheckpointError, PlanError

pytestmark = pytest.mark.features  # the library for S3 alone takes seconds to load

CALLS = ("open", "pipe_file", "ls", "rm")
"""What of a file system is used to write, commit and prune."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server that keeps its buckets in memory."""
    from moto.server import ThreadedMotoServer  # here: only one test process needs it

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["s3", "memory", "local"])
def location(
    request: pytest.FixtureRequest, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The URL of an empty folder, found as a person's are: by what the environment says."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    folder = f"{tmp_path}/" if request.param == "local" else ""
    bucket = f"{request.param}://{folder}{uuid.uuid4()}"
    system = fsspec.filesystem(request.param)
    system.mkdir(bucket)
    yield f"{bucket}/run"
    type(system).clear_instance_cache()


def test_checkpoints_are_saved_in_a_bucket(
    location: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = f"{location}/checkpoints"
    assert CheckpointFolder(folder).newest() is None
    for step in (1, 2):
        save(folder, step, step, f"t{step}")
        assert newest(folder) == (step, step)
    checkpoint = checkpoint_at(location)
    assert checkpoint_at(checkpoint.location).step == 2
    assert checkpoint.read_part("state", "w", (1, 0), (1, 2)).tolist() == [[2, 2]]
    assert [each.step for each in CheckpointFolder(folder).complete()] == [2]
    assert main(["checkpoint", "verify", location]) == ExitCode.OK
    assert checkpoint.location in capsys.readouterr().out


def test_a_damaged_file_in_a_bucket_is_named(location: str) -> None:
    save(location, 1, 1, "t")
    url = f"{location}/step-000000001/t/state-00000.safetensors"
    with fsspec.open(url) as stream:
        content = bytearray(stream.read())
    content[-1] ^= 1
    with fsspec.open(url, "wb") as stream:
        stream.write(content)
    with pytest.raises(CheckpointError, match=url):
        newest(location)
    with fsspec.open(url, "wb") as stream:
        stream.write(content[:-1])
    assert url in CheckpointFolder(location).damaged()[1]


def failing_at(
    place: int, real: Callable[..., Any], calls: Iterator[int], lasts: bool
) -> Callable[..., Any]:
    """Fails the call with this number; if it lasts all after it, as for a process that is killed."""

    def call(*args: Any, **options: Any) -> Any:
        number = next(calls)
        if number == place or (lasts and number > place):
            raise ConnectionError("the network is gone")
        return real(*args, **options)

    return call


@pytest.mark.parametrize(
    ("location", "lasts"),
    [("s3", True), ("memory", True), ("local", True), ("memory", False)],
    indirect=["location"],
)
def test_a_failed_request_loses_no_checkpoint(
    location: str, lasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request fails, or all after it do too, as where a process is killed."""
    system = fsspec.core.url_to_fs(location)[0]
    failures, apart = [], 3 if location.startswith("s3") else 1  # S3 is slow
    save(location, 0, 1, "first")
    for place in itertools.count(step=apart):
        step, calls = place + 1, itertools.count()
        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(system, name, failing_at(place, getattr(system, name), calls, lasts))
            try:
                save(location, step, 2 * step, f"second-{step}")
            except CheckpointError as error:
                failures.append(str(error))
        before = max(0, step - apart)
        assert newest(location) in ((before, 2 * before + 1), (step, 2 * step))
        save(location, step, 2 * step + 1, f"third-{step}")
        assert newest(location) == (step, 2 * step + 1)
        if next(calls) <= place:
            break
    assert len(failures) > 15 // apart
    assert all("the network is gone" in each for each in failures)


@pytest.mark.parametrize("location", ["s3"], indirect=True)
@pytest.mark.parametrize("url", ["s3://no-such-bucket/run", "nonsense://run"])
@pytest.mark.usefixtures("location")
def test_a_wrong_url_is_an_error(url: str) -> None:
    with pytest.raises(CheckpointError, match=url):
        save(url, 1, 1, "t")
    with pytest.raises(CheckpointError, match=url):
        CheckpointFolder(url).save(1, sections={}, run={})


@pytest.mark.parametrize("location", ["s3"], indirect=True)
@pytest.mark.usefixtures("reference")
def test_a_killed_run_resumes_from_a_bucket(location: str, tmp_path: Path) -> None:
    """It restarts, resumes in its directory, and resumes from the bucket alone with other replicas."""
    spec, run = test_resume.spec, test_resume.run
    whole = run(tmp_path / "whole", changes={"steps": 15})
    changes = {"checkpoint": {"every_steps": 3, "folder": location}, "steps": 10}
    killer = {"transform": Killer.at([("batch", 9)], tmp_path / "kills")}
    killed = run(tmp_path / "killed", changes=changes | killer, max_restarts=1)
    (restart,) = killed.restarts
    assert restart["from_step"] in (3, 6)
    assert not (tmp_path / "killed/checkpoints").exists()
    with pytest.raises(PlanError, match=r"has checkpoints of another run, up to step 10"):
        run(tmp_path / "second", changes=changes)
    changes["steps"] = 15
    found = isotrain.resume(tmp_path / "killed", spec=spec(**changes), on_event=lambda event: None)
    test_resume.assert_same(found, whole)
    changes["steps"] = 17
    other = run(tmp_path / "other", 1, resume=location, changes=changes)
    assert len(other.history.loss) == 2
    assert checkpoint_at(location).step == 17


def test_a_bucket_holds_checkpoints_and_no_directory_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"received s3://bucket/run.*checkpoint\.folder"):
        test_resume.run("s3://bucket/run")  # type: ignore[arg-type]
    memory = {"checkpoint": {"folder": "memory://run"}}
    with pytest.raises(PlanError, match="in the memory of one process"):
        test_resume.run(tmp_path / "run", changes=memory)


@pytest.mark.parametrize("location", ["memory"], indirect=True)
@pytest.mark.usefixtures("reference")
def test_a_session_of_one_process_saves_in_its_memory(location: str) -> None:
    spec = test_resume.spec(checkpoint={"every_steps": 3, "folder": location})
    ends = []
    for steps in (6, None):
        with isotrain.open_session(spec, backend="reference") as session:
            if ends:
                session.restore()
                assert session.steps_done == 6
            for batch in itertools.islice(session.batches(), steps):
                session.step(batch)
                session.save_if_due()
            ends.append(session.steps_done)
    assert ends == [6, test_resume.STEPS]
