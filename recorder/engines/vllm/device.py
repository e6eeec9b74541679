"""vLLM's steps on a GPU, captured there without a wait: block tables, slots, tokens and lengths, where its kernels get them.

A step's block tables and slot mappings are the runner's own buffers, which attention's metadata point into, inside CUDA
graphs too; whether they do is looked at in each step. What the host knows of a step goes to the device beside them.
"""

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.capture.frames import AttentionLens, EngineTable, ModelInput
from ...capture.device.forward import BatchRequests, DeviceForward, ForwardPart
from ...capture.device.recorder import DeviceRecorder
from ...capture.privacy import IdentityValue
from ..common.hooking import put_in_place
from ..common.requests import TokenList, mode_by_lens
from .attention.given import FIELDS, AttentionReader
from .layout import VllmGroup, VllmLayout
from .recurrent import VllmStates
from .step import VllmRequest, above_needed, forward_context


def on_gpu(runner: Any) -> bool:
    """Say whether a runner's cache lies on a GPU."""
    return str(getattr(getattr(runner, "device", None), "type", "")) == "cuda"


def why_it_waits(runner: Any, layout: VllmLayout) -> str:
    """Return why a runner's forwards cannot be recorded without waiting for the device, nothing if they can."""
    config = runner.vllm_config
    prepares = getattr(getattr(runner, "model_state", None), "prepare_attn", None)
    reasons = {
        "a draft model's layers are recorded as they store K and V": (
            layout.draft is not None and layout.draft_offset is None
        ),
        "the model is fed positions of several dimensions": layout.positions.several and not layout.positions.places,
        "the model may be fed embeddings in place of tokens": bool(
            getattr(config.model_config, "enable_prompt_embeds", False)
        ),
        "a step may be split into micro-batches": bool(getattr(config.parallel_config, "use_ubatching", False)),
        "this vLLM prepares attention elsewhere": not is_v1(runner) and not callable(prepares),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def is_v1(runner: Any) -> bool:
    """Say whether a runner is the V1 one."""
    return hasattr(runner, "input_batch")


class HasBlocks(Protocol):
    """A KV-cache group of vLLM's: its number, and the tokens of a block that is given out."""

    @property
    def gid(self) -> int: ...  # noqa: D102

    @property
    def block_size(self) -> int: ...  # noqa: D102


def block_tables(runner: Any, groups: Sequence[HasBlocks]) -> list[EngineTable]:
    """Return the block tables that a runner's attention reads, `[requests of a batch, blocks]`, of each group."""
    found = []
    for group in groups:
        if is_v1(runner):
            own = runner.input_batch.block_table[group.gid]
            table, size = own.block_table.gpu, int(own.block_size)
        else:
            table, size = (
                runner.block_tables.input_block_tables[group.gid],
                int(runner.block_tables.block_sizes[group.gid]),
            )
        found.append(EngineTable(table, size, by_place=True, allocated=group.block_size))
    return found


@dataclass(slots=True, kw_only=True)
class DeviceStep:
    """What a step feeds the model, in the engine's own tensors; lengths that the host knows as arrays."""

    names: tuple[str, ...]  # the requests, in batch order
    prefix: Int64Array  # [bs] tokens in the cache, by the host
    extend: Int64Array  # [bs] tokens of this step, by the host
    prefix_there: Any = None  # [bs] tokens in the cache, if the device has decided; less `extend` if `with_extend`
    with_extend: bool = False
    extend_there: Any = None  # [bs] tokens of this step, if the device has decided
    input_ids: Any
    positions: Any
    written: Any  # [at least T] the slot of each token; of several groups [groups, at least T]
    num_tokens: int
    drafted: frozenset[str]  # requests that have drafted tokens verified
    given: Any = None  # attention's metadata by layer


def step_v1(runner: Any, output: Any, groups: Sequence[VllmGroup], input_ids: Any, positions: Any) -> DeviceStep:
    """Return what the V1 runner is about to feed its model; `output` is the scheduler's."""
    batch = runner.input_batch
    names = tuple(batch.req_ids)
    bs, total = len(names), int(output.total_num_scheduled_tokens)
    context = forward_context()
    mappings = getattr(context, "slot_mapping", None)
    written = []
    for group in groups:  # where a group's first layer takes them, else the runner's own
        found = mappings.get(group.layers[0]) if isinstance(mappings, dict) and group.layers else None
        written.append(batch.block_table[group.gid].slot_mapping.gpu if found is None else found)
    # With asynchronous speculation the host's are a guess.
    decided = getattr(runner, "use_async_spec_decode", False)
    return DeviceStep(
        names=names,
        prefix=batch.num_computed_tokens_cpu[:bs].astype(np.int64),
        extend=np.fromiter(map(output.num_scheduled_tokens.__getitem__, names), np.int64, bs),
        prefix_there=runner.num_computed_tokens if decided else None,
        input_ids=runner.input_ids.gpu if input_ids is None else input_ids,
        positions=positions,
        written=in_one(written, total),
        num_tokens=total,
        drafted=frozenset(output.scheduled_spec_decode_tokens or ()),
        given=getattr(context, "attn_metadata", None),
    )


def step_v2(output: Any, groups: Sequence[VllmGroup], batch: Any, slot_mappings: Any) -> DeviceStep:
    """Return the same of the V2 runner, out of its `InputBatch` and what `prepare_attn` returns."""
    names, total = tuple(batch.req_ids), int(batch.num_tokens)
    bs = len(names)
    extend = np.array(batch.num_scheduled_tokens[:bs], np.int64)
    decided = int(extend.sum()) != total  # how many drafts each request gets
    return DeviceStep(
        names=names,
        prefix=np.array(batch.num_computed_tokens_np[:bs], np.int64),
        extend=extend,
        prefix_there=batch.seq_lens,
        with_extend=True,
        extend_there=batch.query_start_loc[: bs + 1].diff() if decided else None,
        input_ids=batch.input_ids,
        positions=batch.positions,
        written=_rows_of(slot_mappings, groups, total),
        num_tokens=total,
        drafted=frozenset(output.scheduled_spec_decode_tokens or ()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOfRows(BatchRequests):
    """A forward's requests, with their rows `[bs]`."""

    rows: Int64Array


@dataclass(slots=True, kw_only=True)
class Batch:
    """What is known of a step's requests; kept for the next step, which mostly has the same with a token more each."""

    names: tuple[str, ...]
    extend: Int64Array  # [bs]
    extend_bytes: bytes
    prefix: Int64Array  # [bs] of the step that it was last used for
    requests: BatchOfRows
    tokens: list[TokenList]
    parts: tuple[ForwardPart, ...]
    mode: str
    whose: list[tuple[str, ...]]  # names of each forward's requests
    there: tuple[Any, ...]  # [bs] rows, extend and prefix on the device


@dataclass(slots=True, kw_only=True)
class TargetStep:
    """A step of the target's that has been captured, for the draft's forwards behind it."""

    batch: Batch
    before: Any  # [any] tokens in the cache, with those of the step if there is something to be taken off
    minus: Any | None  # [bs]
    written: Any  # as `DeviceStep` has it
    num_tokens: int
    new_rows: bool

    def prefix(self) -> Any:
        """Return the tokens in the cache, `[bs]`, on the device."""
        before = self.before[: len(self.batch.names)]
        return (before if self.minus is None else before - self.minus).long()


class DeviceSteps:
    """Has the device capture a runner's steps; `target` is the last one."""

    def __init__(
        self, recorder: DeviceRecorder, groups: Sequence[VllmGroup], tables: Sequence[EngineTable], states: VllmStates
    ) -> None:
        self._recorder = recorder
        self._groups = groups
        self._tables = tables
        self._states = states
        self._device = tables[0].table.device
        self._lies = [(one.table.data_ptr(), one.table.stride(0)) for one in tables]  # vLLM's own, made once
        self._batch: Batch | None = None
        self.target: TargetStep | None = None
        self._prepare()

    def _prepare(self) -> None:
        """Compile what either runner needs before the engine waits for it."""
        import torch

        longs, ints = (torch.zeros(2, dtype=dtype, device=self._device) for dtype in (torch.int64, torch.int32))
        lens = AttentionLens(seq_lens=ints, query_start_loc=ints, tables=True)
        slots = longs[:0] if len(self._tables) == 1 else longs[:0].expand(len(self._tables), 0)
        tokens = {"input_ids": ints, "positions": longs, "out_cache_loc": slots, "num_tokens": 0}
        for prefix, minus in ((longs[:1], None), (ints[:1], longs[:1])):
            given = ModelInput(rows=longs[:1], prefix=prefix, minus=minus, extend=longs[:1], **tokens)
            self._recorder.capture.prepare_for(given, lens)

    def tell_of_waits(self, result: Any) -> None:
        """Have the recorder's threads know when the engine's own thread waits for a step's result."""
        pauses, capture = self._recorder.pauses, self._recorder.capture
        get_output: Any = getattr(result, "get_output", None)

        def wait(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == capture.engine_thread:
                pauses.begin()
            try:
                return get_output(*args, **kwargs)
            finally:
                pauses.end()

        if callable(get_output):
            put_in_place(result, "get_output", functools.update_wrapper(wait, get_output))

    def goes_on(self, step: DeviceStep) -> bool:
        """Say whether a step decodes the requests of the last one, of which nothing else has changed."""
        batch = self._batch
        return (
            batch is not None
            and batch.mode == "decode"
            and not step.drafted
            and batch.names == step.names
            and batch.extend_bytes == step.extend.tobytes()
        )

    def before(
        self,
        step: DeviceStep,
        requests: Sequence[VllmRequest] | None,
        attention: AttentionReader,
        identity: Sequence[IdentityValue] = (),
    ) -> list[tuple[int, tuple[str, ...]]]:
        """Capture a step that is about to run; return the forwards that it is recorded as, and whose they are.

        `requests` are the step's, None if it goes on with the last one's; `identity` is as `ForwardInput` has it.
        """
        batch = self._batch
        new = requests is not None or batch is None
        if requests is not None or batch is None:
            batch = self._batch = self._batch_of(step, requests or (), identity)
        elif step.prefix_there is None and (step.prefix == batch.prefix + batch.extend).all():
            batch.there[2].add_(batch.there[1])
        elif step.prefix_there is None:
            batch.there = self._on_device(batch.requests.rows, step)
        batch.prefix = step.prefix
        extend = batch.there[1] if step.extend_there is None else step.extend_there
        number = self._recorder.next_forward
        self.target = target = TargetStep(
            batch=batch,
            before=batch.there[2] if step.prefix_there is None else step.prefix_there,
            minus=extend if step.with_extend else None,
            written=step.written,
            num_tokens=step.num_tokens,
            new_rows=new and any(known.fresh for known in requests or ()),
        )
        self._recorder.before_forward(
            DeviceForward(
                mode=batch.mode,
                runner=0,
                rows=batch.there[0],
                prefix=target.before,
                minus=target.minus,
                extend=extend,
                input_ids=step.input_ids,
                positions=step.positions,
                out_cache_loc=step.written,
                num_tokens=step.num_tokens,
                requests=batch.requests,
                truth_lens=[tokens.count for tokens in batch.tokens],
                parts=batch.parts,
                attention=self._lens(step, attention),
                states=self._states.on_device(step.given, len(step.names), step.input_ids[:0])
                if self._states.pools
                else (),
                new_rows=target.new_rows,
            )
        )
        return [(number + place, names) for place, names in enumerate(batch.whose)]

    def _batch_of(self, step: DeviceStep, requests: Sequence[VllmRequest], identity: Sequence[IdentityValue]) -> Batch:
        parts = self._parts(step, requests)
        whole = len(parts) == 1
        rows = np.array([known.row for known in requests], np.int64)
        tokens = [known.tokens for known in requests]
        return Batch(
            names=step.names,
            extend=step.extend,
            extend_bytes=step.extend.tobytes(),
            prefix=step.prefix,
            requests=BatchOfRows(
                ids=np.array([known.request_id for known in requests], np.int64),
                truth=tokens,
                rows=rows,
                identity=identity,
            ),
            tokens=tokens,
            parts=() if whole else tuple(parts),
            mode=parts[0].mode if whole else "",
            whose=[step.names if whole else tuple(step.names[r] for r in part.requests) for part in parts],
            there=self._on_device(rows, step),
        )

    def _parts(self, step: DeviceStep, requests: Sequence[VllmRequest]) -> list[ForwardPart]:
        """Return the step's forwards in order: a request that reads what others write in the step comes after them."""
        drafted = np.array([name in step.drafted for name in step.names], np.bool_)
        wave = 2 * levels_by_blocks(requests, step.prefix, step.extend, self._groups) + drafted
        prompt_lens = np.array([known.prompt_len for known in requests], np.int64)
        found = []
        for number in np.unique(wave):
            mine = np.flatnonzero(wave == number)
            mode = mode_by_lens(step.extend[mine], step.prefix[mine], prompt_lens[mine])
            found.append(ForwardPart("target_verify" if drafted[mine[0]] else mode, mine))
        return found

    def _on_device(self, rows: Int64Array, step: DeviceStep) -> tuple[Any, ...]:
        """Return rows, extend and prefix, `[bs]` each, on the device, without waiting."""
        import torch

        here = torch.from_numpy(np.stack((rows, step.extend, step.prefix)))
        if self._device.type == "cuda":
            here = here.pin_memory()
        return tuple(here.to(self._device, non_blocking=True).unbind())

    def _lens(self, step: DeviceStep, attention: AttentionReader) -> AttentionLens | None:
        """Return the lengths that all recorded layers get, None if they do not get the same, or it is not known."""
        if not isinstance(step.given, dict):
            return None
        where, tables, bs = set(), True, len(step.names)
        seq_lens: Any = None
        starts: Any = None
        for group, own, lies in zip(self._groups, self._tables, self._lies, strict=True):
            for layer, one in self._each_metadata(group, step.given):
                seq_lens, starts, table = (getattr(one, name, None) for name in FIELDS)
                if seq_lens is None or starts is None or seq_lens.shape[0] < bs or starts.shape[0] <= bs:
                    return None
                where.add((seq_lens.data_ptr(), starts.data_ptr()))
                tables &= (
                    table is not None
                    and (table.data_ptr(), table.stride(0)) == lies
                    and attention.block_size(layer, own.page_size) == own.page_size
                )
        return AttentionLens(seq_lens=seq_lens, query_start_loc=starts, tables=tables) if len(where) == 1 else None

    @staticmethod
    def _each_metadata(group: VllmGroup, given: dict[str, Any]) -> list[tuple[str, Any]]:
        """Return the metadata that a group's layers get, mostly one for all, each with its first layer."""
        layers = group.layers
        found = list(map(given.get, layers))
        if len(set(map(id, found))) == 1:
            return [(layers[0], found[0])]
        return list({id(one): (layer, one) for layer, one in reversed([*zip(layers, found, strict=True)])}.values())


def in_one(written: Sequence[Any], tokens: int) -> Any:
    """Return the slots of each group, `[groups, at least tokens]`, or of one as they are."""
    if len(written) == 1:
        return written[0]
    if len({slots.data_ptr() for slots in written}) == 1:
        return written[0].expand(len(written), -1)
    import torch

    return torch.stack([slots[:tokens] for slots in written])


def _rows_of(slots: Any, groups: Sequence[VllmGroup], tokens: int) -> Any:
    """Return the slots of groups, of all of vLLM's `[groups, at least tokens]`; without a copy if those are the same."""
    own = [group.gid for group in groups]
    if hasattr(slots, "stride") and slots.ndim == 2 and slots.stride(1) == 1 and own == list(range(slots.shape[0])):
        return slots
    return in_one([slots[gid] for gid in own], tokens)


def levels_by_blocks(
    requests: Sequence[VllmRequest], prefix: Int64Array, extend: Int64Array, groups: Sequence[VllmGroup]
) -> Int64Array:
    """Return how many others of a step must have written before each request can read, by the scheduler's blocks `[bs]`."""
    level = np.zeros(prefix.size, np.int64)
    readers = [r for r, known in enumerate(requests) if known.fresh and prefix[r] > 0]
    if not readers or len(requests) == 1:
        return level
    needs: list[tuple[int, Int64Array]] = []
    for group in groups:
        size, writers = group.block_size, dict[int, set[int]]()
        blocks = [known.blocks[group.gid] if group.gid < len(known.blocks) else [] for known in requests]
        for r, mine in enumerate(blocks):
            for block in mine[int(prefix[r]) // size : -(-int(prefix[r] + extend[r]) // size)]:
                writers.setdefault(block, set()).add(r)
        writers.pop(0, None)
        for r in readers:
            read = blocks[r][: -(-int(prefix[r]) // size)]
            others = set().union(*(writers.get(block, ()) for block in read)) - {r}
            needs.append((r, np.array(sorted(others), np.int64)))
    return above_needed(level, needs)
