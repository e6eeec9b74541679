"""LMCache on the CPU: its connector, engine, lookups and host storage as they are, and copies by torch.

LMCache has no connector to a cache that lies in the host's memory. This one moves whole blocks, so chunks are blocks.
Needs `lmcache` (0.5.6; without its dependencies on CUDA: `pip install --no-deps lmcache aiofile aiofiles caio awscrt redis
sortedcontainers`), and nothing of it is imported before.
"""

import os

os.environ |= {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.5", "LMCACHE_CHUNK_SIZE": "32"}
os.environ |= {"LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}

import torch
from lmcache.v1 import gpu_connector
from lmcache.v1.gpu_connector import GPUConnectorInterface


class HostBlocks(GPUConnectorInterface):
    def __init__(self, shape):
        self._shape = shape  # of a chunk: (layers, 2, chunk, heads, width)

    def _pairs(self, memory, start, end, slot_mapping, kvcaches):
        """Yield each layer's part of a chunk with that of the cache, block by block."""
        size = kvcaches[0].shape[2]
        blocks = (slot_mapping[start:end:size] // size).tolist()
        parts = memory.tensor.view(-1).view(len(blocks), len(kvcaches), -1)
        for part, block in zip(parts, blocks, strict=True):
            for mine, layer in zip(part, kvcaches, strict=True):
                yield mine, layer[block]

    def to_gpu(self, memory_obj, start, end, *, slot_mapping, kvcaches, **_):
        for mine, here in self._pairs(memory_obj, start, end, slot_mapping, kvcaches):
            here.copy_(mine.view(here.shape))

    def from_gpu(self, memory_obj, start, end, *, slot_mapping, kvcaches, **_):
        for mine, here in self._pairs(memory_obj, start, end, slot_mapping, kvcaches):
            mine.copy_(here.reshape(-1))

    def batched_to_gpu(self, memory_objs, starts, ends, **kwargs):
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def get_shape(self, num_tokens):
        layers, two, _, heads, width = self._shape
        return torch.Size([two, layers, num_tokens, heads * width])


def make(config, metadata, *_args, **_kwargs):
    return HostBlocks(metadata.kv_shape)


gpu_connector.CreateGPUConnector = make


def install(fault, mark):
    """Put one fault into this process; `mark(labels)` is called when it happens."""
    if fault == "key_collides":  # tokens do not matter, only how many there are
        from lmcache.v1.token_database import ChunkedTokenDatabase

        hashed = ChunkedTokenDatabase._hash_tokens

        def faulty_hash(database, tokens, *args, **kwargs):
            mark({"fault": fault})
            return hashed(database, [1] * len(tokens), *args, **kwargs)

        ChunkedTokenDatabase._hash_tokens = faulty_hash
    elif fault == "load_missing":  # each second chunk does not come, and counts as loaded
        load, chances = HostBlocks.to_gpu, iter(range(1 << 30))

        def faulty_load(connector, *args, **kwargs):
            if next(chances) % 2:
                load(connector, *args, **kwargs)
            else:
                mark({"fault": fault})

        HostBlocks.to_gpu = faulty_load
