"""An oracle as a logits processor of the V1 model runner: the last one, which leaves each request one token.

What comes behind it - temperature, top-k, top-p, penalties, the sampler itself, asynchronous scheduling - goes on as ever.
"""

from typing import Any

from ...capture.device.recorder import DeviceRecorder
from ...capture.recorder import Recorder
from ...trace.header import Sampler
from ..common.oracle import OracleSampler, force
from .step import VllmRequests


class VllmOracle(OracleSampler):
    """The oracle of one runner, which knows these requests."""

    def __init__(
        self, sampler: Sampler, runner: Any, requests: VllmRequests, recorder: Recorder | DeviceRecorder
    ) -> None:
        super().__init__(sampler)
        self._batch = runner.input_batch  # not the runner, by which the attachment holds this weakly
        self._requests = requests
        self._recorder = recorder
        self._ends: dict[str, int] = {}

    def attach(self) -> None:
        """Put the oracle behind the runner's other logits processors."""
        from vllm.v1.sample.logits_processor import LogitsProcessor

        oracle = self

        class OracleLogits(LogitsProcessor):
            """What vLLM calls with the logits of a step."""

            def __init__(self) -> None:
                """Nothing of vLLM's configuration is needed."""

            def apply(self, logits: Any) -> Any:
                return oracle.force(logits)

            def is_argmax_invariant(self) -> bool:
                return False

            def update_state(self, batch_update: Any) -> None:
                """What has changed in the batch is read from it."""

        self._batch.logitsprocs.non_argmax_invariant.append(OracleLogits())

    def begin_step(self, output: Any) -> None:
        """Note how many tokens each request of a step will have in the cache, as the scheduler says."""
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self._ends = {name: computed[name] + count for name, count in output.num_scheduled_tokens.items()}

    def force(self, logits: Any) -> Any:
        """Leave each row of a step's logits `[requests, vocab]` the oracle's token; none once nothing is recorded any more."""
        names = self._batch.req_ids[: logits.shape[0]]
        if self._recorder.off or any(name not in self._ends for name in names):
            return logits
        known = [self._requests.see(name)[0] for name in names]
        ends, lens = [self._ends[name] for name in names], [one.prompt_len for one in known]
        return force(logits, self.sample(names, [one.request_id for one in known], ends, lens))
