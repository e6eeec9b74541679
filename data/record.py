"""Records the traces of this folder from a real engine: python data/record.py [SCENARIO...] [-o FOLDER].

Needs `pip install kvcanary torch 'transformers>=5.23,<6' accelerate psutil`; runs on a CPU in a few seconds a scenario.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import click
from driver import Request, gemma3, llama, random_prompt, record
from faults import free_too_early, kv_flip, position_plus_one, table_swap, token_swap
from kvcanary.recorder.trace.reader import read_trace

SHARED = random_prompt(99, 40)  # a system prompt, five blocks long


def _wave() -> list[Request]:
    """Return requests of various lengths, some with a prefix in common, and late ones that hit the prefix cache."""
    return [
        Request(name="short", prompt=random_prompt(1, 9), new_tokens=40),
        Request(name="long", prompt=random_prompt(2, 77), new_tokens=32),
        Request(name="shared-a", prompt=SHARED + random_prompt(3, 6), new_tokens=24),
        Request(name="shared-b", prompt=SHARED + random_prompt(4, 13), new_tokens=28),
        Request(name="one-token", prompt=[7], new_tokens=20),
        Request(name="late-hit", prompt=SHARED + random_prompt(5, 21), new_tokens=24, at_step=30),
        Request(name="late-repeat", prompt=SHARED + random_prompt(3, 6), new_tokens=16, at_step=34),
        Request(name="late-fresh", prompt=random_prompt(6, 50), new_tokens=20, at_step=36),
    ]


def _long_wave() -> list[Request]:
    """Return requests whose prompts or answers outgrow a window of 32 tokens."""
    return [
        Request(name="short", prompt=random_prompt(1, 9), new_tokens=70),
        Request(name="long", prompt=random_prompt(2, 120), new_tokens=40),
        Request(name="window", prompt=random_prompt(3, 32), new_tokens=36),
        Request(name="one-token", prompt=[7], new_tokens=50),
        Request(name="late-long", prompt=random_prompt(4, 90), new_tokens=24, at_step=25),
        Request(name="late-short", prompt=random_prompt(5, 5), new_tokens=30, at_step=40),
    ]


def clean_llama(path: Path) -> None:
    """Full attention: chunked prefill, mixed batches, prefix-cache hits."""
    record(path, llama(), _wave(), num_blocks=96, max_batch_tokens=48)
    _expect(path, "alloc prefix hit", "free finish")


def clean_hybrid(path: Path) -> None:
    """Sliding and full layers: prompts and answers past the window, in chunks larger and smaller than it."""
    record(path, gemma3(), _long_wave(), num_blocks=80, max_batch_tokens=56)


def clean_fork_dedup_evict(path: Path) -> None:
    """Forks, duplicate prompts, and too few blocks: dedup, eviction and requests that start over."""
    twin = random_prompt(10, 33)
    requests = [
        Request(name="twin-a", prompt=twin, new_tokens=24),
        Request(name="twin-b", prompt=twin, new_tokens=24),
        Request(name="other", prompt=random_prompt(11, 45), new_tokens=24),
        Request(name="late-twin", prompt=twin, new_tokens=16, at_step=20),
        Request(name="late-other", prompt=random_prompt(12, 38), new_tokens=20, at_step=24),
    ]
    record(path, llama(), requests, num_return_sequences=3, num_blocks=22, max_batch_tokens=64, safety_margin=0.0)
    _expect(path, "kv_copy fork", "free dedup", "evict cache pressure", "free offload", "alloc prefix hit")


def kv_flip_(path: Path) -> None:
    """One byte of a cached token's K changes between two forwards."""
    fault = kv_flip(at_step=20, request="long", position=21)
    record(path, llama(), _wave(), fault=fault, num_blocks=96, max_batch_tokens=48)


def kv_flip_sliding(path: Path) -> None:
    """The same in a sliding layer's ring, where it hurts only until the token leaves the window."""
    fault = kv_flip(at_step=30, request="short", position=20)
    record(path, gemma3(), _long_wave(), fault=fault, num_blocks=80, max_batch_tokens=56)


def table_swap_(path: Path) -> None:
    """One entry of a block table points to another request's block, for one forward."""
    fault = table_swap(at_step=18, request="long", other="shared-b", block=5)
    record(path, llama(), _wave(), fault=fault, num_blocks=96, max_batch_tokens=48)


def token_swap_(path: Path) -> None:
    """Two requests' input tokens are exchanged before a decode forward."""
    fault = token_swap(at_step=15, request="shared-a", other="short")
    record(path, llama(), _wave(), fault=fault, num_blocks=96, max_batch_tokens=48)


def position_plus_one_(path: Path) -> None:
    """One request's position is one too high in one decode forward."""
    fault = position_plus_one(at_step=22, request="shared-b")
    record(path, llama(), _wave(), fault=fault, num_blocks=96, max_batch_tokens=48)


def free_too_early_(path: Path) -> None:
    """A block goes back to the pool while its request still reads it, and another request writes it."""
    fault = free_too_early(at_step=20, request="short", block=0)
    record(path, llama(), _wave(), fault=fault, num_blocks=96, max_batch_tokens=48)


SCENARIOS: dict[str, Callable[[Path], None]] = {
    "clean_llama": clean_llama,
    "clean_hybrid": clean_hybrid,
    "clean_fork_dedup_evict": clean_fork_dedup_evict,
    "kv_flip": kv_flip_,
    "kv_flip_sliding": kv_flip_sliding,
    "table_swap": table_swap_,
    "token_swap": token_swap_,
    "position_plus_one": position_plus_one_,
    "free_too_early": free_too_early_,
}


def _kinds(path: Path) -> Counter[str]:
    """Count a trace's events by kind and note."""
    return Counter(f"{event.kind} {event.scalar('note')}".strip() for event in read_trace(path))


def _expect(path: Path, *wanted: str) -> None:
    """Raise unless the run really did what the scenario is there to show."""
    missing = set(wanted) - set(_kinds(path))
    if missing:
        raise RuntimeError(f"{path}: no event of {', '.join(sorted(missing))}; the scenario shows too little")


@click.command(help=__doc__)
@click.argument("scenarios", nargs=-1, type=click.Choice(list(SCENARIOS)), metavar="[SCENARIO]...")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path(__file__).parent, help="Where to.")
def main(scenarios: tuple[str, ...], output: Path) -> None:
    """Record the scenarios named, or all of them."""
    output.mkdir(parents=True, exist_ok=True)
    for name in scenarios or SCENARIOS:
        path = output / f"{name}.arrow"
        SCENARIOS[name](path)
        path.chmod(0o644)  # a trace is private to its owner; these are made to be read
        kinds = _kinds(path)
        print(f"{path}  {path.stat().st_size:,} bytes  {kinds['forward']} forwards")
        print("    " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()) if kind != "forward"))


if __name__ == "__main__":
    main()
