"""Real LMDeploy on a CPU, as `kvcanary check-adapter` drives it: its PyTorch engine's scheduler, block manager, trie, inputs, graphs and models.

    git clone https://github.com/InternLM/lmdeploy
    LMDEPLOY=lmdeploy kvcanary check-adapter tests/conformance/lmdeploy/engine.py:Engine

What needs a GPU is replaced: streams and events (none), the kernels (plain torch, over the tables, lengths and positions that
they are given; LMDeploy's own default ones, where it has them), the checkpoint (small random weights), the tokenizer. CUDA graphs
are LMDeploy's own fake ones, which run the model over a graph's buffers. Engine, executor, model agent and its queues, scheduler,
block manager and trie, chunking, the overlap of a step with the scheduling of the next, step inputs and sampling are LMDeploy's
own. A step is one turn of the engine's main loop.
"""

import asyncio
import importlib
import json
import os
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ |= {"LMDEPLOY_FAKE_CUDA_GRAPH_CAPTURE": "1", "LMDEPLOY_SKIP_WARMUP": "1", "LMDEPLOY_ENABLE_CHECK_ENV": "0"}

import torch
from torch import Tensor

VOCAB = 98
NEW = "lmdeploy.pytorch.kernels.cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How an engine is made: `blocks` is what the pool has with the one that padding goes to, `chunk` what a step may have of prompts.

    `kernel` is the size of the kernels' blocks, 0 for that of the scheduler's; `ahead` for how many tokens blocks are given in advance.
    """

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    block: int = 8
    kernel: int = 0
    blocks: int = 26
    running: int = 4
    chunk: int = 32
    ahead: int = 4
    cached: bool = True
    graphs: bool = True
    dtype: str = "float16"
    longest: int = 120


SETUP = Setup()


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def query(self) -> bool:
        return True


class _Event(_Stream):
    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...


def _slots(table: Tensor, block: int, start: int, end: int) -> Tensor:
    positions = torch.arange(start, end)
    return table.long()[positions // block] * block + positions % block


def _fill(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, starts: Tensor, lens: Tensor, **given: Any) -> None:
    """Store K and V of each request's new tokens where its table has them: `fill_kv_cache`."""
    block, tables, ends = keys.shape[1], given["block_offsets"], given["kv_seq_length"].tolist()
    for table, start, new, end in zip(tables, starts.tolist(), lens.tolist(), ends, strict=True):
        slots = _slots(table, block, end - new, end)
        for rows, half in ((k, keys), (v, values)):
            half[slots // block, slots % block] = rows[start : start + new]


def _flatten(keys: Tensor, values: Tensor, lens: Tensor, tables: Tensor, **given: Any) -> list[Tensor]:
    """Bring what each request reads together: `flatten_kv_cache`."""
    halves, block = [], keys.shape[1]
    for half in (keys, values):
        out = half.new_zeros(half.shape[2], given["out_size"], half.shape[3])
        for start, length, table in zip(given["start_loc"].tolist(), lens.tolist(), tables, strict=True):
            slots = _slots(table, block, 0, length)
            out[:, start : start + length] = half[slots // block, slots % block].transpose(0, 1)
        halves.append(out)
    return halves


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of the last `len(q)` tokens over all of theirs, `[heads, tokens, dim]`."""
    k, v = (half.float().repeat_interleave(q.shape[1] // half.shape[0], dim=0) for half in (k, v))
    scores = torch.einsum("qhd,hkd->hqk", q.float(), k) * scale
    ahead = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - len(q) + 1)
    weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
    return torch.einsum("hqk,hkd->qhd", weights, v).to(q.dtype)


def _prefill(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """`flash_attn_varlen_func`, over what `flatten_kv_cache` made."""
    out, new, read = torch.empty_like(q), given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()
    for n in range(len(new) - 1):
        mine, theirs = slice(new[n], new[n + 1]), slice(read[n], read[n + 1])
        out[mine] = _attend(q[mine], k[:, theirs], v[:, theirs], given["softmax_scale"])
    return out


def _decode(
    q: Tensor, keys: Tensor, values: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, **given: Any
) -> Tensor:
    """`flash_attn_with_kvcache`: each request's token attends to what its table has."""
    ends = torch.nn.functional.pad(cache_seqlens.cumsum(0), (1, 0))
    k, v = _flatten(keys, values, cache_seqlens, page_table, start_loc=ends[:-1], out_size=int(ends[-1]))
    rows = q.reshape(len(cache_seqlens), -1, q.shape[-1])
    given |= {"cu_seqlens_q": torch.arange(len(rows) + 1), "cu_seqlens_k": ends}
    return _prefill(rows, k, v, **given).reshape(q.shape)


def _module(name: str, **members: Any) -> ModuleType:
    made = sys.modules[name] = ModuleType(name)
    made.__dict__.update({"__path__": [], "__getattr__": _anything, **members})
    return made


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__class_getitem__": classmethod(lambda made, _: made)})


class _Registry(dict[str, Any]):
    """mmengine's."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def register_module(self, *_: Any, **__: Any) -> Any:
        return lambda one: one


def _refuse(*_: Any) -> None:
    raise ValueError("there is no tokenizer")


def _config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": SETUP.layers,
        "num_attention_heads": SETUP.heads,
        "num_key_value_heads": SETUP.kv_heads,
        "hidden_size": SETUP.heads * SETUP.dim,
        "intermediate_size": 2 * SETUP.heads * SETUP.dim,
        "vocab_size": VOCAB,
        "max_position_embeddings": SETUP.longest,
        "use_sliding_window": False,
        "torch_dtype": SETUP.dtype,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _weights(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """Fill a model in the place of its checkpoint, by the names that a checkpoint has."""
    seeded, hidden, kv = torch.Generator().manual_seed(5), SETUP.heads * SETUP.dim, SETUP.kv_heads * SETUP.dim
    shapes = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, hidden))
    for layer in (f"model.layers.{number}" for number in range(SETUP.layers)):
        shapes |= {f"{layer}.self_attn.{one}_proj.weight": (kv, hidden) for one in "kv"}
        shapes |= {f"{layer}.self_attn.{one}_proj.weight": (hidden, hidden) for one in "qo"}
        shapes |= {f"{layer}.self_attn.{one}_proj.bias": (hidden if one == "q" else kv,) for one in "qkv"}
        shapes |= {f"{layer}.mlp.{one}_proj.weight": (2 * hidden, hidden) for one in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, 2 * hidden)
    model.load_weights([(name, torch.randn(shape, generator=seeded) * 0.3) for name, shape in shapes.items()])
    for name, one in model.named_parameters():
        if "norm" in name:
            one.data.fill_(1)


@cache
def stand_ins() -> None:
    """Put what runs on a CPU in the place of what needs a GPU; LMDeploy is imported here."""
    root = Path(os.environ["LMDEPLOY"]).resolve()
    importlib.import_module("transformers")
    _module("lmdeploy", __path__=[str(root / "lmdeploy")])  # whose own beginning imports all of it
    for name in ("mmengine", "mmengine.registry", "mmengine.config", "mmengine.config.utils"):
        _module(name, Registry=_Registry)
    for name in ("xgrammar", "pybase64", "lmdeploy.serve", "lmdeploy.serve.openai", "lmdeploy.serve.openai.protocol"):
        _module(name)
    kernels = {"fill_kv_cache": _fill, "flatten_kv_cache": _flatten}
    _module(NEW, **kernels, flash_attn_varlen_func=_prefill, flash_attn_with_kvcache=_decode)
    _module(f"{NEW}.v4_sparse_indices")
    for name in ("", ".backend", ".base"):
        _module(f"lmdeploy.pytorch.disagg.backend{name}")
    torch.compile = lambda function=None, **_: function or (lambda one: one)  # type: ignore[assignment]
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event  # type: ignore[misc,assignment]
    torch.cuda.current_stream, torch.cuda.stream = _Stream, lambda *_: nullcontext()  # type: ignore[assignment]
    torch.cuda.graph_pool_handle = torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None  # type: ignore[assignment]
    agent = importlib.import_module("lmdeploy.pytorch.engine.model_agent.agent")
    agent.Tokenizer = lambda *_, **__: type("", (), {"model": type("", (), {"model": None})})
    agent.GuidedDecodingManager, agent.load_model_weights = _refuse, _weights
    agent.get_gpu_memory, agent._try_to_cuda = lambda: (1 << 30, 1 << 30), lambda value, **_: _copied(value)
    # It counts in seconds when a block was used, and of those of one second any is evicted.
    blocks = importlib.import_module("lmdeploy.pytorch.paging.block_manager.base_block_manager")
    blocks.time = SimpleNamespace(perf_counter=count().__next__)  # type: ignore[attr-defined]
    agent.AgentProfiler = lambda *_: type("", (), {"create_task": lambda _: None, "dump": lambda _: None})()
    importlib.import_module("lmdeploy.pytorch.config").is_bf16_supported = lambda *_: True  # type: ignore[attr-defined]
    cuda = importlib.import_module("lmdeploy.pytorch.backends.cuda.op_backend")
    default, kinds = cuda.DefaultOpsBackend, importlib.import_module("lmdeploy.pytorch.backends.base").OpType
    theirs = cuda.CudaOpsBackend.get_layer_impl_builder
    cuda.CudaOpsBackend.get_layer_impl_builder = lambda kind: (
        theirs if kind is kinds.PagedAttention else default.get_layer_impl_builder
    )(kind)
    build = agent.BaseModelAgent.__init__

    def on_host(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        self.device = "cpu"

    agent.BaseModelAgent.__init__ = on_host
    caches = importlib.import_module("lmdeploy.pytorch.engine.cache_engine")
    for one in (caches.CacheEngine, caches.StateCacheEngine):
        one.allocate_caches = staticmethod(_on_host(one.allocate_caches))


def _on_host(allocate: Any) -> Any:
    return lambda *, device, **options: allocate(device="cpu", **options)


def _copied(value: Any) -> Any:
    """What is brought to the device, which is a copy."""
    return value.clone() if isinstance(value, Tensor) else value if value is None else value.to_device("cpu")


class Engine:
    vocab_size, max_len = VOCAB, 60

    def __init__(self, trace: Path) -> None:
        stand_ins()
        torch.manual_seed(7)  # a graph's buffers are filled up with tokens by chance
        self.begun()
        sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
        self.messages = importlib.import_module("lmdeploy.pytorch.messages")
        self.requests = importlib.import_module("lmdeploy.pytorch.engine.request")
        engine = importlib.import_module("lmdeploy.pytorch.engine.engine").Engine
        asked = importlib.import_module("lmdeploy.messages").PytorchEngineConfig(
            num_gpu_blocks=SETUP.blocks,
            max_batch_size=SETUP.running,
            session_len=SETUP.longest,
            max_prefill_token_num=SETUP.chunk,
            prefill_interval=SETUP.ahead,
            enable_prefix_caching=SETUP.cached,
            eager_mode=not SETUP.graphs,
            dtype=SETUP.dtype,
            distributed_executor_backend="uni",
        )
        # Which has to be 16 at least for what Triton compiles.
        asked.block_size, asked.kernel_block_size = SETUP.block, SETUP.kernel or SETUP.block
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(_config()))
            self.engine = engine(folder, asked)
        self.agent, self.scheduler = self.engine.executor.model_agent, self.engine.scheduler
        self.work = asyncio.new_event_loop()
        asyncio.set_event_loop(self.work)
        self.sessions: dict[str, int] = {}
        self.waiting: list[tuple[str, list[int], int]] = []
        self.answers: dict[str, list[int]] = {}
        self.next: tuple[Any, Any] = (None, None)
        self.work.run_until_complete(self._begin(trace))

    @staticmethod
    def begun() -> None:
        """What is done when LMDeploy has been imported."""

    async def _begin(self, trace: Path) -> None:
        self.engine.migration_event = asyncio.Event()
        self.engine.req_manager.requests = asyncio.Queue()
        self.loop = importlib.import_module("lmdeploy.pytorch.engine.engine_loop").build_engine_loop(self.engine)
        model = self.agent.patched_model.get_model()
        fill = model.fill_buffers_cudagraph

        def shown_fill(*args: Any, **given: Any) -> Any:
            padded = fill(*args, **given)
            self._show(padded)
            return padded

        model.fill_buffers_cudagraph = shown_fill
        self.recorder = importlib.import_module("record_lmdeploy").attach(self.engine, self.loop, trace, strict=True)
        forward = model.forward

        def shown_forward(*args: Any, **given: Any) -> Any:
            if not given["attn_metadata"].is_decoding or not SETUP.graphs:
                self._show(given)
            return forward(*args, **given)

        model.forward = shown_forward
        self.engine.executor.start(self.loop.forward_event)

    def _show(self, given: dict[str, Any]) -> None:
        from kvcanary import KvTensor

        attention, cache = given["attn_metadata"], self.agent.cache_engine.gpu_cache[0]
        self.on_inputs(
            {
                "input_ids": given["input_ids"][0],
                "positions": given["position_ids"][0],
                "prefix_lens": (attention.kv_seqlens - attention.q_seqlens).tolist(),
                "extend_lens": attention.q_seqlens.tolist(),
                "seq_lens": attention.kv_seqlens,
                "block_tables": attention.block_offsets,
                "block_size": SETUP.kernel or SETUP.block,
                **{
                    half: KvTensor(tensor=one, axes="block slot head dim")
                    for half, one in zip("KV", cache, strict=True)
                },
            }
        )

    def on_inputs(self, inputs: dict[str, Any]) -> None: ...

    def add(self, name: str, prompt: list[int], new_tokens: int) -> None:
        self.waiting.append((name, prompt, new_tokens))

    def abort(self, name: str) -> None:
        self._send("_on_stop_session", session_id=self.sessions[name])
        self._end(name)

    def _send(self, handler: str, **data: Any) -> None:
        kinds, response = self.requests.RequestType, self.requests.Response
        request = self.requests.Request(
            kinds.ADD_MESSAGE, 0, data, response(self.requests.ResponseType.INTERNAL_ENGINE_ERROR, 0, asyncio.Event())
        )
        getattr(self.engine, handler)([request])

    def _seq(self, name: str) -> Any:
        session = self.scheduler.sessions.get(self.sessions.get(name, -1))
        return None if session is None else next(iter(session.sequences.values()), None)

    def _end(self, name: str) -> None:
        self._send("_on_end_session", session_id=self.sessions[name])

    def _ask(self) -> None:
        """What the server does with requests and answers."""
        for name in self.sessions:
            seq = self._seq(name)
            if seq is not None and seq.status is self.messages.MessageStatus.STOPPED:
                self.answers[name] = seq.generated_ids.tolist()
                self._end(name)
        for name, prompt, new_tokens in self.waiting:
            self.sessions[name] = len(self.sessions)
            self._send("_on_add_session", session_id=self.sessions[name])
            asked = self.messages.SamplingParam(top_k=1, ignore_eos=True, max_new_tokens=new_tokens)
            self._send(
                "_on_add_message",
                session_id=self.sessions[name],
                token_ids=list(prompt),
                sampling_param=asked,
                adapter_name=None,
            )
        self.waiting.clear()

    @property
    def left(self) -> bool:
        unfinished = self.waiting or self.next[1] is not None or self.loop.has_runable_event.has_unfinished()
        return bool(unfinished or any(self._seq(name) is not None for name in self.sessions))

    def step(self) -> bool:
        self._ask()
        turn, agent = self.work.create_task(self._turn()), self.agent._background_task
        self.work.run_until_complete(asyncio.wait((turn, agent), return_when=asyncio.FIRST_COMPLETED))
        (turn if turn.done() else agent).result()
        return self.left

    async def _turn(self) -> None:
        """One turn of `EngineLoop.main_loop`, which does not stop between two."""
        loop, (inputs, running) = self.loop, self.next
        if running is None and loop.has_runable_event.has_unfinished():
            inputs, running = await loop._main_loop_try_send_next_inputs()
        if running is None:
            self.next = (None, None)
            return
        self.scheduler.activate_seqs(running)
        self.next = await loop._main_loop_get_outputs(running=running, forward_inputs=inputs)
        loop.inputs_maker.deactivate_evict_seqs()
        loop.has_runable_event.set()

    def close(self) -> None:
        self.agent.stop()
        self.work.run_until_complete(asyncio.sleep(0))
        self.work.close()
        self.recorder.close()

    @property
    def _decoding(self) -> list[Any]:
        running = [seq for seq in self.scheduler.running if seq.num_new_tokens > 1]
        return [seq for seq in running if seq.sampling_param.max_new_tokens - seq.num_new_tokens > 4]

    def fault_freed_too_early(self) -> bool:
        """A running request's block is on the free list."""
        allocator = self.scheduler.block_manager.allocator
        for seq in self._decoding:
            block = seq.logical_blocks[(seq.num_all_ids - 2) // SETUP.block :][:1]
            if len(block) and allocator.get_ref_count(block)[0] == 1:
                allocator.free(block.copy())
                return True
        return False

    def fault_leaked(self) -> bool:
        """A block is forgotten when it is given back."""
        manager, free = self.scheduler.block_manager, self.scheduler.block_manager.free

        def forget(seq: Any) -> None:
            manager.free = free
            if manager.allocator.get_ref_count(seq.logical_blocks[-1]) == 1:
                seq.logical_blocks.resize(len(seq.logical_blocks) - 1)
            free(seq)

        manager.free = forget
        return True

    def fault_entry_of_another(self) -> bool:
        """A request has another's block in its table."""
        tables = [seq.logical_blocks for seq in self._decoding if len(seq.logical_blocks) > 2]
        if len(tables) > 1 and tables[0][1] != tables[1][1]:
            tables[0][1] = tables[1][1]
            return True
        return False
