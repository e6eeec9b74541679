"""A workload: what an engine is asked, and when; as a file, and made from a seed."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from ...recorder.files import replacing
from ..errors import AnalysisError


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a workload file; `at_ms` counts from the beginning, or from the last `wait`.

    `ask` sends a prompt of token ids, behind the prompt and answer of the request `continues` if that is named; the client
    leaves after `abort_after` tokens of the answer, 0 for at once, -1 for never; `fields` go into the request as they are. `wait` waits for all answers; so does `flush`, which
    empties the prefix cache, and `swap`, which has `adapter` unloaded and another's folder loaded under its name. `pause` stops process number `process` of the engine for `for_ms`.
    """

    do: Literal["ask", "wait", "flush", "swap", "pause"]
    at_ms: int = 0
    name: str = ""
    prompt: list[int] = []
    continues: str = ""
    max_tokens: int = 0
    abort_after: int = -1
    adapter: str = ""
    salt: str = ""
    fields: dict[str, Any] = {}
    process: int = 0
    for_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a workload is made for: slots of the engine's pool, the longest prompt with its answer, tokens below
    `vocabulary`, slots in a page, adapters that it serves, fields of which a request may get one set, the longest pause of a
    process, ingredients to leave out.
    """

    pool: int
    longest: int
    vocabulary: int
    page: int = 1
    adapters: Sequence[str] = ()
    fields: Sequence[Mapping[str, Any]] = ()
    jitter_ms: int = 0
    without: frozenset[str] = frozenset()


# What a round may have, and the paths through an engine that it leads to.
INGREDIENTS: Final = {
    "long": ("chunk",),
    "shared": ("share", "load_back", "copy"),
    "crowd": ("retract", "offload"),
    "flood": ("evict", "load_back"),
    "abort": ("abort",),
    "stagger": ("mixed",),
    "repeat": ("draft", "draft_reject"),
    "adapter": ("adapter",),
    "salt": (),
    "flush": (),
    "swap": (),
    "fields": (),
}
_LIKELY: Final = 0.4
_MOST_REQUESTS: Final = 64
_MOST_TOKENS: Final = 60_000  # of a round
_TEXTS: Final = 4  # that share a beginning, or come again in a later round


def make_round(seed: int, number: int, aim: str, limits: Limits) -> list[Step]:
    """Return the steps of a round: the same for the same arguments. `aim` is a path to be reached, "" for none."""
    rng = random.Random(f"{seed} round {number} {aim}")  # noqa: S311  # nothing is kept secret by it
    has = {name for name, paths in INGREDIENTS.items() if rng.random() < _LIKELY or aim in paths} - limits.without
    budget = int(min(limits.pool * (2.5 if has & {"crowd", "flood"} else 0.8), _MOST_TOKENS))
    steps = [Step(do="flush")] if "flush" in has else []
    if "swap" in has and len(limits.adapters) > 1:
        steps.append(Step(do="swap", adapter=rng.choice(limits.adapters)))
    at, ends = 0, dict[str, int]()
    for n in range(_MOST_REQUESTS):
        if n > 3 and budget < 0:
            break
        grows = "crowd" in has and rng.random() < 0.85  # one of many short prompts that outgrow the pool together
        if not grows and ("stagger" in has or rng.random() < 0.3):
            at += int(rng.expovariate(1 / 60))
        fit = [name for name, end in ends.items() if end < limits.longest - 8]
        before = rng.choice(fit) if fit and "shared" in has and rng.random() < 0.3 else ""
        room = limits.longest - ends.get(before, 0)
        answer = rng.randint(1, max(1, min(room // 2, 24)))
        if grows:
            answer = max(1, min(room // 2, rng.randint(limits.pool // 8, limits.pool // 2)))
            room = min(room, answer + max(2, limits.pool // 16))
        prompt = _prompt(rng, seed, f"{number}/{n}", has, room - answer, limits)
        leaves = rng.randint(0, answer - 1) if "abort" in has and rng.random() < 0.4 else -1
        step = Step(
            do="ask",
            at_ms=at,
            name=f"hunt-{number}-{n}",
            prompt=prompt,
            continues=before,
            max_tokens=answer,
            abort_after=leaves,
            adapter=rng.choice(["", *limits.adapters]) if "adapter" in has else "",
            salt=rng.choice(["", "a", "b"]) if "salt" in has else "",
            fields=dict(rng.choice([{}, *limits.fields])) if "fields" in has else {},
        )
        steps.append(step)
        if leaves < 0:
            ends[step.name] = ends.get(before, 0) + len(prompt) + answer
        budget -= len(prompt) + answer
        if limits.jitter_ms and rng.random() < 0.3:
            at += 1
            steps.append(Step(do="pause", at_ms=at, process=rng.randrange(8), for_ms=rng.randint(1, limits.jitter_ms)))
    return [*steps, Step(do="wait")]


def _prompt(rng: random.Random, seed: int, own: str, has: set[str], most: int, limits: Limits) -> list[int]:
    """Return a prompt of `most` tokens at most: its own text, one that others begin with too, or one that repeats itself."""

    def text(name: str, length: int) -> list[int]:
        drawn = random.Random(f"{seed} text {name}")  # noqa: S311  # as above
        return [drawn.randrange(3, limits.vocabulary) for _ in range(length)]

    length = rng.randint(max(1, most * 2 // 3), most) if "long" in has and rng.random() < 0.5 else rng.randint(1, most)
    if rng.random() < 0.4:  # at the border of a page, and one beside it
        length = length // limits.page * limits.page + rng.choice((-1, 0, 1))
    length = min(max(1, length), most)
    if "repeat" in has and rng.random() < 0.6:
        return (text(own, rng.randint(1, 8)) * length)[:length]
    if "shared" in has and rng.random() < 0.7:
        common = rng.choice((length, rng.randint(0, length), length // limits.page * limits.page))
        return text(str(rng.randrange(_TEXTS)), common) + text(own, length - common)
    return text(own, length)


def read_workload(path: Path) -> list[Step]:
    """Read a workload file; raise `AnalysisError` if it cannot be read, or is none."""
    try:
        steps = msgspec.json.Decoder(Step).decode_lines(path.read_bytes())
    except OSError as error:
        raise AnalysisError(f"{path}: cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise AnalysisError(f"{path}: no workload: {error}; docs/guide/hunt.md has what a line may be") from None
    if not any(step.do == "ask" for step in steps):
        raise AnalysisError(f"{path}: asks nothing; expected a workload file, one JSON object a line")
    return steps


def write_workload(path: Path, steps: Sequence[Step]) -> None:
    """Write a workload file in place of one that is there; raise `AnalysisError`."""
    try:
        with replacing(path) as file:
            file.write(b"".join(msgspec.json.encode(step) + b"\n" for step in steps))
    except OSError as error:
        raise AnalysisError(f"{path}: cannot be written: {error.strerror}") from None


def shape(steps: Sequence[Step]) -> dict[str, int]:
    """Return how much a workload asks: requests, prompt tokens, tokens of answers at most, and other steps."""
    asks = [step for step in steps if step.do == "ask"]
    return {
        "requests": len(asks),
        "prompt_tokens": sum(len(step.prompt) for step in asks),
        "max_tokens": sum(step.max_tokens for step in asks),
        "other_steps": len(steps) - len(asks),
    }
