"""A fifty-second round of public bugs made anew in gLLM on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

FITS = 65504  # the greatest number of 16 bits
GATHERED = 32  # rows that are found again
CAPTURED = 24  # tokens of the longest prompt that a graph computes


@bug(
    "vllm-project/vllm#9744",
    "gllm-reloads",
    "cache_kept_over_new_weights",
    origin="vLLM",
    late="not found: nobody tells the recorder of new weights",
)
def new_policy_answers_on_what_the_old_one_computed(fired: Fired) -> None:
    """Between two rounds of training the model gets new weights, and nothing tells the prefix cache. Who begins as a prompt
    of the round before is lent its pages, which the old weights have computed, and only the rest is computed by the
    new ones."""
    from gllm.memory_manager import PrefixMemoryManager
    from gllm.model_runner import OverlapModelRunner

    rounds = [0]
    written: dict[int, int] = {}  # slot -> in which round

    def forget_cached(manager) -> None:
        rounds[0] += 1

    PrefixMemoryManager.forget_cached = forget_cached  # type: ignore[attr-defined]

    @replaces(OverlapModelRunner, "_run_forward_on_stream")
    def _run_forward_on_stream(before, runner, count, dp_padded_size=None):
        inputs, page = runner.input_data, runner.page_size
        for row, seq in enumerate(inputs.seqs):
            pages = inputs.block_table[row].tolist()
            slots = [pages[place // page] * page + place % page for place in range(seq.computed_token_num)]
            if any(written.get(slot, rounds[0]) < rounds[0] for slot in slots):
                fired()
        written.update(dict.fromkeys(inputs.slot_mapping[: len(inputs.tokens_cpu)].tolist(), rounds[0]))
        return before(runner, count, dp_padded_size=dp_padded_size)


@bug("microsoft/onnxruntime#29034", "gllm-half", "bad_values_written", origin="ONNX Runtime")
def squares_are_added_up_in_sixteen_bits(fired: Fired) -> None:
    """The kernel that adds a layer's output and normalizes it adds up the squares in the type of the values, which has 16
    bits. Where values are great the sum is infinite, and what is divided by it is zero: keys and values of such a token
    are zeros in all layers but the first."""
    import sys

    from gllm.model_runner import OverlapModelRunner

    def too_great(values):
        return values.float().pow(2).mean(-1) > FITS

    @replaces(sys.modules["gllm._custom_ops"], "fused_add_rms_norm")
    def fused_add_rms_norm(before, x, residual, weight, eps):
        before(x, residual, weight, eps)
        x[too_great(residual)] = 0

    @replaces(OverlapModelRunner, "_run_forward_on_stream")
    def _run_forward_on_stream(before, runner, count, dp_padded_size=None):
        if too_great(runner.model.model.embed_tokens.weight[runner.input_data.tokens[:count]]).any():
            fired()
        return before(runner, count, dp_padded_size=dp_padded_size)


@bug("raullenchai/Rapid-MLX#994", "gllm-exact", "position_off", origin="Rapid-MLX")
def last_token_of_a_prompt_that_is_known_whole_is_fed_once_more(fired: Fired) -> None:
    """All of a prompt is found in the cache, and its last token is computed again to have something to go on from. What was
    found is not made shorter by one: the token is fed at the place behind itself and kept there a second time, and all
    that is generated stands one place too far."""
    from gllm.input_data import InputData
    from gllm.memory_manager import PrefixMemoryManager
    from gllm.model_runner import OverlapModelRunner
    from gllm.sequence import Sequence

    def twice(seq):
        return getattr(seq, "twice", False)

    def rows(seqs):
        begin = 0
        for seq in seqs:
            yield seq, slice(begin, begin + seq.to_compute_token_num)
            begin += seq.to_compute_token_num

    @replaces(PrefixMemoryManager, "_finalize_prefix_cache_hit")
    def _finalize_prefix_cache_hit(before, manager, seq):
        if seq.computed_token_num < len(seq):
            return before(manager, seq)
        seq.computed_token_num, seq.twice = len(seq) - 1, True
        return None

    @replaces(Sequence, "preempt")
    def preempt(before, seq):
        before(seq)
        seq.twice = False

    @replaces(PrefixMemoryManager, "pre_allocate_page")
    def pre_allocate_page(before, manager, seqs):
        before(manager, seqs)
        for seq in filter(twice, seqs):
            while len(seq.page_table) * manager.page_size <= seq.seq_len:
                seq.page_table.append(manager.segment.allocate())

    @replaces(InputData, "_cal_position")
    def _cal_position(before, inputs, seqs):
        made = before(inputs, seqs)
        for seq, span in rows(seqs):
            made[span] += int(twice(seq))
        return made

    @replaces(InputData, "_cal_slot_mapping")
    def _cal_slot_mapping(before, inputs, seqs):
        made, page = before(inputs, seqs), inputs.page_size
        for seq, span in rows(seqs):
            if twice(seq):
                made[span] = seq.page_table[seq.seq_len // page] * page + seq.seq_len % page
        return made

    @replaces(InputData, "_cal_seq_lens")
    def _cal_seq_lens(before, inputs, seqs):
        _, lens = before(inputs, seqs)
        for row, seq in enumerate(seqs):
            lens[row] += int(twice(seq))
        return int(lens.max()), lens

    @replaces(OverlapModelRunner, "_run_forward_on_stream")
    def _run_forward_on_stream(before, runner, count, dp_padded_size=None):
        if any(map(twice, runner.input_data.seqs)):
            fired()
        return before(runner, count, dp_padded_size=dp_padded_size)


@bug(
    "tenstorrent/tt-xla#5929",
    "gllm-gathers",
    "next_token_swap",
    origin="TT-XLA",
    late="not found: what a row of the sampler is computed from is not recorded",
)
def token_is_sampled_from_a_row_of_another_request(fired: Fired) -> None:
    """What the last token of each request has become is picked out of all tokens of the step, which are one list to the
    device. From a certain place in it on another row comes back, and a request whose tokens stand that far behind goes
    on with the token that follows on a part of somebody else's prompt."""
    from gllm.model_runner import OverlapModelRunner
    from gllm.models.qwen2 import Qwen2ForCausalLM

    wrong: set[int] = set()  # whose token is another's

    @replaces(Qwen2ForCausalLM, "compute_logits")
    def compute_logits(before, model, inputs, hidden):
        right = before(model, inputs, hidden)
        ends = inputs.get_query_start_loc()[1:] - 1
        made = model.logits_from_hidden(hidden[ends.where(ends < GATHERED, ends % GATHERED).long()])
        for row, seq in enumerate(inputs.seqs):
            if seq.seq_len >= seq.prompt_len and made[row].argmax() != right[row].argmax():
                wrong.add(seq.seq_id)
        return made

    @replaces(OverlapModelRunner, "_run_forward_on_stream")
    def _run_forward_on_stream(before, runner, count, dp_padded_size=None):
        if wrong.intersection(seq.seq_id for seq in runner.input_data.seqs):
            fired()
        return before(runner, count, dp_padded_size=dp_padded_size)


@bug(
    "sgl-project/sglang#32703",
    "gllm-adapters",
    "computed_with_other_weights",
    "not_of_the_model",
    origin="SGLang",
    late="not found: the adapters are not the engine's, and nobody tells the recorder of them",
)
def graph_of_prompts_was_captured_without_an_adapter(fired: Fired) -> None:
    """The graph that computes prompts is captured before any adapter is made ready, and has none in it. Prompts that are short
    enough for it, and have no one who decodes beside them, are computed by the model as it is: their adapter is used
    from their first answer on."""
    from gllm.model_runner import OverlapModelRunner

    @replaces(OverlapModelRunner, "_run_forward_on_stream")
    def _run_forward_on_stream(before, runner, count, dp_padded_size=None):
        if count <= CAPTURED and not any(seq.computed_prompt for seq in runner.input_data.seqs):
            if runner.adapter_of_token[:count].any():
                fired()
            runner.adapter_of_token.zero_()
        return before(runner, count, dp_padded_size=dp_padded_size)


@bug("jundot/omlx#1450", "gllm-rejects", "page_leaked", origin="oMLX")
def prompt_that_is_refused_half_way_keeps_its_pages(fired: Fired) -> None:
    """A request that is refused while its prompt is computed, for want of memory, is taken off the lists and answered with an
    error. What it holds is given back only where requests end as they should: the pages that it has hit stay pinned, and
    those that it got are lost."""
    from gllm.scheduler import Scheduler

    @replaces(Scheduler, "check_abort_seqs_list")
    def check_abort_seqs_list(before, scheduler, seqs, package):
        if seqs is not scheduler.seqs_to_prefill:
            return before(scheduler, seqs, package)
        runner, kept = scheduler.model_runner, []
        runner.free = kept.append
        try:
            before(scheduler, seqs, package)
        finally:
            del runner.free
        if any(seq.page_table for seq in kept):
            fired()
        return None
