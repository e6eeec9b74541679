"""A thirty-sixth round of public bugs made anew in gLLM: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .round_35 import Written


@bug(
    "vllm-project/vllm-ascend#1492", "gllm-whole", "attention_seq_len_wrong", "attention_table_overwritten", "req_to_token",
    origin="vLLM Ascend",
)  # fmt: skip
def prompt_behind_a_hit_attends_to_itself_alone(fired: Fired) -> None:
    """Where prompts are computed in one piece, attention takes it that there is nothing before them. One that hits its beginning is given the pages and the length of what is computed now, and looks at none of
    what it has hit."""
    from gllm.input_data import InputData

    def hit(seq):
        return 0 if seq.computed_prompt else seq.computed_token_num

    @replaces(InputData, "_cal_block_table")
    def _cal_block_table(before, inputs, seqs):
        made = before(inputs, seqs)
        for row, seq in enumerate(seqs):
            if pages := hit(seq) // inputs.page_size:
                fired()
                own = made[row, pages:].clone()
                made[row] = 0
                made[row, : len(own)] = own
        return made

    @replaces(InputData, "_cal_seq_lens")
    def _cal_seq_lens(before, inputs, seqs):
        _, lens = before(inputs, seqs)
        for row, seq in enumerate(seqs):
            lens[row] -= hit(seq)
        return int(lens.max()), lens


@bug("OpenPPL/ppl.llm.serving#70", "gllm-digests", "tokens_truncated_hash_kept", origin="ppl.llm.serving")
def pages_of_one_digest_are_taken_for_each_other(fired: Fired) -> None:
    """A page is kept under a short digest of its tokens and of what comes before them, and nothing else of them is compared. Two beginnings that have the same digest are one to the cache: who asks with the one is lent
    what was computed of the other."""
    from gllm import memory_manager

    written = Written()

    @replaces(memory_manager, "_ensure_page_hash")
    def _ensure_page_hash(before, seq, page_size, page_idx):
        return before(seq, page_size, page_idx) % 53 + 1

    @replaces(memory_manager, "_ensure_canary")
    def _ensure_canary(before, seq):
        return ()

    @written.hook
    def before_forward(runner):
        if written.damaged(runner):
            fired()


@bug(
    "guoqingbao/xinfer#405", "gllm-swaps", "scheduled_after_retraction", "free_too_early", origin="xinfer"
)  # fmt: skip
def request_that_cannot_come_back_runs_once_more(fired: Fired) -> None:
    """A request that has lost its pages is to come back, and there is no room for it: it is ended, and put with those that run all the same. In the next step it is computed over the table that it had, whose pages are free or
    others', and only then forgotten."""
    from gllm.scheduler import Scheduler

    lost: dict[int, tuple] = {}
    ended: set[int] = set()

    @replaces(Scheduler, "check_preempt")
    def check_preempt(before, scheduler, *args):
        had = {seq.seq_id: (list(seq.page_table), seq.computed_token_num) for seq in scheduler.seqs_to_decode}
        before(scheduler, *args)
        waiting = {seq.seq_id for seq in scheduler.seqs_to_prefill}
        lost.update({number: state for number, state in had.items() if number in waiting})

    @replaces(Scheduler, "schedule_once")
    def schedule_once(before, scheduler):
        for seq in [seq for seq in scheduler.seqs_to_decode if seq.seq_id in ended]:
            scheduler.seqs_to_decode.remove(seq)
        made = before(scheduler)
        for seq in list(scheduler.seqs_to_prefill):
            if seq.seq_id in lost and seq.seq_id not in ended and seq not in made:
                seq.page_table, seq.computed_token_num = lost[seq.seq_id]
                seq.prompt_len = seq.computed_token_num
                scheduler.seqs_to_prefill.remove(seq)
                scheduler.seqs_to_decode.appendleft(seq)
                ended.add(seq.seq_id)
        if ended.intersection(seq.seq_id for seq in made):
            fired()
        return made
