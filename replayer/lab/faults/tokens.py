"""Forwards that are fed another token than the request's own."""

from typing import Any

import numpy as np

from ....recorder.engines.simulated.batch import Batch
from ....recorder.engines.simulated.requests import Request
from ..fault import Bench, around, fault


@fault(
    reference="canary", configs=("mha", "mha_page1", "mla", "no_cache", "tight", "swa", "dsv4", "eagle", "eagle_swa")
)
def next_token_swap(bench: Bench) -> None:
    """Two requests' sampled tokens are swapped, and believed."""
    engine = bench.engine
    sampling: list[Batch] = []

    def run(original: Any, batch: Batch, *args: Any, **kwargs: Any) -> None:
        if bench.due and batch.mode in ("decode", "target_verify") and batch.runner == 0:
            sampling.append(batch)
        original(batch, *args, **kwargs)
        sampling.clear()

    def tokens(original: Any, request_ids: Any, positions: Any, content: Any) -> Any:
        sampled = original(request_ids, positions, content)
        if sampling and bench.due:
            # Each request's first token, which it takes whatever a verify forward accepts.
            first = np.unique(request_ids, return_index=True)[1]
            batch = sampling[0]
            going_on = {r.request_id for r in batch.requests if r.num_tokens + 1 < r.max_tokens}
            first = first[[int(request_ids[i]) in going_on for i in first]]
            if first.size > 1:
                one, two = bench.random.permutation(first)[:2]
                if sampled[one] != sampled[two]:
                    by_id = {r.request_id: r for r in batch.requests}
                    victim = by_id[int(request_ids[one])]
                    bench.inject(request=victim, position=int(positions[one]))
                    sampled = sampled.copy()
                    sampled[[one, two]] = sampled[[two, one]]
        return sampled

    around(engine.runner, "run", run)
    around(engine.sampler, "tokens", tokens)


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
                fed = fed.copy()
                fed[-1] = predicted
        return fed

    around(engine.eagle, "draft_inputs", draft_inputs)


@fault(reference="V#26385", configs=("mha", "mla", "mixed", "no_cache", "tight", "swa", "dsv4", "eagle"))
def async_resume_wrong_input(bench: Bench) -> None:
    """A resumed request is fed a stale token."""
    engine = bench.engine
    put_back: list[Request] = []

    def act() -> bool:
        found = [r for r in engine.scheduler.running if r.num_tokens > r.prompt_len + 1]
        if not found or put_back:
            return False
        put_back.append(bench.pick(found))
        engine.scheduler.retract(put_back[0])
        return True

    def build(original: Any, mode: str, requests: Any, **kwargs: Any) -> Any:
        for index, request in enumerate(requests):
            end = kwargs["prefix_lens"][index] + len(kwargs["tokens"][index])
            stale = request.tokens[request.num_tokens - 2]
            resumed = bench.due and request in put_back and kwargs.get("runner", 0) == 0 and end == request.num_tokens
            if resumed and stale != kwargs["tokens"][index][-1]:
                bench.inject(request=request, position=end - 1, fed=int(stale))
                tokens = [part.copy() for part in kwargs["tokens"]]
                tokens[index][-1] = stale
                kwargs["tokens"] = tokens
        return original(mode, requests, **kwargs)

    bench.between_steps(act)
    around(engine.builder, "build", build)
