"""The plugin host: registration, and what happens to broken plugins."""

from __future__ import annotations

import importlib.metadata
import pickle
import types
from typing import Any

import pytest

from isotrain.core.contracts.job import PluginChoice
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import IsotrainError, PluginError
from isotrain.core.plugins import selection
from isotrain.core.plugins.hookspecs import hookimpl
from isotrain.core.plugins.manager import PLUGINS_VARIABLE, PluginManager, StrategyRegistry
from isotrain.core.system.version import versions
from isotrain.testing.backend import declarations


class Nothing(Strategy):
    name = "nothing"
    summary = "does nothing"
    requires = frozenset()

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        return 0.0


class GoodPlugin:
    @hookimpl
    def isotrain_register_strategies(self, register: StrategyRegistry) -> None:
        register.add(Nothing)


GOOD = GoodPlugin()


class TakesATakenName:
    @hookimpl
    def isotrain_register_strategies(self, register: StrategyRegistry) -> None:
        register.add("somewhere:Else", name="fresh")
        register.add(Nothing, name="data-parallel")


class Misspelled:
    @hookimpl
    def isotrain_register_stategies(self, register: StrategyRegistry) -> None:
        raise AssertionError("never called")


def test_builtins_and_third_parties_use_the_same_hook(host: PluginManager) -> None:
    host.add(GoodPlugin())
    assert {"data-parallel", "nothing"} < set(host.strategies.names())
    assert isinstance(host.strategy("nothing", {}), Nothing)


def test_a_broken_plugin_leaves_nothing_behind(host: PluginManager) -> None:
    with pytest.raises(PluginError, match="is taken by"):
        host.add(TakesATakenName())
    assert "data-parallel" in host.strategies.names()
    assert "nothing" not in host.strategies.names()
    host.add(GoodPlugin())


class RaisesWhereItIsRead(GoodPlugin):
    @property
    def anything(self) -> None:
        raise RuntimeError("no such thing here")


def test_a_plugin_that_raises_on_inspection_is_skipped() -> None:
    given = (("breaks", RaisesWhereItIsRead()), ("good", GoodPlugin()))
    choice = PluginChoice(registered=given)
    host = PluginManager(choice, entry_points=False, strict=False)
    assert host.faults == {"breaks": "RuntimeError: no such thing here"}
    assert "nothing" in host.strategies.names()


def test_a_misspelled_hook_is_an_error(host: PluginManager) -> None:
    with pytest.raises(PluginError, match="isotrain_register_stategies"):
        host.add(Misspelled())


def test_replacing_must_be_explicit(host: PluginManager) -> None:
    host.strategies.add(Nothing, name="data-parallel", replace=True)
    assert isinstance(host.strategy("data-parallel", {}), Nothing)


def test_a_class_that_is_no_strategy_is_refused(host: PluginManager) -> None:
    host.strategies.add("isotrain.core.contracts.backend.capabilities:Capability", name="odd")
    with pytest.raises(PluginError, match="expected a subclass"):
        host.strategy("odd", {})
    with pytest.raises(PluginError, match="has no name"):
        host.strategies.add(object())


def test_an_unknown_name_lists_the_available_ones(host: PluginManager) -> None:
    with pytest.raises(IsotrainError, match=r"'data-parallel'\? Available: .*data-parallel"):
        host.strategy("data-paralell", {})


def test_a_broken_entry_point_is_kept_and_the_others_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("half installed")

    entries = [
        types.SimpleNamespace(name="broken", load=broken),
        types.SimpleNamespace(name="good", load=GoodPlugin),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
    host = PluginManager()
    assert host.faults == {"broken": "ImportError: half installed"}
    assert "nothing" in host.strategies.names()


def test_ranks_load_no_installed_plugins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = importlib.metadata.EntryPoint("parts", f"{__name__}:GOOD", "isotrain")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    told = selection.for_workers(PluginChoice(), PluginManager().installed)
    travelled = pickle.loads(pickle.dumps(told))  # noqa: S301
    monkeypatch.delattr(importlib.metadata, "entry_points")
    assert "nothing" in PluginManager(travelled).strategies.names()
    with pytest.raises(AttributeError):
        PluginManager()


def test_modules_that_the_variable_names_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLUGINS_VARIABLE, "isotrain.core.nonsense")
    with pytest.raises(PluginError, match=r"nonsense.*ISOTRAIN_PLUGINS"):
        PluginManager(entry_points=False)


@pytest.mark.parametrize("name", PluginManager(entry_points=False).backends.names())
def test_every_backend_declares_every_capability(host: PluginManager, name: str) -> None:
    adapter = host.backend(name)
    assert adapter.name == name
    declarations(adapter)


def listener(told: list[str], name: str, error: Exception | None = None, **options: Any) -> Any:
    """A plugin that notes what it is told, and then raises, if it is to."""

    def isotrain_run_failed(message: str) -> None:
        told.append(f"{name}: {message}")
        if error is not None:
            raise error

    plugin = types.SimpleNamespace()
    plugin.isotrain_run_failed = hookimpl(**options)(isotrain_run_failed)
    return plugin


def test_event_hooks_run_in_their_declared_order(host: PluginManager) -> None:
    told: list[str] = []
    asked: dict[str, dict[str, Any]] = {
        "first": {"tryfirst": True},
        "one": {},
        "last": {"trylast": True},
        "two": {},
    }
    for name, options in asked.items():
        host.add(listener(told, name, **options), name=name)
    host.call_hook("isotrain_run_failed", message="no", run_directory="here")
    assert told == ["first: no", "two: no", "one: no", "last: no"]


def test_a_listener_that_raises_is_skipped(host: PluginManager) -> None:
    told: list[str] = []
    host.add(listener(told, "one"), name="one")
    host.add(listener(told, "two", KeyError("gone")), name="two")
    with pytest.warns(UserWarning, match="plugin 'two', isotrain_run_failed: KeyError: 'gone'"):
        host.call_hook("isotrain_run_failed", message="no", run_directory="here")
    assert told == ["two: no", "one: no"]


@pytest.mark.parametrize("option", ["wrapper", "hookwrapper"])
def test_wrappers_are_refused(host: PluginManager, option: str) -> None:
    class Wraps:
        @hookimpl(**{option: True})
        def isotrain_run_failed(self, message: str) -> Any:
            yield

    with pytest.raises(PluginError, match="isotrain_run_failed cannot be a wrapper"):
        host.add(Wraps())


@pytest.mark.parametrize("option", ["tryfirst", "trylast"])
def test_registration_hooks_take_no_order(host: PluginManager, option: str) -> None:
    class Hurries:
        @hookimpl(**{option: True})
        def isotrain_register_strategies(self, register: StrategyRegistry) -> None:
            register.add(Nothing)

    with pytest.raises(PluginError, match="register in the order in which they are found"):
        host.add(Hurries())
    assert "nothing" not in host.strategies.names()


def test_a_record_has_the_versions_of_what_the_backend_names(host: PluginManager) -> None:
    found = versions([*host.backend("torch-ddp").packages, "no-such-package"])
    assert set(found) == {"python", "isotrain", "numpy", "torch", "keras"}
    assert found["torch"] == importlib.metadata.version("torch")
