"""The ring of future tokens was overrun: requests are fed one another's tokens.

Mechanism: with overlap scheduling the next input is taken on the device from a ring that is too small. What is fed is
not what was sampled for the request, in decodes, for several requests, again and again.
"""

from ..case import WRITE_TOKEN, Case, Judgement, Rule
from ..words import place, reader, when


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with inputs that were not sampled for their request."""
    sign = case.finding("input_not_sampled")
    if sign is None or sign.runner != 0:
        return None
    wrong = case.violation(WRITE_TOKEN)
    resumed = case.facts.retracted_before(sign.request_id, sign.event)
    again = case.kinds["input_not_sampled"] > 1
    truth = case.finding("input_not_truth") is not None
    overlaps = case.facts.late_samples > 0 or not case.has_trace
    score = (
        (0.75 if overlaps else 0.45)
        + (0.15 if again else 0)
        - (0.25 if resumed and not again else 0)
        - (0.1 if truth else 0)
    )
    fed = f" (token {wrong.stored_token}, expected {wrong.expected_token})" if wrong is not None else ""
    return Judgement(
        score=score,
        sentence=f"{reader(sign)} was fed another token than was sampled for it in {when(sign)}{fed}: {place(sign)}, it "
        f"{sign.detail}",
        evidence=(
            (
                f"select forward, request_id, number, token from samples where forward between {sign.forward - 3} and "
                f"{sign.forward} order by forward, request_id, number"
            ),
        ),
    )


RULE = Rule(
    kind="future_map_overrun",
    title="the ring of future tokens was overrun",
    mechanism="Overlap scheduling keeps sampled tokens in a ring on the device; overrun, it feeds a request another's. "
    "(S#13713)",
    judge=judge,
    recurs=True,
)
