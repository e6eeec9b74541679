"""A twenty-fourth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug(
    "huggingface/transformers#48918", "llama", "req_to_token", "shared_page_written", "row_reassigned_in_flight"
)
def two_requests_of_one_name_have_one_table(fired: Fired) -> None:
    """A client may name its request, and what the engine keeps of a request it keeps by that name. Two requests that overlap have the same one: the second finds a table of blocks that
    is long enough, and writes its prompt into the blocks that the first is reading."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    def said(name: str) -> str:
        return "d" if name == "e" else name  # what its client calls it

    class ByName(dict):
        def __getitem__(self, name):
            return super().get(said(name), [])  # the other one may have ended

        def __setitem__(self, name, blocks):
            super().__setitem__(said(name), blocks)

        def __contains__(self, name):
            return super().__contains__(said(name))

        def get(self, name, default=None):
            return super().get(said(name), default)

        def pop(self, name, *default):
            return super().pop(said(name), *default)

    @replaces(cache_allocator.CacheAllocator, "_before_cache_tensor_init")
    def init(before, allocator, *args, **kwargs):
        before(allocator, *args, **kwargs)
        allocator.block_table = ByName()

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        if {"d", "e"} <= {future.state.request_id for future in requests_in_batch}:
            fired()
        before(io, requests_in_batch, *args, **kwargs)
