"""Faults in what a model is about to get, for an engine that shows its tensors: done in place, before a recorder looks."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...recorder.capture.kv_tensor import KvTensor


class StepInputs:
    """What one forward is about to get, as `on_inputs` was given it: the engine's own arrays, numpy's or torch's.

    `input_ids`, `positions`, `slots` `[T]`, `prefix_lens`, `extend_lens`, `seq_lens` `[bs]`; `block_tables` `[bs, max_blocks]` with
    `block_size`, or `req_to_token` `[rows, width]` with `rows` `[bs]`; `K`, `V` a `KvTensor` of the first watched layer.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.prefix = [int(n) for n in given.get("prefix_lens", ())]
        self.extend = [int(n) for n in given.get("extend_lens", ())]
        self.block_size = int(given.get("block_size", 1)) if "block_tables" in given else 1

    def reading(self, least: int = 1) -> list[int]:
        """Return the requests that read at least so many cached positions and add a token."""
        return [r for r, (p, e) in enumerate(zip(self.prefix, self.extend, strict=True)) if p >= least and e > 0]

    def token(self, request: int) -> int:
        """Return the index of a request's first token."""
        return sum(self.extend[:request])

    def row(self, request: int) -> Any:
        """Return a request's row of the block table, to be written to."""
        if "block_tables" in self.given:
            return self.given["block_tables"][request]
        return self.given["req_to_token"][int(self.given["rows"][request])]

    def place(self, position: int) -> tuple[int, int]:
        """Return where in a row a position stands, and its offset there."""
        return divmod(position, self.block_size)

    def slot(self, request: int, position: int) -> int:
        """Return the slot of a request's position."""
        at, offset = self.place(position)
        return int(self.row(request)[at]) * self.block_size + offset


@dataclass(frozen=True, slots=True)
class InputFault:
    """One fault: what it needs of the inputs, and what a trace must have to show it, by its name in `Recorded`.

    `plant` changes the inputs and returns what it did, nothing if this forward gives no occasion.
    """

    name: str
    needs: tuple[str, ...]
    shows_in: str
    plant: Callable[[StepInputs], str]


def _other_token(inputs: StepInputs) -> str:
    for request in inputs.reading():
        at, ids = inputs.token(request), inputs.given["input_ids"]
        ids[at] = int(ids[at]) - 1 if int(ids[at]) > 1 else int(ids[at]) + 1
        return f"token {at} of the step is another"
    return ""


def _position(inputs: StepInputs) -> str:
    for request in inputs.reading():
        at = inputs.token(request)
        inputs.given["positions"][at] += 1
        return f"token {at} of the step is one position too far"
    return ""


def _wrong_slot(inputs: StepInputs) -> str:
    for request, other in itertools.permutations(inputs.reading(), 2):
        at, slot = inputs.token(request), inputs.slot(other, 0)
        if slot != inputs.slot(request, 0):
            inputs.given["slots"][at] = slot
            return f"token {at} of the step goes to slot {slot}, which another request reads"
    return ""


def _stale_row(inputs: StepInputs) -> str:
    for request, other in itertools.permutations(inputs.reading(), 2):
        length, _ = inputs.place(min(inputs.prefix[request], inputs.prefix[other]) - 1)
        mine, theirs = inputs.row(request), inputs.row(other)
        if int(mine[0]) != int(theirs[0]):
            mine[: length + 1] = theirs[: length + 1]
            return f"request {request} of the step reads what request {other} has"
    return ""


def _one_entry(inputs: StepInputs) -> str:
    for request, other in itertools.permutations(inputs.reading(), 2):
        at, _ = inputs.place(inputs.prefix[request] - 1)
        entry = int(inputs.row(other)[0])
        if entry not in [int(one) for one in inputs.row(request)[: at + 1]]:
            inputs.row(request)[at] = entry
            return f"the last entry that request {request} of the step reads is another's"
    return ""


def _short_length(inputs: StepInputs) -> str:
    readers = inputs.reading(2)
    if not readers or any(extend != 1 for extend in inputs.extend):
        return ""
    inputs.given["seq_lens"][readers[0]] -= 1
    return f"request {readers[0]} of the step is one token short"


def _overwritten(half: str) -> Callable[[StepInputs], str]:
    def plant(inputs: StepInputs) -> str:
        for request in inputs.reading(2):
            slot = inputs.slot(request, inputs.prefix[request] // 2)
            _damage(inputs.given[half], slot)
            return f"{half} of slot {slot} is overwritten before a request reads it"
        return ""

    return plant


def _damage(pool: KvTensor, slot: int) -> None:
    """Change the first number of a slot."""
    names, at = pool.axes.split(), slot - pool.first_slot
    tensor = pool.tensors[0]
    size = int(tensor.shape[names.index("slot")])
    where = {"block": at // size, "slot": at % size if "block" in names else at}
    index = tuple(where.get(name, 0) for name in names)
    tensor[index] = tensor[index] + 1 if isinstance(tensor, np.ndarray) else tensor[index].clone() + 1


_LENS: Final = ("prefix_lens", "extend_lens")
_TABLE: Final = (*_LENS, "table")
INPUT_FAULTS: Final = (
    InputFault("token_changed", ("input_ids", *_LENS), "truth", _other_token),
    InputFault("position_off_by_one", ("positions", *_LENS), "", _position),
    InputFault("wrong_slot", ("slots", *_TABLE), "", _wrong_slot),
    InputFault("stale_table_row", _TABLE, "", _stale_row),
    InputFault("stale_table_entry", _TABLE, "", _one_entry),
    InputFault("seq_len_one_short", ("seq_lens", *_LENS), "attention", _short_length),
    InputFault("k_overwritten", ("K", *_TABLE), "bytes", _overwritten("K")),
    InputFault("v_overwritten", ("V", *_TABLE), "bytes", _overwritten("V")),
)
