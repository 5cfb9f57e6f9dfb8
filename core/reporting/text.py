"""Text of plans, results and listings, as the command line prints them without `--json`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isotrain.core.reporting.launcher_text import pairs, reasons_table
from isotrain.core.reporting.tables import facts, number, paragraph, size, table, text_of

if TYPE_CHECKING:
    from isotrain.core.contracts.plan import Plan

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
    "data and model": (
        *("samples", "steps_per_epoch", "total_steps", "parameters"),
        *("state_bytes", "activation_bytes"),
    ),
    "each step": (
        *(
            "global_batch_size",
            "local_batch_sizes",
            "gradient_accumulation_steps",
            "optimizer",
            "scaling",
            *("first_learning_rate", "learning_rate", "last_learning_rate"),
        ),
        *("gradient_bytes", "exchanged_bytes_per_step"),
    ),
    "stages": ("stages",),
    "set for every process": ("environment_variables", "options", "timeouts"),
    "notes": ("notes",),
    "warnings": ("warnings",),
}
"""Every field of a plan, in the groups and the order in which they are shown."""
_LABELS = {
    "run": "name",
    "strategy_options": "strategy options",
    "requested_collective": "requested collective",
    "launcher_options": "launcher options",
    "parallel_layout": "parallel layout",
    "device_mesh": "device mesh",
    "extra_ports": "extra ports",
    "start_method": "start method",
    "threads": "threads per replica",
    "local_batch_sizes": "local batches",
    "gradient_accumulation_steps": "micro-batches",
    "first_learning_rate": "first learning rate",
    "learning_rate": "peak learning rate",
    "last_learning_rate": "last learning rate",
    "gradient_bytes": "gradients",
    "state_bytes": "memory per replica",
    "activation_bytes": "activations",
    "exchanged_bytes_per_step": "sent per replica",
    "steps_per_epoch": "steps per epoch",
    "total_steps": "total steps",
    "options": "backend options",
    "global_batch_size": "global batch",
}
_OPTIONAL_GROUPS = ("stages", "notes", "warnings")
"""Groups of one field each that are only shown if they are not empty."""
_MILLI = 1e3
_BYTES = ("activation_bytes", "gradient_bytes", "exchanged_bytes_per_step")


def plan(plan: Plan) -> str:
    """Every field of a plan, in groups."""
    fields = plan.to_dict()
    parts = [
        facts(heading, [row for name in names for row in _plan_rows(name, fields[name])])
        for heading, names in PLAN_GROUPS.items()
        if heading not in _OPTIONAL_GROUPS or fields[heading]
    ]
    return "\n".join(parts)


def gpu_plan(fields: Mapping[str, Any]) -> str:
    """Collectives, memory, and bounds on a step, which a plan for GPUs elsewhere has besides the plan."""
    columns = ("collective", "processes", "hosts", "per step", "bytes", "sent by rank 0")
    rows = [
        (
            each["kind"],
            str(each["processes"]),
            str(each["hosts"]),
            f"{'at most ' if each['is_fused'] else ''}{each['count']:g}",
            size(each["nbytes"]),
            size(each["sent_bytes"]),
        )
        for each in fields["collectives"] or ()
    ]
    counted = table(columns, rows) if rows else facts(None, [("collectives", "none")])
    if why := fields["why_not_counted"]:
        counted = facts(None, [("collectives", f"not counted: {why}")])
    needed = f"{size(fields['needed_bytes'])}, of which 1 GiB for CUDA, NCCL and kernels"
    if not fields["activations_counted"]:
        needed += "; without activations, which are not counted"
    facts_of_gpu = [("a GPU must hold", needed)]
    if (gathered := fields["gathered_bytes"]) is not None:
        told = f"{size(gathered)}, with all weights: in evaluations, and at the end of the run"
        facts_of_gpu.append(("", told))
    if fields["gpu"] is not None:
        fits = "unknown" if fields["fits"] is None else _yes_or_no(fields["fits"])
        facts_of_gpu.append((f"fits on {fields['gpu']}", fits))
        facts_of_gpu += [("would fit", options) for options in fields["alternatives"]]
        facts_of_gpu += _step_rows(fields["step_seconds"])
    return "\n".join([counted, facts("on each GPU", facts_of_gpu)])


def _step_rows(seconds: Mapping[str, float] | None) -> list[tuple[str, str]]:
    """Rows of the bounds on the time of a step."""
    if seconds is None:
        return [("step", "not estimated")]
    times = {name: f"{value * _MILLI:.3g} ms" for name, value in seconds.items()}
    parts = ", ".join(f"{name} {times[name]}" for name in ("compute", "memory", "communication"))
    return [
        ("step", f"{times['lowest']} to {times['highest']}, without latencies"),
        ("at published figures", parts),
    ]


def _plan_rows(name: str, value: Any) -> list[tuple[str, str]]:
    label = _LABELS.get(name, name)
    if name in ("notes", "warnings"):
        return [("-", note) for note in value]
    if name == "stages":
        return _pipeline_rows(value)
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
    contents = f"{plural} {text_of(replicas)}" if replicas else "parameters"
    return f"rank {process['rank']} on {process['host']}: {role}{contents}"


def differences(names: Sequence[str], changes: Sequence[tuple[str, Any, Any]]) -> str:
    """The fields in which two plans differ: name, and value in both."""
    if not changes:
        return paragraph(f"{names[0]} and {names[1]}: no difference")
    rows = [
        (_label(field), _value(field, first), _value(field, second))
        for field, first, second in changes
    ]
    return table(("field", *names), rows)


def _label(field: str) -> str:
    """Label of a field with a dotted name, as `plan` has it."""
    name, _, key = field.partition(".")
    if name == "environment_variables":
        return key
    label = _LABELS.get(name, name)
    return f"{label}: {key}" if key else label


def _value(name: str, value: Any) -> str:
    if name == "processes" and value is not None:
        return "; ".join(_process(process) for process in value)
    is_bytes = name in _BYTES or name.startswith("state_bytes.")
    return size(value) if is_bytes and value is not None else text_of(value)


def result(result: Any) -> str:
    """A `RunResult` in a few lines."""
    timings = result.timings
    rows = [("final loss", _decimal(result.final_loss))]
    rows += [(name.replace("_", " "), _decimal(value)) for name, value in result.metrics.items()]
    if "samples_per_s" in timings:
        rows.append(("samples/s", f"{timings['samples_per_s']:,.0f}"))
    rows.append(("time", _time(timings)))
    measured = {
        name.replace("_", " "): value
        for name, value in result.strategy_report.items()
        if not isinstance(value, Mapping)
    }
    for host, read in result.data_read.items():
        rows.append((f"read on {host}", f"{read['samples']:,} samples, {size(read['bytes'])}"))
    if measured:
        rows.append((result.plan["strategy"], text_of(measured)))
    rows.append(("run directory", str(result.run_directory)))
    return facts(None, rows)


def _time(timings: Mapping[str, float]) -> str:
    detail = ""
    if "first_step_s" in timings:
        detail = f" ({timings['first_step_s']:.1f} s to the end of the first step)"
    return f"{timings.get('session_s', timings.get('train_s', 0.0)):.1f} s{detail}"


def _decimal(value: float) -> str:
    return f"{value:.6g}"


def backends(entries: Sequence[Mapping[str, Any]]) -> str:
    """The backends, one per row; below them what they are, and why some are not installed."""
    rows = [
        (
            backend["name"],
            _yes_or_no(backend["available"]),
            backend["version"] or "-",
            ", ".join(backend["collectives"]),
        )
        for backend in entries
    ]
    columns = ("backend", "installed", "version", "collectives")
    summaries = [(backend["name"], backend["summary"] or "-") for backend in entries]
    missing = [
        (backend["name"], f"{backend['reason']}; {backend['hint']}")
        for backend in entries
        if not backend["available"]
    ]
    parts = [table(columns, rows), table(("backend", "what it is"), summaries)]
    if missing:
        parts.append(facts("not installed", missing))
    return "\n".join(parts)


def strategies(entries: Sequence[Mapping[str, Any]]) -> str:
    """A table of strategies by backend; below it the reason for every no, and the summaries."""
    reasons: dict[str, int] = {}
    parts = [pairs("strategy", entries, reasons)]
    if reasons:
        parts.append(reasons_table("no", reasons))
    summaries = [(strategy["name"], strategy["summary"] or "-") for strategy in entries]
    return "\n".join([*parts, table(("strategy", "summary"), summaries)])


def plugins(entries: Sequence[Mapping[str, Any]]) -> str:
    """The plugins, one per row; below them what they registered, faults and notes."""
    rows = [
        (
            plugin["name"],
            plugin["status"],
            plugin["source"],
            " ".join(filter(None, (plugin["distribution"], plugin["version"]))) or plugin["origin"],
            plugin["api"] or "-",
            f"{plugin['import_s']:.2f} s" if plugin["status"] == "loaded" else "-",
        )
        for plugin in entries
    ]
    parts = [table(("plugin", "status", "source", "package or module", "API", "import"), rows)]
    for plugin in entries:
        details = [(kind, text_of(names)) for kind, names in plugin["registered"].items()]
        event_hooks = [hook for hook in plugin["hooks"] if "_register_" not in hook]
        details += [("hooks", text_of(event_hooks))] if event_hooks else []
        details += [("left out", plugin["fault"])] if plugin["fault"] else []
        details += [("note", note) for note in plugin["notes"]]
        if details:
            parts.append(facts(plugin["name"], details))
    return "\n".join(parts)


def doctor(report: Mapping[str, Any]) -> str:
    """The doctor's report: machine, frameworks, backends and their collectives."""
    machine = [
        (name.replace("_", " "), text_of(value)) for name, value in report["machine"].items()
    ]
    machine.append(("executable", report["python"]["executable"]))
    if report["proxies"]:
        proxies = f"{', '.join(report['proxies'])}; ranks connect to each other without them"
        machine.append(("proxies", proxies))
    columns = ("", "available", "version", "why not, and what to do")
    frameworks = [_row(each, each["name"]) for each in report["frameworks"]]
    rows = []
    for backend in report["backends"]:
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
    if report["plugin_faults"]:
        parts.append(facts("plugins left out", list(report["plugin_faults"].items())))
    return "\n".join(parts)


def _row(each: Mapping[str, Any], name: str) -> tuple[str, str, str, str]:
    why = "; ".join(text for text in (each["reason"], each["hint"]) if text)
    return (
        name,
        _yes_or_no(each["available"]),
        each.get("version") or "",
        "" if each["available"] else why,
    )


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def _pipeline_rows(pipeline: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows (name, text) of a plan: its stages, their timeline, and better partitions."""
    stages = pipeline["stages"]
    labels = [
        f"stage {number}" for number, each in enumerate(stages, 1) for _ in range(each["processes"])
    ]
    passes = f"{pipeline['seconds'] * _MILLI:.3g} ms a step, of which stages wait {pipeline['bubble']:.0%}"
    return [
        *(_stage_row(number, stage) for number, stage in enumerate(stages, 1)),
        (
            "passes",
            f"{passes}; digits: forward, letters: backward, of micro-batches 0 = a, 1 = b, ...",
        ),
        *zip(labels, pipeline["drawing"], strict=True),
        (
            "step",
            f"{pipeline['step_seconds'] * _MILLI:.3g} ms with loss, update, sends and exchange of gradients"
            " by `gigabits`, where each process has its own cores and link",
        ),
        ("balanced", _proposal(pipeline["balanced"])),
        (
            "best",
            f"{_proposal(pipeline['best'])} (of all ways to cut and replicate, for as many processes)",
        ),
    ]


def _stage_row(number: int, stage: Mapping[str, Any]) -> tuple[str, str]:
    layers = stage["layers"]
    names = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]} ({len(layers)})"
    several = f" in {stage['processes']} processes" if stage["processes"] > 1 else ""
    sent = f", sends {size(stage['sent_bytes'])}" if stage["sent_bytes"] else ""
    weights, gradients = (
        (f"{count} x " if count > 1 else "") + size(stage["weight_bytes"])
        for count in (stage["weight_versions"], stage["gradient_versions"])
    )
    return (
        f"stage {number}",
        f"{names}{several}: forward {stage['forward'] * _MILLI:.3g} ms, backward"
        f" {stage['backward'] * _MILLI:.3g} ms a micro-batch{sent}; memory: weights"
        f" {weights}, gradients {gradients}, slots"
        f" {size(stage['slot_bytes'])}, activations {size(stage['activation_bytes'])}",
    )


def _proposal(proposal: Mapping[str, Any]) -> str:
    cut = f"cut at {', '.join(proposal['first'])}" if proposal["first"] else "no cut"
    counts = ", ".join(map(str, proposal["workers"]))
    label = "processes of each stage" if proposal["first"] else "processes"
    return f"{cut}; {label}: {counts}; {proposal['seconds'] * _MILLI:.3g} ms a micro-batch"


_SAME_FOR_ALL = ("folder", "on", "launcher")
"""Columns of a list of runs that are left out where all rows have the same."""


def runs(entries: Sequence[Mapping[str, Any]]) -> str:
    """The runs, one per row, what is the same for all of them, and why some failed."""
    if not entries:
        return paragraph("There are no runs.")
    rows = [_run_facts(run) for run in entries]
    same = {name: rows[0][name] for name in _SAME_FOR_ALL if len({row[name] for row in rows}) == 1}
    columns = [name for name in rows[0] if name not in same]
    parts = [table(columns, [[row[name] for name in columns] for row in rows], _run_in_two_lines)]
    if same:
        parts.append(facts("all of them", same.items()))
    why = [(row["run"], run["why"]) for row, run in zip(rows, entries, strict=True) if run["why"]]
    if why:
        parts.append(facts("why", why))
    return "\n".join(parts)


def _run_facts(run: Mapping[str, Any]) -> dict[str, str]:
    """The columns of a list of runs for one of them, by heading."""
    folder, _, name = run["directory"].rpartition("/")
    total = f"/{run['total_steps']}" if run["total_steps"] else ""
    return {
        "run": name,
        "state": run["state"],
        "step": f"{run['step']}{total}",
        "last loss": "-" if run["loss"] is None else f"{run['loss']:.4g}",
        "age": "-" if run["started"] is None else _duration(time.time() - run["started"]),
        "on": "-" if run["backend"] is None else f"{run['backend']}@{run['replicas']}",
        "launcher": text_of(run["launcher"]),
        "folder": folder or ".",
    }


def _run_in_two_lines(row: Sequence[str]) -> str:
    """A run whose row does not fit: its name, and the other columns below it."""
    run, state, step, loss, age, *others = row
    return facts(run, [(state, ", ".join([f"step {step}", f"loss {loss}", age, *others]))])


def _duration(seconds: float) -> str:
    """A duration as short text, such as `5min`, without a place to fold it."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"
