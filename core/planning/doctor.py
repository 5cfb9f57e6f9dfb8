"""Diagnoses which backends work on this machine, by loading each in a child process (`isotrain doctor`)."""

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

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.job import PluginChoice
from isotrain.core.plugins import selection
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.system import hardware
from isotrain.core.system.subprocess_call import ChildEndedError, ChildProcess

EXAMINATION_SECONDS = 60.0
_MAX_PROCESSES = 2
_POLL_SECONDS = 0.02
_PROXY_VARIABLES = {f"{scheme}_proxy" for scheme in ("all", "grpc", "http", "https")}
_EXAMINE = "isotrain.core.planning.doctor:examine_here"


def examine(
    host: PluginManager,
    names: Sequence[str] | None = None,
    *,
    seconds: float = EXAMINATION_SECONDS,
) -> dict[str, Any]:
    """Examines backends, each in isolation from crashes and hangs of others.

    Args:
        host: Plugin manager with the backends.
        names: Names of the backends; None: all.
        seconds: Limit for loading one backend.

    Returns:
        `backends`, `frameworks`, `machine`, `python`, `proxies` (names of the environment variables that set
        one) and `plugin_faults`, as plain values.

    Raises:
        IsotrainError: A backend is unknown.
    """
    names = host.backends.names() if names is None else names
    for name in names:
        host.backends.get(name)
    backends = [
        _describe(host, name, finding)
        for name, finding in zip(names, _examine_in_processes(host, names, seconds), strict=True)
    ]
    return {
        "backends": backends,
        "frameworks": _frameworks(backends),
        "machine": hardware.describe(),
        "python": {"version": sys.version.split()[0], "executable": sys.executable},
        "proxies": [name for name in sorted(os.environ) if _is_proxy_variable(name)],
        "plugin_faults": dict(host.faults),
    }


def _is_proxy_variable(variable: str) -> bool:
    return bool(os.environ[variable]) and variable.lower() in _PROXY_VARIABLES


def examine_here(task: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Examines backends in this process, one after the other.

    Args:
        task: `names` of the backends, modules or files of `requested` plugins, and names of `blocked` ones.

    Returns:
        Finding of each backend by name, or the error that loading it `raised`.
    """
    selection.set_current(PluginChoice(tuple(task["requested"]), tuple(task["blocked"])))
    return {name: _examine_backend(name) for name in task["names"]}


def _examine_backend(name: str) -> dict[str, Any]:
    from isotrain.core.plugins.manager import plugin_manager

    try:
        return asdict(plugin_manager().backend(name).examine())
    except BaseException as error:  # any error of loading is a finding
        return {"raised": f"{type(error).__name__}: {error}".strip(": ")}


_Group = tuple[str, ...]
"""Names of backends that share a child process."""


def _examine_in_processes(
    host: PluginManager, names: Sequence[str], seconds: float
) -> list[dict[str, Any]]:
    """Examines backends in child processes, two at a time; all have ended when this returns.

    Backends of one framework share a process, which imports it once. Those that are not available there are
    examined again in a process of their own, because another backend may be the cause.
    """
    findings: dict[str, dict[str, Any]] = {}
    waiting = deque(_group_backends(host, names))
    running: dict[_Group, ChildProcess] = {}
    with tempfile.TemporaryDirectory(prefix="isotrain-doctor-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < _MAX_PROCESSES:
                    group = waiting.popleft()
                    running[group] = _start(host, group, Path(folder))
                for group, process in list(running.items()):
                    limit = seconds * len(group)
                    if process.is_done or process.seconds > limit:
                        findings |= _read_findings(process, group, limit)
                        running.pop(group).end()
                        waiting.extend(_groups_to_retry(group, findings))
                time.sleep(_POLL_SECONDS)
        finally:
            for process in running.values():
                process.end()
    return [findings[name] for name in names]


def _group_backends(host: PluginManager, names: Sequence[str]) -> list[_Group]:
    """Groups backends by framework and environment variables of a run."""
    groups: dict[Hashable, _Group] = {}
    for name in names:
        adapter = _load_adapter(host, name)
        framework = name if adapter is None else adapter.framework
        key = framework, tuple(sorted(_variables(host, name).items()))
        groups[key] = (*groups.get(key, ()), name)
    return list(groups.values())


def _start(host: PluginManager, group: _Group, folder: Path) -> ChildProcess:
    plugins = selection.for_workers(selection.current())
    task = {"names": group, "requested": plugins.requested, "blocked": plugins.blocked}
    variables = _variables(host, group[0])
    return ChildProcess(_EXAMINE, task, folder / "+".join(group), variables=variables)


def _read_findings(process: ChildProcess, group: _Group, limit: float) -> dict[str, dict[str, Any]]:
    """Findings of a child process by backend, or how the process ended without any."""
    if not process.is_done:
        raised = f"loading it did not end within {limit:g} s"
        return {name: {"raised": raised} for name in group}
    try:
        findings: dict[str, dict[str, Any]] = process.answer()
        return findings
    except ChildEndedError as error:
        raised = f"loading it ended the process {error.how}; its output: {error.output}"
        return {name: {"raised": raised} for name in group}


def _groups_to_retry(group: _Group, findings: Mapping[str, Mapping[str, Any]]) -> Iterator[_Group]:
    """A group of its own for each backend of a larger group that was not available."""
    if len(group) > 1:
        for name in group:
            if not findings[name].get("backend", {}).get("available"):
                yield (name,)


def _variables(host: PluginManager, name: str) -> dict[str, str]:
    """Environment variables that a run of this backend would set."""
    try:
        adapter = host.backend(name)
        device = "gpu" if adapter.accelerators() else "cpu"
        return adapter.environment_variables(device=device, threads=1, replicas=1)  # type: ignore[arg-type]
    except Exception:  # the examination itself will report it
        return {}


def _describe(host: PluginManager, name: str, finding: Mapping[str, Any]) -> dict[str, Any]:
    """Merges an adapter's declarations with the finding of its examination."""
    adapter = _load_adapter(host, name)
    availability = finding.get("backend") or _unavailable(adapter, finding)
    examined = finding.get("collectives") or {}
    declared = adapter.collectives if adapter else ()
    return {
        "name": name,
        "framework": adapter.framework if adapter else None,
        **availability,
        "collectives": [
            {"name": collective, **_collective(availability, examined.get(collective))}
            for collective in dict.fromkeys([*declared, *examined])
        ],
        "versions": dict(finding.get("versions") or {}),
    }


def _load_adapter(host: PluginManager, name: str) -> Adapter | None:
    with contextlib.suppress(Exception):
        return host.backend(name)
    return None


def _unavailable(adapter: Adapter | None, finding: Mapping[str, Any]) -> dict[str, Any]:
    """Availability of a backend whose examination failed or crashed its process."""
    declared = None
    with contextlib.suppress(Exception):
        declared = adapter.availability() if adapter else None
    if declared is not None and not declared.available:
        return asdict(declared)
    if adapter is None:
        hint = "repair or remove the plugin that registers it"
    else:
        hint = (
            f"try `{Path(sys.executable).name} -c 'import {adapter.framework}'`; reinstall the"
            " packages of this backend in compatible versions"
        )
    version = declared.version if declared else None
    return {"available": False, "version": version, "reason": finding.get("raised"), "hint": hint}


def _collective(backend: Mapping[str, Any], collective: Mapping[str, Any] | None) -> dict[str, Any]:
    """Availability of a collective, given that of its backend and the finding on the collective."""
    if backend["available"] and collective is not None:
        return {key: collective.get(key) for key in ("available", "reason", "hint")}
    if backend["available"]:
        return {
            "available": False,
            "reason": "it was not examined",
            "hint": "use another collective",
        }
    return {"available": False, "reason": backend["reason"], "hint": backend["hint"]}


def _frameworks(backends: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A framework is available if one of its backends is; otherwise its first backend gives the reason."""
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
    name: str, available: bool, version: str | None, reason: str | None, hint: str | None
) -> dict[str, Any]:
    return {
        "name": name,
        "available": available,
        "version": version,
        "reason": reason,
        "hint": hint,
    }
