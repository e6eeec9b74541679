"""The lives of requests: those that damage names first."""

from typing import Any

from .ask import Ask, Limits, page_sql
from .found import DAMAGE_CLASS

_EVENTS_A_REQUEST = 40


def request_lives(ask: Ask, limits: Limits) -> dict[str, Any]:
    """Return the requests shown, how many there are, and tables of what happened to them."""
    listed = ask.table(page_sql("request_list", {"limit": limits.requests}))
    ids = listed["data"][0]
    lives: dict[str, Any] = {"list": listed, "total": ask.number("select count(*) from requests")}
    if not ids:
        return lives
    wanted = ", ".join(str(int(request_id)) for request_id in ids)
    values = {"requests": wanted, "class": DAMAGE_CLASS, "gap": 4, "each": _EVENTS_A_REQUEST}
    for name, limit in (
        ("request_parts", limits.request_parts),
        ("request_events", limits.request_parts // 2),
        ("request_damage", limits.request_damage),
    ):
        lives[name.removeprefix("request_")] = ask.table(page_sql(name, {**values, "limit": max(1, limit)}))
    return lives
