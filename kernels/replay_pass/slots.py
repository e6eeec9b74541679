"""What ordinary allocs, frees, evictions and statuses do to the ledger, and which of them are ordinary."""

from ..dispatch import In64, In64x2, Out64x2, primitive
from ..ops.hash.reference import as_i64, as_u64, splitmix64
from .context import ADMITTED, ALLOC_EVENT, EVICT_EVENT, FRESH_ALLOC, SHARED_ALLOC, Event, GroupState, Settings
from .entries import invalidate_slot
from .ledger import ALLOC, CACHED, FREE, HELD, JOINER, LEFT, OWNER, SHARED, STAMP, STATE, is_free

# The table of numbers by request, `[2^n, columns] int64`: the request, whether there is one, and the numbers.
KEY, USED, VALUE = range(3)


@primitive(inlined=True)
def place_of(book: In64x2, request: int) -> int:
    """Return a request's place in a table of numbers by request: its own, or the free one that it would take."""
    mask = book.shape[0] - 1
    place = as_i64(splitmix64(as_u64(request)) & as_u64(mask))
    while book[place, USED] != 0 and book[place, KEY] != request:
        place = (place + 1) & mask
    return place


@primitive()
def add_to(book: Out64x2, request: int, amount: int) -> None:
    """Add to a request's number, which is never less than 0; there must be room for a request that is new."""
    if amount == 0:
        return
    place = place_of(book, request)
    if book[place, USED] == 0 and amount <= 0:
        return
    book[place, KEY] = request
    book[place, USED] = 1
    book[place, VALUE] = max(0, book[place, VALUE] + amount)


@primitive()
def value_of(book: In64x2, request: int) -> int:
    """Return a request's number, 0 where there is none."""
    place = place_of(book, request)
    return book[place, VALUE] if book[place, USED] != 0 else 0


@primitive(inlined=True)
def leaves(ledger: In64x2, slot: int, event: Event, settings: Settings) -> int:
    """Say whether a slot is given back by who may; 0 or 1."""
    if settings.allocations == 0:
        return 1
    state = ledger[slot, STATE]
    if is_free(ledger, slot, settings.from_start) == 1:
        return 0
    if settings.complete == 0:
        return 1
    if event.kind == EVICT_EVENT:
        return 0 if state in (HELD, SHARED) else 1
    if event.request >= 0 and (state == CACHED or (state == HELD and ledger[slot, OWNER] != event.request)):
        return 0
    return 1


@primitive()
def run_ordinary(group: GroupState, start: int, count: int, event: Event, settings: Settings, serial: int) -> int:
    """Say whether a run names slots that were not named before, and that may change hands so; 0 or 1."""
    ledger, moving = group.ledger, group.transfers
    limit, complete = ledger.shape[0], settings.complete
    # Runs of slot 0 or of none have no stamp to count them by: an event of more slots than there are is refused.
    if start < 1 or count < 1 or start > limit or count > limit - start:
        return 0
    for slot in range(start, start + count):
        if ledger[slot, STAMP] == serial:
            return 0
        ledger[slot, STAMP] = serial
        if event.kind == ALLOC_EVENT:
            if event.status == FRESH_ALLOC:
                if settings.allocations != 0 and ledger[slot, STATE] >= HELD:
                    return 0
                if complete != 0 and moving[slot] != 0:
                    return 0
            if event.status != FRESH_ALLOC and complete != 0 and is_free(ledger, slot, settings.from_start) == 1:
                return 0
        elif moving[slot] != 0 or leaves(ledger, slot, event, settings) == 0:
            return 0
    return 1


@primitive(inlined=True)
def move_slot(ledger: Out64x2, slot: int, event: Event, settings: Settings) -> int:
    """Move one slot on, as `SlotLedger.apply_slots` does, and say whether it leaves who held it alone; 0 or 1."""
    state = ledger[slot, STATE]
    left = 1 if state == HELD else 0
    if event.kind != ALLOC_EVENT:
        ledger[slot, STATE] = FREE
        ledger[slot, LEFT] = event.number
    elif event.status == FRESH_ALLOC:
        ledger[slot, STATE] = HELD if event.request >= 0 else CACHED
        ledger[slot, OWNER] = event.request
        ledger[slot, ALLOC] = event.number
        ledger[slot, JOINER] = -1
    elif event.status == SHARED_ALLOC:
        ledger[slot, JOINER] = event.request
        joins = state != CACHED
        if settings.complete != 0:
            joins = state == HELD and ledger[slot, OWNER] != event.request
        if joins:
            ledger[slot, STATE] = SHARED
        else:
            left = 0
    elif is_free(ledger, slot, settings.from_start) == 0:
        ledger[slot, STATE] = CACHED
        ledger[slot, OWNER] = -1
        ledger[slot, LEFT] = event.number
    return left


@primitive()
def take_run(group: GroupState, start: int, count: int, event: Event, settings: Settings, held: Out64x2) -> None:
    """Move a group's ledger on by a run of an ordinary alloc, free or eviction."""
    ledger, moving, states = group.ledger, group.transfers, group.states
    is_fresh = event.kind == ALLOC_EVENT and event.status == FRESH_ALLOC
    first = max(start, 1)
    loser = -1  # slots beside one another mostly leave the same hands: they are counted out together
    lost = 0
    for slot in range(first, start + count):
        owner = ledger[slot, OWNER]
        if move_slot(ledger, slot, event, settings) == 1:
            if owner != loser:
                add_to(held, loser, -lost)
                loser = owner
                lost = 0
            lost += 1
        if event.kind != ALLOC_EVENT or is_fresh:
            if moving[slot] != 0:  # else its page of memory need not be touched
                moving[slot] = 0
            if states.heads[slot] != 0:
                invalidate_slot(states, slot)
    add_to(held, loser, -lost)
    if is_fresh and event.request >= 0 and start + count > first:
        add_to(held, event.request, start + count - first)


@primitive()
def status_ordinary(event: Event, complete: int, held: In64x2, reported: In64) -> int:
    """Say whether a request comes or goes without leaving anything behind; 0 or 1."""
    if event.status < 0 or event.rows.shape[0] > 1:
        return 0
    for i in range(reported.shape[0]):
        if reported[i] == event.request:
            return 0
    return 0 if event.status != ADMITTED and complete != 0 and value_of(held, event.request) != 0 else 1


def fill_book_loops(keys: In64, values: In64x2, book: Out64x2) -> None:
    """Put numbers by request into an empty book, `values` `[n, columns - 2]`."""
    for i in range(keys.shape[0]):
        place = place_of(book, keys[i])
        book[place, KEY] = keys[i]
        book[place, USED] = 1
        for column in range(values.shape[1]):
            book[place, VALUE + column] = values[i, column]
