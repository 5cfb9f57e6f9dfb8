"""What there is to launch with, and who a process is, as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from isotrain.core.reporting.tables import facts, paragraph, table, text_of

if TYPE_CHECKING:
    from isotrain.core.contracts.cluster_environment import ClusterInfo

_LABELS = {
    "variables_read": "told by",
    "world_size": "processes",
    "job": "job",
    "hosts": "all hosts",
}


def cluster_info(found: ClusterInfo | None, tls: Mapping[str, Any]) -> str:
    """A process's place, and whether it encrypts."""
    if found is None:
        return paragraph("No engine started this process: a run would be launched from here.")
    rows = [
        (_LABELS.get(name, name.replace("_", " ")), value) for name, value in asdict(found).items()
    ]
    return facts(None, [*((name, _text(value)) for name, value in rows), ("TLS", _tls(tls))])


def _text(value: Any) -> str:
    return "not told" if value in (None, ()) else text_of(value)


def launchers(
    launchers: Sequence[Mapping[str, Any]], environments: Sequence[Mapping[str, Any]]
) -> str:
    """One row for each launcher and engine, one column for each backend; below, the reason for every no."""
    reasons: dict[str, int] = {}
    parts = [
        pairs("launcher", launchers, reasons),
        pairs("same command on every rank", environments, reasons),
    ]
    if reasons:
        parts.append(facts("why not", [(f"({index})", text) for text, index in reasons.items()]))
    missing = [
        (each["name"], f"{each['reason']}; {each['hint']}")
        for each in launchers
        if not each.get("available", True)
    ]
    if missing:
        parts.append(facts("cannot start runs here", missing))
    for heading, found in (("launchers", launchers), ("engines", environments)):
        parts.append(facts(heading, [(each["name"], each["summary"] or "-") for each in found]))
    return "\n".join(parts)


def launcher_report(found: Mapping[str, Any]) -> str:
    """What there is to say of one launcher here."""
    why = "; ".join(filter(None, (found["reason"], found["hint"])))
    usable = "yes" if found["available"] else "no"
    rows = [
        ("starts runs here", f"{usable}: {why}" if why else usable),
        ("allocation", _allocation(found)),
        ("this process", found["no_cluster_info"] or _rank(found["cluster_info"])),
        ("TLS", _tls(found["tls"])),
        ("options", text_of(found["options"])),
    ]
    for name, pair in found["backends"].items():
        rows.append(
            (name, "yes" if pair["supported"] else f"{_short_of_yes(pair)}: {pair['reason']}")
        )
    return facts(found["name"], rows)


def _tls(found: Mapping[str, Any]) -> str:
    if found["problem"]:
        return f"no: {found['problem']}"
    if found["folder"]:
        return f"yes: certificate in {found['folder']}, until {found['until']}"
    return "no: ISOTRAIN_TLS names no folder with ca.crt, tls.crt and tls.key"


def _rank(place: Mapping[str, Any]) -> str:
    return f"rank {place['rank']} of {place['world_size']}, by {place['environment']}"


def _allocation(found: Mapping[str, Any]) -> str:
    if found["allocation"] is None:
        return str(found["no_allocation"])
    return ", ".join(map(_share, found["allocation"]))


def _share(share: Mapping[str, Any]) -> str:
    slots, devices = share["slots"], share["devices"]
    processes = f"{slots} process{'' if slots == 1 else 'es'}"
    gpus = f", {devices} GPU{'' if devices == 1 else 's'}" if devices else ""
    return f"{share['host'] or 'any host'} ({processes}{gpus})"


def pairs(column: str, found: Sequence[Mapping[str, Any]], reasons: dict[str, int]) -> str:
    """A table of which of these fits which backend.

    Args:
        column: The heading of the first column.
        found: Each with its `name` and, by backend, whether it is `supported`, or the `reason`, and perhaps
            whether a single process is, `alone`.
        reasons: Numbered here; those that are new are added.
    """
    names = list(found[0]["backends"]) if found else []
    rows = []
    for each in found:
        cells = [
            "yes"
            if pair["supported"]
            else f"{_short_of_yes(pair)} ({reasons.setdefault(pair['reason'], len(reasons) + 1)})"
            for pair in each["backends"].values()
        ]
        rows.append((each["name"], *cells))
    return table((column, *names), rows)


def _short_of_yes(pair: Mapping[str, Any]) -> str:
    return "1 process" if pair.get("alone") else "no"


def submission_preview(given: Mapping[str, Any]) -> str:
    """What a run gives to its engine: commands, and files with their text; or nothing."""
    if not given:
        return ""
    submission = given["submission"]
    parts = [f"\n{command}\n" for command in submission["commands"]]
    parts += [f"\n{path}:\n\n{text}" for path, text in submission["files"].items()]
    return "".join(parts)
