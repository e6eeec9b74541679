"""Slots that nobody has: SGLang is idle, and they are neither free nor the prefix cache's."""

from typing import Any

from .history import GroupHistory, allocators_of, walker


class IdleLooks:
    """Looks at the books of a scheduler's allocator whenever it has become idle: first at its counts, then at the slots.

    Only of the pool that the prefix cache names the slots of, and only of a cache that can be walked; what a session keeps
    between its turns is in no count, and nothing is looked at while there is any.
    """

    def __init__(self, scheduler: Any, histories: list[GroupHistory], recorder: Any) -> None:
        self._tree = scheduler.tree_cache
        self._recorder = recorder
        full = {id(part) for kind, part in allocators_of(scheduler.token_to_kv_pool_allocator) if kind == "full"}
        self._histories = [history for history in histories if id(history.allocator) in full]
        self._looked = 0  # forwards that had run when it was looked at last
        self._lost = [0] * len(self._histories)
        self._is_idle = scheduler.is_fully_idle

    def on_idle(self, *_args: Any, **_kwargs: Any) -> None:
        """Look once for each time in which the engine is idle: it comes here again and again until it gets work."""
        if self._recorder.next_forward == self._looked or not self._is_idle():
            return
        self._looked = self._recorder.next_forward
        if self._tree.session_records():
            return
        cached = self._tree.full_evictable_size() + self._tree.full_protected_size()
        for n, history in enumerate(self._histories):
            pages = int(history.allocator.size) // history.page_size
            lost = pages * history.page_size - int(history.allocator.available_size()) - int(cached)
            if lost != self._lost[n]:
                self._lost[n] = lost
                history.nobodys(walker()(radix_cache=self._tree, unlocked_only=False).slot_indices)


def can_be_looked_at(scheduler: Any) -> bool:
    """Say whether a scheduler says when it is idle, and all that a cache holds of its pool then: one engine's, not one side of two."""
    tree, mode = getattr(scheduler, "tree_cache", None), getattr(scheduler, "disaggregation_mode", None)
    said = all(hasattr(scheduler, name) for name in ("on_idle", "is_fully_idle"))
    said &= all(hasattr(tree, name) for name in ("session_records", "full_evictable_size", "full_protected_size"))
    of_two = str(getattr(mode, "value", mode)) not in ("null", "None")
    if not said or of_two or getattr(scheduler, "enable_hisparse", False):
        return False
    try:
        walker()(radix_cache=tree, unlocked_only=False)
    except Exception:  # noqa: BLE001  # some versions have no walker, none knows all caches
        return False
    return True
