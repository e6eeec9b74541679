"""A nineteenth round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug(
    "tenstorrent/vllm-tt-plugin#57",
    "nano-few",
    "async_resume_wrong_input",
    "future_map_overrun",
    origin="vLLM TT plugin",
)
def resumed_with_the_token_from_before_it_was_paused(fired: Fired) -> None:
    """The runner remembers the last token of each request and is not told when a request's outputs have changed without it. One that was preempted and has come back is fed the
    token that it had when it was paused, in its first decode behind that."""
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.engine.scheduler import Scheduler

    paused: dict[int, int] = {}

    @replaces(Scheduler, "preempt")
    def preempt(before, scheduler, seq):
        paused[seq.seq_id] = seq.last_token
        before(scheduler, seq)

    @replaces(ModelRunner, "prepare_decode")
    def prepare_decode(before, runner, seqs):
        ids, positions = before(runner, seqs)
        for place, seq in enumerate(seqs):
            token = paused.pop(seq.seq_id, None)
            if token is not None and token != int(ids[place]):
                fired()
                ids[place] = token
        return ids, positions
