"""What the first layer's K and V of each token must be, kept where it is compared: on the GPU, or in the host's memory.

V follows from the token alone, and K, turned by the position, too. So the model computes a token once, and all rows that were captured
are compared with the table in one pass. What the table allows is never more than `FirstLayer.expected` does, wherever the token
stands: a row that fits is right by that definition, and of one that does not fit the definition itself is asked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from ...kernels.arrays import ByteArray, Int64Array
from ...kernels.ops.token_rows.reference import ALIGNED, Encoding, TokenTable, Turns, token_rows
from ...recorder.errors import TraceError, first_line
from ...recorder.trace.batch import TraceBatch
from ...recorder.trace.header import Ranks
from .first_layer import LEAST, NOISE, FirstLayer, heads_of_rank
from .turning import MOST_POSITIONS, Turning, learn_turning

# Another batch, another order of the sums, and angles that were learnt change a float32 by far less, of the largest value.
_MARGIN: Final = 2.0**-12
_OF_TOLERANCE: Final = 1 - 2.0**-10
# Of all tables and angles; what grows is there twice for a moment.
_MOST_BYTES: Final = {"cpu": 1 << 30, "cuda": 8 << 30}
_OF_FREE: Final = 4  # of a GPU's free memory a quarter: an engine may live there
_ROUND: Final = 8  # columns, so that rows begin where memory is read
_PROBED: Final = 4096  # positions among which a rotary embedding is looked at


class TokenTables:
    """The tables of a rank's halves, of each so many values of a token as `widths` says, filled as tokens come."""

    def __init__(self, layer: FirstLayer, ranks: Ranks, widths: dict[str, int]) -> None:
        self._layer, self._ranks = layer, ranks
        self.turning: Turning | None = None
        if layer.moves - set(layer.why_not):
            positions = min(_PROBED, layer.max_positions)
            # In other dtypes rounding is far less than what is allowed for.
            low = layer.low_keys if layer.dtype == layer.low_dtype == "bfloat16" else None
            self.turning = learn_turning(layer.keys, low, layer.vocab_size, positions, layer.batch)
        self._columns: dict[str, tuple[Int64Array, Int64Array]] = {}
        for half, width in widths.items():
            columns = self._columns_of(
                half, min(width, layer.width(half, ranks))
            )  # MLA's rotary part lies behind the latent
            if half not in layer.why_not and columns is not None:
                self._columns[half] = columns
        if self.turning is not None:
            for half in layer.moves & set(self._columns):
                self.turning.keep(len(self._columns[half][1]))
        row_bytes = sum(6 * (len(columns[0]) + 1) for columns in self._columns.values())
        # An angle has two float32 and two int16.
        angles = 12 * self.turning.cosines.shape[1] * min(MOST_POSITIONS, layer.max_positions) if self.turning else 0
        self._most = min(layer.vocab_size, max(0, _room(layer.device) - angles) // max(1, row_bytes))
        self._row_of = np.full(layer.vocab_size, -1, np.int32)
        self._size = 0
        self._tables: dict[str, TokenTable] = {}

    def _columns_of(self, half: str, width: int) -> tuple[Int64Array, Int64Array] | None:
        """Return the values of a rank that a table has, and for each that is compared the column of its partner."""
        own = np.arange(width)
        if half not in self._layer.moves:
            return _rounded(own), own
        if self.turning is None or len(self._layer.moves) > 1:
            return None
        dim = self.turning.pairs.dim
        partners = own // dim * dim + self.turning.pairs.partners[own % dim]
        columns = np.append(own, np.setdiff1d(partners, own))
        return _rounded(columns), np.array([int(np.flatnonzero(columns == one)[0]) for one in partners.tolist()])

    def _halves(self, half: str, width: int) -> int:
        """Return half a head's values if so many are whole heads whose halves turn, else 0."""
        if half not in self._layer.moves or self.turning is None:
            return 0
        dim = self.turning.pairs.dim
        by_halves = 2 * len(self.turning.pairs.first) == dim and bool((np.diff(self.turning.pairs.first) == 1).all())
        return dim // 2 if by_halves and width % dim == 0 else 0

    def load(self, batch: TraceBatch) -> Any:
        """Return a batch's `kv_bytes` where they are compared."""
        if self._layer.device == "cpu":
            return batch.values("kv_bytes")
        with _memory(self._layer.device):
            return batch.to_torch("kv_bytes")[0].to(self._layer.device)

    def flags(
        self, half: str, data: Any, begins: Int64Array, tokens: Int64Array, positions: Int64Array, encoding: Encoding
    ) -> ByteArray | None:
        """Return for tokens at positions `[n]`, whose bytes begin at `begins` `[n]` of what `load` gave, the flags of
        `kernels.ops.token_rows`; None where a half cannot be compared so. A token below 0 fits nothing.
        """
        if half not in self._columns or not len(begins) or bool((begins % ALIGNED).any()):
            return None
        if int(begins.max()) // ALIGNED >= 1 << 31:
            return None
        with _memory(self._layer.device):
            return self._flags(half, data, begins, tokens, positions, encoding)

    def _flags(
        self, half: str, data: Any, begins: Int64Array, tokens: Int64Array, positions: Int64Array, encoding: Encoding
    ) -> ByteArray | None:
        turns = None
        if half in self._layer.moves:
            assert self.turning is not None
            inside = positions < MOST_POSITIONS
            tokens, positions = np.where(inside, tokens, -1), np.where(inside & (tokens >= 0), positions, 0)
            turning = self.turning
            positions = turning.learn(positions)
            low = (turning.low_cosines, turning.low_sines, NOISE * _OF_TOLERANCE) if turning.rounds else ()
            turns = Turns(turning.cosines, turning.sines, *low)
        else:
            positions = np.zeros_like(positions)
        self._learn(tokens)
        rows = np.where(tokens >= 0, self._row_of[np.maximum(tokens, 0)], np.int32(-1))
        given = [one.astype(np.int32) for one in (begins // ALIGNED, rows, positions)]
        if half not in self._tables:
            return None
        return self._run(data, given, self._tables[half], turns, encoding)

    def _run(
        self, data: Any, given: list[Any], table: TokenTable, turns: Turns | None, encoding: Encoding
    ) -> ByteArray:
        """Compare, `given` begins, rows and positions; everything of the tables is a tensor."""
        names, flags = ("begins", "rows", "positions"), np.zeros(len(given[0]), np.uint8)
        if self._layer.device == "cpu":
            on_host = TokenTable(*map(_array, table))
            turned = None if turns is None else Turns(*map(_array, turns))
            arrays = dict(zip(names, given, strict=True))
            token_rows(data=data, **arrays, table=on_host, turns=turned, encoding=encoding, flags=flags)
            return flags
        import torch

        there = {name: torch.from_numpy(one).to(data.device) for name, one in zip(names, given, strict=True)}
        found: Any = torch.from_numpy(flags).to(data.device)
        token_rows(data=data, **there, table=table, turns=turns, encoding=encoding, flags=found, backend="triton")
        found = found.cpu().numpy()
        return np.asarray(found)

    def _learn(self, tokens: Int64Array) -> None:
        """Compute the rows of tokens that have none, as far as there is room."""
        asked = np.zeros(len(self._row_of), np.bool_)
        asked[tokens[tokens >= 0]] = True
        new = np.flatnonzero(asked & (self._row_of < 0))[: self._most - self._size]
        for at in range(0, len(new), self._layer.batch):
            some = new[at : at + self._layer.batch]
            zeros = np.zeros_like(some)
            pair = self._layer.both(some, zeros)
            for half, (columns, partners) in self._columns.items():
                full, low = (heads_of_rank(one[half], self._ranks) for one in pair)
                allowed = self._allowed(half, full, low)
                values, rounded = (one.reshape(len(some), -1)[:, columns] for one in (full, low))
                self._put(half, values, rounded, allowed, partners)
            self._row_of[some] = np.arange(self._size, self._size + len(some))
            self._size += len(some)

    def _allowed(self, half: str, full: Any, low: Any) -> Any:
        """Return how far tokens' values, `[n, heads, dim]`, may be off at every position, `[n]`; NaN where that is not known."""
        import torch

        largest = full.abs().amax(dim=(1, 2))
        if half not in self._layer.moves:
            tolerance = NOISE * (full - low).abs().amax(dim=(1, 2)) + LEAST * largest
            allowed = _OF_TOLERANCE * tolerance - _MARGIN * LEAST * largest
        else:
            assert self.turning is not None
            pairs = self.turning.pairs
            length = torch.hypot(full[..., pairs.first], full[..., pairs.second]).amax(dim=(1, 2))
            rest = np.setdiff1d(np.arange(pairs.dim), np.concatenate(pairs[:2]))
            stays = full[..., rest].abs().amax(dim=(1, 2)) if len(rest) else torch.zeros_like(length)
            # Of a pair that is turned one value has at least so much of its length.
            least, most = torch.maximum(length / 2**0.5, stays), torch.maximum(length, stays)
            allowed = LEAST * least - _MARGIN * most
        # Turned, what is near the end of what the engine's dtype holds may be beyond it.
        top = torch.finfo(getattr(torch, self._layer.low_dtype)).max / 4
        return torch.where(low.abs().amax(dim=(1, 2)) <= top, allowed, float("nan"))

    def _put(self, half: str, values: Any, low: Any, allowed: Any, partners: Int64Array) -> None:
        import torch

        turns = self.turning is not None and self.turning.rounds and half in self._layer.moves
        table, need = self._tables.get(half), self._size + len(values)
        if table is None or len(table.allowed) < need:
            more = min(self._most, max(need, 2 * self._size, 1024))
            new = TokenTable(
                values.new_zeros((more, values.shape[1])),
                allowed.new_zeros(more),
                torch.from_numpy(partners.astype(np.int32)).to(values.device),
                values.new_zeros((more, values.shape[1]) if turns else (1, 1), dtype=torch.int16),
                self._halves(half, len(partners)),
                _shift(partners),
            )
            if table is not None:
                new.values[: self._size], new.allowed[: self._size] = (
                    table.values[: self._size],
                    table.allowed[: self._size],
                )
            table = self._tables[half] = new
        table.values[self._size : need], table.allowed[self._size : need] = values, allowed
        if turns:
            table.low[self._size : need] = low.bfloat16().view(torch.int16)


def _room(device: str) -> int:
    """Return how many bytes tables may take on a device."""
    import torch

    most = _MOST_BYTES[device]
    return most if device == "cpu" else min(most, int(torch.cuda.mem_get_info()[0]) // _OF_FREE)


@contextmanager
def _memory(device: str) -> Iterator[None]:
    """Raise `TraceError` where a device's memory does not suffice, or it fails."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch's own are of RuntimeError
        way = "free memory there, or hide the GPU with CUDA_VISIBLE_DEVICES= to compare on the CPU"
        raise TraceError(f"rows cannot be compared with the model on {device}: {first_line(error)}; {way}") from None


def _array(one: Any) -> Any:
    """Return a tensor as an array, and anything else as it is."""
    return one.numpy() if hasattr(one, "numpy") else one


def _shift(partners: Int64Array) -> int:
    """Return how many columns behind each value its partner stands, 0 if not all as many."""
    first = int(partners[0]) if len(partners) else 0
    return first if (partners == first + np.arange(len(partners))).all() else 0


def _rounded(columns: Int64Array) -> Int64Array:
    """Return columns with some of them again at the end, so that there are a multiple of eight."""
    return np.append(columns, np.zeros(-len(columns) % _ROUND, np.int64))
