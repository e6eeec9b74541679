"""Which blocks an engine's kernels copy, against the definition again."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcanary.kernels.ops.state_hash.triton_moves import moved_blocks


def expected(rows, to, of, bias, table):
    found = np.zeros((3, len(rows)), np.int64)
    for i, row in enumerate(rows):
        if row >= 0 and of[row] >= 0 and to[row] >= 0 and of[row] != to[row]:
            found[:2, i] = -1 if bias[row] else table[row, to[row]], table[row, of[row]]
    return found.reshape(-1).tolist()


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(0, 600), shorts=st.booleans(), apart=st.integers(0, 3))
def test_what_is_copied_is_found(seed, n, shorts, apart):
    rng = np.random.default_rng(seed)
    kind = np.int32 if shorts else np.int64
    num_rows, columns = int(rng.integers(1, 9)), int(rng.integers(1, 6))
    rows = rng.integers(-1, num_rows, n).astype(kind)
    to, of = (rng.integers(-1, columns, num_rows).astype(kind) for _ in range(2))
    bias = rng.integers(0, 2, num_rows).astype(kind) * rng.integers(0, 2)
    table = rng.integers(0, 1 << 20, (num_rows, columns + apart)).astype(kind)
    given_there = {"rows": rows, "to": to, "of": of, "bias": bias, "table": table[:, :columns]}
    found = moved_blocks(**{name: torch.from_numpy(values) for name, values in given_there.items()})
    assert found.tolist() == expected(rows, to, of, bias, table)
