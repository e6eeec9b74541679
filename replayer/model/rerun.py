"""One request computed again from its tokens, by its own checkpoint, and held against what the engine had of it in its pools."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...kernels.arrays import BoolArray, ByteArray, Int64Array, record_words
from ...kernels.capture.layers import watched_bytes
from ...kernels.constants import UNKNOWN_TOKEN
from ...recorder.errors import TraceError
from ...recorder.state.apply import RecordedState, WriteStep
from ...recorder.state.forward import Forward
from ...recorder.state.pools import GroupPool
from ...recorder.trace.header import KvStream, Ranks, TraceHeader
from ...recorder.trace.reader import TraceGap
from ..run.streams import SegmentStream
from .first_layer import COARSE, LEAST, NOISE, FloatArray, load_model, of_rank, read_config
from .written import ROUNDING, float_values

_TOKEN, _POSITION = 0, 1  # words of a record
AGREES, CACHE, COMPUTE, INPUT = "agrees", "cache", "compute", "input"


class Seen(NamedTuple):
    """Slots of a request that a forward read for the first time so, or wrote: all `[n]`, `data` by stream `[n, width]`.

    `changed` says by stream whose bytes are others than when the request last read or wrote them, without a write. `writers` `[n, 3]` are event, forward and request id of who wrote each slot last, `records` `[n, 2]` token and position there.
    """

    event: int
    forward: int
    wrote: bool
    group: int
    positions: Int64Array
    slots: Int64Array
    writers: Int64Array
    records: Int64Array
    data: list[ByteArray]
    changed: list[BoolArray]


class _Held(NamedTuple):
    """What a request was last seen to have at each position, in one group."""

    slots: Int64Array
    events: Int64Array
    data: list[ByteArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Differs:
    """The first place in which the engine has something else than the model gives, in the order in which things happened."""

    event: int
    forward: int
    layer: int
    position: int
    half: str
    group: int
    slot: int
    off: float
    words: str


@dataclass(slots=True, kw_only=True)
class Rerun:
    """What came of it: `fault` is "agrees", "cache", "compute" or "input"; `compared` counts pieces of slots, by layer in `layers`."""

    request: str
    tokens: int
    forwards: int
    compared: int = 0
    differing: int = 0
    layers: dict[int, int] = field(default_factory=dict)
    fault: str = AGREES
    first: Differs | None = None
    not_compared: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


class RequestWalk(RecordedState):
    """Follows one request of the target through a trace: what it read, what it wrote, and its tokens."""

    def __init__(self, header: TraceHeader, request: str) -> None:
        super().__init__(header)
        self.request, self.request_id = request, -1
        self.seen: list[Seen] = []
        self.fed: dict[int, int] = {}
        self.wrong_inputs: list[
            tuple[int, int, int, int]
        ] = []  # event, forward, position, and the position that was fed
        self.truth = np.empty(0, np.int64)
        self.forwards = 0
        self._held: dict[int, _Held] = {}

    def walk(self, paths: Sequence[Path], on_batch: Callable[[int], None] = lambda _: None) -> None:
        """Read a trace to its end; raise `TraceError` if nobody of that name ran in it."""
        stream = SegmentStream(paths)
        for item in stream.stream():
            if isinstance(item, TraceGap):
                self.forget()
                continue
            for view in item:
                self.apply(view)
                if view.kind == "request" and self.request in (
                    str(view.scalar("name")),
                    str(view.scalar("request_id")),
                ):
                    self.request_id = int(view.scalar("request_id"))
            on_batch(item.end_byte)
        if not self.forwards:
            raise TraceError(
                f"{paths[0]}: no forward of a request {self.request}; kvcanary sql names those that there are"
            )

    def _store_bytes(self, steps: list[WriteStep], forward: Forward) -> None:
        mine = [r for r in range(len(forward.request_ids)) if self._is_mine(forward, r)] if forward.runner == 0 else []
        for step in steps if mine else ():
            self._read(step.pool, forward, mine[0])
        super()._store_bytes(steps, forward)
        for step in steps if mine else ():
            self._wrote(step, forward, mine[0])
        if mine:
            self._inputs(forward, mine[0], steps[0].write_plan.offsets)
            self.forwards += 1

    def _is_mine(self, forward: Forward, r: int) -> bool:
        request = int(forward.request_ids[r])
        return forward.req_pool_indices[r] != 0 and (request == self.request_id or str(request) == self.request)

    def _read(self, pool: GroupPool, forward: Forward, r: int) -> None:
        """Take note of what is other than it was when this request last had it."""
        group, row, prefix = pool.group, int(forward.req_pool_indices[r]), int(forward.prefix_lens[r])
        first = max(0, prefix - group.window) if group.window else 0
        slots = self.tables.req_to_token[group.table][row, first:prefix].astype(np.int64)
        if group.lut >= 0:
            lut = self.tables.luts[group.lut]
            slots = np.where((slots >= 0) & (slots < len(lut)), lut[np.clip(slots, 0, len(lut) - 1)], 0)
        positions = np.arange(first, first + len(slots))
        inside = (slots > 0) & (slots < pool.num_slots)
        inside[inside] &= ~pool.pool.unknown[slots[inside]]
        self._note(pool, forward, r, positions[inside], slots[inside], wrote=False)

    def _wrote(self, step: WriteStep, forward: Forward, r: int) -> None:
        begin, end = step.write_plan.offsets[r : r + 2].tolist()
        slots = step.slots[begin:end]
        positions = int(forward.prefix_lens[r]) + np.arange(end - begin)
        inside = (slots > 0) & (slots < step.pool.num_slots)
        self._note(step.pool, forward, r, positions[inside], slots[inside], wrote=True)

    def _note(
        self, pool: GroupPool, forward: Forward, r: int, positions: Int64Array, slots: Int64Array, *, wrote: bool
    ) -> None:
        if not len(positions):
            return
        writers, data = pool.last_writers(slots), [kv[slots] for kv in pool.pool.kv]
        if wrote:
            writers[:] = forward.event, forward.forward, forward.request_ids[r]
        held = self._room(pool, int(positions.max()) + 1)
        new = np.ones(len(slots), np.bool_)
        if not wrote:
            new = (held.slots[positions] != slots) | (held.events[positions] != writers[:, 0])
        differ = [(have[positions] != now).any(axis=1) for have, now in zip(held.data, data, strict=True)]
        changed = [~new & one & now.any(axis=1) for one, now in zip(differ, data, strict=True)]  # zeros: nobody knows
        new = np.logical_or.reduce([new, *changed])
        held.slots[positions], held.events[positions] = slots, writers[:, 0]
        for have, now in zip(held.data, data, strict=True):
            have[positions] = now
        if new.any():
            records = record_words(pool.pool.tail[pool.group.halves[0]], written=False)[slots[new]][:, :2].copy()
            parts = [now[new] for now in data], [one[new] for one in changed]
            place = positions[new], slots[new], writers[new], records, *parts
            self.seen.append(Seen(forward.event, forward.forward, wrote, pool.index, *place))

    def _room(self, pool: GroupPool, size: int) -> _Held:
        held = self._held.get(pool.index)
        if held is None or len(held.slots) < size:
            more = 2 * size
            new = _Held(
                np.zeros(more, np.int64),
                np.full(more, -2),
                [np.zeros((more, kv.shape[1]), np.uint8) for kv in pool.pool.kv],
            )
            if held is not None:
                count = len(held.slots)
                new.slots[:count], new.events[:count] = held.slots, held.events
                for have, take in zip(held.data, new.data, strict=True):
                    take[:count] = have
            held = self._held[pool.index] = new
        return held

    def _inputs(self, forward: Forward, r: int, offsets: Int64Array) -> None:
        begin, end = offsets[r : r + 2].tolist()
        prefix = int(forward.prefix_lens[r])
        self.fed.update(zip(range(prefix, prefix + end - begin), forward.input_ids[begin:end].tolist(), strict=True))
        fed = forward.positions[begin:end]
        for at in np.flatnonzero(fed != prefix + np.arange(end - begin))[:1].tolist():
            self.wrong_inputs.append((forward.event, forward.forward, prefix + at, int(fed[at])))
        if self.tables.truth is not None and forward.truth_lens is not None:
            known = self.tables.truth[int(forward.req_pool_indices[r]), : int(forward.truth_lens[r])].astype(np.int64)
            self.truth = known if len(known) >= len(self.truth) else self.truth

    def tokens(self) -> Int64Array:
        """Return the request's tokens as far as its KV went: what its scheduler said, else what was fed."""
        size = max(self.fed, default=-1) + 1
        tokens = np.full(size, UNKNOWN_TOKEN, np.int64)
        for position, token in self.fed.items():
            tokens[position] = token
        known = min(size, len(self.truth))
        tokens[:known] = np.where(self.truth[:known] >= 0, self.truth[:known], tokens[:known])
        unknown = np.flatnonzero(tokens < 0)
        return tokens[: int(unknown[0])] if len(unknown) else tokens


class Model:
    """What a checkpoint gives for a row of tokens, cold: K and V of every layer, in float32 and in the engine's dtype."""

    def __init__(self, path: Path, dtype: str) -> None:
        import torch

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        config = read_config(path, first_layer_only=False)
        if not dtype or dtype not in ROUNDING:
            raise TraceError(
                f"the trace is of a model in {dtype or 'an unknown type'}, expected one of {', '.join(ROUNDING)}"
            )
        low = COARSE.get(dtype, dtype)
        models = load_model(path, config, "float32", self.device), load_model(path, config, low, self.device)
        if low == dtype:
            for parameter in models[0].parameters():
                parameter.data = parameter.data.to(getattr(torch, dtype)).float()
        self._models = models
        self.layers: list[dict[str, tuple[Any, Any]]] = []
        self._rows: dict[tuple[int, str], tuple[FloatArray, FloatArray]] = {}

    def compute(self, tokens: Int64Array) -> None:
        """Compute a request from its tokens `[n]`: `layers` then has float32 and low, `[n, heads, dim]` each, by half."""
        import torch
        from transformers import DynamicCache

        ids = torch.from_numpy(tokens)[None].to(self.device)
        found = []
        with torch.inference_mode():
            for model in self._models:
                cache = DynamicCache()
                model(input_ids=ids, past_key_values=cache, use_cache=True)
                found.append([(layer.keys, layer.values) for layer in cache.layers])
        self._rows.clear()
        self.layers = [
            {half: (full[at][0].transpose(0, 1), low[at][0].transpose(0, 1)) for at, half in enumerate("KV")}
            for full, low in zip(*found, strict=True)
        ]

    def rows(self, layer: int, half: str, ranks: Ranks) -> tuple[FloatArray, FloatArray]:
        """Return what a rank must hold of each position in a layer, `[n, width]`, and how much it may be off, `[n]`."""
        if (layer, half) not in self._rows:
            full, low = (of_rank(part.float().cpu().numpy(), ranks) for part in self.layers[layer][half])
            noise, largest = np.abs(full - low).max(axis=1), np.abs(full).max(axis=1)
            self._rows[layer, half] = full, NOISE * np.maximum(noise, np.median(noise)) + LEAST * largest
        return self._rows[layer, half]


def rerun(
    paths: Sequence[Path], request: str, model: Path, *, on_batch: Callable[[int], None] = lambda _: None
) -> Rerun:
    """Compute a request again and compare every byte of it that a trace's files have; raise `TraceError` if that cannot be."""
    header = SegmentStream(paths).header
    if header.tokens != "plain":
        raise TraceError(f"{paths[0]}: it holds hashes of tokens; record with KVCANARY_TOKENS=plain")
    walk = RequestWalk(header, request)
    walk.walk(paths, on_batch)
    tokens = walk.tokens()
    name = walk.state.request_table.name(walk.request_id) if walk.request_id >= 0 else request
    found = Rerun(request=name, tokens=len(tokens), forwards=walk.forwards)
    if not len(tokens):
        raise TraceError(
            f"{paths[0]}: the first token of {name} is in no forward and in no truth tokens, so nothing can be computed"
        )
    short = max(walk.fed) + 1 - len(tokens)
    if short:
        found.not_compared.append(f"{short:,} positions from {len(tokens):,} on: a token before them is unknown")
    computed = Model(model, header.model.dtype)
    computed.compute(tokens)
    wrong = [one for seen in walk.seen for one in _compare(seen, header, computed, len(tokens), found)]
    found.differing = len(wrong)
    if wrong:
        # What a forward reads comes before what it writes.
        first, seen, at = min(wrong, key=lambda one: (one[0].event, one[1].wrote, one[0].layer, one[0].position))
        found.fault, words = _fault(walk, seen, at, tokens)
        found.first = replace(first, words=words)
    return found


def _compare(seen: Seen, header: TraceHeader, model: Model, size: int, found: Rerun) -> list[tuple[Differs, Seen, int]]:
    """Compare what was seen of slots with what the model gives; return what differs."""
    wrong: list[tuple[Differs, Seen, int]] = []
    for stream, data, changed in zip(header.groups[seen.group].streams, seen.data, seen.changed, strict=True):
        dtype = stream.dtype or header.model.dtype
        if dtype not in ROUNDING:
            said = f"values of {dtype or 'an unknown type'}: their scales are not recorded"
            found.not_compared += [said] if said not in found.not_compared else []
            continue
        for layer, of, begins, got in _pieces(stream, seen.slots, data, dtype):
            known = of[(seen.positions[of] < size) & data[of].any(axis=1)] if layer < len(model.layers) else of[:0]
            if not len(known):
                continue
            rows, tolerance = model.rows(layer, stream.half, header.ranks)
            keep = np.isin(of, known)
            columns = begins[keep][:, None] + np.arange(got.shape[1])
            inside = columns[:, -1] < rows.shape[1]  # MLA's rotary part lies behind the latent
            known, columns, values = known[inside], columns[inside], got[keep][inside]
            positions = seen.positions[known]
            off = np.abs(values - rows[positions[:, None], columns]).max(axis=1, initial=0)
            bad: BoolArray = ~(off <= tolerance[positions]) | changed[known]
            found.compared += len(known)
            found.layers[layer] = found.layers.get(layer, 0) + len(known)
            for n in np.flatnonzero(bad).tolist():
                at = int(known[n])
                part = float(off[n] / max(float(np.abs(rows[positions[n]]).max()), 1e-30))
                one = Differs(
                    event=seen.event,
                    forward=seen.forward,
                    layer=layer,
                    position=int(positions[n]),
                    half=stream.half,
                    group=seen.group,
                    slot=int(seen.slots[at]),
                    off=part,
                    words="",
                )
                wrong.append((one, seen, at))
    return wrong


def _pieces(
    stream: KvStream, slots: Int64Array, data: ByteArray, dtype: str
) -> list[tuple[int, Int64Array, Int64Array, FloatArray]]:
    """Return by layer which of the slots `[m]` a stream shows, from which value of the token on `[m]`, and the values."""
    item = 4 if dtype == "float32" else 2
    everything = np.arange(len(slots))
    if not stream.samples:
        layers = stream.layers or (stream.layer,)
        parts = np.split(data, len(layers), axis=1)
        zero = np.zeros(len(slots), np.int64)
        return [(n, everything, zero, float_values(part, dtype)) for n, part in zip(layers, parts, strict=True)]
    count, chunks = len(stream.layers), stream.num_chunks
    looked = watched_bytes(slots, seed=stream.seed, num_layers=count, num_chunks=chunks, backend="cpu")
    found = []
    for index, layer in enumerate(stream.layers):
        of = everything[looked[:, 0] == index]
        found.append((layer, of, looked[of, 1] * (16 // item), float_values(data[of], dtype)))
    return found


def _fault(walk: RequestWalk, seen: Seen, at: int, tokens: Int64Array) -> tuple[str, str]:
    """Say whether the cache, the compute or the input is at fault for what differs first, and why."""
    position, slot = int(seen.positions[at]), int(seen.slots[at])
    event, forward, request = seen.writers[at].tolist()
    names = walk.state.request_table
    if seen.wrote:
        fed = walk.fed.get(position, -1)
        if fed != tokens[position]:
            return (
                INPUT,
                f"forward {seen.forward} was fed token {fed} at position {position}, the request has {tokens[position]}",
            )
        moved = next((one for one in walk.wrong_inputs if one[0] == seen.event), None)
        if moved is not None:
            return INPUT, f"forward {seen.forward} was given position {moved[3]} for position {moved[2]}"
        return (
            COMPUTE,
            f"forward {seen.forward} was fed the right token and read what is right, as far as it was recorded, and wrote this",
        )
    before = [s for s in walk.seen if s.group == seen.group and s.event < seen.event and position in s.positions]
    if before:
        last = before[-1]
        then = int(last.slots[np.flatnonzero(last.positions == position)[0]])
        if then != slot:
            return CACHE, f"the block table has slot {slot} there, and had {then} in forward {last.forward}"
        if event > last.event:
            return CACHE, f"slot {slot} was written since by {names.name(request)}, in forward {forward}"
        return CACHE, f"slot {slot} changed after forward {last.forward}, without a write"
    token, there = seen.records[at].tolist()
    if event < 0:
        return CACHE, f"nobody wrote slot {slot}"
    if (token, there) != (int(tokens[position]), position):
        return (
            CACHE,
            f"slot {slot} holds token {token} of position {there}, written by {names.name(request)} in forward {forward}",
        )
    return (
        COMPUTE,
        f"{names.name(request)} wrote it in forward {forward}, for the same token and position: run it for that request",
    )
