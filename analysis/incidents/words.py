"""Pieces of the sentences that explain an incident, and of the queries that prove it."""

from collections.abc import Iterable

from .case import Case, Sign


def who(request: str, request_id: int = -1) -> str:
    """A request by its name."""
    if request:
        return f"request {request}"
    return f"request {request_id}" if request_id >= 0 else "nobody"


def reader(sign: Sign) -> str:
    """The request of a sign, with its row."""
    if sign.request_id < 0:
        return "the prefix cache" if sign.mode == "sweep" else "nobody"
    return who(sign.request, sign.request_id) + (f" (row {sign.row})" if sign.row > 0 else "")


def place(sign: Sign) -> str:
    """The slot of a sign, with its group and the position that it stands for."""
    words = f"slot {sign.slot}" if sign.count == 1 else f"slot {sign.slot} and {sign.count - 1} more"
    if sign.group >= 0:
        words += f" of group {sign.group}"
    return words + (f", position {sign.position}" if sign.position >= 0 else "")


def when(sign: Sign) -> str:
    """The forward of a sign."""
    if sign.forward < 0:
        return f"event {sign.event}"
    return f"forward {sign.forward}" + (f" ({sign.mode})" if sign.mode else "")


def group_name(case: Case, sign: Sign) -> str:
    """A sign's pool group by its name, where the trace is at hand."""
    group = case.group(sign)
    return f"pool {case.groups[group].name}" if 0 <= group < len(case.groups) else f"group {group}"


def writer_name(sign: Sign) -> str:
    """The request that wrote a violation's slot last."""
    return who(sign.writer_request, sign.writer_request_id)


def writer(sign: Sign) -> str:
    """Who wrote a violation's slot last."""
    if sign.writer_event < 0:
        return "nobody in this trace"
    return f"{writer_name(sign)} in forward {sign.writer_forward}"


def slot_query(group: int, slot: int) -> str:
    """The query for all that happened to a slot."""
    return f"from slot_history({slot}, in_group := {max(group, 0)})"


def request_query(request_id: int) -> str:
    """The query for a request's life."""
    return f"from request_timeline({request_id})"


def events_query(events: Iterable[int]) -> str:
    """The query for single events."""
    wanted = ", ".join(str(event) for event in sorted({event for event in events if event >= 0}))
    return f"select event, kind, forward, request_id, status, mode from events where event in ({wanted or 'null'}) order by event"
