"""Checks of what a backend declares. They start no run."""

from __future__ import annotations

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.capabilities import Availability, Capabilities, Capability
from isotrain.core.contracts.parallel_layout import REPLICATED
from isotrain.core.errors import IsotrainError, UnsupportedError
from isotrain.core.spec.loading import load_spec
from isotrain.testing import reference_model

_UNKNOWN = "no-such-thing"


def declarations(adapter: Adapter) -> None:
    """In every parallel layout, a capability is there or lacking with a reason; a collective is there."""
    declared = adapter.capabilities
    assert REPLICATED.name in declared, f"{REPLICATED.name}: nothing is declared"
    for parallel_layout, can in declared.items():
        _capabilities(parallel_layout, can)
    assert adapter.collectives, "no collective"
    assert adapter.replicas_per_process in ("one", "all"), adapter.replicas_per_process
    assert isinstance(adapter.availability(), Availability), "availability() gives no Availability"


def _capabilities(parallel_layout: str, can: Capabilities) -> None:
    for capability in Capability:
        declared = (capability in can.has) + (capability in can.lacks)
        assert declared == 1, (
            f"{parallel_layout}: {capability} is in {declared} of `has` and `lacks`; expected in one"
        )
        assert can.lacks.get(capability, "-").strip(), (
            f"{parallel_layout}: {capability} is lacking without a reason"
        )
    unknown = {*can.has, *can.lacks} - set(Capability)
    assert not unknown, f"{parallel_layout}: no capabilities: {sorted(map(str, unknown))}"


def unknown_choices_are_refused(adapter: Adapter) -> None:
    """A collective or an option that the backend does not know is an error that names it."""
    options = {"backend_options": {adapter.name: {_UNKNOWN: 1}}}
    spec = load_spec(reference_model.spec(adapter, **options))
    messages = {}
    try:
        adapter.resolve_collective(_UNKNOWN, device="cpu", replicas=2)
    except UnsupportedError as error:
        messages["collective"] = str(error)
    try:
        adapter.check_options(spec)
    except IsotrainError as error:
        messages["option"] = str(error)
    for kind in ("collective", "option"):
        assert kind in messages, f"the {kind} {_UNKNOWN!r} was accepted"
        assert _UNKNOWN in messages[kind], f"the {kind} {_UNKNOWN!r} is not named: {messages[kind]}"
