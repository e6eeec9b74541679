"""What a group's layers hand to their caches, on the CPU: held against what the pool holds behind the forward where it stores it
as it is, and searched for values that no model writes where it packs it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ....kernels.arrays import ByteArray, Int64Array
from ....kernels.capture.layers import watched_bytes
from ....kernels.ops.hash.kv_source import KvSource
from ...capture.host_arrays import as_rows
from ...trace.header import SAMPLE_BYTES, KvStream
from ...trace.schema import SUBMITTED

# By group and stream, `[T, bytes] uint8`, or such by the layer's number: as `Recorder.after_forward` takes it.
Submitted = dict[tuple[int, int], Any]


class SubmittedKv:
    """Keeps what a group's layers have handed in since it was last taken: of the first the leading bytes, of all what is sampled.

    `streams` are the group's, once they are known, `first` the number of its first layer, `numbers` those of the layers that hand
    in anything.
    """

    def __init__(self, group: Any, first: int, numbers: tuple[int, ...]) -> None:
        self.streams: Sequence[KvStream] = ()
        self.first = first
        self._group, self._numbers = group, numbers
        self._held: dict[int, ByteArray] = {}  # by stream what it looks at of each slot, 16 bytes
        self._given: dict[tuple[int, int], tuple[Int64Array, ByteArray]] = {}  # by stream and layer: slots and rows

    def sampling_stream(self, half: str, bytes_per_token: int, *, seed: int, dtype: str) -> KvStream:
        """Return a stream that samples what all layers hand in of a half."""
        return KvStream(
            half=half,
            layer=self._numbers[0],
            layers=self._numbers,
            bytes_per_token=bytes_per_token,
            capture_bytes=SAMPLE_BYTES,
            origin=SUBMITTED,
            seed=seed,
            dtype=dtype,
        )

    def source(self, number: int) -> KvSource:
        """Return what such a stream is read from, the group's `number`: what it looks at of each slot."""
        self._held[number] = content = np.zeros((self._group.num_slots, SAMPLE_BYTES), np.uint8)
        return KvSource(tensor=content, page_size=1, bytes_per_token=SAMPLE_BYTES, read_bytes=SAMPLE_BYTES)

    def on_update(self, layer: int, states: Mapping[str, Any], slots: Int64Array) -> None:
        """Take over what a layer hands in: by half `[n, heads, dim]`, for slots `[at most n]`, -1 for none."""
        for number, stream in enumerate(self.streams):
            if not stream.samples and (layer != self.first or stream.origin == SUBMITTED):
                continue
            rows = states[stream.half] if stream.samples else states[stream.half][:, 0]
            known = str(rows.dtype).removeprefix("torch.") == stream.dtype
            mine = as_rows((rows if known else rows[:0]).detach().clone())
            self._given[number, layer] = slots.copy(), mine if stream.samples else mine[:, : stream.capture_bytes]
            if number in self._held:
                self._hold(number, layer, slots, mine)

    def take(self, written: Int64Array | None) -> Submitted:
        """Return what was handed in for tokens that go to slots `[T]`, None for none, and forget all.

        Of a layer that was given other slots nobody knows which of its rows are which token's.
        """
        given, self._given = self._given, {}
        found: Submitted = {}
        if written is None:
            return found
        for (number, layer), (slots, rows) in given.items():
            if len(rows) < written.size or not np.array_equal(slots[: written.size], written):
                continue
            key, mine = (self._group.index, number), rows[: written.size]
            if self.streams[number].samples:
                found.setdefault(key, {})[layer] = mine
            else:
                found[key] = mine
        return found

    def _hold(self, number: int, layer: int, slots: Int64Array, rows: ByteArray) -> None:
        stream, content = self.streams[number], self._held[number]
        layers, pieces = watched_bytes(
            slots, seed=stream.seed, num_layers=len(stream.layers), num_chunks=stream.num_chunks, backend="cpu"
        ).T
        mine = np.flatnonzero((layers == stream.layers.index(layer)) & (slots >= 0) & (slots < len(content)))
        if len(rows) < slots.size:  # nobody knows what they are
            content[slots[mine]] = 0
            return
        begins = pieces[mine, None] * SAMPLE_BYTES
        content[slots[mine]] = rows[mine[:, None], begins + np.arange(SAMPLE_BYTES)]


def of_tokens(given: Submitted, tokens: Any) -> Submitted:
    """Return what was handed in for some of a step's tokens `[n]`."""
    return {
        key: {layer: own[tokens] for layer, own in rows.items()} if isinstance(rows, dict) else rows[tokens]
        for key, rows in given.items()
    }
