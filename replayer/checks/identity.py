"""Prefix hits on KV that depends on something else than the request's own: an adapter, a salt, weights, media."""

from collections.abc import Iterator

import numpy as np

from ...kernels.arrays import BoolArray, Int64Array
from ..report.findings import Cause, Finding
from .check import Covered, Explained, HistoryCheck, register
from .history import ForwardView, GroupReads

_SAID = {
    "adapter": "computed with another LoRA adapter",
    "salt": "computed under another cache salt",
    "weights": "computed with other weights",
    "media": "computed with other media up to there",
}


@register
class IdentityDiffers(HistoryCheck):
    """A request reads for the first time what was computed with equal tokens and another identity.

    A cache's key that leaves out the LoRA adapter, a part of an image's hash or the salt hits it, and so does a cache that is
    not flushed if the weights change. What a request or a slot's writer has not declared is judged by nothing; neither are
    positions that a request goes on from: with new weights it may keep what it has.
    """

    kind = "identity"
    finds = "a request hit KV that depends on another adapter, salt, weights or media than its own"
    covered = Covered.COMPILED  # which leaves all forwards with hits to us once two identities have been declared

    def forward(self, view: ForwardView) -> list[Finding]:
        if view.forward.runner or len(self.history.request_table.declared) < 2:
            return []
        fresh = self.history.rows.fresh_from(view.forward)
        return [finding for group in view.groups for finding in self._judge(view, group, fresh)]

    def _judge(self, view: ForwardView, group: GroupReads, fresh: Int64Array) -> list[Finding]:
        table, slots, positions = self.history.request_table, group.slots, group.positions
        readers = group.readers(np.arange(len(slots)))
        inside = (slots > 0) & (slots < group.pool.num_slots) & (readers < len(fresh))
        at, who = np.where(inside, slots, 0), np.where(inside, readers, 0)
        writers = group.pool.pool.writers[at]
        hit = inside & (positions >= fresh[who]) & (writers[:, 0] > 0) & ~group.pool.pool.unknown[at]
        wrong: BoolArray = np.zeros(len(slots), np.bool_)
        causes: dict[int, str] = {}  # by entry
        hits = np.flatnonzero(hit)
        together, numbers = np.unique(np.column_stack((who, writers[:, [0, 2]]))[hits], axis=0, return_inverse=True)
        for number, (r, event, writer) in enumerate(together.tolist()):
            mine = table.identity(int(view.forward.request_ids[r]), view.forward.event)
            theirs = table.identity(writer, event - 1)
            if mine is None or theirs is None or mine is theirs:
                continue
            entries = hits[numbers.reshape(-1) == number]
            cause, differ = mine.differs(theirs, positions[entries])
            wrong[entries[differ]] = True
            causes |= dict.fromkeys(entries[differ].tolist(), cause)
        found = np.flatnonzero(wrong)
        group.mark(found)

        def explain(n: int) -> Explained:
            event, _, writer = writers[found[n]].tolist()
            cause = causes[int(found[n])]
            detail = f"hit what was {_SAID[cause]}, for request {table.name(writer)} in event {event - 1}"
            return detail, [event - 1], Cause(f"other_{cause}", writer)

        of = {"requests": readers[found], "positions": positions[found], "slots": slots[found]}
        return self.of_entries(view, group, explain, **of, repeats=self.repeats)


@register
class ComputedOtherwise(HistoryCheck):
    """A request's tokens are computed with another adapter than its own: the layers were given that for them.

    Judged is what the adapter of the engine sees the layers get; of others nothing is said. What goes on in the same way in the
    forwards that follow says nothing new.
    """

    kind = "computed_otherwise"
    finds = "a request's tokens were computed with another adapter than its own"
    covered = Covered.COMPILED  # which stops in front of a forward that has such tokens

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        """Find each request that another adapter computes, and did not in its last forward."""
        found = [] if view.forward.identity is None else view.forward.identity.tolist()
        mine = {request: (count, other) for _, request, count, other in found}
        new = self.repeats.new(-1, view.forward, {r: np.array([other]) for r, (_, other) in mine.items()})
        for request, (count, other) in mine.items():
            if new[request].all():
                tokens = "one token" if count == 1 else f"{count:,} tokens"
                added = int(view.forward.extend_lens[request])
                by = "with another LoRA adapter than its own" if other else "without its LoRA adapter"
                detail = f"computed {tokens} of {added:,} {by}"
                yield self.of_request(view.forward, request, detail, position=int(view.forward.prefix_lens[request]))
