"""Real mini-sglang on a CPU, as `kvcanary check-adapter` drives it: its scheduler, radix cache, page table and models.

    git clone https://github.com/sgl-project/mini-sglang
    MINI_SGLANG=mini-sglang kvcanary check-adapter tests/conformance/mini_sglang/engine.py:Engine

What needs a GPU is replaced: streams, events and pinned memory (none), the kernels (plain torch), CUDA graphs (the model is
run over the graph's own buffers), NCCL, tokenizer and checkpoint (a small random Llama). Overlap scheduling, chunked
prefill, padding to a graph's size, the prefix cache and all tables are mini-sglang's own.
"""

import importlib
import math
import os
import sys
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

VOCAB, LAYERS, HEADS, KV_HEADS, DIM, HIDDEN = 97, 2, 2, 1, 64, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How an engine is made: `chunk` is how many tokens a prefill may have, `graphs` are the sizes that decode is padded to."""

    page: int = 4
    pages: int = 40
    running: int = 4
    chunk: int = 48
    graphs: tuple[int, ...] = (1, 2, 4)
    eos: int = -1
    overlap: bool = True
    longest: int = 128


SETUP = Setup()
# Two bugs of mini-sglang's 20fcd7f that healthy runs would meet are mended, its #142 and #111: see `_mend`.
MENDED = True


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


class _Event:
    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Graph:
    """Runs the model over the buffers that it was captured with, which is what a CUDA graph does."""

    batch: Any = None

    def pool(self) -> None: ...

    def replay(self) -> None:
        context = importlib.import_module("minisgl.core").get_global_ctx()
        runner, model = context.graph_runner, context.model
        batch, context._batch = context._batch, self.batch
        runner.buffer.logits[: self.batch.size] = type(model).forward(model)
        context._batch = batch


class _Current:
    """`torch.cuda`: which stream is the current one, and nothing else."""

    Stream, Event, CUDAGraph = _Stream, _Event, _Graph
    nvtx = SimpleNamespace(range=lambda _: nullcontext())
    now: Any = None

    @classmethod
    def set_stream(cls, stream: Any) -> None:
        cls.now = stream

    @classmethod
    def current_stream(cls) -> Any:
        return cls.now

    class stream:  # noqa: N801  # as torch.cuda calls it
        def __init__(self, stream: Any) -> None:
            self.own, self.before = stream, []

        def __enter__(self) -> None:
            self.before.append(_Current.now)
            _Current.now = self.own

        def __exit__(self, *_: Any) -> None:
            _Current.now = self.before.pop()

    class graph:  # noqa: N801
        def __init__(self, graph: _Graph, **_: Any) -> None:
            self.own = graph

        def __enter__(self) -> None:
            self.own.batch = importlib.import_module("minisgl.core").get_global_ctx().batch

        def __exit__(self, *_: Any) -> None: ...

    is_initialized = staticmethod(lambda: False)
    mem_get_info = staticmethod(lambda _: (1 << 30, 1 << 30))
    set_device = synchronize = empty_cache = reset_peak_memory_stats = staticmethod(lambda *_: None)


class _Torch:
    """torch, as a module of mini-sglang sees it: its device is the CPU, and no memory is pinned."""

    cuda = _Current

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(name: str) -> torch.device:
        return torch.device("cpu" if name.startswith("cuda") else name)

    @staticmethod
    def empty(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.empty(*args, **options)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.tensor(*args, **options)


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    made = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
    return made if out is None else out.copy_(made)


def _add_rms(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    residual += x
    _rms(residual, weight, eps, out=x)


def _gated(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _rope(
    *, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int, cos_sin_cache: torch.Tensor
) -> None:
    cos, sin = (half[:, None] for half in cos_sin_cache[positions.long()].chunk(2, dim=-1))
    for one in (query, key):
        first, second = one.view(len(one), -1, head_size).chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        one.copy_(turned.view(one.shape))


def _attend(*, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **given: Any) -> torch.Tensor:
    """Attention over a page table, request by request."""
    ends, out = given["cu_seqlens_q"].tolist(), torch.empty_like(q)
    lengths = given["cache_seqlens"].tolist()
    for row, length, (begin, end) in zip(given["page_table"], lengths, pairwise(ends), strict=True):
        pages = row[: math.ceil(length / k_cache.shape[1])].long()
        keys, values = (
            cache[pages].flatten(0, 1)[:length].repeat_interleave(q.shape[1] // cache.shape[2], dim=1)
            for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], keys) * given["softmax_scale"]
        ahead = torch.ones(end - begin, length, dtype=torch.bool).triu(length - (end - begin) + 1)
        weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def _store(
    *, k_cache: torch.Tensor, v_cache: torch.Tensor, indices: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    k_cache.view(len(k_cache), -1)[indices.long()] = k
    v_cache.view(len(v_cache), -1)[indices.long()] = v


def _compare(x: torch.Tensor, y: torch.Tensor) -> int:
    count = min(len(x), len(y))
    differs = (x[:count] != y[:count]).nonzero()
    return int(differs[0]) if len(differs) else count


def _config(_: str) -> SimpleNamespace:
    return SimpleNamespace(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        hidden_size=HIDDEN,
        intermediate_size=64,
        vocab_size=VOCAB,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        max_position_embeddings=SETUP.longest,
    )


def _weights(engine: Any, _: Any) -> dict[str, torch.Tensor]:
    seeded = torch.Generator().manual_seed(3)
    return {
        name: torch.ones(there.shape) if "norm" in name else torch.randn(there.shape, generator=seeded) * 0.35
        for name, there in engine.model.state_dict().items()
    }


def stand_ins() -> None:
    """Put what runs on a CPU in the place of what needs a GPU; mini-sglang is imported here."""
    if "minisgl" in sys.modules:
        return
    if "MINI_SGLANG" in os.environ:
        sys.path.insert(0, str(Path(os.environ["MINI_SGLANG"]) / "python"))
    flashinfer, packed = ModuleType("flashinfer"), ModuleType("msgpack")
    flashinfer.rmsnorm, flashinfer.fused_add_rmsnorm = _rms, _add_rms  # type: ignore[attr-defined]
    flashinfer.silu_and_mul = flashinfer.gelu_and_mul = _gated  # type: ignore[attr-defined]
    flashinfer.apply_rope_with_cos_sin_cache_inplace = _rope  # type: ignore[attr-defined]
    sys.modules.setdefault("flashinfer", flashinfer)
    sys.modules.setdefault("msgpack", packed)
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[assignment,method-assign]
    torch.cuda.nvtx.range = lambda *_: nullcontext()  # type: ignore[assignment]
    for name in (
        "engine.engine",
        "engine.graph",
        "engine.sample",
        "scheduler.scheduler",
        "scheduler.cache",
        "attention.fa",
    ):
        importlib.import_module(f"minisgl.{name}").torch = _Torch()  # type: ignore[attr-defined]
    kernel = importlib.import_module("minisgl.kernel")
    kernel.indexing = lambda *, weights, indices, vocab_range: weights[indices.long()]  # type: ignore[attr-defined]
    kernel.store_cache, kernel.fast_compare_key = _store, _compare  # type: ignore[attr-defined]
    importlib.import_module("minisgl.attention.fa")._fa_sgl_impl = _attend  # type: ignore[attr-defined]
    importlib.import_module("minisgl.engine.config").cached_load_hf_config = _config  # type: ignore[attr-defined]
    engine = importlib.import_module("minisgl.engine").Engine
    engine._init_communication, engine._load_weight_state_dict = (lambda *_: None), _weights
    engine._sync_get_memory = lambda _: (1 << 30, 1 << 30)
    importlib.import_module("minisgl.scheduler.scheduler").load_tokenizer = lambda _: SimpleNamespace(  # type: ignore[attr-defined]
        eos_token_id=SETUP.eos
    )
    # A set of requests is gone through in one order in every run.
    importlib.import_module("minisgl.core").Req.__hash__ = lambda self: self.uid  # type: ignore[assignment,method-assign]
    if MENDED:
        _mend()


def _mend() -> None:
    """Mend what is wrong in the engine as it is, so that a healthy run is one.

    A request whose pages are given back, since another has cached the same meanwhile, goes on with those of the cache. A
    request that was aborted while its forward was under way is left alone when that has come back.
    """
    manager = importlib.import_module("minisgl.scheduler.cache").CacheManager
    scheduler = importlib.import_module("minisgl.scheduler.scheduler").Scheduler
    chunk = importlib.import_module("minisgl.scheduler.prefill").ChunkedReq
    message = importlib.import_module("minisgl.message").AbortBackendMsg
    cache, process, free, receive = (
        manager.cache_req,
        scheduler._process_last_data,
        scheduler._free_req_resources,
        scheduler._process_one_msg,
    )

    @wraps(cache)
    def cache_req(self: Any, req: Any, *, finished: bool) -> None:
        give_back = self._free
        self._free = lambda pages: give_back(pages.clone())  # else a view of the row that is written below
        cache(self, req, finished=finished)
        self._free = give_back
        if not finished and (length := req.cache_handle.cached_len):
            self.page_table[req.table_idx, :length] = req.cache_handle.get_matched_indices()

    def _process_one_msg(self: Any, msg: Any) -> None:
        self.aborting = isinstance(msg, message)
        receive(self, msg)
        self.aborting = False

    def _free_req_resources(self: Any, req: Any) -> None:
        req.aborted = self.aborting
        free(self, req)

    @wraps(process)
    def _process_last_data(self: Any, last: Any) -> None:
        if last is not None and any(getattr(req, "aborted", False) for req in last[0].batch.reqs):
            batch = copy(last[0].batch)
            gone = object.__new__(chunk)  # a chunk is what nothing is done for
            batch.reqs = [gone if getattr(req, "aborted", False) else req for req in batch.reqs]
            last = (last[0]._replace(batch=batch), last[1])
        process(self, last)

    manager.cache_req, scheduler._process_last_data = cache_req, _process_last_data
    scheduler._free_req_resources, scheduler._process_one_msg = _free_req_resources, _process_one_msg
    scheduler.aborting = False


class Engine:
    vocab_size, max_len = VOCAB, 60

    def __init__(self, trace: Path) -> None:
        stand_ins()
        sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
        core = importlib.import_module("minisgl.core")
        core._GLOBAL_CTX = importlib.import_module("minisgl.distributed.info")._TP_INFO = None
        self.core, self.messages = core, importlib.import_module("minisgl.message")
        with torch.inference_mode():
            self.llm = importlib.import_module("minisgl.llm").LLM(
                "none",
                dtype=torch.float32,
                attention_backend="fa",
                page_size=SETUP.page,
                num_page_override=SETUP.pages,
                max_running_req=SETUP.running,
                max_extend_tokens=SETUP.chunk,
                cuda_graph_bs=list(SETUP.graphs),
                use_dummy_weight=True,
            )
            self.llm.engine.kv_cache._kv_buffer.zero_()
        engine, context = self.llm.engine, self.llm.engine.ctx
        context.model, context.graph_runner = engine.model, engine.graph_runner
        self.names: dict[str, int] = {}
        self.aborts: list[Any] = []
        self.data: Any = None
        self.free = self.llm.cache_manager.num_pages
        offline = self.llm.receive_msg
        self.llm.receive_msg = lambda blocking=False: [*offline(), *(self.aborts.pop(0) for _ in self.aborts[:])]
        replay, self.inputs = engine.attn_backend.prepare_for_replay, {}

        def prepare_for_replay(batch: Any) -> None:
            replay(batch)
            size, table = batch.padded_size, engine.attn_backend.capture
            self._show(batch, engine.graph_runner.buffer, table.page_table[:size], table.seq_lens[:size])

        engine.attn_backend.prepare_for_replay = prepare_for_replay
        self.recorder = importlib.import_module("mini_sglang").attach(self.llm, trace, strict=True)
        forward = engine.model.forward

        def show() -> Any:
            batch = context.batch
            self._show(batch, batch, batch.attn_metadata.page_table, batch.attn_metadata.cache_seqlens)
            return forward()

        engine.model.forward = show

    def _show(self, batch: Any, inputs: Any, table: torch.Tensor, lens: torch.Tensor) -> None:
        from kvcanary import KvTensor

        reqs, pool = batch.padded_reqs, self.llm.engine.kv_cache
        count = sum(req.extend_len for req in reqs)
        halves = {"K": pool.k_cache(0), "V": pool.v_cache(0)}
        self.on_inputs(
            {
                "input_ids": inputs.input_ids[:count],
                "positions": inputs.positions[:count],
                "slots": inputs.out_loc[:count],
                "prefix_lens": [req.cached_len for req in reqs],
                "extend_lens": [req.extend_len for req in reqs],
                "seq_lens": lens,
                "block_tables": table,
                "block_size": SETUP.page,
                **{half: KvTensor(tensor=one, axes="block slot head dim") for half, one in halves.items()},
            }
        )

    def on_inputs(self, inputs: dict[str, Any]) -> None: ...

    def add(self, name: str, prompt: list[int], new_tokens: int) -> None:
        params = self.core.SamplingParams(max_tokens=new_tokens, ignore_eos=SETUP.eos < 0)
        self.names[name] = self.llm.counter + len(self.llm.pending_requests)
        self.llm.pending_requests.append((prompt, params))

    def abort(self, name: str) -> None:
        self.aborts.append(self.messages.AbortBackendMsg(uid=self.names[name]))

    @property
    def left(self) -> bool:
        managers = (self.llm.prefill_manager, self.llm.decode_manager)
        return bool(self.llm.pending_requests or self.data or any(one.runnable for one in managers))

    def step(self) -> bool:
        if self.left:
            with torch.inference_mode():
                if SETUP.overlap:
                    self.data = self.llm.overlap_loop(self.data)
                else:
                    with self.llm.engine_stream_ctx:
                        self.llm.normal_loop()
        return self.left

    def close(self) -> None:
        self.recorder.close()

    @property
    def answers(self) -> list[list[int]]:
        return [status.output_ids for _, status in sorted(self.llm.status_map.items())]

    @property
    def _running(self) -> list[Any]:
        return sorted(self.llm.decode_manager.running_reqs, key=lambda req: req.uid)

    def fault_freed_too_early(self) -> bool:
        """A running request's first page is on the free list."""
        for req in self._running:
            if req.remain_len > 3 and req.cached_len > SETUP.page:
                free, page = self.llm.cache_manager, self.llm.engine.page_table[req.table_idx, :1]
                free.free_slots = torch.cat([page, free.free_slots])
                return True
        return False

    def fault_evicted_while_read(self) -> bool:
        """A running request does not count as a reader of its prefix, which is evicted."""
        for req in self._running:
            node = req.cache_handle.node
            if req.remain_len > 3 and req.cache_handle.cached_len and node.ref_count == 1 and node.is_leaf():
                cache = self.llm.cache_manager
                cache.prefix_cache.lock_handle(req.cache_handle, unlock=True)
                cache.free_slots = torch.cat(
                    [
                        cache.prefix_cache.evict(cache.prefix_cache.size_info.evictable_size)[:: SETUP.page],
                        cache.free_slots,
                    ]
                )
                req.cache_handle = type(req.cache_handle)(0, cache.prefix_cache.root_node)
                return True
        return False

    def fault_leaked(self) -> bool:
        """The page that was given back last is forgotten."""
        manager, before = self.llm.cache_manager, self.free
        self.free = len(manager.free_slots)
        if before < self.free:
            manager.free_slots = manager.free_slots[:-1]
            return True
        return False
