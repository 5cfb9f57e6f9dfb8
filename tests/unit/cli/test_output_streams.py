"""Commands whose output, error stream or current folder is closed, full or gone."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from unittest import mock

import pytest
from helpers.in_process import command as in_process
from unit.cli.small_project import redirected, started

from isotrain.core.cli.commands import list as list_command
from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.cli.main import main


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    process = started(["schema"], tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert not process.stderr.read()
    assert process.wait(timeout=60) == ExitCode.OUTPUT_CLOSED


@pytest.mark.parametrize("command", ["resume", "runs", "logs", "report"])
def test_a_too_long_path_is_one_line_of_error(command: str, tmp_path: Path) -> None:
    (told,) = in_process(command, "d" * 300, folder=tmp_path).stderr.splitlines()
    assert told.startswith("isotrain: ddd")
    assert told.endswith(": File name too long")


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        ("backends > /dev/full", 1, "the output, or a file, cannot be written: No space left"),
        ("--help > /dev/full", 1, "the output, or a file, cannot be written: No space left"),
        ("plan nowhere.yaml --backend reference 2> /dev/full", 2, ""),
        ("plan nowhere.yaml --backend reference --json > /dev/full", 2, "no spec file"),
        ("rn 2>&-", 2, ""),
    ],
)
def test_full_or_closed_output_is_reported(
    command: str, code: int, told: str, tmp_path: Path
) -> None:
    done = redirected(command, tmp_path)
    assert done.returncode == code
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == bool(told), "neither tracebacks nor other noise"


def test_non_blocking_output_is_not_reported_as_a_process_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = BlockingIOError(errno.EAGAIN, "write could not complete without blocking", 0)
    with mock.patch.object(list_command, "schema", side_effect=full):
        assert main(["schema"]) == ExitCode.RUN_FAILED
    assert capsys.readouterr().err.startswith("isotrain: the output, or a file, cannot be written")


def test_characters_that_the_output_lacks_are_escaped() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with (
        mock.patch("sys.stdout", out),
        mock.patch.object(list_command, "schema", side_effect=lambda _: print("\u2013")),
    ):
        assert main(["schema"]) == ExitCode.OK
    assert out.buffer.getvalue() == b"\\u2013\n"  # type: ignore[attr-defined]


def test_a_removed_current_folder_is_reported(folder: Path) -> None:
    inside = folder / "inside"
    inside.mkdir()
    plan = f"plan {folder}/small.json --backend reference --no-measure"
    done = redirected(plan, inside, before=f"rmdir {inside};")
    assert done.returncode == ExitCode.USAGE
    assert done.stderr == "isotrain: the current folder was removed. Change to one that exists.\n"
