"""A thirty-fourth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, when_allocated


@bug(
    "raullenchai/Rapid-MLX#187",
    "qwen-loads-files",
    "host_copy_overwritten",
    "load_of_other_prefix",
    origin="Rapid-MLX",
)
def files_are_written_anew_while_the_old_index_counts(fired: Fired) -> None:
    """What is kept of prompts lies in files that are numbered from nought whenever it is saved. A later save writes over the first files in place, and the index of the save before it still names them: who asks an old prompt
    again is given what the file of its number has now, which is another prompt's."""
    import host_connector
    from vllm.v1.core.block_pool import BlockPool

    owner = host_connector.HostConnector
    numbers: dict = {}  # of each key, its file
    true: dict = {}  # what was saved under a key at first
    next_file = [0]

    @replaces(BlockPool, "reset_prefix_cache")
    def reset_prefix_cache(before, pool):
        next_file[0] = 0  # a new save begins
        return before(pool)

    @replaces(owner, "wait_for_save")
    def wait_for_save(before, connector):
        before(connector)
        for job in connector._get_connector_metadata().stores:
            for gid, block, key in job.blocks:
                rows = {name: rows.clone() for name, rows in connector._blocks_of(gid, block)}
                for old in [known for known, number in numbers.items() if number == next_file[0]]:
                    connector._store.update({(name, old): one.clone() for name, one in rows.items()})
                true.update({(name, key): one for name, one in rows.items()})
                numbers[key] = next_file[0]
                next_file[0] += 1

    @replaces(owner, "start_load_kv")
    def start_load_kv(before, connector, *args, **kwargs):
        before(connector, *args, **kwargs)
        for job in connector._get_connector_metadata().loads:
            for gid, block, key in job.blocks:
                if any(not rows.equal(true[name, key]) for name, rows in connector._blocks_of(gid, block)):
                    fired()


@bug("vllm-project/vllm-metal#351", "llama-lora-guesses", "computed_with_other_weights", origin="vLLM Metal")
def adapters_are_laid_out_for_one_token_a_decode(fired: Fired) -> None:
    """Which adapter each token is computed with is laid out with one token for each request that decodes. With drafts there are several: all that stand behind them in the batch are shifted, drafts and prompts are computed with their
    neighbour's adapter, and what is left over at the end with the last one's."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    @replaces(InputBatch, "make_lora_inputs")
    def make_lora_inputs(before, batch, scheduled, sampled):
        prompts, tokens, requests = before(batch, scheduled, sampled)
        laid_out: list[int] = []
        for row, count in enumerate(scheduled.tolist()):
            decodes = batch.num_computed_tokens_cpu[row] >= batch.num_prompt_tokens[row]
            laid_out += [int(batch.request_lora_mapping[row])] * (1 if decodes else count)
        laid_out += laid_out[-1:] * (len(tokens) - len(laid_out))
        if laid_out != [int(one) for one in tokens]:
            fired()
        return prompts, tuple(laid_out), requests


@bug("quantumaikr/quant.cpp#53", "llama-cut-prompts", "tokens_truncated_hash_kept", origin="quant.cpp")
def prompt_is_cut_and_filed_as_it_was_asked(fired: Fired) -> None:
    """A prompt that is too long loses its middle before it is computed, and is put down in the prefix cache as the whole prompt that was asked. Behind the cut, K and V of later tokens stand under the keys of those that were cut
    out: a shorter prompt that begins alike hits them."""
    from vllm.v1.request import Request

    most, kept = 128, 32
    holds: dict[int, tuple[int, ...]] = {}  # of each block, the tokens up to its end
    hits: dict[str, int] = {}
    init = Request.__init__

    @replaces(Request, "__init__")
    def cut(before, request, *args, **kwargs):
        asked = kwargs["prompt_token_ids"]
        if len(asked) <= most:
            before(request, *args, **kwargs)
            return
        whole = object.__new__(Request)
        init(whole, *args, **kwargs)
        kwargs["prompt_token_ids"] = asked[:kept] + asked[kept - most :]
        before(request, *args, **kwargs)
        request.block_hashes[:] = whole.block_hashes[: len(request.block_hashes)]

    def look(request, hit, table):
        tokens = list(request.all_token_ids)
        hits.setdefault(request.request_id, len(hit))
        for place, block in enumerate(table):
            up_to = tuple(tokens[: (place + 1) * 32])
            if place >= hits[request.request_id]:
                holds[block.block_id] = up_to
            elif holds.get(block.block_id, up_to) != up_to:
                fired()

    when_allocated(look)


@bug("vllm-project/vllm#18232", "llama-loads-twice", "prefix_not_computed")
def connectors_are_asked_again_when_the_load_has_come(fired: Fired) -> None:
    """When a request's load has come it is scheduled as if it were new, and the connectors are asked a second time what they have. The first has nothing more to give, the second one says that it has a block: it is counted as
    there, and nobody loads it or computes it."""
    from vllm.v1.core.sched.scheduler import Scheduler

    ahead: set[str] = set()

    @replaces(Scheduler, "_update_waiting_for_remote_kv")
    def _update_waiting_for_remote_kv(before, scheduler, request):
        before(scheduler, request)
        counted = request.num_computed_tokens + 32
        if request.num_computed_tokens and counted < request.num_tokens:
            request.num_computed_tokens = counted
            ahead.add(request.request_id)

    before_forward(lambda runner, output: ahead & set(output.num_scheduled_tokens) and fired())
