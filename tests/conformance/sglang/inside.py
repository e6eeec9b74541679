"""Damage done inside a forward, where SGLang's own injector cannot do it: around the online canary's launches.

    AFTER_TAIL       a slot just written is flipped after the canary's TAIL has hashed it, before the forward returns
    TABLE_INSIDE     an entry of the block table points to another slot from before the canary's plan to after its TAIL
    SEQ_LENS         a decode's attention is given a length one short or one long; the batch stays right
    ATTENTION_TABLE  attention is given a copy of the block table with one entry overwritten; the table stays right

The online canary sees the first two, the replay must have its rows one for one. The others are the replay's alone.
"""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

WARM_UP = 4
# What the replay must find of those that the online canary does not see.
ALONE = {"SEQ_LENS": "attention_lens", "ATTENTION_TABLE": "attention_slots"}
INSIDE = ("AFTER_TAIL", "TABLE_INSIDE", *ALONE)


def damage(fault: str, probability: float, seed: int) -> None:
    """Break this process's forwards from now on.

    Everything is done by the canary's own brackets, so that nothing of the engine knows of it but the canary.
    """
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager

    rng, count = random.Random(seed), [0]
    undo: list[Callable[[], None]] = []
    before, after = CanaryManager.pre_ops_maybe_inside_graph, CanaryManager.post_ops_maybe_inside_graph

    def wanted() -> bool:
        count[0] += 1
        return count[0] > WARM_UP and rng.random() < probability

    def pre(self: Any, batch: Any) -> Any:
        due = wanted()
        if due and fault == "TABLE_INSIDE":
            undo.extend(_table_entry(self._req_to_token_pool.req_to_token, batch, rng))
        told = before(self, batch)
        if due and batch.forward_mode.is_decode() and fault in ALONE:
            undo.append({"SEQ_LENS": _seq_len, "ATTENTION_TABLE": _copied_table}[fault](batch, rng))
        return told

    def post(self: Any, batch: Any, told: Any) -> None:
        mine = fault in ALONE
        while mine and undo:
            undo.pop()()
        after(self, batch, told)
        while undo:
            undo.pop()()
        if fault == "AFTER_TAIL" and count[0] > WARM_UP and rng.random() < probability:
            _flip(self, batch, rng)

    CanaryManager.pre_ops_maybe_inside_graph, CanaryManager.post_ops_maybe_inside_graph = pre, post


def _said(fault: str, what: str) -> None:
    print(f"kv_canary perturb {fault}: {what}", flush=True)


def _flip(manager: Any, batch: Any, rng: random.Random) -> None:
    from sglang.srt.kv_canary.perturb.utils import flip_first_byte_in_source

    group = next(group for group in manager._buffer_groups if group.kind.name == "FULL")
    slot = rng.choice(batch.out_cache_loc.tolist())
    flip_first_byte_in_source(group=group, source=group.real_kv_sources_k[0], slot_idx=slot)
    _said("AFTER_TAIL", f"slot={slot}")


def _read_places(batch: Any) -> list[tuple[int, int]]:
    """Return `(row, position)` of what a batch reads of its prefixes."""
    own = 1 if batch.forward_mode.is_decode() else batch.extend_seq_lens
    prefixes = (batch.seq_lens - own).tolist()
    rows = batch.req_pool_indices.tolist()
    return [(row, position) for row, prefix in zip(rows, prefixes, strict=True) for position in range(prefix)]


def _table_entry(table: Any, batch: Any, rng: random.Random) -> list[Callable[[], None]]:
    places = _read_places(batch)
    if len(places) < 2:
        return []
    (row, position), (other, place) = rng.sample(places, 2)
    slot = int(table[row, position])
    if slot == int(table[other, place]):
        return []
    table[row, position] = table[other, place]
    _said("TABLE_INSIDE", f"slot={slot} row={row} position={position}")

    def back() -> None:
        table[row, position] = slot

    return [back]


def _seq_len(batch: Any, rng: random.Random) -> Callable[[], None]:
    index, off = rng.randrange(batch.seq_lens.numel()), rng.choice((-1, 1))
    batch.seq_lens[index] += off
    _said("SEQ_LENS", f"slot=-1 request={index} off={off}")

    def back() -> None:
        batch.seq_lens[index] -= off

    return back


def _copied_table(batch: Any, rng: random.Random) -> Callable[[], None]:
    from sglang.srt.model_executor.forward_context import get_attn_backend

    backend = get_attn_backend()
    pool = backend.req_to_token_pool
    copy = pool.req_to_token.clone()
    row, position = rng.choice(_read_places(batch))
    slot = int(copy[row, position])
    copy[row, position] = slot % 64 + 1
    backend.req_to_token_pool = SimpleNamespace(req_to_token=copy)
    _said("ATTENTION_TABLE", f"slot={slot} row={row} position={position}")

    def back() -> None:
        backend.req_to_token_pool = pool

    return back
