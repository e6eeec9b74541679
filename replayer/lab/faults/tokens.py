"""Forwards that are fed another token than the request's own."""

from typing import Any

import numpy as np

from ....recorder.engines.simulated.batch import Batch
from ....recorder.engines.simulated.pools import TARGET
from ....recorder.engines.simulated.requests import Request
from ..fault import Bench, around, fault, while_inside


@fault(
    reference="canary", configs=("mha", "mha_page1", "mla", "no_cache", "tight", "swa", "dsv4", "eagle", "eagle_swa")
)
def next_token_swap(bench: Bench) -> None:
    """Two requests' sampled tokens are swapped, and believed."""

    def sampled_from(batch: Batch, *_: Any) -> Batch | None:
        decodes = batch.mode in ("decode", "target_verify") and batch.runner == TARGET
        return batch if bench.due and decodes else None

    sampling = while_inside(bench.engine.runner, "run", sampled_from)

    @around(bench.engine.sampler)
    def tokens(original: Any, request_ids: Any, positions: Any, content: Any) -> Any:
        sampled = original(request_ids, positions, content)
        if not sampling or not bench.due:
            return sampled
        # Each request's first token, which it takes whatever a verify forward accepts.
        first = np.unique(request_ids, return_index=True)[1]
        going_on = {r.request_id: r for r in sampling[0].requests if r.num_tokens + 1 < r.max_tokens}
        first = first[[int(request_ids[i]) in going_on for i in first]]
        if first.size > 1:
            one, two = bench.random.permutation(first)[:2]
            if sampled[one] != sampled[two]:
                bench.inject(request=going_on[int(request_ids[one])], position=int(positions[one]))
                sampled = sampled.copy()
                sampled[[one, two]] = sampled[[two, one]]
        return sampled


@fault(reference="S#26800", configs=("eagle", "eagle_swa"))
def chunk_tail_predicted_token(bench: Bench) -> None:
    """At the end of a prompt's chunk the draft gets the predicted token instead of the prompt's."""
    engine = bench.engine

    def draft_inputs(original: Any, request: Request, prefix: int, extend: int) -> Any:
        fed = original(request, prefix, extend)
        at = prefix + extend
        if bench.started and at < request.prompt_len:
            ids, positions = np.array([request.request_id], np.int64), np.array([at], np.int64)
            predicted = int(engine.sampler.tokens(ids, positions, None)[0])
            if predicted != fed[-1]:
                bench.inject(request=request, position=at - 1, fed=predicted)
                fed = np.append(fed[:-1], np.int32(predicted))
        return fed

    around(engine.eagle)(draft_inputs)


@fault(reference="V#26385", configs=("mha", "mla", "mixed", "no_cache", "tight", "swa", "dsv4", "eagle"))
def async_resume_wrong_input(bench: Bench) -> None:
    """A resumed request is fed a stale token."""
    scheduler = bench.engine.scheduler
    put_back: list[Request] = []

    @bench.between_steps(lambda: [r for r in scheduler.running if r.num_tokens > r.prompt_len + 1])
    def act(request: Request) -> None:
        put_back.append(request)
        scheduler.retract(request)

    @around(bench.engine.builder)
    def build(original: Any, mode: str, requests: Any, *, prefix_lens: Any, tokens: Any, **kwargs: Any) -> Any:
        for index, request in enumerate(requests):
            end = prefix_lens[index] + len(tokens[index])
            stale = request.tokens[request.num_tokens - 2]
            resumed = bench.due and request in put_back and kwargs.get("runner", 0) == 0 and end == request.num_tokens
            if resumed and stale != tokens[index][-1]:
                bench.inject(request=request, position=end - 1, fed=int(stale))
                tokens = [part.copy() for part in tokens]
                tokens[index][-1] = stale
        return original(mode, requests, prefix_lens=prefix_lens, tokens=tokens, **kwargs)
