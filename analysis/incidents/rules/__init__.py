"""The rules: a kind of incident each, in a file for what went wrong. Of two that score alike the first here is ranked first."""

from typing import Final

from ..cluster import Rule
from . import allocation, cached, copies, inputs, kv_bytes, table, writing

_RULES: Final = (
    allocation.scheduled_after_retraction,
    table.row_reassigned_in_flight,
    inputs.seq_len_backwards,
    inputs.position_off,
    writing.slot_mapping,
    cached.abort_frees_during_transfer,
    cached.transfer_wrong_stride,
    copies.stored_wrong,
    copies.layout_misread,
    copies.load_landed_elsewhere,
    copies.read_before_landed,
    copies.load_of_other_prefix,
    cached.failed_load_counted_loaded,
    cached.host_copy_overwritten,
    cached.copy_failed,
    table.swa_window_off_by_one,
    inputs.window_read_wrong,
    table.stale_swa_mapping,
    inputs.attention_table_overwritten,
    inputs.attention_seq_len_wrong,
    allocation.double_free,
    allocation.stale_prefix_hit,
    allocation.page_given_twice,
    allocation.radix_insert_then_free,
    allocation.eviction_of_locked_page,
    allocation.free_too_early,
    cached.hit_before_written,
    writing.shared_page_written,
    cached.fork_copy_missing,
    cached.prefix_not_computed,
    table.resume_overwrites_tail,
    writing.commit_beyond_allocation,
    table.req_to_token,
    writing.pad_slot_wraps,
    writing.pad_rows_keep_last_blocks,
    kv_bytes.groups_alias,
    kv_bytes.kv_write_lost,
    kv_bytes.kv_write_damaged,
    kv_bytes.not_of_the_model,
    kv_bytes.computed_with_other_weights,
    kv_bytes.kv_changed,
    kv_bytes.layer_changed,
    kv_bytes.bad_values_written,
    inputs.draft_position_plus_one,
    inputs.chunk_tail_predicted_token,
    inputs.async_resume_wrong_input,
    inputs.future_map_overrun,
    inputs.next_token_swap,
    cached.tokens_truncated_hash_kept,
    cached.identity_not_in_key,
    cached.cache_kept_over_new_weights,
    cached.state_restored_for_other_prefix,
    allocation.page_leaked,
)

RULES: Final[dict[str, Rule]] = {one.kind: one for one in _RULES}

UNKNOWN: Final = "unknown"
