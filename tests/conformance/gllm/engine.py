"""Real gLLM on a CPU, as `kvcanary check-adapter` drives it: its scheduler, prefix cache, batches, graphs and models.

    git clone https://github.com/gty111/gLLM
    GLLM=gLLM kvcanary check-adapter tests/conformance/gllm/engine.py:Engine

What needs a GPU is replaced: streams, events and pinned memory (none), the kernels (plain torch), CUDA graphs (the model is
run over the graph's own buffers), the sockets to the front end (a list), tokenizer and checkpoint (small random weights).
Overlap scheduling, chunked prefill, preemption, padding to a graph's size, the prefix cache and all tables are gLLM's own.
"""

import importlib
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

VOCAB = 97


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How an engine is made: `chunk` is how many tokens a step may have, `graphs` the largest batch that a graph decodes."""

    model: str = "qwen3.Qwen3ForCausalLM"
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page: int = 4
    pages: int = 40
    running: int = 4
    chunk: int = 48
    graphs: int = 4
    prefix_cache: bool = True
    schedule: str = "chunked_prefill"
    reserve: float = 0.3
    dtype: torch.dtype = torch.float32
    longest: int = 128
    eos: int = -1
    penalty: float = 1.0


SETUP = Setup()
# What healthy runs would meet in gLLM's bc91d98 is mended: see `_mend`.
MENDED = True


class _Stream:
    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Event:
    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Graph:
    """Runs the model over the buffers that it was captured with, which is what a CUDA graph does."""

    runner: Any = None  # the engine's
    captured: dict[str, Any]

    def replay(self) -> None:
        inputs = self.runner.input_data
        now = dict(inputs.__dict__)
        inputs.__dict__.update(self.captured)
        type(self.runner).forward(self.runner)
        inputs.__dict__.update({name: now[name] for name in self.captured})


class _Cuda:
    """`torch.cuda`, of which nothing is done."""

    Stream, Event, CUDAGraph = _Stream, _Event, _Graph
    mem_get_info = staticmethod(lambda: (_Cuda.free, _Cuda.free))
    free = 0
    stream = staticmethod(lambda _: nullcontext())
    current_stream = staticmethod(_Stream)
    graph_pool_handle = synchronize = set_device = staticmethod(lambda *_: None)

    class graph:  # noqa: N801  # as torch.cuda calls it
        def __init__(self, *, cuda_graph: _Graph, **_: Any) -> None:
            self.own = cuda_graph

        def __enter__(self) -> None:
            inputs = self.own.runner.input_data.__dict__
            self.own.captured = {name: inputs[name] for name in inputs if name.endswith("_cpu") or name[:4] == "max_"}

        def __exit__(self, *_: Any) -> None: ...


def _unpinned(make: Any) -> Any:
    def instead(*args: Any, pin_memory: bool = False, device: Any = "cpu", **options: Any) -> torch.Tensor:
        made: torch.Tensor = make(*args, **options)
        return made

    return staticmethod(instead)


class _Torch:
    """torch, as a module of gLLM sees it: its device is the CPU, and no memory is pinned."""

    cuda = _Cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    empty, tensor, zeros, ones = map(_unpinned, (torch.empty, torch.tensor, torch.zeros, torch.ones))


def _rms(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    out.copy_(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight)


def _add_rms(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    residual += x
    _rms(x, residual.clone(), weight, eps)


def _qk_rms(q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float) -> None:
    for one, weight in ((q, q_weight), (k, k_weight)):
        heads = one.unflatten(-1, (-1, len(weight)))
        _rms(heads, heads.clone(), weight, eps)


def _gated(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _rope(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, size: int, cos_sin: torch.Tensor, _: bool
) -> None:
    cos, sin = (half[:, None] for half in cos_sin[positions].chunk(2, dim=-1))
    for one in (query, key):
        heads = one.unflatten(-1, (-1, size))
        first, second = heads.chunk(2, dim=-1)
        heads.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))


def _attend(*, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **given: Any) -> torch.Tensor:
    """Attention over a page table, request by request."""
    ends, out = given["cu_seqlens_q"].tolist(), torch.empty_like(q)
    lengths = given["cache_seqlens"].tolist()
    for row, length, (begin, end) in zip(given["page_table"], lengths, pairwise(ends), strict=True):
        pages = row[: -(-length // k_cache.shape[1])].long()
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
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, *_: Any
) -> None:
    keys.flatten(0, 1)[slots] = key
    values.flatten(0, 1)[slots] = value


def _penalized(logits: torch.Tensor, penalties: torch.Tensor) -> None:
    logits.copy_(torch.where(logits < 0, logits * penalties, logits / penalties))


class _Loader:
    """A model of random weights in the place of a checkpoint."""

    use_mm = use_mla = False
    vocab_size, architecture = VOCAB, ""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.hidden_size, self.dtype = SETUP.heads * SETUP.dim, SETUP.dtype
        self.config = SimpleNamespace(
            num_hidden_layers=SETUP.layers,
            num_attention_heads=SETUP.heads,
            num_key_value_heads=SETUP.kv_heads,
            head_dim=SETUP.dim,
            hidden_size=self.hidden_size,
            intermediate_size=2 * self.hidden_size,
            vocab_size=VOCAB,
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            max_position_embeddings=SETUP.longest,
        )

    def load_model(self, _: Any) -> Any:
        torch.set_default_dtype(SETUP.dtype)  # as the real one leaves it
        module, _, name = SETUP.model.partition(".")
        model = getattr(importlib.import_module(f"gllm.models.{module}"), name)(self.config)
        seeded = torch.Generator().manual_seed(5)
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.data = (torch.randn(weight.shape, generator=seeded) * 0.3).to(SETUP.dtype)
        return model


def _module(name: str, **members: Any) -> ModuleType:
    made = sys.modules[name] = ModuleType(name)
    made.__dict__.update({"__path__": [], **members})
    return made


def stand_ins() -> None:
    """Put what runs on a CPU in the place of what needs a GPU; gLLM is imported here."""
    if "gllm" in sys.modules:
        return
    _module("gllm", __path__=[str(Path(os.environ["GLLM"]).resolve() / "gllm")])  # its own imports the web server
    quiet = SimpleNamespace(info=lambda *_: None, warning=lambda *_: None, handlers=[])
    _module("logger", logger=quiet)
    _module("gllm.model_loader", ModelLoader=_Loader, propagate_serving_config=lambda _: None)
    for name in ("sgl_kernel", "sgl_kernel.flash_attn"):
        _module(name, __getattr__=lambda name: _missing(name))
    _module("gllm._custom_ops", rms_norm=_rms, fused_add_rms_norm=_add_rms, silu_and_mul=_gated)
    ops = sys.modules["gllm._custom_ops"]
    ops.rotary_embedding, ops.reshape_and_cache_flash = _rope, _store  # type: ignore[attr-defined]
    sys.modules["gllm"]._custom_ops = ops  # type: ignore[attr-defined]
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[assignment,method-assign]
    for name in ("memory_manager", "input_data", "async_utils", "utils", "model_runner", "worker"):
        importlib.import_module(f"gllm.{name}").torch = _Torch()  # type: ignore[attr-defined]
    importlib.import_module("gllm.overlap_worker")
    importlib.import_module("gllm.layers.attention").flash_attn_with_kvcache = _attend  # type: ignore[attr-defined]
    importlib.import_module("gllm.layers.sampler").apply_scaling_penalties = _penalized  # type: ignore[attr-defined]
    importlib.import_module("gllm.models.qwen3").fused_qk_norm_inplace = _qk_rms  # type: ignore[attr-defined]
    importlib.import_module("gllm.utils").async_tensor_h2d = _on_host  # type: ignore[attr-defined]
    for name in ("memory_manager", "input_data"):
        importlib.import_module(f"gllm.{name}").async_tensor_h2d = _on_host  # type: ignore[attr-defined]
    runner = importlib.import_module("gllm.model_runner")
    runner.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: None)  # type: ignore[attr-defined]
    runner.tqdm = lambda sizes, **_: sizes  # type: ignore[attr-defined]
    if MENDED:
        _mend()


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(name)

    return kernel


def _on_host(data: list[Any], dtype: torch.dtype, *_: Any) -> torch.Tensor:
    return torch.tensor(data, dtype=dtype)


def _mend() -> None:
    """Mend what is wrong in the engine as it is, so that a healthy run is one.

    A request of which all is in the cache computes its last page on a page of its own, and does not write its last token
    over what the cache lends to others. One that is aborted when its next step has been prepared is taken out of it, where
    gLLM would never find it on its lists; what it has not filled of its pages is no longer entered in the cache.
    """
    manager = importlib.import_module("gllm.memory_manager").PrefixMemoryManager
    finish = manager._finalize_prefix_cache_hit

    @wraps(finish)
    def _finalize_prefix_cache_hit(self: Any, seq: Any) -> None:
        if seq.computed_token_num >= len(seq):
            self.segment.free(seq.page_table.pop())
            seq.computed_token_num -= self.page_size
            self.num_hit_pages -= 1
        finish(self, seq)

    worker = importlib.import_module("gllm.overlap_worker")
    abort = worker.OverlapWorker.check_abort_seqs

    def forget_unfilled(self: Any, seq: Any) -> None:
        for page in seq.page_table[seq.computed_token_num // self.page_size :]:
            if self.segment.hash2page.get(self.segment.page2hash[page]) == page:
                del self.segment.hash2page[self.segment.page2hash[page]]

    def check_abort_seqs(self: Any) -> None:
        scheduler, ids = self.scheduler, self.scheduler.abort_ids
        batch = scheduler.batch_running[-1] if self._prefetched_input is not None else []
        gone = [seq for seq in batch if seq.seq_id in ids]
        for seq in gone:
            batch.remove(seq)
            seq._overlap_freed = True
            for rest in [one for one in scheduler.seqs_to_prefill if one.seq_id == seq.seq_id]:
                scheduler.seqs_to_prefill.remove(rest)
            scheduler.seqs_to_prefill.appendleft(seq)
        if gone and batch:
            self._prefetched_input.cal_input(batch)
        elif gone:
            scheduler.batch_running.pop()
            self._prefetched_input = None
        for seq in (*scheduler.seqs_to_prefill, *scheduler.seqs_to_decode):
            if seq.seq_id in ids and hasattr(scheduler.memory_manager, "forget_unfilled"):
                scheduler.memory_manager.forget_unfilled(seq)
        abort(self)

    manager._finalize_prefix_cache_hit, manager.forget_unfilled = _finalize_prefix_cache_hit, forget_unfilled
    worker.OverlapWorker.check_abort_seqs = check_abort_seqs


class _Comm:
    """The sockets between front end and worker."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.answers: dict[int, list[int]] = {}
        self.over: set[int] = set()

    def init(self) -> None: ...

    def recv_ipc_package(self) -> Any:
        return self.asked.pop(0) if self.asked else None

    def send_output(self, package: Any) -> None:
        for number, token in zip(package.act_schedule_ids, package.next_tokens, strict=True):
            self.answers[number].append(int(token))
        self.over.update(package.free_ids)


class Engine:
    vocab_size, max_len = VOCAB, 60

    def __init__(self, trace: Path) -> None:
        stand_ins()
        sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
        size = 2 * SETUP.layers * SETUP.page * SETUP.kv_heads * SETUP.dim * SETUP.dtype.itemsize
        _Cuda.free = size * SETUP.pages
        runner = importlib.import_module("gllm.model_runner").OverlapModelRunner(
            load_format="dummy",
            model_path="none",
            gpu_memory_util=1.0,
            page_size=SETUP.page,
            enable_prefix_caching=SETUP.prefix_cache,
            maxp=SETUP.chunk,
            maxd=SETUP.running,
            minp=8,
            iterp=4,
            init_new_token_ratio=SETUP.reserve,
            min_new_token_ratio=SETUP.reserve / 4,
            schedule_method=SETUP.schedule,
            disable_cuda_graph=not SETUP.graphs,
            max_cuda_graph_bs=SETUP.graphs,
            model_max_length=SETUP.longest,
        )
        _Graph.runner = runner
        self.comm = _Comm()
        self.worker = importlib.import_module("gllm.overlap_worker").OverlapWorker(
            runner, 0, 0, 0, 1, 1, False, "", 0, self.comm, [0], None, None, SETUP.schedule
        )
        with torch.inference_mode():
            self.worker.init()
            for half in (*runner.memory_manager.segment.k_cache, *runner.memory_manager.segment.v_cache):
                half.zero_()
        self.worker.scheduler.set_log(False)
        self.runner, self.memory = runner, runner.memory_manager
        self.package = importlib.import_module("gllm.comm").IPCPackage
        self.sequence = importlib.import_module("gllm.sequence").Sequence
        self.names: dict[str, int] = {}
        self.free = self.memory.get_num_free_pages()
        pad = runner.input_data.pad_for_cuda_graph

        def shown_pad(size: int) -> int:
            made: int = pad(size)
            self._show()
            return made

        runner.input_data.pad_for_cuda_graph = shown_pad
        self.recorder = importlib.import_module("record_gllm").attach(self.worker, trace, strict=True)
        forward = runner.forward

        def shown_forward() -> None:
            self._show()
            forward()

        runner.forward = shown_forward

    def _show(self) -> None:
        from kvcanary import KvTensor

        inputs, segment = self.runner.input_data, self.memory.segment
        seqs, count = inputs.seqs, len(inputs.tokens_cpu)
        halves = {"K": segment.k_cache[0], "V": segment.v_cache[0]}
        self.on_inputs(
            {
                "input_ids": inputs.tokens[:count],
                "positions": inputs.positions[:count],
                "slots": inputs.slot_mapping[:count],
                "prefix_lens": [seq.computed_token_num for seq in seqs],
                "extend_lens": [seq.to_compute_token_num for seq in seqs],
                "seq_lens": inputs.seq_lens[: len(seqs)],
                "block_tables": inputs.block_table[: len(seqs)],
                "block_size": SETUP.page,
                **{half: KvTensor(tensor=one, axes="block slot head dim") for half, one in halves.items()},
            }
        )

    def on_inputs(self, inputs: dict[str, Any]) -> None: ...

    def add(self, name: str, prompt: list[int], new_tokens: int) -> None:
        number = self.names[name] = len(self.names)
        self.comm.answers[number] = []
        seq = self.sequence(
            number,
            list(prompt),
            [SETUP.eos],
            new_tokens,
            ignore_eos=SETUP.eos < 0,
            top_k=1,
            repetition_penalty=SETUP.penalty,
        )
        self.comm.asked.append(self.package([seq]))

    def abort(self, name: str) -> None:
        package = self.package([])
        package.abort_ids.append(self.names[name])
        self.comm.asked.append(package)

    def step(self) -> bool:
        with torch.inference_mode():
            self.worker.run_pp0()
        scheduler = self.worker.scheduler
        waiting = scheduler.seqs_to_prefill or scheduler.seqs_to_decode or scheduler.batch_running
        return bool(self.comm.asked or waiting or self.worker._gpu_pending)

    @property
    def answers(self) -> dict[str, list[int]]:
        return {name: self.comm.answers[number] for name, number in self.names.items()}

    def close(self) -> None:
        self.recorder.close()

    @property
    def _decoding(self) -> list[Any]:
        scheduler = self.worker.scheduler
        running = [seq for batch in scheduler.batch_running for seq in batch]
        return [seq for seq in (*running, *scheduler.seqs_to_decode) if seq.computed_prompt]

    def fault_freed_too_early(self) -> bool:
        """A running request's page is on the free list."""
        for seq in self._decoding:
            if len(seq.page_table) > 2 and seq.output_len - (len(seq) - seq.raw_prompt_len) > 3:
                self.memory.segment.free(seq.page_table[0])
                self.memory.segment.id_allocator.free_ids.move_to_end(seq.page_table[0], last=False)
                self.memory.segment.page_ref_num[seq.page_table[0]] += 1
                return True
        return False

    def fault_leaked(self) -> bool:
        """A page that was given back is forgotten."""
        segment = self.memory.segment
        free, cached = segment.id_allocator.free_ids, set(segment.hash2page.values())
        before, self.free = self.free, len(free)
        last = next(reversed(free), -1)
        if before < self.free and last not in cached:
            del free[last]
            return True
        return False

    def fault_entry_of_another(self) -> bool:
        """A request has another's page in its table."""
        tables = [seq.page_table for seq in self._decoding if len(seq.page_table) > 3]
        if len(tables) > 1 and tables[0][1] != tables[1][1]:
            tables[0][1] = tables[1][1]
            return True
        return False
