"""Who a process is when several environments, or none, or a broken one, have something to say."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from isotrain.core.contracts.cluster_environment import ClusterEnvironment, ClusterInfo
from isotrain.core.errors import ClusterInfoError, IsotrainError, PluginError
from isotrain.core.planning.cluster_environment import (
    CHOICE_VARIABLE,
    COORDINATOR_VARIABLE,
    cluster_info_of,
)
from isotrain.core.plugins.manager import PluginManager
from isotrain.plugin import EnvReader


def environment(launcher: str, *, inside: frozenset[str] = frozenset()) -> type[ClusterEnvironment]:
    """An environment that claims a process whose variable `LAUNCHER_RANK` is set."""

    class Named(ClusterEnvironment):
        name = launcher
        summary = "for tests"

        def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
            told = EnvReader(launcher, variables)
            if not told.all_set(f"{launcher}_RANK", f"{launcher}_SIZE"):
                return None
            rank, size = (
                told.required_number(f"{launcher}_RANK"),
                told.required_number(f"{launcher}_SIZE"),
            )
            return ClusterInfo(launcher, told.variables_read, rank, size, "job")

    Named.nested_in = inside
    return Named


def set_by(*launchers: str) -> dict[str, str]:
    return {
        f"{e}_{what}": value for e in launchers for what, value in (("RANK", "1"), ("SIZE", "4"))
    }


@pytest.fixture
def host() -> PluginManager:
    """Knows A; B, which runs inside A; C, which runs inside both; and D, which stands alone."""
    host = PluginManager(entry_points=False)
    host.environments.restore({})
    for each in (
        environment("A"),
        environment("B", inside=frozenset({"A"})),
        environment("C", inside=frozenset({"A", "B"})),
        environment("D"),
    ):
        host.environments.add(each)
    return host


@pytest.mark.parametrize(
    ("launchers", "innermost"),
    [("A", "A"), ("B", "B"), ("AB", "B"), ("AC", "C"), ("ABC", "C"), ("D", "D")],
)
def test_the_innermost_launcher_wins(host: PluginManager, launchers: str, innermost: str) -> None:
    cluster_info = cluster_info_of(set_by(*launchers), host)
    assert cluster_info is not None
    assert (cluster_info.environment, cluster_info.rank, cluster_info.world_size) == (
        innermost,
        1,
        4,
    )


def test_an_ordinary_shell_has_no_cluster_info(host: PluginManager) -> None:
    assert cluster_info_of({"HOME": "/root", "A_RANK": "", "A_SIZE": " "}, host) is None


@pytest.mark.parametrize("launchers", ["AD", "BD", "ABD"])
def test_two_matching_environments_are_an_error_that_names_both(
    host: PluginManager, launchers: str
) -> None:
    with pytest.raises(ClusterInfoError) as caught:
        cluster_info_of(set_by(*launchers), host)
    for launcher in launchers:
        assert f"{launcher} by {launcher}_RANK, {launcher}_SIZE" in str(caught.value)


def test_a_chosen_environment_is_used(host: PluginManager) -> None:
    chosen = cluster_info_of({**set_by("A", "D"), CHOICE_VARIABLE: "D"}, host)
    assert chosen is not None
    assert chosen.environment == "D"
    assert cluster_info_of({**set_by("A"), CHOICE_VARIABLE: "D"}, host) is None
    assert cluster_info_of({**set_by("A"), CHOICE_VARIABLE: "none"}, host) is None
    with pytest.raises(IsotrainError, match=f"{CHOICE_VARIABLE}: unknown environment 'E'"):
        cluster_info_of({**set_by("A"), CHOICE_VARIABLE: "E"}, host)


@pytest.mark.parametrize(
    ("said", "expected"), [("n1", ("n1", None)), (" n1:20000 ", ("n1", 20000)), ("", (None, None))]
)
def test_the_coordinator_can_be_given(
    host: PluginManager, said: str, expected: tuple[str | None, int | None]
) -> None:
    cluster_info = cluster_info_of({**set_by("A"), COORDINATOR_VARIABLE: said}, host)
    assert cluster_info is not None
    assert (cluster_info.coordinator, cluster_info.port) == expected


@pytest.mark.parametrize("said", ["n1:abc", "n1:", ":5", "n1:0", "n1:70000", "a b"])
def test_a_malformed_coordinator_is_named(host: PluginManager, said: str) -> None:
    with pytest.raises(
        ClusterInfoError, match=f"{COORDINATOR_VARIABLE}: expected HOST or HOST:PORT"
    ):
        cluster_info_of({**set_by("A"), COORDINATOR_VARIABLE: said}, host)


def test_half_set_variables_are_named(host: PluginManager) -> None:
    with pytest.raises(ClusterInfoError, match="A: A_RANK is set, but not A_SIZE; expected all of"):
        cluster_info_of({"A_RANK": "0"}, host)


@pytest.mark.parametrize("rank", ["x", "-1", "1.5", "٣"])
def test_a_malformed_number_is_named(host: PluginManager, rank: str) -> None:
    with pytest.raises(ClusterInfoError, match=f"A: A_RANK is '{rank}'; expected an integer"):
        cluster_info_of({"A_RANK": rank, "A_SIZE": "4"}, host)


def test_a_rank_beyond_its_size_is_refused(host: PluginManager) -> None:
    with pytest.raises(
        ClusterInfoError, match="A: the rank is 4 of 4 processes, as A_RANK, A_SIZE say"
    ):
        cluster_info_of({"A_RANK": "4", "A_SIZE": "4"}, host)


@pytest.mark.parametrize(
    "wrong",
    [
        {"local_rank": 2, "local_world_size": 2},
        {"node_rank": 1, "hosts": ("n1",)},
        {"rank": -1},
    ],
)
def test_other_ranks_are_below_their_sizes_too(wrong: dict[str, object]) -> None:
    fields: dict[str, object] = {"rank": 0, "world_size": 4, **wrong}
    with pytest.raises(ClusterInfoError, match="expected at least 0 and less than"):
        ClusterInfo("A", ("A_RANK",), job="job", **fields)  # type: ignore[arg-type]


def test_an_environment_that_breaks_is_named(host: PluginManager) -> None:
    class Broken(ClusterEnvironment):
        name = "broken"
        summary = "for tests"

        def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
            raise ZeroDivisionError("no")

    host.environments.add(Broken)
    with pytest.raises(PluginError, match="'broken' failed: ZeroDivisionError: no"):
        cluster_info_of({}, host)
