"""How SGLang's KV pools lie in memory, in the trace's words: groups, slots, streams of bytes.

A slot is a token's index into the pool (paged pools too: `page * page_size + offset`); slot 0 and request row 0 are
padding. The groups are those of SGLang's own canary: FULL for MHA and MLA pools, FULL and SWA for hybrid ones, the
first layer of each sub-pool, K and V.
"""

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ....kernels.arrays import Int64Array
from ....kernels.ops.hash.kv_source import KvSource
from ...capture.forward_input import translate
from ...capture.kv_tensor import KvTensor
from ...process.environment import run_id
from ...process.settings import RecordingSettings
from ...trace.header import (
    EngineInfo,
    KvStream,
    ModelInfo,
    NotWatched,
    Oracle,
    PoolGroup,
    Ranks,
    Runner,
    StatePool,
    StateTable,
    TraceHeader,
)
from ..common.attachment import installed_version
from ..common.oracle import with_oracle
from .attention.rotary import FedPositions, fed_positions
from .connectors.storage import storage_slots
from .recurrent import prefills_not_seen, state_pool

ALIGN_BYTES: Final = 16
# What moves KV between the device and the host, by its very class.
HOST_CACHES: Final = frozenset({"HiCacheController", "HybridCacheController"})

# What is recorded of a pool, by its very class: where each half's layers are. A class derived from one of these may lay
# out its memory otherwise, and is not recorded.
POOLS: Final[dict[str, dict[str, str]]] = {
    "MHATokenToKVPool": {"K": "k_buffer", "V": "v_buffer"},
    "MHATokenToKVPoolFP4": {"K": "k_buffer", "V": "v_buffer"},
    "MLATokenToKVPool": {"K": "kv_buffer"},
    "MLATokenToKVPoolFP4": {"K": "kv_buffer"},
    "DSATokenToKVPool": {"K": "kv_buffer"},
    "NSATokenToKVPool": {"K": "kv_buffer"},  # what it was called before
    "DeepSeekV4SingleKVPool": {"K": "kv_buffer"},
}
# What else these have for each token, which is not recorded.
BESIDE: Final[dict[str, tuple[str, ...]]] = {
    "MHATokenToKVPoolFP4": ("k_scale_buffer", "v_scale_buffer"),
    "MLATokenToKVPoolFP4": ("kv_scale_buffer",),
    "DSATokenToKVPool": ("index_k_with_scale_buffer",),
    "NSATokenToKVPool": ("index_k_with_scale_buffer",),
}


class _SubPool(NamedTuple):
    kind: str
    pool: Any
    lut: Any = None  # the full-to-SWA tensor
    layers: tuple[int, ...] = ()  # of the model's, where the pool itself does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLayout:
    """One model runner: its index in the header, its table's, and the index of each of its groups by kind.

    `sampled`: what the scheduler takes over comes from its forwards; no draft's. `runner` is the model runner's id. `fed`
    reads the positions of a model that is fed several dimensions of them.
    """

    runner: int
    index: int
    table: int
    groups: dict[str, int]
    sampled: bool
    fed: FedPositions | None


class SglangLayout:
    """The engine's pools as the header names them, with the tensors behind the names.

    `tables[t]` is a `req_to_token` tensor, `luts[n]` a full-to-SWA tensor, `pools[g]` the pool of a group, `runners` maps
    `id(model runner)`.
    """

    def __init__(self, model_runners: list[Any], settings: RecordingSettings) -> None:
        self.tables: list[Any] = []
        self.luts: list[Any] = []
        self.groups: list[PoolGroup] = []
        self.pools: list[Any] = []
        self.sources: dict[tuple[int, int], KvSource | KvTensor] = {}
        self.runners: dict[int, RunnerLayout] = {}
        self.names: list[Runner] = []
        self.not_watched: list[NotWatched] = []
        self.states: list[StatePool] = []
        self.state_parts: dict[int, list[Any]] = {}
        self._settings = settings
        self._seed = settings.new_sampling_seed()
        for runner in model_runners:
            self._add_runner(runner)

    def _add_runner(self, runner: Any) -> None:
        draft = bool(runner.is_draft_worker)
        self._runner = runner
        index = len(self.names)
        same_kind = sum(name.token_offset == int(draft) for name in self.names)
        name = "draft" if draft else "target"
        self.names.append(Runner(name=f"{name}{same_kind or ''}", token_offset=int(draft)))
        table = _index_of(self.tables, runner.req_to_token_pool.req_to_token)
        groups: dict[str, int] = {}
        pool = runner.token_to_kv_pool
        window = int(getattr(runner, "sliding_window_size", None) or 0)
        for kind, sub_pool, lut, layers in self._sub_pools(pool):
            if kind == "swa" and not window:
                self._not_watched("pool", sub_pool, "a sliding-window pool whose window the model does not say")
                continue
            groups[kind] = number = len(self.groups)
            streams = self._streams(f"{name} {kind}", sub_pool, layers)
            self.pools.append(sub_pool)
            self.sources |= {(number, s): source for s, (_, source) in enumerate(streams)}
            self.groups.append(
                PoolGroup(
                    name=f"{name}_{kind}" if draft else kind,
                    kind=kind,
                    window=window if kind == "swa" else 0,
                    runner=index,
                    table=table,
                    lut=_index_of(self.luts, lut) if lut is not None else -1,
                    num_slots=_num_slots(sub_pool),
                    page_size=int(getattr(sub_pool, "page_size", 1) or 1),
                    halves=tuple(POOLS[type(sub_pool).__name__]),
                    streams=tuple(stream for stream, _ in streams),
                    num_layers=len(_layers(sub_pool, "K")),
                )
            )
        fed = fed_positions(runner)
        if fed is None and getattr(runner.model_config, "model_is_mrope", False):
            reason = "its model is fed positions of several dimensions; the batch's own are recorded"
            self.not_watched.append(NotWatched(what="other", name="mrope_positions", reason=reason))
        if not draft and getattr(runner.server_args, "dllm_algorithm", None):
            reason = "a diffusion's steps settle tokens of the blocks that they are fed"
            self.not_watched.append(NotWatched(what="other", name="sampled tokens", reason=reason))
        found = state_pool(runner, index)
        if isinstance(found, NotWatched):
            self.not_watched.append(found)
        elif found is not None:
            self.state_parts[len(self.states)] = found[1]
            self.states.append(found[0])
            self.not_watched += prefills_not_seen(runner)
        own = RunnerLayout(runner=id(runner), index=index, table=table, groups=groups, sampled=not draft, fed=fed)
        self.runners[id(runner)] = own

    def _sub_pools(self, pool: Any) -> list[_SubPool]:
        """Return each group of a pool, and note what of it is not recorded."""
        kind, lut = type(pool).__name__, getattr(pool, "full_to_swa_index_mapping", None)
        parts = [_SubPool("full", pool)]
        if kind == "SWAKVPool":
            parts = [_SubPool("full", pool.full_kv_pool), _SubPool("swa", pool.swa_kv_pool, lut)]
        elif kind == "HybridLinearKVPool":
            layers = tuple(sorted(getattr(pool, "full_attention_layer_id_mapping", None) or ()))
            parts = [_SubPool("full", pool.full_kv_pool, layers=layers)]
        elif kind == "DeepSeekV4TokenToKVPool":
            parts = [_SubPool("swa", pool.swa_kv_pool, lut)]
            self._not_watched("pool", pool, "of its pools only that of the sliding window is recorded")
        known = []
        for part in parts:
            if type(part.pool).__name__ not in POOLS or (part.kind == "swa") != (part.lut is not None):
                self._not_watched("pool", part.pool, "the adapter does not know how this class lays out its slots")
                continue
            known.append(part)
            for beside in BESIDE.get(type(part.pool).__name__, ()):
                self._not_watched("bytes", part.pool, f"{beside} is not recorded")
        return [part for part in known if _num_slots(part.pool)]

    def _not_watched(self, what: str, of: Any, reason: str) -> None:
        self.not_watched.append(NotWatched(what=what, name=type(of).__name__, reason=reason))

    def _streams(self, where: str, pool: Any, numbers: tuple[int, ...]) -> list[tuple[KvStream, KvSource | KvTensor]]:
        """Return the first layer's halves, and samples of all; none if no bytes are wanted or a token's are no one aligned row."""
        if not self._settings.capture_bytes:
            return []
        begin = int(getattr(pool, "start_layer", 0) or 0)
        numbers = numbers or tuple(map(int, getattr(pool, "model_layer_ids", None) or ())) or (begin,)
        found: list[tuple[KvStream, KvSource | KvTensor]] = []
        sampled: list[tuple[KvStream, KvSource | KvTensor]] = []
        for half in POOLS[type(pool).__name__]:
            layers = _layers(pool, half)
            rows = [_as_rows(layer, _num_slots(pool)) for layer in layers]
            if not rows or rows[0] is None:
                self._not_watched("bytes", pool, f"{where}: bytes of {half}: a token is no row of aligned bytes")
                return []
            size = int(rows[0].shape[1])
            read = min(self._settings.capture_bytes, size)
            dtype = _dtype_of(pool, layers[0])
            stream = KvStream(
                half=half,
                layer=numbers[0],
                bytes_per_token=size,
                capture_bytes=read,
                dtype=dtype,
                scale=_scale_of(self._runner, numbers[0], half) if layers[0].element_size() == 1 else 0.0,
            )
            found.append((stream, KvSource(tensor=rows[0], page_size=1, bytes_per_token=size, read_bytes=read)))
            alike = all(row is not None and row.shape == rows[0].shape for row in rows)
            if self._seed is not None and alike:
                ids = numbers if len(numbers) == len(rows) else tuple(range(numbers[0], numbers[0] + len(rows)))
                source = KvTensor(tensor=tuple(rows), axes="slot byte")
                sampled.append((source.sampling_stream(half, layers=ids, seed=self._seed, dtype=dtype), source))
        return found + sampled


def on_gpu(tensor: Any) -> bool:
    """Say whether a tensor lies on a GPU."""
    return getattr(getattr(tensor, "device", None), "type", "") == "cuda"


def own_slots(layout: SglangLayout, group: int, slots: Int64Array) -> Int64Array:
    """Return slots of a table in a group's own numbering, -1 if it has none for one."""
    lut = layout.groups[group].lut
    return translate(layout.luts[lut] if lut >= 0 else None, slots)


def describe_engine(
    scheduler: Any, layout: SglangLayout, target: Any, settings: RecordingSettings, notes: tuple[str, ...]
) -> TraceHeader:
    """Return the header of a scheduler's trace; `target` is the target model's runner, `notes` what else is to be known."""
    server_args, config = target.server_args, target.model_config
    tables = [StateTable(rows=int(t.shape[0]), width=int(t.shape[1])) for t in layout.tables]
    step = getattr(getattr(target, "canary_manager", None), "_outer_step_counter", None)
    role = str(getattr(server_args, "disaggregation_mode", "") or "")
    vocab_size = int(getattr(config, "vocab_size", 0) or 0)
    in_host_cache = host_slots(scheduler, layout.groups)
    oracle = getattr(server_args, "sampling_backend", "") == "token_oracle" and vocab_size > 0
    header = TraceHeader(
        engine=EngineInfo(name="sglang", version=installed_version("sglang")),
        model=ModelInfo(
            name=str(getattr(server_args, "served_model_name", "") or getattr(server_args, "model_path", "unknown")),
            dtype=str(getattr(target, "dtype", "")).removeprefix("torch."),
        ),
        groups=tuple(dataclasses.replace(group, host_num_slots=in_host_cache) for group in layout.groups),
        tables=tuple(tables),
        states=tuple(layout.states),
        lut_lens=tuple(int(lut.shape[0]) for lut in layout.luts),
        truth_table=StateTable(name="truth", rows=tables[0].rows, width=tables[0].width),
        runners=tuple(layout.names),
        ranks=ranks_of(scheduler, target),
        run_id=run_id(),
        oracle=Oracle(vocab_size=vocab_size) if oracle else None,
        role=role if role in ("prefill", "decode") else "",
        sweep_interval=online_sweep_interval(target) or settings.sweep_every,
        not_watched=tuple(layout.not_watched),
        notes=(*notes, *([f"online canary: forward 0 is its step {step}"] if isinstance(step, int) else ())),
    )
    drafts = bool(getattr(server_args, "speculative_algorithm", None))
    why_not = "with speculative decoding tokens are accepted, not sampled" if drafts else ""
    return with_oracle(header, settings.oracle, vocab_size, why_not)


def host_slots(scheduler: Any, groups: list[PoolGroup]) -> int:
    """Return how many slots the host's pool has, and a storage behind it gets; 0 if there is no pool, or its copies cannot be
    recorded slot by slot.
    """
    controller = controller_of(scheduler)
    if len(groups) != 1 or groups[0].kind != "full":
        return 0
    slots = int(getattr(host_pool(controller), "size", 0) or 0)
    return slots + storage_slots(controller, slots)


def host_pool(controller: Any) -> Any:
    """Return a controller's pool on the host; None if it is not known to hold one pool of the device's, slot for slot."""
    queues = (getattr(controller, name, None) for name in ("write_queue", "load_queue"))
    if type(controller).__name__ not in HOST_CACHES or not all(isinstance(queue, list) for queue in queues):
        return None
    pool, device = getattr(controller, "mem_pool_host", None), getattr(controller, "mem_pool_device", None)
    entries = getattr(pool, "entries", None)
    if entries is not None:  # a group of pools on the host
        if len(entries) != 1 or entries[0].device_pool is not device:
            return None
        pool = entries[0].host_pool
    drafts = getattr(controller, "has_draft", False) or getattr((entries or [None])[0], "packed_draft_device_pools", ())
    numbered_otherwise = (
        getattr(device, "host_transfer_translate", None) is not None
        or getattr(pool, "shared_allocation_domain", None) is not None
        or getattr(pool, "dcp_size", 1) != 1
        or getattr(controller, "is_kv_sharded", False)
    )
    # A pool that is a buffer before a storage is filled past the controller.
    buffer_only = getattr(controller, "host_memory_mode", "cache") != "cache"
    return None if drafts or numbered_otherwise or buffer_only else pool


def controller_of(scheduler: Any) -> Any:
    """Return what moves a scheduler's KV between device and host; None without HiCache."""
    if not getattr(scheduler, "enable_hierarchical_cache", False):
        return None
    return getattr(getattr(scheduler, "tree_cache", None), "cache_controller", None)


def online_sweep_interval(target: Any) -> int:
    """Return how often SGLang's own canary sweeps, 0 if it does not: the recorder's walks then follow its own."""
    config = getattr(getattr(target, "canary_manager", None), "config", None)
    return int(getattr(config, "sweep_interval", 0) or 0)


def ranks_of(scheduler: Any, target: Any) -> Ranks:
    """Return where in the parallel layout this process stands; the versions keep it in different places."""
    places = [scheduler, target, getattr(scheduler, "ps", None), _parallel_context(), target.server_args]

    def value(name: str, default: int) -> int:
        for place in places:
            with contextlib.suppress(Exception):  # the context raises if a value was not published
                found = getattr(place, name, None)
                if isinstance(found, int):
                    return found
        return default

    names = [f"{kind}_{what}" for kind in ("tp", "pp", "dp") for what in ("rank", "size")]
    return Ranks(**{name: value(name, int(name.endswith("size"))) for name in names})


def _parallel_context() -> Any:
    try:
        from sglang.srt.runtime_context import get_parallel

        return get_parallel()
    except Exception:  # noqa: BLE001  # older versions have no such thing
        return None


def _layers(pool: Any, half: str) -> Any:
    return getattr(pool, POOLS[type(pool).__name__][half], None) or ()


def _num_slots(pool: Any) -> int:
    """Return how many slots a pool has, its first page of padding included: what it says, or more rows of tokens."""
    said = int(getattr(pool, "size", 0) or 0)
    said += int(getattr(pool, "page_size", 1) or 1) if said else 0
    layers = _layers(pool, "K")
    rows = int(layers[0].shape[0]) if len(layers) and layers[0].dim() == 3 else 0
    return rows if rows >= said else said


def _dtype_of(pool: Any, buffer: Any) -> str:
    """Return what the values of a pool are, which keeps 8-bit floats as bytes; "bytes" if a row holds other things as well."""
    dtype = getattr(pool, "dtype", None) if type(pool).__name__ in ("MHATokenToKVPool", "MLATokenToKVPool") else None
    kept_as_bytes = dtype is not None and dtype.itemsize == buffer.dtype.itemsize
    found = str(dtype if kept_as_bytes else buffer.dtype).removeprefix("torch.")
    return "bytes" if found == "uint8" else found


def _scale_of(runner: Any, number: int, half: str) -> float:
    """Return by what the 8-bit values of a layer's half are multiplied: 1 if its attention has no scale; 0 if nobody knows."""
    modules = getattr(getattr(runner, "model", None), "modules", None)
    for module in modules() if callable(modules) else ():
        if type(module).__name__ == "RadixAttention" and module.layer_id == number:
            name = "v_scale" if half == "V" else "k_scale"
            found = getattr(module, name, None)
            if found is None:
                found = 1.0
            elif not isinstance(found, float | int):  # a tensor, of which a number lies beside it
                found = getattr(module, f"{name}_float", None)
            return float(found) if isinstance(found, float | int) and 0 < found < math.inf else 0.0
    return 0.0


def _as_rows(buffer: Any, num_slots: int) -> Any:
    """Return a layer's buffer as `[slots, bytes of a token] uint8`, None if it is laid out otherwise."""
    import torch

    if not buffer.is_contiguous() or int(buffer.shape[0]) != num_slots or not num_slots:
        return None
    rows = buffer.view(torch.uint8).view(num_slots, -1)
    return None if int(rows.shape[1]) % ALIGN_BYTES else rows


def _index_of(known: list[Any], tensor: Any) -> int:
    """Return the place of a tensor in a list of distinct ones; a view of the same memory is the same."""
    for index, other in enumerate(known):
        if other.data_ptr() == tensor.data_ptr() and other.shape == tensor.shape:
            return index
    known.append(tensor)
    return len(known) - 1
