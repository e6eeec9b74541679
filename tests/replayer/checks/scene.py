"""A stage on which a test plays an engine, event by event, to the real Recorder, and sees what one check makes of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from kvcanary.recorder.capture.forward_input import AttentionInput, ForwardInput, TruthTokens
from kvcanary.recorder.capture.privacy import IdentityValue
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.capture.recurrent import StateAccess
from kvcanary.recorder.trace.header import PoolGroup, Runner, StatePool, StateTable, TraceHeader
from kvcanary.recorder.trace.schema import SlotHistoryTold
from kvcanary.replayer.report.summary import Summary
from kvcanary.replayer.run.replay import ReplaySettings, replay

ROWS, WIDTH, SLOTS = 8, 32, 64


@dataclass(frozen=True, kw_only=True)
class Part:
    """A request's part of a forward: it has `prefix` tokens and writes the next ones to `slots`."""

    request: int
    row: int
    prefix: int
    slots: tuple[int, ...]
    state: int = -1  # slot of recurrent state
    reads: int | None = None  # the slot that it goes on from, -1 for none; None: `state`, if it has a prefix
    saves: tuple[int, int] = (-1, 0)  # the slot in which the state behind so many tokens is left, too


class Scene:
    """Every method tells one event and returns its number; tokens are `100 * request + position` until changed."""

    def __init__(
        self,
        path: Path,
        *,
        told: SlotHistoryTold = "complete",
        window: int = 0,
        sliding: int = 0,
        draft: bool = False,
        states: bool = False,
        padding_states: tuple[int, ...] = (),
        page_size: int = 1,
    ) -> None:
        self.path = path
        full = PoolGroup(name="full", num_slots=SLOTS, host_num_slots=SLOTS, page_size=page_size)
        groups = [replace(full, kind="swa", window=sliding) if sliding else full]
        if window:
            groups.append(PoolGroup(name="swa", kind="swa", window=window, lut=0, num_slots=SLOTS))
        if draft:
            groups.append(PoolGroup(name="draft", runner=1, num_slots=SLOTS))
        header = TraceHeader(
            groups=tuple(groups),
            tables=(StateTable(rows=ROWS, width=WIDTH),),
            lut_lens=(SLOTS,) if window else (),
            truth_table=StateTable(name="truth", rows=ROWS, width=WIDTH),
            runners=(Runner(), Runner(name="draft", token_offset=1)) if draft else (Runner(),),
            slot_history=told,
            states=(
                StatePool(name="mamba", num_slots=ROWS, hashed_bytes=8, from_end=True, padding_slots=padding_states),
            )
            if states
            else (),
        )
        self.states = np.zeros((ROWS, 2), np.int64)  # recurrent: how many tokens are in it, and their sum
        sources = {0: [self.states]} if states else {}
        self.recorder = Recorder(path, header, kv_watch_every=0, state_sources=sources)
        self.table = np.zeros((ROWS, WIDTH), np.int32)
        self.lut = np.zeros(SLOTS if window else 0, np.int64)
        self.tokens: dict[int, np.ndarray] = {}
        self._event = -1
        self._forward = -1

    def _told(self) -> int:
        self._event += 1
        return self._event

    def token(self, request: int) -> np.ndarray:
        return self.tokens.setdefault(request, 100 * request + np.arange(WIDTH))

    def request(self, request: int, identity: Sequence[IdentityValue] = ()) -> int:
        self.recorder.request(request_id=request, identity=identity)
        return self._told()

    def alloc(self, request: int, slots, status: str = "", *, group: int = 0, note: str = "", row: int = -1) -> int:
        self.recorder.slots("alloc", group=group, slots=slots, request_id=request, status=status, note=note, row=row)
        return self._told()

    def free(self, request: int, slots, *, group: int = 0, note: str = "finished", kind: str = "free") -> int:
        starts = np.array(slots)  # as runs: the recorder would drop what comes twice
        self.recorder.slots(kind, group=group, runs=(starts, np.ones_like(starts)), request_id=request, note=note)
        return self._told()

    def evict(self, slots, *, group: int = 0) -> int:
        return self.free(-1, slots, group=group, note="", kind="evict")

    def status(self, request: int, status: str, row: int = -1) -> int:
        self.recorder.request_status(request_id=request, status=status, row=row)
        return self._told()

    def copy(self, src: int, dst: int, count: int, **tiers: int) -> int:
        self.recorder.kv_copy(group=0, src=[src], dst=[dst], count=[count], **tiers)
        return self._told()

    def copy_state(self, source: int, slot: int) -> None:
        """Copy a slot of recurrent state, which is told with the next forward."""
        self.states[slot] = self.states[source]
        self.recorder.state_changed("copy", pool=0, slots=[slot], sources=[source])

    def clear_state(self, slot: int) -> None:
        self.states[slot] = 0
        self.recorder.state_changed("clear", pool=0, slots=[slot])

    def transfer(self, status: str, direction: str, slots, *, request: int = -1, room: int = 5) -> int:
        self.recorder.transfer(status, direction=direction, room=room, group=0, slots=slots, request_id=request)
        return self._told()

    def lose(self) -> int:
        self.recorder.lost("the test says so")
        return self._told()

    def sampled(self, forward: int, tokens: list[int], lens: list[int]) -> int:
        self.recorder.sampled(forward=forward, sampled_tokens=tokens, sampled_lens=lens)
        return self._told()

    def forward(
        self,
        *parts: Part,
        mode: str = "extend",
        runner: int = 0,
        padding: tuple[int, ...] = (),
        inputs: dict[tuple[int, int], int] | None = None,
        shift: int = 0,
        sampled: tuple[list[int], list[int]] = ((), ()),
        attention: AttentionInput | None = None,
        failed: bool = False,
        leaves: int | None = None,
        identity: Sequence[IdentityValue] = (),
        behind: int = 0,
    ) -> int:
        """Run the parts, `behind` so many other forwards of the same step; `padding` slots come behind, `inputs[request, position]` is fed instead of the truth, positions are off by `shift`."""
        ids, positions, slots = [], [], []
        for part in parts:
            end = part.prefix + len(part.slots)
            self.table[part.row, part.prefix : end] = part.slots
            truth = self.token(part.request)
            for position in range(part.prefix, end):
                fed = (inputs or {}).get((part.request, position))
                ids.append(int(truth[position + runner]) if fed is None else fed)
                positions.append(position + shift)
            slots += part.slots
        pad = len(padding)
        known = [self.token(p.request)[: p.prefix + len(p.slots) + runner] for p in parts]
        self.recorder.before_forward(
            ForwardInput(
                mode=mode,
                runner=runner,
                req_pool_indices=[p.row for p in parts] + [0] * pad,
                request_ids=[p.request for p in parts] + [-1] * pad,
                prefix_lens=[p.prefix for p in parts] + [0] * pad,
                extend_lens=[len(p.slots) for p in parts] + [1] * pad,
                input_ids=ids + [0] * pad,
                positions=positions + [0] * pad,
                out_cache_loc=(np.array([*slots, *padding]),),
                reads=(self.table,),
                luts=(self.lut,) if len(self.lut) else (),
                truth=TruthTokens(
                    flat=np.concatenate(known) if known else np.empty(0, np.int64),
                    lens=[len(part) for part in known] + [0] * pad,
                ),
                attention=attention,
                states=self._state_access(parts, pad),
                identity=identity,
                part=behind,
            )
        )
        for part in parts:
            if part.state >= 0:
                self.states[part.state] = part.prefix + len(part.slots) if leaves is None else leaves
            if part.saves[0] >= 0:
                self.states[part.saves[0]] = part.saves[1]
        tokens, lens = sampled
        given = [*lens, *[0] * pad] if len(lens) else ()
        self.recorder.after_forward(sampled_tokens=tokens, sampled_lens=given, failed=failed)
        self._forward += 1
        return self._told()

    def _state_access(self, parts: Sequence[Part], pad: int) -> tuple[StateAccess, ...]:
        if all(part.state < 0 for part in parts):
            return ()
        writes = [part.state for part in parts] + [-1] * pad
        own = [part.state if part.prefix else -1 for part in parts]
        reads = [n if part.reads is None else part.reads for n, part in zip(own, parts, strict=True)] + [-1] * pad
        saves, tokens = zip(*(part.saves for part in parts), *[(-1, 0)] * pad, strict=True)
        return (StateAccess(reads=reads, writes=writes, saves=saves, saved_tokens=tokens),)

    def start(self, request: int, row: int, slots) -> int:
        """Admit a request, give it slots, compute them in one forward; return that forward's event."""
        self.status(request, "admitted", row)
        self.alloc(request, slots, row=row)
        return self.forward(Part(request=request, row=row, prefix=0, slots=tuple(slots)))

    @property
    def last_forward(self) -> int:
        """The number of the forward told last."""
        return self._forward

    def judge(self, *checks: str) -> list[dict]:
        """End the trace and return what these checks find, as rows of the report."""
        return self.report(*checks)[1]

    def report(self, *checks: str) -> tuple[Summary, list[dict]]:
        self.recorder.close()
        assert self.recorder.stats().off == "closed", self.recorder.stats().off
        folder = self.path.with_suffix(".report")
        folder.mkdir()
        summary = replay(self.path, settings=ReplaySettings(checks=checks), report=folder)
        return summary, [row for row in pq.read_table(folder / "findings.parquet").to_pylist() if row["kind"] in checks]


def told(rows: list[dict]) -> list[tuple]:
    """What a test compares: forward, request, slot, count, evidence."""
    return [(r["forward"], r["request_id"], r["slot"], r["count"], r["evidence"]) for r in rows]


def decode(request: int, row: int, prefix: int, slot: int) -> Part:
    return Part(request=request, row=row, prefix=prefix, slots=(slot,))
