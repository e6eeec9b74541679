"""The rules: one kind of incident a module. Where two score alike, the one that stands first is ranked first."""

from typing import Final

from ..case import Rule
from . import (
    abort_frees_during_transfer,
    async_resume_wrong_input,
    chunk_tail_predicted_token,
    commit_beyond_allocation,
    double_free,
    draft_position_plus_one,
    eviction_of_locked_page,
    failed_load_counted_loaded,
    fork_copy_missing,
    free_too_early,
    future_map_overrun,
    groups_alias,
    hit_before_written,
    kv_changed,
    kv_write_damaged,
    kv_write_lost,
    next_token_swap,
    pad_rows_keep_last_blocks,
    pad_slot_wraps,
    page_given_twice,
    page_leaked,
    radix_insert_then_free,
    req_to_token,
    resume_overwrites_tail,
    row_reassigned_in_flight,
    seq_len_backwards,
    stale_swa_mapping,
    swa_window_off_by_one,
    tokens_truncated_hash_kept,
    transfer_wrong_stride,
)

_MODULES: Final = (
    row_reassigned_in_flight,
    seq_len_backwards,
    abort_frees_during_transfer,
    transfer_wrong_stride,
    failed_load_counted_loaded,
    swa_window_off_by_one,
    stale_swa_mapping,
    double_free,
    page_given_twice,
    radix_insert_then_free,
    eviction_of_locked_page,
    free_too_early,
    hit_before_written,
    fork_copy_missing,
    resume_overwrites_tail,
    commit_beyond_allocation,
    req_to_token,
    pad_slot_wraps,
    pad_rows_keep_last_blocks,
    groups_alias,
    kv_write_lost,
    kv_write_damaged,
    kv_changed,
    draft_position_plus_one,
    chunk_tail_predicted_token,
    async_resume_wrong_input,
    future_map_overrun,
    next_token_swap,
    tokens_truncated_hash_kept,
    page_leaked,
)

RULES: Final[dict[str, Rule]] = {module.RULE.kind: module.RULE for module in _MODULES}

UNKNOWN: Final = "unknown"
