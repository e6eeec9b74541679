"""Which rows and tokens the transformers adapter gives to requests that come, go, idle and start over."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvcanary.recorder.engines.common.requests import KnownRequest, RequestRows, TokenList
from kvcanary.recorder.engines.transformers import attach
from kvcanary.recorder.trace.reader import read_trace

from ..support.engines.tiny_models import generate, model
from .hooked_engine import assert_clean


def test_rows_are_lent_and_the_longest_idle_gives_way() -> None:
    requests = RequestRows(4, lambda name: KnownRequest(name, 0))
    a, b, c, d = (requests.see(name)[0] for name in "abcd")
    assert [requests.run(r, 0) for r in (a, b, c)] == [True] * 3
    assert [r.row for r in (a, b, c)] == [1, 2, 3]
    assert not requests.run(a, 1)
    assert requests.run(d, 1)
    assert (d.row, b.row) == (2, 0)  # b and c have been idle as long, b came first
    assert requests.run(b, 2)
    assert b.row == 3  # c's
    requests.drop(a)
    assert requests.get("a") is None
    assert requests.run(c, 2)
    assert c.row == 1
    for name in "ef":
        known, new = requests.see(name)
        assert new
        if name == "e":
            assert requests.run(known, 2)
    with pytest.raises(ValueError, match="more requests than"):
        requests.run(requests.see("f")[0], 2)


def test_few_rows_still_give_a_clean_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = RequestRows.__init__

    def scarce(requests: Any, num_rows: int, make: Any) -> None:
        made(requests, 4, make)

    monkeypatch.setattr(RequestRows, "__init__", scarce)
    prompts = [list(range(10 + i, 30 + 3 * i)) for i in range(7)]
    with attach(tmp_path / "trace.arrow"):
        generate(model("llama"), prompts, max_requests_per_batch=3, max_new_tokens=12)
    assert assert_clean(tmp_path / "trace.arrow").requests == 7
    rows = {int(row) for event in read_trace(tmp_path / "trace.arrow") for row in event.ints("req_pool_indices")}
    assert rows <= {1, 2, 3}


def test_truth_follows_a_request_that_starts_over() -> None:
    tokens = TokenList()
    prompt, output = [1, 2, 3], []
    assert tokens.follow(prompt, output).tolist() == [1, 2, 3]
    for token in range(10, 30):
        output.append(token)
        np.testing.assert_array_equal(tokens.follow(prompt, output), prompt + output)
    restarted = prompt + output
    assert tokens.follow(restarted, [99]).tolist() == [*restarted, 99]
