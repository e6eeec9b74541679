"""How often each mechanism of the engine came to act; what a test asks before it believes a clean run."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Everything counts occurrences, except names that say tokens, pages or slots."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    refused: int = 0  # too long for a row or the pool
    forwards: int = 0
    target_forwards: int = 0
    tokens: int = 0  # computed by target forwards, padding not counted
    prefill_tokens: int = 0
    output_tokens: int = 0
    prefill_chunks: int = 0  # that were not a prompt's last
    mixed_forwards: int = 0
    idle_forwards: int = 0
    padded_forwards: int = 0
    cache_hits: int = 0
    cache_hit_tokens: int = 0
    inserted_pages: int = 0
    deduplicated_pages: int = 0
    evicted_pages: int = 0
    retractions: int = 0
    preemptions: int = 0
    resumed: int = 0
    forks: int = 0
    fork_copied_slots: int = 0
    window_freed_pages: int = 0  # of the sliding-window pool, by running requests
    window_evicted_pages: int = 0  # of the sliding-window pool, by the prefix cache
    window_remapped_pages: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    offloaded_pages: int = 0
    loaded_pages: int = 0
    host_dropped_pages: int = 0
    sweeps: int = 0
    swept_slots: int = 0
    transfers: int = 0
    failed_transfers: int = 0
    overruns: int = 0  # forwards of a request that had finished, overlap scheduling

    def to_json(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)
