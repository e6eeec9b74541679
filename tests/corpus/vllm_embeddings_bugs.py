"""A bug of prompts that are embeddings, in vLLM 0.32 on the CPU."""

from bugs import Fired, bug, replaces
from vllm_marks import when_allocated


@bug("vllm-project/vllm#28738", "llama-embeds", "identity_not_in_key", "tokens_truncated_hash_kept")
def embeddings_are_left_out_of_the_key(fired: Fired) -> None:
    """A prompt is given as embeddings, and its tokens are noughts that stand for them. What is embedded is left out of a block's key, and a prompt of other embeddings hits the
    blocks of the first one that is as long."""
    from vllm.v1.core import kv_cache_utils

    @replaces(kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys")
    def keys(before, request, start, end):
        return []

    # All embeddings of the setup differ: whatever such a request hits is another's.
    when_allocated(lambda request, hit, _: hit and request.prompt_embeds is not None and fired())
