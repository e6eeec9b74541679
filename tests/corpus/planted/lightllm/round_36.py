"""A thirty-sixth round of public bugs made anew, the first in LightLLM: recorded before any rule was run on them."""

from importlib import import_module
from typing import Any

from bugs import Fired, bug, replaces

BASE = "lightllm.common.basemodel"
INFER = "lightllm.server.router.model_infer"


def requests() -> dict[int, Any]:
    """Return the requests that the inference loop has, by their rows."""
    context = import_module(f"{INFER}.infer_batch").g_infer_context
    return {req.req_idx: req for req in (getattr(context, "requests_mapping", None) or {}).values()}


class Written:
    """What each slot holds by what was fed to the model: the tokens up to it. `hook` is called before each forward."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[int, ...]] = {}  # slot -> tokens up to its own
        self.fed: dict[int, list[int]] = {}  # request -> what it was fed, or hit
        self.batch: list[Any] = []

    def hook(self, before_forward: Any) -> None:
        loop = import_module(f"{INFER}.mode_backend.chunked_prefill.impl")

        for name in ("prepare_prefill_inputs", "prepare_decode_inputs"):

            @replaces(loop, name)
            def prepare(before, reqs, **options):
                made, self.batch = before(reqs, **options)
                return made, self.batch

        @replaces(import_module(f"{BASE}.basemodel").TpPartBaseModel, "forward")
        def forward(before, model, model_input):
            batch, self.batch = self.batch, []
            for req in batch:
                known, cached = self.fed.setdefault(req.req_id, []), req.cur_kv_len
                del known[cached:]
                known += [int(token) for token in req.get_input_token_ids()[len(known) : cached]]
            before_forward(model, model_input, batch)
            given = model_input.mem_indexes_cpu
            made = before(model, model_input)
            begin = 0
            for req, end in zip(batch, model_input.b_seq_len.tolist(), strict=bool(batch)):
                known, count = self.fed[req.req_id], end - req.cur_kv_len
                known += model_input.input_ids[begin : begin + count].tolist()
                for position, slot in enumerate(given[begin : begin + count].tolist(), req.cur_kv_len):
                    self.of[slot] = tuple(known[: position + 1])
                begin += count
            return made

    def damaged(self, model: Any, model_input: Any, batch: list[Any]) -> bool:
        """Whether the step reads a slot that does not hold what its request has there."""
        table, rows = model.req_manager.req_to_token_indexs, model_input.b_req_idx.tolist()
        for req, row in zip(batch, rows, strict=bool(batch)):
            tokens = tuple(self.fed[req.req_id])
            for position, slot in enumerate(table[row, : req.cur_kv_len].tolist()):
                if self.of.get(slot) != tokens[: position + 1]:
                    return True
        return False


@bug("vllm-project/vllm#10388", "light-parts", "position_off", origin="vLLM")
def positions_of_a_part_go_on_to_the_prompts_end(fired: Fired) -> None:
    """The positions of a part of a prompt are cut off where the part begins and not where it ends. They come to more than its tokens are, and those of the requests behind it in the
    step get what is left over of them."""
    import torch

    @replaces(import_module(f"{BASE}.infer_struct").InferStateInfo, "init_some_extra_state")
    def init_some_extra_state(before, state, model):
        before(state, model)
        if state.is_prefill:
            rows, known = zip(state.b_req_idx.tolist(), state.b_ready_cache_len.tolist(), strict=True), requests()
            parts = [
                torch.arange(begin, known[row].get_cur_total_len() if row in known else begin + 1)
                for row, begin in rows
            ]
            positions = torch.cat(parts)[: len(state.position_ids)].to(state.position_ids)
            if len(positions) == len(state.position_ids) and (positions != state.position_ids).any():
                fired()
                state.position_ids.copy_(positions)


@bug("vllm-project/vllm#9285", "light-graphs", "attention_seq_len_wrong", origin="vLLM")
def longer_requests_are_decoded_by_graphs_all_the_same(fired: Fired) -> None:
    """Whether a decode step is too long for the graphs is asked of the wrong length, and the answer is always that it is not. A graph attends to no more tokens than it was captured
    for: of a request that has become longer the last ones are not read."""

    @replaces(import_module(f"{BASE}.cuda_graph").CudaGraph, "can_run")
    def can_run(before, graph, batch_size, max_len_in_batch):
        return before(graph, batch_size, 0)

    @replaces(import_module(f"{BASE}.infer_struct").InferStateInfo, "copy_for_cuda_graph")
    def copy_for_cuda_graph(before, state, new):
        before(state, new)
        if (state.b_seq_len > state.max_kv_seq_len).any():
            fired()
            state.b_seq_len.clamp_(max=state.max_kv_seq_len)


@bug("tenstorrent/vllm-tt-plugin#43", "light-rows", "slot_mapping", origin="vLLM TT")
def prompts_are_written_by_their_row_and_not_by_their_place(fired: Fired) -> None:
    """What the requests of a prefill step may write to is listed in the order in which they stand in the step, and is looked up in the order of their rows. Where these differ, a
    prompt is written to what another of the step was given, and its own slots stay as they were."""
    import torch

    @replaces(import_module(f"{BASE}.infer_struct").InferStateInfo, "init_some_extra_state")
    def init_some_extra_state(before, state, model):
        before(state, model)
        rows = state.b_req_idx.tolist()
        if state.is_prefill and rows != sorted(rows):
            starts, lens = state.b1_cu_q_seq_len.tolist(), state.b_q_seq_len.tolist()
            last, places = len(state.mem_index) - 1, []
            for row, count in zip(rows, lens, strict=True):
                begin = starts[sorted(rows).index(row)]
                places += [min(place, last) for place in range(begin, begin + count)]
            fired()
            state.mem_index = state.mem_index[torch.tensor(places)]


@bug("sgl-project/sglang#38480", "light-split", "eviction_of_locked_page", origin="SGLang")
def beginning_that_is_split_off_has_no_readers(fired: Fired) -> None:
    """When a node of the prefix cache is split, its readers are counted for the part behind, and the new one in front of it begins with none. As they leave they are taken off both:
    the beginning is one short, and who reads it next does not keep it from being evicted."""
    written = Written()

    @replaces(import_module("lightllm.server.router.dynamic_prompt.radix_cache").TreeNode, "split_node")
    def split_node(before, node, prefix_len):
        made = before(node, prefix_len)
        made.ref_counter = 0
        return made

    @written.hook
    def before_forward(*step):
        if written.damaged(*step):
            fired()


@bug(
    "ModelTC/LightLLM#907", "light-wide", "kv_write_lost", origin="LightLLM",
    late="not found: slots that nobody had written keep what the memory held, and nobody says what that was",
)  # fmt: skip
def addresses_of_high_slots_overflow(fired: Fired) -> None:
    """The kernel that stores K and V multiplies a slot's number by what a slot takes, in 32 bits. Of slots that are far enough in the pool that is less than nothing: what is written
    to them goes to memory in front of it, and they keep what they had."""
    kernels, most = import_module(f"{BASE}.triton_kernel.destindex_copy_kv"), 88

    @replaces(kernels, "destindex_copy_kv")
    def destindex_copy_kv(before, kv, slots, out):
        low = (slots < most) | (slots == len(out) - 1)  # what padding is written to is read by nobody
        if low.any():
            before(kv[low].contiguous(), slots[low].contiguous(), out)

    @replaces(import_module(f"{BASE}.basemodel").TpPartBaseModel, "forward")
    def forward(before, model, model_input):
        if model_input.mem_indexes_cpu is not None and (model_input.mem_indexes_cpu >= most).any():
            fired()
        return before(model, model_input)


@bug("lightseekorg/tokenspeed#376", "light-overlap", "next_token_swap", "future_map_overrun", origin="TokenSpeed")
def host_buffer_is_filled_again_before_it_is_read(fired: Fired) -> None:
    """There is one buffer on the host for what each step brings there, and nothing waits with filling it until the step before has been dealt with. With overlap that is when the next
    one has been computed: the tokens of a step are taken to be those of the one behind it."""
    pinned, sampled, wrong = import_module(f"{INFER}.pin_mem_manager").PinMemTensorManager, [], []

    @replaces(pinned, "alloc_pin_tensor")
    def alloc_pin_tensor(before, manager, key, **given):
        if key == "next_token_ids" and key in manager.key_to_alloc_index:
            manager.key_to_alloc_index[key] = 0
        return before(manager, key, **given)

    @replaces(pinned, "async_copy_from_gpu_tensor")
    def async_copy_from_gpu_tensor(before, manager, key, gpu_tensor):
        if key == "next_token_ids":
            sampled.append(gpu_tensor.tolist())
        return before(manager, key=key, gpu_tensor=gpu_tensor)

    @replaces(import_module(f"{INFER}.mode_backend.base_backend").ModeBackend, "_post_handle")
    def _post_handle(before, backend, run_reqs, next_token_ids, *args, **given):
        if next_token_ids.tolist() != sampled.pop(0):
            wrong.append(True)
        return before(backend, run_reqs, next_token_ids, *args, **given)

    @replaces(import_module(f"{BASE}.basemodel").TpPartBaseModel, "forward")
    def forward(before, model, model_input):
        if wrong:
            fired()
        return before(model, model_input)


@bug("tenstorrent/tt-xla#5804", "light-passes", "row_reassigned_in_flight", "req_to_token", origin="tt-xla")
def later_passes_count_rows_from_the_first(fired: Fired) -> None:
    """Prompts for which a step has no room are computed in a pass of their own, and there the requests are numbered from 0 while their state is looked up among all. They are computed on the rows of the first
    ones: their slots are written into the tables of these, and so are the tokens that come out."""
    import torch

    written, loop = Written(), import_module(f"{INFER}.mode_backend.chunked_prefill.impl")

    @replaces(loop, "prepare_prefill_inputs")
    def prepare_prefill_inputs(before, reqs, **options):
        made, run = before(reqs, **options)
        context = import_module(f"{INFER}.infer_batch").g_infer_context
        first = [context.requests_mapping[number].req_idx for number in context.infer_req_ids[: len(run)]]
        made.b_req_idx = torch.tensor(first, dtype=torch.int32)
        return made, run

    @written.hook
    def before_forward(*step):
        if written.damaged(*step):
            fired()


@bug("InternLM/lmdeploy#1450", "light-freed", "radix_insert_then_free", origin="LMDeploy")
def all_of_a_sequence_is_free_when_it_is_erased(fired: Fired) -> None:
    """When a sequence is erased, all that it had goes back to the free list at once, though the prefix cache has just been handed it. The next prompt is written over what the cache
    lends."""
    written = Written()

    @replaces(import_module(f"{INFER}.infer_batch").InferenceContext, "_full_att_free_req")
    def _full_att_free_req(before, context, free_token_index, req):
        own, row = req.get_radix_cache_shared_len(), context.req_manager.req_to_token_indexs[req.req_idx]
        before(context, free_token_index=free_token_index, req=req)
        free_token_index.append(row[own + len(free_token_index[-1]) : req.cur_kv_len])

    @written.hook
    def before_forward(*step):
        if written.damaged(*step):
            fired()


@bug("vllm-project/vllm#42131", "light-mixed", "async_resume_wrong_input", "future_map_overrun", origin="vLLM")
def decoded_requests_of_a_mixed_step_get_no_new_token(fired: Fired) -> None:
    """A step is prepared in a shorter way, which leaves out to fill in the tokens that were sampled last. What is computed for a request that is being answered is whatever the buffer has in their
    place."""
    module = import_module(f"{BASE}.basemodel")

    @replaces(module, "gather_token_prefill_decode_mixed")
    def gather_token_prefill_decode_mixed(before, input_ids, **given):
        right = input_ids.clone()
        before(input_ids=right, **given)
        if (right != input_ids).any():
            fired()


@bug("vllm-project/vllm-ascend#10098", "light-equal", "page_leaked", origin="vLLM Ascend")
def what_is_stored_already_is_waited_for(fired: Fired) -> None:
    """What a request that is done has of the pool is freed when the store says that it has taken it over. If the store has all of it already there is nothing to take over, nothing is said, and it is never
    freed."""

    @replaces(import_module(f"{INFER}.infer_batch").InferenceContext, "_full_att_free_req")
    def _full_att_free_req(before, context, free_token_index, req):
        own, length = req.get_radix_cache_shared_len(), req.cur_kv_len
        before(context, free_token_index=free_token_index, req=req)
        if own < length == own + len(free_token_index[-1]):
            fired()
            del free_token_index[-1]
