"""What captured bytes are as numbers: floats of four, two and one bytes, and 8-bit integers."""

from typing import Final

import numpy as np
import numpy.typing as npt

from ...arrays import ByteArray

FloatArray = npt.NDArray[np.float32]

ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}


def float_values(rows: ByteArray, dtype: str) -> FloatArray:
    """Return rows of bytes `[n, width]` as numbers `[n, width / item size]`, of a dtype of `ITEM_BYTES`; NaN and infinities as they are."""
    rows = np.ascontiguousarray(rows)
    with np.errstate(invalid="ignore"):  # any byte may come, a signalling NaN too
        if dtype == "bfloat16":
            return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
        if dtype in ("float32", "float16"):
            return rows.view("<f4" if dtype == "float32" else "<f2").astype(np.float32)
        return NUMBERS[dtype][rows]


def _numbers() -> dict[str, FloatArray]:
    """Return by dtype of one byte what each of the 256 codes is."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    # Bias 7, no infinities, NaN where everything but the sign is set.
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * np.exp2(exponent - 7.0))
    value = np.where((code & 127) == 127, np.nan, value)
    found = {
        "float8_e4m3fn": np.where(code >= 128, -value, value),
        "float8_e5m2": (code.astype(np.uint16) << np.uint16(8)).view(np.float16),
        "int8": code.astype(np.uint8).view(np.int8),
    }
    return {dtype: values.astype(np.float32) for dtype, values in found.items()}


NUMBERS: Final = _numbers()
