"""What tells mechanisms apart, asked of signs alone."""

from types import SimpleNamespace
from typing import Any

import pytest
from kvcanary.analysis.incidents.seen.observed import handed_round


@pytest.mark.parametrize(
    ("fed", "found"),
    [
        ([(1, 5, 7), (2, 7, 5)], [1, 2]),  # request, token sampled for it, token fed
        ([(1, 5, 7), (2, 7, 9), (3, 9, 5)], [1, 2, 3]),
        ([(1, 5, 9), (2, 5, 7), (3, 7, 5)], [2, 3]),  # two got the same token, one of which goes round
        ([(1, 5, 7), (2, 7, 9)], []),
        ([(1, 5, 7), (1, 7, 5)], []),  # one request's own
        ([], []),
    ],
)
def test_tokens_that_go_round_among_requests(fed: list[tuple[int, int, int]], found: list[int]) -> None:
    head = [
        SimpleNamespace(kind="input_not_sampled", event=3, request_id=request, expected_token=own, stored_token=got)
        for request, own, got in fed
    ]
    head.append(SimpleNamespace(kind="input_not_truth", event=3, request_id=9, expected_token=9, stored_token=5))
    cluster: Any = SimpleNamespace(head=head)
    assert [sign.request_id for sign in handed_round(cluster)] == found
