"""What healthy engines are asked: prompts that come again, that begin alike, that go on behind one another."""

import random
from collections.abc import Iterator
from typing import Any


def prompts_of(run: dict[str, Any]) -> Iterator[list[tuple[list[int], int]]]:
    """Yield batches of prompts of a run, each with how many tokens may be answered."""
    rng = random.Random(run["seed"])

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 500) for _ in range(count)]

    shared = tokens(rng.randrange(20, 150))
    known = [tokens(rng.randrange(1, 90)) for _ in range(4)] + [shared + tokens(rng.randrange(1, 40)) for _ in range(4)]
    for _ in range(rng.randrange(2, 5)):
        batch = rng.choices(known, k=rng.randrange(3, 9))
        if not run["twice"]:
            batch = [prompt + tokens(rng.randrange(1, 12)) for prompt in batch]
        yield [(prompt, rng.randrange(1, 40)) for prompt in batch]
