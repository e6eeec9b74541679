"""A forty-third round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward
from .round_40 import once_it_reads_what_came_back_wrong


@bug("hw-native-sys/pypto-lib#414", "llama-page8-wide", "slot_mapping", origin="PyPTO-Lib")
def answers_are_stored_behind_the_first_page_as_if_all_followed(fired: Fired) -> None:
    """The kernel that stores what is new of an answer looks up a request's first page in its table and counts on from
    there, as if all pages of a request lay one behind the other. Whoever has others' pages in between has its tokens
    put into those; who reads goes by the table, page by page."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    @replaces(ModelRunner, "_forward_raw")
    def _forward_raw(before, runner, batch, *args, **kwargs):
        own = batch.out_cache_loc
        if not batch.forward_mode.is_decode():
            return before(runner, batch, *args, **kwargs)
        first = runner.req_to_token_pool.req_to_token[batch.req_pool_indices, 0]
        there = (first + batch.seq_lens - 1).to(own.dtype)
        assert int(there.max()) < len(runner.token_to_kv_pool.k_buffer[0])
        if not there.equal(own):
            fired()
            batch.out_cache_loc = there
        try:
            return before(runner, batch, *args, **kwargs)
        finally:
            batch.out_cache_loc = own


@bug(
    "LMCache/LMCache#5032",
    "llama-host-lossy-twice-storage",
    "stored_wrong",
    "failed_load_counted_loaded",
    origin="LMCache",
)
def page_that_could_not_be_read_is_put_into_the_storage(fired: Fired) -> None:
    """What is read from the storage gets its places on the host before. When a page cannot be read, its place is to be
    given up, but it is first said to be written, as if that were how to let go of it. Whoever copies what is new on the
    host to the storage takes it then: what that memory was left with is stored by the name of the page that was lost,
    and the next one who asks for that page hits it."""
    from pathlib import Path

    from sglang.srt.managers.cache_controller import HiCacheController

    @replaces(HiCacheController, "_generic_page_get")
    def _generic_page_get(before, controller, operation, hash_values, host_indices, extra_info=None):
        count = before(controller, operation, hash_values, host_indices, extra_info)
        pool, storage, size = controller.storage_host_pool, controller.storage_backend, controller.page_size
        if count < len(hash_values) and not operation.is_terminated():
            lost = hash_values[count]
            Path(storage.file_path, f"{storage._get_suffixed_key(lost)}.bin").unlink(missing_ok=True)
            storage.set(lost, pool.get_data_page(host_indices[count * size]))
        return count

    once_it_reads_what_came_back_wrong(fired)


# In the first layer, too: no token has such a key.
@bug(
    "1bit-MONSTER/1bit-MONSTER#2344",
    "llama-overlap-page2-alone",
    "kv_write_damaged",
    "not_of_the_model",
    origin="1bit-MONSTER",
)
def staging_of_the_keys_is_filled_with_values_before_it_is_read(fired: Fired) -> None:
    """The key of a token that is answered is put into a buffer on the host, a copy of that into the cache is asked for,
    and the same buffer is filled with the value for the next copy. Copies wait for one another and not for the host: by
    the time that the first one reads the buffer, the value is there, and the cache has it in both places."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    one_by_one: list[bool] = [False]

    @replaces(MHATokenToKVPool, "_store_kv_layer")
    def _store_kv_layer(before, pool, layer, loc, keys, values, *args, **kwargs):
        return before(pool, layer, loc, values if one_by_one[0] else keys, values, *args, **kwargs)

    def look(runner, batch, rows):
        one_by_one[0] = batch.forward_mode.is_decode()
        if one_by_one[0]:
            fired()

    before_forward(look)


@bug(
    "nntrainer/nntrainer#3808",
    "llama-page16-rounds",
    "not_of_the_model",
    origin="NNTrainer",
    late="not found: too few of its tokens come again for what they hold to be learnt without a model",
)
def what_is_computed_from_later_on_is_fed_the_beginning(fired: Fired) -> None:
    """A prompt may be computed from later on, when it comes in pieces or when its beginning is in the cache. From where
    on is told to all layers. The one that looks up the tokens counts how many there are and takes that many from the
    front of the prompt; what it hands on is placed, and stored, where the later tokens should be."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from sglang.srt.managers.schedule_batch import Req

    asked: dict[str, Req] = {}
    fed: list[torch.Tensor] = []  # the tokens that are looked up in this forward, if they are not its own

    @replaces(Req, "__init__")
    def init(before, req, rid, *args, **kwargs):
        before(req, rid, *args, **kwargs)
        asked[rid] = req

    @replaces(VocabParallelEmbedding, "forward")
    def forward(before, layer, tokens, *args, **kwargs):
        return before(layer, fed[0] if fed else tokens, *args, **kwargs)

    def look(runner, batch, rows):
        fed.clear()
        if not batch.forward_mode.is_extend():
            return
        at, wrong = 0, batch.input_ids.clone()
        for rid, (past, end, _) in zip(batch.rids, rows, strict=True):
            count = end - past
            if past and rid in asked:
                front = list(asked[rid].origin_input_ids)[:count]
                wrong[at : at + len(front)] = torch.tensor(front, dtype=wrong.dtype)
            at += count
        if not wrong.equal(batch.input_ids):
            fired()
            fed.append(wrong)

    before_forward(look)


@bug("kekzl/imp#986", "llama-page8-chunks", "attention_seq_len_wrong", origin="imp")
def later_chunks_are_replayed_with_the_reach_of_the_first(fired: Fired) -> None:
    """A prompt's first chunk is captured in a graph, and a later one of the same length is a replay of that. Where its
    tokens are stored is handed to the replay. How much there is to look at, and how much of it stands in front of the
    chunk, was written into the graph: each later chunk looks at the first one's places, as if it were that one."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    captured: dict[str, tuple[int, int]] = {}  # of a prompt: where its first chunk began, and where it ended

    @replaces(ModelRunner, "_forward_raw")
    def _forward_raw(before, runner, batch, *args, **kwargs):
        if not batch.forward_mode.is_extend():
            return before(runner, batch, *args, **kwargs)
        ends, pasts = batch.seq_lens, batch.extend_prefix_lens
        baked = []
        for rid, past, end in zip(batch.rids, pasts.tolist(), ends.tolist(), strict=True):
            first = captured.setdefault(rid, (past, end))
            baked.append(first if first[1] - first[0] == end - past else (past, end))
        if [end for _, end in baked] != ends.tolist():
            fired()
            batch.extend_prefix_lens = pasts.new_tensor([past for past, _ in baked])
            batch.seq_lens = ends.new_tensor([end for _, end in baked])
        try:
            return before(runner, batch, *args, **kwargs)
        finally:
            batch.seq_lens, batch.extend_prefix_lens = ends, pasts
