"""One step of vLLM's in the recorder's words: what the model is about to read and write, as one forward or several.

vLLM lets a request of a step read blocks that another request writes in that step: each layer stores the K and V of
all before it attends. A replay reads before it writes, so such a step is recorded as several forwards, writers first.
"""

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.constants import UNKNOWN_TOKEN
from ...capture.attention import paged_read
from ...capture.forward_input import AttentionInput, ForwardInput, TableRead, TruthTokens
from ...capture.host_arrays import own_int64, ragged_index
from ...capture.privacy import IdentityValue
from ..common.requests import KnownRequest, RequestRows, TokenList, mode_by_lens, request_id_of, truth_tokens
from ..common.rotary import NEVER
from .attention.given import AttentionReader, chosen_reads
from .layout import VllmGroup


def prompt_of(request: Any) -> tuple[Int64Array, Int64Array]:
    """Return a prompt's tokens `[n] int64` and the positions, ascending, that are fed an embedding in place of one."""
    tokens, embeds = getattr(request, "prompt_token_ids", None), getattr(request, "prompt_embeds", None)
    if tokens is None:
        count = 0 if embeds is None else int(embeds.shape[0])
        return np.full(count, UNKNOWN_TOKEN, np.int64), np.arange(count, dtype=np.int64)
    mask = getattr(request, "prompt_is_token_ids", None)
    unknown = np.flatnonzero(~np.array(mask, np.bool_)) if mask is not None else np.empty(0, np.int64)
    return np.array(tokens, np.int64), unknown


class VllmRequest(KnownRequest):
    """One request; its tokens are the prompt's and those that steps have sampled."""

    def __init__(self, name: str) -> None:
        super().__init__(name, request_id_of(name))
        self.prompt_len = 0
        self.unknown: Int64Array = np.empty(0, np.int64)  # positions of the prompt that have no token
        self.since = 0  # the first forward whose samples are for its tokens as they are
        self.fresh = True  # has not run since it was given its row
        self.declared: list[IdentityValue] = []  # what its KV depends on beside its tokens, as the engine says
        self.identity: list[IdentityValue] = []  # that, and the weights that were seen
        self.adapter = -1  # its number, 0 for none; -1 if nobody said it
        self.blocks: list[list[int]] = []  # of each of the engine's groups, as the scheduler says

    @property
    def text_from(self) -> int:
        """The position from which on it is text alone: behind a prompt with media; never if nobody said what it has."""
        media = [value for value in self.declared if value.kind == "media"]
        return 0 if media and not any(value.length for value in media) else self.prompt_len if media else NEVER

    def begin(self, tokens: Sequence[int] | Int64Array) -> None:
        """Start over from these tokens; what the engine keeps in the place of an embedding is none."""
        self.tokens = TokenList()  # another: who has read the old one's is not to take these for its next ones
        kept = self.tokens.begin(tokens)
        kept[self.unknown[self.unknown < kept.size]] = UNKNOWN_TOKEN

    def cut(self, count: int) -> None:
        """Forget the tokens from `count` on."""
        if count < len(self.tokens):
            kept = self.tokens.all()[: max(0, count)]
            self.tokens = TokenList()
            self.tokens.begin(kept)

    def got_blocks(self, blocks: Sequence[Sequence[int]] | None, *, anew: bool) -> None:
        """Take over the blocks that a request has, `anew`, or gets beside those, in each of the engine's groups."""
        if anew:
            self.blocks = [list(mine) for mine in blocks or ()]
            return
        for mine, new in zip(self.blocks, blocks or (), strict=False):
            mine += new


class VllmRequests(RequestRows[VllmRequest]):
    """The engine's live requests; `lock` is to be held when tokens change: results may arrive in a thread of its own."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows, VllmRequest)
        self.lock = threading.Lock()

    def text_from(self, names: Sequence[str]) -> Int64Array:
        """Return `[bs]` the position from which on each request is text alone, beyond all for one that is not known."""
        return np.array([NEVER if one is None else one.text_from for one in self.known(names)], np.int64)

    def truth(self, requests: Sequence[VllmRequest], most: Int64Array | None = None) -> TruthTokens:
        """Return the tokens of a forward's requests, of each at most so many of the first ones."""
        with self.lock:
            tokens = [known.tokens.all() for known in requests]
        return truth_tokens(tokens if most is None else [own[:n] for own, n in zip(tokens, most, strict=True)])


@dataclass(slots=True, kw_only=True)
class Step:
    """What a step feeds the model, in the recorder's own arrays; tables and written slots of each recorded group."""

    names: tuple[str, ...]  # the requests, in batch order
    prefix: Int64Array  # [bs] tokens in the cache
    extend: Int64Array  # [bs] tokens of this step
    input_ids: Int64Array  # [T]
    positions: Int64Array  # [T]
    tables: tuple[tuple[Any, int], ...]  # block table [>= bs, blocks], not copied, and the tokens of its blocks
    written: tuple[Int64Array, ...]  # [T] the slot of each token
    drafted: frozenset[str]  # requests that have drafted tokens verified
    given: Any = None  # attention's metadata by layer, not copied, None if they are not known
    attention: tuple[AttentionInput, ...] = ()  # what attention gets by them, once that is known

    @property
    def block_sizes(self) -> list[int]:
        """Tokens of a block of each table."""
        return [size for _, size in self.tables]


def forward_context() -> Any:
    """Return what vLLM's layers are about to be given, None if there is nothing."""
    module = sys.modules.get("vllm.forward_context")
    if module is None or not module.is_forward_context_available():
        return None
    return module.get_forward_context()


# A forward of a step, the names of its requests, and their places in the step `[n]`.
StepForward = tuple[ForwardInput, tuple[str, ...], Int64Array]


def read_v1(
    runner: Any, output: Any, groups: Sequence[VllmGroup], input_ids: Any, positions: Any, attention: AttentionReader
) -> Step:
    """Read what the V1 runner is about to feed its model; `output` is the scheduler's."""
    batch = runner.input_batch
    names = tuple(batch.req_ids)
    bs, total = len(names), int(output.total_num_scheduled_tokens)
    extend = np.array([output.num_scheduled_tokens[name] for name in names], np.int64)
    # With asynchronous speculation the host's are a guess.
    on_device = getattr(runner, "use_async_spec_decode", False)
    prefix = own_int64((runner.num_computed_tokens if on_device else batch.num_computed_tokens_cpu)[:bs])
    tables = [batch.block_table[group.gid] for group in groups]
    sizes = [int(table.block_size) for table in tables]
    context = forward_context()
    given, mappings = getattr(context, "attn_metadata", None), getattr(context, "slot_mapping", None)
    written = []
    for group, table in zip(
        groups, tables, strict=True
    ):  # where a group's first layer takes them, else the runner's own
        found = mappings.get(group.layers[0]) if isinstance(mappings, dict) and group.layers else None
        written.append(own_int64((table.slot_mapping.gpu if found is None else found)[:total]))
    return Step(
        names=names,
        prefix=prefix,
        extend=extend,
        input_ids=own_int64((runner.input_ids.gpu if input_ids is None else input_ids)[:total]),
        positions=_positions(positions, prefix, extend, total),
        tables=tuple((table.block_table.gpu, size) for table, size in zip(tables, sizes, strict=True)),
        written=tuple(written),
        drafted=frozenset(output.scheduled_spec_decode_tokens or ()),
        given=given,
        attention=attention.read(given, prefix, extend, sizes),
    )


def read_v2(
    runner: Any, output: Any, groups: Sequence[VllmGroup], batch: Any, block_tables: Any, slot_mappings: Any
) -> Step:
    """Read the same of the V2 runner, out of its `InputBatch` and what `prepare_attn` returns."""
    names = tuple(batch.req_ids)
    bs, total = len(names), int(batch.num_tokens)
    extend = own_int64(batch.num_scheduled_tokens[:bs])
    if int(extend.sum()) != total:  # the device has decided how many drafts each request gets
        extend = np.diff(own_int64(batch.query_start_loc[: bs + 1]))
    prefix = own_int64(batch.seq_lens[:bs]) - extend
    sizes = runner.block_tables.block_sizes
    return Step(
        names=names,
        prefix=prefix,
        extend=extend,
        input_ids=own_int64(batch.input_ids[:total]),
        positions=_positions(batch.positions, prefix, extend, total),
        tables=tuple((block_tables[group.gid], int(sizes[group.gid])) for group in groups),
        written=tuple(own_int64(slot_mappings[group.gid][:total]) for group in groups),
        drafted=frozenset(output.scheduled_spec_decode_tokens or ()),
    )


def _positions(positions: Any, prefix: Int64Array, extend: Int64Array, total: int) -> Int64Array:
    """Return `[T]`; where a model is fed positions of several dimensions by an engine without others, places in the sequence."""
    if positions is None or len(positions.shape) != 1:
        return ragged_index(prefix, extend)
    return own_int64(positions[:total])


def forwards_of(
    step: Step, groups: Sequence[VllmGroup], requests: Sequence[VllmRequest], known_requests: VllmRequests
) -> list[StepForward]:
    """Return the step's forwards in order."""
    begins = np.cumsum(step.extend) - step.extend
    # The engine keeps anything in the place of a token at a position that is fed an embedding: it is unknown.
    for known, begin, prefix, extend in zip(requests, begins, step.prefix, step.extend, strict=True):
        if known.unknown.size:
            low, high = np.searchsorted(known.unknown, (prefix, prefix + extend))
            step.input_ids[begin - prefix + known.unknown[low:high]] = UNKNOWN_TOKEN
    tables = zip(step.tables, groups, strict=True)
    reads = [table_read(table, block_size, group, step.prefix) for (table, block_size), group in tables]
    drafted = np.array([name in step.drafted for name in step.names], np.bool_)
    level = levels(step, reads, np.array([known.fresh for known in requests], np.bool_))
    wave = 2 * level + drafted
    found: list[StepForward] = []
    for number in np.unique(wave):
        chosen = np.flatnonzero(wave == number)
        mine = [requests[r] for r in chosen.tolist()]
        prefix, extend = step.prefix[chosen], step.extend[chosen]
        tokens = tokens_of(step.extend, chosen)
        prompt_lens = np.array([known.prompt_len for known in mine], np.int64)
        forward = ForwardInput(
            mode="target_verify" if drafted[chosen[0]] else mode_by_lens(extend, prefix, prompt_lens),
            req_pool_indices=np.array([known.row for known in mine], np.int64),
            request_ids=np.array([known.request_id for known in mine], np.int64),
            prefix_lens=prefix,
            extend_lens=extend,
            input_ids=step.input_ids[tokens],
            positions=step.positions[tokens],
            out_cache_loc=tuple(slots[tokens] for slots in step.written),
            reads=tuple(chosen_reads(read, chosen) if chosen.size < len(requests) else read for read in reads),
            truth=known_requests.truth(mine),
            part=len(found),
        )
        found.append((forward, tuple(known.name for known in mine), chosen))
    return found


def tokens_of(extend: Int64Array, chosen: Int64Array) -> Any:
    """Return which tokens of a step are those of some of its requests, `chosen` `[n]`."""
    begins = np.cumsum(extend) - extend
    return ragged_index(begins[chosen], extend[chosen]) if chosen.size < extend.size else slice(None)


def table_read(table: Any, block_size: int, group: VllmGroup, prefix: Int64Array) -> TableRead:
    """Return the slots of the cached tokens, `prefix` `[bs]`, that each request of a batch reads in a group.

    A sliding window's read begins with the position before the window, the chain's predecessor. The engine does not
    read that one: if its block may have been given away already, slot 0 says that nothing is known of it. Of a window
    that is not its group's what the kernels read is all there is; if their calls show it, these say it. `table` is `[>= bs, blocks]`; its blocks of `block_size`
    tokens may be parts of those that the engine allocates.
    """
    window, kernels = group.window, group.kernel_window
    if not window:
        told = getattr(group.spec, "sliding_window", None)  # by a cache that keeps all all the same
        last = 0 if told is not None or group.window_at_call else kernels or 0
        return replace(paged_read(table, block_size, prefix), last=last)
    if kernels is not None and kernels != window:
        before = int(kernels > window)  # of a longer one the predecessor, too
        first = np.maximum(prefix - kernels - before, 0) if kernels else None
        read = paged_read(table, block_size, prefix, starts=first)
        return replace(read, window_observed=not group.window_at_call)
    read = paged_read(table, block_size, prefix, starts=np.maximum(prefix - window - 1, 0))
    sliding = np.flatnonzero(prefix > window)
    at = (np.cumsum(read.counts) - read.counts)[sliding]
    before = read.slots[at]
    gone = ((prefix[sliding] - window) % group.block_size == 0) | ((before >= 0) & (before < block_size))
    read.slots[at[gone]] = 0
    return replace(read, window_observed=kernels is not None and not group.window_at_call)


def levels(step: Step, reads: Sequence[TableRead], fresh: Any) -> Int64Array:
    """Return `[bs]` how many others of the step, one after another, must have written before a request can read.

    Only requests that are new in the batch (`fresh` `[bs] bool`) can have been given blocks of the same step.
    """
    level = np.zeros(step.prefix.size, np.int64)
    readers = np.flatnonzero(fresh & (step.prefix > 0))
    if not readers.size or step.prefix.size == 1:
        return level
    writer = np.repeat(np.arange(step.prefix.size, dtype=np.int64), step.extend)
    needs: list[tuple[int, Int64Array]] = []
    for written, read in zip(step.written, reads, strict=True):
        order = np.argsort(written, kind="stable")
        ascending = written[order]
        offsets = np.cumsum(read.counts) - read.counts
        for r in readers.tolist():
            slots = read.slots[offsets[r] : offsets[r] + read.counts[r]]
            at = np.minimum(np.searchsorted(ascending, slots), ascending.size - 1)
            hit = (ascending[at] == slots) & (slots > 0)
            others = np.unique(writer[order[at[hit]]])
            needs.append((r, others[others != r]))
    return above_needed(level, needs)


def above_needed(level: Int64Array, needs: Sequence[tuple[int, Int64Array]]) -> Int64Array:
    """Return levels at which each request is above those that it needs."""
    for _ in needs:  # a circle, which only a broken table has, ends here too
        before = level.copy()
        for r, others in needs:
            if others.size:
                level[r] = max(level[r], 1 + int(level[others].max()))
        if np.array_equal(before, level):
            break
    return level
