"""A small engine of torch tensors whose forwards both recorders take down, the host's and the device's."""

import threading

import numpy as np
import torch
from kvcanary.kernels.capture import model_forward
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.recorder.capture.device.forward import BatchRequests, DeviceForward
from kvcanary.recorder.capture.device.recorder import DeviceRecorder
from kvcanary.recorder.capture.forward_input import ForwardInput, TruthTokens
from kvcanary.recorder.capture.kv_tensor import KvTensor
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import KvStream, PoolGroup, Runner, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import TraceReader

# The interpreter runs one program after another: few of them, but more than one for each request.
model_forward.PROGRAMS = 6
model_forward.TILE = 16

VALUES = ("request", "stream", "kind", "layer", "token", "rows")
ROWS, WIDTH, SLOTS, SWA_SLOTS, BYTES, CAPTURE = 6, 40, 160, 96, 48, 16


class Tokens:
    def __init__(self, tokens):
        self.all = tokens

    def tokens(self, start, stop):
        return np.array(self.all[start:stop], np.int64)


LAYOUTS = {  # of a layer, [slots, heads, dim]
    "slot head dim": lambda rows: rows,
    "head slot dim": lambda rows: rows.transpose(0, 1).contiguous(),
    "block slot head dim": lambda rows: rows.reshape(-1, 4, *rows.shape[1:]),
    "block head slot dim": lambda rows: rows.reshape(-1, 4, *rows.shape[1:]).transpose(1, 2).contiguous(),
}
SAMPLED_LAYERS, HEADS, DIM = 3, 2, 32


class Engine:
    """`swa` adds a sliding-window group behind a full-to-SWA table, `int_type` is what its tensors hold; `sampled` are an
    axes string and a float type: then all layers of pools of that are sampled, and searched.
    """

    def __init__(
        self, folder, rng, *, swa=False, int_type=torch.int64, lut_type=torch.int64, watch_every=1, sampled=None, **more
    ):
        self.rng, self.int_type = rng, int_type
        self.table = torch.zeros((ROWS, WIDTH), dtype=torch.int32)
        self.luts = [torch.zeros(SLOTS, dtype=lut_type)] if swa else []
        sizes = [SLOTS, SWA_SLOTS][: 1 + swa]
        self.pools = {
            (g, s): torch.from_numpy(rng.integers(0, 256, (size, BYTES), dtype=np.uint8))
            for g, size in enumerate(sizes)
            for s in range(2)
        }
        streams = tuple(KvStream(half=half, bytes_per_token=BYTES, capture_bytes=CAPTURE) for half in "KV")
        self.layers, more_streams, tensors = {}, (), {}
        for g, size in enumerate(sizes if sampled else ()):
            axes, dtype = sampled
            for s, half in enumerate("KV"):
                given = rng.integers(0, 256, (SAMPLED_LAYERS, size, HEADS, DIM * dtype.itemsize), dtype=np.uint8)
                rows = finite(torch.from_numpy(given).view(dtype))
                self.layers[g, s] = [LAYOUTS[axes](layer) for layer in rows]
                tensors[g, s] = KvTensor(tensor=tuple(self.layers[g, s]), axes=axes)
                if not g:
                    stream = tensors[g, s].sampling_stream(half, layers=tuple(range(SAMPLED_LAYERS)), seed=11)
                    more_streams += (stream,)
        streams += more_streams
        groups = [PoolGroup(name="full", num_slots=SLOTS, streams=streams)]
        if swa:
            groups.append(PoolGroup(name="swa", kind="swa", window=7, lut=0, num_slots=SWA_SLOTS, streams=streams))
        header = TraceHeader(
            groups=tuple(groups),
            tables=(StateTable(rows=ROWS, width=WIDTH),),
            lut_lens=(SLOTS,) if swa else (),
            truth_table=StateTable(name="truth", rows=ROWS, width=WIDTH),
            runners=(Runner(),),
        )
        sources = {
            key: KvSource(tensor=pool, page_size=1, bytes_per_token=BYTES, read_bytes=CAPTURE)
            for key, pool in self.pools.items()
        } | {(g, 2 + s): source for (g, s), source in tensors.items()}
        self.host = Recorder(folder / "host.arrow", header, kv_sources=sources, kv_watch_every=watch_every)
        self.device = DeviceRecorder(
            folder / "device.arrow",
            header,
            tables=[self.table],
            luts=self.luts,
            kv_sources=sources,
            kv_watch_every=watch_every,
            **more,
        )
        self.truth = {row: Tokens([]) for row in range(ROWS)}
        self.seen = []  # of each forward, the tables as it reads them

    def ints(self, values):
        return torch.tensor(values, dtype=self.int_type)

    def forward(self, mode, rows, prefix, extend, loc, ids, positions, *, during=lambda: None):
        self.seen.append((self.table.clone().numpy(), [lut.clone().to(torch.int64).numpy() for lut in self.luts]))
        truth = [self.truth[row] for row in rows]
        lens = [len(tokens.all) for tokens in truth]
        flat = [token for tokens in truth for token in tokens.all]
        ids_of = np.array(rows, np.int64) * 7
        self.host.before_forward(
            ForwardInput(
                mode=mode,
                request_ids=ids_of,
                req_pool_indices=rows,
                prefix_lens=prefix,
                extend_lens=extend,
                input_ids=ids,
                positions=positions,
                out_cache_loc=(np.pad(np.array(loc, np.int64), (0, len(ids) - len(loc)), constant_values=-1),),
                reads=(self.table,),
                luts=tuple(self.luts),
                truth=TruthTokens(flat=np.array(flat, np.int64), lens=lens),
            )
        )
        equal = len(set(extend)) == 1 and mode == "decode"
        # As a draft-extend tells it: a length, and what is to be taken off it.
        split = mode == "draft_extend"
        self.device.before_forward(
            DeviceForward(
                mode=mode,
                runner=0,
                rows=self.ints(rows),
                prefix=self.ints([p + e for p, e in zip(prefix, extend, strict=True)] if split else prefix),
                minus=self.ints(extend) if split else None,
                extend=None if equal else self.ints(extend),
                extend_each=extend[0] if equal else 0,
                input_ids=self.ints(ids),
                positions=self.ints(positions),
                out_cache_loc=self.ints(loc),
                num_tokens=len(ids),
                requests=BatchRequests(ids=ids_of, truth=truth),
                truth_lens=lens,
            )
        )
        during()
        self.host.after_forward()
        self.device.after_forward()

    def hold_frames(self):
        """Have no frame read until the returned event is set."""
        gate = threading.Event()
        self.device.later(gate.wait)
        return gate

    def refuse_events(self):
        """Return a list whose one item says whether the device recorder's writer refuses what it gets."""
        refuse = [False]
        writer = self.device.recorder.outbox.writer
        append, has_room = writer.append, writer.has_room
        writer.append = lambda *events, **more: False if refuse[0] else append(*events, **more)
        writer.has_room = lambda size: not refuse[0] and has_room(size)
        return refuse

    def close(self):
        """Return the events of both recorders."""
        self.host.close()
        self.device.close()
        assert self.host.stats().off == self.device.stats().off == "closed"
        return events(self.host.path), events(self.device.path)


def finite(rows):
    """Return random floats without any that no model writes, and not all zeros."""
    dtype, rows = rows.dtype, rows.float()
    rows = torch.where(torch.isfinite(rows), rows, 1.0)
    return torch.where(rows.abs() < 0.01, 0.5, rows.clamp(-200, 200)).to(dtype)


def events(path):
    with TraceReader(path) as reader:
        return [
            {
                "kind": view.kind,
                **{name: view.scalar(name) for name in ("forward", "mode", "kv_watched", "request_id", "name", "note")},
                "lost_events": view.scalar("lost_events"),
                **_cells(view, "table", ("table_index", "table_row"), "table_slots"),
                **_cells(view, "lut", ("lut_index",), "lut_slots"),
                **_cells(view, "truth", ("truth_row",), "truth_tokens"),
                **{
                    name: view.ints(name).tolist()
                    for name in (
                        "req_pool_indices",
                        "request_ids",
                        "prefix_lens",
                        "extend_lens",
                        "truth_lens",
                        "input_ids",
                        "positions",
                        "out_cache_loc",
                        "sampled_tokens",
                        "slot_start",
                        "slot_count",
                    )
                },
                "values": sorted(zip(*(view.ints(f"value_{name}").tolist() for name in VALUES), strict=True)),
                "kv_bytes": view.bytes("kv_bytes").tobytes(),
                "kv_changes": _kv_changes(view),
            }
            for batch in reader.stream()
            for view in batch
        ]


def _cells(view, prefix, keys, values):
    """Changes cell by cell: runs may be cut otherwise."""
    starts, counts = view.ints(f"{prefix}_start"), view.ints(f"{prefix}_count")
    flat = view.ints(values)
    columns = [view.ints(key) for key in keys]
    cells, at = {}, 0
    for i, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        for j in range(count):
            cells[(*(int(column[i]) for column in columns), start + j)] = int(flat[at + j])
        at += count
    assert at == len(flat)
    return {prefix: cells}


def _kv_changes(view):
    content = view.bytes("kv_change_bytes").reshape(-1, CAPTURE)
    columns = [view.ints(f"kv_change_{name}").tolist() for name in ("stream", "slot", "phase")]
    return sorted((*place, row.tobytes()) for *place, row in zip(*columns, content, strict=True))


def random_forward(engine, rng):
    """One forward of a careless engine: any rows, lengths, slots and tokens; tables and bytes change at random."""
    for _ in range(int(rng.integers(0, 4))):
        row, start = int(rng.integers(0, ROWS)), int(rng.integers(0, WIDTH))
        count = int(rng.integers(1, 12))
        cells = engine.table[row, start : start + count]
        cells.copy_(torch.from_numpy(rng.integers(-2, SLOTS + 3, len(cells), dtype=np.int32)))
    for lut in engine.luts:
        start = int(rng.integers(0, SLOTS))
        cells = lut[start : start + int(rng.integers(0, 9))]
        cells.copy_(torch.from_numpy(rng.integers(-1, SWA_SLOTS + 2, len(cells))).to(lut.dtype))
    for pool in engine.pools.values():
        if rng.random() < 0.3:
            pool[int(rng.integers(0, len(pool))), int(rng.integers(0, BYTES))] ^= 0x40
    mode = str(rng.choice(["decode", "extend", "draft_extend", "target_verify"]))
    bs = int(rng.integers(0, 5))
    rows = rng.permutation(ROWS + 1)[:bs].tolist()  # row 0 is padding, one row is beyond the table
    rows = sorted((min(row, ROWS + 3) for row in rows), key=lambda row: row == 0)  # padding comes last
    prefix = rng.integers(0, WIDTH + 4, bs).tolist()
    extend = [1] * bs if mode == "decode" else rng.integers(0, 9, bs).tolist()
    tokens = sum(e for row, e in zip(rows, extend, strict=True) if row) + int(rng.integers(0, 3))
    known = max(tokens - int(rng.integers(0, 2)), 0)
    loc = rng.integers(-1, SLOTS + 2, known)
    for row in rows:
        if row in engine.truth:
            engine.truth[row].all += rng.integers(1, 99, int(rng.integers(0, 5))).tolist()
        else:
            engine.truth[row] = type(engine.truth[0])([])

    def during():
        """What the model writes, and what else happens while it runs."""
        for (group, _), pool in engine.pools.items():
            slots = loc if not group else [int(engine.luts[0][s]) if 0 <= s < SLOTS else -1 for s in loc]
            for slot in slots:
                if 0 <= slot < len(pool):
                    pool[slot] = torch.from_numpy(rng.integers(0, 256, BYTES, dtype=np.uint8))
            if rng.random() < 0.5:
                pool[int(rng.integers(0, len(pool))), int(rng.integers(0, BYTES))] ^= 0x08
        for (group, _), layers in engine.layers.items():
            slots = loc if not group else [int(engine.luts[0][s]) if 0 <= s < SLOTS else -1 for s in loc]
            write_layers(layers, [slot for slot in slots if 0 <= slot < [SLOTS, SWA_SLOTS][group]], rng)

    ids, positions = rng.integers(0, 99, tokens).tolist(), rng.integers(0, WIDTH, tokens).tolist()
    engine.forward(mode, rows, prefix, extend, loc.tolist(), ids, positions, during=during)


def write_layers(layers, slots, rng):
    """Write some slots of all layers, now and then what no model writes, and change a value that nobody wrote."""
    for layer in layers:
        flat = layer.view(torch.uint8)
        for slot in slots:
            row = rows_of(layer, slot)
            given = rng.integers(0, 256, (HEADS, DIM * layer.dtype.itemsize), dtype=np.uint8)
            row.copy_(finite(torch.from_numpy(given).view(layer.dtype)))
            chance = rng.random()
            if chance < 0.04:
                row[int(rng.integers(0, HEADS)), int(rng.integers(0, DIM))] = float("nan")
            elif chance < 0.08:  # some types have no infinity: then it is a NaN
                row[int(rng.integers(0, HEADS)), int(rng.integers(0, DIM))] = float("-inf")
            elif chance < 0.1:
                row.fill_(-0.0)
            elif chance < 0.16:  # of which a type of 8 bits says something, if it is the whole row
                row.copy_(torch.from_numpy(rng.integers(-1, 2, (HEADS, DIM))) * torch.finfo(row.dtype).max)
            if 0.14 < chance < 0.16:
                row[int(rng.integers(0, HEADS)), int(rng.integers(0, DIM))] = 1.0
        if rng.random() < 0.5:
            flat.view(-1)[int(rng.integers(0, flat.numel()))] ^= 0x01


def rows_of(layer, slot):
    """Return a slot's row of a layer in any of the layouts, `[heads, dim]`."""
    if layer.dim() == 3:
        return layer[slot] if layer.shape[1] == HEADS else layer[:, slot]
    page = layer[slot // 4]
    return page[slot % 4] if page.shape[1] == HEADS else page[:, slot % 4]


def follow(engine, events):
    """Replay the tables; return the forwards told, the losses counted and whether one of them lost everything."""
    table, lut = np.zeros((ROWS, WIDTH), np.int64), np.zeros(SLOTS, np.int64)
    truth = {}
    told, lost, unknown = [], 0, 0
    for event in events:
        if event["kind"] == "loss":
            lost += max(event["lost_events"], 0)
            if event["lost_events"] < 0:
                unknown += 1
                table[:], lut[:] = 0, 0
                truth.clear()
            continue
        assert event["kind"] == "forward"
        told.append(event["forward"])
        for (_, row, position), slot in event["table"].items():
            table[row, position] = slot
        for (_, full), swa in event["lut"].items():
            lut[full] = swa
        for (row, position), token in event["truth"].items():
            truth[row, position] = token
        real, real_luts = engine.seen[event["forward"]]
        rows, prefix, extend = (event[name] for name in ("req_pool_indices", "prefix_lens", "extend_lens"))
        for r, row in enumerate(rows):
            if 0 < row < ROWS:
                read = slice(0, min(prefix[r], WIDTH))
                assert table[row, read].tolist() == real[row, read].tolist()
                for real_lut in real_luts:
                    slots = real[row, read]
                    slots = slots[(slots >= 0) & (slots < SLOTS)]
                    assert lut[slots].tolist() == real_lut[slots].tolist()
                for position in range(min(event["truth_lens"][r], WIDTH)):
                    assert truth[row, position] == engine.truth[row].all[position]
        at = 0
        for row, first, count in zip(rows, prefix, extend, strict=True):
            if row:
                for i, slot in enumerate(event["out_cache_loc"][at : at + count]):
                    if row < ROWS and first + i < WIDTH:
                        table[row, first + i] = slot
                at += count
    assert told == sorted(told)
    return told, lost, unknown
