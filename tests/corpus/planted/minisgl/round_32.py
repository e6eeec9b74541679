"""A thirty-second round of public bugs made anew in mini-sglang: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .round_31 import Written


@bug("hw-native-sys/pypto-lib#461", "mini-cut", "attention_seq_len_wrong", origin="pypto-lib")
def decode_gets_a_length_that_is_cut_to_a_window_already(fired: Fired) -> None:
    """The kernel of a decode step expects how long a request is, and is handed that length cut to 24, as it is for layers with a window. As soon as a request is longer, attention reads its first 24 tokens and nothing of what has come
    since, its own token included."""
    from minisgl.attention.fa import FlashAttentionBackend
    from minisgl.engine import Engine

    window = 24

    @replaces(FlashAttentionBackend, "prepare_for_replay")
    def prepare_for_replay(before, backend, batch):
        before(backend, batch)
        backend.capture.seq_lens[: batch.padded_size].clamp_(max=window)

    @replaces(Engine, "forward_batch")
    def forward_batch(before, engine, batch, args):
        if engine.graph_runner.can_use_cuda_graph(batch) and any(req.device_len > window for req in batch.reqs):
            fired()
        return before(engine, batch, args)


@bug("gittensor-ai-lab/sparkinfer#185", "mini-grow", "commit_beyond_allocation", "req_to_token", origin="SparkInfer")
def tokens_beyond_what_was_allocated_go_where_the_rows_last_owner_was(fired: Fired) -> None:
    """A request is given pages for its prompt and eight tokens more, and goes on for longer. The columns of its row behind these pages are not cleared: they name the pages of whoever had the row before, which are in the prefix
    cache, and the tokens are stored into them. Who hits that prefix reads what a stranger has answered."""
    from minisgl.scheduler.cache import CacheManager

    written = Written()
    reserved: dict[int, int] = {}  # request -> for how many tokens it gets pages

    @replaces(CacheManager, "allocate_paged")
    def allocate_paged(before, manager, reqs):
        for req in reqs:
            reserved.setdefault(req.uid, req.device_len + 8)
        before(manager, [req for req in reqs if req.extend_len > 1 or req.device_len <= reserved[req.uid]])

    @written.hook
    def before_forward(engine, batch):
        if written.damaged(engine, batch):
            fired()
