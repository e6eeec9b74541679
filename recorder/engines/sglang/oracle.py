"""An oracle behind SGLang's sampler: what `ModelRunner.sample` returns is the oracle's, whatever sampling backend ran."""

from collections.abc import Callable
from typing import Any

from ...capture.device.recorder import DeviceRecorder
from ...capture.host_arrays import own_int64
from ...capture.recorder import Recorder
from ...trace.header import Sampler
from ..common.oracle import OracleSampler
from .connectors.transfers import room_of
from .requests import SglangRequests


class SglangOracle(OracleSampler):
    """The oracle of a scheduler's target model; a request that has a bootstrap room goes by that."""

    def __init__(
        self, sampler: Sampler, target: Any, requests: SglangRequests, recorder: Recorder | DeviceRecorder
    ) -> None:
        super().__init__(sampler)
        self._target = target
        self._requests = requests
        self._recorder = recorder

    def around_sample(self, original: Callable[..., Any], runner: Any, logits: Any, batch: Any) -> Any:
        """Sample as SGLang does, and return the oracle's tokens in their place, while they are recorded."""
        sampled = original(runner, logits, batch)
        if runner is not self._target or not batch.rids or self._recorder.off:
            return sampled
        import torch

        known = [one for rid in batch.rids[: sampled.shape[0]] if (one := self._requests.get(rid)) is not None]
        if len(known) < len(batch.rids):  # a warm-up's, of which nothing is recorded
            return sampled
        seeds = [room if (room := room_of(one.req)) >= 0 else one.request_id for one in known]
        seq_lens = batch.seq_lens if getattr(batch, "seq_lens_cpu", None) is None else batch.seq_lens_cpu
        ends = own_int64(seq_lens)[: len(known)].tolist()
        prompt_lens = [len(one.req.origin_input_ids) for one in known]
        tokens = self.sample(batch.rids[: len(known)], seeds, ends, prompt_lens)
        sampled[: len(known)] = torch.from_numpy(tokens).to(sampled.device, sampled.dtype, non_blocking=True)
        return sampled
