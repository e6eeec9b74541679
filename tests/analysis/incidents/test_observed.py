"""What tells mechanisms apart, asked of signs alone."""

from types import SimpleNamespace
from typing import Any

import pytest
from kvcanary.analysis.incidents.seen.observed import handed_round, in_windows_alone


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


@pytest.mark.parametrize(
    ("signs", "found"),
    [
        ([("attention_slots", 1, 7)], True),
        ([("attention_slots", 1, 7), ("attention_slots", 0, 9)], True),  # in a later forward
        ([("attention_slots", 1, 7), ("attention_slots", 0, 7)], False),
        ([("attention_slots", 0, 7)], False),
        ([("attention_slots", 2, 7)], False),  # a table of its own
        ([("swa_mapping_stale", 1, 7)], False),
    ],
    ids=[
        "the window's alone",
        "later the other's, too",
        "both",
        "the other's",
        "of its own table",
        "nothing attention got",
    ],
)
def test_slots_that_layers_with_a_window_alone_got(signs: list[tuple[str, int, int]], found: bool) -> None:
    groups = [SimpleNamespace(runner=0, table=table, window=window, lut=lut) for table, window, lut in TABLES]
    of = [SimpleNamespace(kind=kind, group=group, event=event) for kind, group, event in signs]
    cluster: Any = SimpleNamespace(
        groups=groups,
        signs=of,
        group=lambda sign: sign.group,
        window=lambda sign: groups[sign.group].window,
        is_sliding=lambda sign: groups[sign.group].lut >= 0,
    )
    first: Any = of[0]
    assert in_windows_alone(cluster, first) == found


TABLES = ((0, 0, -1), (0, 4, 0), (1, 4, -1))  # of a group: its table, window, full-to-SWA table
