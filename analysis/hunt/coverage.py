"""Which paths through an engine a recording has reached, counted from its events."""

from collections import Counter
from typing import Final

from ...recorder.trace.batch import EventView, TraceBatch
from ...recorder.trace.schema import IDENTITY_KINDS, SEEN, TIER_HOST, TIER_POOL

PATHS: Final = {
    "chunk": "parts of prompts, without the last of each",
    "share": "requests that began with a cached prefix",
    "mixed": "forwards with prefill and decode",
    "retract": "requests retracted or preempted",
    "evict": "evictions from the prefix cache",
    "abort": "requests aborted",
    "copy": "copies within the pool",
    "offload": "copies to the host",
    "load_back": "loads from the host or a store",
    "draft": "forwards that verify drafts",
    "draft_reject": "requests with a draft rejected",
    "adapter": "requests under an adapter",
}
_COPIES: Final = {
    (TIER_POOL, TIER_POOL): "copy",
    (TIER_HOST, TIER_POOL): "load_back",
    (TIER_POOL, TIER_HOST): "offload",
}
_ADAPTER: Final = IDENTITY_KINDS.index("adapter")


class Coverage:
    """Counts paths over the batches of all recordings of a hunt: `reached`, by path; `has_history` says that one had the
    allocations and frees of slots, without which evictions and aborts are not seen.
    """

    def __init__(self) -> None:
        self.reached: Counter[str] = Counter()
        self.has_history = False
        self._prompts: dict[tuple[str, int], int] = {}
        self._verified: dict[tuple[str, int], int] = {}
        self._begun: set[tuple[str, int]] = set()
        self._landed: set[tuple[str, int]] = set()

    def take(self, trace: str, batch: TraceBatch) -> None:
        """Count a batch of the recording `trace`."""
        self.has_history |= "alloc" in batch.kinds
        for event in batch:
            if event.kind == "forward":
                self._forward(trace, event)
            elif event.kind == "request":
                self._prompts[trace, int(event.scalar("request_id"))] = int(event.scalar("prompt_len"))
                adapters = event.ints("identity_hash")[event.ints("identity_kind") == _ADAPTER]
                self.reached["adapter"] += bool(adapters.any())
            elif event.kind == "status":
                self.reached["retract"] += event.scalar("status") == "retracted"
                self.reached["abort"] += event.scalar("status") == "aborted"
            elif event.kind == "free":
                self.reached["retract"] += event.scalar("note") == "offload"
                self.reached["abort"] += event.scalar("note") == "cancel"
            elif event.kind == "evict":
                self.reached["evict"] += 1
            elif event.kind == "kv_copy" and event.scalar("note") != SEEN:  # nobody knows that it was saved
                tiers = set(
                    zip(event.ints("copy_src_tier").tolist(), event.ints("copy_dst_tier").tolist(), strict=True)
                )
                if (key := (trace, int(event.scalar("request_id")))) in self._landed:  # this load is counted
                    self._landed.discard(key)
                    tiers.discard((TIER_HOST, TIER_POOL))
                self.reached.update(_COPIES[ends] for ends in tiers & _COPIES.keys())
            elif event.kind == "transfer" and event.scalar("mode") == "receive" and event.scalar("status") == "end":
                self.reached["load_back"] += 1
                self._landed.add((trace, int(event.scalar("request_id"))))

    def _forward(self, trace: str, event: EventView) -> None:
        mode = event.scalar("mode")
        if mode == "draft_extend":
            return
        self.reached["mixed"] += mode == "mixed"
        self.reached["draft"] += mode == "target_verify"
        columns = (event.ints(name).tolist() for name in ("request_ids", "prefix_lens", "extend_lens"))
        for request, prefix, extend in zip(*columns, strict=True):
            key, end = (trace, request), prefix + extend
            if key not in self._begun and request >= 0:
                self._begun.add(key)
                self.reached["share"] += prefix > 0
            self.reached["chunk"] += mode in ("extend", "mixed") and 0 < end < self._prompts.get(key, 0)
            self.reached["draft_reject"] += prefix < self._verified.pop(key, prefix)
            if mode == "target_verify":
                self._verified[key] = end
