"""What a KV connector that is not known has loaded, by the bytes that lie in the slots then.

Nothing is known of its keys and its storage. But each block that a forward fills is hashed, over all layers, under the tokens
that it was computed for. If the same bytes lie in a block that was loaded for these tokens, the load is known as far as that
forward was. If bytes lie there that were computed for other tokens, or that lay there before, it is known, too, what its
request reads. Any other bytes, of another engine for example, stay unknown.

The engine's thread says which blocks are to be looked at; what comes of it is for the turn in which all is recorded, which on a
device is the recorder's thread's.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from .....kernels.arrays import Int64Array
from .....kernels.constants import UNKNOWN_TOKEN
from ....trace.header import NotWatched
from ...common.copy_bounds import LATE_STEPS, MAX_SEEN_BYTES
from ...common.end_looks import Look
from ...common.hooking import Finish
from ..device import DeviceStep
from ..layout import VllmGroup, VllmLayout
from ..step import Step, VllmRequest
from .copies import MAX_ENDED, ConnectorCopies, ExternalSlots
from .ends import Bytes, Page, as_bytes, byte_rows

MAX_BLOCKS: Final = 1024  # that were loaded, and are looked at again
MAX_REQUESTS: Final = 8192  # of which it is known how far their blocks have been looked at
Place = tuple[int, int]  # a group's index, and a block


class Told(NamedTuple):
    """A request's tokens `[n] int64` as they are now, and what its KV depends on beside them."""

    name: str
    tokens: Int64Array
    depends: tuple[Any, ...]

    def blocks(self, size: int) -> list[tuple[bytes, bytes]]:
        """Return, for each full block, the key of all tokens up to its end and its own; up to an unknown one."""
        found, upto = [], hashlib.blake2b(digest_size=16)
        for start in range(0, self.tokens.size - size + 1, size):
            mine = self.tokens[start : start + size]
            if (mine == UNKNOWN_TOKEN).any():
                break
            upto.update(repr([value for value in self.depends if value.start < start + size]).encode())
            upto.update(own := mine.tobytes())
            found.append((upto.digest(), own))
        return found


class Filled(NamedTuple):
    """Blocks of a request that a step fills, or that have been filled since it was looked at last: those from `first` on."""

    of: Told
    group: VllmGroup
    first: int
    blocks: list[int]


class Ended(NamedTuple):
    """A load for a request that has ended, and how much the request reads as its prefix."""

    of: Told
    load: ExternalSlots
    prefix: int


class Seen(NamedTuple):
    """What lies in blocks at one moment, by their places; 0 if it was not read."""

    pages: list[Page]
    look: Look

    def hashes(self) -> dict[Place, int]:
        """Return it."""
        places = [(page.group.index, page.block) for page in self.pages]
        return dict(zip(places, self.look.read().tolist(), strict=True))


@dataclass(slots=True, kw_only=True)
class Landing:
    """A block that was loaded for a request; hashes of what lay in it, 0 if that is not known."""

    name: str
    page: Page  # its key: of the tokens up to its end
    own: bytes  # its own tokens
    before: int  # when it was allocated
    here: int  # when it was looked at last
    is_known: bool = False  # here lies what was computed for these tokens
    was_read: bool = False  # by a forward of its request
    is_missing: bool = False  # it was recorded that nothing has landed
    left: int = LATE_STEPS

    @property
    def place(self) -> Place:
        """Where it lies."""
        return self.page.group.index, self.page.block


class LandedBlocks:
    """The storage of connectors that are not known; `connector` is the one that vLLM's runner calls."""

    def __init__(self, connector: Any, layers: Any, layout: VllmLayout) -> None:
        self.num_pages = 0
        self._connector = connector
        self._layers = layers
        self._groups = layout.groups
        # The engine's thread: loads that have ended and whose requests have not run; the blocks that are looked at again, with
        # their requests; how many tokens of each request lie in blocks that have been looked at; what the step fills.
        self._ended: dict[str, list[ExternalSlots]] = {}
        self._again: dict[tuple[Place, str], Page] = {}
        self._full: dict[str, int] = {}
        self._names: tuple[str, ...] = ()
        self._filled: list[Filled] = []
        self._over: deque[tuple[Place, str]] = deque()  # from the other thread: need not be looked at again
        # In turn: what lay in a block when it was allocated, by request; what was loaded; blocks that are said to have failed,
        # until they are allocated anew; the key of the tokens that a forward has filled a block for, "" if it has not filled it.
        self._before: dict[str, dict[Place, int]] = {}
        self._landings: list[Landing] = []
        self._failed: set[int] = set()
        self._written: dict[Place, Any] = {}
        # What has been computed: hash -> key, own tokens; key -> hash. Of each group.
        self._computed: list[OrderedDict[int, tuple[Any, bytes]]] = [OrderedDict() for _ in layout.groups]
        self._hashes: list[OrderedDict[Any, int]] = [OrderedDict() for _ in layout.groups]

    def attach(self, copies: ConnectorCopies) -> None:
        """Hook where a forward is over, and where the connector says what it has not loaded."""
        self._copies = copies

        def on_saved(*_args: Any, **_kwargs: Any) -> None:
            self._after_model()

        def on_failed(*_args: Any, **_kwargs: Any) -> Finish:
            def finish(blocks: Any, _: BaseException | None) -> None:
                if blocks:
                    copies.in_turn(self._failed.update, frozenset(blocks))

            return finish

        copies.wrap(self._connector, "wait_for_save", on_saved)
        copies.wrap(self._connector, "get_block_ids_with_load_errors", on_failed)

    def layers_here(self, group: VllmGroup) -> Sequence[Any]:
        """Return the group's layers, if blocks are their first dimension and all lie in the host's memory."""
        found = [as_bytes(kv) if hasattr(kv, "device") else None for kv in self._caches(group)]
        return () if any(bits is None or bits.shape[0] != group.num_blocks for bits in found) else found

    def rows_here(self, group: VllmGroup) -> Sequence[Any]:
        """As `RowStorage` says: nothing if a block's bytes do not lie side by side, in one piece or K and V in one each."""
        found = [byte_rows(kv, group.num_blocks) if hasattr(kv, "device") else () for kv in self._caches(group)]
        return [row for rows in found for row in rows] if all(found) else ()

    def _caches(self, group: VllmGroup) -> list[Any]:
        caches = [getattr(self._layers.get(name), "kv_cache", None) for name in group.layers]
        return [kv[0] if isinstance(kv, list | tuple) and len(kv) == 1 else kv for kv in caches]

    def there(self, _: Page) -> Sequence[Bytes] | None:
        """Return nothing: what lies elsewhere is not known."""
        return None

    # On the engine's thread.

    def allocated(self, name: str, load: ExternalSlots) -> None:
        """Take note of slots that are to be loaded for a request, before they are."""
        group = self._groups[load.group]
        pages = [Page(group, block, None) for block in sorted({*(load.slots // group.block_size).tolist()})]
        # What is the prefix cache's may well be left as it is.
        self._copies.in_turn(self._allocated, name, pages, self._look_at(pages if load.own else []))

    def ended(self, name: str, load: ExternalSlots) -> None:
        """Take note of slots that have been loaded for a request; they are looked at when it runs next."""
        self._ended.setdefault(name, []).append(load)
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def forget(self, name: str) -> None:
        """Forget the loads for a request that has given its slots back."""
        self._ended.pop(name, None)
        self._full.pop(name, None)
        self._again = {key: page for key, page in self._again.items() if key[1] != name}
        self._copies.in_turn(self._forget, name)

    def before_model(self, step: Step, requests: Sequence[VllmRequest]) -> None:
        """Look at what has been loaded for a step's requests, and take note of the blocks that the step fills."""
        tables = {
            group.index: table
            for (table, size), group in zip(step.tables, self._groups, strict=True)
            if size == group.block_size
        }
        written = [
            (group.index, block)
            for slots, group in zip(step.written, self._groups, strict=True)
            for block in {*(slots // group.block_size).tolist()}
        ]

        def blocks(group: VllmGroup, r: int, first: int, last: int) -> list[int]:
            return tables[group.index][r, first:last].tolist() if group.index in tables else []

        self._before_model(step, requests, blocks, written)

    def before_device(self, step: DeviceStep, requests: Sequence[VllmRequest]) -> None:
        """As `before_model`, of a step that the device captures: by the blocks that the scheduler says its requests have."""

        def blocks(group: VllmGroup, r: int, first: int, last: int) -> list[int]:
            return requests[r].blocks[group.gid][first:last] if requests[r].blocks else []

        written = [
            (group.index, block)
            for group in self._groups
            for r, (prefix, extend) in enumerate(zip(step.prefix.tolist(), step.extend.tolist(), strict=True))
            for block in blocks(group, r, prefix // group.block_size, -(-(prefix + extend) // group.block_size))
        ]
        self._before_model(step, requests, blocks, written)

    def _before_model(
        self,
        step: Step | DeviceStep,
        requests: Sequence[VllmRequest],
        blocks: Callable[[VllmGroup, int, int, int], list[int]],
        written: list[Place],
    ) -> None:
        while self._over:
            self._again.pop(self._over.popleft(), None)
        self._names, self._filled = step.names, []
        ended, partly = list[Ended](), {*written}
        for r, known in enumerate(requests):
            prefix, extend = int(step.prefix[r]), int(step.extend[r])
            for g in self._groups:
                full = blocks(g, r, prefix // g.block_size, (prefix + extend) // g.block_size)
                partly.difference_update((g.index, block) for block in full)
            loads = self._ended.pop(known.name, ())
            # What fills without a word in between is looked at the next time.
            begin = prefix if known.fresh else self._full.get(known.name, prefix)
            end = self._full[known.name] = max(begin, min(prefix + extend, len(known.tokens)))
            fills = [g for g in self._groups if begin // g.block_size < end // g.block_size]
            if not (loads or fills):
                continue
            depends = tuple(value for value in known.identity if value.kind != "salt")
            told = Told(known.name, known.tokens.all(), depends)
            ended += [Ended(told, load, prefix) for load in loads]
            for group in fills:
                first = begin // group.block_size
                self._filled.append(Filled(told, group, first, blocks(group, r, first, end // group.block_size)))
        if len(self._full) > MAX_REQUESTS:
            del self._full[next(iter(self._full))]
        gone = {*written}
        self._again = {key: page for key, page in self._again.items() if key[0] not in gone}
        for of, load, _ in ended:
            group = self._groups[load.group]
            for block in {*(load.slots // group.block_size).tolist()}:
                self._again[(group.index, block), of.name] = Page(group, block, None)
        while len(self._again) > MAX_BLOCKS:
            del self._again[next(iter(self._again))]
        seen = self._look_at([*self._again.values()])
        self._copies.in_turn(self._before_forward, step.names, ended, self._filled, gone, partly, seen)

    def _after_model(self) -> None:
        pages = {place: page for (place, name), page in self._again.items() if name in self._names}
        pages |= {
            (f.group.index, block): Page(f.group, block, None) for f in self._filled for block in f.blocks if block
        }
        if pages:
            self._copies.in_turn(self._after_forward, self._names, self._filled, self._look_at([*pages.values()]))
        self._names, self._filled = (), []

    def _look_at(self, pages: list[Page]) -> Seen:
        return Seen(pages, self._copies.look(pages))

    # In turn.

    def _allocated(self, name: str, pages: list[Page], seen: Seen) -> None:
        lay = seen.hashes()
        for page in pages:
            place = page.group.index, page.block
            if any(place in others for others in self._before.values()):
                self._written.pop(place, None)  # what a load that nobody waited for has brought was not looked at
            self._before.setdefault(name, {})[place] = lay.get(place, 0)
            self._failed.discard(page.block)
        if len(self._before) > MAX_ENDED:  # of requests that have gone without having run
            del self._before[next(iter(self._before))]

    def _forget(self, name: str) -> None:
        self._before.pop(name, None)
        self._keep(one for one in self._landings if one.name != name)

    def _keep(self, landings: Iterable[Landing]) -> None:
        """Have these looked at again, and no others."""
        kept = [*landings][-MAX_BLOCKS:]
        ids = {id(one) for one in kept}
        self._over.extend((one.place, one.name) for one in self._landings if id(one) not in ids)
        self._landings = kept

    def _before_forward(
        self,
        names: Sequence[str],
        ended: list[Ended],
        filled: list[Filled],
        written: set[Place],
        partly: set[Place],
        seen: Seen,
    ) -> None:
        lay = seen.hashes()
        self._judge(lay)
        for one in ended:
            self._landed(one, lay)
        for name in names:
            self._before.pop(name, None)
        self._keep(one for one in self._landings if one.place not in written)
        for place in written - partly:  # full; for which tokens may not be known yet
            self._written.pop(place, None)
        self._written |= dict.fromkeys(partly, "")
        for f in filled:
            for block, (key, _) in zip(f.blocks, f.of.blocks(f.group.block_size)[f.first :], strict=False):
                if block:
                    self._written[f.group.index, block] = key

    def _landed(self, one: Ended, lay: dict[Place, int]) -> None:
        """Record which of the blocks that were loaded, and are read as the prefix, hold what was computed for the same tokens."""
        (told, load, prefix), found = one, list[Landing]()
        group, size = self._groups[load.group], self._groups[load.group].block_size
        keys = told.blocks(size)
        end = min(load.start + load.slots.size, prefix)  # what lies behind a load that failed is computed instead
        for place in range(-(-load.start // size), min(end // size, len(keys))):
            block = int(load.slots[place * size - load.start]) // size
            before = self._before.get(told.name, {}).get((group.index, block), 0)
            key, own = keys[place]
            found.append(Landing(name=told.name, page=Page(group, block, key), own=own, before=before, here=0))
        self._look_again(found, lay)
        self._record("load-back", [one for one in found if one.is_known])
        # What lay there before may not have been loaded yet, and nothing can be said of what comes behind it.
        kept = [one for one in found if one.here and not (one.is_known and one.before in (0, one.here))]
        # All layers have changed to what was computed for other tokens: nothing is to come.
        for one in [one for one in kept if not one.is_known and one.before not in (0, one.here)]:
            if self._is_of_others(one):
                self._record_other(one)
                kept.remove(one)
        again = {id(one) for one in kept}
        self._over.extend((one.place, one.name) for one in found if id(one) not in again)
        self._keep([*self._landings, *kept])

    def _is_of_others(self, one: Landing) -> bool:
        """Say whether what lies in a block was computed for other tokens, by more layers than the first, which may not tell them apart."""
        group = one.page.group
        _, own = self._computed[group.index].get(one.here, (None, one.own))
        return bool(own != one.own and len(group.layers) > 1)

    def _record_other(self, one: Landing) -> None:
        key, _ = self._computed[one.page.group.index][one.here]
        self._record("load-back", [one], there=one.here, key=key)

    def _look_again(self, landings: Sequence[Landing], lay: dict[Place, int]) -> None:
        for one in landings:
            here = lay.get(one.place, 0)
            if here != one.before:
                self._written.pop(one.place, None)
            one.here = here
            one.is_known = bool(here and self._copies.has(one.page._replace(key=(here, one.page.key))))

    def _is_wrong(self, one: Landing, right: int) -> bool:
        """Say whether a block's bytes cannot be what was to be loaded, of which `right` is the hash of one version.

        They are that in another order; or they are what lay there before, and were written for other tokens or never.
        """
        if one.here == right:  # its page of the host tier has gone to another key
            return False
        if (one.here ^ right) & 0xFFFFFFFF == 0:  # see `end_hashes`
            return True
        if one.before != one.here:
            return False
        written_for = self._written.get(one.place, one.page.key)
        return bool(written_for != one.page.key or one.here == self._copies.hash_of_zeros(one.page.group))

    def _record(self, note: str, landings: Sequence[Landing], *, there: int = 0, key: Any = None) -> None:
        """Record loads from the pages that hold what lies in the blocks now; or from that of `key`, if `there` lies there."""
        pages = [one.page._replace(key=(there or one.here, key or one.page.key)) for one in landings]
        for of_one in dict.fromkeys(one.name for one in landings):
            mine = [i for i, one in enumerate(landings) if one.name == of_one]
            self._copies.load_seen(
                note,
                of_one,
                [pages[i] for i in mine],
                [there or landings[i].here for i in mine],
                [landings[i].here for i in mine],
                [landings[i].before for i in mine],
            )

    def _after_forward(self, names: Sequence[str], filled: list[Filled], seen: Seen) -> None:
        """Look again at what the forward's requests have read, and take note of the blocks that it has filled."""
        now = seen.hashes()
        read = [one for one in self._landings if not one.was_read and one.name in names]
        lay = [(one.is_known, one.here) for one in read]
        self._look_again(read, now)
        for one, (was_known, before) in zip(read, lay, strict=True):
            one.was_read = True
            if was_known and one.here and one.here != before:
                self._record("changed", [one], there=before)
        # A connector that loads layer by layer may have been at it.
        self._record(
            "load-back", [one for one, (known, _) in zip(read, lay, strict=True) if one.is_known and not known]
        )
        over = {id(one) for one, (known, _) in zip(read, lay, strict=True) if known or one.is_known or not one.here}
        self._keep(one for one in self._landings if id(one) not in over)
        new: dict[Page, int] = {}
        for f in filled:
            for block, (key, own) in zip(f.blocks, f.of.blocks(f.group.block_size)[f.first :], strict=False):
                here = now.get((f.group.index, block), 0)
                page = Page(f.group, block, (here, key))
                if here and not self._copies.has(page):
                    new[page] = here
                    self._computes(f.group, key, own, here)
        self._copies.store_seen([*new], [*new.values()])

    def _computes(self, group: VllmGroup, key: bytes, own: bytes, here: int) -> None:
        computed, hashes = self._computed[group.index], self._hashes[group.index]
        computed[here], hashes[key] = (key, own), here
        for kept in (computed, hashes):
            if len(kept) > 8 * group.num_blocks:
                kept.popitem(last=False)

    def _judge(self, lay: dict[Place, int]) -> None:
        """Record what requests have read that was computed for other tokens, and what was loaded only after that."""
        read = [one for one in self._landings if one.was_read and one.page.block not in self._failed]
        lay_before = [one.here for one in read]
        self._look_again(read, lay)
        over = {id(one) for one in self._landings if one.page.block in self._failed}
        for one, before in zip(read, lay_before, strict=True):
            group = one.page.group
            if group.window:  # what it holds outside of it need not be loaded
                over.add(id(one))
            elif one.here == before and one.left == LATE_STEPS:
                right = self._hashes[group.index].get(one.page.key, 0)
                if right and self._is_wrong(one, right):
                    one.is_missing = True
                    self._record("not loaded", [one], there=right)
                elif self._is_of_others(one):
                    self._record_other(one)
            elif one.here != before and one.is_known:
                late, one.here = one.here, before
                if not one.is_missing:
                    self._record("not loaded", [one], there=late)
                one.here = late
                self._record("landed late", [one])
            one.left -= 1
            if one.here != before or not one.here or not one.left:
                over.add(id(one))
        self._keep(one for one in self._landings if id(one) not in over)


def not_watched(name: str, *, loads: bool, on_gpu: bool) -> list[NotWatched]:
    """Return what a trace does not hold of a connector that is not known, or whose storage cannot be read."""
    looked = f", by up to {MAX_SEEN_BYTES} bytes of a block" if on_gpu else ""
    reason = f"what it loads is unknown until a forward writes the slot, unless this engine computed the same bytes for the same tokens{looked}"
    slots = [NotWatched(what="slots", name=name, reason=reason)] if loads else []
    return [*slots, NotWatched(what="other", name=name, reason="what it stores elsewhere is not compared")]
