"""What came of the loads of connectors that are not known: in turn, by what lay in their blocks when they were looked at.

Here it is decided which of them hold what was computed for their tokens, what was computed for others, or what they held before.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from .....kernels.arrays import Int64Array
from .....kernels.constants import UNKNOWN_TOKEN
from ....capture.privacy import IdentityValue
from ...common.copy_bounds import LATE_STEPS
from ...common.end_looks import Look
from ...common.requests import TokenList
from ..layout import VllmGroup, VllmLayout
from .copies import MAX_ENDED, ConnectorCopies, ExternalSlots
from .ends import Page

MAX_BLOCKS: Final = 1024  # that were loaded, and are looked at again
MAX_KEPT: Final = 256  # requests whose blocks' keys are kept
MAX_PARTS_BYTES: Final = 16 << 20  # of what is known of the parts of blocks that were computed, of a group
Place = tuple[int, int]  # a group's index, and a block


class Told(NamedTuple):
    """A request's tokens `[n] int64` as they are now, the list that they are `of`, and what its KV depends on beside them."""

    name: str
    tokens: Int64Array
    of: TokenList
    depends: tuple[IdentityValue, ...]


class Keys:
    """Of a request's full blocks of `size` tokens, `found`: the key of all tokens up to the end of each, and a hash of its own."""

    def __init__(self, told: Told, size: int) -> None:
        self._of, self._depends, self._size = told.of, told.depends, size
        self._upto = hashlib.blake2b(digest_size=16)
        self.found: list[tuple[bytes, bytes]] = []

    def are_of(self, told: Told) -> bool:
        """Say whether these are the beginning of a request's as it is told now."""
        return self._of is told.of and self._depends == told.depends

    def go_on(self, tokens: Int64Array) -> None:
        """Add those of the blocks that are full now, up to one with an unknown token."""
        size = self._size
        for start in range(len(self.found) * size, tokens.size - size + 1, size):
            mine = tokens[start : start + size]
            if (mine == UNKNOWN_TOKEN).any():
                break
            self._upto.update(repr([value for value in self._depends if value.start < start + size]).encode())
            self._upto.update(own := mine.tobytes())
            self.found.append((self._upto.digest(), hashlib.blake2b(own, digest_size=8).digest()))


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


class Held(NamedTuple):
    """What lies in a block, by a hash, 0 if it was not read, and those of its `parts`, layers or their halves."""

    hash: int = 0
    parts: Int64Array = np.empty(0, np.int64)


_NOT_READ: Final = Held()


class Seen(NamedTuple):
    """Blocks that were looked at at one moment."""

    pages: list[Page]
    look: Look

    def bytes(self) -> dict[Place, Held]:
        """Return what lay in each place then."""
        places = [(page.group.index, page.block) for page in self.pages]
        found = map(Held, self.look.read().tolist(), self.look.parts())
        return dict(zip(places, found, strict=True))


@dataclass(slots=True, kw_only=True)
class Landing:
    """A block that was loaded for a request, and what lay in it."""

    name: str
    page: Page  # its key: of the tokens up to its end
    own: bytes  # a hash of its own tokens
    before: Held  # when it was allocated
    here: Held = _NOT_READ  # when it was looked at last
    is_known: bool = False  # here lies what was computed for these tokens
    was_read: bool = False  # by a forward of its request
    is_missing: bool = False  # it was recorded that nothing has landed
    left: int = LATE_STEPS

    @property
    def has_changed(self) -> bool:
        """Whether other bytes lie there than when it was allocated."""
        return self.before.hash not in (0, self.here.hash)

    @property
    def place(self) -> Place:
        """Where it lies."""
        return self.page.group.index, self.page.block


class Landings:
    """The blocks that were loaded; `over` are those, with their requests, that need not be looked at again."""

    def __init__(self, layout: VllmLayout) -> None:
        self._groups = layout.groups
        self._copies: ConnectorCopies
        self.over: deque[tuple[Place, str]] = deque()
        # What lay in a block when it was allocated, by request; what was loaded; blocks that are said to have failed, until they
        # are allocated anew; the key of the tokens that a forward has filled a block for, "" if it has not filled it.
        self._before: dict[str, dict[Place, Held]] = {}
        self._landings: list[Landing] = []
        self._failed: set[int] = set()
        self._written: dict[Place, Any] = {}
        self._keys: OrderedDict[tuple[str, int], Keys] = OrderedDict()  # by request and tokens of a block
        # What has been computed: hash -> key, hash of its own tokens; key -> hash; key -> what each part holds. Of each group.
        self._computed: list[OrderedDict[int, tuple[bytes, bytes]]] = [OrderedDict() for _ in layout.groups]
        self._hashes: list[OrderedDict[Any, int]] = [OrderedDict() for _ in layout.groups]
        self._parts: list[OrderedDict[Any, Int64Array]] = [OrderedDict() for _ in layout.groups]

    def attach(self, copies: ConnectorCopies) -> None:
        """Take over what records copies."""
        self._copies = copies

    def failed(self, blocks: frozenset[int]) -> None:
        """Take note of blocks of which the connector says that their load has failed."""
        self._failed |= blocks

    def allocated(self, name: str, pages: list[Page], seen: Seen) -> None:
        """Take note of blocks that are to be loaded for a request, before they are."""
        lay = seen.bytes()
        for page in pages:
            place = page.group.index, page.block
            if any(place in others for others in self._before.values()):
                self._written.pop(place, None)  # what a load that nobody waited for has brought was not looked at
            self._before.setdefault(name, {})[place] = lay.get(place, _NOT_READ)
            self._failed.discard(page.block)
        if len(self._before) > MAX_ENDED:  # of requests that have gone without having run
            del self._before[next(iter(self._before))]

    def forget(self, name: str) -> None:
        """Forget what was loaded for a request that has given its slots back."""
        self._before.pop(name, None)
        for place in [place for place in self._keys if place[0] == name]:
            del self._keys[place]
        self._keep(one for one in self._landings if one.name != name)

    def _keep(self, landings: Iterable[Landing]) -> None:
        """Have these looked at again, and no others."""
        kept = [*landings][-MAX_BLOCKS:]
        ids = {id(one) for one in kept}
        self.over.extend((one.place, one.name) for one in self._landings if id(one) not in ids)
        self._landings = kept

    def before_forward(
        self,
        names: Sequence[str],
        ended: list[Ended],
        filled: list[Filled],
        written: set[Place],
        partly: set[Place],
        seen: Seen,
    ) -> None:
        """Judge what has been loaded for a step's requests, `names`, and take note of the blocks that it writes, and which but `partly`."""
        lay = seen.bytes()
        self._judge(lay)
        for load in ended:
            self._landed(load, lay)
        for name in names:
            self._before.pop(name, None)
        self._keep(one for one in self._landings if one.place not in written)
        for place in written - partly:  # full; for which tokens may not be known yet
            self._written.pop(place, None)
        self._written |= dict.fromkeys(partly, "")
        for f in filled:
            for block, (key, _) in zip(f.blocks, self._keys_of(f.of, f.group.block_size)[f.first :], strict=False):
                if block:
                    self._written[f.group.index, block] = key

    def _landed(self, ended: Ended, lay: dict[Place, Held]) -> None:
        """Record which of the blocks that were loaded, and are read as the prefix, hold what was computed for the same tokens."""
        (told, load, prefix), found = ended, list[Landing]()
        group, size = self._groups[load.group], self._groups[load.group].block_size
        keys = self._keys_of(told, size)
        end = min(load.start + load.slots.size, prefix)  # what lies behind a load that failed is computed instead
        for place in range(-(-load.start // size), min(end // size, len(keys))):
            block = int(load.slots[place * size - load.start]) // size
            before = self._before.get(told.name, {}).get((group.index, block), _NOT_READ)
            key, own = keys[place]
            found.append(Landing(name=told.name, page=Page(group, block, key), own=own, before=before))
        self._look_again(found, lay)
        self._record("load-back", [one for one in found if one.is_known])
        # What lay there before may not have been loaded yet, and nothing can be said of what comes behind it.
        kept = [one for one in found if one.here.hash and not (one.is_known and not one.has_changed)]
        # All layers have changed to what was computed for other tokens: nothing is to come.
        for other in [one for one in kept if not one.is_known and one.has_changed and self._is_of_others(one)]:
            self._record_other(other)
            kept.remove(other)
        again = {id(one) for one in kept}
        self.over.extend((one.place, one.name) for one in found if id(one) not in again)
        self._keep([*self._landings, *kept])

    def _keys_of(self, told: Told, size: int) -> list[tuple[bytes, bytes]]:
        """Return the keys of a request's full blocks; those that were made before are not made anew."""
        kept = self._keys.pop((told.name, size), None)
        if kept is None or not kept.are_of(told):
            kept = Keys(told, size)
        kept.go_on(told.tokens)
        self._keys[told.name, size] = kept
        if len(self._keys) > MAX_KEPT:
            self._keys.popitem(last=False)
        return kept.found

    def _is_of_others(self, one: Landing) -> bool:
        """Say whether what lies in a block was computed for other tokens, by more layers than the first, which may not tell them apart."""
        group = one.page.group
        _, own = self._computed[group.index].get(one.here.hash, (b"", one.own))
        return bool(own != one.own and len(group.layers) > 1)

    def _record_other(self, one: Landing) -> None:
        key, _ = self._computed[one.page.group.index][one.here.hash]
        self._record("load-back", [one], there=one.here.hash, key=key)

    def _look_again(self, landings: Sequence[Landing], lay: dict[Place, Held]) -> None:
        for one in landings:
            one.here = lay.get(one.place, _NOT_READ)
            here = one.here.hash
            if here != one.before.hash:
                self._written.pop(one.place, None)
            one.is_known = bool(here and self._copies.has(one.page._replace(key=(here, one.page.key))))

    def _is_wrong(self, one: Landing, right: int) -> bool:
        """Say whether a block's bytes cannot be what was to be loaded, of which `right` is the hash of one version.

        They are that in another order; or they are what lay there before, and were written for other tokens or never.
        """
        here, lay = one.here, one.before
        if here.hash == right:  # its page of the host tier has gone to another key
            return False
        if (here.hash ^ right) & 0xFFFFFFFF == 0:  # see `end_hashes`
            return True
        if lay.hash != here.hash:
            return self._is_part(one)
        written_for = self._written.get(one.place, one.page.key)
        return bool(written_for != one.page.key or here.hash == self._copies.hash_of_zeros(one.page.group))

    def _is_part(self, one: Landing) -> bool:
        """Say whether some of a block's parts hold what was to be loaded, and all others what they held before."""
        lay, here = one.before.parts, one.here.parts
        right = self._parts[one.page.group.index].get(one.page.key, lay)
        if not lay.size == here.size == right.size:
            return False
        differ = right != lay
        came, stayed = here == right, here == lay
        return bool((differ & came).any() and (differ & stayed).any() and (came | stayed).all())

    def _record(self, note: str, landings: Sequence[Landing], *, there: int = 0, key: Any = None) -> None:
        """Record loads from the pages that hold what lies in the blocks now; or from that of `key`, if `there` lies there."""
        pages = [one.page._replace(key=(there or one.here.hash, key or one.page.key)) for one in landings]
        for of_one in dict.fromkeys(one.name for one in landings):
            mine = [i for i, one in enumerate(landings) if one.name == of_one]
            self._copies.load_seen(
                note,
                of_one,
                [pages[i] for i in mine],
                [there or landings[i].here.hash for i in mine],
                [landings[i].here.hash for i in mine],
                [landings[i].before.hash for i in mine],
            )

    def after_forward(self, names: Sequence[str], filled: list[Filled], seen: Seen) -> None:
        """Look again at what the forward's requests have read, and take note of the blocks that it has filled."""
        now = seen.bytes()
        read = [one for one in self._landings if not one.was_read and one.name in names]
        lay = [(one.is_known, one.here.hash) for one in read]
        self._look_again(read, now)
        for one, (was_known, before) in zip(read, lay, strict=True):
            one.was_read = True
            if was_known and one.here.hash not in (0, before):
                self._record("changed", [one], there=before)
        # A connector that loads layer by layer may have been at it.
        came = [one for one, (was_known, _) in zip(read, lay, strict=True) if one.is_known and not was_known]
        self._record("load-back", came)
        over = {id(o) for o, (known, _) in zip(read, lay, strict=True) if known or o.is_known or not o.here.hash}
        self._keep(one for one in self._landings if id(one) not in over)
        new: dict[Page, int] = {}
        for f in filled:
            for block, (key, own) in zip(f.blocks, self._keys_of(f.of, f.group.block_size)[f.first :], strict=False):
                here = now.get((f.group.index, block), _NOT_READ)
                page = Page(f.group, block, (here.hash, key))
                if here.hash and not self._copies.has(page):
                    new[page] = here.hash
                    self._computes(f.group, key, own, here)
        self._copies.store_seen([*new], [*new.values()])

    def _computes(self, group: VllmGroup, key: bytes, own: bytes, here: Held) -> None:
        computed, hashes, parts = self._computed[group.index], self._hashes[group.index], self._parts[group.index]
        computed[here.hash], hashes[key], parts[key] = (key, own), here.hash, here.parts
        for kept in (computed, hashes):
            if len(kept) > 8 * group.num_blocks:
                kept.popitem(last=False)
        if len(parts) * here.parts.nbytes > MAX_PARTS_BYTES:
            parts.popitem(last=False)

    def _judge(self, lay: dict[Place, Held]) -> None:
        """Record what requests have read that was computed for other tokens, and what was loaded only after that."""
        read = [one for one in self._landings if one.was_read and one.page.block not in self._failed]
        lay_before = [one.here for one in read]
        self._look_again(read, lay)
        over = {id(one) for one in self._landings if one.page.block in self._failed}
        for one, before in zip(read, lay_before, strict=True):
            group = one.page.group
            is_same = one.here.hash == before.hash
            if group.window:  # what it holds outside of it need not be loaded
                over.add(id(one))
            elif is_same and one.left == LATE_STEPS:
                right = self._hashes[group.index].get(one.page.key, 0)
                if right and self._is_wrong(one, right):
                    one.is_missing = True
                    self._record("not loaded", [one], there=right)
                elif self._is_of_others(one):
                    self._record_other(one)
            elif not is_same and one.is_known:
                late, one.here = one.here, before
                if not one.is_missing:
                    self._record("not loaded", [one], there=late.hash)
                one.here = late
                self._record("landed late", [one])
            one.left -= 1
            if not is_same or not one.here.hash or not one.left:
                over.add(id(one))
        self._keep(one for one in self._landings if id(one) not in over)
