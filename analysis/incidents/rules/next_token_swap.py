"""Requests were given one another's sampled token, and believed it.

Mechanism: only an oracle can tell. The tokens that two requests of one forward were fed are each other's.
"""

from ..case import WRITE_TOKEN, Case, Judgement, Rule, Sign
from ..words import events_query, place, reader, when


def judge(case: Case) -> Judgement | None:
    """Score a case in which the oracle alone contradicts what was fed."""
    swapped = _swapped(case)
    if swapped is not None:
        return swapped
    wrong = [sign for sign in case.head if sign.bits & WRITE_TOKEN]
    if not wrong or case.finding("input_not_sampled", "input_not_truth", "seq_len_backwards") is not None:
        return None
    sign = wrong[0]
    if any(s.bits & ~WRITE_TOKEN for s in case.head):
        return Judgement(
            score=0.4, sentence=f"{reader(sign)} was fed token {sign.stored_token} in {when(sign)}, not its own"
        )
    fed = {(s.stored_token, s.expected_token) for s in wrong}
    crossed = any((expected, stored) in fed for stored, expected in fed if stored != expected)
    partner = next(
        (s for s in wrong if s.expected_token == sign.stored_token and s.request_id != sign.request_id), None
    )
    words = f", which was sampled for {reader(partner)}" if partner is not None else ""
    return Judgement(
        score=0.95 if crossed else 0.85,
        sentence=f"{reader(sign)} was fed token {sign.stored_token} instead of {sign.expected_token} in {when(sign)}{words}: "
        f"{place(sign)}",
        evidence=(
            events_query([sign.event]),
            (
                f"select forward, request_id, number, token from samples where forward between {sign.forward - 2} and "
                f"{sign.forward} order by forward, request_id, number"
            ),
        ),
        cause_event=sign.event,
    )


def _swapped(case: Case) -> Judgement | None:
    """Two requests that were fed one another's sampled token, which the scheduler knows better."""
    fed: dict[tuple[int, int], Sign] = {}
    for sign in case.head:
        if sign.kind != "input_not_sampled":
            continue
        partner = fed.get((sign.expected_token, sign.stored_token))
        if partner is not None and partner.request_id != sign.request_id:
            return Judgement(
                score=0.85,
                sentence=f"{reader(partner)} and {reader(sign)} were fed one another's sampled tokens, {sign.expected_token} "
                f"and {sign.stored_token}, in {when(sign)}",
                evidence=(
                    events_query([sign.event]),
                    (
                        f"select forward, request_id, number, token from samples where forward between {sign.forward - 2} and "
                        f"{sign.forward} order by forward, request_id, number"
                    ),
                ),
                cause_event=sign.event,
            )
        fed[sign.stored_token, sign.expected_token] = sign
    return None


RULE = Rule(
    kind="next_token_swap",
    title="sampled tokens mixed up",
    mechanism="A sampled token is handed to another request, and the scheduler believes it. (canary)",
    judge=judge,
)
