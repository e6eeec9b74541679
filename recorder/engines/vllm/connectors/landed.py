"""What a KV connector that is not known has loaded, by the bytes that lie in the slots then.

Nothing is known of its keys and its storage. But each block that a forward fills is hashed, over all layers, under the tokens
that it was computed for. If the same bytes lie in a block that was loaded for these tokens, the load is known as far as that
forward was. If bytes lie there that were computed for other tokens, or that lay there before, it is known, too, what its
request reads. Any other bytes, of another engine for example, stay unknown. Only in the host's memory: on a device it would wait for the bytes.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .....kernels.constants import UNKNOWN_TOKEN
from .....kernels.ops.end_hash.reference import end_hashes
from ....trace.header import NotWatched
from ...common.copy_bounds import LATE_STEPS
from ...common.hooking import Finish
from ..layout import VllmGroup, VllmLayout
from ..step import Step, VllmRequest
from .copies import MAX_ENDED, ConnectorCopies, ExternalSlots
from .ends import Bytes, Page, as_bytes

MAX_BLOCKS: Final = 1024  # that were loaded, and are looked at again


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


def block_tokens(known: VllmRequest, size: int) -> list[tuple[bytes, bytes]]:
    """Return, for each full block of a request's tokens, the key of all up to its end and its own; up to an unknown one."""
    tokens, found = known.tokens.all(), []
    depends = [value for value in known.identity if value.kind != "salt"]
    upto = hashlib.blake2b(digest_size=16)
    for start in range(0, tokens.size - size + 1, size):
        mine = tokens[start : start + size]
        if (mine == UNKNOWN_TOKEN).any():
            break
        upto.update(repr([value for value in depends if value.start < start + size]).encode())
        upto.update(own := mine.tobytes())
        found.append((upto.digest(), own))
    return found


class LandedBlocks:
    """The storage of connectors that are not known; `connector` is the one that vLLM's runner calls."""

    def __init__(self, connector: Any, layers: Any, layout: VllmLayout) -> None:
        self.num_pages = 0
        self._connector = connector
        self._layers = layers
        self._groups = layout.groups
        self._before: dict[str, dict[tuple[int, int], int]] = {}  # request -> (group, block) -> what lay there
        self._ended: dict[str, list[ExternalSlots]] = {}
        self._landings: list[Landing] = []
        self._failed: set[int] = set()  # blocks, until they are allocated anew
        self._names: Sequence[str] = ()
        self._filled: list[tuple[Page, bytes]] = []  # by the step, with their own tokens
        # (group, block) -> key of the tokens that a forward has filled it for, "" if it has not filled it.
        self._written: dict[tuple[int, int], Any] = {}
        # What has been computed: hash -> key, own tokens; key -> hash. Of each group.
        self._computed: list[OrderedDict[int, tuple[Any, bytes]]] = [OrderedDict() for _ in layout.groups]
        self._hashes: list[OrderedDict[Any, int]] = [OrderedDict() for _ in layout.groups]

    def attach(self, copies: ConnectorCopies) -> None:
        """Hook where a forward is over, and where the connector says what it has not loaded."""
        self._copies = copies

        def on_saved(*_args: Any, **_kwargs: Any) -> None:
            self._after_forward()

        def on_failed(*_args: Any, **_kwargs: Any) -> Finish:
            def finish(blocks: Any, _: BaseException | None) -> None:
                self._failed.update(blocks or ())

            return finish

        copies.wrap(self._connector, "wait_for_save", on_saved)
        copies.wrap(self._connector, "get_block_ids_with_load_errors", on_failed)

    def layers_here(self, group: VllmGroup) -> Sequence[Any]:
        """Return the group's layers, if blocks are their first dimension and all lie in the host's memory."""
        found = []
        for name in group.layers:
            kv: Any = getattr(self._layers.get(name), "kv_cache", None)
            kv = kv[0] if isinstance(kv, list | tuple) and len(kv) == 1 else kv
            bits = as_bytes(kv) if hasattr(kv, "device") else None
            if bits is None or bits.shape[0] != group.num_blocks:
                return ()
            found.append(bits)
        return found

    def there(self, _: Page) -> Sequence[Bytes] | None:
        """Return nothing: what lies elsewhere is not known."""
        return None

    def allocated(self, name: str, load: ExternalSlots) -> None:
        """Take note of slots that are to be loaded for a request, before they are."""
        group = self._groups[load.group]
        pages = [Page(group, block, None) for block in sorted({*(load.slots // group.block_size).tolist()})]
        # What is the prefix cache's may well be left as it is.
        lay = self._copies.hash_here(pages).tolist() if load.own else [0] * len(pages)
        for page, found in zip(pages, lay, strict=True):
            place = group.index, page.block
            if any(place in others for others in self._before.values()):
                self._written.pop(place, None)  # what a load that nobody waited for has brought was not looked at
            self._before.setdefault(name, {})[place] = found
            self._failed.discard(page.block)
        if len(self._before) > MAX_ENDED:  # of requests that have gone without having run
            del self._before[next(iter(self._before))]

    def ended(self, name: str, load: ExternalSlots) -> None:
        """Take note of slots that have been loaded for a request; they are looked at when it runs next."""
        self._ended.setdefault(name, []).append(load)
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def forget(self, name: str) -> None:
        """Forget the loads for a request that has given its slots back."""
        self._before.pop(name, None)
        self._ended.pop(name, None)
        self._landings = [one for one in self._landings if one.name != name]

    def before_model(self, step: Step, requests: Sequence[VllmRequest]) -> None:
        """Look at what has been loaded for a step's requests, and take note of the blocks that the step fills."""
        self._judge()
        self._names, self._filled = step.names, []
        written = [set((slots // g.block_size).tolist()) for slots, g in zip(step.written, self._groups, strict=True)]
        for known, prefix in zip(requests, step.prefix.tolist(), strict=True):
            for load in self._ended.pop(known.name, ()):
                self._look(known, load, prefix)
            self._before.pop(known.name, None)
        kept = [one for one in self._landings if one.page.block not in written[one.page.group.index]]
        self._landings = kept[-MAX_BLOCKS:]
        self._written |= {(group, block): "" for group, blocks in enumerate(written) for block in blocks}
        for (table, size), group in zip(step.tables, self._groups, strict=True):
            for r, known in enumerate(requests):
                first, last = (int(n) // size for n in (step.prefix[r], step.prefix[r] + step.extend[r]))
                tokens = block_tokens(known, size) if first < last and size == group.block_size else []
                for place in range(first, last if size == group.block_size else first):
                    block = int(table[r, place])
                    self._written.pop((group.index, block), None)  # full; for which tokens may not be known yet
                    if block and place < len(tokens):
                        key, own = tokens[place]
                        self._filled.append((Page(group, block, key), own))
                        self._written[group.index, block] = key

    def _look(self, known: VllmRequest, load: ExternalSlots, prefix: int) -> None:
        """Record which of the blocks that were loaded, and are read as the prefix, hold what was computed for the same tokens."""
        group, size = self._groups[load.group], self._groups[load.group].block_size
        tokens, found = block_tokens(known, size), list[Landing]()
        end = min(load.start + load.slots.size, prefix)  # what lies behind a load that failed is computed instead
        for place in range(-(-load.start // size), min(end // size, len(tokens))):
            block = int(load.slots[place * size - load.start]) // size
            before = self._before.get(known.name, {}).get((group.index, block), 0)
            key, own = tokens[place]
            found.append(Landing(name=known.name, page=Page(group, block, key), own=own, before=before, here=0))
        self._look_again(found)
        right = [one for one in found if one.is_known]
        self._record("load-back", right)
        # What lay there before may not have been loaded yet, and nothing can be said of what comes behind it.
        self._landings += [one for one in found if one.here and not (one.is_known and one.before in (0, one.here))]

    def _look_again(self, landings: Sequence[Landing]) -> None:
        hashes = self._copies.hash_here([one.page for one in landings]).tolist()
        for one, here in zip(landings, hashes, strict=True):
            if here != one.before:
                self._written.pop((one.page.group.index, one.page.block), None)
            one.here = here
            one.is_known = bool(here and self._copies.has(one.page._replace(key=(here, one.page.key))))

    def _is_wrong(self, one: Landing, right: int) -> bool:
        """Say whether a block's bytes cannot be what was to be loaded, of which `right` is the hash of one version.

        They are that in another order; or they are what lay there before, and were written for other tokens or never.
        """
        if one.here == right:  # its page of the host tier has gone to another key
            return False
        group = one.page.group
        if (one.here ^ right) & 0xFFFFFFFF == 0:  # see `end_hashes`
            return True
        if one.before != one.here:
            return False
        never = end_hashes([np.zeros((1, layer[0].nbytes), np.uint8) for layer in self.layers_here(group)])[0]
        written_for = self._written.get((group.index, one.page.block), one.page.key)
        return bool(written_for != one.page.key or one.here == never)

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

    def _after_forward(self) -> None:
        """Look again at what the forward's requests have read, and hash the blocks that it has filled."""
        read = [one for one in self._landings if not one.was_read and one.name in self._names]
        lay = [(one.is_known, one.here) for one in read]
        self._look_again(read)
        for one, (was_known, before) in zip(read, lay, strict=True):
            one.was_read = True
            if was_known and one.here and one.here != before:
                self._record("changed", [one], there=before)
        # A connector that loads layer by layer may have been at it.
        self._record(
            "load-back", [one for one, (known, _) in zip(read, lay, strict=True) if one.is_known and not known]
        )
        over = {id(one) for one, (known, _) in zip(read, lay, strict=True) if known or one.is_known or not one.here}
        self._landings = [one for one in self._landings if id(one) not in over]
        filled, self._filled, self._names = self._filled, [], ()
        hashes = self._copies.hash_here([page for page, _ in filled]).tolist()
        new: dict[Page, int] = {}
        for (page, own), here in zip(filled, hashes, strict=True):
            seen = page._replace(key=(here, page.key))
            if here and not self._copies.has(seen):
                new[seen] = here
                self._keep(page, own, here)
        self._copies.store_seen([*new], [*new.values()])

    def _keep(self, page: Page, own: bytes, here: int) -> None:
        computed, hashes = self._computed[page.group.index], self._hashes[page.group.index]
        computed[here], hashes[page.key] = (page.key, own), here
        for kept in (computed, hashes):
            if len(kept) > 8 * page.group.num_blocks:
                kept.popitem(last=False)

    def _judge(self) -> None:
        """Record what requests have read that was computed for other tokens, and what was loaded only after that."""
        read = [one for one in self._landings if one.was_read and one.page.block not in self._failed]
        lay = [one.here for one in read]
        self._look_again(read)
        over = {id(one) for one in self._landings if one.page.block in self._failed}
        for one, before in zip(read, lay, strict=True):
            group = one.page.group
            if group.window:  # what it holds outside of it need not be loaded
                over.add(id(one))
            elif one.here == before and one.left == LATE_STEPS:
                other, own = self._computed[group.index].get(before, (None, one.own))
                right = self._hashes[group.index].get(one.page.key, 0)
                if right and self._is_wrong(one, right):
                    one.is_missing = True
                    self._record("not loaded", [one], there=right)
                elif own != one.own and len(group.layers) > 1:
                    self._record("load-back", [one], there=before, key=other)
            elif one.here != before and one.is_known:
                late, one.here = one.here, before
                if not one.is_missing:
                    self._record("not loaded", [one], there=late)
                one.here = late
                self._record("landed late", [one])
            one.left -= 1
            if one.here != before or not one.here or not one.left:
                over.add(id(one))
        self._landings = [one for one in self._landings if id(one) not in over]


def not_watched(name: str, *, loads: bool) -> list[NotWatched]:
    """Return what a trace does not hold of a connector that is not known, of an engine whose cache lies in the host's memory."""
    reason = "what it loads is unknown until a forward writes the slot, unless this engine computed the same bytes for the same tokens"
    slots = [NotWatched(what="slots", name=name, reason=reason)] if loads else []
    return [*slots, NotWatched(what="other", name=name, reason="what it stores elsewhere is not compared")]
