"""What of two traces can be compared, by their headers alone; and what cannot, said plainly."""

from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import ByteArray
from ...kernels.ops.token_rows.encoding import float_values
from ...recorder.trace.header import TraceHeader
from .settings import KV_DTYPES, DiffSettings, NotComparableError


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedGroup:
    """One pool group as one of the two traces has it; both read `window` positions (0: all).

    `streams` are the places, in the runner's stream order, of the KV streams that both have, `capture_bytes` of each compared.
    """

    index: int
    window: int
    streams: tuple[int, ...] = ()
    capture_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPlan:
    """The pool groups that both traces have, side by side: `groups[side][k]`; and what is left out, as `notes`."""

    groups: tuple[tuple[ComparedGroup, ...], tuple[ComparedGroup, ...]]
    kv: bool
    kv_dtype: str
    hand_over: bool
    notes: tuple[str, ...]


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
        for side, index in enumerate(pair):
            chosen = tuple(stream[side] for stream in streams)
            sides[side].append(ComparedGroup(index=index, window=window, streams=chosen, capture_bytes=sizes))
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
    return ComparisonPlan(
        groups=(tuple(sides[0]), tuple(sides[1])), kv=kv, kv_dtype=dtype, hand_over=hand_over, notes=tuple(notes)
    )


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
    if a.salt_id and b.salt_id and a.salt_id != b.salt_id:
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


def _kv_wanted(a: TraceHeader, b: TraceHeader, settings: DiffSettings, notes: list[str]) -> bool:
    places = [f"tp {h.ranks.tp_rank}/{h.ranks.tp_size} pp {h.ranks.pp_rank}/{h.ranks.pp_size}" for h in (a, b)]
    why = ""
    if places[0] != places[1]:
        why = f"A is rank {places[0]}, B {places[1]}: they hold other heads or layers"
    elif a.model.dtype != b.model.dtype and not settings.kv_dtype:
        why = f"A computes in {a.model.dtype!r}, B in {b.model.dtype!r}"
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


def _paired_streams(a: TraceHeader, first: int, b: TraceHeader, second: int) -> list[tuple[int, int, int]]:
    """Return `(place in A, place in B, bytes)` of the streams of one half, layer by layer, as far as they are alike."""
    found = []
    places = [
        [
            (place, stream)
            for place, (group, stream) in enumerate(h.streams(h.groups[g].runner))
            if group == g and not stream.samples
        ]
        for h, g in ((a, first), (b, second))
    ]
    for half in ("K", "V"):
        mine, theirs = ([(p, s) for p, s in side if s.half == half] for side in places)
        for (at, stream), (there, other) in zip(mine, theirs, strict=False):
            if stream.bytes_per_token == other.bytes_per_token:
                found.append((at, there, min(stream.capture_bytes, other.capture_bytes)))
    return found


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
