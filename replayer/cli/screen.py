"""What a person sees at the end of a replay: one trace, its verdict, the first thing that went wrong, what is next."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ...recorder.errors import printable
from ...recorder.trace.schema import COST
from ..checks import FINDING_KINDS
from ..report.summary import Summary, Verdict
from ..run.coverage import COMPARED, WRITTEN, not_watched, number_runs
from .incident_blocks import count_of, duration, grid, show_incidents, some_of

VERDICT_STYLES = {Verdict.CLEAN: "bold green", Verdict.CORRUPT: "bold red", Verdict.INCONCLUSIVE: "bold yellow"}

_REASONS = {
    "VERIFY_CHAIN_HASH": "the slot's predecessor is not the token that came before it",
    "VERIFY_POSITION": "the slot holds another position",
    "VERIFY_KV_HASH": "the slot's KV bytes changed after they were written",
    "VERIFY_TOKEN": "the slot holds the KV of another token",
    "WRITE_TOKEN": "the model was fed another token than expected",
    "WRITE_POSITION": "a token was written at the wrong position",
}


_PLACES = (("row", "req_pool_idx"), ("position", "position"), ("slot", "slot"))


def show(console: Console, summary: Summary) -> None:
    """Print a summary, without what to do next; plain text where the console is no terminal."""
    console.print(_headline(summary), soft_wrap=not console.is_terminal)
    console.print(_checks(summary), soft_wrap=not console.is_terminal)
    for line in _more_checks(summary):
        console.print(Text(line, style="dim"), soft_wrap=not console.is_terminal)
    console.print()
    console.print(_verdict(summary), soft_wrap=not console.is_terminal)
    console.print(grid([("not watched", "; ".join(not_watched(summary.coverage)))]))
    if summary.incidents:
        console.print()
        total = summary.num_incidents or len(summary.incidents)
        show_incidents(console, summary.incidents, total=total, first_time_ns=summary.first_time_ns)
    else:
        blocks = [_violation(summary, summary.first_violation), _counts(summary)] if summary.first_violation else []
        for block in [*blocks, *([_finding(summary, summary.first_finding)] if summary.first_finding else [])]:
            console.print()
            console.print(Padding(grid(block), (0, 0, 0, 2), expand=False))
    if summary.injected:
        found = sum(one["found_forward"] >= 0 for one in summary.injected)
        held = len(summary.injected)
        title = f"injected on purpose: {found:,} of {count_of(held, 'fault')} found"
        if summary.num_injected > held:
            title += f"; {summary.num_injected - held:,} more were not held against what was found"
        _list(console, title, [_injected(one) for one in summary.injected], len(summary.injected))
    _list(console, "damage", summary.gaps, summary.num_gaps)
    _list(console, "losses", summary.losses, summary.num_losses)
    said = [_mark(mark) for mark in summary.marks if mark["note"] != COST]
    _list(console, "notes in the trace", said, summary.num_marks - len(summary.marks) + len(said))


def show_next(console: Console, summary: Summary) -> None:
    """Print where the report is and what to do next, once all of it is written."""
    if text := _next(summary):
        console.print()
        # commands are to be pasted
        console.print(text, soft_wrap=summary.report is not None or not console.is_terminal)


def one_line(summary: Summary) -> str:
    """Return a verdict in one line: the first violation, the first finding, and the doubts."""
    line = f"{summary.verdict.value.upper():12s} {summary.trace}   {summary.forwards:,} forwards"
    first, finding = summary.first_violation, summary.first_finding
    if first:
        owner = f"request {first['request']}, " if first["request"] else ""
        line += (
            f"   {summary.violations:,} violations, first in forward {first['forward']:,}: {owner}slot "
            f"{first['slot']:,}, {'+'.join(first['reasons'])}"
        )
    if finding:
        line += f"   {summary.findings:,} findings, first in forward {finding['forward']:,}: {finding['kind']}"
    if summary.cut:
        line += f"   (clean {up_to(summary)})"
    elif summary.doubts:
        line += f"   ({'; '.join(summary.doubts)})"
    return printable(f"{line}   not watched: {'; '.join(not_watched(summary.coverage))}")


def _headline(summary: Summary) -> Text:
    header = summary.header
    commit = f"({header.engine.commit})" if header.engine.commit else ""
    span = (summary.last_time_ns - summary.first_time_ns) / 1e9
    parts = [
        " ".join(part for part in (header.engine.name, header.engine.version, commit) if part),
        header.model.name,
        f"tp {header.ranks.tp_rank}/{header.ranks.tp_size}",
        *([f"segments {segment_names(summary.segments)}"] if summary.segments else []),
        f"{summary.forwards:,} forwards",
        f"{summary.requests:,} requests",
        f"{summary.tokens:,} tokens",
        duration(span),
    ]
    return Text.assemble((printable(summary.trace), "bold"), "   ", printable("   ".join(parts)))


def _checks(summary: Summary) -> Text:
    parts = [f"{summary.verified:,} slots verified", f"{summary.written:,} written"]
    parts.append(f"KV hash {summary.settings['kv_hash']}")
    if summary.settings["kv_hash"] != "none":
        parts.append(f"KV watched in {summary.forwards_watched:,} of {summary.forwards:,} forwards")
    if summary.unknown_entries:
        parts.append(f"{summary.unknown_entries:,} left out after losses")
    return Text("checked   " + "   ".join(parts), style="dim")


def _more_checks(summary: Summary) -> list[str]:
    lines = []
    swept = sum(count for tag, count in summary.slot_counters.items() if tag.startswith("SWEEP"))
    if summary.events.get("sweep"):
        lines.append(f"swept     {count_of(summary.events['sweep'], 'time')}   {swept:,} slots of the prefix cache")
    if summary.header.sampler is not None:
        sampled, judged, fed = (summary.oracle.get(n, 0) for n in ("sampled", "sampled_judged", "fed_judged"))
        name = summary.header.sampler.name
        hint = "" if judged or name == "hash" else f"   name it: --oracle {name}"
        line = f"oracle    {name}: {judged:,} of {sampled:,} sampled tokens compared, and {fed:,} that were fed{hint}"
        lines.append(printable(line))
    if summary.model_bytes:
        compared, written = (summary.model_bytes.get(name, 0) for name in (COMPARED, WRITTEN))
        why = [f"; {reason}" for reason in summary.model_bytes if reason not in (COMPARED, WRITTEN)]
        lines.append(
            printable(f"model     {compared:,} of {written:,} K and V of the first layer compared{''.join(why)}")
        )
    if summary.transfers_sent or summary.transfers_received:
        lines.append(
            f"moved     {count_of(summary.transfers_sent, 'transfer')} sent, {summary.transfers_received:,} received, "
            f"{summary.transfers_unmatched:,} of them from a trace that was not given"
        )
    for name, figures in (summary.swa_divergence or {"groups": {}})["groups"].items():
        last = {figure: values["last"] for figure, values in figures.items()}
        lines.append(
            f"sliding   {name}: {last['out_of_window_tokens']:,} tokens out of the window, "
            f"{last['full_idx_divergence']:,} at another index, in the last forward"
        )
    return lines


def _verdict(summary: Summary) -> Text:
    verdict, said = summary.verdict, []
    if summary.cut:
        said = [f" in what was watched {up_to(summary)}   (exit code {verdict.exit_code})"]
    elif verdict is Verdict.CLEAN:
        said = [f" in what was watched   no violation in {count_of(summary.forwards, 'forward')}"]
    else:
        if verdict is Verdict.CORRUPT:
            found = [count_of(summary.num_incidents, "incident")] if summary.num_incidents is not None else []
            named = ("violation", summary.violations), ("finding", summary.findings)
            found += [count_of(count, noun) for noun, count in named if count]
            hit = f"{len(summary.requests_hit):,} of {count_of(summary.requests, 'request')} hit"
            said.append("   " + ", ".join([*found, hit]))
        if summary.doubts:
            joint = "   but not the whole story: " if verdict is Verdict.CORRUPT else "   "
            said.append(joint + "; ".join(summary.doubts))
    name = Verdict.CLEAN.name if summary.cut else verdict.name
    return Text(name, VERDICT_STYLES[verdict]).append_tokens((text, "default not bold") for text in said)


def up_to(summary: Summary) -> str:
    """Say how far a recording that was cut is clean."""
    behind = "it is being recorded" if summary.being_recorded else "the recording was cut there"
    return f"up to forward {summary.last_forward:,}; {behind}"


def _violation(summary: Summary, row: dict[str, Any]) -> list[tuple[str, str]]:
    since = (row["time_ns"] - summary.first_time_ns) / 1e9
    group = summary.header.groups[row["group"]]
    reasons = "; ".join(_REASONS[reason] for reason in row["reasons"])
    owner = f"{row['request']}   row {row['req_pool_idx']:,}"
    if row["mode"] == "sweep":
        owner = "none: the prefix cache holds it"
    writer = f"written last in forward {row['writer_forward']:,} by request {row['writer_request']}"
    if row["writer_event"] < 0:
        writer = "never written in this trace"
    stored = f"token {row['stored_token']}, position {row['position']}"
    just_written = row["endpoint"] == "HEAD" and row["writer_event"] == row["event"]
    expected = [f"token {row['expected_token']}"] if row["expected_token"] != -1 else []
    expected.append(f"position {row['expected_position']}")
    if "VERIFY_CHAIN_HASH" in row["reasons"]:
        hashes = [row[name] & ((1 << 64) - 1) for name in ("expected_aux", "stored_chain_hash")]
        expected.append(f"chain hash {hashes[0]:016x}, stored {hashes[1]:016x}")
    requests = list(summary.requests_hit.values())
    shown = some_of(requests, len(requests))
    first, last = summary.first_violation_forward, summary.last_violation_forward
    span = f"forward {first:,}" if first == last else f"{summary.forwards_hit:,} forwards in {first:,}-{last:,}"
    spread = f"{span}   {count_of(summary.slots_hit, 'slot')}   {count_of(len(requests), 'request')}"
    spread += f": {shown}" if shown else ""
    return [
        ("first seen", f"forward {row['forward']:,} (+{duration(since)}, {row['mode']})   {row['launch']}"),
        ("what", f"{reasons}   [{' + '.join(row['reasons'])}]"),
        ("request", f"{owner}, position {row['expected_position']:,}"),
        ("in slot", f"{row['slot']:,} of pool {group.name}, half {row['half']}"),
        ("written", stored) if just_written else ("stored", f"{stored}   {writer}"),
        ("expected", ", ".join(expected)),
        ("spread", spread),
    ]


def _counts(summary: Summary) -> list[tuple[str, str]]:
    by = {"by reason": summary.violations_by_reason, "by launch": summary.violations_by_launch}
    return [(title, "   ".join(f"{name} {count:,}" for name, count in counts.items())) for title, counts in by.items()]


def _finding(summary: Summary, finding: dict[str, Any]) -> list[tuple[str, str]]:
    kinds = [(f"{kind} {count:,}", FINDING_KINDS[kind]) for kind, count in summary.findings_by_kind.items()]
    where = [f"forward {finding['forward']:,}"]
    where += [f"request {finding['request']}"] if finding["request"] else []
    where += [f"{name} {finding[key]:,}" for name, key in _PLACES if finding[key] >= 0]
    first = f"{', '.join(where)}: {finding['detail']}"
    return [*kinds, ("the first", first)]


def _injected(fault: dict[str, Any]) -> str:
    where = f"{fault['fault']} in forward {fault['forward']:,}"
    where += f", slot {fault['slot']:,}" if fault["slot"] >= 0 else ""
    where += f", request {fault['request']}" if fault["request"] else ""
    if fault["found_forward"] < 0:
        return f"{where}: NOT FOUND"
    return f"{where}: found in forward {fault['found_forward']:,} by {fault['found_by']}"


def _mark(mark: dict[str, Any]) -> str:
    labels = ", ".join(f"{key} {value}" for key, value in mark["labels"].items() if value not in ("", -1))
    return f"event {mark['event']:,}: {mark['note']}" + (f" ({labels})" if labels else "")


def _list(console: Console, title: str, lines: list[str], total: int) -> None:
    if not lines:
        return
    console.print()
    console.print(Text(title, style="dim"))
    for line in lines[:5]:
        console.print(Text(f"  {printable(line)}"), soft_wrap=not console.is_terminal)
    if total > 5:
        console.print(Text(f"  and {total - 5:,} more in summary.json", style="dim"))


def _next(summary: Summary) -> Text:
    if summary.report is None:
        if summary.verdict is not Verdict.CORRUPT:
            return Text()
        return Text("next   run again with --report DIR to keep every violation and name what went wrong", style="dim")
    text = Text("report ", style="dim")
    text.append(summary.report, style="default")
    kept = "every violation is in violations.parquet"
    if summary.violations_left_out:
        kept = f"{summary.violations_left_out:,} violations of slots with very many are counted, not kept: --all-rows"
    if summary.violations:
        text.append(f"   {kept}")
    if summary.verdict is Verdict.CORRUPT:
        report = shlex.quote(summary.report)
        text.append(f"\nnext   kvcanary triage {report}    or kvcanary sql {report}")
        page = Path(summary.report) / "report.html"
        if page.exists():  # written by who comes after a replay
            text.append(f"\nopen   {page}")
    return text


def segment_names(numbers: Sequence[int]) -> str:
    """Return `0-3, 5` for segments 0 to 3 and 5, nothing for a trace of one file."""
    return number_runs(numbers, most=len(numbers))
