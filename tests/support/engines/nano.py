"""A paged engine with the shape of nano-vllm, for its adapter in examples/: what that touches has the same names here.

Prefix cache by hashes of full blocks, chunked prefill, preemption; the "model" samples by what it reads from the cache.
"""

import sys
from collections import deque
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from kvcanary.recorder.capture.kv_tensor import KvTensor

from ..places import ROOT

BLOCK, BLOCKS, LAYERS, HEADS, DIM, VOCAB = 4, 24, 2, 2, 6, 97
CONTEXT = SimpleNamespace()


class Sequence:
    def __init__(self, seq_id: int, prompt: list[int], new_tokens: int) -> None:
        self.seq_id, self.token_ids, self.end = seq_id, list(prompt), len(prompt) + new_tokens
        self.block_table: list[int] = []
        self.num_cached_tokens = self.num_scheduled_tokens = 0

    def __len__(self) -> int:
        return len(self.token_ids)


class BlockManager:
    def __init__(self) -> None:
        self.free_block_ids, self.hash_to_block_id = deque(range(BLOCKS)), {}
        self.users = [0] * BLOCKS

    def take(self) -> int:
        block = self.free_block_ids.popleft()
        self.users[block] = 1
        self.hash_to_block_id = {key: held for key, held in self.hash_to_block_id.items() if held != block}
        return block

    def admit(self, seq: Sequence) -> bool:
        hits = []
        for end in range(BLOCK, len(seq), BLOCK):
            block = self.hash_to_block_id.get(tuple(seq.token_ids[:end]))
            if block is None:
                break
            hits.append(block)
        missing = -(-len(seq) // BLOCK) - len(hits)
        if len(self.free_block_ids) - sum(not self.users[block] for block in hits) < missing:
            return False
        for block in hits:
            if not self.users[block]:
                self.free_block_ids.remove(block)
            self.users[block] += 1
        seq.block_table = hits + [self.take() for _ in range(missing)]
        seq.num_cached_tokens = len(hits) * BLOCK
        return True

    @property
    def blocks(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(block_id=block, ref_count=self.users[block]) for block in range(BLOCKS)]

    def release(self, seq: Sequence) -> None:
        for block in reversed(seq.block_table):
            self.users[block] -= 1
            if not self.users[block]:
                self.free_block_ids.append(block)
        seq.block_table, seq.num_cached_tokens = [], 0

    def remember(self, seq: Sequence) -> None:
        for end in range(BLOCK, seq.num_cached_tokens + seq.num_scheduled_tokens + 1, BLOCK):
            self.hash_to_block_id.setdefault(tuple(seq.token_ids[:end]), seq.block_table[end // BLOCK - 1])


class Scheduler:
    def __init__(self, *, max_num_seqs: int, chunk: int) -> None:
        self.max_num_seqs, self.chunk, self.block_manager = max_num_seqs, chunk, BlockManager()
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()

    def schedule(self) -> tuple[list[Sequence], bool]:
        batch, left = [], self.chunk
        while self.waiting and left and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if not seq.block_table and not self.block_manager.admit(seq):
                break
            seq.num_scheduled_tokens = min(left, len(seq) - seq.num_cached_tokens)
            left -= seq.num_scheduled_tokens
            batch.append(seq)
            if seq.num_cached_tokens + seq.num_scheduled_tokens < len(seq):
                break
            self.running.append(self.waiting.popleft())
        if batch:
            return batch, True
        for seq in list(self.running):
            if seq not in self.running:
                continue
            while len(seq) > len(seq.block_table) * BLOCK and not self.block_manager.free_block_ids:
                victim = self.running.pop()
                self.block_manager.release(victim)
                self.waiting.appendleft(victim)
                batch = [other for other in batch if other is not victim]
                if victim is seq:
                    break
            if seq in self.running:
                if len(seq) > len(seq.block_table) * BLOCK:
                    seq.block_table.append(self.block_manager.take())
                seq.num_scheduled_tokens = 1
                batch.append(seq)
        return batch, False

    def postprocess(self, batch: list[Sequence], tokens: list[int]) -> None:
        for seq, token in zip(batch, tokens, strict=True):
            self.block_manager.remember(seq)
            seq.num_cached_tokens += seq.num_scheduled_tokens
            if seq.num_cached_tokens < len(seq):
                continue
            seq.token_ids.append(token)
            if len(seq) == seq.end:
                self.block_manager.release(seq)
                self.running.remove(seq)


class Runner:
    def __init__(self) -> None:
        self.block_size, self.config = BLOCK, SimpleNamespace(max_model_len=96)
        self.kv_cache = torch.zeros(2, LAYERS, BLOCKS, BLOCK, HEADS, DIM)
        self.on_inputs: Callable[[dict[str, Any]], None] = lambda _: None

    def run(self, batch: list[Sequence], is_prefill: bool) -> list[int]:
        starts = [seq.num_cached_tokens for seq in batch]
        ends = [start + seq.num_scheduled_tokens for start, seq in zip(starts, batch, strict=True)]
        whole = [(seq, p) for seq, a, b in zip(batch, starts, ends, strict=True) for p in range(a, b)]
        width = max(len(seq.block_table) for seq in batch)
        CONTEXT.slot_mapping = torch.tensor([seq.block_table[p // BLOCK] * BLOCK + p % BLOCK for seq, p in whole])
        CONTEXT.block_tables = torch.tensor([seq.block_table + [-1] * (width - len(seq.block_table)) for seq in batch])
        CONTEXT.context_lens = torch.tensor(ends)
        CONTEXT.cu_seqlens_k = torch.tensor([0, *ends]).cumsum(0)
        CONTEXT.cu_seqlens_q = torch.tensor([0, *(b - a for a, b in zip(starts, ends, strict=True))]).cumsum(0)
        input_ids = torch.tensor([seq.token_ids[p] for seq, p in whole])
        positions = torch.tensor([p for _, p in whole])
        self.on_inputs(
            {
                "input_ids": input_ids,
                "positions": positions,
                "slots": CONTEXT.slot_mapping,
                "block_tables": CONTEXT.block_tables,
                "seq_lens": CONTEXT.context_lens if not is_prefill else CONTEXT.cu_seqlens_k[1:],
                "prefix_lens": starts,
                "extend_lens": [b - a for a, b in zip(starts, ends, strict=True)],
                "K": KvTensor(tensor=self.kv_cache[0, 0], axes="block slot head dim"),
                "V": KvTensor(tensor=self.kv_cache[1, 0], axes="block slot head dim"),
            }
        )
        return self.run_model(input_ids, positions, is_prefill)

    def run_model(self, input_ids: torch.Tensor, positions: torch.Tensor, _is_prefill: bool) -> list[int]:
        lanes = torch.arange(HEADS * DIM).view(HEADS, DIM)
        for layer in range(LAYERS):
            for half, wave in enumerate((torch.sin, torch.cos)):
                flat = self.kv_cache[half, layer].view(-1, HEADS, DIM)
                flat[CONTEXT.slot_mapping] = wave(input_ids[:, None, None] * (layer + 1.3) + lanes)
        sampled = []
        for blocks, end in zip(CONTEXT.block_tables, CONTEXT.context_lens.tolist(), strict=True):
            slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).view(-1)[:end]
            read = self.kv_cache.view(2, LAYERS, -1, HEADS, DIM)[:, :, slots]
            sampled.append(int(read.sum().abs() * 1e3) % (VOCAB - 1) + 1)
        return sampled


class Llm:
    def __init__(self, *, max_num_seqs: int = 4, chunk: int = 24) -> None:
        self.model_runner, self.scheduler = Runner(), Scheduler(max_num_seqs=max_num_seqs, chunk=chunk)
        self._numbers = count()

    def add_request(self, prompt: list[int], new_tokens: int) -> Sequence:
        self.scheduler.waiting.append(Sequence(next(self._numbers), prompt, new_tokens))
        return self.scheduler.waiting[-1]

    def step(self) -> bool:
        batch, is_prefill = self.scheduler.schedule()
        if batch:
            self.scheduler.postprocess(batch, self.model_runner.run(batch, is_prefill))
        return bool(self.scheduler.running or self.scheduler.waiting)


def attach(llm: Llm, path: Path, **options: Any) -> Any:
    """Attach the adapter of examples/, with this module's context for nano-vllm's."""
    module = ModuleType("nanovllm.utils.context")
    module.get_context = lambda: CONTEXT  # type: ignore[attr-defined]
    names: dict[str, Any] = {}
    code = (ROOT / "examples" / "nano_vllm.py").read_text(encoding="utf-8")
    known = {name: sys.modules.get(name) for name in ("nanovllm", "nanovllm.utils", module.__name__)}
    try:
        sys.modules.update(dict.fromkeys(known, module))
        exec(compile(code, "nano_vllm.py", "exec"), names)
        return names["attach"](llm, path, **options)
    finally:
        for name, before in known.items():
            if before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = before
