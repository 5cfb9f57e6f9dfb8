"""Finding out what works on this machine, by loading every backend in another process."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.job import PluginChoice
from isotrain.core.plugins import selection
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.system import hardware
from isotrain.core.system.subprocess_call import ChildEndedError, ChildProcess

EXAMINATION_SECONDS = 60.0
_AT_A_TIME = 2
_POLL_SECONDS = 0.02
_PROXIES = {f"{scheme}_proxy" for scheme in ("all", "grpc", "http", "https")}
_EXAMINE = "isotrain.core.planning.doctor:examine_here"


def examine(
    host: PluginManager,
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
        `backends`, `frameworks`, `machine`, `python`, `proxies` (the variables that name some) and
        `plugin_faults`, as plain values.

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
        "proxies": [name for name in sorted(os.environ) if _names_a_proxy(name)],
        "plugin_faults": dict(host.faults),
    }


def _names_a_proxy(variable: str) -> bool:
    return bool(os.environ[variable]) and variable.lower() in _PROXIES


def examine_here(task: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Examines backends in this process, one after the other.

    Args:
        task: Their `names`; the plugins that were `asked` for by module or file, and those `blocked` by name.

    Returns:
        By name: what was found, or what loading it `raised`.
    """
    selection.set_current(PluginChoice(tuple(task["requested"]), tuple(task["blocked"])))
    return {name: _examined(name) for name in task["names"]}


def _examined(name: str) -> dict[str, Any]:
    from isotrain.core.plugins.manager import plugin_manager

    try:
        return asdict(plugin_manager().backend(name).examine())
    except BaseException as error:  # whatever loading it raises is the finding
        return {"raised": f"{type(error).__name__}: {error}".strip(": ")}


_Group = tuple[str, ...]
"""Names of backends that are examined in one process."""


def _examine_apart(
    host: PluginManager, names: Sequence[str], seconds: float
) -> list[dict[str, Any]]:
    """Has backends examined in processes of their own, a few at a time; none of these is left.

    Backends of one framework share a process, which imports it once. What is not found usable there is
    examined again by itself: another may be to blame.
    """
    findings: dict[str, dict[str, Any]] = {}
    waiting = deque(_groups(host, names))
    running: dict[_Group, ChildProcess] = {}
    with tempfile.TemporaryDirectory(prefix="isotrain-doctor-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < _AT_A_TIME:
                    group = waiting.popleft()
                    running[group] = _started(host, group, Path(folder))
                for group, process in list(running.items()):
                    limit = seconds * len(group)
                    if process.is_done or process.seconds > limit:
                        findings |= _findings(process, group, limit)
                        running.pop(group).end()
                        waiting.extend(_to_examine_again(group, findings))
                time.sleep(_POLL_SECONDS)
        finally:
            for process in running.values():
                process.end()
    return [findings[name] for name in names]


def _groups(host: PluginManager, names: Sequence[str]) -> list[_Group]:
    """Backends that a run would give the same variables, and that have the same framework, together."""
    found: dict[Hashable, _Group] = {}
    for name in names:
        adapter = _declaration(host, name)
        alike = name if adapter is None else adapter.framework
        key = alike, tuple(sorted(_variables(host, name).items()))
        found[key] = (*found.get(key, ()), name)
    return list(found.values())


def _started(host: PluginManager, group: _Group, folder: Path) -> ChildProcess:
    plugins = selection.for_workers(selection.current())
    task = {"names": group, "requested": plugins.requested, "blocked": plugins.blocked}
    variables = _variables(host, group[0])
    return ChildProcess(_EXAMINE, task, folder / "+".join(group), variables=variables)


def _findings(process: ChildProcess, group: _Group, limit: float) -> dict[str, dict[str, Any]]:
    """What it found, or how it ended instead."""
    if not process.is_done:
        raised = f"loading it did not end within {limit:g} s"
        return {name: {"raised": raised} for name in group}
    try:
        found: dict[str, dict[str, Any]] = process.answer()
        return found
    except ChildEndedError as error:
        raised = f"loading it ended the process {error.how}; its output: {error.output}"
        return {name: {"raised": raised} for name in group}


def _to_examine_again(group: _Group, findings: Mapping[str, Mapping[str, Any]]) -> Iterator[_Group]:
    """Those of several that were not found usable, each by itself."""
    if len(group) > 1:
        for name in group:
            if not findings[name].get("backend", {}).get("available"):
                yield (name,)


def _variables(host: PluginManager, name: str) -> dict[str, str]:
    """The variables that a run would set, so that what is examined is what would run."""
    try:
        adapter = host.backend(name)
        device = "gpu" if adapter.accelerators() else "cpu"
        return adapter.environment_variables(device=device, threads=1, replicas=1)  # type: ignore[arg-type]
    except Exception:  # the examination itself will say what is wrong
        return {}


def _described(host: PluginManager, name: str, found: Mapping[str, Any]) -> dict[str, Any]:
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


def _declaration(host: PluginManager, name: str) -> Adapter | None:
    with contextlib.suppress(Exception):
        return host.backend(name)
    return None


def _unusable(adapter: Adapter | None, found: Mapping[str, Any]) -> dict[str, Any]:
    """What there is to say of a backend whose examination brought its process down."""
    cheap = None
    with contextlib.suppress(Exception):
        cheap = adapter.availability() if adapter else None
    if cheap is not None and not cheap.available:
        return asdict(cheap)
    if adapter is None:
        hint = "repair or remove the plugin that registers it"
    else:
        hint = (
            f"try `{Path(sys.executable).name} -c 'import {adapter.framework}'`; install the"
            " packages of this backend anew, in versions that fit each other"
        )
    version = cheap.version if cheap else None
    return {"available": False, "version": version, "reason": found.get("raised"), "hint": hint}


def _collective(own: Mapping[str, Any], found: Mapping[str, Any] | None) -> dict[str, Any]:
    if own["available"] and found is not None:
        return {key: found.get(key) for key in ("available", "reason", "hint")}
    if own["available"]:
        return {
            "available": False,
            "reason": "it was not examined",
            "hint": "use another collective",
        }
    return {"available": False, "reason": own["reason"], "hint": own["hint"]}


def _frameworks(backends: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A framework is usable when one of its backends is; otherwise its first backend says why not."""
    frameworks: dict[str, dict[str, Any]] = {}
    for backend in backends:
        name = backend["framework"]
        if name is None or frameworks.get(name, {}).get("available"):
            continue
        if backend["available"]:
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
        "available": usable,
        "version": version,
        "reason": reason,
        "hint": hint,
    }
