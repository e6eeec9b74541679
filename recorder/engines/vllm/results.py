"""What a step sampled: its tokens, and their log-probabilities where a request has asked vLLM for some."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...capture.host_arrays import ragged_index
from ..common.hooking import OnFault, wrap_often
from ..common.requests import logprobs_or_none
from .connectors.external import ExternalLoads
from .step import VllmRequests

FloatArray = npt.NDArray[np.float32]

# What `logprobs_mode` computes, as `logprobs_kind`; with another mode, the values are no log-probabilities.
_KINDS: Final = {"raw_logprobs": "raw", "processed_logprobs": "processed"}


# Which forward each request of a step ran in: (forward's number, names of its requests), one for each forward.
StepForwards = tuple[tuple[int, tuple[str, ...]], ...]


class StepResults:
    """Records the results of one runner's steps; from the engine's thread, or the one in which it fetches them."""

    def __init__(self, runner: Any, recorder: Any, requests: VllmRequests, external: ExternalLoads) -> None:
        self._recorder = recorder
        self._requests = requests
        self._external = external
        self._logprobs = StepLogprobs(runner)

    def took(self, result: Any, forwards: StepForwards, on_fault: OnFault) -> None:
        """Record what a step sampled, now or when the engine fetches it."""
        if is_read(result):
            self.sampled(forwards, result)
        else:
            self._external.took_result(result)
            wrap_often(result, "get_output", functools.partial(self.sampled, forwards), on_fault)

    def sampled(self, forwards: StepForwards, result: Any, *_args: Any) -> None:
        """Record the tokens of a step's result."""
        self._external.took_result(result)
        tokens = result.sampled_token_ids
        if tokens is None or not len(tokens):
            return
        logprobs, by_name = self._logprobs.read(result), dict[str, Any]()
        with self._requests.lock:
            for forward, names in forwards:
                sampled = tokens
                if len(forwards) > 1 or len(tokens) != len(names) or names != tuple(result.req_ids):
                    by_name = by_name or dict(zip(result.req_ids, tokens, strict=False))
                    sampled = [by_name.get(name, ()) for name in names]
                for known, new in zip(self._requests.known(names), sampled, strict=True):
                    if known is not None and len(new) and forward >= known.since:
                        known.tokens.append(new)
                lens = np.fromiter(map(len, sampled), np.int64, len(sampled))
                if lens.any():
                    flat = np.fromiter(itertools.chain.from_iterable(sampled), np.int64, int(lens.sum()))
                    said = self._logprobs.of(names, logprobs)
                    self._recorder.sampled(forward=forward, sampled_tokens=flat, sampled_lens=lens, **said)


def is_read(result: Any) -> bool:
    """Say whether a result has its tokens on the host already."""
    return hasattr(result, "sampled_token_ids") and hasattr(result, "req_ids")


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
