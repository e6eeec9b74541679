"""A twenty-fourth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


def _names_of_beams() -> dict[int, str]:
    """Return, of each row that is a beam, the name of the request whose beam it is; filled as beams begin."""
    from sglang.srt.beam_search.coordinator import BeamCoordinator

    whose: dict[int, str] = {}

    @replaces(BeamCoordinator, "_spawn_member_rows")
    def spawn(before, coordinator, group, leader):
        before(coordinator, group, leader)
        whose.update(dict.fromkeys(group.member_rows_cpu.tolist(), leader.rid))

    return whose


@bug("vllm-project/vllm#1584", "llama-beams", "double_free", "page_given_twice", origin="vLLM")
def each_beam_gives_back_what_its_row_names(fired: Fired) -> None:
    """Beams of one request go on from each other, and their rows name the same slots as far as they have a past in common. When the search ends each beam gives back what its row names,
    and a slot that three of them name is free three times."""
    from sglang.srt.beam_search import coordinator, fork

    whose = _names_of_beams()
    again: set[int] = set()
    owner: dict[int, str] = {}  # who wrote a slot last

    def free_member_rows(group, rows, allocator):
        if group.member_rows is None:
            return
        kv, start = group.leader.kv, group.prompt_len
        seen: set[int] = set()
        for row in group.all_rows.tolist() if kv.kv_allocated_len > start else ():
            slots = rows.req_to_token[row, start : kv.kv_allocated_len]
            again.update(seen & set(slots.tolist()))
            seen.update(slots.tolist())
            allocator.free(slots.clone())
        kv.kv_committed_len = kv.kv_allocated_len = start
        rows.free_rows(group.member_rows_cpu.tolist())
        group.member_rows = group.member_rows_cpu = group.all_rows = None

    fork.free_member_rows = coordinator.free_member_rows = free_member_rows

    def look(runner, batch, rows):
        beams = batch.req_pool_indices.tolist()[len(batch.rids) :]
        names = [*batch.rids, *(whose[row] for row in beams)]
        written, at = again & set(batch.out_cache_loc.tolist()), 0
        for name, (prefix, end, _) in zip(names, rows, strict=True):
            owner.update(dict.fromkeys(batch.out_cache_loc[at : at + end - prefix].tolist(), name))
            at += end - prefix
        for name, (_, _, slots) in zip(names, rows, strict=True):
            if written & set(slots) or any(slot in again and owner.get(slot, name) != name for slot in slots):
                fired()

    before_forward(look)


@bug("NVIDIA/TensorRT-LLM#14876", "llama-beams", "req_to_token", "fork_copy_missing", origin="TensorRT-LLM")
def begun_block_of_the_prompt_is_not_given_to_the_beams(fired: Fired) -> None:
    """The beams of a request begin with the blocks of its prompt, and the last of these is left out where the prompt has only begun it. That the beams have the whole prompt is said all
    the same: in the place of its last tokens they read what their rows' last owners had there."""
    from sglang.srt.beam_search import coordinator

    short: set[int] = set()

    def alias(table, rows, leader, length):
        whole = length // 16 * 16
        table[rows, :whole] = table[leader, :whole]
        if whole < length:
            short.update(rows.tolist())

    coordinator.alias_members_prompt_kv = alias

    def look(runner, batch, rows):
        if short & set(batch.req_pool_indices.tolist()[len(batch.rids) :]):
            fired()

    before_forward(look)


@bug("sgl-project/sglang#22790", "llama-session-abort", "tokens_truncated_hash_kept")
def turn_that_was_broken_off_stays_in_the_session(fired: Fired) -> None:
    """A turn of a session is aborted while it decodes, and what it has computed so far is kept as the session's. The next turn goes on behind the last one that came to its end: it takes
    the K and V of the aborted one for those of its own tokens."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.session.streaming_session import StreamingSession

    left: dict[str, set[int]] = {}  # by the turn that was aborted

    @replaces(StreamingSession, "try_cache_finished_req")
    def try_cache_finished_req(before, sessions, req):
        slot = sessions.borrowed_slot(req)
        if slot is None or not isinstance(req.finished_reason, FINISH_ABORT):
            return before(sessions, req)
        kv = req.kv
        kv.kv_committed_len = kv.kv_allocated_len
        past = len(req.origin_input_ids)
        table = sessions.cache.req_to_token_pool.req_to_token
        left[req.rid] = set(table[kv.req_pool_idx, past : kv.kv_committed_len].tolist())
        req.detach_kv()
        req.session.abort_req()
        return True

    def look(runner, batch, rows):
        for name, (_, _, slots) in zip(batch.rids, rows, strict=True):
            if any(name != turn and gone & set(slots) for turn, gone in left.items()):
                fired()

    before_forward(look)


@bug("sgl-project/sglang#30827", "llama-keys", "identity_not_in_key")
def key_and_salt_are_written_behind_one_another(fired: Fired) -> None:
    """A request has a key of its caller's and a tenant's salt, and the prefix cache keeps the two as one text with nothing between them. Two tenants whose texts are cut at different
    places have the same one, and hit each other's prefixes."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache import radix_cache

    tenants: dict[str, tuple] = {}
    owner: dict[int, tuple] = {}

    @replaces(Req, "__init__")
    def of_a_tenant(before, req, *args, **kwargs):
        before(req, *args, **kwargs)
        tenants[req.rid] = (req.extra_key, req.cache_salt)

    @replaces(radix_cache.RadixKey, "__init__")
    def init(before, key, token_ids, extra_key=None, *args, cache_salt=None, **kwargs):
        before(key, token_ids, (extra_key or "") + (cache_salt or "") or None, *args, **kwargs)

    def look(runner, batch, rows):
        at = 0
        for name, (prefix, end, slots) in zip(batch.rids, rows, strict=True):
            mine = tenants[name]
            if any(owner.get(slot, mine) != mine for slot in slots):
                fired()
            owner.update(dict.fromkeys(batch.out_cache_loc[at : at + end - prefix].tolist(), mine))
            at += end - prefix

    before_forward(look)


@bug("sgl-project/sglang#8144", "llama", "seq_len_backwards", "position_off", "resume_overwrites_tail", "req_to_token")
def first_half_of_a_prompt_leaves_its_length(fired: Fired) -> None:
    """A prompt is cut into two halves, which are run one behind the other, and the length that the first half ends with is written into the list that the whole batch has. Both halves
    are computed, and the request decodes as if there had been one: in the midst of its prompt."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    whole: dict[str, int] = {}

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        for name, end in zip(batch.rids, batch.seq_lens.tolist(), strict=True):
            if end <= whole.pop(name, 0):
                fired()
        done = before(runner, batch, *args, **kwargs)
        if batch.forward_mode.is_extend():
            counts = batch.extend_seq_lens.tolist()
            if counts[-1] > max(1, sum(counts[:-1])):  # the cut is inside of the last one
                whole[batch.rids[-1]] = int(batch.seq_lens[-1])
                rest = counts[-1] - sum(counts) // 2
                batch.seq_lens[-1] -= rest
                batch.seq_lens_cpu[-1] -= rest
        return done
