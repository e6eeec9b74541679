"""A small engine with the shape of vLLM's runners, and its hooking as vLLM is hooked."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from kvcanary.recorder.engines.vllm.attachment import VllmAttachment
from kvcanary.recorder.engines.vllm.hooks import RUNNER_V1, RUNNER_V2, SCHEDULER, hook_module
from kvcanary.recorder.process.settings import RecordingSettings

from .fake_scheduler import BLOCK, MAX_SEQS, WINDOW, Request, Scheduler

DIM, HEADS, WIDTH, VOCAB = 8, 2, 64, 97


class KVCacheSpec:
    def __init__(self) -> None:
        self.block_size, self.head_size, self.head_size_v = BLOCK, DIM, DIM


class FullAttentionSpec(KVCacheSpec):
    pass


class SlidingWindowSpec(KVCacheSpec):
    sliding_window = WINDOW


class MambaSpec(KVCacheSpec):
    pass


class Attention:
    """The CPU's attention: K of a token is stored back to front, V as it is."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        blocks, heads, tokens, _ = kv_cache.shape
        both = kv_cache.view(blocks, heads, 2 * tokens, DIM)
        held = slot_mapping >= 0
        block, offset = slot_mapping[held] // tokens, slot_mapping[held] % tokens
        both[block, :, offset] = key[held].flip(-1)
        both[block, :, tokens + offset] = value[held]


# What vLLM's layers are given while a model runs.
CONTEXT = SimpleNamespace(attn_metadata=None, slot_mapping=None)


class GPUModelRunner:
    on_attention: Any = None
    own_tables = True  # attention's metadata have block tables of their own
    uses_mrope = False
    deeper: tuple[str, ...] = ()  # layers of the first group behind its first one

    def __init__(self, specs: list[KVCacheSpec], num_blocks: int, *, use_async: bool = False) -> None:
        self.use_async = use_async
        self.layers: dict[str, Any] = {}
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=2, rank=1),
            scheduler_config=SimpleNamespace(max_num_seqs=MAX_SEQS, async_scheduling=use_async),
            model_config=SimpleNamespace(
                model="some/tiny",
                dtype=torch.float32,
                max_model_len=WIDTH,
                logprobs_mode="raw_logprobs",
                uses_mrope=self.uses_mrope,
            ),
            compilation_config=SimpleNamespace(static_forward_context=self.layers),
            speculative_config=None,
        )
        # A draft model, where there is one, shares the first group's blocks.
        drafter = getattr(self, "drafter", None) or getattr(self, "speculator", None)
        names = getattr(drafter, "_draft_attn_layer_names", ()) or getattr(drafter, "draft_attn_layer_names", ())
        drafts = sorted(names)
        self.groups = [
            SimpleNamespace(
                kv_cache_spec=spec, layer_names=[f"model.layers.{gid}.attn", *(() if gid else (*self.deeper, *drafts))]
            )
            for gid, spec in enumerate(specs)
        ]
        self.initialize_kv_cache(SimpleNamespace(kv_cache_groups=self.groups, num_blocks=num_blocks))

    def initialize_kv_cache(self, config: Any, is_profiling: bool = False) -> None:
        self.kv_cache_config = config
        # All groups take their blocks from one pool, and so share its memory.
        self.kv = torch.zeros(config.num_blocks, HEADS, BLOCK, 2 * DIM)
        for group in config.kv_cache_groups:
            for name in group.layer_names:
                kv = torch.zeros_like(self.kv) if "draft" in name or name in self.deeper else self.kv
                self.layers[name] = SimpleNamespace(kv_cache=kv, impl=Attention())
        tables = [
            SimpleNamespace(
                block_size=BLOCK,
                block_table=SimpleNamespace(gpu=torch.zeros(MAX_SEQS, WIDTH // BLOCK, dtype=torch.int32)),
                slot_mapping=SimpleNamespace(gpu=torch.zeros(64, dtype=torch.int64)),
            )
            for _ in config.kv_cache_groups
        ]
        self.input_batch = self.batch = SimpleNamespace(
            req_ids=[], block_table=tables, num_computed_tokens_cpu=np.zeros(MAX_SEQS, np.int32)
        )
        self.requests: dict[str, Any] = {}

    def execute_model(self, output: Any) -> None:
        fed = self.prepare(output)
        if fed is not None:
            self.attend(output)
            self._model_forward(fed[0], positions=fed[1])
            CONTEXT.attn_metadata = None

    def attend(self, output: Any) -> dict[str, Any]:
        """Make attention's metadata, each group's with a block table of its own."""
        bs, counts = len(self.ends), list(output.num_scheduled_tokens.values())
        seq_lens = torch.tensor([end for _, _, end in self.ends], dtype=torch.int32)
        query_start_loc = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32)
        CONTEXT.attn_metadata = {
            name: SimpleNamespace(
                seq_lens=seq_lens,
                query_start_loc=query_start_loc,
                block_table=table.block_table.gpu[:bs].clone() if self.own_tables else table.block_table.gpu[:bs],
            )
            for group, table in zip(self.groups, self.batch.block_table, strict=True)
            for name in group.layer_names
        }
        if self.on_attention is not None:
            self.on_attention(CONTEXT.attn_metadata)
        return CONTEXT.attn_metadata

    def prepare(self, output: Any) -> tuple[Any, Any] | None:
        for name in output.finished_req_ids:
            self.requests.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = SimpleNamespace(
                tokens=list(new.prompt_token_ids), prompt_token_ids=new.prompt_token_ids, blocks=new.block_ids
            )
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            state = self.requests[name]
            if name in cached.resumed_req_ids:
                state.blocks = blocks
            else:
                state.blocks = [[*own, *more] for own, more in zip(state.blocks, blocks, strict=True)]
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        if not output.num_scheduled_tokens:
            return None
        batch = self.batch
        batch.req_ids = list(output.num_scheduled_tokens)
        ids, positions, self.ends = [], [], []
        for row, name in enumerate(batch.req_ids):
            start, count = computed[name], output.num_scheduled_tokens[name]
            batch.num_computed_tokens_cpu[row] = start
            ids += self.requests[name].tokens[start : start + count]
            positions += range(start, start + count)
            self.ends.append((name, row, start + count))
            for table, blocks in zip(batch.block_table, self.requests[name].blocks, strict=True):
                table.block_table.gpu[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        rows = np.repeat(np.arange(len(batch.req_ids)), [output.num_scheduled_tokens[n] for n in batch.req_ids])
        for table in batch.block_table:
            for i, (row, position) in enumerate(zip(rows.tolist(), positions, strict=True)):
                block = int(table.block_table.gpu[row, position // BLOCK])
                table.slot_mapping.gpu[i] = block * BLOCK + position % BLOCK
        return torch.tensor(ids, dtype=torch.int32), torch.tensor(positions)

    def _model_forward(self, input_ids: Any, positions: Any) -> None:
        """Store K and V of all tokens, then look at what each request's last token sees."""
        key = torch.sin(input_ids.float())[:, None, None].expand(-1, HEADS, DIM).contiguous()
        value = torch.cos(input_ids + positions / 7)[:, None, None].expand(-1, HEADS, DIM).contiguous()
        seen = dict.fromkeys((name for name, _, _ in self.ends), 0.0)
        for group, table in zip(self.groups, self.batch.block_table, strict=True):
            layer = self.layers[group.layer_names[0]]
            slots = table.slot_mapping.gpu[: input_ids.shape[0]]
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
            for name in self.deeper if group is self.groups[0] else ():
                other = self.layers[name]
                other.impl.do_kv_cache_update(other, 2 + key, 2 + value, other.kv_cache, slots)
            window = getattr(group.kv_cache_spec, "sliding_window", WIDTH)
            both = layer.kv_cache.view(-1, HEADS, 2 * BLOCK, DIM)
            for name, row, end in self.ends:
                for p in range(max(0, end - window), end):
                    block = int(table.block_table.gpu[row, p // BLOCK])
                    seen[name] += float(both[block, 0, p % BLOCK, 0] * (p + 1) + both[block, 0, BLOCK + p % BLOCK, 0])
        self.seen = seen

    def sample_tokens(self, grammar: Any) -> Any:
        sampled = []
        for name, _, end in self.ends:
            state = self.requests[name]
            token = [int(abs(self.seen[name]) * 1000) % VOCAB] if end == len(state.tokens) else []
            state.tokens += token
            sampled.append(token)
        of = np.array([[*token, 0][:1] for token in sampled])  # a row for each request, whether it samples or not
        logprobs = SimpleNamespace(logprob_token_ids=of, logprobs=-of / np.float32(8))
        result = SimpleNamespace(req_ids=list(self.batch.req_ids), sampled_token_ids=sampled, logprobs=logprobs)
        return SimpleNamespace(get_output=lambda: result) if self.use_async else result

    def shutdown(self) -> None:
        self.layers.clear()


class GPUModelRunnerV2(GPUModelRunner):
    """The same with the functions of vLLM's V2 runner."""

    def initialize_kv_cache(self, config: Any, is_profiling: bool = False) -> None:
        super().initialize_kv_cache(config, is_profiling)
        del self.input_batch
        self.model_state = SimpleNamespace(prepare_attn=self.attend, prepare_inputs=lambda _: {})
        self.block_tables = SimpleNamespace(
            block_sizes=[BLOCK] * len(config.kv_cache_groups),
            input_block_tables=[table.block_table.gpu for table in self.batch.block_table],
            slot_mappings=[table.slot_mapping.gpu for table in self.batch.block_table],
        )

    def execute_model(self, output: Any, intermediate_tensors: Any = None, dummy_run: bool = False) -> None:
        fed = None if dummy_run else self.prepare(output)
        if fed is None:
            return
        names = self.batch.req_ids
        counts = np.array([output.num_scheduled_tokens[name] for name in names], np.int32)
        batch = SimpleNamespace(
            req_ids=names,
            num_tokens=int(counts.sum()),
            num_scheduled_tokens=counts,
            num_computed_tokens_np=self.batch.num_computed_tokens_cpu[: len(names)],
            seq_lens=torch.tensor([end for _, _, end in self.ends], dtype=torch.int32),
            query_start_loc=torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32),
            input_ids=torch.cat((fed[0], torch.zeros(3, dtype=torch.int32))),
            positions=torch.cat((fed[1], torch.zeros(3, dtype=torch.int64))),
        )
        self.prepare_attn(batch)
        self.model_state.prepare_attn(output)
        inputs = self.model_state.prepare_inputs(batch)
        self._model_forward(fed[0], inputs.get("positions", fed[1]))

    def prepare_attn(self, batch: Any) -> tuple[Any, Any]:
        tables = self.batch.block_table
        return tuple(t.block_table.gpu for t in tables), torch.stack([t.slot_mapping.gpu for t in tables])

    def sample_tokens(self, grammar: Any) -> Any:
        return super().sample_tokens(grammar)

    def shutdown(self) -> None:
        super().shutdown()


def hooked(
    monkeypatch: Any, settings: RecordingSettings, *, scheduler: bool = True, v2: bool = False
) -> VllmAttachment:
    """Put an attachment's hooks around the fake engine's classes, as they are put around vLLM's.

    Without `scheduler` it is as where the scheduler runs in another process.
    """
    attachment = VllmAttachment(settings)
    module = ModuleType("vllm.forward_context")
    module.is_forward_context_available = lambda: CONTEXT.attn_metadata is not None
    module.get_forward_context = lambda: CONTEXT
    monkeypatch.setitem(sys.modules, module.__name__, module)
    runner = (RUNNER_V2, GPUModelRunnerV2) if v2 else (RUNNER_V1, GPUModelRunner)
    for name, owner in (runner, (SCHEDULER, Scheduler))[: 1 + scheduler]:
        module = ModuleType(name)
        setattr(module, owner.__name__.removesuffix("V2"), owner)
        for attribute, value in list(vars(owner).items()):
            if callable(value):
                monkeypatch.setattr(owner, attribute, value)  # put back after the test
        hook_module(module, attachment)
    return attachment


def serve(
    specs: list[KVCacheSpec] | None = None,
    *,
    num_blocks: int = 40,
    caching: bool = True,
    use_async: bool = False,
    budget: int = 12,
    v2: bool = False,
    each_step: Any = None,
    stored: int = 0,
) -> dict[str, list[int]]:
    """Run six requests, half of which share a prefix, on a new engine; return their tokens."""
    kind = GPUModelRunnerV2 if v2 else GPUModelRunner
    CONTEXT.attn_metadata = None  # no forward of an engine before this one
    runner = kind(specs or [FullAttentionSpec()], num_blocks, use_async=use_async)
    if stored:
        runner.vllm_config.kv_transfer_config = SimpleNamespace(kv_connector="HostConnector", kv_role="kv_both")
    scheduler = Scheduler(runner, caching=caching, budget=budget, stored=stored)
    shared = list(range(3, 14))
    prompts = [[*shared, 20], [31, 32, 33], [*shared, 21, 22], [*range(41, 48)], [*shared, 20, 9], [51]]
    requests = [Request(f"r{i}", prompt, 5 + 2 * i) for i, prompt in enumerate(prompts)]
    for request in requests:
        scheduler.add_request(request)
    pending: list[Any] = []
    while scheduler.waiting or scheduler.running or pending:
        output = scheduler.schedule()
        if each_step is not None:
            each_step(runner, scheduler, output)
        runner.execute_model(output)
        if output.num_scheduled_tokens:
            result = runner.sample_tokens(None)
            pending.append(result)
        if pending and (not use_async or len(pending) > 1 or not output.num_scheduled_tokens):
            result = pending.pop(0)
            scheduler.update_from_output(result.get_output() if use_async else result)
    runner.execute_model(scheduler.schedule())  # tells the runner who has finished last
    runner.shutdown()
    return {request.request_id: request.tokens for request in requests}


def serve_session(*, use_async: bool = False, v2: bool = False) -> list[int]:
    """Run a request that is given more input twice beside another; return how long its prompt was each time."""
    runner = (GPUModelRunnerV2 if v2 else GPUModelRunner)([FullAttentionSpec()], 40, use_async=use_async)
    engine, session = Scheduler(runner), Request("session", [3, 4, 5, 6, 7, 8], 36)
    engine.add_request(session)
    engine.add_request(Request("other", [9, 10, 11], 30))
    pending: list[Any] = []
    lens, step = [6], 0
    while engine.waiting or engine.running or pending:
        step += 1
        more = {8: [21, 22, 23, 24], 15: [31]}.get(step)
        ready = session.num_computed_tokens - session.in_flight
        if more:  # vLLM drops what was sampled last, and what is still under way
            session.tokens = [*session.tokens[:ready], *more]
            session.num_computed_tokens, session.in_flight = ready, 0
            pending = [(result, True) for result, _ in pending]
        output = engine.schedule()
        if more:  # told as a new one, of which the runner has the blocks
            lens.append(len(session.tokens))
            cached = output.scheduled_cached_reqs
            place = cached.req_ids.index("session")
            for of in (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
                del of[place]
            new = engine._new(session)
            new.prompt_token_ids, new.num_computed_tokens = list(session.tokens), ready
            output.scheduled_new_reqs.append(new)
        runner.execute_model(output)
        if output.num_scheduled_tokens:
            pending.append((runner.sample_tokens(None), False))
        if pending and (not use_async or len(pending) > 1 or not output.num_scheduled_tokens):
            result, stale = pending.pop(0)
            result = result.get_output() if use_async else result
            if stale:
                result.sampled_token_ids[result.req_ids.index("session")] = []
            engine.update_from_output(result)
    runner.execute_model(engine.schedule())
    runner.shutdown()
    return lens
