"""A row in another order: positions of one request in one another's slots."""

from types import SimpleNamespace

import pytest
from kvcanary.analysis.incidents.seen.observed import misplaced
from kvcanary.analysis.incidents.sign import POSITION, Sign


@pytest.mark.parametrize(("request_id", "found"), [(7, 2), (-1, 0)])
def test_a_walk_of_the_prefix_cache_has_no_row(request_id, found):
    """It meets many prompts, and what one of them has at a position may be what another was to have there."""
    place = {"kind": "", "bits": POSITION, "event": 9, "forward": 9, "mode": "sweep", "runner": 0, "group": 0}
    request = {"request_id": request_id, "request": "", "row": -1, "writer_request_id": 3, "writer_event": 5}
    head = [
        Sign(**place, **request, position=4, slot=1, expected_token=40, stored_position=5, stored_token=50),
        Sign(**place, **request, position=5, slot=2, expected_token=50, stored_position=4, stored_token=40),
    ]
    nothing = {"window": lambda _: 0, "filled": lambda _: None, "last": lambda *_: None}
    assert misplaced(SimpleNamespace(head=head, **nothing), head[0]) == found
