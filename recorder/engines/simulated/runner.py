"""One forward: told to the recorder, computed, sampled, told again. What an integrator writes, and nothing else."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...capture.forward_input import AttentionInput, ForwardInput, TruthTokens
from ...capture.recorder import Recorder
from ...capture.submitted import Submitted
from .attention import AttentionBackend
from .batch import Batch
from .counters import Counters
from .layout import TARGET
from .memory import KvMemory
from .model import Model
from .pools import WordArray

Int64Array = npt.NDArray[np.int64]

# From the content of each token to (sampled tokens, how many each row of the batch got); nothing of either where the
# host hears of them later.
Pick = Callable[[WordArray], tuple[Int64Array, Int64Array]]


class ForwardRunner:
    """Runs batches of the target or the draft model under the recorder; `attention` says what its kernels get."""

    def __init__(self, recorder: Recorder, memory: KvMemory, model: Model, counters: Counters) -> None:
        self._recorder = recorder
        self._memory = memory
        self._model = model
        self.attention = AttentionBackend(memory)
        self._counters = counters

    def run(self, batch: Batch, pick: Pick | None = None) -> None:
        """Run one forward; `pick` samples from it."""
        self.tell(batch)
        content = self._compute(batch) if batch.input_ids.size else np.empty(0, np.uint64)
        submitted = self._submitted(batch)
        if pick is None:
            self._recorder.after_forward(submitted=submitted)
        else:
            tokens, lens = pick(content)
            self._recorder.after_forward(sampled_tokens=tokens, sampled_lens=lens, submitted=submitted)
        self._counters.forwards += 1
        self._counters.padded_forwards += batch.rows.size > len(batch.requests)
        if batch.runner == TARGET:
            self._counters.target_forwards += 1
            self._counters.tokens += batch.num_tokens

    def _submitted(self, batch: Batch) -> Submitted:
        """Return what the model handed to the pools in the forward that just ran, where that is to be recorded."""
        if not self._memory.config.submitted or not batch.input_ids.size:
            return {}
        pools = [pool for pool in self._memory.pools if pool.group.runner == batch.runner]
        return {(pool.index, stream): rows for pool in pools for stream, rows in pool.submitted.items()}

    def _compute(self, batch: Batch) -> WordArray:
        attention = self.attention.plan(batch)
        self._recorder.attention(
            AttentionInput(seq_lens=attention.seq_lens, query_lens=attention.query_lens, slots=attention.reads)
        )
        return self._model.run(batch, attention)

    def tell(self, batch: Batch) -> None:
        """Tell the recorder what is about to run."""
        told_reads = self._memory.config.told_reads
        self._recorder.before_forward(
            ForwardInput(
                mode=batch.mode,
                runner=batch.runner,
                req_pool_indices=batch.rows,
                request_ids=batch.request_ids,
                prefix_lens=batch.prefix_lens,
                extend_lens=batch.extend_lens,
                input_ids=batch.input_ids,
                positions=batch.positions,
                out_cache_loc=(batch.slots,),
                reads=(self.attention.prefix_read(batch) if told_reads else self._memory.req_to_token,),
                luts=(self._memory.lut,) if self._memory.swa is not None else (),
                table_filled=not told_reads,
                truth=TruthTokens(flat=batch.truth, lens=batch.truth_lens),
            )
        )
