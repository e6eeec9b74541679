"""KV on its way: from a prefill to a decode engine, and back from the host tier."""

from dataclasses import replace
from typing import Any, Final

import numpy as np

from ....recorder.engines.simulated.pd_pair import PdPair, Room, SentPart
from ....recorder.engines.simulated.radix import Node
from ..fault import Bench, around, fault, unchecked_pools, while_inside

_PAIRS: Final = ("pd", "pd_swa", "pd_eagle")


@fault(reference="S#24527 S#35049", configs=_PAIRS)
def abort_frees_during_transfer(bench: Bench) -> None:
    """An abort frees pages that a transfer still writes: it lands on the new owner."""
    pair = _pair(bench)
    memory = pair.decode.memory
    unchecked_pools(pair.decode)
    late: list[SentPart] = []

    def taken(part: SentPart) -> bool:
        """Whether another request has its KV where this part will land."""
        pool, landing = memory.pools[part.group], part.dst[part.dst > 0]
        running = pair.decode.scheduler.running
        return any(np.isin(landing, memory.row_slots(pool, r.row, 0, r.cached_len)).any() for r in running)

    @bench.between_steps(lambda: [r for r in pair.rooms.values() if r.steps_left and r.receiver.row >= 0])
    def abort(room: Room) -> None:
        late.extend(pair.link.parts(room))
        bench.inject(request=room.receiver, slot=int(late[0].dst[0]), engine=pair.decode, room=room.number)
        pair.abort(room)

    @bench.between_steps()
    def land() -> bool:
        lands = any(taken(part) for part in late)
        for part in late if lands else []:
            pair.link.land(part)
        return lands


@fault(reference="V#54272", configs=_PAIRS)
def transfer_wrong_stride(bench: Bench) -> None:
    """A transfer's stride is wrong: part of it lands on the neighbouring page."""
    pair = _pair(bench)

    def ends(room: Room) -> Room | None:
        if not bench.due:
            return None
        bench.inject(request=room.receiver, engine=pair.decode, room=room.number)
        return room

    ending = while_inside(pair.link, "end", ends)

    @around(pair.link)
    def land(original: Any, part: SentPart) -> None:
        if ending:
            # A slot of 0 stays where it is: nothing is sent for it.
            moved = (np.arange(part.dst.size) >= part.dst.size // 2) & (part.dst > 0)
            last = pair.decode.memory.pools[part.group].group.num_slots - 1
            slots = part.dst + np.where(moved, pair.decode.memory.page_size, 0)
            part = replace(part, dst=np.minimum(slots, last))
        original(part)


@fault(reference="dynamo#15079", configs=("host", *_PAIRS), warm_up=(4, 20))
def failed_load_counted_loaded(bench: Bench) -> None:
    """A failed load, from the host tier or in a transfer, is taken for done."""
    if bench.pair is not None:
        _failed_transfer(bench, bench.pair)
        return
    _one_load(bench, lambda *_: None)


@fault(reference="lab", configs=("host",), warm_up=(4, 20))
def stored_wrong(bench: Bench) -> None:
    """What lies in the host tier is not what was stored there."""

    def load(original: Any, pool: Any, host_slots: Any, slots: Any) -> None:
        for words in pool.host_arrays:
            words[host_slots] ^= np.uint64(0x5A5A)
        original(host_slots, slots)

    _one_load(bench, load)


@fault(reference="lab", configs=("host",), warm_up=(4, 20))
def layout_misread(bench: Bench) -> None:
    """A load takes the order of a page's tokens for another."""

    def load(original: Any, _: Any, host_slots: Any, slots: Any) -> None:
        original(host_slots[::-1], slots)

    _one_load(bench, load)


def _one_load(bench: Bench, load: Any) -> None:
    """Have one page come back from the host tier by `load(original, pool, host_slots, slots)`."""
    memory = bench.engine.memory

    def goes_wrong(node: Node, page: int) -> Node | None:
        if not bench.due:
            return None
        bench.inject(slot=page * memory.page_size, position=(node.depth - 1) * memory.page_size)
        return node

    going_wrong = while_inside(memory.host, "load", goes_wrong)
    for pool in memory.pools:

        def loads(original: Any, *args: Any, pool: Any = pool) -> None:
            if going_wrong:
                load(original, pool, *args)
            else:
                original(*args)

        around(pool, "from_host")(loads)


@fault(reference="lab", configs=("host",), warm_up=(4, 20))
def load_of_other_prefix(bench: Bench) -> None:
    """A load takes the host page of another prefix, which its key leads to."""
    memory = bench.engine.memory

    @around(memory.host)
    def load(original: Any, node: Node, page: int) -> None:
        others = [one for one in memory.cache.tree.walk() if one.host_page not in (node.host_page, -1)]
        if not others or not bench.due:
            original(node, page)
            return
        bench.inject(slot=page * memory.page_size, position=(node.depth - 1) * memory.page_size)
        other = others[0]
        node.host_page, other.host_page = other.host_page, node.host_page
        original(node, page)


def _failed_transfer(bench: Bench, pair: PdPair) -> None:
    @around(pair.link)
    def end(original: Any, room: Room) -> None:
        if not bench.due:
            original(room)
            return
        bench.inject(request=room.receiver, engine=pair.decode, room=room.number)
        pair.link.fail(room)


def _pair(bench: Bench) -> PdPair:
    if bench.pair is None:
        raise ValueError(f"{bench.fault} needs a prefill/decode pair")
    return bench.pair
