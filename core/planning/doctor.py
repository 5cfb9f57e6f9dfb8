"""Finding out what works on this machine, by loading every backend in a process of its own."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.plugin_choice import PluginChoice
from isotrain.core.plugins import asked
from isotrain.core.plugins.host import PluginHost
from isotrain.core.system import hardware
from isotrain.core.system.child_process import ChildEndedError, ChildProcess

EXAMINATION_SECONDS = 60.0
_AT_A_TIME = 2
_POLL_SECONDS = 0.02
_EXAMINE = "isotrain.core.planning.doctor:examine_here"


def examine(
    host: PluginHost,
    names: Sequence[str] | None = None,
    *,
    seconds: float = EXAMINATION_SECONDS,
) -> dict[str, Any]:
    """Examines backends; whatever loading one of them does, the others are examined too.

    Args:
        host: Knows the backends.
        names: Of those to examine; all of them when not given.
        seconds: How long loading one of them may take.

    Returns:
        `backends`, `frameworks`, `machine`, `python` and `plugin_faults`, as plain values.

    Raises:
        IsotrainError: There is no backend of that name.
    """
    names = host.backends.names() if names is None else names
    for name in names:
        host.backends.get(name)
    backends = [
        _described(host, name, found)
        for name, found in zip(names, _examine_apart(host, names, seconds), strict=True)
    ]
    return {
        "backends": backends,
        "frameworks": _frameworks(backends),
        "machine": hardware.describe(),
        "python": {"version": sys.version.split()[0], "executable": sys.executable},
        "plugin_faults": dict(host.faults),
    }


def examine_here(task: Mapping[str, Any]) -> dict[str, Any]:
    """Examines one backend in this process.

    Args:
        task: Its `name`; the plugins that were `asked` for by module or file, and those `blocked` by name.

    Returns:
        What was found, or what loading it `raised`.
    """
    from isotrain.core.plugins.host import plugin_host

    asked.take_over(PluginChoice(tuple(task["asked"]), tuple(task["blocked"])))
    try:
        return asdict(plugin_host().backend(task["name"]).examine())
    except BaseException as error:  # whatever loading it raises is the finding
        return {"raised": f"{type(error).__name__}: {error}".strip(": ")}


def _examine_apart(host: PluginHost, names: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    """Has each backend examined in a process of its own, a few at a time; none of these is left."""
    findings: dict[str, dict[str, Any]] = {}
    waiting = deque(names)
    running: dict[str, ChildProcess] = {}
    with tempfile.TemporaryDirectory(prefix="isotrain-doctor-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < _AT_A_TIME:
                    name = waiting.popleft()
                    running[name] = _started(host, name, Path(folder))
                for name, process in list(running.items()):
                    if process.is_done or process.seconds > seconds:
                        findings[name] = _finding(process, seconds)
                        running.pop(name).end()
                time.sleep(_POLL_SECONDS)
        finally:
            for process in running.values():
                process.end()
    return [findings[name] for name in names]


def _started(host: PluginHost, name: str, folder: Path) -> ChildProcess:
    plugins = asked.for_workers(asked.current())
    task = {"name": name, "asked": plugins.asked, "blocked": plugins.blocked}
    return ChildProcess(_EXAMINE, task, folder / name, variables=_variables(host, name))


def _finding(process: ChildProcess, seconds: float) -> dict[str, Any]:
    """What it found, or how it ended instead."""
    if not process.is_done:
        return {"raised": f"loading it did not end within {seconds:g} s"}
    try:
        found: dict[str, Any] = process.answer()
        return found
    except ChildEndedError as error:
        return {"raised": f"loading it ended the process {error.how}; it said: {error.said}"}


def _variables(host: PluginHost, name: str) -> dict[str, str]:
    """The variables that a run would set, so that what is examined is what would run."""
    try:
        adapter = host.backend(name)
        device = "gpu" if adapter.accelerators() else "cpu"
        return adapter.variables(device=device, threads=1, replicas=1)  # type: ignore[arg-type]
    except Exception:  # the examination itself will say what is wrong
        return {}


def _described(host: PluginHost, name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Joins what an adapter declares with what its examination found."""
    adapter = _declaration(host, name)
    own = found.get("backend") or _unusable(adapter, found)
    examined = found.get("collectives") or {}
    declared = adapter.collectives if adapter else ()
    return {
        "name": name,
        "framework": adapter.framework if adapter else None,
        **own,
        "collectives": [
            {"name": collective, **_collective(own, examined.get(collective))}
            for collective in dict.fromkeys([*declared, *examined])
        ],
        "versions": dict(found.get("versions") or {}),
    }


def _declaration(host: PluginHost, name: str) -> Adapter | None:
    with contextlib.suppress(Exception):
        return host.backend(name)
    return None


def _unusable(adapter: Adapter | None, found: Mapping[str, Any]) -> dict[str, Any]:
    """What there is to say of a backend whose examination brought its process down."""
    cheap = None
    with contextlib.suppress(Exception):
        cheap = adapter.usability() if adapter else None
    if cheap is not None and not cheap.usable:
        return asdict(cheap)
    if adapter is None:
        hint = "repair or remove the plugin that registers it"
    else:
        hint = (
            f"try `{Path(sys.executable).name} -c 'import {adapter.framework}'`; install the"
            " packages of this backend anew, in versions that fit each other"
        )
    version = cheap.version if cheap else None
    return {"usable": False, "version": version, "reason": found.get("raised"), "hint": hint}


def _collective(own: Mapping[str, Any], found: Mapping[str, Any] | None) -> dict[str, Any]:
    if own["usable"] and found is not None:
        return {key: found.get(key) for key in ("usable", "reason", "hint")}
    if own["usable"]:
        return {"usable": False, "reason": "it was not examined", "hint": "use another collective"}
    return {"usable": False, "reason": own["reason"], "hint": own["hint"]}


def _frameworks(backends: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A framework is usable when one of its backends is; otherwise its first backend says why not."""
    frameworks: dict[str, dict[str, Any]] = {}
    for backend in backends:
        name = backend["framework"]
        if name is None or frameworks.get(name, {}).get("usable"):
            continue
        if backend["usable"]:
            version = backend["versions"].get(name, backend["version"])
            frameworks[name] = _framework(name, True, version, None, None)
        elif name not in frameworks:
            why = backend["reason"], backend["hint"]
            frameworks[name] = _framework(name, False, backend["version"], *why)
    return list(frameworks.values())


def _framework(
    name: str, usable: bool, version: str | None, reason: str | None, hint: str | None
) -> dict[str, Any]:
    return {
        "name": name,
        "usable": usable,
        "version": version,
        "reason": reason,
        "hint": hint,
    }
