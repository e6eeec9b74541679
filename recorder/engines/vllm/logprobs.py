"""The log-probabilities of a step's sampled tokens, where a request has asked vLLM for some."""

import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...capture.host_arrays import ragged_index
from ..common.requests import logprobs_or_none

FloatArray = npt.NDArray[np.float32]

# What `logprobs_mode` computes, as `logprobs_kind`; with another mode, the values are no log-probabilities.
_KINDS: Final = {"raw_logprobs": "raw", "processed_logprobs": "processed"}


class StepLogprobs:
    """The log-probabilities of a runner's results, as `Recorder.sampled` takes them."""

    def __init__(self, runner: Any) -> None:
        self._kind = _KINDS.get(getattr(runner.vllm_config.model_config, "logprobs_mode", ""), "")

    def read(self, result: Any) -> dict[str, FloatArray]:
        """Return them by request's name; nothing if no request of the step has asked."""
        if not self._kind or getattr(result, "logprobs", None) is None:
            return {}
        return logprobs_or_none(lambda: _sampled_logprobs(result))

    def of(self, names: Sequence[str], logprobs: dict[str, FloatArray]) -> dict[str, Any]:
        """Return those of a forward's requests, in their order."""
        if not logprobs:
            return {}
        mine = [logprobs[name] for name in names if name in logprobs]
        return {"sampled_logprobs": np.concatenate(mine), "logprobs_kind": self._kind}


def _sampled_logprobs(result: Any) -> dict[str, FloatArray]:
    """Return of each request of a result, by name, the log-probabilities of its sampled tokens, NaN for one without.

    vLLM has a row for each request, or if it verifies drafts for each of its tokens: the sampled token and its value first, or
    the whole vocabulary's values.
    """
    lists, tokens = result.logprobs, result.sampled_token_ids
    lens = np.fromiter(map(len, tokens), np.int64, len(tokens))
    flat = np.fromiter(itertools.chain.from_iterable(tokens), np.int64, int(lens.sum()))
    begins = getattr(lists, "cu_num_generated_tokens", None)
    starts = np.arange(len(tokens)) if begins is None else np.array(begins, np.int64)[: len(tokens)]
    of, computed = np.asarray(lists.logprob_token_ids), np.asarray(lists.logprobs)
    values = np.full(flat.size, np.nan, np.float32)
    rows = ragged_index(starts, lens)
    # A row for each request, or for each token.
    known = rows == np.repeat(starts, lens) if begins is None else np.ones(flat.size, np.bool_)
    inside = np.flatnonzero(known & (rows < len(computed)))
    rows, mine = rows[inside], flat[inside]
    if of.ndim == 2 and of.size:
        values[inside] = np.where(of[rows, 0] == mine, computed[rows, 0], np.nan)
    elif of.size == 0 and computed.ndim == 2 and not (mine >= computed.shape[1]).any():
        values[inside] = computed[rows, mine]
    return dict(zip(result.req_ids, np.split(values, np.cumsum(lens)[:-1]), strict=False))
