"""The answers of triage in words: one function a question, from the rows of its two queries."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Rows = Sequence[Row]

NO_SLOT = "no damage names a slot"


def held_before(first: Rows, overall: Rows) -> str:
    """Holders of the slot before the damage, or its writers where nobody tells who held it; who wrote damaged slots last."""
    now = list(dict.fromkeys(_holder(row) for row in first if row["at_the_damage"]))
    before = list(dict.fromkeys(_holder(row) for row in first if not row["at_the_damage"]))
    if not first:
        at_first = "the trace does not tell who held the slot"
    else:
        # Where no slot history is told, a write says who wrote, and not who held the slot from then on.
        verb = "last written by" if all(row["began"] == "write" for row in first) else "held by"
        at_first = f"{verb} {' and '.join(now) or 'nobody'}; before that by {', '.join(before) or 'nobody'}"
    if not overall:
        return at_first
    total = sum(row["found"] for row in overall)
    shares = ", ".join(f"{row['last_written_by']} {_share(row['found'], total)}" for row in overall)
    return f"{at_first}; damaged slots were written last by: {shares}"


def first_writer(first: Rows, overall: Rows) -> str:
    """First and last write of the slot before the damage."""
    if not first:
        return "no forward of this trace wrote it before the damage"
    begin, last = first[0], first[-1]
    words = f"forward {begin['forward']} ({begin['mode']}) for {_name(begin['request'])}, position {begin['position']}"
    if last is not begin:
        words += f"; last before the damage forward {last['forward']} for {_name(last['request'])}, position {last['position']}"
    if overall:
        words += f"; the damage seen first over all was written in forward {overall[0]['writer_forward']}"
    return words


def prefix_cache(first: Rows, overall: Rows) -> str:
    """Requests that began with a cached prefix against the others."""
    cached = next((row for row in overall if row["began_with_cached_prefix"]), None)
    fresh = next((row for row in overall if not row["began_with_cached_prefix"]), None)
    if cached is None:
        return "no request of this trace began with a cached prefix, so it happens without one too"
    parts = [f"{cached['hit']} of {cached['requests']} requests with a cached prefix are hit"]
    if fresh is not None:
        parts.append(f"{fresh['hit']} of {fresh['requests']} without")
    said = ", ".join(parts)
    if fresh is None:
        said = f"cannot be told: every request began with a cached prefix; {said}"
    elif cached["hit"] and not fresh["hit"]:
        said = f"yes: {said}"
    elif not cached["hit"] and not fresh["hit"]:
        said = f"no request was hit: {said}"
    else:
        said = f"no: {said}"
    if first and first[0]["in_cached_prefix"]:
        said += f"; the first damage lies inside the cached prefix of {first[0]['prefix_hit']} tokens"
    return said


def chunk_boundaries(_: Rows, overall: Rows) -> str:
    """Where in their prompts requests were damaged first."""
    if not overall:
        return "no damage names a request's position"
    total = sum(row["requests"] for row in overall)
    at_bounds = sum(row["requests"] for row in overall if row["first_damaged_position"].endswith("of a chunk"))
    verdict = "yes" if at_bounds == total else "no" if not at_bounds else "not only"
    places = ", ".join(f"{row['requests']} {row['first_damaged_position']}" for row in overall)
    return f"{verdict}: of {total} request(s) the first damaged position lies: {places}"


def page_modulo(_: Rows, overall: Rows) -> str:
    """Whether the requests hit share a remainder of the page size that others do not have."""
    if not overall:
        return "no prompt length is known"
    if overall[0]["page_size"] == 1:
        return "no: pages hold one token"
    bad = [row for row in overall if row["hit"]]
    if not bad:
        return "no request with a known prompt length is hit"
    hits = sum(row["hit"] for row in bad)
    if len(bad) == 1:
        row = bad[0]
        if hits == 1:
            return f"cannot be told of one request; its remainder is {row['remainder']} of {row['page_size']}"
        return f"perhaps: all {hits} requests hit have remainder {row['remainder']} of {row['page_size']}"
    return f"no: {hits} requests hit have {len(bad)} remainders of {bad[0]['page_size']}"


def slot_range(_: Rows, overall: Rows) -> str:
    """The runs of neighbouring slots that damage lies in."""
    if not overall:
        return NO_SLOT
    row = overall[0]
    where = f"slots {row['first_slot']} to {row['last_slot']}" if row["slots"] > 1 else f"slot {row['first_slot']}"
    whose = "for several requests" if row["several_requests"] else "for one request"
    if row["ranges"] == 1:
        return f"yes: all of it lies in {where} of group {row['pool_group']}, {whose}"
    return f"no: {row['ranges']} ranges; most of it in {where} of group {row['pool_group']}, {whose}"


def whose_tokens(_: Rows, overall: Rows) -> str:
    """Whose tokens stand in the damaged slots."""
    if not overall:
        return "no token differs: what is wrong is elsewhere (KV bytes, positions, chain, or the bookkeeping)"
    total = sum(row["tokens"] for row in overall)
    parts = ", ".join(f"{row['stored_tokens_are']} ({_share(row['tokens'], total)})" for row in overall)
    return f"of {total} wrong tokens: {parts}"


def target_or_draft(_: Rows, overall: Rows) -> str:
    """Runners that saw damage."""
    names = list(dict.fromkeys(row["runner_name"] for row in overall if row["runner_name"]))
    if not names:
        return "no damage names a runner"
    begin = overall[0]
    when = f"in mode {begin['mode']}" if begin["mode"] else "between forwards"
    return f"{' and '.join(names)}; first {begin['runner_name']}, {when}, forward {begin['first_forward']}"


def prefill_or_decode(_: Rows, overall: Rows) -> str:
    """The engine's role, and the modes in which damage was written and seen."""
    if not overall:
        return NO_SLOT
    role = overall[0]["role"]
    side = f"this is the {role} engine's trace" if role else "one engine does both"
    seen = ", ".join(dict.fromkeys(f"{row['seen_in'] or 'between forwards'}" for row in overall))
    written = ", ".join(dict.fromkeys(row["written_in"] for row in overall if row["written_in"]))
    return f"{side}; seen in: {seen}; the slots were written in: {written or 'no forward of this trace'}"


def transfer_sides(_: Rows, overall: Rows) -> str:
    """What transfer checks found on either side."""
    if not overall:
        return "nothing was transferred in this trace"
    found = {row["kind"]: row["found"] for row in overall}
    source = found.get("transfer_source_damaged", 0) + found.get("transfer_source_changed", 0)
    differs = found.get("transfer_differs", 0)
    if differs and not source:
        return f"{differs} received part(s) differ from what was sent; the detail says which side went wrong"
    if source:
        return (
            f"no: {source} time(s) the source was damaged or changed while it was sent; received differently: {differs}"
        )
    failed = sum(count for kind, count in found.items() if "failed" in kind)
    return f"no transfer was found to differ; {failed} failed"


ANSWERS: Mapping[str, Callable[[Rows, Rows], str]] = {
    function.__name__: function
    for function in (
        held_before,
        first_writer,
        prefix_cache,
        chunk_boundaries,
        page_modulo,
        slot_range,
        whose_tokens,
        target_or_draft,
        prefill_or_decode,
        transfer_sides,
    )
}


def _holder(row: Row) -> str:
    return "the prefix cache" if row["holder"] == "cache" else _name(row["request"])


def _name(name: str | None) -> str:
    return f"request {name}" if name else "nobody"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %"
