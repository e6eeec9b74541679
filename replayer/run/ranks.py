"""Which recordings are of one engine: its tensor-parallel ranks, and the prefill and decode sides of a deployment."""

from collections.abc import Sequence

from ...recorder.trace.header import TraceHeader
from ...recorder.trace.recordings import Recording


def ranks_together(recordings: Sequence[Recording]) -> list[list[int]]:
    """Return which recordings are tensor-parallel ranks of one engine, by their indices, ranks ascending.

    Ranks of other data-parallel or pipeline-parallel positions run other forwards and are not compared. Where all ranks
    of a server's run are there, its id tells them from another server's; else a rank that comes again is of a later run
    of the same engine. A server on several machines has an id on each.
    """
    engines: dict[tuple[object, ...], list[int]] = {}
    for index, recording in enumerate(recordings):
        header = recording.header
        if header is None or header.ranks.tp_size < 2:
            continue
        ranks = header.ranks
        where = (ranks.tp_size, ranks.pp_rank, ranks.pp_size, ranks.dp_rank, ranks.dp_size)
        key = (header.engine, header.model, header.role, header.runners, where)
        engines.setdefault(key, []).append(index)
    groups: list[list[int]] = []
    for members in engines.values():
        whole, rest = _whole_runs(recordings, members)
        groups += whole
        run: dict[int, int] = {}
        for index in sorted(rest, key=lambda i: _header(recordings[i]).created_ns):
            rank = _header(recordings[index]).ranks.tp_rank
            if rank in run:
                groups.append([run[r] for r in sorted(run)])
                run = {}
            run[rank] = index
        groups.append([run[r] for r in sorted(run)])
    return [group for group in groups if len(group) > 1]


def _whole_runs(recordings: Sequence[Recording], members: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Return the members that are all ranks of one run by its id, ranks ascending, and the others."""
    by_run: dict[str, list[int]] = {}
    for index in members:
        by_run.setdefault(_header(recordings[index]).run_id, []).append(index)
    whole, rest = [], list(by_run.pop("", ()))
    for of_run in by_run.values():
        ranked = sorted(of_run, key=lambda i: _header(recordings[i]).ranks.tp_rank)
        ranks = [_header(recordings[i]).ranks for i in ranked]
        if [rank.tp_rank for rank in ranks] == list(range(ranks[0].tp_size)):
            whole.append(ranked)
        else:
            rest += of_run
    return whole, rest


def replayed_together(recordings: Sequence[Recording]) -> list[list[int]]:
    """Return which recordings exchange transfers: prefill and decode sides, rank by rank; the others are alone.

    What was hashed with another salt cannot be compared, and is no other side. Where the two sides have as many tensor-parallel ranks, each rank sends to its like; else all are one.
    """
    sides = [r.header for r in recordings if r.header is not None and r.header.role]
    alike = len({header.ranks.tp_size for header in sides}) == 1
    joined: dict[tuple[str, str, int, int], list[int]] = {}
    groups: list[list[int]] = []
    for index, recording in enumerate(recordings):
        header = recording.header
        if header is None or not header.role:
            groups.append([index])
            continue
        rank = (header.ranks.tp_rank, header.ranks.pp_rank) if alike else (0, 0)
        key = (header.tokens, header.salt_id, *rank)
        if key not in joined:
            joined[key] = []
            groups.append(joined[key])
        joined[key].append(index)
    return groups


def _header(recording: Recording) -> TraceHeader:
    if recording.header is None:
        raise ValueError(f"{recording.name} has no header")
    return recording.header
