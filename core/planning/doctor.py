"""Finding out what works on this machine, by loading every backend in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.plugin_choice import PluginChoice
from isotrain.core.plugins import choice as plugin_choice
from isotrain.core.plugins.host import PluginHost
from isotrain.core.system import hardware

EXAMINATION_SECONDS = 60.0
_AT_A_TIME = 2
_POLL_SECONDS = 0.02
_SHOWN_LINES = 3
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from isotrain.core.planning.doctor import examine_here;"
    " examine_here(*sys.argv[2:4], *json.loads(sys.argv[4]))"
)


def examine(host: PluginHost, *, seconds: float = EXAMINATION_SECONDS) -> dict[str, Any]:
    """Examines every backend; whatever loading one of them does, the others are examined too.

    Args:
        host: Knows the backends.
        seconds: How long loading one of them may take.

    Returns:
        `backends`, `frameworks`, `machine`, `python` and `plugin_faults`, as plain values.
    """
    names = host.backends.names()
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


def examine_here(name: str, target: str, asked: Sequence[str], blocked: Sequence[str]) -> None:
    """Examines one backend in this process, and writes what was found to a file.

    Args:
        name: The backend's.
        target: The file.
        asked: The plugins that were asked for by module or file.
        blocked: The names of plugins to leave out.
    """
    from isotrain.core.plugins.host import plugin_host

    plugin_choice.take_over(PluginChoice(tuple(asked), tuple(blocked)))
    try:
        found = asdict(plugin_host().backend(name).examine())
    except BaseException as error:  # whatever loading it raises is the finding
        found = {"raised": f"{type(error).__name__}: {error}".strip(": ")}
    Path(target).write_text(json.dumps(found, default=str), encoding="utf-8")
    os._exit(0)  # frameworks that are half loaded may crash or hang when they are torn down


class _Probe:
    """One backend's examination in a process of its own."""

    def __init__(self, name: str, environment: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self._found = folder / f"{name}.json"
        self._log = folder / f"{name}.log"
        self._started = time.monotonic()
        plugins = plugin_choice.for_workers(plugin_choice.current())
        command = [
            *(sys.executable, "-c", _PROGRAM, json.dumps(sys.path), name, str(self._found)),
            json.dumps([plugins.asked, plugins.blocked]),
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        """How long it has been running."""
        return time.monotonic() - self._started

    @property
    def is_done(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """Ends it and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def finding(self) -> dict[str, Any]:
        """What it found, or how it ended instead."""
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(self._found.read_text(encoding="utf-8"))
            return found
        return {"raised": f"loading it {self._ending()}{self._last_words()}"}

    def _ending(self) -> str:
        code = self._process.returncode
        if code < 0:
            return f"ended the process by {signal.Signals(-code).name}"
        return f"ended the process with exit code {code}"

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        words = [line.strip() for line in lines if line.strip()][-_SHOWN_LINES:]
        return ": " + " | ".join(words) if words else ""


def _examine_apart(host: PluginHost, names: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    """Runs the probes, a few at a time; none is left when this returns or raises."""
    findings: dict[str, dict[str, Any]] = {}
    waiting = deque(names)
    running: list[_Probe] = []
    with tempfile.TemporaryDirectory(prefix="isotrain-doctor-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < _AT_A_TIME:
                    name = waiting.popleft()
                    running.append(_Probe(name, _environment(host, name), Path(folder)))
                for probe in _ended(running, seconds, findings):
                    running.remove(probe)
                time.sleep(_POLL_SECONDS)
        finally:
            for probe in running:
                probe.end()
    return [findings[name] for name in names]


def _ended(
    running: Sequence[_Probe], seconds: float, findings: dict[str, dict[str, Any]]
) -> Iterator[_Probe]:
    for probe in list(running):
        if probe.is_done:
            findings[probe.name] = probe.finding()
        elif probe.seconds > seconds:
            findings[probe.name] = {"raised": f"loading it did not end within {seconds:g} s"}
        else:
            continue
        probe.end()
        yield probe


def _environment(host: PluginHost, name: str) -> dict[str, str]:
    """The variables that a run would set, so that what is examined is what would run."""
    from isotrain.core.spec.training_spec import TrainingSpec

    fields = {"model": "m:f", "data": "m:f", "loss": "mse", "optimizer": {"name": "sgd", "lr": 1.0}}
    try:
        spec = TrainingSpec.model_validate({**fields, "global_batch": 1, "steps": 1})
        adapter = host.backend(name)
        device = "gpu" if adapter.accelerators() else "cpu"
        return adapter.environment(spec, device=device, threads=1, replicas=1)  # type: ignore[arg-type]
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
