"""Which traces the analysis tests use."""

from kvcanary.recorder.engines.simulated.workloads import RandomWorkload

# Of the traces in data/: fork and de-duplication, sliding windows, a byte flipped, a table entry swapped.
REAL = ("clean_fork_dedup_evict", "clean_hybrid", "kv_flip_sliding", "table_swap")
WORKLOAD = RandomWorkload(
    requests=12, prompt_tokens=40, output_tokens=15, max_tokens=150, sharing=0.8, fork_rate=0.2, abort_rate=0.1
)
CONFIGS = {
    "paged": {"page_size": 4, "num_pages": 60, "chunk_tokens": 32},
    "sliding": {"page_size": 2, "num_pages": 200, "shape": "swa", "window": 16, "swa_num_pages": 90},
    "eagle": {"page_size": 2, "num_pages": 200, "eagle": True},
    "host": {"page_size": 4, "num_pages": 50, "host_pages": 40, "sweep_interval": 5},
    "overlap": {"page_size": 1, "num_pages": 300, "overlap": True, "graph_batch_sizes": (3, 6)},
}
