"""A plugin for SGLang that writes down what its online canary finds, step by step, in the scheduler's process.

One line a step and canary (an EAGLE draft has one of its own, in a second file): the step, the new rows of its ring,
and how many slots each launch tag has looked at.
"""

import functools
import json
import os
import sys


def plugin():
    path = os.environ.get("CONFORMANCE_RING")
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    stand_in_for_missing_backends()
    if path:
        note_violations(path)
    if os.environ.get("CONFORMANCE_ADAPTERS"):
        load_adapters()
    damage = os.environ.get("CONFORMANCE_DAMAGE", "")
    if damage.startswith("state"):
        damage_states(damage)
    elif damage == "adapters":
        mix_up_adapters()
    elif damage.startswith("host"):
        damage_copies(damage)
    elif damage:
        damage_forwards(damage)


def damage_forwards(what):
    """In each fifth decode of a scheduler's target model, do damage after its graph or model, or around them.

    "kv" flips the first byte of K in a slot that the forward has written, "table" lets a cell of a request's row point to
    another of its slots as long as the forward takes, "attention" overwrites one of the page indices that its attention
    backend has prepared, "attention-lens" lets it read one token less. All say so in the log as the canary's own faults do.
    """
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    decodes, damaging = [0], [False]

    def prepared(name, original, backend, *args, **kwargs):
        result = original(backend, *args, **kwargs)
        if damaging[0]:
            told = (
                backend.forward_metadata
            )  # a graph's is made when it is captured, and may be an earlier prefill's by now
            if what == "attention":
                indices = told.kv_indices if name == "init_forward_metadata" else backend.cuda_graph_kv_indices
                indices[2:3].copy_(indices[3:4])
            else:
                backend.kv_indptr[1:].sub_(1)
        return result

    for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
        HookRegistry.register(
            f"sglang.srt.layers.attention.triton_backend.TritonAttnBackend.{name}",
            functools.partial(prepared, name),
            HookType.AROUND,
        )

    def forward_raw(original, runner, batch, *args, **kwargs):
        if runner.is_draft_worker or batch.forward_mode.name != "DECODE" or not any(batch.rids or ()):
            return original(runner, batch, *args, **kwargs)
        decodes[0] += 1
        if decodes[0] % 5:
            return original(runner, batch, *args, **kwargs)
        table, row = runner.req_to_token_pool.req_to_token, int(batch.req_pool_indices[0])
        slot, position = int(batch.out_cache_loc[0]), int(batch.positions[0])
        if what == "table":
            kept = table[row, position - 3].clone()
            table[row, position - 3] = table[row, position - 2]
        damaging[0] = what.startswith("attention")
        result = original(runner, batch, *args, **kwargs)
        damaging[0] = False
        if what == "table":
            table[row, position - 3] = kept
        elif what == "kv":
            runner.token_to_kv_pool.k_buffer[0].view(torch.uint8).view(
                -1, runner.token_to_kv_pool.k_buffer[0][0].nbytes
            )[slot, 0] ^= 255
        print(f"kv_canary perturb inside a forward: {what} slot={slot} position={position}", flush=True)
        return result

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner._forward_raw", forward_raw, HookType.AROUND
    )


def load_adapters():
    """Have adapters be loaded from their files, although the model's weights are made."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora import lora

    class FromFiles(lora.DefaultModelLoader):
        def __init__(self, _):
            super().__init__(LoadConfig())

    lora.DefaultModelLoader = FromFiles


def mix_up_adapters():
    """Give the requests of each third batch one another's adapters."""
    from sglang.srt.lora.lora_manager import LoRAManager

    prepare, batches = LoRAManager.prepare_lora_batch, [0]

    def turned(self, batch):
        own = batch.lora_ids
        batches[0] += 1
        if batches[0] % 3 == 0 and len(set(own)) > 1 and all(batch.rids or [""]):
            batch.lora_ids = [*own[1:], *own[:1]]
            print("kv_canary perturb adapters slot=0", flush=True)
        prepare(self, batch)
        batch.lora_ids = own

    LoRAManager.prepare_lora_batch = turned


def damage_copies(what):
    """Do damage to one copy of HiCache's: "host-stored" and "host-another" let pages go to one another's places on the host, and
    come from there; "host-changed" changes what lies on the host before it comes back, "host-nothing" brings nothing back.
    """
    from sglang.srt.managers.cache_controller import HiCacheController

    done, at, moves = [], [""], HiCacheController.move_indices

    def say(slot):
        done.append(True)
        print(f"kv_canary perturb {what} slot={int(slot)}", flush=True)

    def moved(self, host, device):
        host, device = moves(self, host, device)
        wanted = {"host-stored": "start_writing", "host-another": "start_loading"}.get(what)
        if at[0] == wanted and not done and len(host) >= 2 * self.page_size:
            host = host.roll(self.page_size)
            say(host[0])
        return host, device

    def begins(name, original):
        def begin(self):
            at[0] = name
            if name == "start_loading" and self.load_queue and not done:
                pool, slot = self.mem_pool_host, int(self.load_queue[0].host_indices[0])
                if what == "host-changed":
                    self.write_stream.synchronize()
                    pool.k_buffer[0, slot] += 1
                    say(slot)
                elif what == "host-nothing":
                    load, pool.load_to_device_per_layer = pool.load_to_device_per_layer, lambda *_, **__: None
                    result = original(self)
                    pool.load_to_device_per_layer = load
                    say(slot)
                    return result
            return original(self)

        return begin

    HiCacheController.move_indices = moved
    for name in ("start_writing", "start_loading"):
        setattr(HiCacheController, name, begins(name, getattr(HiCacheController, name)))


def damage_states(what):
    """Do damage to the states of recurrent layers, once if nothing else is said.

    "state-another": a request that hits the prefix cache goes on from the checkpoint that was hit before; "state-shared": a
    new request gets the slot of one that runs, as if that had been freed; "state-late": all checkpoints of running requests are
    saved one forward late;
    "state-overwritten": a checkpoint is zeroed before it is restored; "state-earlier": a prefill saves states a chunk before the
    one that the prefix cache keeps them for; "state-elsewhere": requests' states are saved in one another's slots.
    """
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool
    from sglang.srt.model_executor.model_runner import ModelRunner

    done, hits, late, restoring, given = [], [], [], [], []

    def say(slot):
        done.append(True)
        print(f"kv_canary perturb {what} slot={int(slot)}", flush=True)

    restore = ModelRunner._maybe_execute_deferred_mamba_cow_and_clear

    def restores(self, batch):
        sources = batch.mamba_cow_src_indices
        if sources is not None and len(sources):
            own = sources.clone()
            if what == "state-overwritten" and not done:
                self.req_to_token_pool.mamba_pool.mamba_cache.conv[0][:, sources] = 0
                say(sources[0])
            if what == "state-another" and not done and hits and int(hits[-1][0]) != int(sources[0]):
                batch.mamba_cow_src_indices = hits[-1].expand_as(sources).contiguous()
                say(sources[0])
            hits.append(own[:1])
        restoring.append(True)
        restore(self, batch)
        restoring.pop()

    ModelRunner._maybe_execute_deferred_mamba_cow_and_clear = restores
    if what == "state-earlier":
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        prepare = ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend

        def prepares(self, req):
            entry, chunk = prepare(self, req), getattr(self.model_config.hf_config, "mamba_chunk_size", 64)
            chunks = (entry.track_seqlen - len(req.prefix_indices)) // chunk
            if not entry.track_mask or chunks < 2:
                return entry
            say(0)
            return entry._replace(track_seqlen=len(req.prefix_indices) + (chunks - 1) * chunk + 1)

        ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend = prepares
    if what == "state-elsewhere":
        run = ModelRunner.forward

        def runs(self, batch, *args, **kwargs):
            mask = batch.mamba_track_mask
            if mask is not None and int(mask.sum()) > 1:
                slots = batch.mamba_track_indices.clone()
                slots[mask] = slots[mask].roll(1)
                batch.mamba_track_indices = slots
                say(slots[0])
            return run(self, batch, *args, **kwargs)

        ModelRunner.forward = runs
    if what == "state-late":
        copy, forward = MambaPool.copy_from, ModelRunner.forward

        def copies(self, src, dst):
            if restoring:
                return copy(self, src, dst)
            say(dst[0])
            late.append((self, src.clone(), dst.clone()))
            return None

        def forwards(self, *args, **kwargs):
            result = forward(self, *args, **kwargs)
            while late:
                copy(*late.pop())
            return result

        MambaPool.copy_from, ModelRunner.forward = copies, forwards
    if what == "state-shared":
        alloc = HybridReqToTokenPool.alloc

        def allocs(self, reqs):
            rows = alloc(self, reqs)
            new = [int(row) for row in rows or () if row not in given]
            if given and new and not done:
                mapping = self.req_index_to_mamba_index_mapping
                mapping[new[0]] = mapping[given[-1]]
                say(mapping[new[0]])
            given.extend(new)
            return rows

        HybridReqToTokenPool.alloc = allocs


def stand_in_for_missing_backends():
    """EAGLE's worker names attention backends whose packages may be missing, to compare types; none is used here."""
    import importlib
    import types

    import sglang.srt.layers.attention as package

    for module, name in (
        ("dsa_backend", "DeepseekSparseAttnBackend"),
        ("deepseek_v4_backend", "DeepseekV4AttnBackend"),
        ("flashmla_backend", "FlashMLABackend"),
    ):
        full = f"{package.__name__}.{module}"
        try:
            importlib.import_module(full)
        except Exception as error:  # noqa: BLE001  # whatever it lacks
            print(f"conformance: {full} is stood in for: {type(error).__name__}: {error}", flush=True)
            stand_in = types.ModuleType(full)
            setattr(stand_in, name, type(name, (), {}))
            sys.modules[full] = stand_in
            setattr(package, module, stand_in)


def note_violations(path):
    from sglang.srt.kv_canary.runner.violation_manager import ViolationManager

    step, managers, seen = ViolationManager.step, [], {}

    def noting_step(self):
        if self not in managers:
            managers.append(self)
        number = managers.index(self)
        log = self._device_state.violation_log
        end = int(log.violation_write_index.item())
        line = {
            "step": self._outer_step_counter_getter() - 1,
            "rows": log.violation_ring[seen.get(number, 0) : end].tolist(),
            "counters": self._device_state.slot_run_counters.tolist(),
        }
        seen[number] = end
        with open(path + (str(number) if number else ""), "a") as file:  # noqa: PTH123
            file.write(json.dumps(line) + "\n")
        step(self)

    ViolationManager.step = noting_step
