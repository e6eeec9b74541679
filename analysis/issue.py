"""A report's incident as Markdown for a tracker: what ran, what went wrong, what shows it. No prompt, token or name is in it."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from ..recorder.trace.files import shrunk_path
from ..recorder.trace.header import TraceHeader
from ..replayer.cli.incident_blocks import alike, count_of
from .incidents.places import open_parquet

_COUNTS: Final = ("forward", "request", "token")
_ROWS: Final = 8  # of violations and of findings that are shown
_TOKEN: Final = re.compile(r"\b(tokens?|instead of|sampled|scheduler has|expected) (\d+)\b")
_REQUEST: Final = re.compile(r"\b(requests?) (?!R\d+(?![\w-]))([^\s,;:()]+)(?= |,|;|:|\)|'s|$)")
_PLAIN: Final = frozenset(
    {"and", "is", "was", "did", "hit", "of", "has", "for", "in", "that", "to", "were", "gave", "a", "an", "whose"}
)


class Masked:
    """Other names for requests and tokens, the same for each wherever it stands; requests of `renamed` traces keep theirs."""

    def __init__(self, names: Sequence[str], *, renamed: bool = False) -> None:
        self._renamed = renamed
        self._names: dict[str, str] = {}
        self._tokens: dict[str, str] = {}
        for name in names:
            self.name(name)
        longest = sorted((name for name in self._names if name), key=len, reverse=True)
        self._known = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in longest) or r"(?!)")

    def name(self, name: str) -> str:
        """Return what stands for a request's name."""
        other = name if self._renamed else f"R{len(self._names) + 1}"
        return self._names.setdefault(name, other) if name else ""

    def token(self, token: str) -> str:
        """Return what stands for a token's number."""
        return self._tokens.setdefault(token, f"T{len(self._tokens) + 1}")

    def text(self, text: str) -> str:
        """Return a text that names nobody, on one line, which no Markdown is in."""
        text = self._known.sub(lambda found: self.name(found[0]), text)
        text = _REQUEST.sub(lambda f: f[0] if f[2] in _PLAIN else f"{f[1]} {self.name(f[2])}", text)
        text = _TOKEN.sub(lambda found: f"{found[1]} {self.token(found[2])}", text)
        return _escaped(text)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_<>|\[\]#])", r"\\\1", " ".join(text.split()))


def issue_text(
    report: Path,
    summary: dict[str, Any],
    incident: dict[str, Any],
    header: TraceHeader | None,
    *,
    members: pa.Table,
    version: str,
    shrunk: tuple[Path, TraceHeader] | None,
) -> str:
    """Return the Markdown of one incident of a report; raise `AnalysisError` if a file of the report is missing.

    `header` is the trace's, None if it is not at hand; `members` are as in `MEMBER_SCHEMA`;
    `shrunk` the smallest trace that shows the incident, with its header.
    """
    tables = [_rows(report, name, members, incident) for name in ("violations", "findings")]
    named = [
        row[column] for rows in tables for row in rows for column in ("request", "writer_request") if row.get(column)
    ]
    names = list(dict.fromkeys([*incident["requests"], *summary.get("requests_hit", []), *named]))
    masked = Masked(names, renamed=header is not None and header.shrunk is not None)
    engine, model = summary["engine"], summary["model"]
    lines = [
        f"### {_escaped(incident['title'])} (`{incident['kind']}`)",
        "",
        masked.text(incident["sentence"]) + ".",
        "",
        _escaped(incident["detail"]),
        "",
        "**Versions and settings**",
        "",
        f"- engine: {masked.text(' '.join(part for part in engine.values() if part))}",
        f"- model: {masked.text(Path(model['name']).name)}, {masked.text(model['dtype'])}",
        f"- ranks: {', '.join(f'{name} {value}' for name, value in summary['ranks'].items() if name.endswith('size'))}",
        *(_settings(header, masked) if header is not None else []),
        f"- found by kvcanary {version} in {', '.join(count_of(summary[f'{name}s'], name) for name in _COUNTS)}",
        "",
        "**Incident**",
        "",
        f"- confidence {incident['confidence']} ({incident['score']:.2f})"
        + (
            f"; it also looks like {', '.join(f'`{k}`' for k in rest)}"
            if (rest := incident["alternatives"][1:])
            else ""
        ),
        f"- first seen in forward {incident['first_forward']:,} ({incident['mode'] or 'between two forwards'})"
        + (f", by {masked.text(incident['first_request'])}" if incident["first_request"] else ""),
        *([f"- public bugs that look like it: {', '.join(bugs)}"] if (bugs := alike(incident)) else []),
        *_sign(incident, masked),
        f"- spread: {count_of(incident['num_requests'], 'request')}, {count_of(incident['num_slots'], 'slot')}, up to forward {incident['last_forward']:,}",
        f"- rows: {count_of(incident['violations'], 'violation')}, {count_of(incident['findings'], 'finding')}",
        f"- not watched: {masked.text('; '.join(summary['not_watched'])) or 'nothing'}",
        "",
        "**Evidence**",
        "",
        *_evidence(tables, masked),
        "**Reproducer**",
        "",
        *_reproducer(summary, incident, shrunk),
    ]
    return "\n".join(lines) + "\n"


def _settings(header: TraceHeader, masked: Masked) -> list[str]:
    lines = []
    for group in header.groups:
        window = f", window {group.window:,}" if group.window else ""
        layers = f", {group.num_layers} layers" if group.num_layers else ""
        pool = f"{group.num_slots:,} slots, pages of {group.page_size}{window}{layers}"
        lines.append(f"- pool {masked.text(group.name)}: {pool}")
    host = sum(group.host_num_slots for group in header.groups)
    lines += [f"- offload tier: {host:,} slots"] if host else []
    names = ", ".join(masked.text(runner.name) for runner in header.runners)
    return [*lines, f"- runners: {names}"]


def _sign(incident: dict[str, Any], masked: Masked) -> list[str]:
    named = (("in slot", incident["in_slot"]), ("expected", incident["expected"]))
    return [f"- {name}: {masked.text(text)}" for name, text in named if text]


def _rows(report: Path, name: str, members: pa.Table, incident: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an incident's first rows of violations or findings: those of its first event and slots on."""
    of_it = pc.equal(members["incident"], incident["incident"])
    mine = members.filter(pc.and_(of_it, pc.equal(members["source"], name.removesuffix("s"))))["number"]
    with open_parquet(report / f"{name}.parquet") as file:
        found: list[dict[str, Any]] = file.read().take(mine.slice(0, 64 * _ROWS)).to_pylist()
    return sorted(found, key=lambda row: row["event"])[:_ROWS]


def _evidence(tables: Sequence[Sequence[dict[str, Any]]], masked: Masked) -> list[str]:
    violations, findings = tables
    lines = []
    if violations:
        lines += ["| forward | launch | reasons | request | slot | position | written in forward | by |"]
        lines += ["| ---: | --- | --- | --- | ---: | ---: | ---: | --- |"]
    for row in violations:
        written = row["writer_forward"] if row["writer_event"] >= 0 else "never"
        cells = [row["forward"], row["launch"], row["reasons"], masked.name(row["request"]), row["slot"]]
        cells += [row["expected_position"], written, masked.name(row["writer_request"])]
        lines.append("| " + " | ".join(str(cell).replace("|", "+") for cell in cells) + " |")
    lines += [""] if violations else []
    for row in findings:
        who = f"{masked.name(row['request'])} " if row["request"] else ""
        lines.append(f"- forward {row['forward']:,}, `{row['kind']}`: {who}{masked.text(row['detail'])}")
    return [*lines, ""] if findings else lines


def _reproducer(
    summary: dict[str, Any], incident: dict[str, Any], shrunk: tuple[Path, TraceHeader] | None
) -> list[str]:
    trace = Path(summary["trace"]).name
    if shrunk is None:
        number = ["--incident", str(incident["incident"])] if incident["incident"] > 1 else []
        command = shlex.join(["kvcanary", "shrink", trace, *number, "-o", shrunk_path(Path(trace)).name])
        return ["The trace can be cut down to what shows this, without its tokens:", "", "```", command, "```"]
    path, header = shrunk
    whole = f" of {header.shrunk.events:,} events" if header.shrunk is not None else ""
    said = f"`{path.name}` ({path.stat().st_size / 1000:,.0f} kB, attached) is the part{whole} that shows it; its tokens are salted."
    return [said, "", "```", "pip install 'kvcanary[replay]'", shlex.join(["kvcanary-replay", path.name]), "```"]
