"""How the KV connectors that are known say what they store and load, and where it lies: by their metadata or their jobs."""

import sys
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...common.hooking import Finish
from ..device import on_gpu, why_it_waits
from ..layout import VllmGroup, VllmLayout
from .copies import ConnectorCopies, LoadJob
from .ends import Bytes, Page, Storage, as_bytes
from .landed import LandedBlocks


class StepStorage:
    """A connector that is told by each step's metadata what to store and load, as the base class of vLLM's has it.

    `terms` knows the metadata: `stores(metadata)` and `loads(metadata)` yield `(request, group id, block, key)`, and
    `there(group, key)` returns what lies under a key, a layer's `[tokens, heads, width]` each, or None.
    """

    def __init__(self, connector: Any, terms: Any, layers: Any, layout: VllmLayout) -> None:
        self.num_pages = 0
        self._connector = connector
        self._terms = terms
        self._groups = {group.gid: group for group in layout.groups}
        self._layers = layers
        self._under_way: dict[str, LoadJob] = {}

    def attach(self, copies: ConnectorCopies) -> None:
        """Hook where the connector loads, has saved, and says what has ended."""

        def on_load(*_args: Any, **_kwargs: Any) -> Finish:
            copies.has_begun = True
            begun = [copies.begin_load(name, pages) for name, pages in self._named("loads").items()]

            def finish(_: Any, __: BaseException | None) -> None:
                for load in begun:
                    if self._beside(load.name):
                        self._under_way[load.name] = load
                    else:
                        self._end_load(copies, load)

            return finish

        def on_saved(*_args: Any, **_kwargs: Any) -> Finish:
            pages = [page for found in self._named("stores").values() for page in found]

            def finish(_: Any, __: BaseException | None) -> None:
                if pages:
                    copies.store(pages, landed=True)

            return finish

        def on_finished(*_args: Any, **_kwargs: Any) -> Finish:
            def finish(result: Any, _: BaseException | None) -> None:
                for name in (result[1] if isinstance(result, tuple) else None) or ():
                    load = self._under_way.pop(name, None)
                    if load is not None:
                        self._end_load(copies, load)

            return finish

        for name, hook in (("start_load_kv", on_load), ("wait_for_save", on_saved), ("get_finished", on_finished)):
            copies.wrap(self._connector, name, hook)

    def _end_load(self, copies: ConnectorCopies, load: LoadJob) -> None:
        """Report a load that has ended, but for the blocks of which the connector says that it failed."""
        failed = set(getattr(self._terms, "failed", tuple)())
        kept = [i for i, page in enumerate(load.pages) if page.block not in failed]
        if kept:
            copies.end_load(load.of(kept))

    def _named(self, what: str) -> dict[str, list[Page]]:
        metadata, found = getattr(self._connector, "_connector_metadata", None), dict[str, list[Page]]()
        for name, gid, block, key in () if metadata is None else getattr(self._terms, what)(metadata):
            if gid in self._groups and block:
                found.setdefault(name, []).append(Page(self._groups[gid], int(block), key))
        return found

    def _beside(self, name: str) -> bool:
        beside = getattr(self._terms, "beside", None)
        return bool(beside is not None and beside(name))

    def layers_here(self, group: VllmGroup) -> Sequence[Any]:
        """Return the group's layers `[num_blocks, tokens, heads, width]`."""
        found = []
        for name in group.layers:
            kv: Any = getattr(self._layers.get(name), "kv_cache", None)
            kv = kv[0] if isinstance(kv, list | tuple) and len(kv) == 1 else kv
            bits = as_bytes(kv) if kv is not None and len(kv.shape) == 4 else None
            if bits is None or bits.shape[0] != group.num_blocks or bits.shape[2] != group.block_size:
                return ()
            found.append(bits.transpose(0, 2, 1, 3))
        return found

    def there(self, page: Page) -> Sequence[Bytes] | None:
        """Return what lies under a page's key."""
        found = self._terms.there(page.group, page.key)
        if found is None:
            return None
        return [np.ascontiguousarray(rows).view(np.uint8).reshape(-1) for rows in found]


class ExampleFiles:
    """The terms of vLLM's `ExampleConnector`: a folder for each prompt, with a file for each layer."""

    def __init__(self, connector: Any) -> None:
        self._connector = connector

    def stores(self, metadata: Any) -> Iterable[tuple[str, int, int, Hashable]]:
        """Yield the blocks of prompts that are saved."""
        return self._blocks(metadata, is_store=True)

    def loads(self, metadata: Any) -> Iterable[tuple[str, int, int, Hashable]]:
        """Yield the blocks of prompts that are loaded."""
        return self._blocks(metadata, is_store=False)

    def _blocks(self, metadata: Any, *, is_store: bool) -> Iterable[tuple[str, int, int, Hashable]]:
        size = int(self._connector._block_size)  # it says so nowhere else
        for request in metadata.requests:
            if bool(request.is_store) == is_store:
                folder = self._connector._generate_foldername_debug(request.token_ids, request.mm_hashes)
                for place, slot in enumerate(request.slot_mapping[::size].tolist()):
                    yield "", 0, slot // size, (folder, place, size)

    def there(self, group: VllmGroup, key: tuple[str, int, int]) -> Sequence[Any] | None:
        """Return what the files hold of a block."""
        from safetensors import SafetensorError, safe_open

        folder, place, size = key
        found = []
        try:
            for name in group.layers:
                with safe_open(f"{folder}/{name}.safetensors", "pt") as file:
                    rows = file.get_slice("kv_cache")[place * size : (place + 1) * size]
                    found.append(as_bytes(rows.contiguous()))
        except (OSError, SafetensorError):
            return None
        return found


class OffloadedBlocks:
    """vLLM's `OffloadingConnector` with blocks in the host's memory: jobs that go on beside the forwards."""

    def __init__(self, worker: Any, layout: VllmLayout) -> None:
        self._worker = worker.worker
        self._loads = worker._load_jobs  # job -> request
        handler = self._worker._store_handler  # its tensors are named nowhere else
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids

        gids = get_offloading_group_ids(worker.kv_cache_config)
        by_gid = {group.gid: group for group in layout.groups}
        self._groups = [by_gid.get(gid) for gid in gids]
        self._refs = dict(zip(gids, handler.layer_refs_per_group, strict=True))
        self._here = [as_bytes(tensor) for tensor in handler.src_tensors]
        self._there = [as_bytes(tensor) for tensor in handler.dst_tensors]
        self.each = int(handler.dst_blocks_per_chunk)  # blocks of a chunk
        self._handler = handler
        self.num_pages = int(handler.dst_tensors[0].shape[0]) * self.each
        self._jobs: dict[int, list[Page] | LoadJob] = {}

    def attach(self, copies: ConnectorCopies) -> None:
        """Hook where jobs are submitted, and where they are said to have ended."""

        def on_store(job: int, here: Any, there: Any, *_args: Any, **_kwargs: Any) -> None:
            pages = self._paired(here, there)
            copies.store(pages, landed=False)
            self._jobs[job] = pages

        def on_load(job: int, there: Any, here: Any, *_args: Any, **_kwargs: Any) -> None:
            self._jobs[job] = copies.begin_load(str(self._loads.get(job, "")), self._paired(here, there))

        def on_finished(*_args: Any, **_kwargs: Any) -> Finish:
            def finish(results: Any, _: BaseException | None) -> None:
                for result in results or ():
                    job = self._jobs.pop(result.job_id, None)
                    if isinstance(job, LoadJob):
                        copies.end_load(job)
                    elif job is not None:
                        copies.stored(job)

            return finish

        for name, hook in (("submit_store", on_store), ("submit_load", on_load), ("get_finished", on_finished)):
            copies.wrap(self._worker, name, hook)

    def _paired(self, here: Any, there: Any) -> list[Page]:
        """Return a job's blocks with where each lies elsewhere: a chunk, and the place in it."""
        pages, blocks, chunks = [], here.block_ids.tolist(), there.block_ids.tolist()
        for group, size, first in zip(self._groups, here.group_sizes, here.block_indices, strict=True):
            skip = first % self.each
            if group is not None:
                places = (divmod(skip + n, self.each) for n in range(size))
                pages += [
                    Page(group, block, (chunks[chunk], place))
                    for block, (chunk, place) in zip(blocks, places, strict=False)
                ]
            blocks, chunks = blocks[size:], chunks[-(-(skip + size) // self.each) if size else 0 :]
        return [page for page in pages if page.block]

    def layers_here(self, group: VllmGroup) -> Sequence[Any]:
        """Return the parts of the cache that a block of the group is copied from."""
        parts = [self._here[ref.tensor_idx] for ref in self._refs[group.gid]]
        return () if any(part is None for part in parts) else parts

    def rows_here(self, group: VllmGroup) -> Sequence[Any]:
        """As `RowStorage` says: nothing if what lies elsewhere is laid out otherwise, or cannot be read by the device."""
        region = getattr(self._worker, "_mmap_region", None)
        plain = getattr(self._handler, "_canonical_copy_plans", None) is None
        pinned = region.is_pinned if region is not None else all(part.is_pinned() for part in self._handler.dst_tensors)
        return self._rows(self._handler.src_tensors, group) if plain and pinned else ()

    def rows_there(self, group: VllmGroup) -> Sequence[Any]:
        """As `RowStorage` says."""
        return self._rows(self._handler.dst_tensors, group)

    def _rows(self, tensors: Sequence[Any], group: VllmGroup) -> Sequence[Any]:
        return [tensors[ref.tensor_idx] for ref in self._refs[group.gid]]

    def row_there(self, page: Page) -> tuple[int, int]:
        """As `RowStorage` says."""
        key: Any = page.key
        chunk, place = key
        return int(chunk), int(place)

    def there(self, page: Page) -> Sequence[Bytes] | None:
        """Return a block's place in its chunk, in the host's memory."""
        key: Any = page.key
        chunk, place = key
        found = []
        for ref in self._refs[page.group.gid]:
            row = self._there[ref.tensor_idx][chunk]
            size = row.shape[0] // self.each
            found.append(row[place * size : (place + 1) * size].view(np.uint8))
        return found


class Member(NamedTuple):
    """A connector, by its class's name; `storage` is what is known of it, None if nothing can be.

    `landed` looks at what it has loaded where the bytes of that storage cannot be read.
    """

    name: str
    storage: Storage | None
    landed: LandedBlocks | None


def members_of(runner: Any, layout: VllmLayout) -> list[Member]:
    """Return the connector of a runner's process; of vLLM's `MultiConnector`, those that it passes everything on to."""
    transfer = getattr(runner.vllm_config, "kv_transfer_config", None)
    if transfer is None:
        return []
    module: Any = sys.modules.get("vllm.distributed.kv_transfer")
    connector: Any = module.get_kv_transfer_group() if module is not None and module.has_kv_transfer_group() else None
    layers = runner.vllm_config.compilation_config.static_forward_context
    members = getattr(connector, "sub_connectors", None)
    if members is None and type(connector).__name__ == "MultiConnector":
        members = connector._connectors
    landed = LandedBlocks(connector, layers, layout)
    loads = connector is not None and getattr(transfer, "kv_role", None) != "kv_producer"
    there = on_gpu(runner)
    looks = landed.rows_here if there else landed.layers_here
    looks_at = loads and not (there and why_it_waits(runner, layout)) and all(map(looks, layout.groups))
    found = []
    for one in members or [connector]:
        storage = _storage_of(one, layers, layout)
        is_read = storage is not None and (not there or can_be_looked_at(storage, layout))
        found.append(Member(type(one).__name__, storage, landed if looks_at and not is_read else None))
    return found


def can_be_looked_at(storage: Storage, layout: VllmLayout) -> bool:
    """Say whether a device can read both ends of what a connector copies."""
    rows: Any = storage
    return hasattr(storage, "rows_there") and all(map(rows.rows_here, layout.groups))


def _storage_of(connector: Any, layers: Any, layout: VllmLayout) -> Storage | None:
    kind = type(connector).__name__
    if kind == "ExampleConnector":
        return StepStorage(connector, ExampleFiles(connector), layers, layout)
    if kind == "OffloadingConnector" and hasattr(connector.connector_worker.worker, "_store_handler"):
        return OffloadedBlocks(connector.connector_worker, layout)
    terms = getattr(connector, "kvcanary_terms", None)
    return StepStorage(connector, terms(), layers, layout) if callable(terms) else None
