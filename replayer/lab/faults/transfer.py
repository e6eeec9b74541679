"""KV on its way: from a prefill to a decode engine, and back from the host tier."""

from typing import Any, Final

import numpy as np

from ....recorder.engines.simulated.pd_pair import PdPair, Room
from ....recorder.engines.simulated.radix import Node
from ....recorder.engines.simulated.transfers import SentPart, Transfer
from ..fault import Bench, around, fault, unchecked_pools

_PAIRS: Final = ("pd", "pd_swa", "pd_eagle")


@fault(reference="S#24527 S#35049", configs=_PAIRS)
def abort_frees_during_transfer(bench: Bench) -> None:
    """An abort frees pages that a transfer still writes: it lands on the new owner."""
    pair = _pair(bench)
    unchecked_pools(pair.decode)
    late: list[SentPart] = []

    def taken(part: SentPart) -> bool:
        """Whether another request has its KV where this part will land."""
        memory = pair.decode.memory
        pool = memory.pools[part.group]
        others = [
            pair.link.slots(pair.decode, pool, request, 0, request.cached_len)
            for request in pair.decode.scheduler.running
        ]
        return bool(others) and bool(np.isin(part.dst[part.dst > 0], np.concatenate(others)).any())

    def abort() -> bool:
        under_way = [room for room in pair.rooms.values() if room.transfer is not None and room.receiver.row >= 0]
        if not under_way:
            return False
        room: Room = bench.pick(under_way)
        if room.transfer is None:
            return False
        late.extend(pair.link.parts(room.transfer))
        bench.inject(request=room.receiver, slot=int(late[0].dst[0]), engine=pair.decode, room=room.number)
        pair.abort(room)
        return True

    def land() -> bool:
        if late and any(taken(part) for part in late):
            for part in late:
                pair.link.land(part)
            return True
        return False

    bench.between_steps(abort)
    bench.between_steps(land)


@fault(reference="V#54272", configs=_PAIRS)
def transfer_wrong_stride(bench: Bench) -> None:
    """A transfer's stride is wrong: part of it lands on the neighbouring page."""
    pair = _pair(bench)
    ending: list[Transfer] = []

    def end(original: Any, transfer: Transfer) -> None:
        if bench.due:
            ending.append(transfer)
            bench.inject(request=transfer.receiver, engine=pair.decode, room=transfer.room)
        original(transfer)
        ending.clear()

    def land(original: Any, part: SentPart) -> None:
        if not ending:
            original(part)
            return
        # A slot of 0 stays where it is: nothing is sent for it.
        first = part.dst.size // 2
        slots = part.dst.copy()
        moved = slots[first:]
        moved[moved > 0] += pair.decode.memory.page_size
        last = pair.decode.memory.pools[part.group].group.num_slots - 1
        original(
            SentPart(group=part.group, start_position=part.start_position, src=part.src, dst=np.minimum(slots, last))
        )

    around(pair.link, "end", end)
    around(pair.link, "land", land)


@fault(reference="dynamo#15079", configs=("host", *_PAIRS), warm_up=(4, 20))
def failed_load_counted_loaded(bench: Bench) -> None:
    """A failed load, from the host tier or in a transfer, is taken for done."""
    if bench.pair is not None:
        _failed_transfer(bench, bench.pair)
        return
    memory = bench.engine.memory
    failing: list[Node] = []

    def load(original: Any, node: Node, page: int) -> None:
        if bench.due:
            failing.append(node)
            bench.inject(slot=page * memory.page_size, position=(node.depth - 1) * memory.page_size)
        original(node, page)
        failing.clear()

    def from_host(original: Any, *args: Any) -> None:
        if not failing:
            original(*args)

    around(memory.host, "load", load)
    for pool in memory.pools:
        around(pool, "from_host", from_host)


def _failed_transfer(bench: Bench, pair: PdPair) -> None:
    def end(original: Any, transfer: Transfer) -> None:
        if bench.due:
            bench.inject(request=transfer.receiver, engine=pair.decode, room=transfer.room)
            pair.link.fail(transfer)
            return
        original(transfer)

    around(pair.link, "end", end)


def _pair(bench: Bench) -> PdPair:
    if bench.pair is None:
        raise ValueError(f"{bench.fault} needs a prefill/decode pair")
    return bench.pair
