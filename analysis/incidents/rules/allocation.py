"""What went wrong with who holds which slot."""

from ..cluster import Cluster, Diagnosis, rule
from ..facts import FACTS_A_SLOT, Fact
from ..seen.likely import POSSIBLE, REMAINS
from ..seen.observed import (
    computed_though_put_back,
    given_what_is_cached,
    held_before,
    hit_what_it_was_given,
    lower_edge,
    window_gone_round,
    wrote_to_padding,
)
from ..sign import CONTENT, Sign

_LOST_SLOT = ("read_after_free", "read_of_foreign_slot", "write_to_foreign_slot", "hit_never_written")
_EVICTED = ("read_after_free", "read_of_foreign_slot", "hit_never_written", "foreign_slot_freed", "hit_differs")


@rule("a page was given back twice", branch="allocation")
def double_free(cluster: Cluster) -> Diagnosis | None:
    """A page enters the free list twice and later has two owners. (lab)"""
    sign = cluster.finding("slot_freed_twice", anywhere=True)
    if sign is None:
        return left_to_the_cache_too(cluster)
    score = 0.93 if sign.event == cluster.first.event else 0.5
    score -= 0.15 if cluster.is_sliding(sign) else 0
    score -= 0 if sign.request_id >= 0 else 0.1
    if freed_under_the_cache(cluster, sign) is not None:
        score = REMAINS
    who = sign.reader if sign.request_id >= 0 else "the prefix cache" if cluster.complete else "somebody"
    said = f"{who} gave back {sign.place} after {sign.when}: it {sign.detail}"
    return cluster.diagnosis(score, said, sign, *sign.evidence, cause=sign.event)


def left_to_the_cache_too(cluster: Cluster) -> Diagnosis | None:
    """Of a cache that takes what requests have generated when they are over: it evicts a slot from one that has generated its token
    there, so it has the slot from whom had it before, and who gave it back as well.
    """
    for sign in cluster.head:
        evicted, given, back = evicted_from_generated(cluster, sign)
        if evicted is None or given is None or back is None:
            continue
        said = f"{sign.place} was given to {sign.reader} in event {given.event}, for a token that it generated, and the prefix cache evicted "
        said += f"it in event {evicted.event}: it has it from whom had it before, and it was given back in event {back.event} as well"
        return cluster.diagnosis(0.85, said, sign, back.event, given.event, evicted.event, cause=back.event)
    return None


def evicted_from_generated(cluster: Cluster, sign: Sign) -> tuple[Fact | None, Fact | None, Fact | None]:
    """Return what evicted a slot under a reader that has generated its token there, what gave it to the reader, and what gave it
    back before that; None each if it was otherwise, or the cache may take what is being generated.
    """
    facts = cluster.facts
    prompt = facts.prompts.get(sign.request_id, -1)
    moves = [fact for fact in cluster.history(sign) if fact.what in ("alloc", "shared", "cached", "free", "evict")]
    kinds = [fact.what for fact in moves[-3:]]
    own = len(moves) > 2 and moves[-2].request_id == sign.request_id
    if not facts.frees_of_nobody or not 0 <= prompt <= sign.position or kinds != ["free", "alloc", "evict"] or not own:
        return None, None, None
    return moves[-1], moves[-2], moves[-3]


def freed_under_the_cache(cluster: Cluster, again: Sign) -> Fact | None:
    """Return what gave back a slot that the prefix cache evicted afterwards, where a trace does not say what the cache has."""
    moves = [fact for fact in cluster.history(again) if fact.what in ("alloc", "free", "evict")]
    found = not cluster.complete and [fact.what for fact in moves[-2:]] == ["free", "evict"]
    return moves[-2] if found else None


@rule("a held page was given out", branch="allocation")
def page_given_twice(cluster: Cluster) -> Diagnosis | None:
    """The allocator hands out a page that is not free. (lab)"""
    sign = cluster.finding("slot_double_allocated")
    if sign is not None:
        said = f"{sign.place} was given to {sign.reader} after {sign.when}: it {sign.detail}"
        return cluster.diagnosis(0.93, said, sign, *sign.evidence, cause=sign.event)
    doubled = cluster.finding("slot_written_twice")
    enough = doubled is not None and any(s.bits and named_twice(cluster, s) for s in cluster.signs)
    for later in cluster.signs if doubled is not None and not enough else ():
        own = cluster.wrote(later)
        if later.bits & CONTENT and own is not None and own[1] == later.slot:
            said = f"{later.place} stands in the row of {later.reader} for two positions, both written in {cluster.first.when}: it was "
            return cluster.diagnosis(0.96, said + "given to it twice", later, own[0], cause=own[0])
    padding = wrote_to_padding(cluster)
    if padding is not None:
        read, event = padding
        said = f"slot 0 of group {read.group}, which is kept for padding, stands in the row of {read.reader}, which wrote its own token "
        said += f"for position {read.position} there in event {event}; read in {read.when}"
        return cluster.diagnosis(POSSIBLE, said, read, event, cause=event)  # given out, or taken where nothing was
    for other in cluster.head:
        taken = two_owners(cluster, other)
        if taken is not None:
            claim, write = taken
            said = f"{other.place} was given out again in event {claim.event} while {other.reader} had it, and written in event "
            said += f"{write.event}; read in {other.when}"
            # Whoever reads it may have given it back, unrecorded.
            lost = claim.what == "alloc" and claim.request_id != other.request_id
            score = 0.86 if not lost else POSSIBLE if cluster.facts.frees_of_nobody else REMAINS
            return cluster.diagnosis(score, said, other, claim.event, write.event, cause=claim.event)
    wrong = cluster.violation(CONTENT)
    # The same slot at two positions of one request: the allocator gave it out twice to the same one.
    if wrong is None or not wrong.writer_request_id == wrong.request_id >= 0 or wrong.stored_position == wrong.position:
        return None
    if cluster.window(wrong):  # a ring gives a slot to one position after another
        return None
    said = f"{wrong.reader} has {wrong.place} at position {wrong.stored_position} too, where it wrote it in forward "
    said += f"{wrong.writer_forward}: the page was given to it twice"
    return cluster.diagnosis(0.6, said, wrong)


@rule("a page leaked", branch="allocation", aftermath=True)
def page_leaked(cluster: Cluster) -> Diagnosis | None:
    """A request leaves and does not give back all it held. (lab)"""
    sign = cluster.finding("slot_leaked")
    if sign is None:
        return None
    alone = set(cluster.kinds) == {"slot_leaked"} and not cluster.reasons
    who = "" if sign.request_id < 0 or sign.reader in sign.detail else f" ({sign.reader})"
    said = f"{sign.place} was not given back by whoever had it, as seen after {sign.when}: {sign.detail}{who}"
    return cluster.diagnosis(0.93 if alone else 0.55, said, sign, *sign.evidence, cause=sign.event)


@rule("a page was given back too early", branch="allocation")
def free_too_early(cluster: Cluster) -> Diagnosis | None:
    """A page is freed while its request still runs; the next owner writes over it. (lab)"""
    joined = cluster.finding("free_slot_shared")
    if joined is not None:
        freed = cluster.last(joined, "free", "evict")
        if freed is None or freed.what != "free":
            return None
        said = f"{joined.place} was given back in event {freed.event} by a request that ran on, and joined by "
        said += f"{joined.reader} after {joined.when}: it {joined.detail}"
        return cluster.diagnosis(0.9, said, joined, *joined.evidence, cause=freed.event)
    signs = [sign for sign in cluster.head if sign.kind in _LOST_SLOT or sign.bits]
    for sign in signs:
        left = let_go_under(cluster, sign)
        if left is not None:
            who = f"request {left.request_id}" if left.request_id >= 0 else "nobody says whom"
            said = f"{sign.place} was let go in event {left.event}, by {who}, as the last one's that used it, while {sign.reader} did, "
            said += f"which read it in {sign.when}"
            return cluster.diagnosis(0.9, said, sign, left.event, sign.event, cause=left.event)
        under = _freed_under_another(cluster, sign)
        if under is not None:
            freed, again = under
            said = f"{sign.place} was given back in event {freed.event} by a request that shared it with {sign.reader}, which went on "
            said += f"using it; it was given to another in event {again.event}, and read in {sign.when}"
            return cluster.diagnosis(0.92, said, sign, freed.event, again.event, sign.event, cause=freed.event)
        freed = own_free(cluster, sign)
        if freed is not None and not lower_edge(cluster, sign):
            score = 0.9 if not cluster.is_sliding(sign) else 0.85
            said = f"{sign.reader} gave back {sign.place} in event {freed.event} and went on using it in {sign.when}"
            return cluster.diagnosis(score, said, sign, freed.event, sign.event, cause=freed.event)
    first = cluster.finding("read_after_free", "read_of_foreign_slot")
    if first is None:
        return None
    gone = [fact for fact in cluster.history(first) if fact.what in ("free", "evict")]
    if first.kind == "read_after_free" and cluster.complete and _nobody_else_had(cluster, first):
        said = f"{first.place} was given back in event {gone[-1].event}, nobody says by whom, while {first.reader} alone had it, which "
        said += f"read it in {first.when}"
        return cluster.diagnosis(0.9, said, first, gone[-1].event, first.event, cause=gone[-1].event)
    if first.kind == "read_after_free" and not cluster.complete and gone and gone[-1].what == "free":
        # Whoever had it before may have given it back once more.
        score = 0.92 if len(gone) == 1 else POSSIBLE
        said = f"{first.place} was given back in event {gone[-1].event}, nobody says by whom, while {first.reader} had it, "
        said += f"which read it in {first.when}"
        return cluster.diagnosis(score, said, first, gone[-1].event, first.event, cause=gone[-1].event)
    said = f"{first.reader} read {first.place} in {first.when}, which it no longer holds: it {first.detail}"
    return cluster.diagnosis(0.5 if not cluster.has_trace else 0.35, said, first)


def _nobody_else_had(cluster: Cluster, sign: Sign) -> bool:
    """Whether a sign's slot was given to its request first of all, and then given back once by nobody known: whoever had it before
    would be one who may have given it back a second time.
    """
    history = [fact for fact in cluster.history(sign) if fact.event <= sign.event]
    told = [(fact.what, fact.request_id) for fact in history if fact.what != "written"]
    return len(history) < FACTS_A_SLOT and told == [("alloc", sign.request_id), ("free", -1)]


@rule("freed under the prefix cache", branch="allocation")
def radix_insert_then_free(cluster: Cluster) -> Diagnosis | None:
    """Pages are inserted in the prefix cache and then freed, by a request that no longer owns them. (S#38319)"""
    written = cluster.finding("write_to_foreign_slot")
    if written is not None and given_what_is_cached(cluster, written):
        said = f"{written.reader} computed its whole prompt in {written.when}, from {written.place} on, in slots that the prefix cache holds, "
        said += "as one does that hits nothing and is given free ones"
        return cluster.diagnosis(0.65, said, written, *written.evidence, cause=written.event)
    sign = cluster.finding("foreign_slot_freed")
    if sign is None or sign.request_id < 0:
        again = cluster.finding("slot_freed_twice")
        freed = freed_under_the_cache(cluster, again) if again is not None else None
        if again is None or freed is None:
            return None
        said = f"{again.place} was given back in event {freed.event}, nobody says by whom, while the prefix cache had it, which evicted "
        return cluster.diagnosis(
            0.85, said + f"it after {again.when}", again, freed.event, again.event, cause=freed.event
        )
    left = cluster.facts.status_after(sign.request_id, sign.event)
    score = 0.93 if sign.cause == "held_by_cache" else 0.45
    score -= 0.2 if cluster.has_trace and (left is None or left.status == "admitted") else 0
    score -= 0.1 if cluster.is_sliding(sign) and any(g.lut < 0 for g in cluster.groups) else 0
    how = f" when it was {left.status}" if left is not None and left.status != "admitted" else ""
    said = f"{sign.reader} gave back {sign.place}{how} after {sign.when}: it {sign.detail}"
    return cluster.diagnosis(score, said, sign, *sign.evidence, cause=sign.event)


@rule("evicted under a running request", branch="allocation")
def eviction_of_locked_page(cluster: Cluster) -> Diagnosis | None:
    """The prefix cache gives back a page that is locked by a running request. (lab)"""
    for sign in cluster.head:
        if sign.slot <= 0 or (sign.kind not in _EVICTED and not sign.bits) or sign.request_id < 0:
            continue
        evicted, held = taken_away(cluster, sign, "evict")
        begin = cluster.facts.begins.get(sign.request_id)
        if evicted is None or begin is None or begin.event > evicted.event or let_go_under(cluster, sign) is not None:
            continue
        if evicted_from_generated(cluster, sign)[0] is not None:
            continue
        said = f"the prefix cache evicted {sign.place} in event {evicted.event} under {sign.reader}, which read it in {sign.when}"
        return cluster.diagnosis(0.9 if held else 0.72, said, sign, evicted.event, sign.event, cause=evicted.event)
    return None


@rule("a prefix hit of a page that was gone", branch="allocation")
def stale_prefix_hit(cluster: Cluster) -> Diagnosis | None:
    """A lookup that has gone stale, or an index that outlives its page: a request joins a page that had been
    evicted or given back, and may be another's by then. (V#17305, V#4761)
    """
    for sign in cluster.head:
        anew = hit_what_it_was_given(cluster, sign)
        if anew is not None:
            said = f"{sign.reader} began in {sign.when} with {sign.place} as cached, which had been given back in event {anew[0].event}, and "
            said += f"was given it anew in event {anew[1].event} for another position: the prefix cache names a slot that is free"
            return cluster.diagnosis(0.85, said, sign, anew[0].event, anew[1].event, cause=anew[0].event)
        if window_gone_round(cluster, sign):
            said = f"{sign.reader} joined {sign.place} as a cached prefix, over which the window of its holder had gone round: {sign.differs}"
            return cluster.diagnosis(0.85, said, sign, sign.writer_event, sign.event, cause=sign.event)
        was = held_before(cluster, sign)
        if was is not None:
            said = f"{sign.reader} joined {sign.place} as a cached prefix, which had held its token and position since event {was[0].event}, "
            said += (
                f"and was given to another in event {was[1].event}: whoever named it to the request had not been told"
            )
            return cluster.diagnosis(0.92, said, sign, was[0].event, was[1].event, cause=was[1].event)
        mine = [f for f in cluster.history(sign) if f.what == "shared" and f.request_id == sign.request_id]
        before = [f for f in cluster.history(sign) if mine and f.event < mine[-1].event]
        gone = next((f for f in reversed(before) if f.what in ("evict", "free")), None)
        since = [f for f in before if gone is not None and f.event > gone.event]
        if gone is None or any(f.what in ("cached", "shared", "loaded", "received", "copied") for f in since):
            continue
        other = next((f for f in since if f.what == "alloc" and f.request_id != sign.request_id), None)
        if other is not None and not cluster.tells_shares:  # who may have left it to the cache
            continue
        said = f"{sign.reader} joined {sign.place} as a cached prefix in event {mine[-1].event}, which the cache had given up in "
        said += f"event {gone.event}" + (f" and which was given to another in event {other.event}" if other else "")
        return cluster.diagnosis(0.94, said, sign, gone.event, mine[-1].event, cause=mine[-1].event)
    return None


@rule("computed after it was put back", branch="allocation")
def scheduled_after_retraction(cluster: Cluster) -> Diagnosis | None:
    """A request that was preempted late stays in the step that was put together before: it runs on the row of slots
    that it has given back. (V#23713)
    """
    for sign in cluster.head:
        if computed_though_put_back(cluster, sign):
            said = f"{sign.reader} was put back in event {sign.evidence[0]} and has not been let in again, and was computed in {sign.when} "
            return cluster.diagnosis(
                0.96, f"{said}all the same: it {sign.detail}", sign, *sign.evidence, cause=sign.evidence[0]
            )
        ends = [s for s in cluster.facts.statuses.get(sign.request_id, ()) if s.event < sign.event]
        left = next((s for s in reversed(ends) if s.status == "retracted"), None)
        given = cluster.facts.given.get(sign.request_id, ())
        at = sign.evidence[0] if sign.kind == "seq_len_backwards" and sign.evidence else sign.event
        left = left if left is None or left.event < at else None
        if left is None or not given or any(left.event < event <= at and n > 0 for event, _, n in given):
            continue
        said = f"{sign.reader} was put back in event {left.event} and given nothing since, and was computed in {sign.when} all "
        said += f"the same: it uses {sign.place}, which it had given back"
        return cluster.diagnosis(0.96, said, sign, left.event, sign.event, cause=left.event)
    return None


def two_owners(cluster: Cluster, sign: Sign) -> tuple[Fact, Fact] | None:
    """A slot that was written for one holder, then handed to a further one who wrote it too, and nobody gave it back."""
    if not sign.bits or cluster.complete:
        return None
    history = [fact for fact in cluster.history(sign) if fact.event <= sign.event]
    writes = [fact for fact in history if fact.what == "written"]
    claims = [fact for fact in history if fact.what in ("alloc", "shared")]
    if not writes or not claims:
        return None
    claim = next(
        (f for f in reversed(claims) if f.request_id == writes[-1].request_id and f.event < writes[-1].event), None
    )
    if claim is None or claim is claims[0] or not any(write.event < claim.event for write in writes):
        return None
    first = next(write for write in reversed(writes) if write.event < claim.event)
    between = [f for f in history if first.event <= f.event <= claim.event and f.what in ("free", "evict")]
    return None if between else (claim, writes[-1])


def _freed_under_another(cluster: Cluster, sign: Sign) -> tuple[Fact, Fact] | None:
    """A slot that one of its holders gave back while a sign's request held it too, and that was given out again then."""
    holders: set[int] = set()
    freed, found = None, None
    for fact in cluster.history(sign):
        if fact.what == "alloc":
            if freed is not None and sign.request_id in holders and fact.request_id not in holders:
                found = freed, fact
            holders, freed = {fact.request_id}, None
        elif fact.what == "shared":
            holders.add(fact.request_id)
        elif fact.what in ("evict", "cached"):
            holders.clear()
        elif fact.what == "free":
            freed = fact if holders - {fact.request_id} else None
            holders.discard(fact.request_id)
    return found


def let_go_under(cluster: Cluster, sign: Sign) -> Fact | None:
    """What left a slot to the prefix cache alone while a sign's request used it, which was given or joined it before."""
    left, uses = None, False
    for fact in cluster.history(sign):
        if fact.what in ("alloc", "shared") and fact.request_id == sign.request_id:
            left, uses = None, True
        elif fact.what in ("let_go", "free") and fact.request_id == sign.request_id:
            left, uses = None, False
        elif fact.what == "let_go" and uses:
            left = fact
    return left


def own_free(cluster: Cluster, sign: Sign) -> Fact | None:
    """Return the free by which a running request lost the slot that it uses, None if it was not its own doing.

    Of a slot that the prefix cache held besides it is that it let it go.
    """
    given_up = (taken_away(cluster, sign, what)[0] for what in ("free", "let_go"))
    freed = next((fact for fact in given_up if fact is not None and fact.request_id == sign.request_id), None)
    if freed is None:
        return None
    left = cluster.facts.status_after(sign.request_id, freed.event)
    return None if left is not None and left.event <= sign.event else freed


def written_again(cluster: Cluster, sign: Sign) -> tuple[int, int] | None:
    """Return event and position of the request's own write of a sign's slot for another position, since it wrote the sign's."""
    own = cluster.wrote(sign)
    if own is None or own[1] != sign.slot or cluster.group(sign) != 0:
        return None
    for (request, position), writes in cluster.facts.wrote.items():
        if request == sign.request_id and position != sign.position:
            again = next((at for at, slot in writes if slot == sign.slot and own[0] <= at <= sign.event), None)
            if again is not None:
                return again, position
    return None


def named_twice(cluster: Cluster, sign: Sign) -> tuple[int, int] | None:
    """Return what `written_again` does if the request had been given slots enough for both: its row is wrong."""
    again = written_again(cluster, sign)
    if again is None or not cluster.complete:
        return None
    return again if max(again[1], sign.position) < cluster.facts.holds(sign.request_id, 0, again[0]) else None


def taken_away(cluster: Cluster, sign: Sign, what: str) -> tuple[Fact | None, bool]:
    """Return the last free or eviction of a sign's slot, None if its request was given the slot since.

    And whether the request is known to have held it in its present life. A request that lost a slot while it ran, and
    reads it still for its old position, was not helped by being given it anew.
    """
    continues = sign.kind == "read_of_foreign_slot"
    admitted = cluster.facts.status_before(sign.request_id, sign.event)
    taken, held = None, False
    for fact in cluster.history(sign):
        if fact.what == what and (taken is None or taken.request_id != sign.request_id):
            taken = fact  # its own stays: who was given the slot then may give it back, too
        elif fact.what in ("alloc", "shared", "cached") and fact.request_id == sign.request_id:
            if not (continues and held):
                taken = None
            held = admitted is None or fact.event > admitted.event
    return taken, held
