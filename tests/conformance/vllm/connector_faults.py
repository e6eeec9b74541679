"""Faults of a KV connector, put into vLLM's own: each hop of a block's way out of the cache and back goes wrong once.

Every other chance is taken, so that healthy copies stand beside the wrong ones; each fault leaves a mark in the trace.
"""

# Fault -> the incidents that it is to be found as; two keys that are one are also two stores in one place.
EXPECTED = {
    "store_wrong": {"stored_wrong"},
    "store_twice": {"host_copy_overwritten"},
    "key_collides": {"load_of_other_prefix", "host_copy_overwritten"},
    "load_elsewhere": {"load_landed_elsewhere"},
    "load_other_block": {"load_landed_elsewhere"},
    "load_layout": {"layout_misread"},
    "load_late": {"read_before_landed"},
    "load_missing": {"failed_load_counted_loaded"},
}
# The same of a connector that the recorder does not know: what it stores and what it was asked to load are not seen.
EXPECTED_UNKNOWN = {
    "store_twice": {"load_of_other_prefix"},
    "key_collides": {"load_of_other_prefix"},
    "load_elsewhere": {"failed_load_counted_loaded"},
    "load_other_block": {"failed_load_counted_loaded"},
    "load_layout": {"layout_misread"},
    "load_late": {"read_before_landed"},
    "load_missing": {"failed_load_counted_loaded"},
}
# The same on a GPU: nobody searches there for where a load has landed, or looks again for what lands late, and what one of two
# stores leaves may be seen while the other is at it.
EXPECTED_ON_GPU = EXPECTED | {
    "store_twice": {"host_copy_overwritten", "stored_wrong"},
    "load_elsewhere": {"failed_load_counted_loaded"},
    "load_other_block": {"load_landed_elsewhere", "load_of_other_prefix"},
    "load_late": {"failed_load_counted_loaded"},
}


def install(fault, mark) -> None:
    """Put one fault into this process; `mark(labels)` is called when it happens."""
    if not install_scheduled(fault, mark):
        _copies(fault, mark)


def install_scheduled(fault, mark) -> bool:
    """Put one into the connector's scheduler, if it is one of those."""
    faults = {"key_collides": _key_collides, "store_twice": _store_twice, "load_other_block": _other_block}
    if fault in faults:
        faults[fault](fault, mark)
    return fault in faults


def _copies(fault, mark) -> None:
    """The copies themselves: of the offloading connector's jobs, and of the example connector's files."""
    from host_offloading import HostHandler
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector

    copy, chances, late = HostHandler.copy, iter(range(1 << 30)), []

    def faulty_copy(handler, pairs):
        if handler.gpu_to_cpu != (fault == "store_wrong") or not pairs or next(chances) % 2:
            copy(handler, pairs)
            return
        mark({"fault": fault, "blocks": [pair[1] for pair in pairs]})
        dst = handler.dst_tensors
        if fault == "load_late":
            late.append([2, handler, pairs])
        elif fault == "load_elsewhere":
            wrong = {pair[1] for pair in pairs}
            free = [b for b in range(dst[0].shape[0] - 1, 0, -1) if b not in wrong]
            copy(handler, [(group, free[n], *there) for n, (group, _, *there) in enumerate(pairs)])
        else:
            copy(handler, pairs)
            group, block, chunk, _ = pairs[0]
            for ref in handler.layer_refs_per_group[group]:
                row = dst[ref.tensor_idx][chunk if handler.gpu_to_cpu else block]
                if fault == "store_wrong":
                    row[row.shape[0] // 2 :: 64] ^= 0x55
                else:
                    row.copy_(row.view(2, -1).flip(0).reshape(-1).clone())

    def faulty_finished(handler):
        for one in list(late):
            one[0] -= handler is one[1]
            if not one[0]:
                copy(*one[1:])
                late.remove(one)
        return finished(handler)

    finished = HostHandler.get_finished
    HostHandler.copy, HostHandler.get_finished = faulty_copy, faulty_finished
    save, load = example_connector.safetensors.torch.save_file, example_connector.safetensors.torch.load_file

    def faulty_save(tensors, filename):
        if fault == "store_wrong" and not next(chances) % 3:
            mark({"fault": fault})
            tensors = {name: kv.clone() for name, kv in tensors.items()}
            for kv in tensors.values():
                kv.view(-1)[::64] += 1
        save(tensors, filename)

    def faulty_load(filename):
        tensors = load(filename)
        if fault == "load_layout" and not next(chances) % 3:
            mark({"fault": fault})
            tensors = {name: kv.flip(1) for name, kv in tensors.items()}
        return tensors

    example_connector.safetensors.torch.save_file = faulty_save
    example_connector.safetensors.torch.load_file = faulty_load


def _key_collides(fault, mark) -> None:
    """Keys that no longer tell prompts apart: a block's place is all that is left of its hash, or a prompt's length."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    make, places = scheduler.make_offload_key, {}

    def faulty_make(block_hash, group):
        place = places.setdefault(bytes(block_hash), len(places) % 3)
        if len(places) == 1:
            mark({"fault": fault})
        return make(bytes([place]) * len(block_hash), group)

    scheduler.make_offload_key = faulty_make
    connector = example_connector.ExampleConnector
    folder = connector._generate_foldername_debug

    def faulty_folder(self, token_ids, mm_hashes, create_folder=False):
        mark({"fault": fault}) if create_folder else None
        return folder(self, token_ids * 0, mm_hashes, create_folder)

    connector._generate_foldername_debug = faulty_folder


def _store_twice(fault, mark) -> None:
    """The manager of the storage gives a chunk away once more that it has just given away."""
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    allocate, given = CPUOffloadingManager._allocate_chunks, []

    def faulty_allocate(manager, keys):
        chunks = allocate(manager, keys)
        for chunk in chunks:
            given.append(chunk)
            if len(given) % 2 == 0:
                mark({"fault": fault})
                chunk.chunk_id = given[-2].chunk_id
        return chunks

    CPUOffloadingManager._allocate_chunks = faulty_allocate


def _other_block(fault, mark) -> None:
    """The connector's scheduler asks for a load into other blocks than the request was given."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ReqMeta
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker

    make, start = ReqMeta.make_meta, OffloadingConnectorWorker.start_kv_transfers

    def faulty_make(token_ids, block_ids, block_size, is_store, mm_hashes):
        if not is_store:
            mark({"fault": fault})
            block_ids = [60 - block % 20 for block in block_ids]
        return make(token_ids, block_ids, block_size, is_store, mm_hashes)

    def faulty_start(worker, metadata):
        for entry in metadata.load_jobs.values():
            mark({"fault": fault})
            entry.dst_spec.block_ids[:] = 60 - entry.dst_spec.block_ids % 20
        start(worker, metadata)

    ReqMeta.make_meta = staticmethod(faulty_make)
    OffloadingConnectorWorker.start_kv_transfers = faulty_start
