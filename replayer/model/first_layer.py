"""The first layer of a checkpoint, up to what it hands to the KV cache: computed by transformers' own model of that architecture.

What rounding does to a token's K and V is not guessed: they are computed twice, in float32 and in the engine's dtype.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import BoolArray, Int64Array
from ...kernels.ops.token_rows.reference import Encoding, too_far
from ...recorder.errors import TraceError, first_line
from ...recorder.trace.header import Ranks

FloatArray = npt.NDArray[np.float32]

_BATCH: Final = 4096
_BATCH_ON_GPU: Final = 1 << 15
_MOST_KEPT: Final = 1 << 24  # values
NOISE: Final = 4.0  # times what the engine's dtype differs by from float32
LEAST: Final = 2.0**-8  # of the largest value that a rank has of a token
COARSE: Final = {"float32": "bfloat16"}  # a float32's product may be one of tf32, which bfloat16 bounds
# Rotary embeddings that depend on the length of the request, which engines and transformers take for different things.
_BY_LENGTH: Final = frozenset({"dynamic", "longrope"})


class Expected(NamedTuple):
    """What tokens must have in a stream: `values` `[n, width] float32`, each with a `tolerance` `[n]`, and the rank's `largest` `[n]`."""

    values: FloatArray
    tolerance: FloatArray
    largest: FloatArray

    @property
    def known(self) -> BoolArray:
        """Say for which rows the checkpoint gives numbers, `[n]`: of NaN and infinity in it nothing follows for a slot."""
        return np.isfinite(self.tolerance)

    def differ(self, got: FloatArray, encoding: Encoding) -> BoolArray:
        """Say which rows `[n, width]`, stored in an encoding, are not what they must be, `[n]`."""
        with np.errstate(invalid="ignore"):
            return ~(too_far(got, self.values, encoding).max(axis=1, initial=0) <= self.tolerance)


class StopForwardError(Exception):
    """Ends a forward behind what the first layer hands to its cache."""


class FirstLayer:
    """What a checkpoint's first layer writes for a token at a position.

    `moves` are the halves that follow from the position too: K, of MLA's latent, which is its K, none but its rotary part. `why_not`
    says of halves why nothing is judged by them.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        import torch

        self.path = path
        self.dtype = dtype
        self.device = device = "cuda" if torch.cuda.is_available() else "cpu"
        config = read_config(path, most_layers=1)
        self.vocab_size = int(config.vocab_size)
        rope = getattr(config, "rope_parameters", None) or {}
        kinds = {rope.get("rope_type"), *(r.get("rope_type") for r in rope.values() if isinstance(r, dict))}
        self.max_positions = int(getattr(config, "max_position_embeddings", None) or 1)
        self.low_dtype = COARSE.get(dtype, dtype)
        self._full, self._low = load_pair(path, config, dtype, device)
        self.batch = _BATCH if device == "cpu" else _BATCH_ON_GPU
        # Of halves that follow from the token.
        self._of_tokens: dict[tuple[str, Ranks, int], tuple[BoolArray, Expected]] = {}
        self._vocabulary: dict[tuple[str, int, Ranks, int], FloatArray] = {}
        self._one = one = self._computed(self._full, np.ones(2, np.int64), np.array([0, 7]))
        self.moves = {
            half for half, rows in one.items() if bool((rows[0] - rows[1]).abs().max() > LEAST * rows.abs().max())
        }
        by_length = "its rotary embedding depends on the request's length"
        self.why_not = dict.fromkeys(self.moves if kinds & _BY_LENGTH else (), by_length)

    def expected(self, half: str, tokens: Int64Array, positions: Int64Array, ranks: Ranks, width: int) -> Expected:
        """Return what a rank must hold of tokens at positions `[n]`, the first `width` values of each, or all if they are fewer."""
        width = min(width, self.width(half, ranks))  # MLA's rotary part lies behind the latent
        if half in self.moves or self.vocab_size * width > _MOST_KEPT:
            return self._expected(half, tokens, positions, ranks, width)
        key = (half, ranks, width)
        if key not in self._of_tokens:
            shapes = ((self.vocab_size, width), self.vocab_size, self.vocab_size)
            self._of_tokens[key] = np.zeros(self.vocab_size, bool), Expected(*(np.empty(s, np.float32) for s in shapes))
        known, kept = self._of_tokens[key]
        new = np.unique(tokens[~known[tokens]])
        if len(new):
            for all_of, part in zip(kept, self._expected(half, new, np.zeros_like(new), ranks, width), strict=True):
                all_of[new] = part
            known[new] = True
        return Expected(*(all_of[tokens] for all_of in kept))

    def _expected(self, half: str, tokens: Int64Array, positions: Int64Array, ranks: Ranks, width: int) -> Expected:
        parts = [Expected(*(np.empty((0, *shape), np.float32) for shape in ((width,), (), ())))]
        for at in range(0, len(tokens), self.batch):  # all heads stay on the device
            some = tokens[at : at + self.batch], positions[at : at + self.batch]
            full, low = (of_rank(self._computed(model, *some)[half], ranks) for model in (self._full, self._low))
            largest = full.abs().amax(dim=1)
            tolerance = NOISE * (full - low).abs().amax(dim=1) + LEAST * largest
            parts.append(Expected(*(part.cpu().numpy() for part in (full[:, :width], tolerance, largest))))
        return Expected(*map(np.concatenate, zip(*parts, strict=True)))

    def width(self, half: str, ranks: Ranks) -> int:
        """Return how many values a rank has of a token in a half."""
        return int(of_rank(self._one[half], ranks).shape[1])

    def keys(self, tokens: Int64Array, positions: Int64Array) -> Any:
        """Return K in float32 of tokens at positions, `[n, heads, dim]` on the device."""
        return self._computed(self._full, tokens, positions)["K"]

    def low_keys(self, tokens: Int64Array, positions: Int64Array) -> Any:
        """Do what `keys` does, computed in the engine's dtype."""
        return self._computed(self._low, tokens, positions)["K"]

    def both(self, tokens: Int64Array, positions: Int64Array) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return by half what tokens are at positions, `[n, heads, dim] float32` on the device, computed in float32 and in the
        engine's dtype.
        """
        return self._computed(self._full, tokens, positions), self._computed(self._low, tokens, positions)

    def nearest_token(self, half: str, got: FloatArray, position: int, ranks: Ranks) -> int:
        """Return the token whose values in a half, at a position, are nearest to `[width]`."""
        position = position if half in self.moves else 0
        key = (half, position, ranks, len(got))
        if key not in self._vocabulary:
            self._vocabulary.clear()
            tokens = np.arange(self.vocab_size)
            parts = [
                of_rank(self._computed(self._full, part, np.full(len(part), position))[half], ranks)[
                    :, : len(got)
                ].cpu()
                for part in np.array_split(tokens, -(-len(tokens) // self.batch))
            ]
            self._vocabulary[key] = np.concatenate(parts)
        return _nearest(self._vocabulary[key], got)

    def nearest_position(self, half: str, got: FloatArray, token: int, positions: Int64Array, ranks: Ranks) -> int:
        """Return of `positions` the one at which a token's values in a half are nearest to `[width]`."""
        heads = self._computed(self._full, np.full(len(positions), token), positions)[half]
        return int(positions[_nearest(of_rank(heads, ranks)[:, : len(got)].cpu().numpy(), got)])

    def _computed(self, model: Any, tokens: Int64Array, positions: Int64Array) -> dict[str, Any]:
        """Return K and V that a model hands to its cache, `[n, heads, dim] float32` on the device, each token a request of its own."""
        import torch
        from transformers import DynamicCache

        class First(DynamicCache):
            handed: tuple[Any, ...] = ()

            def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> Any:
                self.handed = key_states, value_states
                raise StopForwardError

        cache = First()
        ids, at = (
            torch.from_numpy(np.ascontiguousarray(a, np.int64)).to(self.device)[:, None] for a in (tokens, positions)
        )
        try:
            with torch.inference_mode():
                model(input_ids=ids, position_ids=at, past_key_values=cache, use_cache=True)
        except StopForwardError:
            pass
        except Exception as error:  # noqa: BLE001  # whatever an architecture raises
            raise TraceError(f"{self.path}: the first layer cannot be computed: {first_line(error)}") from None
        if not cache.handed:
            raise TraceError(f"{self.path}: the first layer of {type(model).__name__} hands nothing to a KV cache")
        return {half: part[:, :, 0].float() for half, part in zip("KV", cache.handed, strict=True)}


def _nearest(rows: FloatArray, got: FloatArray) -> int:
    """Return which of the rows `[n, width]` is nearest to `[width]`; one with NaN in it is far from everything."""
    with np.errstate(invalid="ignore"):
        off = np.abs(rows - got).max(axis=1)
    return int(np.where(np.isnan(off), np.inf, off).argmin())


@lru_cache(maxsize=1)
def first_layer(path: str, dtype: str) -> FirstLayer:
    """Return the first layer of a checkpoint, run in a dtype; raise `TraceError` if there is none that can be computed."""
    with without_triton():
        return FirstLayer(Path(path), dtype)


@contextmanager
def without_triton() -> Iterator[None]:
    """Let nothing load triton that has not been loaded: transformers does, on the CPU too, and it ends with a list of leaks."""
    there = "triton" in sys.modules
    if not there:
        sys.modules["triton"] = None  # type: ignore[assignment]  # an import of it raises then
    try:
        yield
    finally:
        if not there:
            del sys.modules["triton"]


def load_model(path: Path, config: Any, dtype: str, device: str, *, head: bool = False) -> Any:
    """Return a checkpoint's model of a configuration, in a dtype, with what makes logits if `head`; raise `TraceError` if it
    cannot be loaded whole.
    """
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    try:
        options: dict[str, Any] = {"config": config, "dtype": getattr(torch, dtype), "output_loading_info": True}
        kind = AutoModelForCausalLM if head else AutoModel
        model, info = kind.from_pretrained(path, local_files_only=True, attn_implementation="sdpa", **options)
        model = model.to(device).eval()
    except Exception as error:  # noqa: BLE001  # whatever an architecture raises
        said = f"{type(error).__name__}: {first_line(error)}"
        raise TraceError(
            f"{path}: the model cannot be loaded: {said}; expected a whole checkpoint of what ran"
        ) from None
    if missing := sorted(info["missing_keys"]):
        raise TraceError(f"{path}: the checkpoint has no {missing[0]}, so nothing can be computed with it")
    return model


def load_pair(path: Path, config: Any, dtype: str, device: str, *, head: bool = False) -> tuple[Any, Any]:
    """Return a checkpoint's model in float32 and in the dtype of an engine, as `load_one` does."""
    full, low = (load_one(path, config, dtype, device, precise=precise, head=head) for precise in (True, False))
    return full, low


def load_one(path: Path, config: Any, dtype: str, device: str, *, precise: bool, head: bool = False) -> Any:
    """Return a checkpoint's model as `load_model` does: in float32, with the weights that the engine has in its own dtype, if
    `precise`, else in that dtype, or in one that is coarser than float32.
    """
    import torch

    low = COARSE.get(dtype, dtype)
    model = load_model(path, config, "float32" if precise else low, device, head=head)
    if precise and low == dtype:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype)).float()
    return model


def read_config(path: Path, *, most_layers: int = 0) -> Any:
    """Return the configuration of a checkpoint, with its first `most_layers` alone unless that is 0; raise `TraceError` for one with
    which nothing can be computed.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()  # it tells of all the weights that are left out
    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        layers = int(config.num_hidden_layers)
        first = min(layers, most_layers) if most_layers else layers
        # What has an entry a layer is cut as well.
        lists = {k: v[:first] for k, v in config.to_dict().items() if isinstance(v, list) and len(v) == layers}
        cut = AutoConfig.from_pretrained(path, local_files_only=True, num_hidden_layers=first, **lists)
    except Exception as error:  # noqa: BLE001  # whatever a configuration's own code raises
        raise TraceError(f"{path}: no model that transformers knows: {first_line(error)}") from None
    if getattr(config, "quantization_config", None) is not None:
        raise TraceError(
            f"{path}: its weights are quantised, and what they give depends on the engine's kernels; name the model as it was before"
        )
    if any(hasattr(config, name) for name in ("vision_config", "audio_config", "text_config")):
        raise TraceError(f"{path}: a model of more than text: what its first layer gets is not known from tokens")
    return cut if first < layers else config


def of_rank(heads: Any, ranks: Ranks) -> Any:
    """Return of all heads `[n, heads, dim]` what `heads_of_rank` does, as `[n, heads * dim]`."""
    return heads_of_rank(heads, ranks).reshape(len(heads), -1)


def heads_of_rank(heads: Any, ranks: Ranks) -> Any:
    """Return of all heads `[n, heads, dim]`, an array or a tensor, those of a tensor-parallel rank; fewer heads than ranks are shared."""
    total, size = heads.shape[1], max(1, ranks.tp_size)
    each = max(1, total // size)
    first = ranks.tp_rank * total // size
    if not 0 <= first < total:
        raise TraceError(f"the trace is of rank {ranks.tp_rank} of {size}, expected 0 to {size - 1}")
    return heads[:, first : first + each]
