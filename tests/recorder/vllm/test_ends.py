"""What a device looks at of both ends of a connector's copies: rows here, parts of rows there, a hash once it is asked for."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from kvcanary.kernels.ops.end_hash.reference import end_hashes
from kvcanary.recorder.engines.vllm.connectors import ends as connector_ends
from kvcanary.recorder.engines.vllm.connectors.ends import DeviceEnds, Page

EACH, SIZES = 2, (64, 12)
GROUPS: Any = [SimpleNamespace(index=0), SimpleNamespace(index=1)]
LAYOUT: Any = SimpleNamespace(groups=GROUPS)


class Storage:
    """Blocks of two layers; `EACH` of them in a row of what they are copied to, which lies among others."""

    each = EACH

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.here = [torch.from_numpy(rng.integers(0, 256, (6, size), dtype=np.uint8)) for size in SIZES]
        memory = torch.from_numpy(rng.integers(0, 256, (4, 400), dtype=np.uint8))
        self.there = [memory[:, start : start + EACH * size] for start, size in zip((0, 200), SIZES, strict=True)]

    def rows_here(self, group: Any) -> Any:
        return self.here if group.index == 0 else ()

    def rows_there(self, group: Any) -> Any:
        return self.there if group.index == 0 else ()

    def row_there(self, page: Page) -> tuple[int, int]:
        key: Any = page.key
        return int(key[0]), int(key[1])


def pages(*places: tuple[int, tuple[int, int]]) -> list[Page]:
    return [Page(GROUPS[0], block, key) for block, key in places]


def test_both_ends_of_a_copy_that_is_right_have_one_hash() -> None:
    storage: Any = Storage()
    ends, wanted = DeviceEnds(storage, LAYOUT), pages((3, (1, 1)), (5, (2, 0)), (1, (0, 1)))
    for page in wanted[:2]:
        row, place = storage.row_there(page)
        for here, there, size in zip(storage.here, storage.there, SIZES, strict=True):
            there[row, place * size : (place + 1) * size] = here[page.block]
    here, there = ends.here(wanted), ends.there(wanted)
    expected = end_hashes([part.numpy()[[3, 5, 1]] for part in storage.here])
    storage.here[0][3] += 1  # what was looked at was looked at
    assert here.read().tolist() == here.read().tolist() == expected.tolist()
    assert (there.read() == expected).tolist() == [True, True, False]
    assert there.of([1]).of([0]).read().tolist() == [expected[1]]


@pytest.mark.parametrize("why", ["another group", "other sizes", "no words", "no rows"])
def test_what_cannot_be_read_has_none(why: str) -> None:
    storage: Any = Storage()
    wanted = pages((3, (1, 1)))
    if why == "another group":
        wanted = [Page(GROUPS[1], 3, (1, 1))]
    elif why == "other sizes":
        storage.there = storage.there[:1]
    elif why == "no words":
        storage.here, storage.there = [part[:, :3] for part in storage.here], [part[:, :6] for part in storage.there]
    else:
        storage = SimpleNamespace()
    ends = DeviceEnds(storage, LAYOUT)
    assert not ends.here(wanted).read().any() and not ends.there(wanted).read().any()


def test_of_too_many_blocks_the_first_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector_ends, "MAX_LOOKED_AT", 2 * sum(SIZES) + 1)
    storage: Any = Storage()
    found = DeviceEnds(storage, LAYOUT).here(pages((3, (1, 1)), (5, (2, 0)), (1, (0, 1)))).read()
    assert found.tolist() == [*end_hashes([part.numpy()[[3, 5]] for part in storage.here]).tolist(), 0]


def test_of_a_storage_that_is_not_read_a_large_block_is_looked_at_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector_ends, "MAX_SEEN_BYTES", 2 * 128)  # two parts of 32 words
    rows = [torch.zeros((3, 512), dtype=torch.uint8) for _ in range(2)]
    ends = DeviceEnds(cast("Any", SimpleNamespace(rows_here=lambda _: rows)), LAYOUT)
    assert ends.here(pages((1, (0, 0)))).read().tolist() == [ends.zeros(GROUPS[0])]
    rows[1][1, 64:256] = rows[1][2, 320:] = 7  # between the pieces that are looked at
    assert ends.here(pages((1, (0, 0)), (2, (0, 0)))).read().tolist() == [ends.zeros(GROUPS[0])] * 2
    rows[1][1, 256] = 7
    assert ends.here(pages((1, (0, 0)))).read().tolist() != [ends.zeros(GROUPS[0])]


@pytest.mark.parametrize(
    ("shape", "order", "parts"),
    [
        ((6, 4, 2, 8), (0, 1, 2, 3), 1),
        ((6, 4, 2, 8), (0, 2, 1, 3), 1),  # heads before tokens
        ((2, 6, 4, 2, 8), (0, 1, 2, 3, 4), 2),  # all K before all V
        ((2, 6, 4, 2, 8), (1, 0, 2, 3, 4), 2),  # K before V in each block
        ((6, 4, 2, 8), (1, 0, 2, 3), 0),  # a token of all blocks before the next one's
    ],
)
def test_the_bytes_of_a_block(shape: tuple[int, ...], order: tuple[int, ...], parts: int) -> None:
    """`order` is that of the dimensions in memory."""
    memory = torch.arange(6 * 64 * (2 if len(shape) == 5 else 1), dtype=torch.int16)
    kv = memory.view([shape[i] for i in order]).permute(*(order.index(i) for i in range(len(shape))))
    rows = connector_ends.byte_rows(kv, 6)
    assert len(rows) == parts
    of_block = kv[None, 3] if len(shape) == 4 else kv[:, 3]
    for row, whole in zip(rows, of_block, strict=bool(parts)):
        assert sorted(row[3].view(torch.int16).tolist()) == sorted(whole.reshape(-1).tolist())
