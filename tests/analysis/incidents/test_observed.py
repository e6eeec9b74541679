"""What tells mechanisms apart, asked of signs alone."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kvcanary.analysis.incidents.cluster import Cluster
from kvcanary.analysis.incidents.facts import Begin, Facts
from kvcanary.analysis.incidents.seen.observed import (
    goes_on_in_anothers,
    handed_round,
    in_windows_alone,
    last_of_its_prompt,
    left_out_of_a_hit,
)
from kvcanary.analysis.incidents.sign import TOKEN, Sign
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader


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


def cluster_of(sign: Sign, begin: Begin) -> Cluster:
    """A sign of a group of a window of 40, pages of 32, whose request began as `begin` says with a prompt of 97 tokens."""
    groups = (PoolGroup(name="sliding", kind="swa", window=40, num_slots=256, page_size=32),)
    facts = Facts(header=TraceHeader(groups=groups, tables=(StateTable(rows=4, width=128),)), begins={7: begin})
    facts.prompts[7] = 97
    return Cluster(signs=[sign], kinds=Counter(), reasons=Counter(), facts=facts)


def sign_of(position: int, slot: int, kind: str = "input_not_truth", runner: int = 0) -> Sign:
    of = {"request_id": 7, "request": "", "row": 1, "group": 0, "bits": 0, "event": 5, "forward": 2, "mode": "extend"}
    return Sign(kind=kind, runner=runner, position=position, slot=slot, **of)


@pytest.mark.parametrize(
    ("position", "slot", "event", "found"),
    [(24, 24, 5, True), (24, 40, 5, False), (64, 24, 5, False), (24, 24, 4, False)],
    ids=["left out", "another page", "computed by itself", "lost later"],
)
def test_what_a_hit_has_left_out_of_its_window(position: int, slot: int, event: int, found: bool) -> None:
    sign = sign_of(position, slot, "read_after_free")
    cluster = cluster_of(sign, Begin(event=event, forward=event, prefix_len=64, extend_len=33))
    assert left_out_of_a_hit(cluster, sign) == found


@pytest.mark.parametrize(
    ("slot", "wrong", "found"),
    [(36, 0, True), (37, 0, False), (36, TOKEN, False)],
    ids=["right behind", "elsewhere", "other tokens"],
)
def test_who_goes_on_in_anothers_page_that_holds_its_own_tokens(slot: int, wrong: int, found: bool) -> None:
    read = replace(sign_of(32, 32, "read_of_foreign_slot"), count=4)
    wrote, content = sign_of(36, slot, "write_to_foreign_slot"), replace(sign_of(32, 32, ""), bits=wrong)
    cluster = Cluster(signs=[read, wrote, content], kinds=Counter(), reasons=Counter(), facts=Facts())
    assert goes_on_in_anothers(cluster) == ((read, wrote) if found else None)


@pytest.mark.parametrize(
    ("position", "prefix", "runner", "found"),
    [(96, 96, 0, True), (95, 95, 0, False), (96, 64, 0, False), (96, 96, 1, False)],
    ids=["the last", "not the last", "not alone", "a draft's"],
)
def test_the_last_token_of_a_prompt_alone(position: int, prefix: int, runner: int, found: bool) -> None:
    sign = sign_of(position, 60, runner=runner)
    assert (
        last_of_its_prompt(cluster_of(sign, Begin(event=5, forward=2, prefix_len=prefix, extend_len=1)), sign) == found
    )


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
