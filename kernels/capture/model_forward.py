"""One run of a model that is taken down where it begins and where it ends: what is launched around it."""

from dataclasses import dataclass
from typing import Any

from . import frame_inside
from .frame_inside import attention_kernel, begin_kernel, end_kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """What a model is run with: the engine's own tensors, of any integer type, contiguous, as `FrameKernels` has them.

    `rows` `[bs]`, `prefix` `[any]`, `minus` and `extend` `[bs]` or None, `input_ids` and `positions` `[at least tokens]`,
    `out_cache_loc` `[any]`.
    """

    rows: Any
    prefix: Any
    minus: Any | None
    extend: Any | None
    extend_each: int
    input_ids: Any
    positions: Any
    out_cache_loc: Any
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTensors:
    """What the attention kernels of a forward are given, contiguous and of any integer type.

    `kv_indptr` `[at least bs + 1]`, `kv_indices` `[any]`; the same of a sliding window, or None; `qo_indptr`
    `[at least bs + 1]`, or None where each request has one query token, whose slot is among `kv_indices`.
    """

    kv_indptr: Any
    kv_indices: Any
    window_indptr: Any | None
    window_indices: Any | None
    qo_indptr: Any | None


class ModelForward:
    """Takes down one run of a model on the current stream, as its ticket says; in a graph, each time that is launched.

    Args:
        ticket: `[TICKET_WORDS] int64`, zeros as long as nothing is to be taken down.
        given: what the model is run with.
        attention: what its attention is given, None where that is not known.
        lut_int64: whether the runner's full-to-SWA tables are int64, else int32.
        tile: as of the frames.
    """

    __slots__ = (
        "_given",
        "_launched",
        "_lut_int64",
        "_tile",
        "address",
        "attention",
        "bs",
        "programs",
        "ticket",
        "tokens",
    )

    def __init__(
        self, ticket: Any, given: ModelInput, attention: AttentionTensors | None, *, lut_int64: bool, tile: int
    ) -> None:
        self.ticket = ticket
        self.address = int(ticket.data_ptr())
        self.bs = int(given.rows.numel())
        self.tokens = given.tokens
        self.attention = attention
        self.programs = frame_inside.PROGRAMS * (2 if attention is None else 3)
        self._launched = frame_inside.PROGRAMS
        self._given = given
        self._lut_int64 = lut_int64
        self._tile = tile

    @property
    def has_extend(self) -> bool:
        """Whether each request adds a number of tokens of its own."""
        return self._given.extend is not None

    def begin(self) -> None:
        """Launch what belongs right before the model's first layer."""
        given, attention = self._given, self.attention
        begin_kernel[(self._launched,)](
            self.ticket,
            given.rows,
            given.prefix,
            given.rows if given.minus is None else given.minus,
            given.rows if given.extend is None else given.extend,
            given.input_ids,
            given.positions,
            given.out_cache_loc,
            given.out_cache_loc.numel(),
            given.prefix.numel(),
            given.extend_each,
            self.bs,
            self.tokens,
            given.minus is not None,
            given.extend is not None,
            self._lut_int64,
            self._tile,
        )
        if attention is None:
            return
        window_indptr, window_indices = attention.window_indptr, attention.window_indices
        attention_kernel[(self._launched,)](
            self.ticket,
            attention.kv_indptr,
            attention.kv_indices,
            attention.kv_indices.numel(),
            attention.kv_indptr if window_indptr is None else window_indptr,
            attention.kv_indices if window_indices is None else window_indices,
            0 if window_indices is None else window_indices.numel(),
            attention.kv_indptr if attention.qo_indptr is None else attention.qo_indptr,
            self.bs,
            attention.qo_indptr is not None,
            window_indices is not None,
            self._tile,
        )

    def end(self) -> None:
        """Launch what belongs right after its last layer."""
        end_kernel[(self._launched,)](self.ticket, self.bs, self.tokens, self._tile)
