"""Which forward a scheduler step's result belongs to, and what the scheduler took over from it.

A stage of a pipeline runs a micro-batch, and later takes over a result that is made anew from what the last stage sent. It
takes it over for the very batch that it ran, and before that batch runs again; or, if the batch is speculative, for the
copy that newer versions make of it as it was launched.
"""

from typing import Any, Final
from weakref import ref

from ....kernels.arrays import Int64Array
from ...capture.device.recorder import DeviceRecorder
from ...capture.recorder import Recorder
from ..common.hooking import Around, around
from .requests import BatchLookup, KnownBatch

# Forwards whose samples may still be outstanding: overlap scheduling is one behind, pipelines a few.
MAX_OUTSTANDING: Final = 64
# Micro-batches whose results may still be outstanding; a pipeline has a few.
MAX_LAUNCHED: Final = 64

RunForward = tuple[int, KnownBatch]  # a forward's number and its requests


class StepResults:
    """Records the tokens that the scheduler takes over from each step's result."""

    def __init__(self, recorder: Recorder | DeviceRecorder, batches: BatchLookup) -> None:
        self._recorder = recorder
        self._batches = batches
        device = recorder if isinstance(recorder, DeviceRecorder) else None
        # Bound once: each step would make them anew otherwise, and leave them to the collector of garbage.
        self._later: Any = None if device is None else device.later
        self._record_sampled: Any = None if device is None else device.record_sampled
        self._read_sampled = self._sampled
        self.last_target: RunForward | None = None
        # The result that is being taken over: its forward's number and requests, and how many tokens each had.
        self._taken: tuple[int, KnownBatch, bytes] | None = None
        # By id of the result, oldest first. The weak reference tells a result from a later one at the same address, and
        # keeps no tensor alive.
        self.by_result: dict[int, tuple[ref[Any], RunForward]] = {}
        self.moment = 0  # between two, the scheduler appends no token to any request's
        # Micro-batches without a result yet, by id of the batch, which is held, so that ids stay its own.
        self._launched: dict[int, tuple[Any, RunForward | None]] = {}

    def ran(self, result: Any, _: BaseException | None) -> None:
        """Note which forward a scheduler step's result belongs to."""
        last, self.last_target = self.last_target, None
        if last is None or result is None:
            return
        results = self.by_result
        results[id(result)] = (ref(result), last)
        if len(results) > MAX_OUTSTANDING:
            del results[next(iter(results))]

    def takes(self, result: Any) -> bool:
        """Note how many tokens each request has before the scheduler takes over a result; return whether it is known.

        Nothing is known of a result that no forward of this process is known to have.
        """
        ran = self.by_result.pop(id(result), None)
        moment = self.moment
        self.moment = moment + 1
        if ran is None or ran[0]() is not result:
            self._taken = None
            return False
        forward, known = ran[1]
        self._taken = (forward, known, known.lens if known.moment == moment else known.output_lens(moment))
        return True

    def took(self, _: Any, error: BaseException | None) -> None:
        """Record which tokens the scheduler took over from a result."""
        if self._taken is None or error is not None:
            return
        forward, known, before = self._taken
        after = known.output_lens(self.moment)
        if after == before:
            return
        if self._later is not None:
            self._later(self._record_sampled, forward, self._read_sampled, known, before, after)
            return
        tokens, lens = self._sampled(known, before, after)
        self._recorder.sampled(forward=forward, sampled_tokens=tokens, sampled_lens=lens)

    def _sampled(self, known: KnownBatch, before: bytes, after: bytes) -> tuple[Int64Array, Int64Array]:
        self._batches.refresh()
        return known.sampled(before, after)

    @around
    def on_launch(
        self, mb_id: Any, batch: Any, _proxy: Any = None, mb_metadata: Any = None, *_args: Any, **_kwargs: Any
    ) -> Around:
        """Note which forward a micro-batch of a pipeline's stage ran."""
        returned = yield
        ran = self.by_result.pop(id(returned[0]), None)
        if ran is None or ran[0]() is not returned[0]:
            return
        copied = None if mb_metadata is None else getattr(mb_metadata[mb_id], "fwd_batch", None)
        key = batch if copied is None else copied
        again = id(key) in self._launched  # without a result in between: whose the next one is, nobody knows
        self._launched[id(key)] = (key, None if again else ran[1])
        if len(self._launched) > MAX_LAUNCHED:
            del self._launched[next(iter(self._launched))]

    def on_process(self, batch: Any, result: Any, *_args: Any, **_kwargs: Any) -> None:
        """Note that a result is the one of the forward that this batch of a pipeline's stage ran."""
        _, ran = self._launched.pop(id(batch), (None, None))
        if ran is not None and result is not None:
            self.by_result[id(result)] = (ref(result), ran)
