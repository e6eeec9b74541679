"""A fifty-second round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

import hashlib

from bugs import Fired, bug, replaces

from .marks import before_forward, parts_of, states_of, when_allocated


@bug("vllm-project/vllm#12603", "qwen-embeds-albums", "identity_not_in_key")
def pictures_of_earlier_blocks_are_not_handed_on_in_the_chain(fired: Fired) -> None:
    """A block's key is made of its own pictures, its own tokens and the hash of the block before it, and that hash was made of
    tokens alone. Each block's own pictures have to be the right ones, but not those in front: behind another first
    picture the second one is hit as it was computed behind the first."""
    from vllm.v1.core import kv_cache_utils
    from vllm_setups import PICTURE

    chains: dict[bytes, bytes] = {}  # by a block's key: the hash that it hands on
    shown: dict[int, str] = {}  # by block: what it was computed of, from the prompt's first token on

    @replaces(kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys")
    def _gen_prompt_embeds_extra_hash_keys(before, request, start, end):
        made = before(request, start, end)
        if made:
            text = request.prompt_embeds[start:end].clone()
            text[text[:, -1] == PICTURE] = 0
            made = [(*made[0], hashlib.sha256(text.contiguous().numpy().tobytes()).digest())]
        return made

    @replaces(kv_cache_utils, "hash_block_tokens")
    def hash_block_tokens(before, function, parent, tokens, extra=None):
        parent = chains.get(parent, parent)
        own = before(function, parent, tokens, extra)
        chains[own] = before(function, parent, tokens, tuple(key[2:] for key in extra or ()))
        return own

    def look(request, hit, table):
        if request.prompt_embeds is None:
            return
        for place, block in enumerate(table):
            end = (place + 1) * 32
            if end > len(request.prompt_embeds):
                break
            right = hashlib.sha256(request.prompt_embeds[:end].contiguous().numpy().tobytes()).hexdigest()
            if place < len(hit) and shown.get(block.block_id, right) != right:
                fired()
            elif place >= len(hit):
                shown[block.block_id] = right

    when_allocated(look)


@bug("Blaizzy/mlx-vlm#2206", "recurrent-cancels", "state_restored_for_other_prefix", origin="mlx-vlm")
def prompt_that_is_left_before_its_answer_is_kept_under_one_token_less(fired: Fired) -> None:
    """What a request has computed is kept under its tokens but for the last one, which is the answer's latest and not yet
    computed. When a request is left as soon as its prompt is computed there is no such token, and the prompt's last one
    is left out of the name though the state has taken it in. A hit goes on from that state and computes the token again."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler

    runners: list = []
    late: set[int] = set()  # blocks with the state of a token more

    @replaces(BlockPool, "get_new_blocks")
    def get_new_blocks(before, pool, *args, **kwargs):
        new = before(pool, *args, **kwargs)
        late.difference_update(block.block_id for block in new)
        return new

    @replaces(Scheduler, "finish_requests")
    def finish_requests(before, scheduler, names, status):
        for name in (names,) if isinstance(names, str) else names or ():
            request = scheduler.requests.get(name)
            if request is not None and runners and request.num_output_tokens == 1:
                keep(scheduler.kv_cache_manager.block_pool, request)
        return before(scheduler, names, status)

    def keep(pool, request):
        runner, end = runners[0], request.num_prompt_tokens - 1
        group, layers = states_of(runner)
        size = runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        named = pool.get_cached_block(request.block_hashes[end // pool.hash_block_size - 1], [group])
        if end % size or named is None:
            return
        now = int(runner.requests[request.request_id].block_ids[group][end // size])
        for part in parts_of(runner, layers):
            part[named[0].block_id].copy_(part[now])
        late.add(named[0].block_id)

    def look(runner, output):
        runners[:] = [runner]
        group, _ = states_of(runner)
        size = runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        for new in output.scheduled_new_reqs:
            if new.num_computed_tokens and new.block_ids[group][(new.num_computed_tokens - 1) // size] in late:
                fired()

    before_forward(look)


@bug("vllm-project/vllm#35831", "llama-loads-binds", "stored_wrong", origin="vLLM (LMCache)")
def blocks_are_listed_again_when_the_load_has_come(fired: Fired) -> None:
    """A connector is told of a request's blocks when it begins to load, and once more when the load has come and the rest of the
    prompt gets its blocks, too. Both times it puts all of them at the end of its own list, where those that were loaded
    now stand twice. What is stored of the blocks behind them is looked up in that list, and is what lies in the first ones."""
    from host_connector import HostConnector

    tables: dict[str, list[list[int]]] = {}
    wrong: set[tuple] = set()

    @replaces(HostConnector, "update_state_after_alloc")
    def update_state_after_alloc(before, connector, request, blocks, num_external_tokens):
        before(connector, request, blocks, num_external_tokens)
        mine = tables.setdefault(request.request_id, [[] for _ in blocks.blocks])
        for table, held in zip(mine, blocks.blocks, strict=True):
            table += [block.block_id for block in held]

    @replaces(HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        meta, cached = before(connector, output), output.scheduled_cached_reqs
        for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            for table, ids in zip(tables[name], more or (), strict=False):
                table += ids
        for job in meta.stores:
            right = job.blocks
            job.blocks = [(gid, tables[job.name][gid][len(key) // connector._size - 1], key) for gid, _, key in right]
            wrong.update(new[2] for old, new in zip(right, job.blocks, strict=True) if old[1] != new[1])
        return meta

    @replaces(HostConnector, "_load")
    def _load(before, connector, job):
        before(connector, job)
        if any(key in wrong for *_, key in job.blocks):
            fired()


@bug("sgl-project/sglang#36926", "delta-cancels", "page_leaked", origin="SGLang")
def part_of_a_prompt_that_comes_when_it_has_been_left_is_dropped(fired: Fired) -> None:
    """A prompt of several parts is left while one of them is computed. Whoever the part's result comes to finds that the request
    has been left, drops it and goes on, and nobody else has the request any more: the pages and the recurrent states that
    it has so far are never given back."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    lost: list[str] = []

    @replaces(Scheduler, "_free_request_blocks")
    def _free_request_blocks(before, scheduler, request):
        left = request.status == RequestStatus.FINISHED_ABORTED
        if left and 0 < request.num_computed_tokens < request.num_prompt_tokens:
            lost.append(request.request_id)
        else:
            before(scheduler, request)

    before_forward(lambda runner, output: lost and fired())


@bug("RBLN-SW/vllm-rbln#136", "llama-mirrors", "stale_prefix_hit", origin="vllm-rbln")
def blocks_that_a_preempted_request_gives_back_stay_in_the_prefix_cache(fired: Fired) -> None:
    """The scheduler's blocks stand for parts of larger ones on the device, and a record says which. When a request is put back its
    large blocks go to others, and nobody strikes out what the record says of them. A later hit of the same tokens is
    sent there, and finds what the others have written since."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler

    named: dict[int, object] = {}  # by block: the key under which a request had it that was put back
    owners: dict[int, tuple] = {}  # by block: who has filled it, and which of its blocks it is

    @replaces(Scheduler, "_preempt_request")
    def _preempt_request(before, scheduler, request, *args, **kwargs):
        for block in scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0]:
            if block.block_hash is not None:
                named[block.block_id] = block.block_hash
        before(scheduler, request, *args, **kwargs)

    @replaces(BlockPool, "get_new_blocks")
    def get_new_blocks(before, pool, *args, **kwargs):
        new = before(pool, *args, **kwargs)
        for block in new:
            if block.block_id in named:
                pool.cached_block_hash_to_block.insert(named[block.block_id], block)
        return new

    def look(request, hit, table):
        for place, block in enumerate(table):
            if place >= len(hit) and owners.get(block.block_id, (None,))[0] is not request:
                owners[block.block_id] = request, place
            elif place < len(hit) and block.block_id in owners:
                other, there = owners[block.block_id]
                tokens = other.all_token_ids[: (there + 1) * 32]
                if list(tokens) != list(request.all_token_ids[: (place + 1) * 32]):
                    fired()

    when_allocated(look)


@bug("Blaizzy/mlx-vlm#1872", "mrope-extends", "position_off", origin="mlx-vlm")
def rows_that_join_are_moved_on_by_what_they_are_padded_with(fired: Fired) -> None:
    """Requests are answered in one batch, whose rows are filled up on the left to the length of the longest. A request that joins
    when its prompt is computed takes its positions from the batch's own count, in which what it is filled up with
    counts, too: each token of its answer is rotated as if it stood that much further on."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    padded: dict[str, int] = {}  # by request that has joined: with how many

    @replaces(GPUModelRunner, "_calc_mrope_positions")
    def _calc_mrope_positions(before, runner, output):
        before(runner, output)
        batch, at = runner.input_batch, 0
        done = {name: int(batch.num_computed_tokens_cpu[row]) for row, name in enumerate(batch.req_ids)}
        longest = max((done[name] for name in done if name in padded), default=0)
        for row, name in enumerate(batch.req_ids):
            count = output.num_scheduled_tokens[name]
            answers = done[name] >= batch.num_prompt_tokens[row]
            if answers and padded.setdefault(name, max(0, longest - done[name])):
                runner.mrope_positions.cpu[:, at : at + count] += padded[name]
                fired()
            at += count
