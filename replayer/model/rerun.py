"""One request computed again from its tokens, by its own checkpoint, and held against what the engine had of it in its pools."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...kernels.arrays import BoolArray, ByteArray, Int64Array
from ...kernels.capture.layers import watched_bytes
from ...kernels.ops.token_rows.encoding import ITEM_BYTES
from ...kernels.ops.token_rows.reference import Encoding, encoding_of, stored_values, too_far
from ...recorder.errors import TraceError
from ...recorder.trace.header import SAMPLE_BYTES, KvStream, TraceHeader
from ...recorder.trace.schema import LOGPROB_KINDS
from ..run.streams import Checks, SegmentStream
from .first_layer import FloatArray, without_triton
from .logprobs import LogprobDiffers, LogprobsCompared, comparable, compare
from .request_walk import RequestWalk, Seen
from .whole_model import Model, Piece

_USUAL: Final = 8.0  # times what most of a layer is off by
AGREES, CACHE, COMPUTE, ORDER, INPUT = "agrees", "cache", "compute", "order", "input"
ELSEWHERE = "elsewhere"
_NOTHING: Final = np.empty(0, np.int64)


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
    """What came of it: `fault` is "agrees", "cache", "compute", "order", "input" or "elsewhere"; `compared` counts pieces of slots, by layer in `layers`.

    `warm`: how many differ if the model computes in the chunks in which the engine did, prefixes of others in theirs; None if
    nobody asked. If none does, what is in the cache follows from the order in which things came. `logprobs` are log-probabilities
    of sampled tokens; if they alone differ, the fault is elsewhere than in what was captured, and `warm` counts them.
    """

    request: str
    tokens: int
    forwards: int
    compared: int = 0
    differing: int = 0
    layers: dict[int, int] = field(default_factory=dict)
    fault: str = AGREES
    first: Differs | None = None
    warm: int | None = None
    logprobs: int = 0
    logprobs_differing: int = 0
    logprob_tolerance: float = 0.0
    first_logprob: LogprobDiffers | None = None
    not_compared: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, None for a number that is NaN or infinite."""

        def finite(fields: list[tuple[str, Any]]) -> dict[str, Any]:
            return {name: None if isinstance(of, float) and not math.isfinite(of) else of for name, of in fields}

        return asdict(self, dict_factory=finite)


def rerun(paths: Sequence[Path], request: str, model: Path) -> Rerun:
    """Compute a request again and compare every byte of it that a trace's files have; raise `TraceError` if that cannot be.

    What others wrote is not read, and its CRC looked at meanwhile: if one does not hold, all is read.
    """
    header = SegmentStream(paths).header
    if header.tokens != "plain":
        raise TraceError(f"{paths[0]}: it holds hashes of tokens; record with KVCANARY_TOKENS=plain")
    with Checks() as checks:
        try:
            walk = RequestWalk(header, request)
            walk.walk(paths, checks)
            found = _rerun(walk, paths, request, model)
        except Exception:  # numbers that nobody has checked may lead anywhere
            if checks.hold():
                raise
        else:
            if checks.hold():
                return found
    walk = RequestWalk(header, request)
    walk.walk(paths)
    return _rerun(walk, paths, request, model)


def _rerun(walk: RequestWalk, paths: Sequence[Path], request: str, model: Path) -> Rerun:
    header = walk.header
    tokens = walk.tokens()
    name = walk.state.request_table.name(walk.request_id) if walk.request_id >= 0 else request
    found = Rerun(request=name, tokens=len(tokens), forwards=walk.forwards)
    if not len(tokens):
        raise TraceError(
            f"{paths[0]}: the first token of {name} is in no forward and in no truth tokens, so nothing can be computed"
        )
    walk.leave_out_rejected(tokens)
    short = max(walk.fed) + 1 - len(tokens)
    if short:
        found.not_compared.append(f"{short:,} positions from {len(tokens):,} on: a token before them is unknown")
    with without_triton():
        computed = _model(model, header, walk, found)
        sampled, why = comparable(walk.logprobs, tokens, computed.vocab_size)
        sampled = sampled if computed.head else []
        found.not_compared += why
        followed = np.unique([one.position - 1 for one in sampled]).astype(np.int64)
        computed.compute(tokens, np.zeros(1, np.int64), followed)
    logprobs = compare(sampled, followed, *computed.logprobs) if len(sampled) else LogprobsCompared()
    found.logprobs, found.logprobs_differing = logprobs.compared, len(logprobs.differing)
    found.logprob_tolerance = logprobs.tolerance
    if logprobs.unknown:
        _say(found, f"log-probabilities of {logprobs.unknown:,} tokens: the checkpoint gives NaN or infinity")
    wrong = _differing(walk, header, computed, len(tokens), found)
    found.differing = len(wrong)
    if wrong:
        # What a forward reads comes before what it writes.
        first, seen, at = min(wrong, key=lambda one: (one[0].event, one[1].wrote, one[0].layer, one[0].position))
        found.fault, words = _fault(walk, seen, at, tokens)
        found.first = replace(first, words=words)
        if found.fault == COMPUTE:
            computed.compute(tokens, walk.starts(len(tokens)))
            counts = Rerun(request="", tokens=0, forwards=0)
            found.warm = len(_differing(walk, header, computed, len(tokens), counts))
            if not found.warm:
                found.fault = ORDER
    if logprobs.differing:
        found.first_logprob = logprobs.differing[0]
        if not wrong:
            computed.compute(tokens, walk.starts(len(tokens)), followed)
            found.warm = len(compare(sampled, followed, *computed.logprobs).differing)
            found.fault = ELSEWHERE if found.warm else ORDER
            found.first_logprob = replace(found.first_logprob, words=_elsewhere(header, found))
    return found


def _elsewhere(header: TraceHeader, found: Rerun) -> str:
    """Say where the damage is if log-probabilities differ and nothing that was captured does."""
    if found.fault == ORDER:
        return (
            "all that was captured agrees, and so do log-probabilities computed in the chunks in which the request came"
        )
    layers = sum(group.num_layers for group in header.groups if group.runner == 0)
    others = f"{layers - len(found.layers)} of {layers} layers, " if layers > len(found.layers) else ""
    others = others if layers else "other layers, "  # an older trace does not say how many there are
    captured = f"all {found.compared:,} pieces of K and V agree" if found.compared else "no K and V were compared"
    return f"{captured}, so the damage is in what was not captured: {others}other bytes of a slot, or behind the last layer"


def _model(path: Path, header: TraceHeader, walk: RequestWalk, found: Rerun) -> Model:
    """Load the model, with its head if log-probabilities are to be compared."""
    if any(one.kind == LOGPROB_KINDS.index("raw") for one in walk.logprobs):
        try:
            return Model(path, header.model.dtype, head=True).load()
        except TraceError as error:
            found.not_compared.append(f"log-probabilities: {error}")
    streams = [stream for _, stream in header.streams(0)]
    captured = max((max(stream.layers, default=stream.layer) for stream in streams), default=0)
    return Model(path, header.model.dtype, most_layers=captured + 1)


def _agrees(walk: RequestWalk, header: TraceHeader, model: Model, size: int, found: Rerun) -> bool:
    """Count what can be compared, and say whether all of it agrees at a look; nothing is counted otherwise."""
    counts = Rerun(request="", tokens=0, forwards=0)
    for seen in walk.seen:
        for piece, changed in _comparable(seen, header, model, size, counts):
            if changed[piece.of].any() or not model.near(piece, header.ranks, seen.positions[piece.of]):
                return False
            _count(counts, piece.layer, len(piece.of))
    found.compared, found.layers = counts.compared, counts.layers
    found.not_compared += counts.not_compared
    return True


def _differing(
    walk: RequestWalk, header: TraceHeader, model: Model, size: int, found: Rerun
) -> list[tuple[Differs, Seen, int]]:
    """Compare all that was seen; return what differs by more than rounding, and by more than most of its layer does."""
    if _agrees(walk, header, model, size, found):
        return []
    shares: dict[int, list[FloatArray]] = {}
    wrong = [one for seen in walk.seen for one in _compare(seen, header, model, size, found, shares)]
    # An engine that rounds more than its dtype says is off everywhere: that is no fault of one slot.
    usual = {layer: float(np.median(got)) for layer, parts in shares.items() if len(got := np.concatenate(parts))}
    limit = {layer: max(1.0, _USUAL * share) if share <= 1 else 1.0 for layer, share in usual.items()}
    return [(one, seen, at) for share, one, seen, at in wrong if share > limit.get(one.layer, 1.0)]


def _comparable(
    seen: Seen, header: TraceHeader, model: Model, size: int, found: Rerun
) -> Iterator[tuple[Piece, BoolArray]]:
    """Yield what the model can be asked about of what was seen, with what of the stream changed; say why of the rest."""
    for stream, data, changed in zip(header.groups[seen.group].streams, seen.data, seen.changed, strict=True):
        dtype = stream.dtype or header.model.dtype
        encoding = encoding_of(dtype, stream.scale)
        if encoding is None:
            _say(
                found, f"values of {dtype or 'an unknown type'}: nobody says what they are, or by what they are scaled"
            )
            continue
        known = (seen.positions < size) & data.any(axis=1)
        for piece in _pieces(stream, seen.slots, data, encoding):
            there = known[piece.of]
            if encoding.quantised and not stream.samples and piece.layer != stream.layer_of(0):
                _say(found, f"{encoding.dtype} of layers behind a stream's first: nobody says by what they are scaled")
                continue
            if piece.layer >= model.num_layers and there.any():
                _say(found, f"layers from {model.num_layers} on: the checkpoint has no more")
            if piece.layer >= model.num_layers or not there.any():
                continue
            ends = piece.begins + piece.data.shape[1] // ITEM_BYTES[encoding.dtype]
            there &= ends <= model.width(
                piece.layer, stream.half, header.ranks
            )  # MLA's rotary part lies behind the latent
            yield _chosen(piece, there), changed


def _compare(
    seen: Seen, header: TraceHeader, model: Model, size: int, found: Rerun, shares: dict[int, list[FloatArray]]
) -> list[tuple[float, Differs, Seen, int]]:
    """Compare what was seen of slots with what the model gives; return what differs, with what share of the tolerance.

    Of everything that is compared `shares` gets that, by layer.
    """
    wrong: list[tuple[float, Differs, Seen, int]] = []
    for given, changed in _comparable(seen, header, model, size, found):
        rows, tolerance = model.rows(given.layer, given.half, header.ranks)
        known = np.isfinite(tolerance)[seen.positions[given.of]]
        if not known.all():
            _say(found, "positions for which the checkpoint gives NaN or infinity")
        piece = _chosen(given, known | changed[given.of])
        values = stored_values(piece.data, piece.encoding)
        columns = piece.begins[:, None] + np.arange(values.shape[1])
        positions = seen.positions[piece.of]
        off = np.maximum(too_far(values, rows[positions[:, None], columns], piece.encoding), 0).max(axis=1, initial=0)
        share = off / np.maximum(tolerance[positions], 1e-30)
        shares.setdefault(piece.layer, []).append(share[np.isfinite(share)])
        share = np.where(changed[piece.of] | np.isnan(share), np.inf, share)
        _count(found, piece.layer, len(piece.of))
        for n in np.flatnonzero(share > 1).tolist():
            at = int(piece.of[n])
            part = float(off[n] / max(float(np.abs(rows[positions[n]]).max()), 1e-30))
            one = Differs(
                event=seen.event,
                forward=seen.forward,
                layer=piece.layer,
                position=int(positions[n]),
                half=piece.half,
                group=seen.group,
                slot=int(seen.slots[at]),
                off=part,
                words="",
            )
            wrong.append((float(share[n]), one, seen, at))
    return wrong


def _count(found: Rerun, layer: int, pieces: int) -> None:
    found.compared += pieces
    found.layers[layer] = found.layers.get(layer, 0) + pieces


def _chosen(piece: Piece, which: BoolArray) -> Piece:
    if which.all():
        return piece
    return piece._replace(of=piece.of[which], begins=piece.begins[which], data=piece.data[which])


def _say(found: Rerun, why: str) -> None:
    if why not in found.not_compared:
        found.not_compared.append(why)


def _pieces(stream: KvStream, slots: Int64Array, data: ByteArray, encoding: Encoding) -> Iterator[Piece]:
    """Yield by layer which of the slots a stream shows, and their bytes."""
    everything = np.arange(len(slots))
    if not stream.samples:
        layers = stream.layers or (stream.layer,)
        zero = np.zeros(len(slots), np.int64)
        for layer, part in zip(layers, np.split(data, len(layers), axis=1), strict=True):
            yield Piece(stream.half, layer, encoding, everything, zero, np.ascontiguousarray(part))
        return
    count, chunks = len(stream.layers), stream.num_chunks
    looked = watched_bytes(slots, seed=stream.seed, num_layers=count, num_chunks=chunks, backend="cpu")
    for index, layer in enumerate(stream.layers):
        of = everything[looked[:, 0] == index]
        first = looked[of, 1] * (SAMPLE_BYTES // ITEM_BYTES[encoding.dtype])
        yield Piece(stream.half, layer, encoding, of, first, data[of])


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
