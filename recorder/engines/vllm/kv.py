"""The KV bytes of vLLM's groups: read where they are stored in rows, else taken from what the model hands to the cache.

The first layer of each group, the first KV head of each token; on the CPU samples of all layers beside it. If a token's bytes lie in one row they are read from the
pool (origin "stored"), and on the CPU held against the inputs of the cache's update (`submitted.py`). The CPU's attention packs K for its instruction set: there they are taken from those
inputs (origin "submitted") and kept in a copy of the pool, which a write to a wrong slot changes as it does the
pool itself.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ....kernels.arrays import ByteArray, Int64Array
from ....kernels.ops.hash.kv_source import KvSource
from ...capture.kv_tensor import KvTensor
from ...trace.header import KvStream
from ...trace.schema import SUBMITTED, TIER_POOL
from ..common.hooking import OnFault, wrap_method
from .submitted import Submitted, SubmittedKv

ALIGN_BYTES: Final = 16
_KEPT: Final = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
STORED: Final = "stored"
# How a head of a half lies: a token's values beside one another, or those of all tokens of a block.
PLAIN: Final = "block slot dim"
TURNED: Final = "block dim slot"
# Instruction sets of the CPU's attention whose update copies values of 16 and 32 bits as they are, whatever the layout.
_KEEP_BITS: Final = ("amx", "vec", "vec16")


class _Mirror:
    """What was submitted for each slot of a pool: `content` `[num_slots, capture] uint8`; `key` says of which pool.

    `stored` is that of the host tier, by group.
    """

    def __init__(self, key: tuple[str, int, int, int], num_slots: int) -> None:
        self.key = key
        self.half, *_, capture = key
        self.content = np.zeros((num_slots, capture), np.uint8)
        self.stored: dict[int, ByteArray] = {}

    def tier(self, number: int, group: Any) -> ByteArray:
        """Return what is kept of the pool or of a group's host tier."""
        if number == TIER_POOL:
            return self.content
        if group.index not in self.stored:
            self.stored[group.index] = np.zeros((group.host_num_slots, self.content.shape[1]), np.uint8)
        return self.stored[group.index]

    def take(self, submitted: Any, slots: Any) -> None:
        """Take over the leading bytes of `submitted` `[T, heads, dim]`, for the tokens that go to a slot."""
        wanted = self.content.shape[1] // submitted.element_size()
        head = submitted[: slots.size, 0, :wanted].detach().contiguous()
        rows = _as_bytes(head).numpy().reshape(slots.size, self.content.shape[1])
        inside = (slots >= 0) & (slots < self.content.shape[0])
        self.content[slots[inside]] = rows[inside]


class KvCapture:
    """Where the bytes of a runner's groups come from.

    `sources[group index, stream index]` is for the recorder; `streams` and `halves` are by group index, those of the groups
    that have any: a latent cache has K only.
    """

    def __init__(self, runner: Any, groups: list[Any], capture_bytes: int, seed: int | None) -> None:
        self.notes: list[str] = []
        self.sources: dict[tuple[int, int], KvSource | KvTensor] = {}
        self.streams: dict[int, tuple[KvStream, ...]] = {}
        self.halves: dict[int, tuple[str, ...]] = {}
        self._mirrors: dict[tuple[str, int, int, int], _Mirror] = {}  # groups that share memory share one
        self._of_group: dict[int, list[_Mirror]] = {}
        self._given: dict[int, SubmittedKv] = {}  # by group
        self._submitted_dtype = str(runner.vllm_config.model_config.dtype).removeprefix("torch.")
        layers = runner.vllm_config.compilation_config.static_forward_context
        self._updated: dict[int, tuple[Any, int, int]] = {}  # by a layer's id itself, its group and its number
        for group in groups:
            mine = [layers[name] for name in group.layers if name in layers]
            halves = self._add(group, mine[0] if mine else None, capture_bytes)
            if halves and is_of_cpu(cache_of(mine[0])):
                self._watch(group, mine)
            if halves and seed is not None:
                self._sample(group, mine, halves, seed)
            if group.index in self._given:
                self._given[group.index].streams = self.streams[group.index]

    def attach(self, on_fault: OnFault) -> None:
        """Hook the updates of the caches of which it is looked at what they are given."""

        def on_kv_update(layer: Any, key: Any, value: Any, _: Any, slot_mapping: Any) -> None:
            if id(layer) not in self._updated:
                return
            _, group, number = self._updated[id(layer)]
            slots, states = slot_mapping.detach().numpy().reshape(-1), {"K": key, "V": value}
            for mirror in self._of_group.get(group, ()) if number == self._given[group].first else ():
                mirror.take(states[mirror.half], slots)
            self._given[group].on_update(number, states, slots)

        for impl in {id(layer.impl): layer.impl for layer, _, _ in self._updated.values()}.values():
            wrap_method(impl, "do_kv_cache_update", on_kv_update, on_fault)

    def take_submitted(self, written: Mapping[int, Int64Array] | None = None) -> Submitted:
        """Return what was handed in for tokens that go to slots `[T]` of groups, by their index; what there is beside is forgotten."""
        found: Submitted = {}
        for group, given in self._given.items():
            found |= given.take((written or {}).get(group))
        return found

    def compares(self, group: int) -> bool:
        """Say whether all that is read from a group's pool is held against what was handed in."""
        stored = [stream for stream in self.streams.get(group, ()) if stream.origin == STORED]
        return not stored or (group in self._given and all(stream.dtype == self._submitted_dtype for stream in stored))

    def copied(
        self, group: Any, src: Int64Array, dst: Int64Array, *, src_tier: int = TIER_POOL, dst_tier: int = TIER_POOL
    ) -> None:
        """Do to the copies of the pool what the engine does to the pool: `src` and `dst` `[n]` slots of a group."""
        for mirror in self._of_group.get(group.index, ()):
            mirror.tier(dst_tier, group)[dst] = mirror.tier(src_tier, group)[src]

    def _add(self, group: Any, layer: Any, capture_bytes: int) -> dict[str, str]:
        """Add the streams of a group's first layer; return how each half lies, "" where what is handed in is taken."""
        kv = cache_of(layer)
        if kv is None:
            self.notes.append(f"{group.name}: KV bytes not captured, the layer has no cache of its own")
            return {}
        views = {} if heads_first(layer, kv) else head_views(kv, group.spec, group.num_slots)
        self.halves[group.index] = tuple(views) if views else ("K", "V")
        if not capture_bytes:
            return {}
        if not views:
            self.notes.append(f"{group.name}: KV bytes not captured, a layout that is not known: {list(kv.shape)}")
            return {}
        axes = dict.fromkeys(views, PLAIN)
        if is_of_cpu(kv):
            views = packed_views(kv, group.spec)
            axes = stored_halves(layer, kv, group.spec)
        streams: list[KvStream] = []
        for half, view in views.items():
            how = axes.get(half, "")
            if how == TURNED:
                source: KvSource | KvTensor | None = turned_source(view, capture_bytes)
            elif how == PLAIN:
                source = row_source(view, group.num_slots, capture_bytes)
            else:
                source = self._submitted(group, layer, kv, half, view, capture_bytes)
            if source is None:
                self.notes.append(f"{group.name}: bytes of {half} not captured, a token is no row of aligned bytes")
                continue
            if not how:
                self.notes.append(f"{group.name}: bytes of {half} were taken on submission, the pool packs them")
            self.sources[group.index, len(streams)] = source
            each = source.bytes_per_token
            streams.append(
                KvStream(
                    half=half,
                    layer=layer_number(group.layers[0]),
                    bytes_per_token=each,
                    capture_bytes=source.read_bytes if isinstance(source, KvSource) else min(each, capture_bytes),
                    origin=STORED if how else SUBMITTED,
                    dtype=cache_dtype(layer, kv) if how else self._submitted_dtype,
                    scale=cache_scale(layer, half) if how else 0.0,
                )
            )
        if streams:
            self.streams[group.index] = tuple(streams)
        return {stream.half: axes.get(stream.half, "") for stream in streams}

    def _watch(self, group: Any, layers: list[Any]) -> None:
        """Look at what the layers of a group hand in; those that share another's cache hand in nothing."""
        numbers = [layer_number(name) for name in group.layers]
        if not callable(getattr(layers[0].impl, "do_kv_cache_update", None)):
            return
        if len(set(numbers)) < len(numbers) or len(layers) < len(numbers):  # nobody could tell whose rows they are
            layers, numbers = layers[:1], numbers[:1]
        sharing = [getattr(layer, "kv_sharing_target_layer_name", None) for layer in layers]
        own = {n: layer for n, layer, other in zip(numbers, layers, sharing, strict=True) if other is None}
        if own:
            self._updated |= {id(layer): (layer, group.index, number) for number, layer in own.items()}
            self._given[group.index] = SubmittedKv(group, numbers[0], tuple(own))

    def _sample(self, group: Any, layers: list[Any], halves: dict[str, str], seed: int) -> None:
        """Add what samples all layers of a group, from memory where they lie as they are handed in, else as they are handed in."""
        import torch

        pools = [cache_of(layer) for layer in layers]
        if any(kv is None or kv.shape != pools[0].shape or kv.device != pools[0].device for kv in pools):
            return
        numbers = tuple(layer_number(name) for name in group.layers)
        dtype = cache_dtype(layers[0], pools[0])
        for half, how in sorted(halves.items()):
            number = len(self.streams[group.index])
            if how == PLAIN:
                wholes = [whole_half(kv, group, half) for kv in pools]
                tensors, (_, axes) = tuple(tensor for tensor, _ in wholes), wholes[0]
                if len(numbers) != len(tensors) or not axes:
                    return
                tensor = KvTensor(tensor=tensors, axes=axes)
                scales = {cache_scale(layer, half) for layer in layers}
                scale = scales.pop() if len(scales) == 1 else 0.0
                stream = tensor.sampling_stream(half, layers=numbers, seed=seed, dtype=dtype, scale=scale)
                self.sources[group.index, number] = tensor
            elif not how and group.index in self._given:
                given, dtype_given = self._given[group.index], self._submitted_dtype
                each = int(pools[0].shape[1]) * int(group.spec.head_size) * getattr(torch, dtype_given).itemsize
                if each < ALIGN_BYTES:
                    continue
                stream = given.sampling_stream(half, each, seed=seed, dtype=dtype_given)
                self.sources[group.index, number] = given.source(number)
            else:
                continue
            self.streams[group.index] = (*self.streams[group.index], stream)

    def _submitted(self, group: Any, layer: Any, kv: Any, half: str, view: Any, capture_bytes: int) -> KvSource | None:
        """Return the source over a copy that is filled from the layer's updates."""
        capture = min(capture_bytes, int(view.shape[2]) * kv.element_size()) // ALIGN_BYTES * ALIGN_BYTES
        if not capture or not callable(getattr(layer.impl, "do_kv_cache_update", None)):
            return None
        key = (half, int(kv.data_ptr()), group.block_size, capture)
        mirror = self._mirrors.setdefault(key, _Mirror(key, group.num_slots))
        self._of_group.setdefault(group.index, []).append(mirror)
        return KvSource(tensor=mirror.content, page_size=1, bytes_per_token=capture, read_bytes=capture)


def cache_of(layer: Any) -> Any:
    """Return the tensor of a layer's cache, None if it has none of its own."""
    kv: Any = getattr(layer, "kv_cache", None)
    if isinstance(kv, list | tuple) and len(kv) == 1:
        kv = kv[0]
    return kv if hasattr(kv, "stride") else None


def is_of_cpu(kv: Any) -> bool:
    """Say whether a cache is that of attention on the CPU, which is given K and V as they are."""
    return kv.device.type == "cpu" and len(kv.shape) == 4


def cache_dtype(layer: Any, kv: Any) -> str:
    """Return what the values of a cache are, which keeps 8-bit floats as bytes."""
    found = str(kv.dtype).removeprefix("torch.")
    return _KEPT.get(str(getattr(layer, "kv_cache_dtype", "")), "bytes") if found == "uint8" else found


def cache_scale(layer: Any, half: str) -> float:
    """Return by what the 8-bit values of a layer's half are multiplied, 0 if nobody knows: scales that are computed come later."""
    if str(getattr(layer, "kv_cache_dtype", "")) not in _KEPT or getattr(layer, "calculate_kv_scales", False):
        return 0.0
    found = getattr(layer, f"_{half.lower()}_scale_float", 0.0)
    return float(found) if isinstance(found, float | int) and 0 < found < math.inf else 0.0


def whole_half(kv: Any, group: Any, half: str) -> tuple[Any, str]:
    """Return a half of a cache that `head_views` knows with all its heads, and the names of its axes, "" for an unknown layout.

    On the CPU `[blocks, heads, tokens, K and V]` holds all K of a block before all V.
    """
    shape, value = tuple(int(n) for n in kv.shape), half == "V"
    if len(shape) == 3:
        return kv, "block slot dim"
    if len(shape) == 5:
        first = shape[0] == 2 and shape[1] * shape[2] == group.num_slots
        return (kv[int(value)] if first else kv[:, int(value)]), "block slot head dim"
    size = int(group.spec.head_size)
    if len(shape) != 4 or (kv.device.type == "cpu" and shape[3] != 2 * size):
        return kv, ""
    if kv.device.type != "cpu":
        return (kv[..., size:] if value else kv[..., :size]), "block head slot dim"
    blocks, heads, tokens, width = shape
    both = kv.view(blocks, heads, 2 * tokens, width // 2)
    return (both[:, :, tokens:] if value else both[:, :, :tokens]), "block head slot dim"


def head_views(kv: Any, spec: Any, num_slots: int) -> dict[str, Any]:
    """Return each half's first head as `[blocks, tokens, dim]`, nothing for a layout that is not known.

    Known: `[blocks, tokens, width]` (a latent: K only), `[blocks, heads, tokens, K and V]`, and the older
    `[2, blocks, tokens, heads, dim]` and `[blocks, 2, tokens, heads, dim]`.
    """
    shape = tuple(int(n) for n in kv.shape)
    size_k = int(getattr(spec, "head_size", 0) or 0)
    size_v = int(getattr(spec, "head_size_v", None) or size_k)
    if len(shape) == 3 and shape[0] * shape[1] == num_slots:
        return {"K": kv}
    if len(shape) == 4 and shape[0] * shape[2] == num_slots and shape[3] == size_k + size_v:
        return {"K": kv[:, 0, :, :size_k], "V": kv[:, 0, :, size_k:]}
    if len(shape) == 5 and shape[0] == 2 and shape[1] * shape[2] == num_slots:
        return {"K": kv[0][:, :, 0], "V": kv[1][:, :, 0]}
    if len(shape) == 5 and shape[1] == 2 and shape[0] * shape[2] == num_slots:
        return {"K": kv[:, 0, :, 0], "V": kv[:, 1, :, 0]}
    return {}


def heads_first(layer: Any, kv: Any) -> bool:
    """Say whether a cache is `[2, blocks, heads, tokens, dim]`, as attention on the CPU has it before vLLM 0.25.

    With as many heads as a block has tokens its shape reads as one of `head_views`, and every byte would be another's.
    """
    return len(kv.shape) == 5 and type(getattr(layer, "impl", None)).__module__.endswith(".cpu_attn")


def packed_views(kv: Any, spec: Any) -> dict[str, Any]:
    """Return the same of the CPU attention's cache, where a block holds all its tokens' K before all its tokens' V."""
    blocks, heads, tokens, width = (int(n) for n in kv.shape)
    size = int(spec.head_size)
    if width != 2 * size:
        return {}
    both = kv.view(blocks, heads, 2 * tokens, size)
    return {"K": both[:, 0, :tokens], "V": both[:, 0, tokens:]}


def stored_halves(layer: Any, kv: Any, spec: Any) -> dict[str, str]:
    """Find out how the CPU's cache update stores each half, by one into two blocks of scratch memory: its axes, `PLAIN` if as it gets it.

    What is 0 stays 0, so it is looked at where zeros come to lie: an update that changes values has no layout of its own. What is not
    known to keep values must have kept them to be `PLAIN`. `TURNED` are 8-bit values alone, of which what is handed in does not say what
    is stored: they are rounded, and their scale may be wrong. Left out is a half that lies otherwise.
    """
    import torch

    update = getattr(layer.impl, "do_kv_cache_update", None)
    heads, tokens, size = int(kv.shape[1]), int(kv.shape[2]), int(spec.head_size)
    dtype = getattr(torch, cache_dtype(layer, kv), None)
    if update is None or dtype is None:
        return {}
    scratch = torch.zeros((2, *kv.shape[1:]), dtype=kv.dtype)
    order = torch.arange(2 * tokens - 1, -1, -1)
    given = torch.arange(2 * tokens * heads * size).reshape(2 * tokens, heads, size)
    coded = dtype.itemsize == 1
    places = {"K": given * given % 251 % 3 > 0, "V": given * given % 241 % 3 > 0}
    if coded:
        handed = {half: places[half] * 2.0 * cache_scale(layer, half) for half in "KV"}
    else:
        handed = {half: places[half] * (given % 251 + 1).to(dtype) for half in "KV"}
    by_place = coded or getattr(layer, "isa", "") in _KEEP_BITS
    found: dict[str, str] = {}
    try:
        update(layer, *handed.values(), scratch, order)
        for half, view in packed_views(scratch, spec).items():
            for axes, rows in ((PLAIN, view), *(((TURNED, turned(view).transpose(1, 2)),) if coded else ())):
                there = rows[order // tokens, order % tokens]
                if torch.equal(*((places[half][:, 0], there != 0) if by_place else (handed[half][:, 0], there))):
                    found.setdefault(half, axes)
    except Exception:  # noqa: BLE001  # another signature, another layout: then nothing is known to be plain
        return {}
    return found


def turned(view: Any) -> Any:
    """Return a half's first head, `[blocks, tokens, dim]`, as `[blocks, dim, tokens]` of the same memory, not of the same values."""
    _, tokens, dim = (int(n) for n in view.shape)
    return view.flatten(1).unflatten(1, (dim, tokens))


def turned_source(view: Any, capture_bytes: int) -> KvTensor | None:
    """Return a half's first head, whose blocks hold the values of all tokens one after another; None if a token has less than a piece."""
    source = KvTensor(tensor=turned(view), axes=TURNED)
    return source if min(source.bytes_per_token, capture_bytes) % ALIGN_BYTES == 0 else None


def row_source(view: Any, num_slots: int, capture_bytes: int) -> KvSource | None:
    """Return a half's first head, `[blocks, tokens, dim]`, as rows of bytes; None if it cannot be read as such."""
    import torch

    item, (blocks, tokens, dim) = view.element_size(), (int(n) for n in view.shape)
    if blocks * tokens != num_slots or view.stride(2) != 1:
        return None
    block_bytes, token_bytes = int(view.stride(0)) * item, int(view.stride(1)) * item
    capture = min(capture_bytes, dim * item) // ALIGN_BYTES * ALIGN_BYTES
    if not capture or token_bytes % ALIGN_BYTES or block_bytes % ALIGN_BYTES or view.data_ptr() % ALIGN_BYTES:
        return None
    flat = _as_bytes(view)
    if block_bytes == tokens * token_bytes:  # one row a slot
        page, width, step = 1, dim * item // ALIGN_BYTES * ALIGN_BYTES, token_bytes
        each = width
    else:
        page, width, step = tokens, tokens * token_bytes, block_bytes
        each = token_bytes
        last = flat.storage_offset() + (blocks - 1) * block_bytes + width
        if last > flat.untyped_storage().nbytes():  # K and V of a token take turns, and V's last row would pass the end
            return None
    rows = torch.as_strided(flat, (num_slots // page, width), (step, 1), flat.storage_offset())
    return KvSource(tensor=rows, page_size=page, bytes_per_token=each, read_bytes=capture)


def layer_number(name: str) -> int:
    """Return the number in a layer's name, 0 if there is none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), 0)


def _as_bytes(tensor: Any) -> Any:
    import torch

    return tensor.detach().view(torch.uint8)
