"""Frames: what the recorder captures of one forward on the device, and where each part lies.

A frame is a stretch of 64-bit words in device memory. Before the forward `begin_kernel` fills its inputs and the changes
of tables, after it `end_kernel` the bytes written and the bytes changed; both also update the device's shadows, which
hold what a replay of the trace knows. In between, what attention got is compared with them. Changes are compacted:
`counters` says how many there are of each sort. What does not fit its section is counted and left out, and the shadow
keeps its old value there.

The Triton kernels are in `frame_kernels`, their launches in `model_forward`. What they must find is defined by the plain
loops of `changes`, which the host's recorder uses; tests compare the two, event by event.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ..ops.state_hash.reference import POOL_WORDS, pool_words
from .layers import VALUE_KINDS

MAX_TABLES: Final = 4
MAX_GROUPS: Final = 4
MAX_LUTS: Final = 4
MAX_STREAMS: Final = 16
MAX_STATES: Final = 4
MAX_CARRIED: Final = 2  # tensors beside a frame's forward: what a full and a sliding-window pool give out

# Words of `counters`: how many changes were found, also of those that did not fit; how many programs have ended; how
# many slots attention got that differ; how many rows were written with values that no model writes.
TABLE_CHANGES, LUT_CHANGES, KV_CHANGES, DONE, ATTENTION, VALUES = 0, 1, 2, 3, 4, 5
NUM_COUNTERS: Final = 6

# Words of an entry in each section of changes.
TABLE_ENTRY: Final = 2  # row (and TABLE_OF_ENTRY times the runner's table), first position; then a slot for each position of a tile, or UNCHANGED
NOT_READ: Final = -1  # in place of the window of a table that no group of the runner has
UNCHANGED: Final = 1 << 40  # no slot: block tables are int32
TABLE_OF_ENTRY: Final = 1 << 32
LUT_ENTRY: Final = 3  # table, full slot, sliding-window slot
KV_ENTRY: Final = 2  # stream of the runner, slot; its bytes follow
ATTENTION_ENTRY: Final = 4  # group of the runner, request, position, slot that attention got

# What a frame holds of each request in each state pool: its slot, and the hash of that before the forward and after it; of a
# state that is saved its slot, how many tokens it is behind, and the hash after the forward.
STATE_SLOT, STATE_BEFORE, STATE_AFTER = range(3)
STATE_VALUES: Final = 3
# On top of a slot, where it is said whether its request begins with the state that lies there: this if not, twice this if so.
STATE_SAID: Final = 1 << 40
NOT_SAID, ALL_READ = -1, -2  # in place of the stride of what says so

# A runner's descriptor: words of the head (how many of each part), each group, full-to-SWA table, stream, block table.
GROUPS_AT: Final = 16
GROUP_WORDS: Final = 8
LUTS_AT: Final = GROUPS_AT + MAX_GROUPS * GROUP_WORDS
LUT_WORDS: Final = 4
STREAMS_AT: Final = LUTS_AT + MAX_LUTS * LUT_WORDS
STREAM_WORDS: Final = 24
TABLES_AT: Final = STREAMS_AT + MAX_STREAMS * STREAM_WORDS
TABLE_WORDS: Final = 12
STATES_AT: Final = TABLES_AT + MAX_TABLES * TABLE_WORDS
DESCRIPTOR_WORDS: Final = STATES_AT + MAX_STATES * POOL_WORDS


class EngineTable(NamedTuple):
    """An engine's block table, whose entries stand for `page_size` slots each."""

    table: Any  # [any, columns] int32
    page_size: int = 1
    # Its rows are a batch's places, not the rows that requests are numbered by; `allocated` is then the tokens of the blocks
    # that the engine gives out, which may be several entries.
    by_place: bool = False
    allocated: int = 0


class TableOnDevice(NamedTuple):
    """A block table and its shadow."""

    number: int  # the header's
    engine: EngineTable
    shadow: Any  # [rows, width] int32, the slot of each position


class GroupOnDevice(NamedTuple):
    """A pool group and its shadow."""

    number: int  # the header's
    table: int  # index into the runner's tables
    window: int  # positions of the prefix that are watched, 0 for all
    lut: int  # index into the runner's full-to-SWA tables, -1 for none
    num_slots: int
    stamps: Any  # [num_slots] int32, the forward that wrote a slot
    known: Any  # [num_slots] uint8: the bytes of which slots are known
    sampled: Any  # the same of streams that hold other bytes of each slot; `known` if there are none


class LutOnDevice(NamedTuple):
    """A full-to-SWA table and its shadow."""

    number: int  # the header's
    table: Any  # [length] int32 or int64
    shadow: Any  # [length] int64


class LayersOnDevice(NamedTuple):
    """The layers of which a stream holds some bytes of each slot, as `layers.Layers` has them: 64-bit words."""

    begins: Any  # [num_layers] int64, on the device
    chunks: Any  # [num_chunks] int64, on the device
    seed: int
    # `layers.words_on_device` of their type; empty if they are not searched for values that no model writes.
    lanes: tuple[int, ...]

    @property
    def value_words(self) -> int:
        """Words that say of a token in which of these layers it has such values: for each kind a bit of each layer."""
        return VALUE_KINDS * -(-int(self.begins.numel()) // 64) if self.lanes else 0


class StreamOnDevice(NamedTuple):
    """Where a stream's bytes lie, and their shadow."""

    address: int  # of the first slot's, a multiple of 8
    num_slots: int
    shadow: Any  # [num_slots, words] int64
    known: Any  # [num_slots] uint8: of which slots the shadow holds them
    group: int  # index into the runner's groups
    page_size: int  # slots of a page
    page_words: int  # from one page to the next
    token_words: int  # from one slot of a page to the next
    layers: LayersOnDevice | None = None

    @property
    def words(self) -> int:
        """Captured words of a slot."""
        return int(self.shadow.shape[1])

    def descriptor(self, before: int, values_before: int) -> tuple[int, ...]:
        """Return the words that kernels read it from; the streams before it have `before` captured words, and so many of values."""
        held = (self.address, self.page_words, self.num_slots, self.words, self.shadow.data_ptr(), self.group, before)
        there = (*held, self.page_size, self.token_words, self.known.data_ptr())
        if self.layers is None:
            return there
        begins, chunks, seed, lanes = self.layers
        layers = (*there, begins.numel(), begins.data_ptr(), chunks.numel(), chunks.data_ptr(), seed)
        return (*layers, *lanes, values_before) if lanes else layers


class StatesOnDevice(NamedTuple):
    """A pool of recurrent state."""

    number: int  # the header's
    parts: Sequence[Any]  # [num_slots, bytes that are hashed] uint8 each, rows of any stride
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOnDevice:
    """A model runner's tables, pools and shadows.

    Raises:
        ValueError: more parts than a descriptor holds, or arrays that are laid out otherwise than the kernels expect.
    """

    tables: Sequence[TableOnDevice]
    groups: Sequence[GroupOnDevice]
    luts: Sequence[LutOnDevice]
    streams: Sequence[StreamOnDevice]
    states: Sequence[StatesOnDevice] = ()

    def __post_init__(self) -> None:
        """Check what the kernels take for granted."""
        for name, parts, most in (
            ("block tables", self.tables, MAX_TABLES),
            ("pool groups", self.groups, MAX_GROUPS),
            ("full-to-SWA tables", self.luts, MAX_LUTS),
            ("streams", self.streams, MAX_STREAMS),
            ("state pools", self.states, MAX_STATES),
        ):
            if len(parts) > most:
                raise ValueError(f"a runner with {len(parts)} {name}, expected at most {most}")
        for table in (one.engine.table for one in self.tables):
            if str(table.dtype) != "torch.int32" or table.stride(1) != 1:
                raise ValueError(f"the block table has dtype {table.dtype}, expected rows of int32")
        if len({str(lut.table.dtype) for lut in self.luts}) > 1:
            raise ValueError("full-to-SWA tables of several dtypes, expected one")

    @property
    def stream_words(self) -> tuple[int, ...]:
        """Captured words of a slot, of each stream."""
        return tuple(stream.words for stream in self.streams)

    @property
    def value_words(self) -> tuple[int, ...]:
        """Words of a token that say where it has values that no model writes, of each stream."""
        return tuple(0 if one.layers is None else one.layers.value_words for one in self.streams)

    @property
    def lut_int64(self) -> bool:
        """Whether the full-to-SWA tables are int64, else int32."""
        return any(str(lut.table.dtype) == "torch.int64" for lut in self.luts)

    def descriptor(self) -> list[int]:
        """Return the words that the kernels read all this from."""
        words = [0] * DESCRIPTOR_WORDS
        words[6:11] = (len(self.groups), len(self.luts), len(self.streams), len(self.tables), sum(self.value_words))
        for at, group in zip(range(GROUPS_AT, LUTS_AT, GROUP_WORDS), self.groups, strict=False):
            words[at : at + 5] = (group.window, group.lut, group.num_slots, group.stamps.data_ptr(), group.table)
        for at, lut in zip(range(LUTS_AT, STREAMS_AT, LUT_WORDS), self.luts, strict=False):
            words[at : at + 3] = (lut.table.data_ptr(), lut.shadow.data_ptr(), lut.table.shape[0])
        before = 0
        for number, stream in enumerate(self.streams):
            told, at = stream.descriptor(before, sum(self.value_words[:number])), STREAMS_AT + number * STREAM_WORDS
            words[at : at + len(told)] = told
            before += stream.words
        for number, at in zip(range(len(self.tables)), range(TABLES_AT, STATES_AT, TABLE_WORDS), strict=False):
            words[at : at + 11] = self._table_words(number)
        for at, pool in zip(range(STATES_AT, DESCRIPTOR_WORDS, POOL_WORDS), self.states, strict=False):
            words[at : at + POOL_WORDS] = pool_words(pool.parts, pool.num_slots)
        return words

    def _table_words(self, number: int) -> tuple[int, ...]:
        (table, page_size, by_place, allocated), shadow = self.tables[number].engine, self.tables[number].shadow
        windows = [group.window for group in self.groups if group.table == number]
        # The slot before a window is its chain's predecessor, so its cell is read as well.
        longest = max(windows) + 1 if windows and 0 not in windows else 0
        if self.groups and not windows:
            longest = NOT_READ
        there = (table.data_ptr(), *table.shape, table.stride(0), shadow.data_ptr(), *shadow.shape)
        return (*there, longest, page_size, allocated, int(by_place))


class Section(NamedTuple):
    """Where the changes of one sort begin in a frame, how many fit there, and the words of each."""

    at: int
    capacity: int
    entry: int

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.at + self.capacity * self.entry


class FrameLayout:
    """The sections of one frame of `bs` requests, in words; made once for forwards of a size, since an engine's thread reads it.

    `inputs` words hold rows, prefix_lens, extend_lens `[bs]`, input_ids, positions and, of each of the runner's `tables`,
    out_cache_loc `[tokens]`; each stream's written bytes follow, `[tokens, words]`, then from `lens_at` on attention's sequence and query lengths, `[bs]` each;
    of each of `states` pools of recurrent state, and of each that has states saved, `[STATE_VALUES, bs]` from `states_at` on; what else the frame carries, at most
    `carried` words from `carried_at` on: `fixed` words are always there. Then come the `sections`, by their words of `counters`, and from `values_at` on of each
    stream that is searched `[tokens, VALUE_KINDS, -]` bits of layers: `words` in all. `ticket` is what a ticket says of this. An entry of the table changes speaks of `tile` positions.
    """

    def __init__(
        self,
        *,
        bs: int,
        tokens: int,
        stream_words: tuple[int, ...],
        table_capacity: int,
        lut_capacity: int,
        kv_capacity: int,
        tile: int,
        attention_capacity: int = 0,
        value_words: int = 0,
        tables: int = 1,
        carried: int = 0,
        states: int = 0,
    ) -> None:
        self.bs, self.tokens, self.stream_words, self.tables = bs, tokens, stream_words, tables
        self.inputs = 3 * bs + (2 + tables) * tokens
        self.lens_at = self.inputs + tokens * sum(stream_words)
        self.states, self.states_at = states, self.lens_at + 2 * bs
        self.carried, self.carried_at = carried, self.states_at + STATE_VALUES * bs * states
        self.fixed = self.carried_at + carried
        table = Section(self.fixed, table_capacity, TABLE_ENTRY + tile)
        lut = Section(table.end, lut_capacity, LUT_ENTRY)
        kv = Section(lut.end, kv_capacity, KV_ENTRY + max(stream_words, default=0))
        attention = Section(kv.end, attention_capacity, ATTENTION_ENTRY)
        self.sections = {TABLE_CHANGES: table, LUT_CHANGES: lut, KV_CHANGES: kv, ATTENTION: attention}
        self.values_at, self.values = attention.end, tokens * value_words
        self.words = self.values_at + self.values
        self.ticket = (*table[:2], *lut[:2], *kv, self.lens_at, *attention[:2], self.values_at)


class CarriedValues(NamedTuple):
    """What a ticket's launch copies into a frame: `MAX_CARRIED` tensors `[any] int64`, of which some may have nothing."""

    tensors: tuple[Any, ...]
    addresses: tuple[int, ...]
    places: tuple[int, ...]  # of each its place in the frames, and how many


@dataclass(slots=True, kw_only=True)  # to make a frozen one takes several times as long, in every step of an engine
class ModelInput:
    """What a model is run with: the engine's own tensors, of any integer type, contiguous, read on its stream."""

    rows: Any  # [bs] rows of the block table; row 0 is padding
    prefix: Any  # [any] tokens in the cache before this forward; 0 past its end
    minus: Any | None = None  # [bs] to be taken off `prefix`
    extend: Any | None = None  # [bs] tokens that this forward adds; None: `extend_each` for all
    extend_each: int = 1
    input_ids: Any  # [at least num_tokens]
    positions: Any  # [at least num_tokens]
    out_cache_loc: Any  # [any], or [tables, any] for several: slot of each token; past its end the tokens have none
    num_tokens: int

    def check(self) -> None:
        """Raise a `ValueError` for fewer lengths than requests, which the kernels would read beyond."""
        bs = self.rows.numel()
        for lens in (self.minus, self.extend):
            if lens is not None and lens.numel() < bs:
                raise ValueError(f"{lens.numel()} lengths for {bs} requests, expected one for each")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTensors:
    """What the attention kernels of a forward are given, contiguous and of any integer type."""

    kv_indptr: Any  # [at least bs + 1]
    kv_indices: Any  # [any]
    window_indptr: Any | None  # as `kv_indptr`, of a sliding window
    window_indices: Any | None
    qo_indptr: Any | None  # [at least bs + 1]; None: each request has one query token, whose slot is among `kv_indices`


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLens:
    """The lengths that attention is given, contiguous and of any integer type.

    `tables` says whether it reads its slots in the very block tables that are compared, of all groups.
    """

    seq_lens: Any  # [at least bs]
    query_start_loc: Any  # [at least bs + 1]
    tables: bool


class StateIndices(NamedTuple):
    """The slots of a state pool that a model's recurrent layers are given, any integer type and stride, -1 for none."""

    first: Any  # [any] of the first requests
    second: Any | None = None  # [any] of those behind them
    # Whether these begin with the state that lies there: `[any]` bool of each, True if all do, None if nobody says it.
    first_reads: Any | None = None
    second_reads: Any | None = None


class SavedStates(NamedTuple):
    """Where a forward leaves the states behind requests' first tokens, too: slots, -1 for none, and how many tokens; any integer
    type and stride.
    """

    slots: Any  # [at least bs]
    tokens: Any  # [at least bs]
