"""Replay against a second canary: plain dicts, written from the semantics page alone, on forwards no engine would run.

The toy engine's traces are those of a scheduler; these are not. Rows repeat and pad in the middle, slots repeat across
requests, tables hold slot 0 and negative slots, every pool kind stands in one header, and slots are copied between tiers.
"""

import struct
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import PoolGroup
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.random_forwards import HEADER, WIDTH, forward, kv_copy

WORD = (1 << 64) - 1
LAUNCHES = {"HEAD": 0, "TAIL": 2}


def s(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & WORD
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


def signed(x: int) -> int:
    x &= WORD
    return x - (1 << 64) if x >> 63 else x


class Naive:
    """Every state a dict with the default zero; `rows` is what a replay must report."""

    def __init__(self, kv_hash: str) -> None:
        self.kv_hash = kv_hash
        self.table: dict = defaultdict(int)  # (table, row, position) -> slot
        self.lut: dict = defaultdict(int)
        self.truth: dict = defaultdict(int)
        self.records: dict = defaultdict(lambda: (0, 0, 0, 0))  # (group, tier, endpoint, half, slot)
        self.kv: dict = defaultdict(bytes)  # (group, tier, stream, slot)
        self.writers: dict = defaultdict(lambda: (-1, -1, -1))  # (group, tier, slot)
        self.rows: list[tuple] = []

    def take(self, number: int, event: TraceEvent) -> None:
        self.event, self.e = number, {name: values.tolist() for name, values in event.ints.items()}
        if event.kind == "kv_copy":
            self.copy()
            return
        self.forward, self.runner = event.scalars["forward"], event.scalars["runner"]
        self.runs()
        groups = [(n, g) for n, g in enumerate(HEADER.groups) if g.runner == self.runner]
        plans = {n: self.plan(g) for n, g in groups}
        for n, group in groups:
            for half in group.halves:
                self.verify("HEAD", n, group, half, plans[n][0])
                self.write("HEAD", n, group, half, plans[n])
        self.changes(0, event)
        for n, group in groups:
            if group.reads_before_write:
                for half in group.halves:
                    self.verify("TAIL", n, group, half, plans[n][0])
        self.bytes(event)
        self.changes(1, event)
        for n, group in groups:
            for half in group.halves:
                if not group.reads_before_write:
                    self.verify("TAIL", n, group, half, plans[n][0])
                self.write("TAIL", n, group, half, plans[n])
        for n, _ in groups:
            for _, _, request_id, start, count in plans[n][1]:
                for i in range(start, start + count):
                    self.writers[n, 0, plans[n][2][i]] = (number, self.forward, request_id)
        self.after()

    def runs(self) -> None:
        e, at = self.e, 0
        for index, row, start, count in zip(
            e["table_index"], e["table_row"], e["table_start"], e["table_count"], strict=True
        ):
            for i in range(count):
                self.table[index, row, start + i] = e["table_slots"][at + i]
            at += count
        for index, start, slot in zip(e["lut_index"], e["lut_start"], e["lut_slots"], strict=True):
            self.lut[index, start] = slot
        for row, start, token in zip(e["truth_row"], e["truth_start"], e["truth_tokens"], strict=True):
            self.truth[row, start] = token

    def after(self) -> None:
        e, at, sampled = self.e, 0, 0
        tokens = len(e["input_ids"])
        for r, row in enumerate(e["req_pool_indices"]):
            if not row:
                continue
            for i in range(e["extend_lens"][r]):
                for t in range(2):
                    self.table[t, row, e["prefix_lens"][r] + i] = e["out_cache_loc"][t * tokens + at + i]
            at += e["extend_lens"][r]
            for i in range(e["sampled_lens"][r]):
                position = e["prefix_lens"][r] + e["extend_lens"][r] + i
                if position < WIDTH:
                    self.truth[row, position] = e["sampled_tokens"][sampled + i]
            sampled += e["sampled_lens"][r]

    def plan(self, group: PoolGroup):
        e, entries, writes, at = self.e, [], [], 0
        tokens = len(e["input_ids"])

        def swa(slot: int) -> int:
            return self.lut[group.lut, slot] if group.lut >= 0 and slot >= 0 else slot

        def cell(row: int, position: int) -> int:
            return swa(self.table[group.table, row, position])

        offset = HEADER.runners[group.runner].token_offset
        for r, row in enumerate(e["req_pool_indices"]):
            if not row:
                continue
            prefix, extend, request_id = e["prefix_lens"][r], e["extend_lens"][r], e["request_ids"][r]
            for p in range(max(0, prefix - group.window) if group.window else 0, prefix):
                known = e["truth_lens"] and p + offset < e["truth_lens"][r]
                token = self.truth[row, p + offset] if known else -1
                entries.append((cell(row, p), cell(row, p - 1) if p else -1, p, token, request_id, row))
            seed = cell(row, prefix - 1) if extend and prefix else -1
            if group.window and group.lut < 0 and extend and e["out_cache_loc"][group.table * tokens + at] < 0:
                seed = -1  # a ring keeps nothing of the token before
            writes.append((seed, row, request_id, at, extend))
            at += extend
        return entries, writes, [swa(slot) for slot in e["out_cache_loc"][group.table * tokens :][:tokens]]

    def slot_hash(self, buffer: tuple, slot: int) -> int:
        if slot < 0:
            return s(0xC0FFEE1234567890)
        token, position, prev, _ = self.records[*buffer, slot]
        return s(s(s(prev & WORD) ^ token & WORD) ^ position & WORD)

    def hash_of(self, n: int, group: PoolGroup, half: str, endpoint: str, slot: int) -> int:
        sources = [(i, x) for i, x in enumerate(group.streams) if x.half == half]
        if endpoint == "HEAD" or not sources or self.kv_hash == "none":
            return 0
        folded = []
        for i, stream in sources:
            data, acc = self.kv[n, 0, i, slot] or bytes(stream.capture_bytes), 0
            for (word,) in struct.iter_unpack("<Q", data[: 16 if self.kv_hash == "partial" else None]):
                acc = s(acc ^ word)
            folded.append(acc)
        total = 0
        for acc in folded:
            total = s(total ^ acc)
        return signed(total)

    def row(self, endpoint, n, group, half, fields, request_id, row, expected_position, writer) -> None:
        tag = LAUNCHES[endpoint] + (half == "V") + 6 * (group.kind == "swa")
        self.rows.append((self.event, n, endpoint, half, tag, *fields, request_id, row, expected_position, *writer))

    def verify(self, endpoint, n, group, half, entries) -> None:
        buffer = (n, 0, endpoint, half)
        for slot, prev, position, token, request_id, row in entries:
            if slot <= 0:  # padding; a negative slot cannot be read and is a finding, not a row
                continue
            stored = self.records[*buffer, slot]
            chain = signed(self.slot_hash(buffer, prev)) if prev else stored[2]
            bits = (stored[2] != chain) | (stored[1] != position) << 1
            bits |= (stored[3] != self.hash_of(n, group, half, endpoint, slot)) << 2
            bits |= bool(self.e["truth_lens"] and token != -1 and stored[0] != token) << 5
            if bits:
                fields = (slot, stored[1], stored[0], token, stored[2], chain, bits)
                self.row(endpoint, n, group, half, fields, request_id, row, position, self.writers[n, 0, slot])

    def write(self, endpoint, n, group, half, plan) -> None:
        buffer = (n, 0, endpoint, half)
        for seed, row, request_id, start, count in plan[1]:
            running = self.slot_hash(buffer, seed)
            last = self.records[*buffer, seed][1] if seed >= 0 else None
            for i in range(start, start + count):
                slot, token, position = plan[2][i], self.e["input_ids"][i], self.e["positions"][i]
                if slot < 0:
                    continue
                if last is not None:
                    if position != last + 1:
                        fields = (slot, position, token, token, signed(running), last + 1, 16)
                        writer = (self.event, self.forward, request_id)
                        self.row(endpoint, n, group, half, fields, request_id, row, last + 1, writer)
                    last = position
                kv_hash = self.hash_of(n, group, half, endpoint, slot)
                self.records[*buffer, slot] = (token, position, signed(running), kv_hash)
                running = s(s(s(running) ^ token & WORD) ^ position & WORD)

    def bytes(self, event: TraceEvent) -> None:
        data, tokens = event.bytes["kv_bytes"].tobytes(), len(self.e["input_ids"])
        for n, group in enumerate(HEADER.groups):
            if group.runner != self.runner:
                continue
            slots = self.plan(group)[2]
            for i, stream in enumerate(group.streams):
                for slot in slots:
                    if slot >= 0:
                        self.kv[n, 0, i, slot] = data[: stream.capture_bytes]
                    data = data[stream.capture_bytes :]
        assert not data
        assert tokens == len(self.e["positions"])

    def changes(self, phase: int, event: TraceEvent) -> None:
        places = [
            (n, i, x) for n, g in enumerate(HEADER.groups) if g.runner == self.runner for i, x in enumerate(g.streams)
        ]
        data = event.bytes["kv_change_bytes"].tobytes()
        for stream, slot, when in zip(
            self.e["kv_change_stream"], self.e["kv_change_slot"], self.e["kv_change_phase"], strict=True
        ):
            n, i, kind = places[stream]
            if when == phase:
                self.kv[n, 0, i, slot] = data[: kind.capture_bytes]
            data = data[kind.capture_bytes :]

    def copy(self) -> None:
        e = self.e
        for src_tier, src, dst_tier, dst, count in zip(
            e["copy_src_tier"], e["copy_src"], e["copy_dst_tier"], e["copy_dst"], e["copy_count"], strict=True
        ):
            for state in (self.records, self.kv, self.writers):
                had = {key: value for key, value in state.items() if key[:2] == (0, src_tier)}
                for key in [k for k in state if k[:2] == (0, dst_tier) and dst <= k[-1] < dst + count]:
                    del state[key]
                for key, value in had.items():
                    if src <= key[-1] < src + count:
                        state[0, dst_tier, *key[2:-1], key[-1] - src + dst] = value


@pytest.mark.parametrize("kv_hash", ["none", "partial", "all"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.one_in(3)
def test_replay_reports_the_naive_models_rows(seed: int, kv_hash: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    naive = Naive(kv_hash)
    trace = tmp_path / "t.arrow"
    with TraceWriter(trace, HEADER) as writer:
        for number in range(60):
            event = kv_copy(rng) if rng.random() < 0.15 else forward(rng, number)
            assert writer.append(event)
            naive.take(number, event)
    replay(trace, settings=ReplaySettings(kv_hash=kv_hash, merge_rows=False), report=tmp_path)
    table = pq.read_table(tmp_path / "violations.parquet")
    names = (
        *("event", "group", "endpoint", "half", "launch_tag", "slot", "position", "stored_token", "expected_token"),
        *("stored_chain_hash", "expected_aux", "fail_reason_bits", "request_id", "req_pool_idx", "expected_position"),
        *("writer_event", "writer_forward", "writer_request_id"),
    )
    came = sorted(zip(*(table[name].to_pylist() for name in names), strict=True))
    assert len(came) > 200
    assert came == sorted(naive.rows)
