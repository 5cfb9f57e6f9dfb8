"""The command line's output for people: plans, results and listings as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from isotrain.core.reporting import pipeline_text
from isotrain.core.reporting.launcher_text import pairs
from isotrain.core.reporting.tables import facts, number, paragraph, size, table, text_of

PLAN_GROUPS: Mapping[str, Sequence[str]] = {
    "run": ("run", "strategy", "strategy_options", "precision", "loggers"),
    "where": (
        *(
            "backend",
            "framework",
            "collective",
            "requested_collective",
            "launcher",
            "launcher_options",
        ),
        *("device",),
        *(
            "replicas",
            "parallel_layout",
            "device_mesh",
            "extra_ports",
            "processes",
            "start_method",
            "threads",
        ),
    ),
    "data and model": ("samples", "steps_per_epoch", "total_steps", "parameters", "state_bytes"),
    "each step": (
        *(
            "global_batch_size",
            "local_batch_sizes",
            "gradient_accumulation_steps",
            "optimizer",
            "scaling",
            "learning_rate",
        ),
        *("gradient_bytes", "exchanged_bytes_per_step"),
    ),
    "stages": ("stages",),
    "set for every process": ("environment_variables", "options", "timeouts"),
    "notes": ("notes",),
}
"""Every field of a plan, in the groups and the order in which they are shown."""
_LABELS = {
    "run": "name",
    "strategy_options": "strategy options",
    "requested_collective": "collective asked for",
    "launcher_options": "launcher options",
    "extra_ports": "ports besides",
    "threads": "threads per replica",
    "local_batch_sizes": "local batches",
    "gradient_accumulation_steps": "micro-batches",
    "learning_rate": "learning rate",
    "gradient_bytes": "gradients",
    "state_bytes": "memory per replica",
    "exchanged_bytes_per_step": "sent per replica",
    "steps_per_epoch": "steps per epoch",
    "total_steps": "steps in all",
    "options": "backend options",
    "global_batch_size": "global batch",
}
_LEFT_OUT = ("stages", "notes")
"""Groups of one field each that are not shown where they are empty."""
_BYTES = ("gradient_bytes", "exchanged_bytes_per_step")


def plan(found: Any) -> str:
    """A plan, every field of it, in groups."""
    fields = found.to_dict()
    parts = [
        facts(heading, [row for name in names for row in _plan_rows(name, fields[name])])
        for heading, names in PLAN_GROUPS.items()
        if heading not in _LEFT_OUT or fields[heading]
    ]
    return "\n".join(parts)


def _plan_rows(name: str, value: Any) -> list[tuple[str, str]]:
    label = _LABELS.get(name, name)
    if name == "notes":
        return [("-", note) for note in value]
    if name == "stages":
        return pipeline_text.rows(value)
    if name == "processes":
        return [(label, str(len(value)))] + [("", _process(process)) for process in value]
    if name == "start_method":
        return [(label, ": ".join(filter(None, value.values())))]
    if name == "timeouts":
        return [(label, ", ".join(f"{key} {limit:g} s" for key, limit in value.items()))]
    if name == "environment_variables":
        return [(key, text or '""') for key, text in value.items()]
    if name == "state_bytes" and value is not None:
        return [(label, ", ".join(f"{part} {size(count)}" for part, count in value.items()))]
    if name in _BYTES:
        return [(label, size(value))]
    if name == "requested_collective":
        return [(label, value or "none")]
    if value is None:
        return [(label, number(None))]
    return [(label, text_of(value))]


def _process(process: Mapping[str, Any]) -> str:
    replicas = process["replicas"]
    plural = "replica" if len(replicas) == 1 else "replicas"
    role = "" if process["role"] == "replica" else f"{process['role']}, "
    held = f"{plural} {text_of(replicas)}" if replicas else "parameters"
    return f"rank {process['rank']} on {process['host']}: {role}{held}"


def differences(ends: Sequence[str], found: Sequence[tuple[str, Any, Any]]) -> str:
    """What differs between two plans."""
    if not found:
        return paragraph(f"{ends[0]} and {ends[1]}: no difference")
    rows = [(name, _value(name, one), _value(name, two)) for name, one, two in found]
    return table(("field", *ends), rows)


def _value(name: str, value: Any) -> str:
    if name == "processes" and value is not None:
        return "; ".join(_process(process) for process in value)
    counts = name in _BYTES or name.startswith("state_bytes.")
    return size(value) if counts and value is not None else text_of(value)


def result(found: Any) -> str:
    """A run's result in a few lines."""
    timings = found.timings
    rows = [("final loss", _decimal(found.final_loss))]
    rows += [(name.replace("_", " "), _decimal(value)) for name, value in found.metrics.items()]
    if "samples_per_s" in timings:
        rows.append(("samples/s", f"{timings['samples_per_s']:,.0f}"))
    rows.append(("time", _time(timings)))
    measured = {
        name.replace("_", " "): value
        for name, value in found.strategy_report.items()
        if not isinstance(value, Mapping)
    }
    if measured:
        rows.append((found.plan["strategy"], text_of(measured)))
    rows.append(("run directory", str(found.run_directory)))
    return facts(None, rows)


def _time(timings: Mapping[str, float]) -> str:
    detail = ""
    if "first_step_s" in timings:
        detail = f" ({timings['first_step_s']:.1f} s to the end of the first step)"
    return f"{timings.get('session_s', timings.get('train_s', 0.0)):.1f} s{detail}"


def _decimal(value: float) -> str:
    return f"{value:.6g}"


def backends(found: Sequence[Mapping[str, Any]]) -> str:
    """The backends, one a row, and why some are not usable."""
    rows = [
        (
            backend["name"],
            _yes_or_no(backend["available"]),
            backend["version"] or "-",
            ", ".join(backend["collectives"]),
            backend["summary"] or "-",
        )
        for backend in found
    ]
    columns = ("backend", "installed", "version", "collectives", "what it is")
    missing = [
        (backend["name"], f"{backend['reason']}; {backend['hint']}")
        for backend in found
        if not backend["available"]
    ]
    parts = [table(columns, rows)]
    if missing:
        parts.append(facts("not installed", missing))
    return "\n".join(parts)


def strategies(found: Sequence[Mapping[str, Any]]) -> str:
    """One row per strategy, one column per backend, and below it the reason for every no."""
    reasons: dict[str, int] = {}
    parts = [pairs("strategy", found, reasons)]
    if reasons:
        parts.append(facts("no", [(f"({index})", text) for text, index in reasons.items()]))
    what = [(strategy["name"], strategy["summary"] or "-") for strategy in found]
    return "\n".join([*parts, facts("strategies", what)])


def plugins(found: Sequence[Mapping[str, Any]]) -> str:
    """The plugins, one a row, and below them what is wrong or worth knowing."""
    rows = [
        (
            plugin["name"],
            plugin["status"],
            plugin["source"],
            " ".join(filter(None, (plugin["distribution"], plugin["version"]))) or plugin["origin"],
            plugin["api"] or "-",
            f"{plugin['import_s']:.2f} s" if plugin["status"] == "loaded" else "-",
        )
        for plugin in found
    ]
    parts = [table(("plugin", "status", "source", "package or module", "API", "import"), rows)]
    for plugin in found:
        facts_of = [(kind, text_of(names)) for kind, names in plugin["registered"].items()]
        events = [hook for hook in plugin["hooks"] if "_register_" not in hook]
        facts_of += [("hooks", text_of(events))] if events else []
        facts_of += [("left out", plugin["fault"])] if plugin["fault"] else []
        facts_of += [("note", note) for note in plugin["notes"]]
        if facts_of:
            parts.append(facts(plugin["name"], facts_of))
    return "\n".join(parts)


def doctor(found: Mapping[str, Any]) -> str:
    """What the doctor found: machine, frameworks, backends and their collectives."""
    machine = [(name.replace("_", " "), text_of(value)) for name, value in found["machine"].items()]
    machine.append(("executable", found["python"]["executable"]))
    if found["proxies"]:
        direct = f"{', '.join(found['proxies'])}; ranks connect to each other without them"
        machine.append(("proxies", direct))
    columns = ("", "available", "version", "why not, and what to do")
    frameworks = [_row(each, each["name"]) for each in found["frameworks"]]
    rows = []
    for backend in found["backends"]:
        rows.append(_row(backend, backend["name"]))
        if backend["available"]:
            rows += [
                _row(each, f"{backend['name']}:{each['name']}") for each in backend["collectives"]
            ]
    parts = [
        facts("machine", machine),
        table(("framework", *columns[1:]), frameworks),
        table(("backend", *columns[1:]), rows),
    ]
    if found["plugin_faults"]:
        parts.append(facts("plugins left out", list(found["plugin_faults"].items())))
    return "\n".join(parts)


def _row(each: Mapping[str, Any], name: str) -> tuple[str, str, str, str]:
    why = "; ".join(text for text in (each["reason"], each["hint"]) if text)
    return (
        name,
        _yes_or_no(each["available"]),
        each.get("version") or "",
        "" if each["available"] else why,
    )


def _yes_or_no(usable: bool) -> str:
    return "yes" if usable else "no"
