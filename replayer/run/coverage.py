"""What a verdict speaks for: how much of each thing was watched, of how much, and why the rest was not.

Worked out here of what the header says and what the replay counted; screen, summary, SQL and page show these rows. A row is
not watched in full if fewer were watched than there are, or if nobody knows how many there are.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...kernels.arrays import BoolArray, Int64Array
from ...kernels.capture.layers import FLOATS, watched_bytes
from ...kernels.constants import UNKNOWN_TOKEN
from ...recorder.state.pools import GroupPool
from ...recorder.trace.batch import TraceBatch
from ...recorder.trace.header import KvStream, PoolGroup, StatePool, TraceHeader
from ...recorder.trace.schema import (
    ATTENTION_LENS,
    ATTENTION_SLOTS,
    IDENTITY_KINDS,
    INT_LISTS,
    KEYFRAME_REQUEST,
    SUBMITTED,
)
from ..checks import CHECK_NAMES

# What is counted of each runner's forwards with requests: all; those in which the recorder read the prefix bytes again;
# in which it saw what the model handed to the cache, for every stream; in which it saw the lengths, and the slots, that
# attention got; that came with truth tokens; their tokens; of these the unknown; those in which it saw which positions
# every sliding group read; that were seen to end, the model not raising; in which what came out of attention was held
# against what its tokens were to read.
FIGURES: Final = (
    *("forwards", "bytes_watched", "submitted", "attention_lens", "attention_slots", "with_truth", "tokens", "unknown"),
    *("windows", "ended", "outputs"),
)
_FORWARDS, _BYTES, _SUBMITTED, _LENS, _SLOTS, _TRUTH, _TOKENS, _UNKNOWN, _WINDOWS, _ENDED, _OUTPUTS = range(
    len(FIGURES)
)

# What is counted of a comparison with a model, beside the reasons why values were not compared.
COMPARED: Final = "compared"
WRITTEN: Final = "written"

RANKS: Final = "ranks"
NOT_SAID: Final = "not said by this recording"
_SAYS_ALL: Final = 3  # the minor version since which a header says what is not watched
_PARTIAL_BYTES: Final = 16  # of a slot, that `--kv-hash partial` compares
_MOST_NAMED: Final = 8
# By what the header promises of the slots' history.
_NOT_TOLD: Final = {
    "": "who held a slot (no slot history)",
    "allocator": "who shares a slot, and what the prefix cache holds",
    "complete": "",
}
_DEPENDS_ON: Final = {"adapter": "LoRA adapter", "salt": "cache salt", "weights": "weights", "media": "media"}
_ITSELF: Final = frozenset({"pool", "runner", "graph", "other"})  # kinds whose names say what is meant
# One of many.
_NAMED: Final = frozenset(
    {
        "layers",
        "bytes",
        "samples",
        "values",
        "ended",
        "bytes_watched",
        "submitted",
        "attention",
        "window",
        "outputs",
        "truth",
        "columns",
    }
)


@dataclass(frozen=True, slots=True)
class Watched:
    """How much of one thing was watched.

    `what` says what kind of thing, `name` which one: a pool group, a runner, or the engine's own name for it. `total` is
    None if nobody knows how many there are. `reason` says why the rest was not watched, and may be empty. `words` are
    the screen's for what was not watched, without `name`; empty if everything was.
    """

    what: str
    name: str
    watched: int
    total: int | None
    reason: str = ""
    words: str = ""

    @property
    def share(self) -> float | None:
        """The part that was watched, 0 to 1; None if nobody knows how many there are."""
        return None if not self.total else self.watched / self.total

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        names = ("what", "name", "watched", "total", "share", "reason", "words")
        return {name: getattr(self, name) for name in names}


_NOT_GIVEN: Final = "what the model handed to the cache was not given"
_PACKED: Final = "the pool packs some of what it is handed, which is recorded in its place"

_AFTERWARDS: Final = Watched(
    "afterwards",
    "",
    0,
    None,
    "a slot is looked at when a forward reads or writes it, or a walk of the prefix cache comes to it",
    "what changed in a slot after it was looked at last",
)

_COMPUTED: Final = "--model compares K and V of the first layer with what the model gives, kvcanary rerun all that was recorded of a request"


def no_figures(header: TraceHeader) -> Int64Array:
    """Return the counts of a trace that has not begun, `[runners, figures] int64`."""
    return np.zeros((len(header.runners), len(FIGURES)), np.int64)


def count_forwards(figures: Int64Array, batch: TraceBatch, rows: Int64Array, header: TraceHeader) -> None:
    """Add the forwards with requests in rows `[n]` of a batch, in order, to `figures` `[runners, figures] int64`."""
    rows = rows[_lengths(batch, "req_pool_indices", rows) > 0]
    if not len(rows):
        return
    attention = batch.scalar_ints("attention_watched")[rows]
    runners = batch.scalar_ints("runner")[rows]
    counts = [
        (sum(not stream.samples for _, stream in header.streams(runner)), len(_sliding(header, runner)))
        for runner in range(len(header.runners))
    ]
    streams, sliding = np.array(counts, np.int64)[runners].T
    truth = _lengths(batch, "truth_lens", rows) if header.truth_table is not None else np.zeros(len(rows), np.int64)
    unknown = np.concatenate(([0], np.cumsum(batch.values("input_ids") == UNKNOWN_TOKEN)))
    columns = (
        np.ones(len(rows), np.int64),
        batch.scalar_ints("kv_watched")[rows] != 0,
        (streams > 0) & (batch.scalar_ints("submitted_watched")[rows] >= streams),
        (attention & ATTENTION_LENS) != 0,
        (attention & ATTENTION_SLOTS) != 0,
        truth > 0,
        _lengths(batch, "input_ids", rows),
        np.diff(unknown[batch.offsets("input_ids")])[rows],
        (sliding > 0) & (batch.scalar_ints("window_watched")[rows] >= sliding),
        ~batch.failed[rows],
        batch.scalar_ints("outputs_watched")[rows] > 0,
    )
    counted = np.stack([np.asarray(column, np.int64) for column in columns], axis=1)
    np.add.at(figures, runners, counted)


def _sliding(header: TraceHeader, runner: int) -> list[PoolGroup]:
    return [group for group in header.groups if group.runner == runner and group.window]


def _lengths(batch: TraceBatch, name: str, rows: Int64Array) -> Int64Array:
    offsets = batch.offsets(name)
    return offsets[rows + 1] - offsets[rows]


def no_samples(header: TraceHeader) -> Int64Array:
    """Return how often each piece of each layer was written that sampling streams hold, before anything was, `[pieces] int64`."""
    return np.zeros(sum(s.num_chunks * len(s.layers) for group in header.groups for s in _sampling(group)), np.int64)


def count_samples(samples: Int64Array, pools: Sequence[GroupPool], *, backend: str) -> None:
    """Put into `samples` in how many slots that were written each piece is looked at."""
    at = 0
    for pool in pools:
        written = 1 + np.flatnonzero(pool.pool.writers[1:, 0]) if _sampling(pool.group) else np.empty(0, np.int64)
        for stream in _sampling(pool.group):
            layers, chunks = len(stream.layers), stream.num_chunks
            looked = watched_bytes(written, seed=stream.seed, num_layers=layers, num_chunks=chunks, backend=backend)
            pieces = np.bincount(looked[:, 0] * chunks + looked[:, 1], minlength=layers * chunks)
            samples[at : at + layers * chunks] = pieces
            at += layers * chunks


def _sampling(group: PoolGroup) -> list[KvStream]:
    return [stream for stream in group.streams if stream.samples]


def _samples_of(header: TraceHeader, samples: Int64Array) -> list[list[BoolArray]]:
    """Return for each group of each of its sampling streams which pieces were looked at, `[layers, pieces] bool`."""
    found, at = [], 0
    for group in header.groups:
        of_group = []
        for stream in _sampling(group):
            shape = len(stream.layers), stream.num_chunks
            size = shape[0] * shape[1]
            of_group.append(samples[at : at + size].reshape(shape) > 0)
            at += size
        found.append(of_group)
    return found


def count_identities(told: Int64Array, batch: TraceBatch, end: int) -> None:
    """Add to `told` the events among the first `end` that name a request, and behind them those that declare each kind of identity."""
    named = np.array([kind == "request" for kind in batch.kinds[:end]], np.bool_)
    if "keyframe" in batch.kinds[:end]:
        named |= np.array([status == KEYFRAME_REQUEST for status in batch.strings("status")[:end]], np.bool_)
    offsets, kinds = batch.offsets("identity_kind"), batch.values("identity_kind")
    told[0] += np.count_nonzero(named)
    for row in np.flatnonzero(named & (np.diff(offsets)[:end] > 0)).tolist():
        declared = np.unique(kinds[offsets[row] : offsets[row + 1]])
        told[1 + declared[(declared >= 0) & (declared < len(IDENTITY_KINDS))]] += 1


def coverage(
    header: TraceHeader,
    figures: Int64Array,
    samples: Int64Array,
    told: Int64Array,
    *,
    recorded: int,
    judged: int,
    entries_read: int,
    unknown_entries: int,
    settings: Mapping[str, Any],
) -> list[Watched]:
    """Return how much was watched, in the order in which a person should read it.

    `samples` are of `count_samples`, `told` of `count_identities`, `figures` `[runners, figures] int64` were counted of the `judged` of `recorded` forwards. These, and walks of the prefix
    cache, read `entries_read` slots of prefixes; of `unknown_entries` of them nobody knows what they must hold.
    """
    rows = [_forwards(judged, recorded), *_left_out(header)]
    for group, looked in zip(header.groups, _samples_of(header, samples), strict=True):
        rows += [_layers(group, header, looked), _bytes(group, header, str(settings["kv_hash"]))]
        rows += [_pieces(group, looked), _values(group)] if looked else []
    rows += [_states(pool) for pool in header.states]
    for index, (runner, counted) in enumerate(zip(header.runners, figures.tolist(), strict=True)):
        name = runner.name
        if not counted[_FORWARDS] and judged:
            rows.append(Watched("runner", name, 0, 0, words=f"{name}: it ran no forward with a request"))
        if counted[_ENDED] < counted[_FORWARDS]:
            reason = "the model raised, or nobody saw the forward end"
            rows.append(_of_forwards("ended", name, counted, _ENDED, "what forwards wrote that failed", reason))
        if header.streams(index) and settings["kv_hash"] != "none":
            every = header.capture.kv_watch_every
            reason = f"read again every {every:,} forwards" if every else "never read again"
            rows.append(_of_forwards("bytes_watched", name, counted, _BYTES, "KV bytes of prefixes", reason))
            packed = any(stream.origin == SUBMITTED for _, stream in header.streams(index))
            reason = _reason(header, "submitted", name) or (_PACKED if packed else _NOT_GIVEN)
            thing = "KV bytes on their way into the pool"
            rows.append(_of_forwards("submitted", name, counted, _SUBMITTED, thing, reason))
        # Lengths and slots; the screen names the less.
        figure = _LENS if counted[_LENS] < counted[_SLOTS] else _SLOTS
        rows.append(_of_forwards("attention", name, counted, figure, "what attention was given"))
        if _sliding(header, index):
            reason = "the engine shows a block table, and not what attention reads of it"
            rows.append(_of_forwards("window", name, counted, _WINDOWS, "which positions sliding layers read", reason))
        reason = "this adapter does not look at it, or in one of so many forwards (KVCANARY_OUTPUTS_EVERY; on a GPU in one of 16 times as many)"
        rows.append(_of_forwards("outputs", name, counted, _OUTPUTS, "what came out of attention", reason))
        reason = "no truth tokens recorded" if header.truth_table is None or not header.capture.truth_tokens else ""
        rows.append(_of_forwards("truth", name, counted, _TRUTH, "cached tokens against the request's own", reason))
        words, columns = f"{', '.join(runner.derived)} (derived)" if runner.derived else "", len(INT_LISTS)
        rows.append(Watched("columns", name, columns - len(runner.derived), columns, words=words))
    tokens, unknown = (int(figures[:, figure].sum()) for figure in (_TOKENS, _UNKNOWN))
    return [
        *rows,
        _known("slots_read", entries_read, unknown_entries, "slots read: nobody knows what they must hold"),
        _known("tokens", tokens, unknown, "input tokens, which are unknown"),
        _ranks(header),
        _identities(told),
        Watched("slot_history", "", int(header.slot_history == "complete"), 1, words=_NOT_TOLD[header.slot_history]),
        _checks(settings["checks"]),
        _AFTERWARDS,
    ]


def _known(what: str, total: int, unknown: int, words: str) -> Watched:
    return Watched(what, "", total - unknown, total, words=f"{unknown:,} of {total:,} {words}" if unknown else "")


def _identities(told: Int64Array) -> Watched:
    requests, *declared = told.tolist()
    lack = [
        f"{_DEPENDS_ON[kind]} (of {requests - said:,} of {requests:,} requests)" if said else _DEPENDS_ON[kind]
        for kind, said in zip(IDENTITY_KINDS, declared, strict=True)
        if said < requests or not requests
    ]
    words = f"which {', '.join(lack)} KV is computed with" if lack else ""
    reason = "the recorder was not told" if lack else ""
    return Watched("identity", "", len(IDENTITY_KINDS) - len(lack), len(IDENTITY_KINDS), reason, words)


def not_watched(rows: Sequence[Watched]) -> list[str]:
    """Return what was not watched, in the screen's words: once what several pool groups or runners have in common."""
    alike: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.words:
            alike.setdefault((row.what, row.words), []).append(row.name)
    of_kind = Counter(row.what for row in rows)
    return [
        words if of_kind[what] == len(names) or what not in _NAMED else f"{words} of {', '.join(names)}"
        for (what, words), names in alike.items()
    ]


def model_coverage(counts: Mapping[str, int]) -> list[Watched]:
    """Return how much was compared with the model that was named, if one was, and what layers compute that nothing is compared with."""
    compared, total = counts.get(COMPARED, 0), counts.get(WRITTEN, 0)
    if not total:
        return [Watched("computed", "", 0, None, _COMPUTED, "what layers compute (no --model)")]
    why = [f"{count:,}: {reason}" for reason, count in counts.items() if reason not in (COMPARED, WRITTEN) and count]
    words = f"{total - compared:,} of {total:,} tokens' K and V against the model" if compared < total else ""
    return [
        Watched("model", "", compared, total, "; ".join(why), words),
        Watched("computed", "", 1, None, _COMPUTED, "what layers behind the first compute"),
    ]


def _forwards(judged: int, recorded: int) -> Watched:
    words = f"{recorded - judged:,} of {recorded:,} forwards, which were left out" if judged < recorded else ""
    return Watched("forwards", "", judged, recorded, words=words)


def _left_out(header: TraceHeader) -> list[Watched]:
    """Return what the recorder says that it does not watch; what has a row of its own is there."""
    groups = {group.name for group in header.groups}
    runners = {runner.name for runner in header.runners}
    rows = []
    if header.shrunk is not None:
        words = f"all but what shows one incident of {header.shrunk.events:,} events (kvcanary shrink)"
        rows.append(Watched("shrunk", "", 0, None, "it is a part of a recording", words))
    for entry in header.not_watched:
        if entry.name in {"layers": groups, "bytes": groups, "submitted": runners}.get(entry.what, ()):
            continue
        words = entry.name if entry.what in _ITSELF else f"{entry.what} of {entry.name}"
        rows.append(Watched(entry.what, entry.name, 0, None, entry.reason, words))
    if header.format_minor < _SAYS_ALL:
        words = f"other pools, draft models, CUDA graphs ({NOT_SAID})"
        rows.append(Watched("other", "", 0, None, NOT_SAID, words))
    return rows


def _reason(header: TraceHeader, what: str, name: str) -> str:
    return next((e.reason for e in header.not_watched if (e.what, e.name) == (what, name)), "")


def _layers(group: PoolGroup, header: TraceHeader, looked: Sequence[BoolArray]) -> Watched:
    of_half: dict[str, set[int]] = {half: set() for half in group.halves}
    for stream in group.streams:
        of_half[stream.half].update(() if stream.samples else stream.layers or (stream.layer,))
    for stream, pieces in zip(_sampling(group), looked, strict=True):
        of_half[stream.half].update(np.array(stream.layers)[pieces.any(axis=1)].tolist())
    some = set[int]().union(*of_half.values())
    whole = some.intersection(*of_half.values()) if looked else some
    watched = sorted(whole)
    total, reason, words = group.num_layers or None, _reason(header, "layers", group.name), ""
    if total is None:
        words = f"every layer but {number_runs(watched)}" if watched else "every layer"
        reason = reason or f"how many there are is {NOT_SAID}"
    elif not some:
        words = f"all {total:,} layers"
    elif len(some) < total:
        rest = sorted(set(range(max(total, max(some) + 1))) - some)
        # A group's layers may be any of the model's, so that numbers past its own count say nothing of the rest.
        words = f"{total - len(some):,} of {total:,} layers"
        if max(some) < total:
            words = f"layers {number_runs(rest)}"
    parts = [f"{half} of layers {number_runs(sorted(some - own))}" for half, own in of_half.items() if some - own]
    words = "; ".join(filter(None, (words, *(parts if looked else ()))))
    return Watched("layers", group.name, len(watched), total, reason, words)


def _states(pool: StatePool) -> Watched:
    """Return of how many layers the bytes of recurrent state are hashed: their first or last ones, of one layer."""
    total, watched = pool.num_layers or None, min(1, pool.hashed_bytes)
    rest = "every layer" if not watched else f"every layer but {pool.layer}"
    left, whole = sum(max(0, part - pool.hashed_bytes) for part in pool.part_bytes), sum(pool.part_bytes)
    layers = "" if watched == total else f"recurrent state of {rest}"
    size = f"{left:,} of {whole:,} bytes of recurrent state in layer {pool.layer}" if watched and left else ""
    words = "; ".join(filter(None, (layers, size)))
    end = "last" if pool.from_end else "first"
    reason = f"the {end} {pool.hashed_bytes:,} bytes of each part are hashed" if watched else "its bytes are not read"
    return Watched("states", pool.name, watched, total, reason, words)


def number_runs(numbers: Sequence[int], *, most: int = _MOST_NAMED) -> str:
    """Return `0-3, 5`, the first `most` runs."""
    beside = itertools.groupby(enumerate(numbers), key=lambda one: one[1] - one[0])
    runs = [[number for _, number in run] for _, run in beside]
    named = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:most])
    return f"{named} ..." if len(runs) > most else named


def _bytes(group: PoolGroup, header: TraceHeader, kv_hash: str) -> Watched:
    """Return how many bytes of a slot are compared, in the layers that are watched."""
    reason = _reason(header, "bytes", group.name)
    if not group.streams:
        return Watched("bytes", group.name, 0, None, reason, "KV bytes")
    most = {"none": 0, "partial": _PARTIAL_BYTES}.get(kv_hash)
    sampling = _sampling(group)
    leading = [stream for stream in group.streams if not stream.samples]
    sampled = sum(stream.capture_bytes for stream in sampling)
    compared = sum(s.capture_bytes if most is None else min(most, s.capture_bytes) for s in leading) + sampled
    halves = {stream.half for stream in sampling}
    total = sum(stream.bytes_per_token for stream in leading if stream.half not in halves)
    total += sum(stream.bytes_per_token * len(stream.layers) for stream in sampling)
    captured = sum(stream.capture_bytes for stream in leading) + sampled
    if compared < captured:
        reason = f"replayed with --kv-hash {kv_hash}; {captured:,} bytes were captured"
    words = ""
    if compared < total:
        words = f"{total - compared:,} of a slot's {total:,} bytes{', others in each slot' if sampling else ''}"
        words += f" (--kv-hash {kv_hash})" if compared < captured else ""
    return Watched("bytes", group.name, compared, total, reason, words)


def _pieces(group: PoolGroup, looked: Sequence[BoolArray]) -> Watched:
    """Return how many pieces of 16 bytes of all layers were looked at, in whichever slot."""
    reached, total = sum(int(pieces.sum()) for pieces in looked), sum(pieces.size for pieces in looked)
    words = f"{total - reached:,} of {total:,} pieces of K and V of all layers, in any slot" if reached < total else ""
    return Watched("samples", group.name, reached, total, "too few slots were written" if words else "", words)


def _values(group: PoolGroup) -> Watched:
    """Return in how many layers of K and V every row written was looked at for NaN, infinity and zeros."""
    watched = sum(len(stream.layers) for stream in _sampling(group) if stream.dtype in FLOATS)
    total = len(group.halves) * group.num_layers or None
    words = "" if watched == total else "NaN, infinity and zeros in K and V"
    if words and watched:
        words += f" of some layers ({watched:,} of {total:,} looked at)" if total else " of some layers"
    return Watched("values", group.name, watched, total, words=words)


def _of_forwards(what: str, name: str, counted: Sequence[int], figure: int, thing: str, reason: str = "") -> Watched:
    watched, total = counted[figure], counted[_FORWARDS]
    words = ""
    if watched < total:
        words = thing if not watched else f"{thing} in {total - watched:,} of {total:,} forwards"
    return Watched(what, name, watched, total, reason if words else "", words)


def _ranks(header: TraceHeader) -> Watched:
    ranks = header.ranks
    total = max(1, ranks.tp_size) * max(1, ranks.pp_size) * max(1, ranks.dp_size)
    words = f"the {total - 1:,} other ranks" if total > 2 else "the other rank" if total > 1 else ""
    return Watched(RANKS, "", 1, total, words=words)


def _checks(names: Sequence[str]) -> Watched:
    left_out = [name for name in CHECK_NAMES if name not in names]
    total, words = len(CHECK_NAMES), ""
    if left_out:
        words = "every history check" if len(left_out) == total else f"the checks {', '.join(left_out)}"
        words += " (--checks)"
    return Watched("checks", "", total - len(left_out), total, words=words)
