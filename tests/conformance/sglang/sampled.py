"""The sampled tokens that a trace tells of, request by request."""

from pathlib import Path


def told_samples(trace: Path) -> list[list[int]]:
    """Return the tokens of each request that has any, in the order in which its forwards sampled them; sorted."""
    from kvcanary.recorder.trace.reader import read_trace

    requests: dict[int, list[int]] = {}
    samples: dict[int, list[tuple[int, list[int]]]] = {}
    for event in read_trace(trace):
        if event.kind == "forward":
            requests[event.scalar("forward")] = event.ints("request_ids").tolist()
        if event.kind in ("forward", "sample"):
            forward, at = event.scalar("forward"), 0
            tokens = event.ints("sampled_tokens").tolist()
            for request, length in zip(requests[forward], event.ints("sampled_lens").tolist(), strict=False):
                if length:
                    samples.setdefault(request, []).append((forward, tokens[at : at + length]))
                at += length
    return sorted([token for _, part in sorted(parts) for token in part] for parts in samples.values())


def wrong_samples(traces: list[Path], outputs: list[list[int]]) -> list[str]:
    """Return what is wrong with the traces of pipeline stages: each must tell of all tokens that were generated."""
    wrong = []
    for trace in traces:
        told = told_samples(trace)
        if told != sorted(outputs):
            wrong.append(
                f"{trace.name}: {sum(map(len, told))} sampled tokens of {len(told)} requests told, not the "
                f"{sum(map(len, outputs))} of {len(outputs)} that were generated"
            )
    return wrong
