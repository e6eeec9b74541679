"""What a simulated engine is: pool shape, sizes, scheduling policy; what it counts, and how it fails.

Everything that happens follows from the configuration and a seed.
"""

from dataclasses import asdict, dataclass
from typing import Final


class WorkloadError(Exception):
    """A workload file that cannot be used; `str()` names file, line, what was expected and what came."""


class BrokenEngineError(Exception):
    """The simulated engine caught itself in a mistake that a real engine would have made in silence."""


SHAPES: Final = ("mha", "mla", "swa", "dsv4")
SAMPLERS: Final = ("oracle", "content", "random")
FREE_ORDERS: Final = ("lifo", "fifo", "shuffled")
ROLES: Final = ("", "prefill", "decode")
GRAPH_BATCH_SIZES: Final = (1, 2, 4, 8, 16, 24, 32)
SLIDE_TOKENS: Final = 8
SLIDING_SHAPES: Final = ("swa", "dsv4")


def check_numbers(given: object, *, positive: str = "", chances: str = "") -> None:
    """Raise `ValueError` if a field named in `positive` is below 1, or one named in `chances` is not from 0 to 1."""
    for name in positive.split():
        if getattr(given, name) < 1:
            raise ValueError(f"{name} is {getattr(given, name)}, expected at least 1")
    for name in chances.split():
        if not 0.0 <= getattr(given, name) <= 1.0:
            raise ValueError(f"{name} is {getattr(given, name)}, expected 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine."""

    seed: int = 0  # of the engine's own choices: numeric noise, random sampling, wrong draft guesses
    # "mha": K and V. "mla": K only. "swa": a full pool and a sliding-window pool behind a full-to-SWA table. "dsv4": the
    # canary looks at the sliding-window pool only, K only, no KV bytes.
    shape: str = "mha"
    page_size: int = 1  # tokens a page; slot = page * page_size + offset, page 0 is padding
    num_pages: int = 1024  # of the full pool, page 0 not counted
    swa_num_pages: int = 0  # of the sliding-window pool; 0: num_pages // 2, at least what one request needs
    window: int = 48  # positions before the prefix's end that a sliding layer reads
    rows: int = 17  # of req_to_token, the padding row 0 included
    width: int = 1024  # positions of a row, hence the longest request
    kv_bytes_per_token: int = 32  # of one slot in each captured layer and half, a multiple of 16
    noise: bool = True  # equal content computed twice gives KV bytes that differ in their low bits, as on a GPU
    chunk_tokens: int = 128  # that one prefill forward computes at most
    max_running: int = 12  # requests that hold a row at the same time
    max_waiting: int = 64  # requests taken off the workload ahead of time
    mixed: bool = False  # prefill forwards carry the running requests' decodes too
    prefix_cache: bool = True  # keep finished prefixes in a radix tree
    host_pages: int = 0  # of the host tier that evicted prefixes move to, 0 for none
    graph_batch_sizes: tuple[int, ...] = GRAPH_BATCH_SIZES  # that decode forwards are padded to, () for no padding
    # "oracle": the hash oracle. "content": a function of the context, equal prompts have equal answers. "random": a
    # function of seed, request and position.
    sampler: str = "oracle"
    vocab_size: int = 32_000  # tokens are 0 .. vocab_size - 1
    eagle: bool = False  # draft and verify, top-k 1
    draft_tokens: int = 3  # guessed in each round
    accept_rate: float = 0.6  # chance that one guess is right
    idle_forwards: bool = True  # record an idle forward whenever there is nothing to do
    # "lifo" hands out the page freed last, "fifo" the one freed first, "shuffled" as "lifo" from an order by seed, so
    # that pages do not follow one another.
    free_order: str = "lifo"
    sweep_interval: int = 0  # target forwards between two walks of the prefix cache, 0 for none
    overlap: bool = False  # a forward is launched before the host has seen what the one before it sampled
    role: str = ""  # "prefill" or "decode" for the half of a pair, "" for an engine that does both
    submitted: bool = False  # record what the model hands to the pools, beside what they hold after the forward
    reads_given: bool = False  # record the positions and slots that attention reads in place of req_to_token (dsv4)

    def __post_init__(self) -> None:
        """Raise `ValueError` on anything the engine could not run with."""
        named = {"shape": SHAPES, "sampler": SAMPLERS, "free_order": FREE_ORDERS, "role": ROLES}
        for name, allowed in named.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        positive = "page_size num_pages window width chunk_tokens max_running max_waiting"
        check_numbers(self, positive=positive, chances="accept_rate")
        if self.rows <= self.max_running:
            raise ValueError(
                f"rows is {self.rows}, expected more than max_running, {self.max_running}: row 0 is padding"
            )
        if self.chunk_tokens < self.page_size:
            raise ValueError(f"chunk_tokens is {self.chunk_tokens}, expected at least page_size, {self.page_size}")
        if self.kv_bytes_per_token < 16 or self.kv_bytes_per_token % 16:
            raise ValueError(f"kv_bytes_per_token is {self.kv_bytes_per_token}, expected a positive multiple of 16")
        if not 2 <= self.vocab_size < 1 << 31:
            raise ValueError(f"vocab_size is {self.vocab_size}, expected 2 to {(1 << 31) - 1}")
        if self.sweep_interval < 0:
            raise ValueError(f"sweep_interval is {self.sweep_interval}, expected 0 (never) or a number of forwards")
        if any(size < 1 for size in self.graph_batch_sizes):
            raise ValueError(f"graph_batch_sizes are {self.graph_batch_sizes}, expected positive sizes")
        if self.swa_num_pages and self.swa_num_pages < self.least_swa_pages:
            raise ValueError(
                f"swa_num_pages is {self.swa_num_pages}, expected at least {self.least_swa_pages}: "
                "one window, one chunk and what a decode adds"
            )
        if self.host_pages and (self.sliding or not self.prefix_cache):
            raise ValueError("host_pages needs the prefix cache, and a shape without sliding layers (mha, mla)")
        if self.eagle and self.draft_tokens < 1:
            raise ValueError(f"draft_tokens is {self.draft_tokens}, expected at least 1")
        if self.eagle and self.mixed:
            raise ValueError("eagle and mixed exclude one another: a verify forward is not mixed with prefill")
        if self.sweep_interval and not self.prefix_cache:
            raise ValueError("sweep_interval needs the prefix cache: it is what a sweep walks")
        if self.eagle and self.overlap:
            raise ValueError("eagle and overlap exclude one another: a verify forward needs what was sampled before it")
        if self.reads_given and self.shape != "dsv4":
            raise ValueError(
                "reads_given needs the shape dsv4: beside full layers nobody knows how much sliding ones read"
            )
        if self.eagle and self.sampler == "content":
            raise ValueError("eagle needs the sampler oracle or random, whose next tokens a draft can guess")

    @property
    def sliding(self) -> bool:
        """Whether there is a sliding-window pool."""
        return self.shape in SLIDING_SHAPES

    @property
    def verify_tokens(self) -> int:
        """Tokens that one decode step of a request writes at most: a verify forward's, or one."""
        return self.draft_tokens + 1 if self.eagle else 1

    @property
    def key_lookahead(self) -> int:
        """Tokens after a page that its content depends on: a draft's input at position p is the token of p + 1."""
        return 1 if self.eagle else 0

    @property
    def slide_pages(self) -> int:
        """Pages that have to leave a request's window before they are freed, several at a time where pages are small."""
        return -(-SLIDE_TOKENS // self.page_size)

    @property
    def least_swa_pages(self) -> int:
        """Pages of the sliding-window pool without which a single request could not run."""
        ahead = max(self.chunk_tokens, self.verify_tokens + self.overlap)
        return -(-(self.window + ahead) // self.page_size) + 2 + self.slide_pages

    @property
    def swa_pages(self) -> int:
        """Pages of the sliding-window pool, page 0 not counted."""
        return self.swa_num_pages or max(self.num_pages // 2, self.least_swa_pages)

    @property
    def longest_request(self) -> int:
        """Tokens, prompt and output, of the longest request that one row and an otherwise empty pool can hold."""
        return min(self.width, self.num_pages * self.page_size) - self.verify_tokens


@dataclass(slots=True)
class Counters:
    """Everything counts occurrences, except names with tokens, pages or slots in them."""

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
