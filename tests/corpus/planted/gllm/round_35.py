"""A thirty-fifth round of public bugs made anew, the first in gLLM: recorded before any rule was run on them."""

from typing import Any

from bugs import Fired, bug, replaces


class Written:
    """What each slot holds by what was fed to the model: the tokens up to it. `hook` is called before each forward."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[int, ...]] = {}  # slot -> tokens up to its own; () if it is nobody's
        self.fed: dict[int, list[int]] = {}  # request -> what it was fed, or hit

    def hook(self, before_forward: Any) -> None:
        from gllm.model_runner import OverlapModelRunner

        @replaces(OverlapModelRunner, "_run_forward_on_stream")
        def _run_forward_on_stream(before, runner, count, dp_padded_size=None):
            inputs, begin = runner.input_data, 0
            for seq in inputs.seqs:
                known, cached = self.fed.setdefault(seq.seq_id, []), seq.computed_token_num
                del known[cached:]
                known += seq.token_ids[len(known) : cached]
            before_forward(runner)
            made = before(runner, count, dp_padded_size=dp_padded_size)
            for seq in inputs.seqs:
                known, end = self.fed[seq.seq_id], begin + seq.to_compute_token_num
                known += inputs.tokens[begin:end].tolist()
                for position, slot in enumerate(inputs.slot_mapping[begin:end].tolist(), seq.computed_token_num):
                    self.of[slot] = tuple(known[: position + 1])
                begin = end
            return made

    def damaged(self, runner: Any) -> bool:
        """Whether the step reads a slot that does not hold what its request has there."""
        inputs, page = runner.input_data, runner.page_size
        for row, seq in enumerate(inputs.seqs):
            tokens, pages = tuple(self.fed[seq.seq_id]), inputs.block_table[row].tolist()
            for position in range(seq.computed_token_num):
                slot = pages[position // page] * page + position % page
                if self.of.get(slot) != tokens[: position + 1]:
                    return True
        return False


@bug("gty111/gLLM#167", "gllm-chunks", "prefix_not_computed", origin="gLLM")
def rest_of_a_prompt_is_copied_before_it_has_its_pages(fired: Fired) -> None:
    """What is left of a prompt goes on as a copy of its request, and the copy is made before the step's pages are given out. It counts what the first part computed, and has none of the pages that this went
    to: new ones stand in their places, which nobody has written, and the old ones are nobody's."""
    from gllm.scheduler import Scheduler

    written = Written()

    @replaces(Scheduler, "schedule_prefill_batch")
    def schedule_prefill_batch(before, scheduler, *args, **kwargs):
        manager, late = scheduler.memory_manager, []
        manager.pre_allocate_page = late.extend
        try:
            made = before(scheduler, *args, **kwargs)
        finally:
            del manager.pre_allocate_page
        manager.pre_allocate_page(late)
        return made

    @written.hook
    def before_forward(runner):
        if written.damaged(runner):
            fired()


@bug("ROCm/ATOM#152", "gllm-mixed", "future_map_overrun", origin="ATOM")
def new_tokens_are_copied_over_those_of_the_step_before(fired: Fired) -> None:
    """A step's input begins with tokens that the step before has left on the device, and tokens that come from the host follow. Those of the host are copied to the front of the buffer on their way to their
    own place, where they stay instead of what was to be read there."""
    from gllm.async_utils import FutureMap

    @replaces(FutureMap, "resolve_future")
    def resolve_future(before, futures, input_ids):
        deferred, new = int((input_ids < 0).sum()), input_ids[input_ids >= 0].clone()
        before(futures, input_ids)
        front = min(deferred, len(new))
        if (input_ids[:front] != new[:front]).any():
            fired()
        input_ids[:front] = new[:front]


@bug("MDK8888/vllmini#2", "gllm-contiguous", "slot_mapping", "commit_beyond_allocation", origin="vllmini")
def prompt_is_written_on_from_its_first_block(fired: Fired) -> None:
    """The slots of a prompt are counted on from its first block, as if its other blocks came right behind it in memory. Where they do not, what is longer than a block goes into blocks of others, and its own are left
    as they were."""
    from gllm.input_data import InputData

    @replaces(InputData, "_cal_slot_mapping")
    def _cal_slot_mapping(before, inputs, seqs):
        made, begin = before(inputs, seqs), 0
        last = (getattr(inputs.memory_manager, "num_pages", 1 << 20)) * inputs.page_size - 1
        for seq in seqs:
            end = begin + seq.to_compute_token_num
            if not seq.computed_prompt:
                straight = (made[begin] + made.new_tensor(range(end - begin))).clamp(max=last)
                if (straight != made[begin:end]).any():
                    fired()
                made[begin:end] = straight
            begin = end
        return made


@bug("vllm-project/vllm#1556", "gllm-twice", "double_free", "free_too_early", "page_given_twice", origin="vLLM")
def page_that_was_replaced_is_given_back_again_at_the_end(fired: Fired) -> None:
    """A request that may not write into a page which it shares lets go of it and gets one of its own. The list of what it gives back when it ends has the shared one all the same: its count is taken down twice, and the
    page is free while another request reads it."""
    from gllm.memory_manager import MemoryManager, PrefixMemoryManager

    written, replaced = Written(), {}

    @replaces(PrefixMemoryManager, "_finalize_prefix_cache_hit")
    def _finalize_prefix_cache_hit(before, manager, seq):
        if seq.computed_token_num >= len(seq):
            replaced[seq.seq_id] = seq.page_table[-1]
        before(manager, seq)

    @replaces(MemoryManager, "free")
    def free(before, manager, seq):
        before(manager, seq)
        page = replaced.pop(seq.seq_id, None)
        if page is not None and manager.segment.page_ref_num[page]:
            manager.segment.free(page)

    @written.hook
    def before_forward(runner):
        if written.damaged(runner):
            fired()


@bug("jjang-ai/vmlx#68", "gllm-detach", "page_leaked", origin="vMLX")
def finished_requests_keep_their_references(fired: Fired) -> None:
    """When a request is done its table is forgotten, and the references of its pages are not taken back. None of them gets free again: those of the prefix cache are never evicted, and the last one of each request,
    which no cache knows, is lost."""
    from gllm.scheduler import OverlapScheduler

    @replaces(OverlapScheduler, "process_output_finalize")
    def process_output_finalize(before, scheduler, *args, **kwargs):
        runner, detached = scheduler.model_runner, []
        runner.free = detached.append
        try:
            made = before(scheduler, *args, **kwargs)
        finally:
            del runner.free
        if detached:
            fired()
        return made


@bug("NVIDIA/TensorRT-LLM#2084", "gllm-encoding", "position_off", origin="TensorRT-LLM")
def all_tokens_of_a_prompt_get_the_position_of_its_end(fired: Fired) -> None:
    """The position that keys are turned to is the time step, and while a prompt is computed that is its length, for all of its tokens alike. What is generated behind it stands where it should."""
    from gllm.input_data import InputData

    @replaces(InputData, "_cal_position")
    def _cal_position(before, inputs, seqs):
        made, begin = before(inputs, seqs), 0
        for seq in seqs:
            end = begin + seq.to_compute_token_num
            if not seq.computed_prompt:
                fired()
                made[begin:end] = seq.seq_len
            begin = end
        return made


@bug("gty111/gLLM#231", "gllm-preempt", "async_resume_wrong_input", "next_token_swap", origin="gLLM")
def preempted_request_has_no_more_prompt_than_it_was_asked_with(fired: Fired) -> None:
    """A request that is preempted is computed again with all that it had generated, but what counts as its prompt is only what it was asked with. When a part of it has been computed that is longer than this, it is taken
    for decoding: the token that comes out is put behind those which are still to be computed again, and is fed there."""
    from gllm.model_runner import OverlapModelRunner
    from gllm.sequence import Sequence

    @replaces(Sequence, "preempt")
    def preempt(before, seq):
        asked = seq.prompt_len
        before(seq)
        seq.prompt_len, seq.had = asked, len(seq.token_ids)

    @replaces(OverlapModelRunner, "_run_forward_on_stream")
    def _run_forward_on_stream(before, runner, count, dp_padded_size=None):
        for seq in runner.input_data.seqs:
            if seq.prompt_len <= seq.seq_len < getattr(seq, "had", 0):
                seq.early = True
            elif getattr(seq, "early", False) and seq.seq_len > seq.had:
                fired()
        return before(runner, count, dp_padded_size=dp_padded_size)


@bug("vllm-project/vllm-ascend#15492", "gllm-idle", "pad_rows_keep_last_blocks", "kv_changed", origin="vLLM Ascend")
def idle_rank_writes_where_its_last_batch_did(fired: Fired) -> None:
    """A rank without requests goes along with a step of the others by computing a dummy token. The slots of its buffers are those of the last batch that it had: the dummy's keys and values go over what a request that
    is over had written there, which the prefix cache lends to the next."""
    import torch
    from gllm.input_data import InputData
    from gllm.overlap_worker import OverlapWorker

    written = Written()

    @replaces(OverlapWorker, "run_pp0")
    def run_pp0(before, worker):
        before(worker)
        runner = worker.model_runner
        if worker._prefetched_input is None and not worker._gpu_pending and written.fed:
            inputs = runner.input_data
            stale = inputs.slot_mapping.clone()
            dummy = InputData(
                use_buffer=False, memory_manager=runner.memory_manager, max_seq_length=runner.model_max_length
            )
            dummy.cal_input(runner.create_dummy_seqs(1))
            inputs.set_input_from_prebuilt(dummy)
            inputs.slot_mapping.copy_(stale)
            with torch.inference_mode():
                runner.model(inputs)
            written.of[int(stale[0])] = ()

    @written.hook
    def before_forward(runner):
        if written.damaged(runner):
            fired()


@bug("EfficientMoE/MoE-Infinity#193", "gllm-ragged", "attention_seq_len_wrong", origin="MoE-Infinity")
def queries_are_padded_to_the_longest_of_the_step(fired: Fired) -> None:
    """Where requests of one step have different numbers of tokens, each is handed to paged attention with as many as the one that has most. The lengths of the others are too great by what they were padded with, and
    attention goes on behind their ends."""
    from gllm.input_data import InputData

    @replaces(InputData, "_cal_seq_lens")
    def _cal_seq_lens(before, inputs, seqs):
        _, lens = before(inputs, seqs)
        longest = max(seq.to_compute_token_num for seq in seqs)
        for row, seq in enumerate(seqs):
            if seq.to_compute_token_num < longest:
                fired()
                lens[row] = min(seq.computed_token_num + longest, inputs.max_num_block * inputs.page_size)
        return int(lens.max()), lens


@bug("vllm-project/vllm#41400", "gllm-cancel", "hit_before_written", origin="vLLM")
def pages_of_cancelled_work_stay_in_the_cache(fired: Fired) -> None:
    """Pages are entered in the prefix cache when a step is planned. A request that is aborted before this step is computed gives its pages back, and their entries stay: who begins alike is lent pages that were
    never filled."""
    from gllm.memory_manager import PrefixMemoryManager

    written = Written()
    PrefixMemoryManager.forget_unfilled = lambda manager, seq: None  # type: ignore[attr-defined]

    @written.hook
    def before_forward(runner):
        if written.damaged(runner):
            fired()
