"""Real nano-vllm on a CPU, as `kvcanary check-adapter` drives it: its scheduler, blocks and inputs, a small stand-in for its model.

    git clone https://github.com/GeeeekExplorer/nano-vllm
    PYTHONPATH=nano-vllm kvcanary check-adapter tests/conformance/nano_vllm/engine.py:Engine

What needs a GPU is replaced: flash-attn (not called), `Tensor.cuda`, pinned memory, and the model, which writes K and V through
`slot_mapping` and samples by what it reads through `block_tables`, as nano-vllm's attention does.
"""

import hashlib
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

BLOCK, BLOCKS, LAYERS, HEADS, DIM = 8, 24, 2, 2, 12


class _Digest:
    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def update(self, data: bytes) -> None:
        self._digest.update(data)

    def intdigest(self) -> int:
        return int.from_bytes(self._digest.digest(), "little")


def _stand_ins() -> None:
    flash, digests = ModuleType("flash_attn"), ModuleType("xxhash")
    flash.flash_attn_varlen_func = flash.flash_attn_with_kvcache = None  # type: ignore[attr-defined]
    digests.xxh64 = _Digest  # type: ignore[attr-defined]
    sys.modules.setdefault("flash_attn", flash)
    sys.modules.setdefault("xxhash", digests)
    make = torch.tensor
    torch.tensor = lambda *args, pin_memory=False, **options: make(*args, **options)  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, **_: self  # type: ignore[assignment,method-assign]


class _Model:
    """Stores K and V of each token, and gives each request a number that all that it reads goes into."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        self.flat = kv_cache.view(2, LAYERS, BLOCKS * BLOCK, HEADS, DIM)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        context = importlib.import_module("nanovllm.utils.context").get_context()
        lanes = torch.arange(HEADS * DIM).view(HEADS, DIM)
        slots = context.slot_mapping.long()
        for layer in range(LAYERS):
            angle = (input_ids + 0.01 * positions * layer)[:, None, None] + lanes + layer
            self.flat[0, layer][slots], self.flat[1, layer][slots] = torch.sin(angle), torch.cos(angle)
        lens = (context.cu_seqlens_k.diff() if context.is_prefill else context.context_lens).tolist()
        if context.block_tables is None:
            return torch.stack([self.flat[:, :, part].sum() for part in slots.split(lens)])
        blocks = context.block_tables.long()
        reads = [(row[:, None] * BLOCK + torch.arange(BLOCK)).view(-1)[:n] for row, n in zip(blocks, lens, strict=True)]
        return torch.stack([self.flat[:, :, read].sum() for read in reads])

    def compute_logits(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs


class Engine:
    vocab_size, max_len = 97, 60

    def __init__(self, trace: Path) -> None:
        _stand_ins()
        sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
        attach = importlib.import_module("nano_vllm").attach
        runners = importlib.import_module("nanovllm.engine.model_runner")
        schedulers = importlib.import_module("nanovllm.engine.scheduler")
        self.sequences = importlib.import_module("nanovllm.engine.sequence")
        self.sequences.Sequence.block_size = BLOCK
        config = SimpleNamespace(
            max_num_seqs=4,
            max_num_batched_tokens=48,
            eos=-1,
            max_model_len=128,
            kvcache_block_size=BLOCK,
            num_kvcache_blocks=BLOCKS,
        )
        self.runner = runner = runners.ModelRunner.__new__(runners.ModelRunner)
        runner.config, runner.block_size, runner.enforce_eager, runner.world_size, runner.rank = (
            config,
            BLOCK,
            True,
            1,
            0,
        )
        runner.kv_cache = torch.zeros(2, LAYERS, BLOCKS, BLOCK, HEADS, DIM)
        runner.model = _Model(runner.kv_cache)
        runner.sampler = lambda logits, _: (logits * 1e3).long().abs() % 96 + 1
        llms = importlib.import_module("nanovllm.engine.llm_engine")
        self.llm = llms.LLMEngine.__new__(llms.LLMEngine)
        self.llm.model_runner, self.llm.scheduler, self.llm.ps = runner, schedulers.Scheduler(config), []
        self.recorder = attach(self.llm, trace, strict=True)
        recorded, run = runner.run_model, runner.run

        def tell_batch(seqs: list[Any], is_prefill: bool) -> list[int]:
            self.batch = seqs
            return run(seqs, is_prefill)

        def show(input_ids: Any, positions: Any, is_prefill: bool) -> Any:
            self._show(input_ids, positions, is_prefill)
            return recorded(input_ids, positions, is_prefill)

        runner.run, runner.run_model = tell_batch, show

    def _show(self, input_ids: Any, positions: Any, is_prefill: bool) -> None:
        from kvcanary import KvTensor

        context = importlib.import_module("nanovllm.utils.context").get_context()
        tables = {} if context.block_tables is None else {"block_tables": context.block_tables, "block_size": BLOCK}
        lens = {} if is_prefill else {"seq_lens": context.context_lens}
        pools = {h: KvTensor(tensor=self.runner.kv_cache[n, 0], axes="block slot head dim") for n, h in enumerate("KV")}
        self.on_inputs(
            {
                "input_ids": input_ids,
                "positions": positions,
                "slots": context.slot_mapping,
                "prefix_lens": [seq.num_cached_tokens for seq in self.batch],
                "extend_lens": [seq.num_scheduled_tokens for seq in self.batch],
                **tables,
                **lens,
                **pools,
            }
        )

    def on_inputs(self, inputs: dict[str, Any]) -> None: ...

    def add(self, name: str, prompt: list[int], new_tokens: int) -> None:
        params = importlib.import_module("nanovllm.sampling_params").SamplingParams
        self.llm.add_request(prompt, params(max_tokens=new_tokens, ignore_eos=True))

    def step(self) -> bool:
        if not self.llm.is_finished():
            self.llm.step()
        return not self.llm.is_finished()

    def close(self) -> None:
        self.recorder.close()

    @property
    def _manager(self) -> Any:
        return self.llm.scheduler.block_manager

    def fault_freed_too_early(self) -> bool:
        """A running request's first block is back on the free list."""
        for seq in self.llm.scheduler.running:
            if len(seq.block_table) > 1 and seq.num_completion_tokens < seq.max_tokens - 2:
                self._manager.free_block_ids.appendleft(seq.block_table[0])
                return True
        return False

    def fault_leaked(self) -> bool:
        """A block counts a user too many, and is never given back."""
        for seq in self.llm.scheduler.running:
            if seq.num_completion_tokens == seq.max_tokens - 1 and len(seq) % BLOCK > 1:
                self._manager.blocks[seq.block_table[-1]].ref_count += 1
                return True
        return False

    def fault_hash_of_another(self) -> bool:
        """The prefix cache leads to another prefix's block, whose tokens it does not compare."""
        waiting = [seq for seq in self.llm.scheduler.waiting if not seq.block_table and len(seq) > BLOCK]
        for seq in waiting:
            digest = self._manager.compute_hash(seq.block(0))
            right = self._manager.hash_to_block_id.get(digest)
            wrong = next((b for b in self._manager.hash_to_block_id.values() if b != right), None)
            if right is not None and wrong is not None:
                self._manager.hash_to_block_id[digest] = wrong
                self._manager.blocks[wrong].token_ids = seq.block(0)
                return True
        return False

    def fault_stale_block(self) -> bool:
        """A running request's table keeps a block of a request that has ended."""
        free = [block for block in self._manager.free_block_ids if self._manager.blocks[block].hash != -1]
        for seq in self.llm.scheduler.running:
            if free and len(seq.block_table) > 2:
                seq.block_table[1] = free[-1]
                return True
        return False
