"""A scheduler, block managers and a block pool with the shape of vLLM's."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

BLOCK, MAX_SEQS, WINDOW = 4, 4, 7


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt, self.block_hash, self.is_null = block_id, 0, None, False


class BlockPool:
    def __init__(self, num_blocks: int, *, enable_caching: bool) -> None:
        self.enable_caching = enable_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.null_block, self.free = self.blocks[0], self.blocks[1:]
        self.null_block.is_null = True
        self.cached: dict[Any, Block] = {}

    def get_new_blocks(self, count: int) -> list[Block]:
        blocks, self.free = self.free[:count], self.free[count:]
        for block in blocks:
            self._maybe_evict_cached_block(block)
            block.ref_cnt = 1
        return blocks

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def _maybe_evict_cached_block(self, block: Block) -> bool:
        known, block.block_hash = block.block_hash, None
        if known is not None and self.cached.get(known) is block:
            del self.cached[known]
        return known is not None

    def cache_full_blocks(
        self, request: Any, blocks: list[Block], num_cached_blocks: int, num_full_blocks: int, kv_cache_group_id: int
    ) -> None:
        for i in range(num_cached_blocks, num_full_blocks):
            if not blocks[i].is_null:
                blocks[i].block_hash = (kv_cache_group_id, tuple(request.tokens[: (i + 1) * BLOCK]))
                self.cached.setdefault(blocks[i].block_hash, blocks[i])

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            if not block.ref_cnt and not block.is_null:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered: Any) -> None:
        for block in ordered:
            block.ref_cnt -= 1
            if not block.ref_cnt and not block.is_null:
                self.free.insert(0 if block.block_hash is None else len(self.free), block)

    def reset_prefix_cache(self) -> bool:
        for block in self.blocks:
            block.block_hash = None
        self.cached.clear()
        return True


class FullAttentionManager:
    block_size = BLOCK

    def __init__(self, pool: BlockPool, gid: int, caching: bool) -> None:
        self.block_pool, self.gid, self.caching = pool, gid, caching
        self.req_to_blocks: dict[str, list[Block]] = defaultdict(list)
        self.num_cached_block: dict[str, int] = {}

    def hits(self, tokens: list[int]) -> list[Block]:
        found = []
        for end in range(BLOCK, len(tokens), BLOCK):
            block = self.block_pool.cached.get((self.gid, tuple(tokens[:end])))
            if block is None or not self.caching:
                break
            found.append(block)
        return found

    def add_local_computed_blocks(self, request_id: str, blocks: list[Block]) -> None:
        self.block_pool.touch(blocks)
        self.req_to_blocks[request_id].extend(blocks)
        self.num_cached_block[request_id] = len(blocks)

    def allocate_external_computed_blocks(self, request_id: str, local: int, external: int) -> None:
        self.req_to_blocks[request_id].extend(self.block_pool.get_new_blocks(external // BLOCK))

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[Block]:
        blocks = self.req_to_blocks[request_id]
        new = self.block_pool.get_new_blocks(max(0, -(-num_tokens // BLOCK) - len(blocks)))
        blocks.extend(new)
        return new

    def cache_blocks(self, request: Any, num_tokens: int) -> None:
        if not self.caching:
            return
        blocks, cached = self.req_to_blocks[request.request_id], self.num_cached_block.get(request.request_id, 0)
        if cached < num_tokens // BLOCK:
            self.block_pool.cache_full_blocks(
                request=request,
                blocks=blocks,
                num_cached_blocks=cached,
                num_full_blocks=num_tokens // BLOCK,
                kv_cache_group_id=self.gid,
            )
        self.num_cached_block[request.request_id] = num_tokens // BLOCK

    def free(self, request_id: str) -> None:
        self.num_cached_block.pop(request_id, None)
        blocks = self.req_to_blocks.pop(request_id, [])
        self.block_pool.free_blocks(reversed(blocks) if self.caching else blocks)  # an iterator, or a list

    def remove_skipped_blocks(self, request_id: str, computed: int) -> None:
        pass


class SlidingWindowManager(FullAttentionManager):
    def remove_skipped_blocks(self, request_id: str, computed: int) -> None:
        blocks, gone = self.req_to_blocks[request_id], []
        for i in range(max(0, computed - WINDOW + 1) // BLOCK):
            if not blocks[i].is_null:
                gone.append(blocks[i])
                blocks[i] = self.block_pool.null_block
        self.block_pool.free_blocks(gone)


class Request:
    def __init__(self, request_id: str, prompt: list[int], new_tokens: int) -> None:
        self.request_id, self.prompt, self.tokens = request_id, prompt, list(prompt)
        self.num_prompt_tokens, self.end = len(prompt), len(prompt) + new_tokens
        self.num_computed_tokens = self.in_flight = 0
        self.status, self.sent = "WAITING", False


class Scheduler:
    """Schedules at most `budget` tokens a step, first come first served; preempts the last one where blocks are short."""

    defer_block_free = False

    def __init__(self, runner: Any, *, caching: bool = True, budget: int = 12, stored: int = 0) -> None:
        self.budget = budget
        # A connector has the first `stored` tokens of every prompt; what is to be loaded is for the test to load.
        self.connector, self.stored = ("host" if stored else None), stored
        self.loads: list[tuple[Request, int]] = []
        pool = BlockPool(runner.kv_cache_config.num_blocks, enable_caching=caching)
        kinds = {"SlidingWindowSpec": SlidingWindowManager}
        managers = [
            kinds.get(type(group.kv_cache_spec).__name__, FullAttentionManager)(pool, gid, caching)
            for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups)
        ]
        coordinator = SimpleNamespace(single_type_managers=managers, block_pool=pool)
        self.kv_cache_manager = SimpleNamespace(coordinator=coordinator)
        self.managers, self.pool = managers, pool
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.finished: set[str] = set()
        self.preempted: set[str] = set()

    def add_request(self, request: Request) -> None:
        self.waiting.append(request)

    def _free_blocks(self, request: Request) -> None:
        for manager in self.managers:
            manager.free(request.request_id)

    def _preempt_request(self, request: Request) -> None:
        for manager in self.managers:
            manager.free(request.request_id)
        request.num_computed_tokens, request.status = 0, "PREEMPTED"
        self.running.remove(request)
        self.waiting.insert(0, request)
        self.preempted.add(request.request_id)

    def _allocate(self, request: Request, count: int) -> bool:
        end = request.num_computed_tokens + count
        for manager in self.managers:
            manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens - request.in_flight)
        need = sum(max(0, -(-end // BLOCK) - len(m.req_to_blocks[request.request_id])) for m in self.managers)
        if need > len(self.pool.free):
            return False
        for manager in self.managers:
            manager.allocate_new_blocks(request.request_id, end)
            manager.cache_blocks(request, min(end, len(request.tokens)))
        return True

    def schedule(self) -> Any:
        left, scheduled, new, cached = self.budget, {}, [], []
        before = {r.request_id: [len(m.req_to_blocks[r.request_id]) for m in self.managers] for r in self.running}
        resumed = set()
        for request in list(self.running):
            count = min(left, len(request.tokens) + request.in_flight - request.num_computed_tokens)
            while request in self.running and count > 0 and not self._allocate(request, count):
                self._preempt_request(self.running[-1])
            if request in self.running and count > 0:
                scheduled[request.request_id] = count
                cached.append(request)
                left -= count
        while self.waiting and left > 0 and len(self.running) < MAX_SEQS and not self.preempted:
            request = self.waiting[0]
            hits = [manager.hits(request.tokens) for manager in self.managers]
            common = min(map(len, hits))
            for manager, blocks in zip(self.managers, hits, strict=True):
                manager.add_local_computed_blocks(request.request_id, blocks[:common])
            request.num_computed_tokens = common * BLOCK
            external = min(self.stored, (len(request.tokens) - 1) // BLOCK * BLOCK) - common * BLOCK
            if external > 0 and len(self.pool.free) * BLOCK > len(request.tokens) * len(self.managers):
                for manager in self.managers:
                    manager.allocate_external_computed_blocks(request.request_id, common * BLOCK, external)
                self.loads.append((request, request.num_computed_tokens))
                request.num_computed_tokens += external
            count = min(left, len(request.tokens) - request.num_computed_tokens)
            if not self._allocate(request, count):
                for manager in self.managers:
                    manager.free(request.request_id)
                break
            self.waiting.pop(0)
            self.running.append(request)
            request.status = "RUNNING"
            scheduled[request.request_id] = count
            left -= count
            if request.sent:
                resumed.add(request.request_id)
                cached.append(request)
            else:
                request.sent = True
                new.append(self._new(request))
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r in cached],
                resumed_req_ids=resumed,
                new_token_ids=[],
                all_token_ids={r.request_id: list(r.tokens) for r in cached if r.request_id in resumed},
                new_block_ids=[self._ids(r, before.get(r.request_id), r.request_id in resumed) for r in cached],
                num_computed_tokens=[r.num_computed_tokens for r in cached],
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
            has_sync_kv_loads=bool(self.loads),
            finished_req_ids=self.finished,
            preempted_req_ids=self.preempted,
        )
        for name, count in scheduled.items():
            request = next(r for r in self.running if r.request_id == name)
            request.num_computed_tokens += count
            request.in_flight += request.num_computed_tokens == len(request.tokens) + request.in_flight
        self.finished, self.preempted = set(), set()
        return output

    def _new(self, request: Request) -> Any:
        return SimpleNamespace(
            req_id=request.request_id,
            prompt_token_ids=request.prompt,
            block_ids=self._ids(request, None, True),
            num_computed_tokens=request.num_computed_tokens,
        )

    def _ids(self, request: Request, before: list[int] | None, whole: bool) -> list[list[int]]:
        tables = [[b.block_id for b in m.req_to_blocks[request.request_id]] for m in self.managers]
        return tables if whole or before is None else [t[n:] for t, n in zip(tables, before, strict=True)]

    def update_from_output(self, result: Any) -> None:
        for name, tokens in zip(result.req_ids, result.sampled_token_ids, strict=True):
            request = next((r for r in [*self.running, *self.waiting] if r.request_id == name), None)
            if request is None or not tokens:
                continue
            request.in_flight = max(0, request.in_flight - 1)
            request.tokens += tokens
            if len(request.tokens) >= request.end:
                request.status = "FINISHED_LENGTH_CAPPED"
                (self.running if request in self.running else self.waiting).remove(request)
                self.finished.add(name)
                self._free_blocks(request)
