"""Which branch of mistakes an incident belongs to by what was observed alone, and what is left open beside what rules have found.

What comes first in `branch_of` tells most: what rows and tables show, then what was fed and written, then who held the slot, and
last what filled it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from ....replayer.checks.layers import BEHIND_THE_FIRST
from ..cluster import Cluster, Diagnosis
from ..facts import FACTS_A_SLOT
from ..sign import CONTENT, KV_HASH
from .evidence import Evidence, Filled, Held
from .observed import (
    begins_behind_its_prompt,
    begins_from_another,
    behind_its_end,
    behind_its_rows_end,
    cached_by_nobody,
    came_to_another,
    came_with_its_load,
    computed_though_put_back,
    fed_from_before,
    filled_while_read,
    given_at_once,
    given_to_two,
    given_what_is_cached,
    goes_on_in_anothers,
    goes_on_inside,
    handed_round,
    has_its_row,
    has_no_slots_for_its_prompt,
    held_before,
    hit_what_it_was_given,
    in_windows_alone,
    its_own_slot,
    kept_nowhere,
    last_of_its_prompt,
    left_out_of_a_prompt,
    let_in_again,
    lost_all,
    lower_edge,
    misplaced,
    of_another,
    open_transfer,
    over_its_window,
    page_of_elsewhere,
    put_back,
    rest_of_a_lent_page,
    row_moved,
    row_replaced,
    skipped,
    still_empty,
    stored_nowhere,
    taken_from_behind,
    twice_in_batch,
    went_elsewhere,
    window_gone_round,
    written_past_its_row,
    wrote_to_padding,
)

# No kind is said with this or more that another one could be as well.
CERTAIN: Final = 0.7
POSSIBLE: Final = 0.65
# Below this nothing is said to be known; what is likely by the evidence alone; what cannot be excluded.
KNOWN: Final = 0.45
ONLY_LIKELY: Final = 0.5
EXCLUDED: Final = 0.4
REMAINS: Final = 0.25


class Likely(NamedTuple):
    """A branch, and the kinds of it that the evidence leaves, the likeliest first."""

    branch: str
    kinds: tuple[str, ...] = ()


_OF_SLOTS: Final = {
    *("read_after_free", "read_of_foreign_slot", "write_to_foreign_slot", "hit_never_written", "hit_differs"),
    *("attention_slots", "slot_written_twice"),
}
_POSITIONS: Final = ("position_off", "draft_position_plus_one")
_BYTES: Final = ("kv_changed", "groups_alias", "pad_slot_wraps", "pad_rows_keep_last_blocks", "slot_mapping")
_ALLOCATION: Final = {
    Held.TWICE: ("page_given_twice", "double_free", "free_too_early"),
    Held.JOINED_GONE: ("stale_prefix_hit", "radix_insert_then_free"),
    Held.GAVE_UP: ("free_too_early", "scheduled_after_retraction", "req_to_token"),
    Held.FREED: ("free_too_early", "double_free", "page_given_twice", "eviction_of_locked_page"),
    Held.EVICTED: ("eviction_of_locked_page", "stale_prefix_hit", "double_free"),
    Held.GIVEN_ANEW: ("page_given_twice", "free_too_early", "eviction_of_locked_page"),
}
_CONTENT: Final = {
    Filled.NOBODY: Likely("content", ("prefix_not_computed", "hit_before_written", "fork_copy_missing")),
    Filled.COPY: Likely("transfer", ("copy_failed",)),
    Filled.LOAD: Likely(
        "transfer", ("load_of_other_prefix", "failed_load_counted_loaded", "host_copy_overwritten", "stored_wrong")
    ),
    Filled.ITSELF_ELSEWHERE: Likely("write", ("slot_mapping", "page_given_twice", "req_to_token")),
    Filled.AS_CACHED: Likely("identity", ("tokens_truncated_hash_kept", "req_to_token")),
    Filled.OTHER: Likely("write", ("slot_mapping", "page_given_twice", "req_to_token")),
}


def branch_of(cluster: Cluster, seen: Evidence) -> Likely:
    """Return where it went wrong, by what was observed alone: the slot's holder, what filled it, what its row names."""
    if seen.filled is Filled.NOT_LOADED:
        return Likely("transfer", ("failed_load_counted_loaded", "load_landed_elsewhere"))
    for step in (_by_rows, _by_what_was_fed, _by_what_was_written, _by_its_beginning, _by_its_holder, _by_its_row):
        if (found := step(cluster, seen)) is not None:
            return found
    return _by_what_filled_it(seen)


def _kinds(cluster: Cluster) -> set[str]:
    return {s.kind for s in cluster.head} - {""}


def _content(cluster: Cluster) -> bool:
    return any(s.bits & CONTENT for s in cluster.head)


def _by_rows(cluster: Cluster, seen: Evidence) -> Likely | None:
    """Rows that changed hands, entries that lead nowhere, the full-to-SWA table."""
    kinds = _kinds(cluster)
    if any(computed_though_put_back(cluster, s) for s in cluster.head):
        return Likely("allocation", ("scheduled_after_retraction", "row_reassigned_in_flight"))
    strayed = any((s.event, s.request_id) in cluster.facts.strayed for s in cluster.head)
    if ("row_reassigned" in kinds and not twice_in_batch(cluster)) or strayed:
        return Likely("table", ("row_reassigned_in_flight",))
    if has_its_row(cluster) is not None:
        return Likely("table", ("row_reassigned_in_flight", "req_to_token"))
    if "swa_mapping_stale" in kinds:
        return _of_the_swa_table(cluster, seen)
    nothing = cluster.finding("padding_slot_read")
    if nothing is not None and cluster.in_ring(nothing) and (cluster.wrote(nothing) or (0, 0))[1] > 0:
        return Likely("read", ("window_read_wrong", "attention_table_overwritten"))
    # Its row does not name what it has written; of a beam that nobody knows no more is known than that it names nothing.
    if nothing is not None and (nothing.request_id < 0 or (cluster.wrote(nothing) or (0, 0))[1] > 0):
        return Likely("table", ("req_to_token", "slot_mapping"))
    padding = wrote_to_padding(cluster)
    if padding is not None and cluster.enough(padding[0]):
        return Likely("table", ("req_to_token", "slot_mapping"))
    if padding is not None and cluster.complete:
        return Likely("allocation", ("commit_beyond_allocation", "page_given_twice"))
    if padding is not None:
        return Likely("allocation", ("page_given_twice", "commit_beyond_allocation", "double_free"))
    given, remapped = cluster.last(seen.sign, "alloc"), cluster.last(seen.sign, "remapped")
    if remapped is not None and (given is None or remapped.event > given.event):
        return Likely("table", ("stale_swa_mapping",))
    return None


def _by_what_was_fed(cluster: Cluster, seen: Evidence) -> Likely | None:
    """Tokens, positions and lengths that model and attention got."""
    kinds = _kinds(cluster)
    if {"table_entry_differs", "input_not_truth", "position_not_place"} <= {
        *cluster.kinds
    }:  # all but the prefix fits another place
        return Likely("read", ("attention_seq_len_wrong", "position_off"))
    if has_no_slots_for_its_prompt(cluster):
        return Likely("content", ("prefix_not_computed", "position_off"))
    if handed_round(cluster):
        return Likely("input", ("next_token_swap",))
    if any(last_of_its_prompt(cluster, s) for s in cluster.head):
        return Likely("input", ("async_resume_wrong_input", "future_map_overrun", "next_token_swap"))
    if any(k.startswith("input_") for k in kinds) and not begins_from_another(cluster):
        return Likely("input", _POSITIONS if seen.positions else ())
    if fed_from_before(cluster, seen.sign):
        return Likely("input", _POSITIONS)
    if behind_its_rows_end(cluster):
        return Likely("write", ("slot_mapping", "shared_page_written"))
    if "attention_output" in kinds and not _content(cluster):
        return Likely("read", ("attention_table_overwritten", "attention_seq_len_wrong", "window_read_wrong"))
    if {"attention_lens", "wrong_window"} <= kinds:  # tokens before the window, and none of some within it
        return Likely("read", ("window_read_wrong", "attention_seq_len_wrong"))
    if "attention_lens" in kinds:
        return Likely("input", _POSITIONS) if seen.positions else Likely("read", ("attention_seq_len_wrong",))
    return None


def _by_what_was_written(cluster: Cluster, seen: Evidence) -> Likely | None:
    """Where a forward's tokens went, or that they went nowhere."""
    content, kinds = _content(cluster), _kinds(cluster)
    if written_past_its_row(cluster) is not None:
        return Likely("allocation", ("commit_beyond_allocation",))
    apart = cluster.finding("table_entry_differs")
    if apart is not None and not content and cluster.rewrite_of(apart) is None:
        return Likely("write", ("slot_mapping", "req_to_token"))
    if came_to_another(cluster) is not None:
        return Likely("write", ("slot_mapping", "kv_write_lost"))
    if stored_nowhere(cluster, seen.sign) is not None:
        return Likely("write", ("kv_write_lost", "slot_mapping"))
    empty = still_empty(cluster)
    if empty is not None and not content:
        if empty.detail.endswith(BEHIND_THE_FIRST):  # what a layer computes wrongly all behind it have
            return Likely("content", ("bad_values_written", "kv_write_lost"))
        return Likely("write", ("kv_write_lost", "bad_values_written"))
    if cached_by_nobody(cluster) is not None:
        return Likely("content", ("hit_before_written",))
    if any(rest_of_a_lent_page(cluster, sign) is not None for sign in cluster.head):
        return Likely("write", ("shared_page_written", "slot_mapping"))
    if seen.held is Held.JOINED_GONE and "free_slot_shared" in kinds:
        return Likely("allocation", _ALLOCATION[seen.held])
    if not content and kinds and not kinds & _OF_SLOTS and seen.sign.bits != KV_HASH:
        return Likely(cluster.first.branch)
    return None


def _by_its_beginning(cluster: Cluster, seen: Evidence) -> Likely | None:
    """What a request began or went on with: too little, too much, or what it was let in on."""
    head, sign, kinds, content = cluster.head, seen.sign, _kinds(cluster), _content(cluster)
    if any(left_out_of_a_prompt(cluster, s) for s in head):
        return Likely("content", ("prefix_not_computed", "position_off"))
    if any(skipped(cluster, s) or begins_behind_its_prompt(cluster, s) for s in head):
        return Likely("input", _POSITIONS)
    if seen.fed and not content and not kinds & _OF_SLOTS:
        return Likely("input", _POSITIONS if seen.positions else ())
    foreign = cluster.finding("write_to_foreign_slot")
    if foreign is not None and not cluster.was_given(foreign) and its_own_slot(cluster, foreign) is not None:
        return Likely("write", ("slot_mapping", "req_to_token"))
    if misplaced(cluster, sign) > 1:
        return Likely("table", ("req_to_token", "slot_mapping"))
    if let_in_again(cluster, sign):
        return Likely("write", ("shared_page_written", "req_to_token"))
    if goes_on_in_anothers(cluster) is not None:
        return Likely("write", ("shared_page_written", "fork_copy_missing", "page_given_twice"))
    return None


def _by_its_holder(cluster: Cluster, seen: Evidence) -> Likely | None:
    """Who held the slot, and who has lost it since."""
    sign = seen.sign
    if given_to_two(cluster, sign):
        return Likely("allocation", ("page_given_twice", "double_free", "free_too_early"))
    if seen.held is Held.GIVEN_ANEW and not cluster.complete and not cluster.facts.frees_of_nobody:
        return Likely("allocation", ("free_too_early", "page_given_twice", "eviction_of_locked_page"))
    if hit_what_it_was_given(cluster, sign) is not None:
        return Likely("allocation", ("stale_prefix_hit", "free_too_early", "radix_insert_then_free"))
    if held_before(cluster, sign) is not None and seen.filled is Filled.AS_CACHED:
        return Likely("allocation", ("stale_prefix_hit", "radix_insert_then_free"))
    if given_what_is_cached(cluster, sign):
        return Likely("allocation", ("radix_insert_then_free", "page_given_twice"))
    if window_gone_round(cluster, sign):
        return Likely("allocation", ("stale_prefix_hit", "shared_page_written"))
    if seen.held is Held.JOINED_GONE and filled_while_read(cluster, sign):
        return Likely("content", ("hit_before_written", "stale_prefix_hit"))
    if seen.held is Held.GAVE_UP and cluster.window(sign) and not seen.retracted and lower_edge(cluster, sign):
        return Likely("allocation", ("swa_window_off_by_one", "free_too_early"))
    if seen.held in _ALLOCATION and sign.kind != "attention_slots":
        if seen.retracted and seen.enough and seen.held in (Held.GAVE_UP, Held.FREED):
            return Likely("table", ("req_to_token", "scheduled_after_retraction"))
        return Likely("allocation", _ALLOCATION[seen.held])
    if "slot_written_twice" in _kinds(cluster) and cluster.window(sign) and not _content(cluster):  # a ring's slot
        return Likely("write", ("slot_mapping", "kv_write_damaged", "kv_write_lost"))
    if "slot_written_twice" in _kinds(cluster) and seen.held is Held.OWN and not _content(cluster) and not seen.off_row:
        return Likely("allocation", ("page_given_twice", "slot_mapping"))
    return None


def _by_its_row(cluster: Cluster, seen: Evidence) -> Likely | None:
    """What the request's row names, what attention got instead, and where the request wrote the position itself."""
    sign, kinds, content = seen.sign, _kinds(cluster), _content(cluster)
    moved = row_moved(cluster, sign)
    looked = cluster.finding("attention_slots")
    if looked is not None and (cluster.in_ring(looked) or in_windows_alone(cluster, looked)):
        return Likely("read", ("window_read_wrong", "attention_table_overwritten"))
    if looked is not None and not (moved and of_another(cluster, sign)):
        now = went_elsewhere(cluster, looked) or bool(kinds & {"write_to_foreign_slot", "table_entry_differs"})
        first, second = ("slot_mapping", "attention_table_overwritten")[:: 1 if now else -1]
        return Likely("write" if now else "read", (first, second))
    if not content and sign.bits == KV_HASH:
        return _of_bytes(cluster, seen)
    if sign.kind == "write_to_foreign_slot" and seen.held is Held.JOINED and seen.filled is not Filled.NOBODY:
        return Likely("write", ("shared_page_written", "hit_before_written"))
    if sign.kind == "write_to_foreign_slot" and goes_on_inside(cluster, sign):
        return Likely("write", ("shared_page_written", "fork_copy_missing", "page_given_twice"))
    loaded = seen.filled is Filled.LOAD and not cluster.complete  # a load is for whoever reads it
    if seen.held is Held.NEVER and not loaded:
        return _never_given(cluster, seen)
    if kept_nowhere(cluster, sign):
        return Likely("write", ("slot_mapping", "kv_write_lost"))
    if over_its_window(cluster, sign):
        return Likely("write", ("slot_mapping", "window_read_wrong"))
    if cluster.window(sign) and seen.filled in (Filled.ITSELF, Filled.ITSELF_ELSEWHERE):
        return Likely("read", ("window_read_wrong", "attention_seq_len_wrong", "slot_mapping"))
    if seen.filled is Filled.AS_CACHED and seen.rewritten and seen.positions:
        return Likely("table", ("req_to_token", "tokens_truncated_hash_kept"))
    own = cluster.wrote(sign)
    if seen.filled is Filled.AS_CACHED and moved and own is not None and cluster.joined(sign, own[0]):
        # What it had computed was given back for what the cache holds under the same key: its row names what it joined.
        return Likely("identity", ("tokens_truncated_hash_kept", "req_to_token"))
    if seen.filled is Filled.NOBODY and row_replaced(cluster, sign):
        return Likely("content", ("prefix_not_computed", "req_to_token", "resume_overwrites_tail"))
    if seen.filled is Filled.LOAD and behind_its_end(cluster, sign):
        return Likely("content", ("prefix_not_computed", "position_off"))
    if seen.elsewhere and moved and seen.filled is not Filled.LOAD:
        return Likely("table", ("resume_overwrites_tail", "req_to_token", "slot_mapping"))
    if seen.elsewhere and not seen.retracted and seen.filled is not Filled.LOAD:
        return Likely("write", ("slot_mapping", "req_to_token"))
    return None


def _by_what_filled_it(seen: Evidence) -> Likely:
    """What filled the slot since it was given to whoever uses it."""
    if seen.held is Held.JOINED and seen.filled is Filled.OTHER:
        return Likely("allocation", ("page_given_twice", "shared_page_written", "free_too_early"))
    if seen.sign.kind == "hit_never_written" and seen.filled is Filled.ITSELF:  # another is writing it now
        return Likely("write", ("shared_page_written", "page_given_twice", "slot_mapping"))
    if seen.held is Held.JOINED and seen.filled is Filled.NOBODY:
        return Likely("content", ("hit_before_written", "prefix_not_computed", "stale_prefix_hit"))
    if seen.filled is Filled.ITSELF:
        return Likely("input", _POSITIONS if seen.positions else ("async_resume_wrong_input", "future_map_overrun"))
    return _CONTENT.get(seen.filled, Likely(seen.sign.branch))


def _of_the_swa_table(cluster: Cluster, seen: Evidence) -> Likely:
    """The branch of an entry of the full-to-SWA table that is stale, or leads nowhere any more."""
    if not any(s.cause == "swa_slot_missing" for s in cluster.head):
        return Likely("table", ("stale_swa_mapping",))
    lost = {
        Held.EVICTED: ("eviction_of_locked_page", "swa_window_off_by_one", "double_free"),
        Held.GAVE_UP: ("swa_window_off_by_one", "free_too_early"),
    }
    by_others = ("free_too_early", "radix_insert_then_free") if taken_from_behind(cluster, seen.sign) else ()
    return Likely("allocation", lost.get(seen.held, (*by_others, "swa_window_off_by_one")))


def _never_given(cluster: Cluster, seen: Evidence) -> Likely:
    """The branch of a slot that its user was never given."""
    sign = seen.sign
    found = seen.same_place and not seen.enough and seen.rewritten
    if found or page_of_elsewhere(cluster, sign):
        return Likely("identity", ("tokens_truncated_hash_kept", "req_to_token"))
    given = cluster.last(sign, "alloc")
    since = given.event if given is not None else -1
    through = {fact.via for fact in cluster.history(sign) if fact.what == "written" and fact.event >= since}
    foreign = cluster.finding("write_to_foreign_slot")
    if cluster.is_sliding(sign) and foreign is not None and len(through) <= 1:
        return Likely("allocation", ("commit_beyond_allocation", "page_given_twice", "free_too_early"))
    if cluster.is_sliding(sign):
        return Likely("table", ("stale_swa_mapping",))
    if lost_all(cluster, sign):
        return Likely("table", ("req_to_token", "row_reassigned_in_flight"))
    if cluster.window(sign) and sign.writer_event < 0:
        return Likely("allocation", ("swa_window_off_by_one", "free_too_early"))
    if sign.kind == "write_to_foreign_slot" and not seen.off_row and given_at_once(cluster, sign):
        return Likely("allocation", ("page_given_twice", "slot_mapping", "req_to_token"))
    if seen.enough or seen.rewritten or not cluster.complete:
        return Likely("table", ("req_to_token", "slot_mapping", "row_reassigned_in_flight"))
    return Likely("allocation", ("commit_beyond_allocation", "slot_mapping", "page_given_twice"))


def _of_bytes(cluster: Cluster, seen: Evidence) -> Likely:
    """The branch of bytes that are not what the last write of the record left, and of nothing else."""
    sign = seen.sign
    by = cluster.filled(sign)
    landed = by is not None and by.event in cluster.facts.landed  # as was seen: it has changed since
    if seen.filled in (Filled.COPY, Filled.LOAD) and not landed:
        return _CONTENT[seen.filled]
    if seen.filled is Filled.LOAD and came_with_its_load(cluster, sign):
        return Likely("transfer", ("stored_wrong", "load_of_other_prefix", "failed_load_counted_loaded"))
    if open_transfer(cluster, sign) is not None:
        return Likely("transfer", ("abort_frees_during_transfer", "load_landed_elsewhere"))
    if (change := cluster.last(sign, "changed")) is not None and change.behind >= 0:
        return Likely("", ("transfer_wrong_stride", "kv_changed"))  # what a load ran over is behind what it filled
    foreign = cluster.finding("write_to_foreign_slot")
    if foreign is not None and cluster.enough(foreign) and cluster.gave_up(foreign):
        return Likely("table", ("req_to_token", "slot_mapping"))
    if cluster.finding("write_lost", "bad_values") is not None:
        return Likely("write", ("slot_mapping", "kv_write_lost", "kv_write_damaged"))
    came = by.event if by is not None and seen.filled in (Filled.COPY, Filled.LOAD) else sign.writer_event
    since = [fact for fact in cluster.history(sign) if fact.event > came]
    wrote = [fact.request_id for fact in since if fact.what == "written"]
    if not wrote:
        return Likely("write", _BYTES)
    if wrote[-1] == sign.request_id and seen.held is Held.OWN and not any(fact.what == "alloc" for fact in since):
        if foreign is not None and cluster.complete and not cluster.enough(foreign):  # it was lent its own once more
            return Likely("allocation", ("page_given_twice", "eviction_of_locked_page", "free_too_early"))
        return Likely("table", ("req_to_token", "slot_mapping", "page_given_twice"))
    if foreign is not None and not cluster.was_given(foreign):
        if put_back(cluster, foreign):
            return Likely("allocation", ("scheduled_after_retraction",))
        if cluster.enough(foreign):
            return Likely("table", ("req_to_token", "slot_mapping"))
        return Likely("allocation", ("commit_beyond_allocation", "slot_mapping", "page_given_twice"))
    return Likely("allocation", ("page_given_twice", "free_too_early", "double_free", "eviction_of_locked_page"))


def judged_again(kind: str, branch: str, of: Diagnosis, cluster: Cluster, likely: Likely) -> Diagnosis:
    """Return a rule's diagnosis, behind what the evidence leaves if that is another branch, or other kinds alone."""
    other = likely.branch not in ("", branch) or (likely.kinds and kind not in likely.kinds)
    if of.score < EXCLUDED or not cluster.has_trace or not other:
        return of
    return replace(of, score=EXCLUDED)


def left_open(
    found: Sequence[tuple[str, Diagnosis]], cluster: Cluster, seen: Evidence, likely: Likely
) -> list[tuple[str, Diagnosis]]:
    """Return the kinds that the evidence leaves beside those that rules have found, where none of these is certain.

    If no rule knows the mistake at all, the likeliest of them is said, and that it is no more than that.
    """
    best = max((diagnosis.score for _, diagnosis in found), default=0.0)
    if best >= CERTAIN or not cluster.has_trace:
        return []
    scores = [ONLY_LIKELY if best < KNOWN else REMAINS, REMAINS, REMAINS]
    return [(kind, known_of(cluster, seen, score)) for kind, score in zip(likely.kinds, scores, strict=False)]


def known_of(cluster: Cluster, seen: Evidence, score: float) -> Diagnosis:
    """Return a diagnosis that says what differs, and what is known of the slot, and no more."""
    said = cluster.first.differs
    if seen.held.value and seen.sign.slot > 0:
        # What was not promised, or went with older facts, may have been and is not recorded.
        all_known = cluster.complete and len(cluster.history(seen.sign)) < FACTS_A_SLOT
        unseen = seen.held is Held.NEVER and not all_known
        held = "no recorded event gave it to the request" if unseen else f"it {seen.held.value}"
        filled = f", and {seen.filled.value}" if seen.filled.value else ""
        said += f"; of slot {seen.sign.slot} is known that {held}{filled}"
    return cluster.diagnosis(score, said, seen.sign, seen.sign.event)
