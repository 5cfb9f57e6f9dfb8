"""The source distribution and the wheel: what is in them, and that the wheel trains without a framework."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import isotrain

ROOT = Path(__file__).parents[2]
DEPENDENCIES = (
    *("annotated_types", "cloudpickle", "markdown_it", "mdurl", "numpy", "numpy.libs", "pluggy"),
    *("psutil", "pydantic", "pydantic_core", "pygments", "rich", "typing_extensions.py"),
    *("typing_inspection", "yaml"),
)
"""Packages and modules that isotrain's dependencies install, without fsspec, which only URLs need."""
FOLDERS = {"benchmarks", "core", "docs", "examples", "isotrain", "tests", "tools"}
URL = "https://example.org/isotrain"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")

pytestmark = [pytest.mark.slow, pytest.mark.examples]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, made of what git tracks, and the wheel, made of that."""
    folder = tmp_path_factory.mktemp("distributions")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            target = folder / "clone" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    program = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    variables = {**os.environ, "ISOTRAIN_URL": f"{URL}/"}
    subprocess.run([sys.executable, "-c", program], cwd=folder / "clone", env=variables, check=True)
    (source,) = folder.glob("*.tar.gz")
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    subprocess.run([*PIP, "wheel", *options, str(source)], env=variables, check=True)
    (wheel,) = folder.glob("*.whl")
    return source, wheel


def test_the_source_distribution_has_what_is_needed_to_test_and_build_it(
    distributions: tuple[Path, Path],
) -> None:
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name.partition("/")[0] for name in names} >= FOLDERS
    files = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "constraints.txt")
    documents = ("docs/tutorial.md", "mkdocs.yml", "examples/digits.py", "tests/conftest.py")
    assert names >= {*files, *documents, "tools/setup_environment.py"}
    assert not [name for name in names if name.endswith(".pyc")]


def test_the_wheel_has_the_packages_alone(distributions: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(distributions[1]).namelist()
    assert {name.partition("/")[0] for name in names} == {
        "isotrain",
        f"isotrain-{isotrain.__version__}.dist-info",
    }
    patches = [name for name in names if name.endswith(".patch")]
    folder = "isotrain/build_horovod"
    assert sorted(patches) == [f"{folder}/horovod-0.28.1{kind}.patch" for kind in ("-gpu", "")]


def test_the_page_of_the_package_has_links_that_lead_somewhere(
    distributions: tuple[Path, Path],
) -> None:
    wheel = zipfile.ZipFile(distributions[1])
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(wheel.read(name))
    version = isotrain.__version__
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    assert urls["Homepage"] == URL
    assert urls["Changelog"] == f"{URL}/blob/v{version}/CHANGELOG.md"
    text = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert f"[tutorial]({URL}/blob/v{version}/docs/tutorial.md)" in text
    assert f"]({URL}/raw/v{version}/docs/report-loss.png)" in text
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_the_wheel_trains_in_an_empty_environment(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    """As a new user has it: nothing but the wheel and its dependencies, and no framework."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    options = ("--no-deps", "--no-index", str(distributions[1]))
    subprocess.run([*PIP, "--python", str(python), "install", *options], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    for name in DEPENDENCIES:
        (packages / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def command(*arguments: str, folder: Path) -> str:
        words = [str(environment / "bin" / "isotrain"), *arguments]
        done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "No framework is installed" in command("init", "spirals", folder=tmp_path)
    result = command("run", "train.yaml", "--replicas", "2", folder=tmp_path / "spirals")
    assert result.startswith("final loss ")
    build = [str(python), "-m", "isotrain.build_horovod"]
    done = subprocess.run(build, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert "neither PyTorch nor TensorFlow is installed" in done.stdout + done.stderr
