"""Faults put into a running vLLM, right before the model reads its inputs; each leaves a mark in the trace.

A fault of the block table or the slot mapping lasts for the one step, since vLLM's CPU runner reads the very tensor
that it will go on from; the byte of K or V stays as it is.
"""

import os
import random
from types import SimpleNamespace

import connector_faults
from draft_faults import DraftFaults, install_draft_faults
from layer_faults import VALUE_FAULTS, LayerFaults, install_value_faults

EVERY = 9  # steps between two faults


def install_faults() -> None:
    """Have the fault that the environment asks for injected in this process, if it asks for one."""
    fault = os.environ.get("CONFORMANCE_FAULT")
    if not fault:
        return
    if fault in connector_faults.EXPECTED:
        connector_faults.install(fault, mark_all)
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    injector = Injector(fault, int(os.environ["CONFORMANCE_SEED"]))
    preprocess, execute = GPUModelRunner._preprocess, GPUModelRunner.execute_model

    def faulty_preprocess(runner, output, *args, **kwargs):
        fed = preprocess(runner, output, *args, **kwargs)
        injector.before(runner, output, fed)
        return fed

    def restoring_execute(runner, *args, **kwargs):
        try:
            return execute(runner, *args, **kwargs)
        finally:
            injector.after()

    if fault.startswith("attention"):
        install_attention_faults(injector, GPUModelRunner)
        return
    if fault.startswith("draft"):
        install_draft_faults(injector, GPUModelRunner)
        return
    if fault in VALUE_FAULTS:
        install_value_faults(injector)
    if fault in ("state_block", "state_begin", "state_copy"):
        install_state_faults(injector, GPUModelRunner)
        return
    GPUModelRunner._preprocess = faulty_preprocess
    GPUModelRunner.execute_model = restoring_execute


def install_attention_faults(injector, runner_class) -> None:
    """Have faults put into attention's own metadata: as they are made, or once a layer has used them."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder

    build_all, build = runner_class._build_attention_metadata, CPUAttentionMetadataBuilder.build
    forward = CPUAttentionBackendImpl.forward

    def faulty_build_all(runner, *args, **kwargs):
        if kwargs.get("num_scheduled_tokens"):
            injector.before(runner, SimpleNamespace(num_scheduled_tokens=kwargs["num_scheduled_tokens"]), None)
        try:
            return build_all(runner, *args, **kwargs)
        finally:
            injector.building = None

    def faulty_build(builder, common_prefix_len, common, *args, **kwargs):
        if injector.building is None:
            return build(builder, common_prefix_len, common, *args, **kwargs)
        return injector.building(lambda given: build(builder, common_prefix_len, given, *args, **kwargs), common)

    def faulty_forward(impl, layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs):
        done = forward(impl, layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)
        for metadata, place, wrong in injector.in_flight:
            if metadata is attn_metadata:
                metadata.block_table[place] = wrong
        return done

    runner_class._build_attention_metadata = faulty_build_all
    CPUAttentionMetadataBuilder.build = faulty_build
    CPUAttentionBackendImpl.forward = faulty_forward


def install_state_faults(injector, runner_class) -> None:
    """Have the blocks changed that recurrent layers read, or that their states are copied from, in a step."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
    from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder
    from vllm.v1.worker import mamba_utils

    execute = runner_class.execute_model
    collect = mamba_utils.collect_mamba_copy_meta

    def faulty_execute(runner, output, *args, **kwargs):
        injector.stepping, injector.building = (runner, output), None
        return execute(runner, output, *args, **kwargs)

    def building(build):
        def faulty_build(builder, *args, **kwargs):
            metadata = build(builder, *args, **kwargs)
            runner, output = injector.stepping
            if output.num_scheduled_tokens and injector.fault != "state_copy":
                injector.before(runner, output, metadata)
            return metadata

        return faulty_build

    def faulty_collect(bufs, config, funcs, gids, source, block, bias, request, context):
        runner, _ = injector.stepping
        blocks = request.block_ids[gids[0]]
        if injector.fault == "state_copy" and blocks[source] != blocks[0] and injector.due():
            mark(runner, {"fault": injector.fault, "request": request.req_id, "block": blocks[0]})
            source = 0  # the prompt's first checkpoint
        collect(bufs, config, funcs, gids, source, block, bias, request, context)

    runner_class.execute_model = faulty_execute
    for builder in (ShortConvAttentionMetadataBuilder, GDNAttentionMetadataBuilder):
        builder.build = building(builder.build)
    mamba_utils.collect_mamba_copy_meta = faulty_collect


class Injector(LayerFaults, DraftFaults):
    """Injects one kind of fault every few steps, at a random place of a random request."""

    def __init__(self, fault: str, seed: int) -> None:
        self._inject = getattr(self, fault, None)
        self.fault = fault
        self.stepping = None
        self._rng = random.Random(seed)
        self._steps = 0
        self._next = self._rng.randrange(4, 9)
        self._restore = []
        self.building = None
        self.in_flight = []

    def before(self, runner, output, fed) -> None:
        """Inject a fault where it is time and the step has a place for it."""
        self._steps += 1
        if self._steps < self._next:
            return
        batch = runner.input_batch
        requests, at = [], 0
        for row, name in enumerate(batch.req_ids):
            extend = output.num_scheduled_tokens[name]
            requests.append((row, name, int(batch.num_computed_tokens_cpu[row]), at, extend))
            at += extend
        self._rng.shuffle(requests)
        for request in requests:
            done = self._inject(runner, fed, *request)
            if done is not None:
                self._next = self._steps + EVERY + self._rng.randrange(3)
                mark(runner, {"fault": self.fault, "request": request[1], "prefix": request[2], **done})
                return

    def due(self) -> bool:
        """Say whether it is time for a fault of something that happens rarely: every other time."""
        self._steps += 1
        return self._steps % 2 == 0

    def after(self) -> None:
        """Put back what must not last."""
        while self._restore:
            tensor, place, value = self._restore.pop()
            tensor[place] = value

    def _change(self, tensor, place, value) -> None:
        self._restore.append((tensor, place, tensor[place].clone()))
        tensor[place] = value

    def _window(self, runner, group: int, prefix: int) -> int:
        """Return the first cached position that a group's layers read."""
        spec = runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec
        window = getattr(spec, "sliding_window", None)
        return max(0, prefix - window + 1) if window else 0

    def _group(self, runner) -> int:
        return self._rng.randrange(len(runner.kv_cache_config.kv_cache_groups))

    def _live_slot(self, runner, group: int, row: int, prefix: int) -> tuple[int, int] | None:
        """Return a cached position that is read, and its slot."""
        first = self._window(runner, group, prefix)
        if runner.vllm_config.kv_transfer_config is not None:  # of what was loaded nothing is known
            first = max(first, int(runner.input_batch.num_prompt_tokens[row]))
        if first >= prefix:
            return None
        table = runner.input_batch.block_table[group]
        position = self._rng.randrange(first, prefix)
        block = int(table.block_table.gpu[row, position // table.block_size])
        return position, block * table.block_size + position % table.block_size

    def block_table(self, runner, fed, row, name, prefix, at, extend):
        """Let an entry of the cached prefix point to another block: another request's, or another of its own."""
        group = self._group(runner)
        table = runner.input_batch.block_table[group]
        first = -(-self._window(runner, group, prefix) // table.block_size)
        last = (
            prefix // table.block_size
        )  # whole blocks of the prefix, whose entries nothing of this step is written by
        if first >= last:
            return None
        column = self._rng.randrange(first, last)
        entries = table.block_table.gpu
        held = int(entries[row, column])
        # At another place of another row or of its own: what lies there cannot be the same token by chance.
        rows = range(runner.input_batch.num_reqs)
        used = {int(entries[r, c]) for r in rows for c in range(table.num_blocks_per_row[r]) if c != column}
        used -= {int(entries[r, column]) for r in rows}
        others = sorted(used - {held, 0})
        if not others:
            return None
        wrong = self._rng.choice(others)
        self._change(entries, (row, column), wrong)
        size = table.block_size
        return {"group": group, "position": column * size, "slot": wrong * size, "count": size}

    def slot_mapping(self, runner, fed, row, name, prefix, at, extend):
        """Let a token's K and V go to a slot that another request reads, and this one has not got."""
        group = self._group(runner)
        batch = runner.input_batch
        table = batch.block_table[group]
        token = at + self._rng.randrange(extend)
        slots = table.slot_mapping.gpu
        right = int(slots[token])
        own = {int(block) for block in table.block_table.gpu[row, : table.num_blocks_per_row[row]]}
        others = [other for other in range(batch.num_reqs) if other != row]
        self._rng.shuffle(others)
        for other in others:
            found = self._live_slot(runner, group, other, int(batch.num_computed_tokens_cpu[other]))
            if found is not None and found[1] // table.block_size not in own | {0}:
                self._change(slots, token, found[1])
                position = prefix + token - at
                return {"group": group, "position": position, "slot": found[1], "right": right, "count": 1}
        return None

    def token(self, runner, fed, row, name, prefix, at, extend):
        """Feed the model another token than the scheduler's."""
        token = at + self._rng.randrange(extend)
        ids = fed[0]
        right = int(ids[token])
        ids[token] = (right + 1 + self._rng.randrange(600)) % 640
        return {"position": prefix + token - at, "token": int(ids[token]), "right": right}

    def position(self, runner, fed, row, name, prefix, at, extend):
        """Feed the model a position that is one off; of several dimensions in the last."""
        token = at + self._rng.randrange(extend)
        positions = fed[2]
        (positions if positions.ndim == 1 else positions[-1])[token] += 1
        return {"position": prefix + token - at}

    def kv_byte(self, runner, fed, row, name, prefix, at, extend):
        """Flip a byte of V, which the CPU's attention stores as it gets it, of a slot that is read in this step."""
        import torch

        group = self._group(runner)
        found = self._live_slot(runner, group, row, prefix)
        if found is None:
            return None
        position, slot = found
        size = runner.input_batch.block_table[group].block_size
        layer = runner.kv_cache_config.kv_cache_groups[group].layer_names[0]
        kv = runner.compilation_config.static_forward_context[layer].kv_cache
        blocks, heads, tokens, width = kv.shape
        value = kv.view(blocks, heads, 2 * tokens, width // 2)[slot // size, 0, tokens + slot % size]
        value.view(torch.uint8)[self._rng.randrange(16)] ^= 0xFF
        return {"group": group, "position": position, "slot": slot, "count": 1}

    def state_byte(self, runner, fed, row, name, prefix, at, extend):
        """Flip a byte, of the last ones of a part, of the recurrent state that a request goes on from in this step."""
        import torch

        if not prefix:
            return None
        gid = next(
            n
            for n, group in enumerate(runner.kv_cache_config.kv_cache_groups)
            if hasattr(group.kv_cache_spec, "mamba_cache_mode")
        )
        spec = runner.kv_cache_config.kv_cache_groups[gid].kv_cache_spec
        column = (prefix + extend - 1) // spec.block_size if spec.mamba_cache_mode == "align" else 0
        block = int(runner.input_batch.block_table[gid].block_table.gpu[row, column])
        layer = runner.kv_cache_config.kv_cache_groups[gid].layer_names[0]
        state = runner.compilation_config.static_forward_context[layer].kv_cache[-1]
        state[block].view(-1).view(torch.uint8)[-1 - self._rng.randrange(16)] ^= 0x55
        return {"slot": block}

    def state_block(self, runner, fed, row, name, prefix, at, extend):
        """Let a request's recurrent layers go on from another's state, and write theirs there."""
        names = ("state_indices_tensor_d", "state_indices_tensor_p", "non_spec_state_indices_tensor")
        parts = [part for name in names if (part := getattr(fed, name, None)) is not None]
        places = [(part, n) for part in parts for n in range(part.shape[0])]
        others = [other for other in range(runner.input_batch.num_reqs) if other != row]
        if not prefix or not others or len(places) != runner.input_batch.num_reqs:
            return None
        (mine, n), (theirs, m) = places[row], places[self._rng.choice(others)]
        mine[n] = theirs[m].clone()
        return {"slot": int(mine[n].reshape(-1)[0])}

    def state_begin(self, runner, fed, row, name, prefix, at, extend):
        """Let a prompt that begins go on from what lies in its block, or one that goes on begin with nothing."""
        flags = getattr(fed, "has_initial_states_p", getattr(fed, "prefill_has_initial_state", None))
        slots = [getattr(fed, name, None) for name in ("state_indices_tensor_p", "non_spec_state_indices_tensor")]
        if flags is None or row < fed.num_decodes:
            return None
        flags[row - fed.num_decodes].logical_not_()
        (mine,) = [part for part in slots if part is not None]
        at = row - (fed.num_decodes if slots[0] is not None else 0)
        return {"slot": int(mine[at].reshape(-1)[0])}

    def attention_prefix(self, runner, fed, row, name, prefix, at, extend):
        """Let attention lose the cached prefix of a request: it is told of the step's own tokens only."""
        if not prefix:
            return None

        def building(build, common):
            seq_lens = common.seq_lens.clone()
            seq_lens[row] = extend
            return build(common.replace(seq_lens=seq_lens))

        self.building = building
        return {"position": extend}

    def attention_table(self, runner, fed, row, name, prefix, at, extend):
        """Overwrite the block table in attention's own copy once its first layer is through."""
        group = self._group(runner)
        table = runner.input_batch.block_table[group]
        first = -(-self._window(runner, group, prefix) // table.block_size)
        last = prefix // table.block_size
        if first >= last or len(runner.kv_cache_config.kv_cache_groups[group].layer_names) < 2:
            return None
        column = self._rng.randrange(first, last)
        held = int(table.block_table.gpu[row, column])
        wrong = 1 + held % (runner.kv_cache_config.num_blocks - 1)
        self.in_flight = []

        def building(build, common):
            metadata = build(common)
            if common.block_table_tensor.data_ptr() == table.block_table.gpu.data_ptr():
                metadata.block_table = metadata.block_table.clone()
                self.in_flight.append((metadata, (row, column), wrong))
            return metadata

        self.building = building
        size = table.block_size
        return {"group": group, "position": column * size, "slot": wrong * size, "count": size}


def mark_all(labels) -> bool:
    """Leave a fault's ground truth in the traces of all runners of this process; return whether there are any."""
    from kvcanary.recorder.engines.vllm import hooks as vllm_hooks

    found = False
    for attachment in vllm_hooks.attachments:
        for recorder in attachment.recorders():
            recorder.mark("injected fault", {**labels, "forward": recorder.next_forward})
            found = True
    return found


def mark(runner, labels) -> None:
    """Leave the fault's ground truth in the runner's trace."""
    from kvcanary.recorder.engines.vllm import hooks as vllm_hooks

    for attachment in vllm_hooks.attachments:
        session = attachment.recordings.get(getattr(runner, "real", runner))
        if session is not None:
            session.recorder.mark("injected fault", {**labels, "forward": session.recorder.next_forward})
