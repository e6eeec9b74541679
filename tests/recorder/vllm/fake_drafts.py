"""Drafters with the shape of vLLM's, for the small engine: of the V1 runner, and of the V2 one with graphs or without."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from .fake_engine import BLOCK, CONTEXT, DIM, HEADS

LAYER = "draft.0.attn"
ATTENTION = SimpleNamespace(layer_names=[LAYER], backend=SimpleNamespace(get_name=lambda: "CPU_ATTN"))


class DraftLayers:
    """A draft model of one layer."""

    runner: Any

    def forward(self, *, input_ids: Any, positions: Any, inputs_embeds: Any = None) -> None:
        self.compute(input_ids, positions, CONTEXT.slot_mapping[LAYER])

    def compute(self, input_ids: Any, positions: Any, slots: Any) -> None:
        layer = self.runner.layers[LAYER]
        key = torch.sin(input_ids + positions / 7)[:, None, None].expand(-1, HEADS, DIM).contiguous()
        layer.impl.do_kv_cache_update(layer, key, key, layer.kv_cache, slots)


class EagleProposer:
    """vLLM's drafter: one forward over the step's tokens, each with the token behind it, and one for each guess but one."""

    ahead = 1
    _draft_attn_layer_names = frozenset({LAYER})
    draft_attn_groups = (ATTENTION,)

    def __init__(
        self, spoil: Callable[[Any], None] | None = None, *, last_of_all: bool = False, rejected: int = 0
    ) -> None:
        """With so many `rejected` tokens behind each request's own, but for those whose prompt goes on."""
        self.model = DraftLayers()
        self.rejected = rejected
        self.spoil = spoil
        self.last_of_all = last_of_all
        self.rounds = 0

    def draft(self, runner: Any) -> None:
        """Draft behind a step."""
        ends = [(name, end) for name, _, end in runner.ends]
        in_prompt = [end < len(runner.requests[name].tokens) - 1 for name, end in ends]
        lens = torch.tensor([0 if inside else self.rejected for inside in in_prompt], dtype=torch.int32)
        self.propose(runner, num_rejected_tokens_gpu=lens if self.rejected else None)

    def propose(self, runner: Any, num_rejected_tokens_gpu: Any = None) -> None:
        self.model.runner = runner
        self.rounds += 1
        computed = runner.batch.num_computed_tokens_cpu
        left_out = [0] * len(runner.ends) if num_rejected_tokens_gpu is None else num_rejected_tokens_gpu.tolist()
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for (name, row, end), more in zip(runner.ends, left_out, strict=True):
            own, first = runner.requests[name].tokens, int(computed[row])
            for p in range(first, end + 1 - self.ahead):
                in_prompt = end < len(own) - 1
                tokens.append(
                    own[-1] if self.last_of_all and in_prompt and p == end - self.ahead else own[p + self.ahead]
                )
                positions.append(p)
                slots.append(self._slot(runner, name, p))
            for place in range(more):
                self._reject(runner, name, end + 1 - self.ahead + place, (tokens, positions, slots))
            starts.append(len(tokens))
        ends = [end + 1 - self.ahead for _, _, end in runner.ends]
        lens = [end + more for end, more in zip(ends, left_out, strict=True)]
        self._run("first", tokens, positions, slots, starts, lens)
        for step in range(2):
            at = [end + step for end in ends]
            slots = [self._slot(runner, name, p) for (name, _, _), p in zip(runner.ends, at, strict=True)]
            self._run(f"step {step}", [7 + step] * len(at), at, slots, list(range(len(at) + 1)), [p + 1 for p in at])

    def _reject(self, runner: Any, name: str, position: int, fed: tuple[list[int], list[int], list[int]]) -> None:
        """Feed a token that the target has rejected: its K and V are written, and written anew before anybody reads them."""
        for given, value in zip(fed, (1000, position, self._slot(runner, name, position)), strict=True):
            given.append(value)

    @staticmethod
    def _slot(runner: Any, name: str, position: int) -> int:
        """Return where a token goes, -1 if the request has no block for it."""
        blocks = runner.requests[name].blocks[0]
        return blocks[position // BLOCK] * BLOCK + position % BLOCK if position < len(blocks) * BLOCK else -1

    def _run(self, stage: str, tokens: Any, positions: Any, slots: Any, starts: Any, ends: Any) -> None:
        call = SimpleNamespace(
            stage=stage,
            runner=self.model.runner,
            tokens=torch.tensor(tokens, dtype=torch.int32),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            starts=torch.tensor(starts, dtype=torch.int32),
            blocks=self.model.runner.batch.block_table[0].block_table.gpu.clone(),
        )
        if self.spoil is not None:
            self.spoil(call)
        metadata = {
            LAYER: SimpleNamespace(seq_lens=call.seq_lens, query_start_loc=call.starts, block_table=call.blocks)
        }
        self._forward(call, metadata)

    def _forward(self, call: Any, metadata: dict[str, Any]) -> None:
        CONTEXT.attn_metadata, CONTEXT.slot_mapping = metadata, {LAYER: call.slots}
        self.model.forward(input_ids=call.tokens, positions=call.positions)
        CONTEXT.attn_metadata = CONTEXT.slot_mapping = None


class DraftModelProposer(EagleProposer):
    """A model of its own: it is fed each token at its position, and the sampled one behind them."""

    ahead = 0

    def _reject(self, runner: Any, name: str, position: int, fed: tuple[list[int], list[int], list[int]]) -> None:
        """Feed a token that the target has rejected, which has no slot."""
        for given, value in zip(fed, (0, position, -1), strict=True):
            given.append(value)


class _Graphs:
    """Graphs of a model: what it computes runs without a call of it."""

    graphs = (1,)

    def __init__(self) -> None:
        self.run: Callable[[], None] = lambda: None

    def run_fullgraph(self, _: Any) -> None:
        self.run()


class EagleSpeculator(EagleProposer):
    """The V2 runner's: rejected tokens have slots, and what was there before in place of tokens and positions.

    With `graphs` the first forward is a graph of its own, and those behind it are one, or one each if not `together`.
    """

    pcp_manager = None
    draft_attn_layer_names = frozenset({LAYER})
    _draft_attn_layer_names = draft_attn_groups = ()
    attn_groups = ((ATTENTION,),)

    def __init__(self, *args: Any, graphs: bool = False, together: bool = True, **more: Any) -> None:
        super().__init__(*args, **more)
        self.prefill_cudagraph_manager, self.decode_cudagraph_manager = _Graphs(), _Graphs()
        self.decode_cudagraph_manager.graphs = (1,) if graphs else ()
        self.graphs, self.supports_decode_metadata_update = graphs, together
        self.input_buffers = SimpleNamespace(
            input_ids=torch.zeros(64, dtype=torch.int32),
            positions=torch.zeros(64, dtype=torch.int64),
            seq_lens=torch.zeros(16, dtype=torch.int32),
            query_start_loc=torch.zeros(17, dtype=torch.int32),
        )

    def draft(self, runner: Any) -> None:
        lens = [0 if end < len(runner.requests[name].tokens) - 1 else self.rejected for name, _, end in runner.ends]
        counts = [end - int(runner.batch.num_computed_tokens_cpu[row]) for _, row, end in runner.ends]
        self.metadata = {
            LAYER: SimpleNamespace(
                seq_lens=torch.tensor([end for _, _, end in runner.ends], dtype=torch.int32),
                query_start_loc=torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32),
                block_table=runner.batch.block_table[0].block_table.gpu,
            )
        }
        self.propose(runner, self.metadata, torch.tensor(lens, dtype=torch.int32))

    def propose(self, runner: Any, attn_metadata: Any, num_rejected: Any) -> None:  # type: ignore[override]
        super().propose(runner, num_rejected)

    def _reject(self, runner: Any, name: str, position: int, fed: tuple[list[int], list[int], list[int]]) -> None:
        for given, value in zip(fed, (1000, 3, self._slot(runner, name, position)), strict=True):
            given.append(value)

    def _forward(self, call: Any, metadata: dict[str, Any]) -> None:
        own, mapping = self.input_buffers, call.runner.block_tables.slot_mappings[0]
        count, bs = len(call.tokens), len(call.seq_lens)
        if not self.graphs:
            own.input_ids[:count], own.positions[:count] = call.tokens, call.positions
            self._run_eagerly(count, metadata, {LAYER: call.slots})
            return
        own.input_ids[:count], own.positions[:count], mapping[:count] = call.tokens, call.positions, call.slots
        own.seq_lens[:bs], own.query_start_loc[: bs + 1] = call.seq_lens, call.starts
        own_table = call.runner.batch.block_table[0].block_table.gpu
        before, own_table[:] = own_table.clone(), call.blocks
        manager = self.prefill_cudagraph_manager if call.stage == "first" else self.decode_cudagraph_manager

        def run() -> None:
            self.model.compute(own.input_ids[:count], own.positions[:count], mapping[:count])

        manager.run = run
        manager.run_fullgraph(None)
        own_table[:] = before

    def _run_eagerly(self, count: int, metadata: Any, slots: Any) -> None:
        self._run_model(count, metadata, slots)

    def _run_model(self, num_tokens: int, attn_metadata: Any, slot_mappings: Any) -> None:
        own = self.input_buffers
        CONTEXT.attn_metadata, CONTEXT.slot_mapping = attn_metadata, slot_mappings
        self.model.forward(input_ids=own.input_ids[:num_tokens], positions=own.positions[:num_tokens])
        CONTEXT.attn_metadata = CONTEXT.slot_mapping = None


class StandaloneARSpeculator(EagleSpeculator):
    """The same of a model of its own."""

    ahead = 0

    def _run_eagerly(self, count: int, metadata: Any, slots: Any) -> None:
        own = self.input_buffers
        self._run_model(own.input_ids[:count], own.positions[:count], metadata, slots)

    def _run_model(self, input_ids: Any, positions: Any, attn_metadata: Any, slot_mappings: Any) -> None:  # type: ignore[override]
        CONTEXT.attn_metadata, CONTEXT.slot_mapping = attn_metadata, slot_mappings
        self.model.forward(input_ids=input_ids, positions=positions)
        CONTEXT.attn_metadata = CONTEXT.slot_mapping = None
