"""Engines that do nothing but decode, step after step, hooked as on a GPU: what is left of a step is what its hooks do.

Their tensors lie in memory and no kernel runs. What the kernels would put into a frame of a decode is put there by the
engine where its model runs, so that the recorder's own thread has as much to do as on a GPU.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from kvcanary.kernels.capture import model_forward
from kvcanary.kernels.capture.frames import DONE
from kvcanary.recorder.engines.common import hooking
from kvcanary.recorder.engines.sglang import attachment as sglang_attachment
from kvcanary.recorder.engines.sglang import inside as sglang_inside
from kvcanary.recorder.engines.sglang import layout as sglang_layout
from kvcanary.recorder.engines.sglang import opening as sglang_opening
from kvcanary.recorder.engines.sglang import recording as sglang_recording
from kvcanary.recorder.engines.vllm import kv as vllm_kv
from kvcanary.recorder.engines.vllm import recording as vllm_recording
from kvcanary.recorder.engines.vllm.attachment import VllmAttachment
from kvcanary.recorder.engines.vllm.hooks import RUNNER_V1, RUNNER_V2, SCHEDULER, hook_module
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.tests.recorder.sglang import fake_engine as sglang
from kvcanary.tests.recorder.vllm import fake_engine as vllm
from kvcanary.tests.recorder.vllm import fake_scheduler

PROMPT = 512  # cached tokens of each request


class NoKernels:
    """Stands where kernels are launched: it counts them, and remembers where the frame of the last ticket lies."""

    def __init__(self) -> None:
        self.launched: Counter[str] = Counter()
        self.at = self.counters = self.programs = self.lens_at = 0
        self.carried: tuple[int, ...] = ()

    def launch(self, kernel: Any, programs: int, arguments: Any, constants: Any = ()) -> Callable[..., None]:
        """As `Launches.launch`."""
        name = kernel.fn.__name__ if hasattr(kernel, "fn") else kernel.__name__

        def ready(*words: Any) -> None:
            self.launched[name] += 1
            if name == "write_ticket_kernel":
                numbers, self.carried = words[2], words[4]
                self.at, self.counters, self.programs, self.lens_at = numbers[1], numbers[2], numbers[-1], numbers[10]

        ready(*model_forward._words(arguments), *constants)
        return ready

    def fill(self, capture: Any, requests: Any, tokens: Any) -> None:
        """Put into the last frame what kernels would: `[3, bs]` rows, prefix, extend, and `[3, T]` tokens, positions, slots."""
        frame, bs, lens_at = capture.frames.numpy()[self.at :], requests.shape[1], self.lens_at
        inputs = np.concatenate((requests.reshape(-1), tokens.reshape(-1)))
        frame[: inputs.size] = inputs
        frame[lens_at : lens_at + bs] = requests[1] + requests[2]
        frame[lens_at + bs : lens_at + 2 * bs] = requests[2]
        for place, count in zip(self.carried[::2], self.carried[1::2], strict=True):
            capture.frames.numpy()[place : place + count] = tokens[2, :count]
        counters = capture.counters[self.counters]
        counters.zero_()
        counters[DONE] = self.programs


@contextlib.contextmanager
def no_kernels() -> Iterator[NoKernels]:
    """Launch nothing meanwhile, and take tensors in memory for a GPU's."""
    kernels = NoKernels()
    here = torch.device("cpu")
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        for owner in (model_forward.Launches,):
            put(owner, "launch", lambda _, *told: kernels.launch(*told))
        for module in (sglang_layout, sglang_opening, sglang_recording, vllm_recording):
            put(module, "on_gpu", lambda _: True)
        put(sglang_inside, "gpu_of", lambda _: here)
        put(sglang_attachment.SglangAttachment, "end_with_process", lambda _: None)
        put(sglang_attachment, "not_applied", list)
        put(VllmAttachment, "end_with_process", lambda _: None)
        put(vllm_kv, "stored_halves", lambda *_: dict.fromkeys("KV", vllm_kv.PLAIN))
        put(RecordingSettings, "new_sampling_seed", lambda _: None)
        yield kernels


class Backend:
    """The graphs of a runner: `replay` runs the one that there is."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run

    def capture_one(self, _shape: int, forward: Callable[[], None]) -> None:
        """Capture a graph."""
        forward()

    def replay(self, _shape: int, _batch: Any) -> None:
        """Launch it."""
        self.run()


class SteadySglang:
    """An engine of SGLang's shape, whose scheduler takes over a step's result behind the launch of the next one."""

    def __init__(self, folder: Path, kernels: NoKernels, requests: int, **settings: Any) -> None:
        self.kernels, bs = kernels, requests
        self.stack = contextlib.ExitStack()
        width = PROMPT + 4096
        for name, size in (("ROWS", bs + 1), ("WIDTH", width), ("SLOTS", bs * width + 1)):
            self.stack.enter_context(mock.patch.object(sglang, name, size))
        attachment = sglang_attachment.SglangAttachment(RecordingSettings(folder=folder, **settings))
        self.attachment = attachment
        runner: Any = sglang.ModelRunner()
        runner.device, runner.attn_backend = "cpu", None
        runner.model = SimpleNamespace(forward=lambda *_: None)
        runner.server_args.disable_cuda_graph = False
        runner._forward_raw = self._forward
        attachment.on_runner(runner)
        attachment.on_load(runner)(None, None)
        names = ("req_pool_indices", "input_ids", "positions", "out_cache_loc")
        self.static = SimpleNamespace(
            forward_mode=sglang.DECODE, **{name: torch.ones(bs, dtype=torch.int64) for name in names}
        )
        backend: Any = Backend(self._model)
        self.replay = self._hook("replay", Backend.replay)
        with mock.patch.object(sglang_inside, "is_capturing", lambda _: True):
            args = self.static.input_ids, self.static.positions, self.static
            self._hook("capture", Backend.capture_one)(backend, bs, lambda: runner.model.forward(*args))
        self.backend, self.runner = backend, runner
        scheduler: Any = SimpleNamespace(
            token_to_kv_pool_allocator=sglang.TokenToKVPoolAllocator(sglang.SLOTS - 1, 1),
            tree_cache=SimpleNamespace(evict=lambda _: None),
            disagg_decode_transfer_queue=None, tp_rank=0, enable_hierarchical_cache=False,
        )  # fmt: skip
        attachment.on_scheduler(scheduler)(None, None)
        assert attachment.recording is not None
        self.scheduler, self.allocator = scheduler, scheduler.token_to_kv_pool_allocator
        self.forward_raw, self.run_batch = self._hook("model", self._forward), self._hook("run", self._run)
        self.process = self._hook("result", self._process)
        self.reqs = [sglang.Request(f"request {r}", [7] * PROMPT, 1 << 30) for r in range(bs)]
        self.runner.req_to_token_pool.alloc(self.reqs)
        self.rows = torch.arange(1, bs + 1)
        self.slots = self.allocator.alloc(bs * PROMPT)
        self.batch = SimpleNamespace(reqs=self.reqs)
        self.behind: Any = None
        self.length = PROMPT
        self.ids = torch.full((bs,), 7)

    def _hook(self, name: str, original: Any) -> Any:
        attachment = self.attachment
        around = hooking.harmless(getattr(attachment, f"on_{name}"), attachment.fault, attachment.cost)
        return lambda *args: around(original, *args)

    def _model(self) -> None:
        batch, capture = self.static, self.attachment.recording.recorder.capture
        requests = torch.stack((batch.req_pool_indices, batch.positions, torch.ones_like(batch.positions)))
        tokens = torch.stack((batch.input_ids, batch.positions, batch.out_cache_loc))
        self.kernels.fill(capture, requests.numpy(), tokens.numpy())

    def _forward(self, _runner: Any, batch: Any) -> None:
        for name in ("req_pool_indices", "input_ids", "positions", "out_cache_loc"):
            getattr(self.static, name).copy_(getattr(batch, name))
        self.replay(self.backend, len(self.reqs), batch)

    def _run(self, _scheduler: Any, _batch: Any) -> Any:
        batch = SimpleNamespace(
            rids=[req.rid for req in self.reqs], forward_mode=sglang.DECODE, spec_info=None, input_ids=self.ids,
            req_pool_indices=self.rows, positions=torch.full((len(self.reqs),), self.length), out_cache_loc=self.slots,
        )  # fmt: skip
        self.forward_raw(self.runner, batch)
        return sglang.Result(self.ids)

    def _process(self, _scheduler: Any, _batch: Any, _result: Any) -> None:
        self.allocator.free_group_begin()
        for req in self.reqs:
            req.output_ids.append(7)
        self.allocator.free_group_end()

    def step(self) -> None:
        """Decode a token of each request."""
        self.slots = self.allocator.alloc(len(self.reqs))
        result = self.run_batch(self.scheduler, self.batch)
        if self.behind is not None:
            self.process(self.scheduler, self.batch, self.behind)
        self.behind = result
        self.length += 1

    def close(self) -> None:
        """End the trace."""
        self.attachment.close()
        self.stack.close()


class SteadyVllm:
    """An engine of vLLM's shape with asynchronous scheduling: a step's result is fetched behind the launch of the next one."""

    LAYERS = 32

    def __init__(self, folder: Path, kernels: NoKernels, requests: int, *, v2: bool, **settings: Any) -> None:
        self.kernels, self.v2, bs = kernels, v2, requests
        self.stack = contextlib.ExitStack()
        block, width = 16, PROMPT + 4096
        for module in (vllm, fake_scheduler):
            for name, size in (("BLOCK", block), ("MAX_SEQS", bs), ("WIDTH", width)):
                if hasattr(module, name):
                    self.stack.enter_context(mock.patch.object(module, name, size))
        self.stack.enter_context(mock.patch.object(fake_scheduler.FullAttentionManager, "block_size", block))
        self.attachment = VllmAttachment(RecordingSettings(folder=folder, **settings))
        self._hook(v2)
        kind = _RunnerV2 if v2 else _Runner
        self.runner: Any = kind([vllm.FullAttentionSpec()], bs * width // block + 1, use_async=True)
        self.runner.steady = self
        (group,) = self.runner.groups
        group.layer_names[:] = [f"model.layers.{number}.attn" for number in range(self.LAYERS)]
        for name in group.layer_names:
            self.runner.layers[name] = SimpleNamespace(kv_cache=self.runner.kv, impl=vllm.Attention())
        self.scheduler = fake_scheduler.Scheduler(self.runner, budget=1 << 30)
        self.reqs = [fake_scheduler.Request(f"request {r}", [7] * PROMPT, 1 << 30) for r in range(bs)]
        for req in self.reqs:
            req.tokens = [7] * PROMPT
            self.scheduler.add_request(req)
        self.behind: Any = None
        self.names = [req.request_id for req in self.reqs]
        self.ids, self.length = torch.full((bs,), 7, dtype=torch.int32), PROMPT
        self.starts = torch.arange(bs + 1, dtype=torch.int32)
        self.outputs = 0
        self.step(PROMPT)

    def _hook(self, v2: bool) -> None:
        for name, owner in (
            ((RUNNER_V2, _RunnerV2) if v2 else (RUNNER_V1, _Runner)),
            (SCHEDULER, fake_scheduler.Scheduler),
        ):
            module: Any = ModuleType(name)
            setattr(module, "Scheduler" if name == SCHEDULER else "GPUModelRunner", owner)
            for attribute in dir(owner):
                if (callable(getattr(owner, attribute)) and not attribute.startswith("__")) or attribute == "__init__":
                    before = vars(owner).get(attribute)
                    if before is not None:  # put back at the end
                        self.stack.callback(setattr, owner, attribute, before)
            hook_module(module, self.attachment)
        context: Any = ModuleType("vllm.forward_context")
        context.is_forward_context_available = lambda: vllm.CONTEXT.attn_metadata is not None
        context.get_forward_context = lambda: vllm.CONTEXT
        self.stack.enter_context(mock.patch.dict(sys.modules, {context.__name__: context}))

    def step(self, count: int = 1) -> None:
        """Run `count` tokens of each request."""
        output = self.scheduler.schedule()
        cached = output.scheduled_cached_reqs
        cached.num_output_tokens = [self.outputs] * len(cached.req_ids)
        cached.new_block_ids = [blocks if any(blocks) else None for blocks in cached.new_block_ids]
        self.runner.execute_model(output)
        result = self.runner.sample_tokens(None)
        if self.behind is not None:
            self._update(self.behind)
        self.behind = result

    def _update(self, result: Any) -> None:
        result.get_output()
        self.outputs += 1
        for req in self.reqs:
            req.tokens.append(7)
            req.in_flight = max(0, req.in_flight - 1)

    def close(self) -> None:
        """End the trace."""
        self.attachment.close()
        self.stack.close()


class _Runner(vllm.GPUModelRunner):
    """A V1 runner whose batch is always the same."""

    steady: SteadyVllm

    def execute_model(self, output: Any) -> None:
        """Run a step."""
        fed = self.prepare(output)
        self.attend(output)
        self._model_forward(fed[0], positions=fed[1])
        vllm.CONTEXT.attn_metadata = None

    def prepare(self, output: Any) -> tuple[Any, Any]:
        """Bring the batch up to date."""
        own, batch = self.steady, self.input_batch
        batch.req_ids = list(output.num_scheduled_tokens)
        counts = np.array(list(output.num_scheduled_tokens.values()), np.int32)
        first = not batch.num_computed_tokens_cpu[0] and counts[0] > 1
        if not first:
            batch.num_computed_tokens_cpu[:] += 1 if batch.num_computed_tokens_cpu[0] else PROMPT
        computed = batch.num_computed_tokens_cpu[0]
        manager = own.scheduler.managers[0]
        (table,) = batch.block_table
        of_blocks = [manager.req_to_blocks[name] for name in batch.req_ids]
        for row, blocks in enumerate(of_blocks):
            where = range(len(blocks)) if first else range(len(blocks) - 1, len(blocks))
            for column in where:
                table.block_table.gpu[row, column] = blocks[column].block_id
        positions = np.concatenate([np.arange(computed, computed + count) for count in counts])
        rows = np.repeat(np.arange(len(counts)), counts)
        slots = table.block_table.gpu.numpy()[rows, positions // 16].astype(np.int64) * 16 + positions % 16
        if slots.size > len(table.slot_mapping.gpu):
            table.slot_mapping.gpu = torch.zeros(slots.size, dtype=torch.int64)
        table.slot_mapping.gpu[: slots.size] = torch.from_numpy(slots)
        lens = np.full(len(counts), computed), counts
        self.fed = (
            np.stack((np.arange(1, len(counts) + 1), *lens)),
            np.stack((np.full(slots.size, 7), positions, slots)),
        )
        self.ends = [(name, row, computed + counts[0]) for row, name in enumerate(batch.req_ids)]
        return torch.full((slots.size,), 7, dtype=torch.int32), torch.from_numpy(positions)

    def attend(self, output: Any) -> dict[str, Any]:
        """Make attention's metadata, one for all layers."""
        (table,), (requests, _) = self.input_batch.block_table, self.fed
        starts = np.cumsum([0, *requests[2]], dtype=np.int32)
        given = SimpleNamespace(
            seq_lens=torch.from_numpy((requests[1] + requests[2]).astype(np.int32)),
            query_start_loc=torch.from_numpy(starts),
            block_table=table.block_table.gpu[: requests.shape[1]],
        )
        vllm.CONTEXT.attn_metadata = dict.fromkeys(self.groups[0].layer_names, given)
        return vllm.CONTEXT.attn_metadata

    def _model_forward(self, input_ids: Any, positions: Any) -> None:
        own = self.steady
        for recorder in own.attachment.recorders():
            own.kernels.fill(recorder.capture, *self.fed)

    def sample_tokens(self, grammar: Any) -> Any:
        """Return what gives a token of each request later, as asynchronous scheduling has it."""
        names = list(self.input_batch.req_ids)
        result = SimpleNamespace(req_ids=names, sampled_token_ids=[[7] for _ in names], logprobs=None)
        return SimpleNamespace(get_output=lambda: result)

    def initialize_kv_cache(self, config: Any, is_profiling: bool = False) -> None:
        super().initialize_kv_cache(config, is_profiling)


class _RunnerV2(_Runner):
    """The same with the functions of vLLM's V2 runner."""

    def initialize_kv_cache(self, config: Any, is_profiling: bool = False) -> None:
        super().initialize_kv_cache(config, is_profiling)
        self.model_state = SimpleNamespace(prepare_attn=self.attend)
        tables = [table.block_table.gpu for table in self.input_batch.block_table]
        self.block_tables = SimpleNamespace(block_sizes=[16], input_block_tables=tables)

    def execute_model(self, output: Any, intermediate_tensors: Any = None, dummy_run: bool = False) -> None:
        """Run a step."""
        ids, positions = self.prepare(output)
        names = self.input_batch.req_ids
        counts = np.array(list(output.num_scheduled_tokens.values()), np.int32)
        computed = self.input_batch.num_computed_tokens_cpu[: len(names)]
        batch = SimpleNamespace(
            req_ids=names, num_tokens=len(ids), num_scheduled_tokens=counts, num_computed_tokens_np=computed,
            seq_lens=torch.from_numpy(computed + counts), query_start_loc=torch.from_numpy(np.cumsum([0, *counts]).astype(np.int32)),
            input_ids=ids, positions=positions,
        )  # fmt: skip
        self.prepare_attn(batch)
        self.model_state.prepare_attn(output)
        self._model_forward(ids, positions)

    def prepare_attn(self, batch: Any) -> tuple[Any, Any]:
        """Return block tables and slots."""
        tables = self.input_batch.block_table
        return tuple(t.block_table.gpu for t in tables), torch.stack([t.slot_mapping.gpu for t in tables])
