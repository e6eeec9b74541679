"""What tells mechanisms apart, asked of a cluster: whether its row was moved, where its tokens went, what it left out."""

from ....recorder.trace.schema import SUBMITTED
from ..cluster import Cluster
from ..facts import HANDED_IN, Fact
from ..sign import CHAIN, CONTENT, KV_HASH, POSITION, TOKEN, WRITE_POSITION, Sign


def twice_in_batch(cluster: Cluster) -> bool:
    """Whether a request is in a batch twice: it wrote a slot two times, and nobody else did."""
    doubled = cluster.finding("slot_written_twice")
    history = cluster.history(doubled) if doubled is not None else []
    wrote = [fact.request_id for fact in history if (fact.event, fact.what) == (cluster.first.event, "written")]
    return doubled is not None and wrote == [doubled.request_id] * 2


def handed_round(cluster: Cluster) -> list[Sign]:
    """Return what shows that requests of a step were fed one another's sampled tokens, a sign each; none if none were."""
    ring = [sign for sign in cluster.head if sign.kind == "input_not_sampled"]
    ring = [sign for sign in ring if sign.event == ring[0].event]
    while True:
        fed, own = {sign.stored_token for sign in ring}, {sign.expected_token for sign in ring}
        kept = [sign for sign in ring if sign.stored_token in own and sign.expected_token in fed]
        if len(kept) == len(ring):
            return ring if len({sign.request_id for sign in ring}) > 1 else []
        ring = kept


def written_past_its_row(cluster: Cluster) -> tuple[Sign, tuple[int, int]] | None:
    """Return where a row has no entry for what its request wrote into a slot that another one reads, and event and slot of that."""
    read = {sign.slot: sign.request_id for sign in cluster.head if sign.kind != "slot_out_of_pool"}
    for sign in cluster.signs:
        own = cluster.wrote(sign) if sign.kind == "slot_out_of_pool" and sign.slot < 0 else None
        if own is not None and read.get(own[1], sign.request_id) != sign.request_id:
            return sign, own
    return None


def behind_its_rows_end(cluster: Cluster) -> bool:
    """Whether a request's row has no room for a position, whose token was written to the request's own slot of another."""
    beyond = cluster.finding("entry_out_of_table")
    return beyond is not None and any(
        sign.kind == "write_to_foreign_slot" and sign.request_id == beyond.request_id and cluster.was_given(sign)
        for sign in cluster.head
    )


def went_elsewhere(cluster: Cluster, sign: Sign) -> bool:
    """Whether attention looks for a token of its own forward where the row says, and the token went to another slot.

    It looks in the right place if its request was given that slot, and has written nothing else there, or if the token went over
    another of the request's own.
    """
    computed_now = sign.position >= cluster.facts.prefixes.get((sign.event, sign.request_id), 1 << 62)
    given, filled = cluster.last(sign, "alloc"), cluster.filled(sign)
    taken = given is not None and filled is not None and given.event < filled.event < sign.event
    taken = taken and (filled is None or cluster.wrote(sign) != (filled.event, sign.slot))  # it is computed once more
    return (
        computed_now
        and not any(_named_anew(cluster, sign, s) for s in cluster.head)
        and (
            (cluster.was_given(sign) and not taken)
            or over_its_own(cluster, sign) is not None
            or _over_anothers(cluster, sign)
        )
    )


def _over_anothers(cluster: Cluster, sign: Sign) -> bool:
    """Whether the token went over what another request has in its own slot, and nobody has what attention looks at."""
    own = cluster.facts.wrote_before(sign.request_id, sign.position, sign.event + 1)
    if own is None or own[0] != sign.event or own[1] == sign.slot or cluster.history(sign):
        return False
    there = cluster.facts.of(cluster.group(sign), own[1], upto=sign.event - 1)
    wrote = [fact.request_id for fact in there if fact.what in ("alloc", "written")]
    return len(wrote) > 1 and set(wrote[-2:]) == {wrote[-1]} and wrote[-1] not in (-1, sign.request_id)


def its_own_slot(cluster: Cluster, sign: Sign) -> Sign | None:
    """Return what shows that a request's row names another slot than it wrote to: its entry, or that it reads that slot later."""
    for other in cluster.signs:
        here = (other.request_id, other.position, other.event) == (sign.request_id, sign.position, sign.event)
        if here and other.kind == "table_entry_differs":
            return other
        if (other.request_id, other.position) == (sign.request_id, sign.position) and other.event > sign.event:
            given = cluster.last(other, "alloc", "shared", before=sign.event)
            own = given is not None and given.request_id == sign.request_id
            if own and cluster.wrote(other) == (sign.event, sign.slot) and other.slot != sign.slot:
                return other
        left_empty = other.kind == "hit_never_written" and other.cause == "never_written" and other.event > sign.event
        mine = (other.request_id, cluster.group(other)) == (sign.request_id, cluster.group(sign))
        if left_empty and mine and 0 <= other.position - sign.position < sign.count and cluster.was_given(other):
            return other
    return None


def _named_anew(cluster: Cluster, sign: Sign, other: Sign) -> bool:
    """Whether what a sign's request wrote in one slot is looked for in another, which it was given later: its row is wrong."""
    own, given = cluster.wrote(other), cluster.last(other, "alloc")
    if other.request_id != sign.request_id or own is None or given is None or own[1] == other.slot:
        return False
    again = cluster.facts.retracted_before(sign.request_id, sign.event)
    return given.request_id == sign.request_id and given.event > own[0] and not again and not cluster.is_sliding(other)


def stored_nowhere(cluster: Cluster, sign: Sign) -> int | None:
    """Return the event in which a sign's position was computed and its K and V went to no slot, None if they went somewhere."""
    own = cluster.wrote(sign)
    if own is not None and own[1] < 0 and not cluster.window(sign):
        return own[0]
    return sign.event if sign.position in cluster.facts.nowhere.get((sign.event, sign.request_id), ()) else None


def came_to_another(cluster: Cluster) -> tuple[Sign, Fact] | None:
    """Return a slot's sign that got what a forward had handed in for another, and its change; None for none."""
    changes = ((sign, cluster.last(sign, "changed")) for sign in cluster.head)
    return next(((s, change) for s, change in changes if change is not None and change.twin_kind == HANDED_IN), None)


def came_with_its_load(cluster: Cluster, sign: Sign) -> bool:
    """Whether a slot's bytes are not those of its record since it was loaded: nobody had looked at it in between.

    Zeros are as a slot is cleared, and who loads has none to store.
    """
    filled, change = cluster.filled(sign), cluster.last(sign, "changed")
    return filled is not None and (change is None or (change.via < filled.event and not change.emptied))


def skipped(cluster: Cluster, sign: Sign) -> bool:
    """Whether a sign is about a position that its request left out while it ran, and that it has not joined as cached either.

    What it had computed before it was put back is not left out, but counted.
    """
    told = sign.runner == 0 and (cluster.complete or sign.mode == "decode")  # a chunk may be matched anew
    ended = cluster.facts.ahead.get((sign.event, sign.request_id), -1)
    own = cluster.facts.wrote_before(sign.request_id, ended, sign.event)
    if own is not None and any(own[0] < s.event < sign.event for s in cluster.facts.retractions(sign.request_id)):
        return False
    return told and cluster.facts.left_out(sign.request_id, sign.position, sign.event) and not cluster.joined(sign)


def fed_from_before(cluster: Cluster, sign: Sign) -> bool:
    """Whether the positions that a request is fed begin where, or before, it counts a slot as computed that holds other tokens.

    By its positions it has no prefix there: what stands in its row is behind its end.
    """
    fed = [s.stored_position for s in cluster.head if s.request_id == sign.request_id and s.bits & WRITE_POSITION]
    return bool(fed and sign.bits & TOKEN) and 0 <= min(fed) <= sign.position and sign.runner == 0


def behind_its_end(cluster: Cluster, sign: Sign) -> bool:
    """Whether a sign is about a position to which its request had not come by its last forward: nobody can have stored it for it."""
    ended = cluster.facts.ahead.get((sign.event, sign.request_id))
    return ended is not None and sign.position >= ended and cluster.wrote(sign) is None


def row_replaced(cluster: Cluster, sign: Sign) -> bool:
    """Whether a request's row names other slots for all that it has computed, and it was not put back meanwhile."""
    change = cluster.rewrite_of(sign)
    whole = change is not None and change.first_position == 0 and change.count >= change.length
    return whole and not cluster.facts.retracted_before(sign.request_id, sign.event)


def cached_by_nobody(cluster: Cluster) -> Sign | None:
    """Return what the prefix cache took in of slots that were never given out, None for nothing."""
    sign = cluster.finding("free_slot_shared")
    return sign if sign is not None and sign.request_id < 0 and sign.cause == "never_given_out" else None


def left_out_of_a_prompt(cluster: Cluster, sign: Sign) -> bool:
    """Whether a request left out a part of its prompt, and goes on in the prompt with the tokens that stand there."""
    goes_on = cluster.facts.prefixes.get((sign.event, sign.request_id), -1)
    mine = [other.kind for other in cluster.head if other.request_id == sign.request_id]
    prompt = cluster.facts.prompts.get(sign.request_id, -1)
    in_prompt = 0 < goes_on < prompt if prompt >= 0 else goes_on > 0 and sign.mode == "extend"  # else it decodes
    return in_prompt and "input_not_truth" not in mine and skipped(cluster, sign)


def has_no_slots_for_its_prompt(cluster: Cluster) -> bool:
    """Whether a request goes on in its prompt behind a part that it left out, for which its row names no slots at all."""
    for sign in cluster.head:
        goes_on = cluster.facts.prefixes.get((sign.event, sign.request_id), -1)
        left = sign.kind == "padding_slot_read" and 0 < sign.position < goes_on and sign.mode == "extend"
        if left and cluster.facts.left_out(sign.request_id, sign.position, sign.event):
            return True
    return False


def kept_nowhere(cluster: Cluster, sign: Sign) -> bool:
    """Whether a request computed a position of a window, and its K and V went to no slot that keeps them."""
    own = cluster.wrote(sign) if sign.bits & CONTENT and cluster.window(sign) and _own_table(cluster, sign) else None
    return own is not None and own[1] <= 0 and own[0] < sign.event


def _own_table(cluster: Cluster, sign: Sign) -> bool:
    """Whether a sign's group has the slots of the first block table, by which it is known where tokens went."""
    group = cluster.groups[sign.group] if 0 <= sign.group < len(cluster.groups) else None
    return group is not None and group.lut < 0 and group.table == 0


def put_back(cluster: Cluster, sign: Sign) -> bool:
    """Whether a request had been put back before a sign's event, and was given nothing since."""
    left = cluster.facts.status_before(sign.request_id, sign.event)
    if left is None or left.status != "retracted":
        return False
    return not any(
        left.event < event <= sign.event and n > 0 for event, _, n in cluster.facts.given.get(sign.request_id, ())
    )


def computed_though_put_back(cluster: Cluster, sign: Sign) -> bool:
    """Whether a request was put back, was not let in again, and is computed on the row that it had."""
    left = cluster.facts.status_before(sign.request_id, sign.event) if sign.cause == "row_taken_back" else None
    return left is not None and left.status == "retracted" and not cluster.complete


def wrote_to_padding(cluster: Cluster) -> tuple[Sign, int] | None:
    """Return who reads the padding slot where it wrote a token of its own, by its row, and the event of that; None for nobody."""
    for sign in cluster.head:
        own = cluster.wrote(sign) if sign.kind == "padding_slot_read" else None
        if own is not None and own[1] == 0:
            return sign, own[0]
    return None


def lost_all(cluster: Cluster, sign: Sign) -> bool:
    """Whether a request reads slots of a window that are not its own up to the position that it has just computed: its row is wrong.

    A window's frontier, or a hit of too little of it, takes the lowest positions; a hit of nothing of it leaves none.
    """
    prefix, own = cluster.facts.prefixes.get((sign.event, sign.request_id), -1), (sign.request_id, sign.group)
    mine = [s for s in cluster.head if (s.request_id, s.group) == own and (s.kind or s.bits & CONTENT)]
    given = cluster.window(sign) > 0 and cluster.facts.holds(sign.request_id, cluster.group(sign), sign.event) > 0
    lost = any(s.position + s.count == prefix and not cluster.was_given(s) for s in mine)
    return given and lost and not all(left_out_of_a_hit(cluster, s) for s in mine)


def left_out_of_a_hit(cluster: Cluster, sign: Sign) -> bool:
    """Whether a request began with a position that it did not compute, and its row names the first page there: what a table has
    in place of what is behind a window.
    """
    group, begin = cluster.group(sign), cluster.facts.begins.get(sign.request_id)
    page = cluster.groups[group].page_size if 0 <= group < len(cluster.groups) else 1
    began = begin is not None and begin.event == sign.event and 0 <= sign.position < begin.prefix_len
    return began and cluster.window(sign) > 0 and 0 < sign.slot < page and not cluster.was_given(sign)


def last_of_its_prompt(cluster: Cluster, sign: Sign) -> bool:
    """Whether a request begins with its prompt's last token, all else of which it has as cached or loaded, and is fed another there."""
    begin, prompt = cluster.facts.begins.get(sign.request_id), cluster.facts.prompts.get(sign.request_id, -1)
    fed = sign.kind == "input_not_truth" and not sign.runner and 0 < sign.position == prompt - 1
    return fed and begin is not None and (begin.event, begin.prefix_len) == (sign.event, sign.position)


def misplaced(cluster: Cluster, sign: Sign) -> int:
    """How many positions of a sign's request have slots that others filled for another of them: its row is in another order.

    A key that leaves out what came before leads to other tokens than the request has there.
    """
    if sign.request_id < 0:  # a walk of the prefix cache, which meets many prompts and no row
        return 0
    mine = [s for s in cluster.head if (s.request_id, s.group) == (sign.request_id, sign.group) and s.bits & POSITION]
    own = {(s.position, s.expected_token) for s in mine if s.expected_token >= 0}
    theirs = [
        s for s in mine if not cluster.window(s) and (s.writer_request_id != s.request_id or row_moved(cluster, s))
    ]
    theirs = [s for s in theirs if (filled := cluster.filled(s)) is None or filled.what == "written"]
    # What stands there from before the slot was given out is nobody's row's doing.
    theirs = [s for s in theirs if (given := cluster.last(s, "alloc")) is None or s.writer_event >= given.event]
    return len({s.position for s in theirs if (s.stored_position, s.stored_token) in own})


def row_moved(cluster: Cluster, sign: Sign) -> bool:
    """Whether a row's entry was overwritten since its request wrote the position, to another slot than it names now."""
    own, change = cluster.wrote(sign), cluster.rewrite_of(sign)
    return own is not None and change is not None and change.event > own[0] and own[1] != sign.slot


def has_its_row(cluster: Cluster) -> Sign | None:
    """Return the sign of an entry that was overwritten with what another request of the forward writes for the same position, as
    several entries of that row were: both have one row.
    """
    both: dict[int, list[Sign]] = {}
    for sign in cluster.head:
        if sign.bits & CONTENT and cluster.rewrite_of(sign) is not None:
            for fact in cluster.history(sign):
                others = fact.what == "written" and fact.event == sign.event and fact.request_id != sign.request_id
                wrote = others and cluster.facts.wrote_before(fact.request_id, sign.position, sign.event + 1)
                if wrote == (sign.event, sign.slot):
                    both.setdefault(fact.request_id, []).append(sign)
    return next((signs[0] for signs in both.values() if len({s.position for s in signs}) > 1), None)


def of_another(cluster: Cluster, sign: Sign) -> bool:
    """Whether a request reads in its overwritten row what others have at its positions, and was given none of it."""
    mine = [
        s for s in cluster.head if s.request_id == sign.request_id and s.bits & CONTENT and not cluster.was_given(s)
    ]
    theirs = [s for s in mine if s.writer_request_id not in (-1, s.request_id) and row_moved(cluster, s)]
    return len({s.position for s in theirs if s.stored_position == s.position}) > 1


def over_its_own(cluster: Cluster, sign: Sign) -> Sign | None:
    """Return the sign of a slot that a request has written for two positions, the later one in a sign's event for its position."""
    wrote = cluster.facts.wrote_before(sign.request_id, sign.position, sign.event + 1)
    if wrote is None or wrote[0] != sign.event:
        return None
    for other in cluster.signs:
        mine = other.bits and other.slot == wrote[1] and other.request_id == sign.request_id
        if mine and other.position != sign.position:
            before = cluster.facts.wrote_before(sign.request_id, other.position, sign.event)
            if cluster.was_given(other) or (before is not None and before[1] == other.slot):
                return other
    return None


def open_transfer(cluster: Cluster, sign: Sign) -> Fact | None:
    """Return the begin of a transfer into a slot, for another request, that had no end when whoever wrote it last did so."""
    begun = None
    for fact in cluster.history(sign):
        if fact.what == "receiving":
            begun = fact if fact.request_id != sign.writer_request_id else None
        elif fact.what in ("received", "receive_failed") or (fact.what == "free" and begun is None):
            begun = None
    return begun if begun is not None and begun.event < sign.writer_event else None


def lower_edge(cluster: Cluster, sign: Sign) -> bool:
    """Whether a sign's position is among the lowest of its sliding window: what a window's frontier frees first."""
    window, prefix = cluster.window(sign), cluster.facts.prefixes.get((sign.event, sign.request_id), -1)
    page = cluster.groups[cluster.group(sign)].page_size if window else 1
    return window > 0 and (prefix < 0 or 0 <= sign.position - max(0, prefix - window) <= page)


def at_the_edge(cluster: Cluster, sign: Sign) -> bool:
    """Whether what is missing begins with the lowest position of the window."""
    prefix = cluster.facts.prefixes.get((sign.event, sign.request_id))
    if prefix is None or not 0 <= sign.group < len(cluster.groups):
        return not cluster.has_trace and sign.count == 1
    return 0 <= sign.position - max(0, prefix - cluster.groups[sign.group].window) <= 1


def taken_from_behind(cluster: Cluster, sign: Sign) -> bool:
    """Whether another request wrote what a window misses, and its oldest position is still there: its own end took nothing."""
    wrote = cluster.last(sign, "written")
    return wrote is not None and wrote.request_id != sign.request_id and not at_the_edge(cluster, sign)


def over_its_window(cluster: Cluster, sign: Sign) -> bool:
    """Whether a request wrote a later token over a position that its window still reads, in the slot where that stood."""
    own, window = cluster.wrote(sign), cluster.window(sign)
    ahead = sign.stored_position - sign.position
    mine = sign.writer_request_id == sign.request_id and own is not None and own[1] == sign.slot
    return mine and 0 < ahead <= window and own is not None and own[0] < sign.writer_event


def goes_on_inside(cluster: Cluster, sign: Sign) -> bool:
    """Whether a request begins to compute inside a page that it was never given: where a hit ended that it goes on behind."""
    begin, group = cluster.facts.begins.get(sign.request_id), cluster.group(sign)
    page = cluster.groups[group].page_size if 0 <= group < len(cluster.groups) else 1
    begins = begin is not None and begin.event == sign.event and begin.prefix_len == sign.position > 0
    return begins and sign.position % page > 0 and not cluster.was_given(sign)


def still_empty(cluster: Cluster) -> Sign | None:
    """Return a sign of zeros in a slot that was not written before: they may be what the slot was made with."""
    empty = [
        s
        for s in cluster.head
        if s.kind in ("bad_values", "write_damaged") and s.cause == "zeros" and cluster.has_trace and s.slot > 0
    ]
    return next(
        (s for s in empty if not any(f.what == "written" and f.event < s.event for f in cluster.history(s))), None
    )


def given_at_once(cluster: Cluster, sign: Sign) -> bool:
    """Whether a slot has just been given out, and whoever was given it and a sign's request write it for the first time in one
    forward: where a slot counts as given to whoever writes it first, it may have been given to both.
    """
    given = cluster.last(sign, "alloc")
    if given is None or not cluster.facts.frees_of_nobody or given.request_id == sign.request_id:
        return False
    since = [fact for fact in cluster.history(sign) if fact.what == "written" and fact.event > given.event]
    return {fact.event for fact in since} == {sign.event}


def given_to_two(cluster: Cluster, sign: Sign) -> bool:
    """Whether a slot was given to a sign's request and, without having been given back, to another, and both write it in that forward."""
    held: set[int] = set()
    for fact in cluster.history(sign):
        if fact.what == "alloc":
            held.add(fact.request_id)
        elif fact.what in ("free", "evict", "let_go"):
            held.clear()
    wrote = {fact.request_id for fact in cluster.history(sign) if fact.what == "written" and fact.event == sign.event}
    return sign.request_id in held and len(held & wrote) > 1


def let_in_again(cluster: Cluster, sign: Sign) -> list[Fact]:
    """How a request came to a page that it wrote last, if it was let in there more than once: each time, and its write."""
    history = cluster.history(sign) if sign.bits & (CONTENT | KV_HASH) and cluster.complete else []
    at = max((n for n, fact in enumerate(history) if fact.what == "alloc"), default=-1)
    wrote = next((fact for fact in reversed(history) if fact.what in ("written", "copied", "loaded", "received")), None)
    if wrote is None or wrote.what != "written" or at < 0 or history[at].request_id == wrote.request_id:
        return []
    back = max((s.event for s in cluster.facts.retractions(wrote.request_id) if s.event < wrote.event), default=-1)
    mine = [f for f in history[at:] if f.what == "shared" and f.request_id == wrote.request_id and f.event > back]
    return [*mine, wrote] if len(mine) > 1 else []


def page_of_elsewhere(cluster: Cluster, sign: Sign) -> bool:
    """Whether a whole page holds its reader's own tokens, computed by another behind other tokens, or at other positions.

    Whoever led to it looked for these tokens.
    """
    group = cluster.group(sign)
    page = cluster.groups[group].page_size if 0 <= group < len(cluster.groups) else 1
    mine = [s for s in cluster.head if s.request_id == sign.request_id and s.bits & CONTENT]
    behind = [s for s in mine if sign.position < s.position < sign.position + page]
    own = sign.bits == CHAIN and not behind
    moved = [s for s in (sign, *behind) if s.bits & POSITION and not s.bits & TOKEN]
    own |= len(moved) == page and len({s.stored_position - s.position for s in moved}) == 1
    own &= all(s.stored_token == s.expected_token >= 0 for s in (sign, *behind))
    return own and sign.position % page == 0 < page - 1 and sign.writer_request_id != sign.request_id


def filled_while_read(cluster: Cluster, sign: Sign) -> bool:
    """Whether another request of the forward wrote, in a slot that a sign's request reads, just what belongs there: it came too late."""
    mine = [s for s in cluster.head if (s.request_id, s.event) == (sign.request_id, sign.event)]
    at_once = any(s.kind == "hit_never_written" and s.cause == "same_forward" for s in mine)
    goes_on = any(s.request_id == sign.request_id and s.event > sign.event for s in cluster.signs)
    wrong = [s for s in mine if s.bits & CONTENT]
    return at_once and goes_on and bool(wrong) and all(s.last_forward == s.forward for s in wrong)


def window_gone_round(cluster: Cluster, sign: Sign) -> bool:
    """Whether a request joined a slot over which the window of another, who was given it, had gone round."""
    window, given = cluster.window(sign), cluster.last(sign, "alloc")
    round_ = bool(window and sign.bits & POSITION) and sign.stored_position - sign.position >= window
    others = given is not None and given.request_id == sign.writer_request_id != sign.request_id
    return round_ and others and cluster.joined(sign)


def held_before(cluster: Cluster, sign: Sign) -> tuple[Fact, Fact] | None:
    """The write by which a slot held what its reader was to find, and the later one in which it was given out anew: before the
    reader joined it, who was neither of those that wrote.
    """
    history = [fact for fact in cluster.history(sign) if fact.event < sign.event]
    joined = next((f for f in reversed(history) if f.what == "shared" and f.request_id == sign.request_id), None)
    if joined is None or not sign.bits & TOKEN:
        return None
    before = [fact for fact in history if fact.event < joined.event]
    wanted = (sign.expected_token, sign.position)
    held = next((f for f in reversed(before) if f.what == "written" and (f.token, f.position) == wanted), None)
    given = next((f for f in before if held is not None and f.what == "alloc" and f.event > held.event), None)
    own = sign.request_id in {fact.request_id for fact in (held, given) if fact is not None}
    return None if held is None or given is None or own else (held, given)


def hit_what_it_was_given(cluster: Cluster, sign: Sign) -> tuple[Fact, Fact] | None:
    """Return when a slot of another's was given back, and when it was given out, to the very request that begins with it as cached."""
    begin, given = cluster.facts.begins.get(sign.request_id), cluster.last(sign, "alloc")
    back = cluster.last(sign, "free", "evict")
    if begin is None or given is None or back is None or begin.event != sign.event or sign.position >= begin.prefix_len:
        return None
    anew = sign.writer_event < back.event < given.event and given.request_id == sign.request_id
    as_cached = sign.bits and not sign.bits & POSITION and sign.writer_request_id not in (-1, sign.request_id)
    filled = cluster.filled(sign)  # with what is loaded for it, say
    untouched = filled is None or filled.event < back.event
    return (back, given) if anew and as_cached and untouched else None


def given_what_is_cached(cluster: Cluster, sign: Sign) -> bool:
    """Whether a request that has hit nothing begins by writing several slots, pages of one each, that the prefix cache holds.

    Where tables are compared, slots that the cache holds count as lent, even those that the allocator gave out. Of larger pages a
    whole one that is written is no token too many of a hit anyhow.
    """
    begin = cluster.facts.begins.get(sign.request_id)
    begins = begin is not None and begin.event == sign.event and begin.prefix_len == 0
    alone = bool(cluster.groups) and cluster.groups[cluster.group(sign)].page_size == 1
    many = alone and sign.position == 0 and sign.count > 1
    return begins and many and sign.cause == "held_by_cache" and cluster.joined(sign)


def half_of_a_page(cluster: Cluster, sign: Sign) -> bool:
    """Whether a page holds a request's own tokens up to a slot, and from there on those of another place."""
    group = cluster.group(sign)
    page = cluster.groups[group].page_size if 0 <= group < len(cluster.groups) else 1
    of_page = [s.slot for s in cluster.head if s.bits & CONTENT and s.slot // page == sign.slot // page]
    return bool(sign.bits & POSITION) and sign.slot % page > 0 and min(of_page) == sign.slot


def goes_on_in_anothers(cluster: Cluster) -> tuple[Sign, Sign] | None:
    """Return where a request reads another one's slots, which were never its own and hold what its own would, and where it writes
    right behind them, if it does.
    """
    wrong = {(sign.event, sign.request_id) for sign in cluster.head if sign.bits}
    ends = {
        (sign.event, sign.request_id, sign.group, sign.position + sign.count, sign.slot + sign.count): sign
        for sign in cluster.head
        if sign.kind == "read_of_foreign_slot" and (sign.event, sign.request_id) not in wrong
    }
    for sign in cluster.head:
        read = ends.get((sign.event, sign.request_id, sign.group, sign.position, sign.slot))
        if sign.kind == "write_to_foreign_slot" and read is not None and not cluster.was_given(read):
            return read, sign
    return None


def rest_of_a_lent_page(cluster: Cluster, sign: Sign) -> Fact | None:
    """Return who was given a page of which another request, that no allocation gave it, wrote the rest: it had joined the beginning.

    Nobody has given the page back, and what stands in front is still as it was.
    """
    group = cluster.group(sign)
    page = cluster.groups[group].page_size if 0 <= group < len(cluster.groups) else 1
    if not cluster.allocations_told or not sign.bits & TOKEN or sign.position % page == 0:
        return None
    history = [fact for fact in cluster.history(sign) if fact.event <= sign.writer_event]
    given = next((n for n in range(len(history) - 1, -1, -1) if history[n].what == "alloc"), -1)
    since = history[given:] if given >= 0 else []
    owners = {fact.request_id for fact in since if fact.what == "alloc"}
    wrote = [fact.request_id for fact in since if fact.what == "written"]
    left = any(fact.what in ("free", "evict") for fact in since)
    mine = any(fact.request_id == sign.writer_request_id and fact.what == "alloc" for fact in history)
    first = sign.slot - sign.position % page
    whole = any(one.bits & CONTENT and one.slot == first and one.group == sign.group for one in cluster.head)
    if left or mine or whole or len(wrote) < 2 or wrote[-1] != sign.writer_request_id or wrote[0] not in owners:
        return None
    return since[0]


def begins_behind_its_prompt(cluster: Cluster, sign: Sign) -> bool:
    """Whether a request's first token is one behind its prompt, which it computes by itself, and it is not the one that was sampled."""
    begin, header = cluster.facts.begins.get(sign.request_id), cluster.facts.header
    if (
        begin is None
        or begin.prefix_len != cluster.facts.prompts.get(sign.request_id)
        or begin.prefix_len != sign.position
    ):
        return False
    first = sign.bits == TOKEN and not sign.runner and cluster.wrote(sign) == (begin.event, sign.slot)
    return first and sign.request_id not in cluster.facts.loads and header is not None and header.role != "decode"


def begins_from_another(cluster: Cluster) -> bool:
    """Whether a request that is fed other tokens than its own begins in that forward, behind others' tokens as well."""
    fed = next((s for s in cluster.head if s.kind.startswith("input_")), None)
    hit = cluster.finding("hit_differs")
    begin = cluster.facts.begins.get(fed.request_id) if fed is not None else None
    here = fed is not None and hit is not None and hit.request_id == fed.request_id
    return here and begin is not None and begin.event == cluster.first.event


def may_be_damaged(cluster: Cluster, sign: Sign) -> bool:
    """Whether other bytes than a token's may be damage on their way into the pool, which the recording does not look at."""
    header = cluster.facts.header
    if header is None or not 0 <= sign.group < len(header.groups):
        return False
    stored = any(stream.origin != SUBMITTED for stream in header.groups[sign.group].streams)
    return stored and any(entry.what == "submitted" for entry in header.not_watched)


def in_windows_alone(cluster: Cluster, sign: Sign) -> bool:
    """Whether attention got other slots than the table's in layers with a window alone, though others read the same table."""
    if sign.kind != "attention_slots" or not cluster.window(sign) or not cluster.is_sliding(sign):
        return False
    mine = cluster.groups[cluster.group(sign)]
    others = [one for one in cluster.groups if (one.runner, one.table, one.window) == (mine.runner, mine.table, 0)]
    here = [other for other in cluster.signs if other.kind == "attention_slots" and other.event == sign.event]
    return bool(others) and all(cluster.window(other) for other in here)
