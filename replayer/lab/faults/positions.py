"""Forwards that are told a wrong place: a prefix too short, a position too high."""

from typing import Any, Final

from ..fault import Bench, Fault, around


def draft_position_plus_one(bench: Bench) -> None:
    """From the moment on, give every draft decode positions that are one too high."""
    builder = bench.engine.builder
    off = [0]

    def build(original: Any, mode: str, requests: Any, **kwargs: Any) -> Any:
        off[0] = int(bench.started and mode == "decode" and kwargs.get("runner", 0) == 1)
        if off[0]:
            bench.inject(request=requests[0], position=kwargs["prefix_lens"][0])
        return original(mode, requests, **kwargs)

    around(builder, "build", build)
    around(builder, "positions", lambda original, *args: original(*args) + off[0])


def seq_len_backwards(bench: Bench) -> None:
    """Build one decode with the prefix length that a request had one token before."""

    def build(original: Any, mode: str, requests: Any, **kwargs: Any) -> Any:
        found = [i for i, prefix in enumerate(kwargs["prefix_lens"]) if prefix > 1]
        if bench.due and mode == "decode" and kwargs.get("runner", 0) == 0 and found:
            index = bench.pick(found)
            prefix_lens = list(kwargs["prefix_lens"])
            prefix_lens[index] -= 1
            bench.inject(request=requests[index], position=prefix_lens[index])
            kwargs["prefix_lens"] = prefix_lens
        return original(mode, requests, **kwargs)

    around(bench.engine.builder, "build", build)


FAULTS: Final = (
    Fault(
        name="draft_position_plus_one",
        summary="the draft's positions are one too high",
        reference="S#25015",
        configs=("eagle", "eagle_swa"),
        arm=draft_position_plus_one,
    ),
    Fault(
        name="seq_len_backwards",
        summary="a decode is built with the prefix length of the step before",
        reference="lab",
        configs=("mha", "mha_page1", "mha_page16", "mla", "no_cache", "tight", "swa", "dsv4"),
        arm=seq_len_backwards,
    ),
)
