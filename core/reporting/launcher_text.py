"""Text of `isotrain launchers`, `cluster-info` and `doctor --launcher`, and of submissions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from isotrain.core.quantities import counted
from isotrain.core.reporting.tables import facts, paragraph, table, text_of

if TYPE_CHECKING:
    from isotrain.core.contracts.cluster_environment import ClusterInfo

_LABELS = {
    "variables_read": "variables",
    "world_size": "processes",
    "job": "job",
    "hosts": "all hosts",
}


def cluster_info(info: ClusterInfo | None, tls: Mapping[str, Any]) -> str:
    """The cluster info of a process, and whether it could use TLS."""
    if info is None:
        return paragraph(
            "No scheduler or launcher started this process: a run would be launched from here."
        )
    rows = [
        (_LABELS.get(name, name.replace("_", " ")), value) for name, value in asdict(info).items()
    ]
    return facts(None, [*((name, _text(value)) for name, value in rows), ("TLS", _tls(tls))])


def _text(value: Any) -> str:
    return "not set" if value in (None, ()) else text_of(value)


def launchers(
    launchers: Sequence[Mapping[str, Any]], environments: Sequence[Mapping[str, Any]]
) -> str:
    """Tables of launchers and cluster environments by backend; below them the reason for every no."""
    reasons: dict[str, int] = {}
    parts = [
        pairs("launcher", launchers, reasons),
        pairs("same command on every rank", environments, reasons),
    ]
    if reasons:
        parts.append(reasons_table("why not", reasons))
    unavailable = [
        (each["name"], f"{each['reason']}; {each['hint']}")
        for each in launchers
        if not each.get("available", True)
    ]
    if unavailable:
        parts.append(table(("cannot start runs here", "why, and what to do"), unavailable))
    for heading, entries in (
        ("launcher", launchers),
        ("cluster environment", environments),
    ):
        summaries = [(each["name"], each["summary"] or "-") for each in entries]
        parts.append(table((heading, "summary"), summaries))
    return "\n".join(parts)


def launcher_report(report: Mapping[str, Any]) -> str:
    """The doctor's report of one launcher on this machine."""
    why = "; ".join(filter(None, (report["reason"], report["hint"])))
    available = "yes" if report["available"] else "no"
    rows = [
        ("starts runs here", f"{available}: {why}" if why else available),
        ("allocation", _allocation(report)),
        ("this process", report["no_cluster_info"] or _rank(report["cluster_info"])),
        ("TLS", _tls(report["tls"])),
        ("options", text_of(report["options"])),
    ]
    for name, support in report["backends"].items():
        rows.append(
            (
                name,
                "yes" if support["supported"] else f"{_limited(support)}: {support['reason']}",
            )
        )
    return facts(report["name"], rows)


def _tls(tls: Mapping[str, Any]) -> str:
    if tls["problem"]:
        return f"no: {tls['problem']}"
    if tls["folder"]:
        return f"yes: certificate in {tls['folder']}, until {tls['until']}"
    return "no: ISOTRAIN_TLS names no folder with ca.crt, tls.crt and tls.key"


def _rank(info: Mapping[str, Any]) -> str:
    return f"rank {info['rank']} of {info['world_size']}, by {info['environment']}"


def _allocation(report: Mapping[str, Any]) -> str:
    if report["allocation"] is None:
        return str(report["no_allocation"])
    return ", ".join(map(_host_resources, report["allocation"]))


def _host_resources(host: Mapping[str, Any]) -> str:
    slots, devices = host["slots"], host["devices"]
    gpus = f", {counted(devices, 'GPU')}" if devices else ""
    return f"{host['host'] or 'any host'} ({counted(slots, 'process')}{gpus})"


def pairs(column: str, entries: Sequence[Mapping[str, Any]], reasons: dict[str, int]) -> str:
    """A table of which entries (launchers, strategies, ...) support which backend.

    Args:
        column: Heading of the first column.
        entries: Entries with a `name` and, for each of their `backends`, whether it is `supported`, else the
            `reason`, and optionally whether a single process is supported, `alone`.
        reasons: Number of each reason; new reasons are added.
    """
    backends = list(entries[0]["backends"]) if entries else []
    rows = []
    for each in entries:
        cells = [
            "yes"
            if support["supported"]
            else f"{_limited(support)} ({reasons.setdefault(support['reason'], len(reasons) + 1)})"
            for support in each["backends"].values()
        ]
        rows.append((each["name"], *cells))
    return table((column, *backends), rows)


def reasons_table(heading: str, reasons: Mapping[str, int]) -> str:
    """A table of the numbered reasons of `pairs`."""
    return table((heading, "reason"), [(f"({index})", text) for text, index in reasons.items()])


def _limited(support: Mapping[str, Any]) -> str:
    return "1 process" if support.get("alone") else "no"


def submission_preview(preview: Mapping[str, Any]) -> str:
    """The commands of a submission, and its files with their text; empty without a scheduler."""
    if not preview:
        return ""
    submission = preview["submission"]
    parts = [f"\n{command}\n" for command in submission["commands"]]
    parts += [f"\n{path}:\n\n{text}" for path, text in submission["files"].items()]
    return "".join(parts)


def prepared_submission(paths: Sequence[str], submission: Mapping[str, Any], set_spec: str) -> str:
    """Text on the files that `isotrain run --dry-run` has written, and the ways to start the run.

    Args:
        paths: Paths of the files.
        submission: Commands that isotrain would start, `commands`, and those to submit by hand, `submit`.
        set_spec: Command that sets the spec's environment variable, for `commands`.
    """
    parts = {"Nothing was started. Written:": paths}
    if submission["submit"]:
        parts["To submit it, and not wait for it:"] = submission["submit"]
    if submission["commands"]:
        heading = "What `isotrain run` starts and waits for without --dry-run:"
        parts[heading] = [set_spec, *submission["commands"]]
    return "\n".join(
        "".join([f"{heading}\n", *(f"  {line}\n" for line in lines)])
        for heading, lines in parts.items()
    )
