"""A small engine with the shape of SGLang's scheduler, model runners, pools and allocators, hooked as SGLang is."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from kvcanary.recorder.engines.common.hooking import harmless
from kvcanary.recorder.engines.sglang.attachment import SglangAttachment
from kvcanary.recorder.engines.sglang.hooks import TARGETS
from kvcanary.recorder.process.settings import RecordingSettings

ROWS, WIDTH, SLOTS, HEADS, DIM = 5, 64, 96, 2, 8


class TokenToKVPoolAllocator:
    """Hands out slots (page size 1) or pages, in order; frees go to the end."""

    def __init__(self, size: int, page_size: int) -> None:
        self.size, self.page_size = size, page_size
        self.clear()

    def clear(self) -> None:
        self.free_pages = torch.arange(1, self.size // self.page_size + 1, dtype=torch.int64)
        self.release_pages = torch.empty(0, dtype=torch.int64)
        self.free_group: list[torch.Tensor] | None = None

    def alloc(self, need_size: int) -> torch.Tensor:
        count = need_size // self.page_size
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return (pages[:, None] * self.page_size + torch.arange(self.page_size)).reshape(-1)

    def free(self, free_index: torch.Tensor) -> None:
        if self.free_group is not None:
            self.free_group.append(free_index.clone())
        else:
            self.free_page_ids(torch.unique(free_index // self.page_size))

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        self.free_pages = torch.cat((self.free_pages, page_ids))

    def free_group_begin(self) -> None:
        self.free_group = []

    def free_group_end(self) -> None:
        pending, self.free_group = self.free_group, None
        if pending:
            self.free(torch.cat(pending))


# Pools are known by the names of their classes.
class MHATokenToKVPool(SimpleNamespace):
    """`k_buffer`, `v_buffer`: a tensor a layer, `[size + page_size, heads, dim]`."""

    dtype = store_dtype = torch.float32

    def set_kv_buffer(self, layer: Any, loc: Any, cache_k: Any, cache_v: Any) -> None:
        self.k_buffer[layer.layer_id][loc] = cache_k
        self.v_buffer[layer.layer_id][loc] = cache_v


class MLATokenToKVPool(SimpleNamespace):
    """`kv_buffer`: a tensor a layer."""


class SWAKVPool(SimpleNamespace):
    """`full_kv_pool`, `swa_kv_pool` and the table from one to the other."""


class RowPool:
    def __init__(self) -> None:
        self.req_to_token = torch.zeros((ROWS, WIDTH), dtype=torch.int32)
        self.free_rows = list(range(1, ROWS))

    def alloc(self, reqs: list[Any]) -> list[int]:
        for req in reqs:
            if req.req_pool_idx is None:
                req.req_pool_idx = self.free_rows.pop(0)
        return [req.req_pool_idx for req in reqs]

    def free(self, req: Any) -> None:
        self.free_rows.append(req.req_pool_idx)
        req.req_pool_idx = None


class Request:
    def __init__(self, rid: str, prompt: list[int], new_tokens: int) -> None:
        self.rid, self.origin_input_ids, self.output_ids = rid, prompt, []
        self.req_pool_idx: int | None = None
        self.bootstrap_room: int | None = None
        self.new_tokens = new_tokens
        self.cached = 0  # tokens of the prompt that are in its row before it runs
        self.finished_reason: Any = None

    def finished(self) -> bool:
        return len(self.output_ids) >= self.new_tokens


class ModelRunner:
    is_draft_worker = False
    sliding_window_size = None
    dtype = torch.float32
    canary_manager = None

    def __init__(self) -> None:
        self.server_args = SimpleNamespace(model_path="tiny", disaggregation_mode="null", tp_size=2)
        self.model_config = SimpleNamespace(vocab_size=97)
        self.req_to_token_pool = RowPool()
        self.token_to_kv_pool: Any = MHATokenToKVPool(
            k_buffer=[torch.zeros(SLOTS, HEADS, DIM)], v_buffer=[torch.zeros(SLOTS, HEADS, DIM)], page_size=1
        )
        self.fail_at = -1
        self.count = 0

    def forward(self, batch: Any) -> torch.Tensor:
        return self._forward_raw(batch)

    def _forward_raw(self, batch: Any) -> torch.Tensor:
        self.count += 1
        if self.count == self.fail_at:
            raise RuntimeError("the model failed")
        pool = self.token_to_kv_pool
        k = torch.sin(batch.input_ids.float())[:, None, None].expand(-1, HEADS, DIM)
        v = torch.cos(batch.positions.float())[:, None, None].expand(-1, HEADS, DIM)
        pool.set_kv_buffer(SimpleNamespace(layer_id=0), batch.out_cache_loc, k, v)
        return torch.tensor([int(ids) * 7 % 97 for ids in batch.input_ids[batch.ends - 1]])


class ForwardBatch(SimpleNamespace):
    @classmethod
    def init_new(cls, batch: Any, model_runner: ModelRunner) -> "ForwardBatch":
        return cls(rids=[req.rid for req in batch.reqs], **batch.fields)


class Result:
    def __init__(self, next_token_ids: torch.Tensor) -> None:
        self.next_token_ids = next_token_ids


EXTEND, DECODE = SimpleNamespace(name="EXTEND"), SimpleNamespace(name="DECODE")  # an enum's


class Batch:
    def __init__(self, reqs: list[Request], fields: dict[str, Any]) -> None:
        self.reqs, self.fields = reqs, fields


class Scheduler:
    """Prefills each request whole, then decodes all together; every step is hooked as SGLang's is."""

    tp_rank = 1
    enable_hierarchical_cache = False

    def __init__(self, runner: ModelRunner, allocator: TokenToKVPoolAllocator) -> None:
        self.runner, self.token_to_kv_pool_allocator = runner, allocator
        self.tree_cache = self.open_tree_cache()
        # of a decode engine
        self.disagg_decode_transfer_queue = SimpleNamespace(
            extend=lambda decode_reqs: None, _commit_transfer_to_req=lambda decode_req: None
        )
        self.rows = runner.req_to_token_pool

    def open_tree_cache(self) -> Any:
        return SimpleNamespace()

    def run_batch(self, batch: Batch) -> Any:
        forward_batch = ForwardBatch.init_new(batch, self.runner)
        return Result(self.runner.forward(forward_batch))

    def process_batch_result(self, batch: Batch, result: Any) -> None:
        self.token_to_kv_pool_allocator.free_group_begin()
        for req, token in zip(batch.reqs, result.next_token_ids.tolist(), strict=True):
            req.output_ids.append(token)
            if req.finished():
                length = len(req.origin_input_ids) + len(req.output_ids) - 1
                self.token_to_kv_pool_allocator.free(self.rows.req_to_token[req.req_pool_idx, :length].long())
                self.rows.free(req)
        self.token_to_kv_pool_allocator.free_group_end()

    def send_kv_chunk(self, req: Request, last_chunk: bool = False, end_idx: int | None = None) -> None:
        """Of a prefill engine; what moves the bytes is elsewhere."""

    def step(self, reqs: list[Request]) -> None:
        self.rows.alloc(reqs)
        starts = [r.cached if not r.output_ids else len(r.origin_input_ids) + len(r.output_ids) - 1 for r in reqs]
        tokens = [(r.origin_input_ids + r.output_ids)[start:] for r, start in zip(reqs, starts, strict=True)]
        positions = [torch.arange(start, start + len(part)) for part, start in zip(tokens, starts, strict=True)]
        slots = self.token_to_kv_pool_allocator.alloc(sum(map(len, tokens)))
        rows = torch.tensor([r.req_pool_idx for r in reqs])
        lens = torch.tensor([len(part) for part in tokens])
        self.rows.req_to_token[rows.repeat_interleave(lens), torch.cat(positions)] = slots.int()
        fields = {
            "forward_mode": DECODE if reqs[0].output_ids else EXTEND,
            "req_pool_indices": rows,
            "seq_lens": torch.tensor(starts) + lens,
            "extend_prefix_lens": torch.tensor(starts),
            "extend_seq_lens": lens,
            "input_ids": torch.tensor([token for part in tokens for token in part]),
            "positions": torch.cat(positions),
            "out_cache_loc": slots,
            "ends": torch.cumsum(lens, 0),
            "spec_info": None,
        }
        batch = Batch(reqs, fields)
        self.process_batch_result(batch, self.run_batch(batch))


OWNERS = {
    "scheduler": (Scheduler, "__init__"),
    "runner": (ModelRunner, "__init__"),
    "model": (ModelRunner, "_forward_raw"),
    "run": (Scheduler, "run_batch"),
    "result": (Scheduler, "process_batch_result"),
}


def hooked(monkeypatch: Any, settings: RecordingSettings) -> SglangAttachment:
    """Put an attachment's hooks around the fake engine, as SGLang's registry does around the real one."""
    attachment = SglangAttachment(settings)
    assert set(OWNERS) <= {target.hook for target in TARGETS}
    for name, (owner, attribute) in OWNERS.items():
        raw = owner.__dict__[attribute]
        original = raw.__func__ if isinstance(raw, classmethod) else raw
        wrapper = functools.partial(
            harmless(getattr(attachment, f"on_{name}"), attachment.fault, attachment.cost), original
        )

        def method(*args: Any, _wrapper: Any = wrapper, **kwargs: Any) -> Any:
            return _wrapper(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, classmethod(method) if isinstance(raw, classmethod) else method)
    return attachment


def serve(page_size: int = 1) -> tuple[list[list[int]], ModelRunner]:
    """Run four requests on a new engine; return their output and the model runner."""
    runner = ModelRunner()
    scheduler = Scheduler(runner, TokenToKVPoolAllocator(SLOTS - page_size, page_size))
    requests = [Request(f"r{i}", [i + 3, i + 5, 40, 41 + i], new_tokens=3 + 2 * i) for i in range(4)]
    for request in requests:
        scheduler.step([request])
    while running := [request for request in requests if not request.finished()]:
        scheduler.step(running)
    return [request.output_ids for request in requests], runner


def drafts_in_trees(monkeypatch: Any) -> None:
    """Have the engine verify trees of drafts where it decodes."""
    init = ModelRunner.__init__

    def with_tree(self: ModelRunner) -> None:
        init(self)
        vars(self.server_args).update(speculative_algorithm="NGRAM", speculative_ngram_max_bfs_breadth=10)

    monkeypatch.setattr(ModelRunner, "__init__", with_tree)
    monkeypatch.setitem(globals(), "DECODE", SimpleNamespace(name="TARGET_VERIFY"))
