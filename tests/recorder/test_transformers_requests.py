"""Which rows and tokens the transformers adapter gives to requests that come, go, idle and start over."""

from pathlib import Path

import numpy as np
import pytest
from kvcanary.recorder.engines.transformers import attach
from kvcanary.recorder.engines.transformers.requests import KnownRequests
from kvcanary.recorder.trace.reader import read_trace

from .hooked_engine import assert_clean
from .tiny_models import generate, model


def test_rows_are_lent_and_the_longest_idle_gives_way() -> None:
    requests = KnownRequests(num_rows=4, num_groups=1)
    a, b, c, d = (requests.admit(name) for name in "abcd")
    assert [requests.run(r, 0) for r in (a, b, c)] == [1, 2, 3]
    assert requests.run(a, 1) == 1
    assert requests.run(d, 1) == 2  # b and c have been idle as long, b came first
    assert b.row == 0
    assert requests.run(b, 2) == 3  # c's
    requests.retire("a")
    assert requests.run(c, 2) == 1
    assert [r.request_id for r in (a, b, c, d)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="more requests than"):
        requests.run(requests.admit("e"), 2) and requests.run(d, 2) and requests.run(requests.admit("f"), 2)


def test_few_rows_still_give_a_clean_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = KnownRequests.__init__

    def scarce(requests: KnownRequests, *, num_rows: int, num_groups: int) -> None:
        made(requests, num_rows=4, num_groups=num_groups)

    monkeypatch.setattr(KnownRequests, "__init__", scarce)
    prompts = [list(range(10 + i, 30 + 3 * i)) for i in range(7)]
    with attach(tmp_path / "trace.arrow"):
        generate(model("llama"), prompts, max_requests_per_batch=3, max_new_tokens=12)
    assert assert_clean(tmp_path / "trace.arrow").requests == 7
    rows = {int(row) for event in read_trace(tmp_path / "trace.arrow") for row in event.ints("req_pool_indices")}
    assert rows <= {1, 2, 3}


def test_truth_follows_a_request_that_starts_over() -> None:
    (request,) = [KnownRequests(num_rows=2, num_groups=1).admit("a")]
    prompt, output = [1, 2, 3], []
    assert request.truth(prompt, output).tolist() == [1, 2, 3]
    for token in range(10, 30):
        output.append(token)
        np.testing.assert_array_equal(request.truth(prompt, output), prompt + output)
    restarted = prompt + output
    assert request.truth(restarted, [99]).tolist() == [*restarted, 99]
