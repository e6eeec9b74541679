"""The whole model of a checkpoint, up to the last layer of which anything was captured, for one request."""

import contextlib
import functools
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np

from ...kernels.arrays import ByteArray, Int64Array
from ...kernels.ops.token_rows.reference import NEAR_LARGEST, Encoding
from ...recorder.errors import TraceError, first_line
from ...recorder.trace.header import Ranks
from .first_layer import LEAST, NOISE, FloatArray, StopForwardError, load_one, of_rank, read_config
from .written import ROUNDING

_OF_LEAST: Final = 1 - 2.0**-6
_NOTHING: Final = np.empty(0, np.int64)


class Piece(NamedTuple):
    """Slots of which a stream shows the same layer: which of those that were seen, `of` `[m]`, from which value of a token on, `begins`
    `[m]`, and the bytes `data` `[m, width]`.
    """

    half: str
    layer: int
    encoding: Encoding
    of: Int64Array
    begins: Int64Array
    data: ByteArray


class Model:
    """What a checkpoint gives for a row of tokens, cold: K and V of its first `most_layers`, of all if that is 0, in float32 and in the
    engine's dtype. One of the two is loaded and computed once it is asked for.

    With a `head` also the log-probabilities of what follows.
    """

    def __init__(self, path: Path, dtype: str, *, head: bool = False, most_layers: int = 0) -> None:
        import torch

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        config = read_config(path, most_layers=0 if head else most_layers)
        if not dtype or dtype not in ROUNDING:
            raise TraceError(
                f"the trace is of a model in {dtype or 'an unknown type'}, expected one of {', '.join(ROUNDING)}"
            )
        self._load = functools.cache(
            lambda precise: load_one(path, config, dtype, self.device, precise=precise, head=head)
        )
        self.head, self.vocab_size = head, int(config.vocab_size)
        self.num_layers = int(config.num_hidden_layers)
        self._like_engine = dtype == "float32"  # whether float32 is what the engine has
        self._asked = _NOTHING, _NOTHING, _NOTHING
        self._computed: dict[bool, tuple[list[tuple[Any, Any]], FloatArray]] = {}
        self._rows: dict[tuple[int, str], tuple[FloatArray, FloatArray]] = {}

    def load(self) -> Self:
        """Return it with both loaded; raise `TraceError` if that cannot be."""
        for precise in (True, False):
            self._load(precise)
        return self

    def compute(self, tokens: Int64Array, starts: Int64Array, followed: Int64Array = _NOTHING) -> None:
        """Compute a request from its tokens `[n]`, in chunks that begin at `starts`, 0 among them, and what follows the positions
        `followed`.
        """
        self._asked = tokens, starts, followed
        self._computed.clear()
        self._rows.clear()

    @property
    def logprobs(self) -> list[FloatArray]:
        """Log-probabilities of what follows, in float32 and in the engine's dtype, `[m, vocab]` each."""
        return [self._of(precise)[1] for precise in (True, False)]

    def _of(self, precise: bool) -> tuple[list[tuple[Any, Any]], FloatArray]:
        if precise not in self._computed:
            try:
                self._computed[precise] = self._run(self._load(precise))
            except TraceError:
                raise
            except Exception as error:  # noqa: BLE001  # a token that the model has not, too little memory
                raise TraceError(f"the model cannot compute the request: {first_line(error)}") from None
        return self._computed[precise]

    def _run(self, model: Any) -> tuple[list[tuple[Any, Any]], FloatArray]:
        import torch
        from transformers import DynamicCache

        last, stops = self.num_layers - 1, not self.head

        class UpToLast(DynamicCache):
            ends = False

            def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
                found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
                if self.ends and layer_idx == last:
                    raise StopForwardError  # what comes behind it is in no cache
                return found

        tokens, starts, followed = self._asked
        cache, parts = UpToLast(), [np.empty((0, self.vocab_size), np.float32)]
        with torch.inference_mode(), contextlib.suppress(StopForwardError):
            for begin, chunk in zip(starts.tolist(), np.split(tokens, starts[1:]), strict=True):
                cache.ends = stops and begin == starts[-1]
                options: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
                asked = followed[(followed >= begin) & (followed < begin + len(chunk))] - begin
                if self.head:
                    options["logits_to_keep"] = torch.from_numpy(asked).to(self.device)
                out = model(input_ids=torch.from_numpy(chunk)[None].to(self.device), **options)
                if len(asked):
                    parts.append(out.logits[0].float().log_softmax(-1).cpu().numpy())
        return [(layer.keys, layer.values) for layer in cache.layers], np.concatenate(parts)

    def _heads(self, layer: int, half: str, *, precise: bool) -> Any:
        """Return K or V of all positions in a layer, `[n, heads, dim]`."""
        return self._of(precise)[0][layer]["KV".index(half)][0].transpose(0, 1)

    def rows(self, layer: int, half: str, ranks: Ranks) -> tuple[FloatArray, FloatArray]:
        """Return what a rank must hold of each position in a layer, `[n, width]`, and how much it may be off, `[n]`; not
        finite where the checkpoint gives NaN or infinity.
        """
        if (layer, half) not in self._rows:
            both = (self._heads(layer, half, precise=precise) for precise in (True, False))
            full, low = (of_rank(part.float().cpu().numpy(), ranks) for part in both)
            with np.errstate(invalid="ignore"):
                noise, largest = np.abs(full - low).max(axis=1), np.abs(full).max(axis=1)
            usual = np.median(noise[np.isfinite(noise)]) if np.isfinite(noise).any() else 0.0
            self._rows[layer, half] = full, NOISE * np.maximum(noise, usual) + LEAST * largest
        return self._rows[layer, half]

    def width(self, layer: int, half: str, ranks: Ranks) -> int:
        """Return how many values a rank has of a position."""
        return int(of_rank(self._heads(layer, half, precise=self._like_engine), ranks).shape[1])

    def near(self, piece: Piece, ranks: Ranks, positions: Int64Array) -> bool:
        """Say whether the values of a piece, at `positions` `[m]`, are all so near to what the engine's dtype gives that `rows` allows
        it, whatever float32 gives: that is no further from the other than the noise, of which it allows a multiple.
        """
        import torch

        heads = of_rank(self._heads(piece.layer, piece.half, precise=self._like_engine), ranks)
        at, first, raw = (torch.from_numpy(one).to(heads.device) for one in (positions, piece.begins, piece.data))
        encoding = piece.encoding
        there = raw.view(getattr(torch, encoding.dtype)).float()
        rows = heads[at].float()
        columns = first[:, None] + torch.arange(there.shape[1], device=heads.device)
        right = rows.gather(1, columns)
        if encoding.quantised:  # as kernels.ops.token_rows.too_far has it
            much = right.abs()
            off = (there * encoding.scale - right).abs() - (much * encoding.relative + encoding.absolute)
            beyond = (encoding.largest > 0) & (much >= NEAR_LARGEST * encoding.largest)
            off = torch.where(beyond, 0.0, off).amax(dim=1)
        else:
            off = (there - right).abs().amax(dim=1)
        return bool((off <= _OF_LEAST * LEAST * rows.abs().amax(dim=1)).all())
