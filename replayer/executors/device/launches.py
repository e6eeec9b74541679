"""One forward on the device: what its launches take is sent there in one copy, then they are launched, one after another.

Nothing here waits for the device, but for forwards in which bytes changed without a write.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.constants import UNKNOWN_TOKEN
from ....kernels.ops.plan.reference import VerifyPlan, WritePlan
from ....kernels.ops.plan_verify.reference import CanaryBuffer, plan_verify, write_shared
from ....kernels.ops.verify.reference import verify
from ....recorder.state.forward import Forward
from ....recorder.state.pools import GroupPool
from ....recorder.state.tables import StateTables
from ....recorder.state.writes import KvChanges
from ....recorder.trace.header import TraceHeader
from ....recorder.trace.schema import PHASE_AFTER, PHASE_BEFORE
from ...run.planning import GroupStep
from .arena import Arena
from .logs import Logs
from .mirror import Mirror, TableNotes


@dataclass(frozen=True, slots=True, kw_only=True)
class _SentStep:
    """A group's part of a forward on the device; `longest` is the longest prefix."""

    step: GroupStep
    prefix_lens: Any
    longest: int
    slots: Any
    plan: WritePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class _SentForward:
    """A forward's arrays on the device, None where it has none; `stores` has words, slots and their bytes of each stream."""

    rows: Any
    input_ids: Any
    positions: Any
    truth_lens: Any | None
    expected: Any | None
    token_offset: int
    steps: list[_SentStep]
    stores: list[tuple[Any, Any, Any]]


class ForwardLaunches:
    """Launches forwards on the state's copy on a device; `logs` holds what they find.

    `pools` have on the host only what was brought there; `notes` is what changes in the host's tables, `backend` that of the
    loops that the host runs.
    """

    def __init__(
        self, header: TraceHeader, pools: list[GroupPool], notes: TableNotes, device: Any, *, backend: str
    ) -> None:
        self._header = header
        self._pools = pools
        self._backend = backend
        self.mirror = Mirror(header, pools, notes, device)
        self._notes = notes
        self.logs = Logs(pools, self.mirror.pools, device)
        self._arena = Arena(device)
        self._last_places = [np.zeros(pool.num_slots, np.int64) for pool in pools]

    def clear(self) -> None:
        """Forget what was sent: all launches are over."""
        self._arena.clear()

    def has_room(self, forward: Forward, steps: list[GroupStep]) -> bool:
        """Whether a forward and all that it may find have room beside those under way."""
        tokens = forward.num_tokens
        return self._arena.has_room(self._words(forward, steps)) and all(
            self.logs.has_room(step.pool.index, entries=step.reads, tokens=tokens) for step in steps
        )

    def make_room(self, forward: Forward, steps: list[GroupStep]) -> None:
        """Make room for a forward, none being under way."""
        self._arena.clear(self._words(forward, steps))
        self.logs.make_room(entries=max((step.reads for step in steps), default=0), tokens=forward.num_tokens)

    def _words(self, forward: Forward, steps: list[GroupStep]) -> int:
        """Return more words than a forward takes of the arena."""
        bs, tokens, groups = len(forward.req_pool_indices), forward.num_tokens, len(steps)
        words = 256 + (bs + 8) * (3 + 4 * groups) + (tokens + 2) * (4 + 3 * groups) + 2 * self._notes.num_cells
        return words + sum(data.size // 4 + 4 for data in forward.kv_bytes)

    def launch(
        self,
        forward: Forward,
        changes: KvChanges,
        steps: list[GroupStep],
        prefix_lens: list[Int64Array],
        expected: Int64Array | None,
        tables: StateTables,
        *,
        on_stored: Callable[[], None],
    ) -> None:
        """Send a forward and launch it.

        `changes` are the bytes that changed in it, `steps` what it writes and how much it reads, `prefix_lens` of each group,
        `[bs] int64`, as far as its table reaches, `expected` `[T] int64` what its inputs must be, None where nobody knows;
        `tables` are the host's, as it finds them; `on_stored` is called where its bytes land in the pools.
        """
        arena, mirror = self._arena, self.mirror
        cells = mirror.send_noted(tables, arena, backend=self._backend)
        sent = self._send(forward, steps, prefix_lens, expected)
        arena.send()
        mirror.put_cells(cells)
        steps_sent = sent.steps if len(forward.req_pool_indices) else []
        self._change_bytes(changes, PHASE_BEFORE)
        # A ring buffer's prefix is read before this forward's own writes land on it, so that is when it is judged.
        for one in steps_sent:
            if one.step.pool.group.reads_before_write:
                self._verify(one, sent)
        for words, slots, data in sent.stores:
            words.index_copy_(0, slots, data)
        on_stored()
        self._change_bytes(changes, PHASE_AFTER)
        for one in steps_sent:
            if not one.step.pool.group.reads_before_write:
                self._verify(one, sent)
        for one in steps_sent:
            self._write(one, sent)
            self.logs.count(one.step.pool.index, entries=one.step.reads, tokens=forward.num_tokens)
        self.logs.mark()

    def _send(
        self, forward: Forward, steps: list[GroupStep], prefix_lens: list[Int64Array], expected: Int64Array | None
    ) -> _SentForward:
        put_rows = self._arena.put_rows
        steps_sent = [self._send_step(step, prefix_lens[step.pool.index]) for step in steps]
        rows, *truth_lens = put_rows(forward.req_pool_indices, *_given(forward.truth_lens))
        input_ids, positions, *wanted = put_rows(forward.input_ids, forward.positions, *_given(expected))
        return _SentForward(
            rows=rows,
            input_ids=input_ids,
            positions=positions,
            truth_lens=truth_lens[0] if truth_lens else None,
            expected=wanted[0] if wanted else None,
            token_offset=self._header.runners[forward.runner].token_offset,
            steps=steps_sent,
            stores=self._send_bytes(forward, steps_sent),
        )

    def _send_step(self, step: GroupStep, prefix_lens: Int64Array) -> _SentStep:
        import torch

        bs, plan = len(prefix_lens), step.write_plan
        prefix, seeds = self._arena.put_rows(prefix_lens, plan.seed_slots[:bs])
        # The prefix sums, and behind them how many requests there are.
        offsets, offsets_there = self._arena.take(bs + 4)
        offsets[: bs + 1] = plan.offsets[: bs + 1]
        count_at = bs + 2 + bs % 2
        offsets[count_at] = bs
        return _SentStep(
            step=step,
            prefix_lens=prefix,
            longest=int(prefix_lens.max(initial=1)),
            slots=self._arena.put(step.slots),
            plan=WritePlan(
                offsets=offsets_there[: bs + 1],
                seed_slots=seeds,
                num_valid_reqs=offsets_there[count_at : count_at + 1].view(torch.int32)[:1],
            ),
        )

    def _send_bytes(self, forward: Forward, steps: list[_SentStep]) -> list[tuple[Any, Any, Any]]:
        kept: dict[int, tuple[Any, Any]] = {}
        for one in steps:
            mine, index = one.step.slots, one.step.pool.index
            places, numbers = self._last_places[index], np.arange(len(mine))
            inside = (mine >= 0) & (mine < len(places))
            if inside.all():
                places[mine] = numbers  # of a slot that comes twice the last one stays
                keep = places[mine] == numbers
            else:
                places[mine[inside]] = numbers[inside]
                keep = inside & (places[np.where(inside, mine, 0)] == numbers)
            kept[index] = (None, one.slots) if keep.all() else (keep, self._arena.put(mine[keep]))
        found = []
        seen = dict.fromkeys(kept, 0)
        for (group, _), data in zip(self._header.streams(forward.runner), forward.kv_bytes, strict=True):
            keep, where = kept[group]
            words = self.mirror.pools[group].kv[seen[group]]
            seen[group] += 1
            if len(where):
                found.append((words, where, self._arena.put_bytes(data if keep is None else data[keep])))
        return found

    def _change_bytes(self, changes: KvChanges, phase: int) -> None:
        """Put bytes that were seen to change into the pools; the host does it, with those slots alone."""
        if not changes:
            return
        slots = [np.unique(changes.slots_of(pool.index)) for pool in self._pools]
        for pool, some in zip(self._pools, slots, strict=True):
            self.mirror.pull_bytes(pool, some)
        changes.apply(phase, self._pools, backend=self._backend)
        for pool, some in zip(self._pools, slots, strict=True):
            self.mirror.push_bytes(pool, some)

    def _sharing(self, pool: GroupPool, buffers: list[CanaryBuffer]) -> list[list[CanaryBuffer]]:
        """Return the buffers that go into one launch: all, unless a damaged keyframe made their records differ."""
        return [buffers] if self.mirror.pools[pool.index].alike else [[buffer] for buffer in buffers]

    def _verify(self, one: _SentStep, sent: _SentForward) -> None:
        pool = one.step.pool
        buffers = self.logs.groups[pool.index]
        if pool.any_unknown:
            self._verify_planned(one.step, buffers.verify, check_tokens=sent.truth_lens is not None)
            return
        for some in self._sharing(pool, buffers.verify):
            plan_verify(
                req_pool_indices=sent.rows,
                prefix_lens=one.prefix_lens,
                # No wider than it is read: the op shares out the width.
                req_to_token=self.mirror.tables[pool.group.table][:, : one.longest],
                window=pool.group.window,
                full_to_swa=self.mirror.luts[pool.group.lut] if pool.group.lut >= 0 else None,
                truth_tokens=None if sent.truth_lens is None else self.mirror.truth,
                truth_lens=sent.truth_lens,
                token_offset=sent.token_offset,
                check_tokens=sent.truth_lens is not None,
                low_bits=True,
                buffers=some,
                out_of_range=buffers.plan_beyond,
                backend="triton",
            )

    def _verify_planned(self, step: GroupStep, buffers: Sequence[CanaryBuffer], *, check_tokens: bool) -> None:
        """Verify what the host planned: it has left out what stands on lost events."""
        import torch

        plan, mirror = step.verify_plan, self.mirror.pools[step.pool.index]
        count = int(plan.num_valid[0])
        arrays = (plan.slots, plan.expected_positions, plan.prev_slots, plan.expected_tokens)
        slots, positions, prevs, expected = (torch.from_numpy(a[:count]).to(self.mirror.device) for a in arrays)
        # What `expect_stored` does: a truth token has the low 32 bits of the stored one, unless that is unknown.
        words = mirror.tail[step.pool.group.halves[0]].view(torch.int64)
        inside = (slots > 0) & (slots < step.pool.num_slots)
        stored = words[torch.where(inside, slots, 0), 0]
        agree = inside & ((stored == UNKNOWN_TOKEN) | (stored.to(torch.int32) == expected))
        there = VerifyPlan(
            slots=slots,
            expected_tokens=torch.where(agree & (expected != UNKNOWN_TOKEN), stored, expected),
            expected_positions=positions,
            prev_slots=prevs,
            num_valid=torch.tensor([count], dtype=torch.int32, device=slots.device),
            enable=torch.ones(1, dtype=torch.int32, device=slots.device),
            request_offsets=torch.zeros(1, dtype=torch.int64, device=slots.device),
        )
        for buffer in buffers:
            verify(plan=there, check_tokens=check_tokens, backend="triton", **buffer.arguments)

    def _write(self, one: _SentStep, sent: _SentForward) -> None:
        for some in self._sharing(one.step.pool, self.logs.groups[one.step.pool.index].write):
            write_shared(
                plan=one.plan,
                input_ids=sent.input_ids,
                positions=sent.positions,
                out_cache_loc=one.slots,
                expected_tokens=sent.expected,
                expected_positions=None if sent.expected is None else sent.positions,
                chain_step_assert=True,
                buffers=some,
                backend="triton",
            )


def _given(values: Int64Array | None) -> tuple[Int64Array, ...]:
    return () if values is None else (values,)
