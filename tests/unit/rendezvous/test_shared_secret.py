"""The key of a run whose processes were started from outside."""

from __future__ import annotations

import os
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from unit.rendezvous.rendezvous_helpers import key

from isotrain.core.contracts.cluster_environment import ClusterInfo
from isotrain.core.errors import PlanError
from isotrain.core.rendezvous import shared_secret as key_module
from isotrain.core.system import files


def test_keys_are_the_same_for_one_run_and_differ_between_runs() -> None:
    assert key().secret == key().secret
    others = [key("another"), key(number=1), key(own=b"mine")]
    assert len({each.secret for each in (key(), *others)}) == 4
    assert key().numbers(8, 1000) == key().numbers(8, 1000)
    assert len({*key().numbers(8, 10)}) == 8


def test_an_invalid_key_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    monkeypatch.setattr(key_module, "FILE", file)
    with pytest.raises(PlanError, match=r"torchrun has started share no secret .* rand -hex 32 > "):
        secret(ON_TWO_HOSTS)
    file.mkdir()
    with pytest.raises(PlanError, match="cannot be read: Is a directory"):
        secret(ON_TWO_HOSTS)
    file.rmdir()
    file.touch(0o600)
    with pytest.raises(PlanError, match="is empty"):
        secret(ON_TWO_HOSTS)
    file.write_text("secret\n")
    assert secret(ON_TWO_HOSTS) == b"secret"
    file.chmod(0o640)
    with pytest.raises(PlanError, match="other users can read it"):
        secret(ON_TWO_HOSTS)


ON_TWO_HOSTS = ClusterInfo("torchrun", ("RANK",), 0, 2, "job", local_world_size=1)
ON_ONE_HOST = ClusterInfo("torchrun", ("RANK",), 0, 2, "job", local_world_size=2)


def secret(
    where: ClusterInfo, given: str | None = None, *, is_certified: bool = False, **variables: str
) -> bytes:
    return key_module.shared_secret(where, variables, given, is_certified=is_certified)


def test_a_secret_comes_from_the_user_or_the_launcher_or_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_module, "FILE", tmp_path / "none")
    named = tmp_path / "named"
    assert secret(ON_TWO_HOSTS, "the launcher's") == b"the launcher's"
    assert secret(ON_TWO_HOSTS, "the launcher's", ISOTRAIN_KEY="mine") == b"mine"
    with pytest.raises(PlanError, match=f"does not see {named}, which has the key of this run"):
        secret(ON_TWO_HOSTS, "the launcher's", ISOTRAIN_KEY_FILE=str(named))
    named.touch(0o600)
    named.write_text("of a file\n")
    assert secret(ON_TWO_HOSTS, ISOTRAIN_KEY_FILE=str(named)) == b"of a file"
    assert secret(ON_TWO_HOSTS, is_certified=True)
    monkeypatch.setattr(key_module, "FILE", named)  # which other hosts may not have
    assert secret(ON_TWO_HOSTS, "the launcher's") == b"the launcher's"
    assert [each.name for each in tmp_path.iterdir()] == ["named"]


def test_a_secret_is_created_on_one_host_or_in_a_shared_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_module, "FILE", tmp_path / "home" / "key")
    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(secret, [ON_ONE_HOST] * 8))
    assert [len(each) for each in made] == [64]
    (file,) = (tmp_path / "home").iterdir()
    assert file.name == f"key-of-{socket.gethostname()}"
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(PlanError, match="share no secret"):
        secret(ON_TWO_HOSTS)
    monkeypatch.setattr(key_module, "is_shared", lambda path: True)
    shared = secret(ON_TWO_HOSTS)
    assert {secret(ON_TWO_HOSTS), secret(ON_ONE_HOST)} == {shared} != made
    assert (tmp_path / "home" / "key").read_bytes().strip() == shared


def test_without_a_home_a_secret_is_created_in_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(key_module, "FILE", tmp_path / "file" / "key")  # no folder can be there
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert secret(ON_ONE_HOST) == secret(ON_ONE_HOST)
    (folder,) = tmp_path.glob("isotrain-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(PlanError, match="share no secret"):
        secret(ON_ONE_HOST)
    folder.chmod(0o700)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    folder.rename(tmp_path / f"isotrain-{other}")
    with pytest.raises(PlanError, match="share no secret"):
        secret(ON_ONE_HOST)


MOUNTS = """\
22 1 0:20 / / rw - overlay overlay rw
30 22 0:40 / /home rw,relatime shared:1 - nfs4 server:/home rw
31 30 0:41 / /home/a\\040b rw - ext4 /dev/sda rw
32 22 0:42 / /scratch rw - ext4 /dev/sdb rw
33 22 0:43 / /scratch rw - lustre mds:/scratch rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        *(("/root/.config", "overlay"), ("/home/me/.config/isotrain/key", "nfs4")),
        *(("/home/a b/key", "ext4"), ("/homes", "overlay"), ("/scratch/me", "lustre")),
    ],
)
def test_the_file_system_is_that_of_the_innermost_last_mount(path: str, kind: str) -> None:
    assert files.file_system_type(Path(path), MOUNTS) == kind
    assert not files.is_shared(Path("/proc/self"))
