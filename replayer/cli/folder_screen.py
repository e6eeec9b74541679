"""What a person sees at the end of a replay of many recordings: a line each, and the verdict over all."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...recorder.errors import printable
from ..report.summary import Summary
from ..run.coverage import RANKS, not_watched
from ..run.verdict import Verdict, combined_exit_code
from .screen import VERDICT_STYLES, segment_names, up_to

_OVERALL = {0: "clean", 1: "corrupt", 2: "unreadable", 125: "inconclusive"}


def overall(codes: Sequence[int]) -> tuple[str, int]:
    """Return the verdict over all recordings, in a word and as an exit code."""
    code = combined_exit_code(codes)
    return _OVERALL[code], code


def show_table(console: Console, done: Sequence[Summary], failed: Sequence[str], codes: Sequence[int]) -> None:
    """Print a line for each recording, what could not be read, and the verdict over all."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name, justify in (
        ("recording", "left"),
        ("rank", "left"),
        ("segments", "left"),
        ("forwards", "right"),
        ("violations", "right"),
        ("findings", "right"),
        ("verdict", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]  # "left" and "right" are two of them
    for summary in done:
        style = VERDICT_STYLES[summary.verdict]
        table.add_row(
            Text(printable(summary.trace), overflow="fold"),
            rank_name(summary),
            segment_names(summary.segments),
            f"{summary.forwards:,}",
            f"{summary.violations:,}",
            f"{summary.findings:,}",
            Text(summary.verdict.name, style=style),
        )
    console.print(table)
    for summary in done:
        if summary.verdict is not Verdict.CLEAN and summary.doubts:
            why = f"clean {up_to(summary)}" if summary.cut else "; ".join(summary.doubts)
            console.print(Text(printable(f"{summary.trace}: {why}"), style="dim"), soft_wrap=True)
    # What one recording says of the others' ranks is so only where they are not here.
    by_recording = [[row for row in summary.coverage if row.what != RANKS or not ranks_there(done)] for summary in done]
    for text in dict.fromkeys("; ".join(not_watched(rows)) for rows in by_recording):
        console.print(Text(printable(f"not watched  {text}"), style="dim"))
    for line in failed:
        console.print(Text(printable(line), style="red"), soft_wrap=True)
    word, _ = overall(codes)
    style = VERDICT_STYLES.get(next((v for v in Verdict if v.value == word), Verdict.INCONCLUSIVE), "bold")
    console.print()
    count = "1 recording" if len(codes) == 1 else f"{len(codes)} recordings"
    console.print(Text.assemble((word.upper(), style), f"   over {count}"))


def ranks_there(done: Sequence[Summary]) -> bool:
    """Say whether the recordings are of all ranks of their servers."""
    found: dict[tuple[str, ...], set[tuple[int, int, int]]] = {}
    sizes: dict[tuple[str, ...], int] = {}
    for summary in done:
        header, ranks = summary.header, summary.header.ranks
        server = (header.run_id, header.engine.name, header.model.name, header.role)
        found.setdefault(server, set()).add((ranks.tp_rank, ranks.pp_rank, ranks.dp_rank))
        sizes[server] = max(1, ranks.tp_size) * max(1, ranks.pp_size) * max(1, ranks.dp_size)
    return all(len(found[server]) >= size for server, size in sizes.items())


def rank_name(summary: Summary) -> str:
    """Return where in the parallel layout a recording's process stood, with its role."""
    ranks = summary.header.ranks
    parts = [
        f"{name} {rank}/{size}"
        for name, rank, size in (
            ("tp", ranks.tp_rank, ranks.tp_size),
            ("pp", ranks.pp_rank, ranks.pp_size),
            ("dp", ranks.dp_rank, ranks.dp_size),
        )
        if size > 1
    ]
    return " ".join([*([summary.header.role] if summary.header.role else []), *parts])


def ranks_json(groups: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Return what was compared across the ranks of each engine, as plain JSON values; of jobs, rank by rank."""
    found = []
    for first, *others in groups:
        found.append(
            {
                "recording": first.recording.name,
                "compared": [
                    {
                        "recording": job.recording.name,
                        "forwards_compared": job.schedule.compared,
                        "forwards_differing": job.schedule.differing,
                        "unrelated": job.schedule.unrelated,
                    }
                    for job in others
                    if job.schedule is not None
                ],
            }
        )
    return found
