"""What a KV connector that is not known has loaded, by the bytes that lie in the slots then.

Nothing is known of its keys and its storage. But each block that a forward fills is hashed, over all layers, under the tokens
that it was computed for. If the same bytes lie in a block that was loaded for these tokens, the load is known as far as that
forward was. If bytes lie there that were computed for other tokens, or that lay there before, it is known, too, what its
request reads. Any other bytes, of another engine for example, stay unknown.

The engine's thread says which blocks are to be looked at; what comes of it is decided in turn (`landings.py`), which on a
device is the recorder's thread's.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from ....trace.header import NotWatched
from ...common.copy_bounds import MAX_SEEN_BYTES
from ...common.hooking import Finish
from ..device import DeviceStep
from ..layout import VllmGroup, VllmLayout
from ..step import Step, VllmRequest
from .copies import MAX_ENDED, ConnectorCopies, ExternalSlots
from .ends import Page, as_bytes, byte_rows
from .landings import MAX_BLOCKS, Ended, Filled, Landings, Place, Seen, Told

MAX_REQUESTS: Final = 8192  # of which it is known how far their blocks have been looked at


class LandedBlocks:
    """The storage of connectors that are not known; `connector` is the one that vLLM's runner calls."""

    def __init__(self, connector: Any, layers: Any, layout: VllmLayout) -> None:
        self.num_pages = 0
        self._connector = connector
        self._layers = layers
        self._groups = layout.groups
        self._landings = Landings(layout)
        # Loads that have ended and whose requests have not run; the blocks that are looked at again, with their requests; how many
        # tokens of each request lie in blocks that have been looked at; what the step fills.
        self._ended: dict[str, list[ExternalSlots]] = {}
        self._again: dict[tuple[Place, str], Page] = {}
        self._full: dict[str, int] = {}
        self._names: tuple[str, ...] = ()
        self._filled: list[Filled] = []

    def attach(self, copies: ConnectorCopies) -> None:
        """Hook where a forward is over, and where the connector says what it has not loaded."""
        self._copies = copies
        self._landings.attach(copies)

        def on_saved(*_args: Any, **_kwargs: Any) -> None:
            self._after_model()

        def on_failed(*_args: Any, **_kwargs: Any) -> Finish:
            def finish(blocks: Any, _: BaseException | None) -> None:
                if blocks:
                    copies.in_turn(self._landings.failed, frozenset(blocks))

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

    def there(self, _: Page) -> None:
        """Say nothing: what lies elsewhere is not known."""

    def allocated(self, name: str, load: ExternalSlots) -> None:
        """Take note of slots that are to be loaded for a request, before they are."""
        group = self._groups[load.group]
        pages = [Page(group, block, None) for block in sorted({*(load.slots // group.block_size).tolist()})]
        # What is the prefix cache's may well be left as it is.
        self._copies.in_turn(self._landings.allocated, name, pages, self._look_at(pages if load.own else []))

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
        self._copies.in_turn(self._landings.forget, name)

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

        ends = step.prefix + step.extend
        written = [
            (group.index, block)
            for group in self._groups
            for r in self._rows(step, requests)
            for block in blocks(group, r, step.prefix[r] // group.block_size, -(-ends[r] // group.block_size))
        ]
        self._before_model(step, requests, blocks, written)

    def _rows(self, step: Step | DeviceStep, requests: Sequence[VllmRequest]) -> list[int]:
        """Return the places of those of a step's requests that have changed, or begin or fill a block; most decodes do not."""
        ends = step.prefix + step.extend
        chosen = step.extend > 1
        for group in self._groups:
            chosen |= (step.prefix % group.block_size == 0) | (ends % group.block_size == 0)
        chosen |= np.array([known.fresh or known.name in self._ended for known in requests], np.bool_)
        return np.flatnonzero(chosen).tolist()

    def _before_model(
        self,
        step: Step | DeviceStep,
        requests: Sequence[VllmRequest],
        blocks: Callable[[VllmGroup, int, int, int], list[int]],
        written: list[Place],
    ) -> None:
        while self._landings.over:
            self._again.pop(self._landings.over.popleft(), None)
        self._names, self._filled = step.names, []
        ended, partly = list[Ended](), {*written}
        for r in self._rows(step, requests):
            known, prefix, extend = requests[r], int(step.prefix[r]), int(step.extend[r])
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
            told = Told(known.name, known.tokens.all(), known.tokens, depends)
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
        self._copies.in_turn(self._landings.before_forward, step.names, ended, self._filled, gone, partly, seen)

    def _after_model(self) -> None:
        pages = {place: page for (place, name), page in self._again.items() if name in self._names}
        pages |= {
            (f.group.index, block): Page(f.group, block, None) for f in self._filled for block in f.blocks if block
        }
        if pages:
            self._copies.in_turn(
                self._landings.after_forward, self._names, self._filled, self._look_at([*pages.values()])
            )
        self._names, self._filled = (), []

    def _look_at(self, pages: list[Page]) -> Seen:
        return Seen(pages, self._copies.look(pages))


def not_watched(name: str, *, loads: bool, on_gpu: bool) -> list[NotWatched]:
    """Return what a trace does not hold of a connector that is not known, or whose storage cannot be read."""
    looked = f", by up to {MAX_SEEN_BYTES} bytes of a block" if on_gpu else ""
    reason = f"what it loads is unknown until a forward writes the slot, unless this engine computed the same bytes for the same tokens{looked}"
    slots = [NotWatched(what="slots", name=name, reason=reason)] if loads else []
    return [*slots, NotWatched(what="other", name=name, reason="what it stores elsewhere is not compared")]
