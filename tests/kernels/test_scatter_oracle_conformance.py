"""scatter and the token oracle against the published references."""

from typing import Any

import numpy as np
from kvcanary.kernels.ops.oracle.reference import generalized_ids, oracle_tokens
from kvcanary.kernels.ops.scatter.reference import scatter


def make_scatter_case(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    bs = int(rng.choice([0, 1, 2, 5, 40])) if seed % 100 != 99 else 700  # the published kernel stops at 511
    num_rows, width = int(rng.integers(1, 50)), int(rng.choice([1, 3, 17]))
    lens = np.where(rng.random(bs) < 0.2, 0, rng.integers(0, width + 4, bs))
    offsets = np.concatenate([[0], np.cumsum(lens)]).astype(np.int64)
    flat = rng.integers(-(1 << 33), 1 << 33, int(offsets[-1]))
    rows = rng.integers(0, num_rows, bs)
    whole = rng.integers(0, 99, (num_rows, width * 2), dtype=np.int32)
    pool = whole[:, ::2] if rng.random() < 0.3 else whole[:, :width]
    return {"flat": flat, "offsets": offsets, "rows": rows, "pool": pool}


def test_scatter_equals_the_published_reference(published: Any, conformance_cases: int) -> None:
    cut = 0
    for seed in range(conformance_cases):
        want = make_scatter_case(seed)
        published.scatter(**want)
        for backend in ("reference", "cpu"):
            got = make_scatter_case(seed)
            out_of_range = np.zeros(1, np.int64)
            scatter(**got, out_of_range=out_of_range, backend=backend)
            # The base too: what lies between strided columns must stay.
            assert got["pool"].base.tobytes() == want["pool"].base.tobytes(), (seed, backend)
            assert out_of_range[0] == 0
        cut += int((np.diff(want["offsets"]) > want["pool"].shape[1]).any())
    assert cut > conformance_cases // 20


def test_oracle_equals_the_published_one(published: Any, conformance_cases: int) -> None:
    for seed in range(conformance_cases):
        rng = np.random.default_rng(seed)
        n = int(rng.choice([0, 1, 2, 33]))
        case: dict[str, Any] = {
            "request_ids": rng.integers(-(1 << 63), (1 << 63) - 1, n),
            "positions": rng.integers(0, 1 << int(rng.choice([4, 20, 40])), n),
            "vocab_size": int(rng.choice([1, 2, 7, 128256, (1 << 31) - 1])),
        }
        want = published.oracle_tokens(**case)
        sampled = published.sampled_tokens(**case)
        for backend in ("reference", "cpu"):
            got = np.full(n, -77)
            oracle_tokens(**case, out=got, backend=backend)
            assert got.tolist() == want.tolist(), (seed, backend)
            oracle_tokens(**{**case, "positions": case["positions"] + 1}, out=got, backend=backend)
            assert got.tolist() == sampled.tolist(), (seed, backend)


def test_rooms_stand_in_for_ids_where_there_is_one() -> None:
    out = np.full(3, -77)
    generalized_ids(request_ids=np.array([7, 8, 9]), rooms=np.array([-1, 0, 5]), out=out)
    assert out.tolist() == [7, 0, 5]
