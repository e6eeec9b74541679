"""A cached page's key covers fewer tokens than the page: another prompt hits it.

Mechanism: a request starts from cached slots that hold other tokens at its own positions; the chain is whole, since it
is the other prompt's.
"""

from ..case import CHAIN, POSITION, TOKEN, Case, Judgement, Rule
from ..words import place, reader, slot_query, when, writer


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with a hit on other tokens."""
    wrong = case.violation(TOKEN)
    hit = case.finding("hit_differs")
    sign = wrong if wrong is not None else hit
    if sign is None:
        return None
    bits = 0
    for other in case.head:
        bits |= other.bits
    clean = not bits & (CHAIN | POSITION)
    if not clean or case.finding("row_reassigned", "read_of_foreign_slot", "write_to_foreign_slot", "read_after_free"):
        return None
    begin = case.facts.begins.get(sign.request_id)
    starts = begin is not None and begin.prefix_len > sign.position
    shared = case.last(sign, ["shared"])
    score = 0.6
    if case.has_trace:
        score = 0.55 + (0.25 if starts else 0) + (0.1 if shared is not None or hit is not None else 0)
    elif hit is not None:
        score = 0.8
    found = (
        f"token {wrong.stored_token} instead of {wrong.expected_token}, written by {writer(wrong)}"
        if wrong
        else sign.detail
    )
    return Judgement(
        score=score,
        sentence=f"{reader(sign)} hit a cached page of another prompt in {when(sign)}: {place(sign)} holds {found}",
        evidence=(slot_query(case.group(sign), sign.slot),),
    )


RULE = Rule(
    kind="tokens_truncated_hash_kept",
    title="a prefix hit of another prompt",
    mechanism="A prefix node's key covers only a part of its page's tokens, so that prompts that differ behind it hit it. "
    "(V#49377)",
    judge=judge,
    recurs=True,
)
