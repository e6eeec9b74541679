"""How SGLang's KV pools lie in memory, in the trace's words: groups, slots, streams of bytes.

A slot is a token's index into the pool (paged pools too: `page * page_size + offset`); slot 0 and request row 0 are
padding. The groups are those of SGLang's own canary: FULL for MHA and MLA pools, FULL and SWA for hybrid ones, the
first layer of each sub-pool, K and V.
"""

import dataclasses
import importlib.metadata
from dataclasses import dataclass
from typing import Any, Final

from ...kernels.kv_source import KvSource
from ..environment import RecordingSettings
from ..header import EngineInfo, KvStream, ModelInfo, Oracle, PoolGroup, Ranks, Runner, StateTable, TraceHeader
from ..run_identity import run_id
from .sglang_host_cache import host_slots

ALIGN_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLayout:
    """One model runner: its index in the header, its table's, and the index of each of its groups by kind.

    `sampled`: what the scheduler takes over comes from its forwards; no draft's.
    """

    index: int
    table: int
    groups: dict[str, int]
    sampled: bool


class Layout:
    """The engine's pools as the header names them, with the tensors behind the names.

    `tables[t]` is a `req_to_token` tensor, `luts[n]` a full-to-SWA tensor, `runners` maps `id(model runner)`.
    """

    def __init__(self, model_runners: list[Any], settings: RecordingSettings) -> None:
        self.tables: list[Any] = []
        self.luts: list[Any] = []
        self.groups: list[PoolGroup] = []
        self.sources: dict[tuple[int, int], KvSource] = {}
        self.runners: dict[int, RunnerLayout] = {}
        self.names: list[Runner] = []
        self.notes: list[str] = []
        self._settings = settings
        for runner in model_runners:
            self._add_runner(runner)

    def _add_runner(self, runner: Any) -> None:
        draft = bool(runner.is_draft_worker)
        index = len(self.names)
        same_kind = sum(name.token_offset == int(draft) for name in self.names)
        name = "draft" if draft else "target"
        self.names.append(Runner(name=f"{name}{same_kind or ''}", token_offset=int(draft)))
        table = _index_of(self.tables, runner.req_to_token_pool.req_to_token)
        groups: dict[str, int] = {}
        pool = runner.token_to_kv_pool
        window = int(getattr(runner, "sliding_window_size", None) or 0)
        for kind, sub_pool, lut in _sub_pools(pool):
            if kind == "swa" and not window:
                self.notes.append(f"{name}: a sliding-window pool without a window is not recorded")
                continue
            number = len(self.groups)
            groups[kind] = number
            streams = self._streams(f"{name} {kind}", sub_pool)
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
                    halves=("K", "V") if hasattr(sub_pool, "v_buffer") else ("K",),
                    streams=tuple(stream for stream, _ in streams),
                )
            )
        if not groups:
            self.notes.append(f"{name}: nothing is recorded of a pool of type {type(pool).__name__}")
        self.runners[id(runner)] = RunnerLayout(index=index, table=table, groups=groups, sampled=not draft)

    def _streams(self, where: str, pool: Any) -> list[tuple[KvStream, KvSource]]:
        """Return the first layer's halves; none where no bytes are wanted or a token's are no one aligned row."""
        if not self._settings.capture_bytes:
            return []
        halves = [("K", "k_buffer"), ("V", "v_buffer")] if hasattr(pool, "k_buffer") else [("K", "kv_buffer")]
        found = []
        for half, attribute in halves:
            buffer = (getattr(pool, attribute, None) or [None])[0]
            rows = None if buffer is None else _as_rows(buffer, _num_slots(pool))
            if rows is None:
                self.notes.append(f"{where}: bytes of {half} not captured, a token is no row of aligned bytes")
                return []
            token_bytes = int(rows.shape[1])
            capture = min(self._settings.capture_bytes, token_bytes)
            found.append(
                (
                    KvStream(
                        half=half,
                        layer=int(getattr(pool, "start_layer", 0) or 0),
                        bytes_per_token=token_bytes,
                        capture_bytes=capture,
                    ),
                    KvSource(tensor=rows, page_size=1, bytes_per_token=token_bytes, read_bytes=capture),
                )
            )
        return found


def describe_engine(
    scheduler: Any, layout: Layout, target: Any, settings: RecordingSettings, notes: tuple[str, ...]
) -> TraceHeader:
    """Return the header of a scheduler's trace.

    Args:
        scheduler: SGLang's scheduler, ready to run.
        layout: its pools.
        target: the target model's runner.
        settings: how to record.
        notes: what could not be hooked.
    """
    server_args, config = target.server_args, target.model_config
    tables = [StateTable(rows=int(t.shape[0]), width=int(t.shape[1])) for t in layout.tables]
    role = str(getattr(server_args, "disaggregation_mode", "") or "")
    vocab_size = int(getattr(config, "vocab_size", 0) or 0)
    in_host_cache = host_slots(scheduler, layout.groups)
    oracle = getattr(server_args, "sampling_backend", "") == "token_oracle" and vocab_size > 0
    return TraceHeader(
        engine=EngineInfo(name="sglang", version=_version()),
        model=ModelInfo(
            name=str(getattr(server_args, "served_model_name", "") or getattr(server_args, "model_path", "unknown")),
            dtype=str(getattr(target, "dtype", "")).removeprefix("torch."),
        ),
        groups=tuple(dataclasses.replace(group, host_num_slots=in_host_cache) for group in layout.groups),
        tables=tuple(tables),
        lut_lens=tuple(int(lut.shape[0]) for lut in layout.luts),
        truth_table=StateTable(name="truth", rows=tables[0].rows, width=tables[0].width),
        runners=tuple(layout.names),
        ranks=ranks_of(scheduler, target),
        run_id=run_id(),
        oracle=Oracle(vocab_size=vocab_size) if oracle else None,
        role=role if role in ("prefill", "decode") else "",
        sweep_interval=online_sweep_interval(target) or settings.sweep_every,
        notes=(*notes, *layout.notes, *_online_canary(target)),
    )


def online_sweep_interval(target: Any) -> int:
    """Return how often SGLang's own canary sweeps, 0 where it does not: the recorder's walks then follow its own."""
    config = getattr(getattr(target, "canary_manager", None), "config", None)
    return int(getattr(config, "sweep_interval", 0) or 0)


def ranks_of(scheduler: Any, target: Any) -> Ranks:
    """Return where in the parallel layout this process stands; the versions keep it in different places."""
    places = [scheduler, target, getattr(scheduler, "ps", None), _parallel_context(), target.server_args]

    def value(name: str, default: int) -> int:
        for place in places:
            try:
                found = getattr(place, name, None)
            except Exception:  # noqa: BLE001, S112  # the context raises where a value was not published
                continue
            if isinstance(found, int):
                return found
        return default

    return Ranks(
        tp_rank=value("tp_rank", 0),
        tp_size=value("tp_size", 1),
        pp_rank=value("pp_rank", 0),
        pp_size=value("pp_size", 1),
        dp_rank=value("dp_rank", 0),
        dp_size=value("dp_size", 1),
    )


def _parallel_context() -> Any:
    try:
        from sglang.srt.runtime_context import get_parallel

        return get_parallel()
    except Exception:  # noqa: BLE001  # older versions have no such thing
        return None


def _version() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return ""


def _online_canary(target: Any) -> tuple[str, ...]:
    canary = getattr(target, "canary_manager", None)
    step = getattr(canary, "_outer_step_counter", None)
    if not isinstance(step, int):
        return ()
    return (f"online canary: forward 0 is its step {step}",)


def _sub_pools(pool: Any) -> list[tuple[str, Any, Any]]:
    """Return `(kind, pool, full-to-SWA tensor)` of each group of a pool."""
    lut = getattr(pool, "full_to_swa_index_mapping", None)
    swa = getattr(pool, "swa_kv_pool", None)
    if swa is not None and lut is not None:
        full = getattr(pool, "full_kv_pool", None)
        parts = [("full", full, None), ("swa", swa, lut)]
        return [(kind, part, table) for kind, part, table in parts if part is not None and _num_slots(part)]
    return [("full", pool, None)] if _num_slots(pool) else []


def _num_slots(pool: Any) -> int:
    for attribute in ("k_buffer", "kv_buffer"):
        buffers = getattr(pool, attribute, None)
        if buffers is not None and len(buffers):
            return int(buffers[0].shape[0])
    return int(getattr(pool, "size", 0) or 0)


def _as_rows(buffer: Any, num_slots: int) -> Any:
    """Return a layer's buffer as `[slots, bytes of a token] uint8`, None where it is laid out otherwise."""
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
