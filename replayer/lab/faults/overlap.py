"""Overlap scheduling: a forward is fed from a ring of tokens that the host has not seen yet."""

from typing import Final

from ..fault import Bench, Fault


def future_map_overrun(bench: Bench) -> None:
    """From the moment on, let the ring of future tokens hold one less than a forward samples."""
    engine = bench.engine

    def act() -> bool:
        count = len(engine.scheduler.decoding)
        if count < 2:
            return False
        bench.inject(ring_size=count - 1)
        engine.futures.size = count - 1
        return True

    bench.between_steps(act)


FAULTS: Final = (
    Fault(
        name="future_map_overrun",
        summary="the ring of future tokens is overrun: a request is fed another one's token",
        reference="S#13713",
        configs=("overlap", "overlap_swa"),
        arm=future_map_overrun,
    ),
)
