"""KV bytes as the values that they are."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
ByteArray = npt.NDArray[np.uint8]

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
KV_DTYPES: Final = ("bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2")


def dtype_of(name: str) -> str:
    """Return a header's dtype by the name that `KV_DTYPES` has for it, or as it is."""
    plain = name.lower().removeprefix("torch.")
    return _ALIASES.get(plain, plain)


def values_of(data: ByteArray, dtype: str) -> FloatArray:
    """Return bytes as values.

    Args:
        data: `[n, width]`.
        dtype: one of `KV_DTYPES`.

    Returns:
        `[n, width / item size] float64`; NaN and infinities as they are.
    """
    rows = np.ascontiguousarray(data)
    with np.errstate(invalid="ignore"):  # any byte may come, a signalling NaN too
        if dtype == "fp32":
            return rows.view("<f4").astype(np.float64)
        if dtype == "fp16":
            return rows.view("<f2").astype(np.float64)
        if dtype == "bf16":
            return (rows.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        if dtype == "fp8_e5m2":
            return (rows.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float64)
        if dtype == "fp8_e4m3":
            return _E4M3[rows]
    raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(KV_DTYPES)}")


def beyond(a: ByteArray, b: ByteArray, dtype: str, tolerance: float) -> npt.NDArray[np.bool_]:
    """Say for each row, `[n] bool`, whether any of its values differ by more than `tolerance * (1 + |b|)`.

    Equal bytes are equal values, NaN and infinities too; either of them against anything else is a difference.
    """
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
    """Say which values, `shape` `[n, values]`, have the same bytes."""
    return np.asarray((a == b).reshape(*shape, -1).all(axis=2))


def _e4m3_table() -> FloatArray:
    """All 256 values of float8_e4m3fn: bias 7, no infinities, NaN where everything but the sign is set."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = (1 + mantissa / 8) * np.exp2(exponent - 7.0)
    value: Any = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    value = np.where((code & 127) == 127, np.nan, value)
    return np.asarray(np.where(code >= 128, -value, value), np.float64)


_E4M3: Final = _e4m3_table()
