"""What a trace saw of forwards beside tokens, tables and leading bytes: states, windows, values, and some bytes of all layers."""

from collections.abc import Sequence

import numpy as np

from ...kernels.arrays import Int64Array
from ...kernels.capture.layers import watched_bytes
from ...recorder.state.forward import Forward
from ...recorder.state.recurrent import AFTER, BEFORE, OP, POOL, REQUEST, SAVE, SOURCE, STEP
from ...recorder.trace.header import KvStream, TraceHeader
from .comparability import ComparedGroup
from .facts import DRAFT, GUESS, SETTLED, Sinks, WrittenTokens

_READ, _WROTE = range(2)  # whether a forward went on from a state, or left it


class Observed:
    """Records what both traces may have seen, by request and position: slots and state slots are each run's own."""

    def __init__(
        self, header: TraceHeader, groups: Sequence[ComparedGroup], states: Sequence[int], sinks: Sinks
    ) -> None:
        self._header = header
        self._groups = groups
        self._states = states
        self._sinks = sinks

    def forward(self, forward: Forward, extend: Int64Array, written: int) -> None:
        """Record what a forward of `extend` `[bs]` tokens was seen to do, whose runner had written so many tokens before."""
        live = (forward.req_pool_indices > 0) & (forward.request_ids != -1)
        if forward.recurrent is not None and not forward.failed:
            ops = forward.recurrent[np.isin(forward.recurrent[:, OP], (STEP, SAVE))]
            ops = ops[live[ops[:, REQUEST]]]
            for k, pool in enumerate(self._states):
                if self._header.states[pool].runner == forward.runner:
                    self._recurrent(k, forward, extend, ops[ops[:, POOL] == pool])
        for k, group in enumerate(self._groups):
            if self._header.groups[group.index].runner != forward.runner:
                continue
            # Of a group without a window a recorder may not have looked, and does not say so.
            if forward.windows is not None and group.window and group.same_window:
                reads = forward.windows[forward.windows[:, 0] == group.index]
                self._windows(k, forward, reads[live[reads[:, 1]]])
            if forward.values is not None:
                self._values(k, forward, extend, written, forward.values[live[forward.values[:, 0]]])

    def _recurrent(self, k: int, forward: Forward, extend: Int64Array, ops: Int64Array) -> None:
        """Record the states that steps and saves `[n, 7]` read and left; those of no tokens are what an engine leaves there."""
        requests, prefix = ops[:, REQUEST], forward.prefix_lens[ops[:, REQUEST]]
        steps = ops[:, OP] == STEP
        left = np.full(
            len(ops), forward.mode != "target_verify"
        )  # behind guesses, which may be rejected, is nobody's state
        read = steps & (ops[:, SOURCE] >= 0)
        ends = np.where(steps, prefix + extend[requests], ops[:, SOURCE])
        for wrote, chosen, tokens, hashes in (
            (_READ, read, prefix, ops[:, BEFORE]),
            (_WROTE, left, ends, ops[:, AFTER]),
        ):
            rows = np.flatnonzero(chosen & (tokens > 0) & (hashes != 0))
            where = (forward.request_ids[requests[rows]], k, tokens[rows] - 1, forward.event, forward.forward)
            self._sinks.add("states", *where, wrote, hashes[rows])

    def _windows(self, k: int, forward: Forward, reads: Int64Array) -> None:
        requests = reads[:, 1]
        where = (forward.request_ids[requests], forward.runner, k, forward.prefix_lens[requests], forward.event)
        self._sinks.add("windows", *where, reads[:, 2], reads[:, 3])

    def _values(self, k: int, forward: Forward, extend: Int64Array, written: int, values: Int64Array) -> None:
        first = np.cumsum(extend) - extend
        for sample in self._groups[k].samples:
            of = values[(values[:, 1] == sample.place) & np.isin(values[:, 3], sample.layers)]
            if not sample.values or not len(of):
                continue
            requests = of[:, 0]
            prefix = forward.prefix_lens[requests]
            position = prefix + of[:, 4] - first[requests]
            guess = np.full(len(of), SETTLED, np.int64)
            if forward.mode == "target_verify":
                guess[position > prefix] = GUESS
            elif forward.runner and forward.mode == "decode":
                guess[:] = DRAFT
            where = (forward.request_ids[requests], forward.runner, k, position, forward.event, forward.forward, guess)
            part = (prefix, extend[requests], written)
            self._sinks.add(
                "values", *where, self._stream(forward.runner, sample.place).half, *of[:, [2, 3, 5]].T, *part
            )

    def wrote(self, k: int, forward: Forward, written: Int64Array, tokens: WrittenTokens) -> None:
        """Record the bytes of all layers that the slots which a forward wrote, `[num_tokens]`, show."""
        stored = written[tokens.chosen] > 0
        which = tokens.chosen[stored]
        for sample in self._groups[k].samples:
            if not sample.kv:
                continue
            stream = self._stream(forward.runner, sample.place)
            layers, pieces = shown(stream, written[which])
            at = np.flatnonzero(np.isin(layers, sample.layers))
            rows = np.flatnonzero(stored)[at]
            where = (tokens.ids[rows], k, tokens.position[rows], forward.event, forward.forward, tokens.guess[rows])
            content = forward.kv_bytes[sample.place][which[at]]
            self._sinks.add("layers", *where, stream.half, layers[at], pieces[at], content)

    def _stream(self, runner: int, place: int) -> KvStream:
        return self._header.streams(runner)[place][1]


def shown(stream: KvStream, slots: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return of slots `[n]` which layer of the model a sampling stream shows, and which 16 bytes there, `[n]` each."""
    places = watched_bytes(
        slots, seed=stream.seed, num_layers=len(stream.layers), num_chunks=stream.num_chunks, backend="cpu"
    )
    return np.array(stream.layers, np.int64)[places[:, 0]], places[:, 1]
