"""vLLM's `OffloadingConnector` on the CPU: its scheduler, its manager and its jobs as they are, and copies by torch.

The connector's own copies ask for CUDA streams. Here a job's bytes are moved when the connector asks what has ended, some
steps after it was submitted.
"""

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import TransferResult
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker, SingleDirectionOffloadingHandler
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

LATER = 2  # times that it is asked until a job has ended


class HostHandler(SingleDirectionOffloadingHandler):
    def __init__(self, src, dst, refs, each, *, to_host):
        self.src_tensors, self.dst_tensors = src, dst
        self.layer_refs_per_group = refs
        self.gpu_to_cpu = to_host
        self.dst_blocks_per_chunk = each if to_host else 1
        self._each = each
        self._jobs = {}

    def transfer_async(self, job_id, src_spec, dst_spec):
        self._jobs[job_id] = [LATER, self.pairs(src_spec, dst_spec)]
        return True

    def pairs(self, src_spec, dst_spec):
        """Return (group, block, chunk, place in it) of each block of a job."""
        here, there = (src_spec, dst_spec) if self.gpu_to_cpu else (dst_spec, src_spec)
        pairs, blocks, chunks = [], here.block_ids.tolist(), there.block_ids.tolist()
        for group, (size, first) in enumerate(zip(here.group_sizes, here.block_indices, strict=True)):
            if size:
                skip = first % self._each
                pairs += [
                    (group, blocks[n], chunks[(skip + n) // self._each], (skip + n) % self._each) for n in range(size)
                ]
                blocks, chunks = blocks[size:], chunks[-(-(skip + size) // self._each) :]
        return pairs

    def copy(self, pairs):
        for group, block, chunk, place in pairs:
            for ref in self.layer_refs_per_group[group]:
                src, dst = self.src_tensors[ref.tensor_idx], self.dst_tensors[ref.tensor_idx]
                width = (src if self.gpu_to_cpu else dst).shape[1]
                if self.gpu_to_cpu:
                    dst[chunk, place * width : (place + 1) * width] = src[block]
                else:
                    dst[block] = src[chunk, place * width : (place + 1) * width]

    def get_finished(self):
        done = []
        for job_id, job in list(self._jobs.items()):
            job[0] -= 1
            if job[0] <= 0:
                self.copy(job[1])
                del self._jobs[job_id]
                done.append(TransferResult(job_id=job_id, success=True))
        return done

    def wait(self, job_ids):
        for job_id in job_ids & self._jobs.keys():
            self.copy(self._jobs[job_id][1])
            self._jobs[job_id] = [0, []]

    def shutdown(self):
        self._jobs.clear()


class HostWorker(CPUOffloadingWorker):
    def __init__(self, kv_caches, each, num_chunks):
        import torch

        self._mmap_region = None
        here = [one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in kv_caches.tensors]
        there = [torch.zeros((num_chunks, t.shape[1] * each), dtype=torch.int8) for t in here]
        refs = kv_caches.group_data_refs
        self._store_handler = HostHandler(here, there, refs, each, to_host=True)
        self._load_handler = HostHandler(there, here, refs, each, to_host=False)
        self._expedited_load_handler = HostHandler(there, here, refs, each, to_host=False)  # since 0.33


class HostOffloadingSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches):
        if self._worker is None:
            self._worker = HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._worker


class OwnOffloading(OffloadingConnector):
    """The same connector under a name that the recorder does not know."""
