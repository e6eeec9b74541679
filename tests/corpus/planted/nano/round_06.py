"""A sixth round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("NVIDIA/TensorRT-LLM#11696", "nano", "attention_seq_len_wrong", origin="TensorRT-LLM")
def length_drifts(fired: Fired) -> None:
    """The lengths that attention gets are kept on the device and moved on each step, and what is added for a step is not taken back
    by the next. They grow away from what the requests have."""
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.utils.context import get_context

    drift = [0]

    @replaces(ModelRunner, "prepare_decode")
    def prepare_decode(before, runner, seqs):
        made = before(runner, seqs)
        lens, room = get_context().context_lens, get_context().block_tables.shape[1] * runner.block_size
        if drift[0]:
            fired()
        lens.copy_((lens + drift[0]).clamp(max=room))
        drift[0] += 1
        return made
