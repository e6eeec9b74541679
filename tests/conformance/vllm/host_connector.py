"""A KV connector of vLLM's interface that keeps prompts' blocks in the host's memory, so that loads run on the CPU.

vLLM's own offloading connectors ask for CUDA. This one loads before the forward or beside it, some steps later, all
that it has or a part, and can fail; `kv_connector_extra_config` takes `when` ("sync", "async" or "both"), `fail_every`
(every so many loads, the last block does not come) and `most_blocks` (of one load, 0 all).
"""

from dataclasses import dataclass, field

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

LATER = 2  # steps until a load that runs beside the forwards has ended


@dataclass
class Job:
    """Blocks to load or to store: (group, block, key) each."""

    name: str
    blocks: list
    beside: bool = False
    fails: bool = False
    left: int = LATER


@dataclass
class Jobs(KVConnectorMetadata):
    loads: list = field(default_factory=list)
    stores: list = field(default_factory=list)


class HostConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = self._kv_transfer_config.get_from_extra_config
        self._when, self._fail_every = extra("when", "sync"), extra("fail_every", 0)
        self._most = extra("most_blocks", 0)
        self._groups = kv_cache_config.kv_cache_groups
        self._size = int(self._groups[0].kv_cache_spec.block_size)
        self._known, self._matched, self._requests, self._jobs = set(), {}, {}, []
        self._count = 0
        if role == KVConnectorRole.WORKER:
            self._store, self._under_way, self._errors = {}, [], set()

    # In the scheduler.

    def bind_kv_cache_manager(self, kv_cache_manager):
        self._manager = kv_cache_manager

    def on_new_request(self, request):
        self._requests[request.request_id] = request

    def _key(self, request, place):
        key = tuple(request.all_token_ids[: (place + 1) * self._size])
        if request.lora_request:
            key = (request.lora_request.lora_name, *key)
        return (request.cache_salt, *key) if request.cache_salt else key

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        first = place = num_computed_tokens // self._size
        last = (request.num_tokens - 1) // self._size
        while place < last and self._key(request, place) in self._known:
            place += 1
        if self._most:
            place = min(place, first + self._most)
        if place == first:
            return 0, False
        if request.request_id not in self._matched:
            self._count += 1
        beside = self._when == "async" or (self._when == "both" and self._count % 2 == 0)
        self._matched[request.request_id] = (first, beside)
        return (place - first) * self._size, beside

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if not num_external_tokens:
            return
        first, beside = self._matched.pop(request.request_id)
        wanted = []
        for gid, held in enumerate(blocks.blocks):
            for place in range(first, first + num_external_tokens // self._size):
                if not held[place].is_null:
                    wanted.append((gid, held[place].block_id, self._key(request, place)))
        fails = bool(self._fail_every) and self._count % self._fail_every == 0
        self._jobs.append(Job(request.request_id, wanted, beside, fails))

    def build_connector_meta(self, scheduler_output):
        meta = Jobs(loads=self._jobs)
        self._jobs = []
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[name]
            groups = self._manager.get_blocks(name).blocks
            for place in range((request.num_computed_tokens + count) // self._size):
                key = self._key(request, place)
                if key in self._known or any(place >= len(g) or g[place].is_null for g in groups):
                    continue
                self._known.add(key)
                meta.stores.append(Job(name, [(gid, g[place].block_id, key) for gid, g in enumerate(groups)]))
        return meta

    def reset_cache(self):
        self._known.clear()
        return True

    def request_finished(self, request, block_ids):
        self._requests.pop(request.request_id, None)
        self._matched.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request, block_ids):
        return self.request_finished(request, block_ids)

    # In the worker.

    def register_kv_caches(self, kv_caches):
        self._caches = kv_caches

    def _blocks_of(self, gid, block):
        return [(name, self._caches[name][block]) for name in self._groups[gid].layer_names if name in self._caches]

    def _load(self, job):
        for gid, block, key in job.blocks[: -1 if job.fails else None]:
            for name, rows in self._blocks_of(gid, block):
                rows.copy_(self._store[name, key])
        if job.fails:
            self._errors.add(job.blocks[-1][1])

    def start_load_kv(self, forward_context, **kwargs):
        for job in self._get_connector_metadata().loads:
            if job.beside:
                self._under_way.append(job)
            else:
                self._load(job)

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        for job in self._get_connector_metadata().stores:
            for gid, block, key in job.blocks:
                for name, rows in self._blocks_of(gid, block):
                    self._store[name, key] = rows.clone()

    def get_finished(self, finished_req_ids):
        done = set()
        for job in list(self._under_way):
            job.left -= 1
            if job.left <= 0:
                self._load(job)
                self._under_way.remove(job)
                done.add(job.name)
        return None, done or None

    def get_block_ids_with_load_errors(self):
        errors, self._errors = self._errors, set()
        return errors

    def kvcanary_terms(self):
        return Terms(self)


class Terms:
    """What the recorder is told of this connector, in the worker."""

    def __init__(self, connector):
        self._connector = connector

    def stores(self, metadata):
        return ((job.name, *block) for job in metadata.stores for block in job.blocks)

    def loads(self, metadata):
        return ((job.name, *block) for job in metadata.loads for block in job.blocks)

    def beside(self, name):
        return any(job.name == name for job in self._connector._under_way)

    def failed(self):
        return self._connector._errors

    def there(self, group, key):
        store = self._connector._store
        if any((name, key) not in store for name in group.layers):
            return None
        return [store[name, key].transpose(0, 1).view(torch.int32).numpy() for name in group.layers]


class SilentConnector(HostConnector):
    """The same connector, of which the recorder knows nothing."""

    kvcanary_terms = None


class IdleConnector(SilentConnector):
    """A connector that never has anything, and so costs nothing by itself."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def build_connector_meta(self, scheduler_output):
        return Jobs()
