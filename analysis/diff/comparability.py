"""What of two traces can be compared, by their headers alone; and what cannot, said plainly."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import ByteArray
from ...kernels.capture.layers import FLOATS
from ...kernels.ops.token_rows.encoding import float_values
from ...recorder.trace.header import KvStream, TraceHeader
from ...recorder.trace.schema import SATURATED_SINCE, WRITTEN_VALUES
from .settings import KV_DTYPES, DiffSettings, NotComparableError

_HALVES: Final = ("K", "V")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledStream:
    """A stream that shows of each slot some bytes of one layer, by its place in the runner's stream order; both traces have one
    of its half. Of `layers` of the model both have the bytes, if `kv`, and what no model writes, if `values`.
    """

    place: int
    layers: tuple[int, ...]
    kv: bool
    values: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedGroup:
    """One pool group as one of the two traces has it; both read `window` positions (0: all), by their headers if `same_window`.

    `streams` are the places, in the runner's stream order, of the KV streams that both have, `capture_bytes` of each compared;
    `samples` those that sample all layers.
    """

    index: int
    window: int
    same_window: bool
    streams: tuple[int, ...] = ()
    capture_bytes: tuple[int, ...] = ()
    samples: tuple[SampledStream, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPlan:
    """The pool groups that both traces have, side by side: `groups[side][k]`; and what is left out, as `notes`.

    `states[side][k]` are the pools of recurrent state whose hashes mean the same. `same_engine`: names that an engine gives mean
    the same, and what is observed of one is of the other; `same_salt`: so do hashes of names. `value_kinds`: how many of
    `WRITTEN_VALUES` both looked for.
    """

    groups: tuple[tuple[ComparedGroup, ...], tuple[ComparedGroup, ...]]
    states: tuple[tuple[int, ...], tuple[int, ...]]
    same_engine: bool
    same_salt: bool
    kv: bool
    kv_dtype: str
    hand_over: bool
    value_kinds: int
    notes: tuple[str, ...]

    @property
    def samples(self) -> list[SampledStream]:
        """The streams that sample layers, of all groups, as A has them."""
        return [sample for group in self.groups[0] for sample in group.samples]


def plan_comparison(a: TraceHeader, b: TraceHeader, settings: DiffSettings) -> ComparisonPlan:
    """Say what of two traces can be compared; raise `NotComparableError` if nothing can, or not what was asked for."""
    notes: list[str] = []
    _same_model(a, b, settings)
    _same_tokens(a, b, notes)
    runners = min(len(a.runners), len(b.runners))
    if len(a.runners) != len(b.runners):
        notes.append(f"A has {len(a.runners)} model runners, B has {len(b.runners)}: the first {runners} are compared")
    pairs = [pair for runner in range(runners) for pair in _paired_groups(a, b, runner, notes)]
    if not pairs:
        raise NotComparableError("the traces have no pool group of the same kind")
    kv = settings.kv and _kv_wanted(a, b, settings, notes)
    sides: tuple[list[ComparedGroup], list[ComparedGroup]] = ([], [])
    for pair in pairs:
        mine, theirs = a.groups[pair[0]], b.groups[pair[1]]
        if mine.window != theirs.window:
            notes.append(f"group {mine.name}: windows of {mine.window} and {theirs.window}; what both read is compared")
        window = min(mine.window, theirs.window)
        streams = _paired_streams(a, pair[0], b, pair[1]) if kv else []
        sizes = tuple(stream[2] for stream in streams)
        sampled = _paired_samples(a, pair[0], b, pair[1], kv=kv)
        for side, index in enumerate(pair):
            group = ComparedGroup(
                index=index,
                window=window,
                same_window=mine.window == theirs.window,
                streams=tuple(stream[side] for stream in streams),
                capture_bytes=sizes,
                samples=tuple(stream[side] for stream in sampled),
            )
            sides[side].append(group)
    if kv and not any(group.streams for group in sides[0]):
        _refuse_kv("the traces hold KV bytes of different layers, halves or sizes", settings, notes)
        kv = False
    dtype = settings.kv_dtype or dtype_of(a.model.dtype)
    if kv and settings.kv_tolerance is not None:
        if dtype not in KV_DTYPES:
            raise NotComparableError(
                f"--kv-tolerance needs to know what the KV bytes are; the header says dtype {a.model.dtype!r}: name one "
                f"of {', '.join(KV_DTYPES)} with --kv-dtype, or compare byte by byte"
            )
        if not settings.kv_dtype and dtype_of(b.model.dtype) != dtype:
            raise NotComparableError(
                f"KV values of {a.model.dtype} and {b.model.dtype} cannot be compared; use --no-kv"
            )
    hand_over = bool(a.role and b.role and a.role != b.role)
    if hand_over:
        notes.append(f"A is a {a.role} side, B a {b.role} side: requests go by room, each side's own part is left out")
    _note_samples(a, b, sides[0], notes, kv=kv)
    return ComparisonPlan(
        groups=(tuple(sides[0]), tuple(sides[1])),
        states=_paired_states(a, b, runners, settings, notes),
        same_engine=a.engine.name == b.engine.name,
        same_salt=a.salt_id == b.salt_id,
        kv=kv,
        kv_dtype=dtype,
        hand_over=hand_over,
        value_kinds=WRITTEN_VALUES.index("saturated") + (min(a.format_minor, b.format_minor) >= SATURATED_SINCE),
        notes=tuple(notes),
    )


def seen_by_both(what: str, seen: Sequence[bool], notes: list[str]) -> bool:
    """Return whether both traces, `[2]`, observed something; note what only one did, since the other says nothing of it."""
    a, b = seen
    if a != b:
        notes.append(f"{what} are not compared, since only {'A' if a else 'B'} recorded them")
    return a and b


def _same_model(a: TraceHeader, b: TraceHeader, settings: DiffSettings) -> None:
    names = [PurePath(header.model.name).name for header in (a, b)]
    if names[0] != names[1] and not settings.any_model:
        raise NotComparableError(
            f"A is of model {names[0]!r}, B of {names[1]!r}; if these are two names of one model, say so with --any-model"
        )
    if a.oracle and b.oracle and a.oracle.vocab_size != b.oracle.vocab_size:
        raise NotComparableError(
            f"A samples among {a.oracle.vocab_size:,} tokens, B among {b.oracle.vocab_size:,}: not the same vocabulary"
        )


def _same_tokens(a: TraceHeader, b: TraceHeader, notes: list[str]) -> None:
    if a.tokens != b.tokens:
        raise NotComparableError(
            f"the tokens of A are {a.tokens}, those of B {b.tokens}: record both alike, hashed with the same salt"
        )
    if a.tokens == "hashed" and a.salt_id and b.salt_id and a.salt_id != b.salt_id:
        raise NotComparableError("the tokens of both are hashed, by different salts: record both with one salt file")
    if a.tokens == "hashed" and not (a.salt_id and b.salt_id):
        notes.append("tokens are hashed in both traces: taken for hashed with the same salt")


def _paired_groups(a: TraceHeader, b: TraceHeader, runner: int, notes: list[str]) -> list[tuple[int, int]]:
    mine, theirs = ([i for i, g in enumerate(h.groups) if g.runner == runner] for h in (a, b))
    pairs: list[tuple[int, int]] = []
    for kind in ("full", "swa"):
        ours = [i for i in mine if a.groups[i].kind == kind]
        others = [i for i in theirs if b.groups[i].kind == kind]
        pairs += zip(ours, others, strict=False)
        if len(ours) != len(others):
            notes.append(
                f"runner {runner}: A has {len(ours)} {kind} pool groups, B has {len(others)}; what both have is compared"
            )
    return pairs


def _other_bytes(a: TraceHeader, b: TraceHeader, settings: DiffSettings) -> str:
    """Say why bytes of the two models cannot be the same, "" if they can."""
    places = [f"tp {h.ranks.tp_rank}/{h.ranks.tp_size} pp {h.ranks.pp_rank}/{h.ranks.pp_size}" for h in (a, b)]
    if places[0] != places[1]:
        return f"A is rank {places[0]}, B {places[1]}: they hold other heads or layers"
    if a.model.dtype != b.model.dtype and not settings.kv_dtype:
        return f"A computes in {a.model.dtype!r}, B in {b.model.dtype!r}"
    return ""


def _kv_wanted(a: TraceHeader, b: TraceHeader, settings: DiffSettings, notes: list[str]) -> bool:
    why = _other_bytes(a, b, settings)
    for name, header in (("A", a), ("B", b)):
        if not why and not any(group.streams for group in header.groups):
            why = f"{name} holds no KV bytes"
    if why:
        _refuse_kv(why, settings, notes)
    return not why


def _refuse_kv(why: str, settings: DiffSettings, notes: list[str]) -> None:
    if settings.kv_tolerance is not None:
        raise NotComparableError(f"KV bytes cannot be compared: {why}")
    notes.append(f"KV bytes are not compared: {why}")


def _of_half(header: TraceHeader, group: int, half: str, *, samples: bool) -> list[tuple[int, KvStream]]:
    """Return a group's streams of one half, that sample layers or that do not, by their places in the runner's stream order."""
    streams = enumerate(header.streams(header.groups[group].runner))
    return [(at, one) for at, (of, one) in streams if (of, one.half, one.samples) == (group, half, samples)]


def _paired_streams(a: TraceHeader, first: int, b: TraceHeader, second: int) -> list[tuple[int, int, int]]:
    """Return `(place in A, place in B, bytes)` of the streams of one half, layer by layer, as far as they are alike."""
    found = []
    for half in _HALVES:
        mine, theirs = _of_half(a, first, half, samples=False), _of_half(b, second, half, samples=False)
        for (at, stream), (there, other) in zip(mine, theirs, strict=False):
            if stream.bytes_per_token == other.bytes_per_token:
                found.append((at, there, min(stream.capture_bytes, other.capture_bytes)))
    return found


def _paired_samples(
    a: TraceHeader, first: int, b: TraceHeader, second: int, *, kv: bool
) -> list[tuple[SampledStream, SampledStream]]:
    """Return the streams that sample layers, of one half in both groups, in A and in B."""
    found = []
    for half in _HALVES:
        mine, theirs = _of_half(a, first, half, samples=True), _of_half(b, second, half, samples=True)
        for (at, stream), (there, other) in zip(mine, theirs, strict=False):
            alike = [(one.bytes_per_token, one.dtype, one.scale) for one in (stream, other)]
            sample = SampledStream(
                place=at,
                layers=tuple(sorted({*stream.layers} & {*other.layers})),
                kv=kv and alike[0] == alike[1],
                values=stream.dtype in FLOATS and other.dtype in FLOATS,
            )
            found.append((sample, dataclasses.replace(sample, place=there)))
    return found


def _note_samples(
    a: TraceHeader, b: TraceHeader, groups: Sequence[ComparedGroup], notes: list[str], *, kv: bool
) -> None:
    sampling = [[stream for group in h.groups for stream in group.streams if stream.samples] for h in (a, b)]
    looked = [any(stream.dtype in FLOATS for stream in streams) for streams in sampling]
    samples = [sample for group in groups for sample in group.samples]
    for what, seen, compared in (
        ("KV bytes of later layers", [kv and bool(streams) for streams in sampling], [one.kv for one in samples]),
        ("NaN, infinities and rows of zeros", looked, [one.values for one in samples]),
    ):
        if seen_by_both(what, seen, notes) and not any(compared):
            notes.append(f"{what} are not compared: A and B looked at other halves, layers or types")


def _paired_states(
    a: TraceHeader, b: TraceHeader, runners: int, settings: DiffSettings, notes: list[str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the places of the pools of recurrent state that are compared, in A and in B; hashes know no tolerance."""
    what = "recurrent states"
    if not settings.kv:
        return (), ()
    if not seen_by_both(what, [any(pool.hashed_bytes for pool in h.states) for h in (a, b)], notes):
        return (), ()
    why = _other_bytes(a, b, settings)
    if settings.kv_tolerance is not None:
        why = why or "they are hashes, of which none is near to another (--kv-tolerance)"
    elif a.engine.name != b.engine.name:
        why = why or "A and B are other engines, which lay them out in their own ways"
    elif a.salt_id != b.salt_id:
        why = why or "they are hashed with different salts"
    pairs = []
    for runner in range(runners):
        sides = [[i for i, pool in enumerate(h.states) if pool.runner == runner] for h in (a, b)]
        for mine, theirs in zip(*sides, strict=False):
            one, other = a.states[mine], b.states[theirs]
            parts = [(pool.layer, pool.num_layers, pool.hashed_bytes, pool.from_end) for pool in (one, other)]
            same_part = parts[0] == parts[1]
            # What the hash of a slot of zeros is, says which hash it is; older formats had others.
            same_hash = one.zeros == other.zeros if one.zeros and other.zeros else a.format_minor == b.format_minor
            if same_part and same_hash:
                pairs.append((mine, theirs))
    if not why and len(pairs) < max(len(a.states), len(b.states)):
        left = f"{what}: of {len(a.states)} pools in A and {len(b.states)} in B {len(pairs)} are compared"
        notes.append(
            f"{left}: of others another layer or other bytes are hashed, or they are recorded in another format"
        )
    if why:
        notes.append(f"{what} are not compared: {why}")
        pairs = []
    return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)


FloatArray = npt.NDArray[np.float64]

_ALIASES: Final = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float8_e4m3fn": "fp8_e4m3",
    "fp8": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
_PLAIN: Final = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def dtype_of(name: str) -> str:
    """Return a header's dtype by the name that `KV_DTYPES` has for it, or as it is."""
    plain = name.lower().removeprefix("torch.")
    return _ALIASES.get(plain, plain)


def values_of(data: ByteArray, dtype: str) -> FloatArray:
    """Return bytes `[n, width]` of one of `KV_DTYPES` as values `[n, width / item size]`, NaN and infinities as they are."""
    if dtype in _PLAIN:
        return float_values(data, _PLAIN[dtype]).astype(np.float64)
    raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(KV_DTYPES)}")


def beyond(a: ByteArray, b: ByteArray, dtype: str, tolerance: float) -> npt.NDArray[np.bool_]:
    """Say for each row, `[n] bool`, if any of its values differ by more than `tolerance * (1 + |b|)`; equal bytes do not."""
    mine, theirs = values_of(a, dtype), values_of(b, dtype)
    with np.errstate(invalid="ignore"):
        near = np.abs(mine - theirs) <= tolerance * (1.0 + np.abs(theirs))
    near &= np.isfinite(theirs)  # an infinity would be near to everything
    return np.asarray(~(near | _equal(a, b, near.shape)).all(axis=1))


def largest_difference(a: ByteArray, b: ByteArray, dtype: str) -> float:
    """Return the largest absolute difference of two rows' values, infinity where one is no number; equal bytes have none."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(values_of(a, dtype) - values_of(b, dtype))
    apart = np.where(np.isnan(apart), np.inf, apart)
    return float(np.where(_equal(a, b, apart.shape), 0.0, apart).max(initial=0.0))


def _equal(a: ByteArray, b: ByteArray, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    return np.asarray((a == b).reshape(*shape, -1).all(axis=2))
