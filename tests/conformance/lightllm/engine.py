"""Real LightLLM on a CPU, as `kvcanary check-adapter` drives it: its router, inference loop, radix cache, graphs and models.

    git clone https://github.com/ModelTC/LightLLM
    LIGHTLLM=LightLLM kvcanary check-adapter tests/conformance/lightllm/engine.py:Engine

What needs a GPU, or other processes, is replaced: streams, events and pinned memory (none), attention, rotary embedding and
activation (plain torch; Triton's interpreter runs the other kernels, LightLLM's own), CUDA graphs (the model is run over the
graph's own buffers), shared memory and sockets (memory and lists of this process), the checkpoint (small random weights).
Router and queue, the two threads of the inference loop that overlap, chunked prefill, padding to a graph's size, the
radix cache, the token allocator and the table of tokens are LightLLM's own. A step is one turn of the inference loop.
"""

import asyncio
import importlib
import json
import os
import sys
import tempfile
import threading
from contextlib import nullcontext
from copy import copy
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["LIGHTLLM_LOG_LEVEL"] = "error"
os.environ["TRITON_INTERPRET"] = os.environ["DISABLE_GPU_TENSOR_CACHE"] = "1"

import torch

VOCAB = 98
EOS = VOCAB - 1  # nobody is asked it, and it is masked to the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How an engine is made: `slots` is what the pool has, `chunk` what a prompt may have of a step, `graphs` the largest batch that a graph decodes.

    `expected` is how long the router takes an answer to be, whatever is asked for, until the first is done.
    """

    model: str = "llama.model.LlamaTpPartModel"
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    slots: int = 200
    running: int = 4
    chunk: int = 24
    tokens: int = 64
    graphs: int = 4
    step: int = 2
    radix: bool = True
    mixed: bool = False
    aggressive: bool = True
    overlap: bool = True
    merge: int = 0
    expected: int = 0
    dtype: str = "float32"
    longest: int = 110
    graph_longest: int = 110
    penalty: float = 1.0


SETUP = Setup()


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Event:
    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Graph:
    """Runs the model over the buffers that it was captured with, which is what a CUDA graph does."""

    def replay(self) -> None: ...


class _Cuda:
    """`torch.cuda`, of which nothing is done."""

    Stream, Event, CUDAGraph = _Stream, _Event, _Graph
    stream = graph = staticmethod(lambda *_, **__: nullcontext())
    current_stream = staticmethod(_Stream)
    is_available = is_current_stream_capturing = staticmethod(lambda: False)
    graph_pool_handle = synchronize = set_device = empty_cache = staticmethod(lambda *_: None)
    get_device_name = staticmethod(lambda *_: "none")
    get_device_capability = staticmethod(lambda *_: (9, 0))
    device_count = staticmethod(lambda: 1)


def _on_host(make: Any) -> Any:
    def instead(*args: Any, pin_memory: bool = False, device: Any = "cpu", **options: Any) -> torch.Tensor:
        made: torch.Tensor = make(*args, **options)
        return made

    return staticmethod(instead)


class _Torch(ModuleType):
    """torch, as a module of LightLLM sees it: its device is the CPU, and no memory is pinned."""

    cuda = _Cuda
    distributed = SimpleNamespace(barrier=lambda *_, **__: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    empty, tensor, zeros, ones, full, arange = map(
        _on_host, (torch.empty, torch.tensor, torch.zeros, torch.ones, torch.full, torch.arange)
    )


class _Memory:
    """Shared memory, which this process shares with itself."""

    made: dict[str, "_Memory"] = {}  # noqa: RUF012

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.buf = name, size, memoryview(bytearray(size))

    def close(self) -> None: ...

    def unlink(self) -> None: ...


def _shared(name: str, size: int, force_mode: str | None = None, **_: Any) -> _Memory:
    size = int(size)
    if force_mode == "create" or name not in _Memory.made or size not in {-1, _Memory.made[name].size}:
        _Memory.made[name] = _Memory(name, size)
    return _Memory.made[name]


class _Word:
    """A word of shared memory that nobody else has locked."""

    def __enter__(self) -> "_Word":
        return self

    def __exit__(self, *_: object) -> None: ...

    def cmpxchg_weak(self, *_: int) -> bool:
        return True


class _NoMore(Exception): ...  # noqa: N818


class _Socket:
    """The router's sockets: the one that requests come by is a list."""

    asked: list[Any] = []  # noqa: RUF012

    def bind(self, _: str) -> None: ...

    def connect(self, _: str) -> None: ...

    def send_pyobj(self, *_: Any, **__: Any) -> None: ...

    def recv_pyobj(self, *_: Any) -> Any:
        if not self.asked:
            raise _NoMore
        return self.asked.pop(0)


class _Dict(dict[str, Any]):
    """easydict's."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    slots: torch.Tensor,
    prefix: int,
) -> None:
    """Attention of one request's new tokens over the slots that it reads."""
    group = q.shape[1] // keys.shape[1]
    k, v = (half[slots.long()].float().repeat_interleave(group, dim=1) for half in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * q.shape[-1] ** -0.5
    ahead = torch.ones(len(q), len(k), dtype=torch.bool).triu(prefix + 1)
    weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
    out.copy_(torch.einsum("hqk,khd->qhd", weights, v))


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    prefixes: torch.Tensor,
    _: int,
    table: torch.Tensor,
    **__: Any,
) -> None:
    for row, start, length, prefix in zip(
        rows.tolist(), starts.tolist(), lens.tolist(), prefixes.tolist(), strict=True
    ):
        end = start + length - prefix
        _attend(q[start:end], k, v, out[start:end], table[row, :length], prefix)


def _decode(
    *, q: torch.Tensor, infer_state: Any, cache_k: torch.Tensor, cache_v: torch.Tensor, out: torch.Tensor, **_: Any
) -> None:
    table = infer_state.req_manager.req_to_token_indexs
    rows, lens = infer_state.b_req_idx.tolist(), infer_state.b_seq_len.tolist()
    for n, (row, length) in enumerate(zip(rows, lens, strict=True)):
        _attend(q[n : n + 1], cache_k, cache_v, out[n : n + 1], table[row, :length], length - 1)


def _rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any) -> None:
    cos, sin = cos[:, None], sin[:, None]
    for one in (q, k):
        first, second = one.chunk(2, dim=-1)
        one.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))


def _gated(x: torch.Tensor, out: torch.Tensor, *_: Any, **__: Any) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _module(name: str, **members: Any) -> ModuleType:
    made = sys.modules[name] = ModuleType(name)
    made.__dict__.update({"__path__": [], "__getattr__": _anything, **members})
    return made


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__class_getitem__": classmethod(lambda made, _: made)})


def _config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": SETUP.layers,
        "num_attention_heads": SETUP.heads,
        "num_key_value_heads": SETUP.kv_heads,
        "head_dim": SETUP.dim,
        "hidden_size": SETUP.heads * SETUP.dim,
        "intermediate_size": 2 * SETUP.heads * SETUP.dim,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": SETUP.longest,
        "sliding_window": None,
    }


def _weights() -> dict[str, torch.Tensor]:
    seeded, hidden, kv = torch.Generator().manual_seed(5), SETUP.heads * SETUP.dim, SETUP.kv_heads * SETUP.dim
    shapes = {"model.embed_tokens": (VOCAB, hidden), "lm_head": (VOCAB, hidden), "model.norm": (hidden,)}
    for layer in (f"model.layers.{number}" for number in range(SETUP.layers)):
        shapes |= {f"{layer}.self_attn.{one}_proj": (kv, hidden) for one in "kv"}
        shapes |= {f"{layer}.self_attn.{one}_proj": (hidden, hidden) for one in "qo"}
        shapes |= {f"{layer}.mlp.{one}_proj": (2 * hidden, hidden) for one in ("gate", "up")}
        shapes |= {f"{layer}.{one}_layernorm": (hidden,) for one in ("input", "post_attention")}
        shapes[f"{layer}.mlp.down_proj"] = (hidden, 2 * hidden)
    made = {f"{name}.weight": torch.randn(shape, generator=seeded) * 0.3 for name, shape in shapes.items()}
    biases = {
        f"model.layers.{n}.self_attn.{one}_proj.bias": size
        for n in range(SETUP.layers)
        for one, size in (("q", hidden), ("k", kv), ("v", kv))
    }
    made |= {name: torch.randn(size, generator=seeded) * 0.3 for name, size in biases.items()}
    return {name: torch.ones_like(one) if "norm" in name else one for name, one in made.items()}


@cache
def stand_ins() -> None:
    """Put what runs on a CPU in the place of what needs a GPU; LightLLM is imported here."""
    root = Path(os.environ["LIGHTLLM"]).resolve()
    sys.path.insert(0, str(root))
    importlib.import_module("transformers.configuration_utils")
    for name in (
        *("rpyc", "rpyc.utils", "rpyc.utils.classic", "rpyc.utils.server", "rpyc.utils.factory", "fastapi", "httpx"),
        *("cupy", "sentencepiece", "librosa", "ujson", "einops", "prettytable", "xxhash"),
        *("frozendict", "redis", "setproctitle", "PIL" if importlib.util.find_spec("PIL") is None else "orjson"),  # type: ignore[attr-defined]
    ):
        _module(name)
    _module("easydict", EasyDict=_Dict)
    _module("atomics", atomicview=lambda **_: _Word(), INT=None)
    _module("interegular", parse_pattern=lambda _: None)
    _module("uvloop", EventLoopPolicy=asyncio.DefaultEventLoopPolicy)
    # Packages whose own beginnings import all models, and all ways to run them.
    _module("lightllm.models", __path__=[str(root / "lightllm" / "models")], get_model=_model)
    for name in ("deepseek_mtp", "qwen3_moe_mtp", "mistral_mtp", "glm4_moe_lite_mtp"):
        _module(f"lightllm.models.{name}")
        _module(f"lightllm.models.{name}.model")
    infer = "lightllm.server.router.model_infer"
    where = root / "lightllm" / "server" / "router" / "model_infer"
    _module(f"{infer}.mode_backend", __path__=[str(where / "mode_backend")])
    _module(f"{infer}.model_rpc")
    _module("lightllm.server.metrics.manager")
    sys.modules["lightllm.server.metrics.manager"].MetricClient = lambda _: None  # type: ignore[attr-defined]
    torch.Tensor.cuda = lambda self, *_, **__: self.clone()  # type: ignore[assignment,method-assign]
    torch.Tensor.cpu = lambda self, *_, **__: self.clone()  # type: ignore[assignment,method-assign]
    importlib.import_module("lightllm.utils.shm_utils").create_or_link_shm = _shared  # type: ignore[attr-defined]
    for name in (
        "common.basemodel",
        "server.router.manager",
        "server.router.model_infer.mode_backend.chunked_prefill.impl",
        "common.basemodel.triton_kernel.destindex_copy_kv",
        "common.basemodel.triton_kernel.att.prefill_att.context_flashattention_nopad",
        "common.basemodel.triton_kernel.att.decode_att.mha.flash_decoding.flash_decoding",
        "common.basemodel.triton_kernel.att.decode_att.gqa.flash_decoding.gqa_flash_decoding",
        "models.llama.model",
        "models.qwen2.model",
    ):
        importlib.import_module(f"lightllm.{name}")
    ours = _Torch("torch")
    for name, module in list(sys.modules.items()):
        if name.startswith("lightllm."):
            for old, new in (("torch", ours), ("create_or_link_shm", _shared)):
                if old in module.__dict__:
                    setattr(module, old, new)
    _replace_kernels()
    _replace_processes()


def _replace_kernels() -> None:
    kernels = "lightllm.common.basemodel.triton_kernel"
    attention = f"{kernels}.att.prefill_att.context_flashattention_nopad"
    importlib.import_module(attention).context_attention_fwd = _prefill  # type: ignore[attr-defined]
    for kind, name in (
        ("mha", "token_decode_attention_flash_decoding"),
        ("gqa", "gqa_token_decode_attention_flash_decoding"),
    ):
        module = f"{kernels}.att.decode_att.{kind}.flash_decoding.{'gqa_' * (kind == 'gqa')}flash_decoding"
        setattr(importlib.import_module(module), name, _decode)
    layer = importlib.import_module("lightllm.models.llama.layer_infer.transformer_layer_infer")
    layer.rotary_emb_fwd, layer.silu_and_mul_fwd = _rope, _gated  # type: ignore[attr-defined]
    importlib.import_module("lightllm.utils.custom_kernel_utis").custom_cat = torch.cat  # type: ignore[attr-defined]
    importlib.import_module("lightllm.server.router.model_infer.infer_batch").custom_cat = torch.cat  # type: ignore[attr-defined]
    platform = importlib.import_module("lightllm.common.basemodel.layer_weights.meta_weights.platform_op")
    platform.get_platform = lambda _: platform.Platform.CPU  # type: ignore[attr-defined]
    weights = importlib.import_module("lightllm.common.basemodel.layer_weights.meta_weights")
    for one in (weights.EmbeddingWeight, weights.LMHeadWeight):
        one._native_forward = _without_allocator(one._native_forward)
    base = importlib.import_module("lightllm.common.basemodel.basemodel").TpPartBaseModel
    base._autotune_warmup = base._full_att_decode_autotune = base._check_max_len_infer = lambda _: None
    base.forward = torch.no_grad()(_forward)
    graph = importlib.import_module("lightllm.common.basemodel.cuda_graph").CudaGraph
    capture = graph._capture_decode

    def _capture_decode(self: Any, run: Any, state: Any) -> Any:
        made = capture(self, run, state)
        replay, state, output = self.graph[len(state.input_ids)]
        replay.replay = lambda: output.logits.copy_(run(copy(state)).logits)
        return made

    graph._capture_decode = _capture_decode
    outputs = importlib.import_module("lightllm.common.basemodel.batch_objs")
    outputs.tensor_to_no_ref_tensor = lambda tensor: tensor  # type: ignore[attr-defined]


def _without_allocator(native: Any) -> Any:
    """Take what its own way of running on a CPU does not."""
    return lambda self, alloc_func=None, **given: native(self, **given)


def _forward(self: Any, model_input: Any) -> Any:
    """As it is, but for its looking whether tensors are on a GPU."""
    model_input.to_cuda()
    return self._prefill(model_input) if model_input.is_prefill else self._decode(model_input)


def _model(_: Any, options: dict[str, Any]) -> tuple[Any, bool]:
    module, _, name = SETUP.model.rpartition(".")
    found = importlib.import_module(f"lightllm.models.{module}")
    memory = importlib.import_module("lightllm.common.kv_cache_mem_manager").MemoryManager
    for one in (found, importlib.import_module("lightllm.models.llama.model")):
        one.select_mem_manager_class = lambda: memory  # type: ignore[attr-defined]
    return getattr(found, name)({**options, "weight_dict": _weights()}), False


def _replace_processes() -> None:
    backend = importlib.import_module("lightllm.server.router.model_infer.mode_backend.base_backend")
    ranks = importlib.import_module("lightllm.utils.dist_utils")
    names = (
        "global_rank",
        "global_dp_rank",
        "current_rank_in_dp",
        "current_rank_in_node",
        "dp_rank_in_node",
        "current_device_id",
    )
    for name in names:
        getattr(ranks, f"set_{name}")(0)
    for name in ("global_world_size", "dp_size", "dp_world_size", "node_world_size"):
        getattr(ranks, f"set_{name}")(1)
    backend.init_distributed_env = backend.broadcast = lambda *_, **__: None  # type: ignore[attr-defined]
    backend.dist_group_manager.create_groups = lambda **_: None
    backend.dist_group_manager.get_group = lambda _: None
    importlib.import_module("lightllm.common.basemodel.basemodel").dist_group_manager.get_group = lambda _: None
    backend.create_new_group_for_current_node = lambda _: None  # type: ignore[attr-defined]
    loop = importlib.import_module("lightllm.server.router.model_infer.mode_backend.chunked_prefill.impl")
    loop.time = SimpleNamespace(sleep=lambda _: None)  # type: ignore[attr-defined]
    manager = importlib.import_module("lightllm.server.router.manager")
    context = SimpleNamespace(socket=lambda _: _Socket())
    manager.zmq = SimpleNamespace(Context=lambda _: context, PULL=0, PUSH=1, NOBLOCK=0, ZMQError=_NoMore)  # type: ignore[attr-defined]
    manager.get_shm_port_args = lambda: SimpleNamespace(router_port=0, detokenization_port=0, metric_port=0)  # type: ignore[attr-defined]
    importlib.import_module("lightllm.server.router.req_queue.base_queue").time = SimpleNamespace(sleep=lambda _: None)  # type: ignore[attr-defined]


class _Turns:
    """Lets the threads of the inference loop go on by one turn each time they are asked to."""

    def __init__(self, backend: Any) -> None:
        self.there, self.go, self.failed = threading.Semaphore(0), threading.Semaphore(0), None
        read, loop = backend._try_read_new_reqs, backend.infer_loop

        def _try_read_new_reqs() -> None:
            self.there.release()
            self.go.acquire()
            read()

        def infer_loop() -> None:
            try:
                loop()
            except BaseException as error:  # noqa: BLE001
                self.failed = error
                self.there.release()

        backend._try_read_new_reqs, backend.infer_loop = _try_read_new_reqs, infer_loop

    def next(self) -> None:
        self.go.release()
        self.there.acquire()
        if self.failed is not None:
            raise self.failed


class Engine:
    vocab_size, max_len = EOS, 60

    def __init__(self, trace: Path) -> None:
        self._arguments()
        self.begun()
        sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
        objects = importlib.import_module("lightllm.server.core.objs")
        self.indexes = importlib.import_module("lightllm.server.core.objs.io_objs").GroupReqIndexes
        self.media = importlib.import_module("lightllm.server.multimodal_params").MultimodalParams
        manager = importlib.import_module("lightllm.server.router.manager")
        self.context = importlib.import_module("lightllm.server.router.model_infer.infer_batch").g_infer_context
        self.context.__dict__.clear()  # a process has one, and has had other engines
        args = importlib.import_module("lightllm.utils.envs_utils").get_env_start_args()
        self.args, _Socket.asked = args, []
        self.http, self.router = objects.ShmReqManager(), manager.RouterManager(args)
        impl = importlib.import_module("lightllm.server.router.model_infer.mode_backend.chunked_prefill.impl")
        self.backend = impl.ChunkedPrefillBackend()
        self.backend.support_overlap = SETUP.overlap
        self.turns = _Turns(self.backend)
        self.backend.init_model(
            {
                "args": args,
                "world_size": 1,
                "load_way": "HF",
                "weight_dir": args.model_dir,
                "max_total_token_num": SETUP.slots,
                "max_req_num": SETUP.running,
                "max_seq_length": SETUP.longest,
                "data_type": SETUP.dtype,
                "eos_id": [EOS],
                "graph_max_batch_size": SETUP.graphs or 1,
                "graph_max_len_in_batch": SETUP.graph_longest,
                "disable_cudagraph": not SETUP.graphs,
                "batch_max_tokens": SETUP.tokens,
                "quant_type": "none",
            }
        )
        self.turns.there.acquire()
        self._ready()
        self.model = self.backend.model
        self.model.mem_manager.kv_buffer.normal_(generator=torch.Generator().manual_seed(3))  # as memory is found
        self.waiting: list[Any] = []
        self.names: dict[str, Any] = {}
        self.answers: dict[str, list[int]] = {}
        for state in [state for _, state, _ in self.model.graph.graph.values()] if self.model.graph else []:
            self._show_copied(state)
        self.recorder = importlib.import_module("record_lightllm").attach(self.backend, trace, strict=True)
        for name in ("_context_forward", "_token_forward"):
            self._show_before(name)

    @staticmethod
    def begun() -> None:
        """What is done when LightLLM has been imported, and its settings are known."""

    def _arguments(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        Path(self.folder.name, "config.json").write_text(json.dumps(_config()))
        os.environ["LIGHTLLM_UNIQUE_SERVICE_NAME_ID"] = "kvcanary"
        start = {
            "model_dir": self.folder.name,
            "max_total_token_num": SETUP.slots,
            "batch_max_tokens": SETUP.tokens,
            "chunked_prefill_size": SETUP.chunk,
            "running_max_req_size": SETUP.running,
            "max_req_total_len": SETUP.longest - 8,
            "eos_id": [EOS],
            "router_token_ratio": 0.85,
            "disable_dynamic_prompt_cache": not SETUP.radix,
            "enable_prefill_decode_mixed": SETUP.mixed,
            "disable_aggressive_schedule": not SETUP.aggressive,
            "data_type": SETUP.dtype,
            "graph_max_batch_size": SETUP.graphs or 1,
            "graph_split_batch_size": 1,
            "graph_grow_step_size": SETUP.step,
            "llm_prefill_att_backend": ["triton"],
            "llm_decode_att_backend": ["triton"],
            "penalty_counter_mode": "cpu_counter",
            "enable_torch_fallback": True,
            "disable_cudagraph": not SETUP.graphs,
        }
        os.environ["LIGHTLLM_RADIX_TREE_MERGE_ENABLE"] = str(bool(SETUP.merge))
        os.environ["LIGHTLLM_RADIX_TREE_MERGE_DELTA"] = str(SETUP.merge or 1)
        os.environ["LIGHTLLM_REQS_BUFFER_BYTE_SIZE"] = str(1 << 16)
        os.environ["LIGHTLLM_START_ARGS"] = "{}"
        stand_ins()
        arguments = importlib.import_module("lightllm.server.core.objs.start_args_type").StartArgs(**start)
        os.environ["LIGHTLLM_START_ARGS"] = json.dumps(asdict(arguments))
        for name in ("envs_utils", "config_utils"):  # which keep what they were told first
            for one in vars(importlib.import_module(f"lightllm.utils.{name}")).values():
                getattr(one, "cache_clear", int)()

    def _ready(self) -> None:
        """What the router does when its model is there."""
        router, args = self.router, self.args
        router.schedule_new_batch = None
        router.shm_max_total_token_num.set_value(SETUP.slots)
        client = importlib.import_module("lightllm.server.router.dynamic_prompt.radix_cache").RadixCacheReadOnlyClient
        if SETUP.radix:
            router.radix_cache_client = client("kvcanary", SETUP.slots, node_world_size=1, dp_world_size=1)
        router.req_queue = importlib.import_module("lightllm.server.router.req_queue").build_req_queue(args, router, 1)
        if SETUP.expected:
            router.router_statics.ema_req_out_len = SETUP.expected
        turns = self.turns

        async def sleep(_: float) -> None:  # until the inference loop has read what it was given before
            turns.next()

        importlib.import_module("lightllm.server.router.manager").asyncio = SimpleNamespace(sleep=sleep)  # type: ignore[attr-defined]

    def _show_copied(self, state: Any) -> None:
        copied = state.copy_for_cuda_graph

        def copy_for_cuda_graph(new: Any) -> None:
            copied(new)
            self._show(state)

        state.copy_for_cuda_graph = copy_for_cuda_graph

    def _show_before(self, name: str) -> None:
        forward = getattr(self.model, name)

        def shown(state: Any) -> Any:
            self._show(state)
            return forward(state)

        setattr(self.model, name, shown)

    def _show(self, state: Any) -> None:
        from kvcanary import KvTensor

        prefix = state.b_ready_cache_len if state.is_prefill else state.b_seq_len - 1
        keys, values = self.model.mem_manager.get_att_input_params(0)
        self.on_inputs(
            {
                "input_ids": state.input_ids,
                "positions": state.position_ids,
                "slots": state.mem_index,
                "prefix_lens": prefix.tolist(),
                "extend_lens": (state.b_seq_len - prefix).tolist(),
                "seq_lens": state.b_seq_len,
                "req_to_token": state.req_manager.req_to_token_indexs,
                "rows": state.b_req_idx,
                "K": KvTensor(tensor=keys, axes="slot head dim"),
                "V": KvTensor(tensor=values, axes="slot head dim"),
            }
        )

    def on_inputs(self, inputs: dict[str, Any]) -> None: ...

    def add(self, name: str, prompt: list[int], new_tokens: int, **sampling: Any) -> None:
        self.waiting.append((name, prompt, new_tokens, sampling))

    def _ask(self) -> None:
        """What the server does with requests: as many as it has places for."""
        for req in [
            one for one in self.names.values() if one is not None and one.ref_count == 1 and one.shm_infer_released
        ]:
            name = next(name for name, one in self.names.items() if one is req)
            self.names[name] = None
            self.answers[name] = self.said(req)
            self.http.put_back_req_obj(req)
            self.http.release_req_index(req.index_in_shm_mem)
        while self.waiting and (index := self.http.alloc_req_index()) is not None:
            name, prompt, new_tokens, sampling = self.waiting.pop(0)
            req = self.http.get_req_obj_by_index(index)
            asked = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "ignore_eos": not SETUP.expected}
            asked |= {"repetition_penalty": SETUP.penalty, **sampling}
            number = (len(self.names) + 1) * 8
            req.init(number, list(prompt), asked, None, chunked_prefill_size=SETUP.chunk)
            self.names[name] = req
            _Socket.asked.append(self.indexes(number, self.media(), [int(index)], 0.0))

    def said(self, req: Any) -> list[int]:
        count = req.finish_token_index + 1 - req.input_len
        return [int(token) for token in req.shm_prompt_ids.arr[req.input_len :][:count]]

    def abort(self, name: str) -> None:
        if (req := self.names.get(name)) is not None:
            req.is_aborted = True

    @property
    def left(self) -> bool:
        router = self.router
        waiting = self.waiting or _Socket.asked or router.req_queue.get_wait_req_num() or router.schedule_new_batch
        return bool(waiting or router.running_batch or any(self.names.values()))

    def step(self) -> bool:
        self._ask()
        asyncio.run(self.router._step())
        self.turns.next()
        return self.left

    def close(self) -> None:
        self.recorder.close()

    @property
    def _decoding(self) -> list[Any]:
        reqs = self.context.requests_mapping.values()
        return [req for req in reqs if req.cur_kv_len > req.shm_req.input_len + 1 and not req.filter_mark]

    def fault_freed_too_early(self) -> bool:
        """A running request's slot is on the free list."""
        for req in self._decoding:
            if req.sampling_param.shm_param.max_new_tokens - req.cur_output_len > 4:
                self.model.mem_manager.free(self.model.req_manager.req_to_token_indexs[req.req_idx, :1].clone())
                return True
        return False

    def fault_leaked(self) -> bool:
        """A slot is forgotten when it is given back, since another has cached the same meanwhile."""
        manager, free = self.model.req_manager, self.model.req_manager.free

        def forget(rows: list[int], slots: torch.Tensor) -> None:
            manager.free = free
            free(rows, slots[1:])

        for req in self.context.requests_mapping.values():
            key = torch.tensor(req.get_input_token_ids()[: req.cur_kv_len])
            own = req.get_radix_cache_shared_len()
            if req.filter_mark and self.backend.radix_cache.match_prefix(key)[1] > own:
                manager.free = forget
                return True
        return False

    def fault_evicted_while_read(self) -> bool:
        """A running request does not count as a reader of its prefix, which is evicted."""
        for req in self._decoding:
            node, cache = req.shared_kv_node, self.backend.radix_cache
            if node is not None and node.ref_counter == 1:
                cache.dec_node_ref_counter(node)
                free: list[Any] = []
                cache.evict(cache.get_tree_total_tokens_num() - cache.get_refed_tokens_num(), free.append)
                self.model.mem_manager.free(torch.cat(free))
                req.shared_kv_node = None
                return True
        return False
