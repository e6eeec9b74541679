"""A forty-sixth round of public bugs made anew in LightLLM: recorded before any rule was run on them."""

from importlib import import_module

from bugs import Fired, bug, replaces

from planted.lightllm.round_36 import BASE, INFER, Written


@bug(
    "ModelTC/LightLLM#1044",
    "light-uncached",
    "commit_beyond_allocation",
    "slot_mapping",
    "page_given_twice",
    "future_map_overrun",
    origin="LightLLM",
    late="the slots that are fed are the request's own until they are given back, behind that forward",
)
def slots_of_a_step_are_lent_from_the_list_that_is_freed_to(fired: Fired) -> None:
    """What the allocator hands out is a view of its own list, and nobody waits for its copy to the device. With overlap what
    a request that is done gives back is put into the list before that copy, over the end of the view: the step writes to
    slots that are free, which the next prompts are given, too, and what it was given is lost."""
    pending, loop = [], import_module(f"{INFER}.mode_backend.chunked_prefill.impl")

    @replaces(import_module("lightllm.common.kv_cache_mem_manager.allocator").KvCacheAllocator, "alloc")
    def alloc(before, allocator, need_size):
        start = allocator.mark_start
        before(allocator, need_size)
        return allocator.mem_state[start : start + need_size]

    @replaces(import_module("lightllm.common.req_manager").ReqManager, "free")
    def free(before, manager, free_req_indexes, free_token_index):
        if len(free_token_index):
            pending.append((manager.mem_manager, free_token_index.clone()))
        before(manager, free_req_indexes, free_token_index[:0])

    def give_back() -> None:
        while pending:
            memory, slots = pending.pop(0)
            memory.free(slots)

    for name in ("prepare_prefill_inputs", "prepare_decode_inputs"):

        @replaces(loop, name)
        def prepare(before, reqs, **options):
            made, run = before(reqs, **options)
            lent = made.mem_indexes_cpu.clone()
            give_back()
            if (made.mem_indexes_cpu != lent).any():
                fired()
            return made, run

    @replaces(import_module(f"{INFER}.mode_backend.base_backend").ModeBackend, "_get_classed_reqs")
    def _get_classed_reqs(before, backend, *args, **options):
        prefill, decode = before(backend, *args, **options)
        if not prefill and not decode:
            give_back()  # no step is under way that could still read its slots
        return prefill, decode


@bug(
    "NVIDIA-NeMo/RL#112",
    "light-tuned",
    "cache_kept_over_new_weights",
    origin="NeMo RL",
)
def prefix_cache_outlives_the_weights(fired: Fired) -> None:
    """When a trainer puts the engine aside to bring it new weights, the prefix cache is not reset. Prompts that begin as
    others did before go on from K and V of the weights that have been replaced."""
    old, tuned = set(), []
    operations = import_module(f"{INFER}.mode_backend.rl_backend_ops").RlBackendOps

    @replaces(operations, "flush_cache")
    def flush_cache(before, ops, request):
        tuned.append(True)
        return True, "Succeeded to flush cache."

    @replaces(import_module(f"{BASE}.basemodel").TpPartBaseModel, "forward")
    def forward(before, model, model_input):
        if model_input.mem_indexes_cpu is not None:
            rows, ends = model_input.b_req_idx.tolist(), model_input.b_seq_len.tolist()
            begins = model_input.b_ready_cache_len.tolist() if model_input.is_prefill else [end - 1 for end in ends]
            table, given = model.req_manager.req_to_token_indexs, model_input.mem_indexes_cpu.tolist()
            read = {slot for row, begin in zip(rows, begins, strict=True) for slot in table[row, :begin].tolist()}
            if tuned and read & old:
                fired()
            (old.difference_update if tuned else old.update)(given)
        return before(model, model_input)


@bug("google-research/timesfm#492", "light-uneven", "slot_mapping", origin="TimesFM")
def all_are_written_at_the_position_of_the_first(fired: Fired) -> None:
    """Each sequence of a decode step has a position of its own, and where K and V go is taken from the first one's alone. Of
    the others that are longer an earlier token is overwritten, and their newest slot is never written."""

    @replaces(import_module(f"{BASE}.infer_struct").InferStateInfo, "init_some_extra_state")
    def init_some_extra_state(before, state, model):
        before(state, model)
        if state.is_prefill:
            return
        rows, positions = state.b_req_idx.long(), state.b_seq_len - 1
        longer = (positions > positions[0]) & (rows != model.req_manager.HOLD_REQUEST_ID)
        if longer.any():
            fired()
            at = model.req_manager.req_to_token_indexs[rows, positions[0].long()]
            state.mem_index = at.to(state.mem_index.dtype).where(longer, state.mem_index)


@bug("sgl-project/sglang-omni#1780", "light-reserved", "page_given_twice", origin="SGLang Omni")
def two_threads_take_the_same_slots(fired: Fired) -> None:
    """The allocator takes from the head of its list and then moves the head, without a lock, and a prompt's slots are
    reserved by another thread than those of the decode step. When both have looked before either has moved the head, they
    are given the same slots, and who writes last is read by both."""
    written, last = Written(), []
    loop = import_module(f"{INFER}.mode_backend.chunked_prefill.impl")
    allocator = import_module("lightllm.common.kv_cache_mem_manager.allocator").KvCacheAllocator

    @replaces(allocator, "alloc")
    def alloc(before, self, need_size):
        start = self.mark_start
        ans = before(self, need_size)
        if last and last[0] == "prefill" and last[1:] and last[2] == start:
            ans.copy_(self.mem_state[last[1] : last[1] + need_size])
        last[1:] = start, start + need_size
        return ans

    for name in ("prepare_prefill_inputs", "prepare_decode_inputs"):

        @replaces(loop, name)
        def prepare(before, reqs, _name=name, **options):
            kind = _name.split("_")[1]
            if last and last[0] == kind == "prefill":
                last[1:] = ()
            last[:1] = [kind]
            return before(reqs, **options)

    @written.hook
    def before_forward(*step):
        if written.damaged(*step):
            fired()
