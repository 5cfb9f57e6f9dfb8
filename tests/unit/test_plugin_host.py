"""The plugin host: registration, and what happens to broken plugins."""

from __future__ import annotations

import importlib.metadata
import types
from typing import Any

import pytest

from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import IsotrainError, PluginError
from isotrain.core.plugins.hookspecs import hookimpl
from isotrain.core.plugins.host import PLUGINS_VARIABLE, PluginHost, StrategyRegister
from isotrain.testing.declarations import declarations


class Nothing(Strategy):
    name = "nothing"
    summary = "does nothing"
    requires = frozenset()

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        return 0.0


class GoodPlugin:
    @hookimpl
    def isotrain_register_strategies(self, register: StrategyRegister) -> None:
        register.add(Nothing)


class TakesATakenName:
    @hookimpl
    def isotrain_register_strategies(self, register: StrategyRegister) -> None:
        register.add("somewhere:Else", name="fresh")
        register.add(Nothing, name="data-parallel")


class Misspelled:
    @hookimpl
    def isotrain_register_stategies(self, register: StrategyRegister) -> None:
        raise AssertionError("never called")


@pytest.fixture
def host() -> PluginHost:
    return PluginHost(entry_points=False)


def test_builtins_and_third_parties_use_the_same_hook(host: PluginHost) -> None:
    host.add(GoodPlugin())
    assert {"data-parallel", "nothing"} < set(host.strategies.names())
    assert isinstance(host.strategy("nothing", {}), Nothing)


def test_a_broken_plugin_leaves_nothing_behind(host: PluginHost) -> None:
    with pytest.raises(PluginError, match="is taken by"):
        host.add(TakesATakenName())
    assert "data-parallel" in host.strategies.names()
    assert "nothing" not in host.strategies.names()
    host.add(GoodPlugin())


def test_a_misspelled_hook_is_an_error(host: PluginHost) -> None:
    with pytest.raises(PluginError, match="isotrain_register_stategies"):
        host.add(Misspelled())


def test_replacing_must_be_asked_for(host: PluginHost) -> None:
    host.strategies.add(Nothing, name="data-parallel", replace=True)
    assert isinstance(host.strategy("data-parallel", {}), Nothing)


def test_what_is_no_strategy_is_refused(host: PluginHost) -> None:
    host.strategies.add("isotrain.core.contracts.capabilities:Capability", name="odd")
    with pytest.raises(PluginError, match="expected a subclass"):
        host.strategy("odd", {})
    with pytest.raises(PluginError, match="has no name"):
        host.strategies.add(object())


def test_an_unknown_name_tells_what_there_is(host: PluginHost) -> None:
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
    host = PluginHost()
    assert host.faults == {"broken": "ImportError: half installed"}
    assert "nothing" in host.strategies.names()


def test_modules_from_the_environment_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLUGINS_VARIABLE, "isotrain.core.nonsense")
    with pytest.raises(PluginError, match="nonsense"):
        PluginHost(entry_points=False)


@pytest.mark.parametrize("name", PluginHost(entry_points=False).backends.names())
def test_every_backend_declares_every_capability(host: PluginHost, name: str) -> None:
    adapter = host.backend(name)
    assert adapter.name == name
    declarations(adapter)
