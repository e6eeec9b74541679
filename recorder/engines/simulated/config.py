"""What a simulated engine is: pool shape, sizes, scheduling policy; what it counts, and how it fails.

Everything that happens follows from the configuration and a seed.
"""

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from msgspec import Meta

from ...trace.header import Chance, Count, Positive, check_fields, expect


class WorkloadError(Exception):
    """A workload file that cannot be used; `str()` names file, line, what was expected and what came."""


class BrokenEngineError(Exception):
    """The simulated engine caught itself in a mistake that a real engine would have made in silence."""


GRAPH_BATCH_SIZES: Final = (1, 2, 4, 8, 16, 24, 32)
SLIDE_TOKENS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine; raises `ValueError` on anything that it could not run with."""

    seed: int = 0  # of the engine's own choices: numeric noise, random sampling, wrong draft guesses
    # "mha": K and V. "mla": K only. "swa": a full pool and a sliding-window pool behind a full-to-SWA table. "dsv4": the
    # canary looks at the sliding-window pool only, K only, no KV bytes.
    shape: Literal["mha", "mla", "swa", "dsv4"] = "mha"
    page_size: Positive = 1  # tokens a page; slot = page * page_size + offset, page 0 is padding
    num_pages: Positive = 1024  # of the full pool, page 0 not counted
    swa_num_pages: int = 0  # of the sliding-window pool; 0: num_pages // 2, at least what one request needs
    window: Positive = 48  # positions before the prefix's end that a sliding layer reads
    rows: int = 17  # of req_to_token, the padding row 0 included
    width: Positive = 1024  # positions of a row, hence the longest request
    kv_bytes_per_token: Annotated[int, Meta(ge=16, multiple_of=16)] = 32  # of one slot in each captured layer and half
    noise: bool = True  # equal content computed twice gives KV bytes that differ in their low bits, as on a GPU
    chunk_tokens: Positive = 128  # that one prefill forward computes at most
    max_running: Positive = 12  # requests that hold a row at the same time
    max_waiting: Positive = 64  # requests taken off the workload ahead of time
    mixed: bool = False  # prefill forwards carry the running requests' decodes too
    prefix_cache: bool = True  # keep finished prefixes in a radix tree
    host_pages: int = 0  # of the host tier that evicted prefixes move to, 0 for none
    graph_batch_sizes: tuple[Positive, ...] = GRAPH_BATCH_SIZES  # that decode forwards are padded to, () for no padding
    # "oracle": the hash oracle. "content": a function of the context, equal prompts have equal answers. "random": a
    # function of seed, request and position.
    sampler: Literal["oracle", "content", "random"] = "oracle"
    vocab_size: Annotated[int, Meta(ge=2, lt=1 << 31)] = 32_000  # tokens are 0 .. vocab_size - 1
    eagle: bool = False  # draft and verify, top-k 1
    draft_tokens: int = 3  # guessed in each round
    accept_rate: Chance = 0.6  # chance that one guess is right
    idle_forwards: bool = True  # record an idle forward whenever there is nothing to do
    # "lifo" hands out the page freed last, "fifo" the one freed first, "shuffled" as "lifo" from an order by seed, so
    # that pages do not follow one another.
    free_order: Literal["lifo", "fifo", "shuffled"] = "lifo"
    sweep_interval: Count = 0  # target forwards between two walks of the prefix cache, 0 for none
    overlap: bool = False  # a forward is launched before the host has seen what the one before it sampled
    role: Literal["", "prefill", "decode"] = ""  # of one half of a pair, "" for an engine that does both
    submitted: bool = False  # record what the model hands to the pools, beside what they hold after the forward
    recurrent: bool = False  # layers with recurrent state too, whose checkpoints the prefix cache keeps
    sampled_layers: Count = (
        0  # layers of each pool, of which a sampling stream holds some bytes of each slot; 0 for none
    )
    reads_given: bool = False  # record the positions and slots that attention reads in place of req_to_token (dsv4)

    def __post_init__(self) -> None:
        check_fields(self)
        rows, running, least = self.rows, self.max_running, self.least_swa_pages
        expect(rows > running, f"rows is {rows}, expected more than max_running, {running}: row 0 is padding")
        fits = self.chunk_tokens >= self.page_size
        expect(fits, f"chunk_tokens is {self.chunk_tokens}, expected at least page_size, {self.page_size}")
        fits = not self.swa_num_pages or self.swa_num_pages >= least
        what = "one window, one chunk and what a decode adds"
        expect(fits, f"swa_num_pages is {self.swa_num_pages}, expected at least {least}: {what}")
        fits = not self.host_pages or (self.prefix_cache and not self.sliding)
        expect(fits, "host_pages needs the prefix cache, and a shape without sliding layers (mha, mla)")
        fits = not self.sweep_interval or self.prefix_cache
        expect(fits, "sweep_interval needs the prefix cache: it is what a sweep walks")
        fits = not self.reads_given or self.shape == "dsv4"
        expect(fits, "reads_given needs the shape dsv4: beside full layers nobody knows how much sliding ones read")
        fits = not self.recurrent or not (self.eagle or self.overlap or self.host_pages or self.role)
        expect(fits, "recurrent excludes eagle, overlap, host_pages and pairs: its states are not rolled back or moved")
        expect(
            not (self.sampled_layers and self.submitted),
            "sampled_layers excludes submitted: only what is stored is sampled",
        )
        if not self.eagle:
            return
        expect(self.draft_tokens >= 1, f"draft_tokens is {self.draft_tokens}, expected at least 1")
        expect(not self.mixed, "eagle and mixed exclude one another: a verify forward is not mixed with prefill")
        fits = self.sampler != "content"
        expect(fits, "eagle needs the sampler oracle or random, whose next tokens a draft can guess")
        why = "a verify forward needs what was sampled before it"
        expect(not self.overlap, f"eagle and overlap exclude one another: {why}")

    @property
    def sliding(self) -> bool:
        """Whether there is a sliding-window pool."""
        return self.shape in ("swa", "dsv4")

    @property
    def state_slots(self) -> int:
        """Slots of the state pool: one a row, the rest for checkpoints."""
        return 9 * self.rows

    @property
    def verify_tokens(self) -> int:
        """Tokens that one decode step of a request writes at most: a verify forward's, or one."""
        return self.draft_tokens + 1 if self.eagle else 1

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
