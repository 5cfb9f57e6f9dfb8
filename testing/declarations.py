"""Checks of what a backend declares; no run is started."""

from __future__ import annotations

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.capabilities import Capability
from isotrain.core.contracts.usability import Usability
from isotrain.core.errors import IsotrainError, UnsupportedError
from isotrain.core.spec.files import load_spec
from isotrain.testing import probe

_UNKNOWN = "no-such-thing"


def declarations(adapter: Adapter) -> None:
    """Every capability is either supported, or unsupported with a reason; a collective is there."""
    for capability in Capability:
        declared = (capability in adapter.supported) + (capability in adapter.unsupported)
        assert declared == 1, (
            f"{capability} is in {declared} of `supported` and `unsupported`; expected in one"
        )
        assert adapter.unsupported.get(capability, "-"), f"{capability}: missing without a reason"
    unknown = {*adapter.supported, *adapter.unsupported} - set(Capability)
    assert not unknown, f"no capabilities: {sorted(map(str, unknown))}"
    assert adapter.collectives, "no collective"
    assert adapter.replicas_per_process in ("one", "all"), adapter.replicas_per_process
    assert isinstance(adapter.usability(), Usability), "usability() gives no Usability"


def unknown_choices_are_refused(adapter: Adapter) -> None:
    """A collective or an option that the backend does not know is an error that names it."""
    options = {"backend_options": {adapter.name: {_UNKNOWN: 1}}}
    spec = load_spec(probe.spec(**options))
    told = {}
    try:
        adapter.resolve_collective(_UNKNOWN, device="cpu", replicas=2)
    except UnsupportedError as error:
        told["collective"] = str(error)
    try:
        adapter.check_options(spec)
    except IsotrainError as error:
        told["option"] = str(error)
    for kind in ("collective", "option"):
        assert kind in told, f"the {kind} {_UNKNOWN!r} was accepted"
        assert _UNKNOWN in told[kind], f"the {kind} {_UNKNOWN!r} is not named: {told[kind]}"
