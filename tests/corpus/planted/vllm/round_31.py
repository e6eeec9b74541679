"""A thirty-first round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("vllm-project/vllm#54193", "qwen-loads-ends", "stored_wrong")
def token_that_was_sampled_last_counts_as_stored(fired: Fired) -> None:
    """When a request has ended, what is stored of it goes by all its tokens. The last one has been sampled and never computed: where it fills a block, that block is stored under the key of all its tokens, and in its last
    slot stands nothing of this request. Whoever goes on with the answer loads it."""
    import host_connector

    owner = host_connector.HostConnector
    ended: list = []  # jobs of requests that wait for them
    torn: set = set()  # keys

    @replaces(owner, "request_finished")
    def request_finished(before, connector, request, block_ids):
        place = request.num_tokens // connector._size - 1
        late = request.num_tokens % connector._size == 0 and connector._key(request, place) not in connector._known
        if late:
            key = connector._key(request, place)
            ended.append(
                host_connector.Job(request.request_id, [(gid, held[place], key) for gid, held in enumerate(block_ids)])
            )
            torn.add(key)
        before(connector, request, block_ids)
        return late, None

    @replaces(owner, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        made = before(connector, output)
        made.stores += ended
        connector._known.update(key for job in ended for _, _, key in job.blocks)
        made.ended = {job.name for job in ended}
        ended.clear()
        if any(torn & {key for _, _, key in job.blocks} for job in made.loads):
            fired()
        return made

    @replaces(owner, "get_finished")
    def get_finished(before, connector, finished):
        _, loaded = before(connector, finished)
        return connector._get_connector_metadata().ended or None, loaded


@bug("ai-dynamo/dynamo#8419", "llama-loads-shifts", "load_landed_elsewhere", origin="Dynamo (TensorRT-LLM)")
def loaded_blocks_go_to_the_end_of_the_list(fired: Fired) -> None:
    """Of the blocks that a request has been given the last ones are filled with what is loaded, as many as have been found. What is found is a prefix and belongs behind what was hit: the blocks for the tokens that are still to be
    computed get it, and those of the prefix are shifted by as many or left as they were."""
    import host_connector

    without: set[int] = set()  # blocks that have not got what belongs into them
    right: dict[str, list] = {}

    @replaces(host_connector.HostConnector, "update_state_after_alloc")
    def update_state_after_alloc(before, connector, request, blocks, count):
        before(connector, request, blocks, count)
        if not count:
            return
        job = connector._jobs[-1]
        number = count // connector._size
        right[job.name] = job.blocks
        last = [(gid, one.block_id) for gid, held in enumerate(blocks.blocks) for one in held[len(held) - number :]]
        job.blocks = [(gid, block, key) for (gid, block), (_, _, key) in zip(last, job.blocks, strict=True)]

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        before(connector, job)
        for gid, block, key in right.pop(job.name, ()):
            if any(not rows.equal(connector._store[name, key]) for name, rows in connector._blocks_of(gid, block)):
                without.add(block)

    @replaces(host_connector.HostConnector, "start_load_kv")
    def start_load_kv(before, connector, *args, **kwargs):
        before(connector, *args, **kwargs)
        if without:
            fired()


@bug(
    "vllm-project/vllm-ascend#12172",
    "qwen-strides",
    "not_of_the_model",
    "kv_write_damaged",
    origin="vLLM Ascend",
    recorded=False,
)
def values_are_read_as_if_they_lay_one_behind_the_other(fired: Fired) -> None:
    """Queries, keys and values of a token come out of one product, so that the values of two tokens lie as far apart as all three are long. The kernel that stores them in a step of single tokens takes them to lie one behind the other: from the second row on it
    stores as values what it finds in the rows before."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    singles = [False]

    def look(runner, output):
        singles[0] = max(output.num_scheduled_tokens.values(), default=0) == 1

    before_forward(look)

    @replaces(CPUAttentionBackendImpl, "do_kv_cache_update")
    def do_kv_cache_update(before, impl, layer, key, value, kv_cache, slot_mapping):
        if singles[0] and value.shape[0] > 1:
            dense = value.as_strided(value.shape, (value[0].numel(), value.shape[2], 1), value.storage_offset())
            if not dense.equal(value):
                fired()
            value = dense
        return before(impl, layer, key, value, kv_cache, slot_mapping)


@bug("vllm-project/vllm#4995", "llama-lora-chunks", "computed_with_other_weights")
def chunk_behind_which_nothing_is_sampled_has_no_adapter(fired: Fired) -> None:
    """Which adapter the tokens are computed with is put down for those requests that get a token in this step. A chunk that does not end its prompt gets none, and is computed without its tenant's adapter; what the prompt's end and the answer see of it
    is the base model's."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    @replaces(InputBatch, "make_lora_inputs")
    def make_lora_inputs(before, batch, scheduled, sampled):
        prompts, tokens, requests = before(batch, scheduled, sampled)
        chosen = list(tokens)
        at = 0
        for row, count in enumerate(scheduled.tolist()):
            if batch.num_computed_tokens_cpu[row] + count < batch.num_prompt_tokens[row]:
                if any(chosen[at : at + count]):
                    fired()
                chosen[at : at + count] = [0] * count
            at += count
        return prompts, tuple(chosen), requests


@bug(
    "EricLBuehler/mistral.rs#246",
    "sliding-block64",
    "window_read_wrong",
    origin="mistral.rs",
    late="what tokens of one chunk attend to among themselves is not seen, and the first prompt's first chunk is longer than the window",
)
def window_is_never_cut_out_of_what_is_kept(fired: Fired) -> None:
    """Layers with a window are handed all that is in the tables, and nobody cuts it to the window. As long as a request is shorter than the window it is right; from then on its tokens look at everything in front of them, at blocks
    that have been given back as well."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    windows: set[int] = set()

    @replaces(CPUAttentionBackendImpl, "__init__")
    def init(before, impl, *args, **kwargs):
        before(impl, *args, **kwargs)
        if impl.sliding_window > 0:
            windows.add(impl.sliding_window + 1)
            impl.sliding_window = -1

    def look(runner, output):
        batch = runner.input_batch
        for row, name in enumerate(batch.req_ids):
            if int(batch.num_computed_tokens_cpu[row]) + output.num_scheduled_tokens.get(name, 0) > min(windows):
                fired()

    before_forward(look)
