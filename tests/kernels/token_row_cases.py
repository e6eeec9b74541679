"""Random rows for the comparison with a table of tokens."""

from typing import Any

import numpy as np
import torch
from kvcanary.kernels.ops.token_rows.encoding import ITEM_BYTES
from kvcanary.kernels.ops.token_rows.reference import Encoding, TokenTable, Turns, token_rows

from .device_cases import both


def check_token_rows(seed: int, device: str, *, scale: int, exact: bool = False) -> None:
    """Rows of odd sizes, right, wrong, empty and of nobody, in every dtype, turned and not; `exact`: storing them changes nothing."""
    rng = np.random.default_rng(seed)
    dtype = str(rng.choice(list(ITEM_BYTES)))
    item, count = ITEM_BYTES[dtype], int(rng.integers(0, 15 * scale))
    width = int(rng.choice([16, 48, 80, 2048])) // item
    period = int(rng.choice([0, 2, 16, 128]))
    columns, tokens, places = width + int(rng.choice([0, 3, 8])), int(rng.integers(1, 50)), int(rng.integers(1, 70))
    values = rng.standard_normal((tokens, columns)).astype(np.float32)
    values[rng.random(values.shape) < 0.001] = rng.choice([np.nan, np.inf])
    partners = rng.integers(0, columns, width).astype(np.int32)
    allowed = np.abs(rng.standard_normal(tokens)).astype(np.float32) * np.float32(rng.choice([0.0, 0.01, 0.5]))
    half = shift = 0
    if seed % 2:
        shift = columns - width
        partners = (np.arange(width) + shift).astype(np.int32)
    if period >= 16 and rng.random() < 0.5:  # whole heads
        shift, half, columns = 0, period // 2, max(1, width // period) * period
        width = columns
        values = values[:, :1].repeat(columns, axis=1) * rng.standard_normal(columns).astype(np.float32)
        dim = np.arange(columns)
        partners = (dim // period * period + (dim + half) % period).astype(np.int32)
    angles = rng.standard_normal((places, max(1, period)))
    turns = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    wide = [values, *turns]
    bits = [torch.from_numpy(np.nan_to_num(one)).bfloat16().view(torch.int16).numpy() for one in wide]
    has_low, noise = bool(rng.random() < 0.5), float(rng.choice([0.5, 3.9, 8.0]))
    rows = rng.integers(-1 if rng.random() < 0.5 else 0, tokens, count).astype(np.int32)
    positions = rng.integers(0, places, count).astype(np.int32)
    column = np.arange(width) % max(1, period)
    right = values[rows][:, :width]
    place = positions[:, None], column
    with np.errstate(invalid="ignore"):
        if period:
            right = right * turns[0][place] + values[rows][:, partners] * turns[1][place]
    encoding = Encoding(dtype)
    if item == 1 or rng.random() < 0.1:
        encoding = Encoding(dtype, *rng.choice([0.02, 0.125, 1.0], 3).tolist(), float(rng.choice([0.0, 2.0])))
    if exact:
        encoding = Encoding(dtype)
    kind = getattr(torch, dtype)
    with np.errstate(invalid="ignore"):
        stored = torch.from_numpy(np.nan_to_num(right, nan=0.0, posinf=1.0, neginf=1.0) / np.float32(encoding.scale))
    stored = (stored.clamp(-120, 120).round() if dtype == "int8" else stored).to(kind).contiguous()
    raw = stored.view(torch.uint8).numpy().reshape(count, -1).copy() if count else np.zeros((0, width * item), np.uint8)
    spoilt = rng.random(count)
    raw[spoilt < 0.2] = 0
    some = np.flatnonzero(spoilt > 0.8)
    raw[some, rng.integers(0, width * item, len(some))] ^= rng.integers(1, 256, len(some)).astype(np.uint8)
    apart = -(-width * item // 16)
    order = rng.permutation(count).astype(np.int32)
    data = rng.integers(0, 256, (count * apart + 1) * 16).astype(np.uint8)
    for n in range(count):
        data[16 * apart * order[n] :][: width * item] = raw[n]

    def run(side: Any) -> None:
        table = TokenTable(
            side.given(values), side.given(allowed), side.given(partners), side.given(bits[0]), half, shift
        )
        low = (side.given(bits[1]), side.given(bits[2]), noise) if has_low else ()
        token_rows(
            data=side.given(data.reshape(-1, 16)).reshape(-1),  # an odd place would be no multiple of 16
            begins=side.given(order * np.int32(apart)),
            rows=side.given(rows),
            positions=side.given(positions),
            table=table,
            turns=Turns(*map(side.given, turns), *low) if period else None,
            encoding=encoding,
            flags=side.given(np.full(count, 0xA5, np.uint8)),
            backend="triton" if side.device else "reference",
        )

    both(run, device)
