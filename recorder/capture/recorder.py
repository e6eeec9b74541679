"""The recorder: what an engine's integrator calls around each forward, and what never harms the engine.

No method raises after construction, unless `strict` asks for it, and none waits for the disk. A fault inside switches the recorder off, says so once
in the log (logger "kvcanary") and in the trace; the engine goes on. If the writer's queue is full, whole events are
dropped, counted, and a loss event says how many and which slots they wrote.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...kernels.arrays import BoolArray, ByteArray, Int64Array
from ...kernels.ops.oracle.reference import oracle_tokens
from ..trace.schema import PHASE_AFTER, PHASE_BEFORE
from ..writing.outbox import RecorderStats
from .attention import add_attention
from .engine_events import EventRecording
from .forward_event import Submitted, add_submitted, forward_event, written_values
from .forward_input import AttentionInput, CopiedForward, ForwardInput, OutputRead, copy_forward
from .host_arrays import own_int64, wrapped
from .kv_layers import KvLayers, Values
from .kv_shadow import of_runner, store_forward, watch
from .recording import guarded, prepare_kernels
from .recurrent import StateAccess, StateChange


class Recorder(EventRecording):
    """Records one engine's forwards into one trace; a context manager.

    Args:
        path: the trace to write; a file that exists is not overwritten unless `overwrite=True`.
        header: what the engine is; `capture`, `trace_id`, `created_ns` and `recorder_version` are filled in here.
        kv_sources: for each `(group index, stream index)` of the header, where the stream's bytes lie.
        state_sources: for each of the header's `states` the parts of the sampled layer's slots, tensors `[num_slots, ...]`
            on the host, by their index; without them, slots are followed and their bytes are not.
        kv_watch_every: compare the prefix bytes that are read with those that were written, every N forwards;
            0 never.
        backend: what the recorder's kernels run on, "cpu" or "reference".
        privacy: hashes tokens and names before anything else sees them; None: they are recorded as they are.
        strict: raise a `ValueError` for a wrong call, which names the field and what was expected: while an adapter is
            written. Otherwise nothing raises, and what was lost is noted.
        writer_options: passed to `TraceWriter`: `flush_bytes`, `flush_interval_ns`, `max_queued_bytes`,
            `compression`, `overwrite`, and for segments and a flight recorder those of docs/guide/segments.md.

    Raises:
        ValueError: sources that do not fit the header, or options that make no sense.
        TraceError: the file cannot be created.
    """

    @guarded
    def before_forward(self, given: ForwardInput) -> None:
        """Capture what a forward is about to read and write; `after_forward` completes it."""
        if self._pending is not None:
            self._pending.note, self._pending.failed = "the engine did not call after_forward()", True
            self._finish_forward(self._pending)
            self.wrong_call(f"before_forward: after_forward() was not called for forward {self._forwards - 1}")
        forward = copy_forward(
            given,
            self.header,
            number=self._forwards,
            time_ns=self._now(),
            hash_tokens=self._hash_tokens,
            numbers=self._numbers,
            rows=self._lent_rows,
        )
        if self._strict:
            self._expect_fitting(forward)
            self._said_rows[forward.number] = forward.rows.size
        self._forwards += 1
        forward.changes = self.state.changes(forward)
        every = self._kv_watch_every
        forward.kv_watched = every > 0 and forward.number % every == 0 and any(kv.sources for kv in self.kv)
        if given.identity:
            forward.identity = self.identity_columns(given.identity)
        if given.attention is not None:
            add_attention(forward, given.attention, self.header, self._numbers)
        if self.header.states:
            self._recurrent.begin(forward.runner, forward.rows, given.states)
        self._pending = forward
        if forward.kv_watched:
            watch(forward, self.kv, PHASE_BEFORE)

    @guarded
    def attention(self, given: AttentionInput) -> None:
        """Capture what attention gets in the forward that `before_forward` began, once its metadata is there.

        A second call in a forward adds to the first: what either saw differ is recorded, and the last lengths are.
        """
        if self._pending is None:
            raise ValueError("attention without before_forward")
        add_attention(self._pending, given, self.header, self._numbers)

    @guarded
    def fed(self, input_ids: Any) -> None:
        """Replace the `input_ids` `[T]` of the forward that `before_forward` began by what the model was fed.

        For engines whose device fills in the tokens of the step before, so that they can be read behind the forward alone.
        """
        if self._pending is None:
            raise ValueError("fed without before_forward")
        tokens = self._hash_tokens(own_int64(input_ids, "input_ids"))
        if tokens.size != self._pending.input_ids.size:
            raise ValueError(
                f"input_ids has length {tokens.size}, expected {self._pending.input_ids.size} as in before_forward"
            )
        self._pending.input_ids = tokens

    @guarded
    def after_forward(
        self,
        *,
        sampled_tokens: Any = (),
        sampled_lens: Any = (),
        sampled_logprobs: Any = (),
        logprobs_kind: str = "",
        note: str = "",
        failed: bool = False,
        submitted: Submitted | None = None,
    ) -> None:
        """Complete the event of the forward that `before_forward` began.

        Args:
            sampled_tokens: `[sum(sampled_lens)]`, request by request.
            sampled_lens: `[bs]` how many tokens each request got, or nothing if sampling is recorded otherwise.
            sampled_logprobs: `[sum(sampled_lens)]` floats: the log-probability that the engine computed of each sampled token,
                NaN or None for one without, or nothing. Not recorded where tokens are hashed.
            logprobs_kind: "raw": of the model's logits as they are; "processed": behind temperature, penalties and the like;
                "": the engine does not say.
            note: kept in the event; for a forward that failed, how.
            failed: the model raised: nobody knows what it has written, and a replay judges nothing by it.
            submitted: for each `(group, stream)` whose K or V was seen on its way to the cache, `[T, ...]` what the model
                handed in, a token's bytes in the order in which the pool stores them; for a stream that samples layers, such
                rows by the layer's number; compared with what is stored. Such rows of a stream of origin "submitted" are searched for
                values that no model writes.
        """
        if self._pending is None:
            raise ValueError("after_forward without before_forward")
        forward, lens = self._pending, own_int64(sampled_lens, "sampled_lens")
        tokens = self._hash_tokens(own_int64(sampled_tokens, "sampled_tokens"))
        wanted = int(np.maximum(lens, 0).sum())
        if lens.size not in (0, forward.rows.size) or tokens.size != wanted:
            raise ValueError(
                f"sampled_lens has length {lens.size} and asks for {wanted} tokens, expected length "
                f"{forward.rows.size} or 0 and {tokens.size} tokens"
            )
        forward.note, forward.failed = note, failed
        forward.sampled_lens, forward.sampled_tokens = lens, tokens
        forward.sampled_logprobs = self._logprobs(sampled_logprobs, logprobs_kind, wanted)
        self._finish_forward(forward, submitted)

    @guarded
    def state_changed(self, change: StateChange, *, pool: int, slots: Any, sources: Any = ()) -> None:
        """Record that slots of a state pool `[n]` were zeroed, or are copies of `sources` `[n]` now: checkpoints, forks.

        It is part of the next forward's event; to be called right after the change, whose bytes are hashed here.
        """
        self._recurrent.note(change, pool, slots, sources)

    @guarded
    def states_hashed(self, change: StateChange, pool: int, changed: Int64Array) -> None:
        """As `state_changed`, of what a device has hashed: `changed` `[3 * n]` slots, their sources and their hashes."""
        self._recurrent.note_hashed(change, pool, changed.reshape(3, -1))

    @guarded
    def states_given(self, states: Sequence[StateAccess | None]) -> None:
        """Replace the `states` of the forward that `before_forward` began by what its first layer was given, before it ran."""
        if self._pending is None:
            raise ValueError("states_given without before_forward")
        self._recurrent.given(self._pending.runner, self._pending.rows, states)

    @guarded
    def give_up_states(self) -> None:
        """Record no more what forwards read and write of recurrent state: some change of slots was not seen."""
        self._recurrent.give_up()

    def oracle_tokens(self, request_ids: Any, seq_lens: Any) -> Int64Array:
        """Return what the header's token oracle samples for requests of so many tokens, `[bs]` each.

        A sampler that returns it has every input of the engine known beforehand, whatever its weights are: what the engine
        feeds to another request or at another position is found. Raises `ValueError` if the header has no oracle.
        """
        if self.header.oracle is None:
            raise ValueError("the header has no oracle; pass TraceHeader(oracle=Oracle(vocab_size=...))")
        ids, ends = own_int64(request_ids, "request_ids"), own_int64(seq_lens, "seq_lens")
        tokens = np.empty_like(ids)
        oracle_tokens(request_ids=ids, positions=ends, vocab_size=self.header.oracle.vocab_size, out=tokens)
        return tokens

    def put_captured(self, forward: CopiedForward, gathered: Mapping[int, list[ByteArray]]) -> bool:
        """Record a whole forward whose changes were found on the device; may raise.

        `gathered` has, for each of the runner's groups, each stream's `[T, capture_bytes]` written bytes. Returns whether the
        trace will hold it. If not, nothing after it may continue from it: `start_over`.
        """
        with self.lock:
            if self._off:
                return False
            if self.header.states:
                reads = forward.prefix_lens > 0
                forward.recurrent = self._recurrent.hashed(forward.runner, forward.rows, reads, forward.states)
            if self._numbers.differ:
                raise ValueError("padding_slots other than (0,) cannot be recorded on the device; use Recorder")
            forward.input_ids = self._hash_tokens(forward.input_ids)
            if "truth_tokens" in forward.changes:
                forward.changes["truth_tokens"] = wrapped(self._hash_tokens(forward.changes["truth_tokens"]))
            self._forwards = forward.number + 1
            if not self._put(forward_event(forward, gathered)):
                return False
            store_forward(forward, self.kv, gathered)
            return True

    def add_outputs(self, forward: CopiedForward, found: Sequence[OutputRead], *, compared: int) -> None:
        """Add to a forward that a device has captured what attention's outputs show, and how many were compared."""
        given = AttentionInput(outputs=found, outputs_compared=compared)
        add_attention(forward, given, self.header, self._numbers)

    def values_found(
        self, forward: CopiedForward, found: Mapping[int, BoolArray], tokens: Int64Array | None
    ) -> dict[str, Int64Array]:
        """Return the columns of values that no model writes, of rows that a device has searched.

        `found` has, by the streams that are searched, `[tokens, kinds, layers]`, nothing if there are none; those of the forward are
        its `tokens`, None for all.
        """
        searched = (source for _, kv in of_runner(self.kv, forward.runner) for source in kv.sources)
        if not found and all(source.knows_usual for source in searched if isinstance(source, KvLayers)):
            return {}  # in nearly every forward, which must not take long

        def search(stream: int, source: KvLayers, slots: Int64Array, judged: ByteArray) -> Values:
            judged[(slots < 0) | (slots >= source.source.num_slots)] = 0
            held = found.get(stream)
            if held is not None and tokens is not None:
                held = held[tokens]
            return source.values_found(None if held is None else held[: slots.size], judged)

        return written_values(forward, self.kv, search)

    def known_bytes(self, group: int, slots: Int64Array) -> tuple[Int64Array, list[ByteArray]]:
        """Return those of a group's slots whose bytes the trace has, and of each stream `[n, capture_bytes]`."""
        with self.lock:
            return self.kv[group].known_bytes(slots) if self.kv else (slots[:0], [])

    def drop_captured(self, number: int, written: Mapping[int, Int64Array]) -> None:
        """Count a forward that was captured and cannot be recorded; `written[group]` are the slots that it wrote."""
        with self.lock:
            self._forwards = number + 1
            for group, slots in written.items():
                self.kv[group].lose(slots)
            self._recurrent.lose()
            self.outbox.drop()

    def _expect_fitting(self, forward: CopiedForward) -> None:
        """Raise a `ValueError` for what no engine can mean: whatever it did wrong, this was said wrong."""
        height = min(table.rows for table in self.header.tables) if self.header.tables else 1
        rows = forward.rows
        if ((rows < 0) | (rows >= height)).any():
            raise ValueError(
                f"req_pool_indices are {rows.tolist()}, expected 0 (padding) to {height - 1}: the tables' rows"
            )
        for name in ("prefix_lens", "extend_lens"):
            if (getattr(forward, name) < 0).any():
                raise ValueError(f"{name} are {getattr(forward, name).tolist()}, expected none below 0")
        live = forward.request_ids[rows != 0].tolist()
        if unknown := set(live) - self._said_requests:
            raise ValueError(f"request_ids has {sorted(unknown)[:3]}, of which request() has said nothing")
        if forward.truth is not None and self.header.truth_table is None:
            raise ValueError("truth came, the header has no truth_table: it would not be recorded")

    def _end_pending(self, note: str) -> None:
        if self._pending is not None:
            self.after_forward(note=note, failed=True)

    def _finish_forward(self, forward: CopiedForward, submitted: Submitted | None = None) -> None:
        self._pending = None
        mine = of_runner(self.kv, forward.runner)
        gathered = {n: [kv.gather(s, forward.written[n]) for s in range(len(kv.sources))] for n, kv in mine}
        if self.header.states:
            forward.recurrent = self._recurrent.end()
        if submitted and not forward.failed:
            add_submitted(forward, submitted, self.kv, gathered)
        if not forward.failed:
            forward.values = written_values(forward, self.kv)
        if forward.kv_watched:
            watch(forward, self.kv, PHASE_AFTER)
        if not self._put(forward_event(forward, gathered)):
            for number, kv in mine:
                kv.lose(forward.written[number])
            return
        self.state.commit(forward)
        store_forward(forward, self.kv, gathered)


__all__ = ["Recorder", "RecorderStats", "prepare_kernels"]
