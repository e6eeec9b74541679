"""Runs nano-vllm for the corpus: with one bug, or with none. NANO_VLLM names a clone of github.com/GeeeekExplorer/nano-vllm.

python nano_engine.py FOLDER NAME...        # NAME: a bug's, or clean:SETUP
"""

import json
import os
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "conformance" / "nano_vllm")]

from cloned import Patch, main  # noqa: E402

# tokens of a block, blocks
SETUPS = {
    "nano": (8, 28),
    "nano-few": (8, 12),
    "nano-page16": (16, 24),
    "nano-chunks": (8, 28),
    "nano-turns": (8, 28),
    "nano-again": (8, 20),
    "nano-waits": (8, 12),
    "nano-page4": (4, 44),
    "nano-chunks13": (8, 32),
    "nano-page5-few": (5, 20),
    "nano-page6": (6, 40),
    "nano-page4-few": (4, 23),
    "nano-page4-same": (4, 27),
    "nano-page6-shared": (6, 16),
    "nano-page7-alike": (7, 26),
}


def generate(setup: str, folder: Path, engines: list) -> None:
    """Answer seeded random prompts, some of which share a prefix."""
    import engine as real

    rng = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, 97) for _ in range(count)]

    (folder / "traces").mkdir(parents=True, exist_ok=True)
    made = real.Engine(folder / "traces" / "trace.arrow")
    engines.append(made)
    if setup == "nano-chunks":
        made.llm.scheduler.max_num_batched_tokens = 21  # a prompt is split, not at a block's end
    if setup == "nano-chunks13":  # into many parts
        made.llm.scheduler.max_num_batched_tokens = 13
    first = tokens(20)
    shared = tokens(17)
    asked = {
        0: [(first, 12), (shared + tokens(9), 10), (tokens(5), 14)],
        3: [(first + tokens(6), 10)],
        9: [(shared + tokens(4), 12), (tokens(30), 9)],
        24: [(first[:19], 8), (shared + tokens(12), 8), (tokens(21), 12)],
        40: [(first + tokens(9), 8), (shared + tokens(3), 8)],
    }
    if setup == "nano-again":  # with a prompt that ends with a block and comes again late, and one that is its answer
        asked[0][0] = (first[:16], 20)
        asked[24] = asked[24][1:]
        asked |= {27: [(first[:16], 26)], 30: [(tokens(44), 10)], 34: [(tokens(40), 8)]}
    if setup == "nano-waits":  # with a prompt that waits while others take what it would hit
        asked = {0: [(first, 3)], 4: [(tokens(24), 24), (tokens(24), 30)], 8: [(first + tokens(26), 8)]}
    if setup == "nano-page4":  # of all lengths, of which some end with a block
        asked = {
            0: [(tokens(15), 9), (tokens(6), 14)],
            2: [(shared + tokens(3), 12)],
            8: [(shared + tokens(11), 8), (tokens(13), 10)],
            15: [(first[:18], 9), (shared + tokens(2), 7)],
        }
    if (
        setup == "nano-chunks13"
    ):  # one that is long, others beside it, and one that goes on behind what the first has begun
        asked = {
            0: [(first + tokens(24), 9)],
            2: [(tokens(7), 12), (shared + tokens(20), 8)],
            14: [(first + tokens(19), 10), (tokens(31), 6)],
        }
    if setup == "nano-page5-few":  # that talk for long, for which there is no room at the same time
        asked = {0: [(tokens(23), 22), (shared, 24)], 1: [(tokens(14), 20)], 6: [(shared[:15] + tokens(8), 16)]}
    if setup == "nano-page6":  # of which some end with a block, and one goes on behind another
        asked = {
            0: [(tokens(12), 15), (shared, 11)],
            4: [(shared[:12] + tokens(7), 13), (tokens(22), 9)],
            18: [(tokens(18), 10), (shared + tokens(5), 12)],
        }
    if setup == "nano-page4-few":  # that come again, and are longer, when others have used most blocks since
        asked = {
            0: [(first, 6), (tokens(9), 12)],
            8: [(tokens(27), 7)],
            16: [(first + tokens(23), 10), (tokens(18), 10)],
            34: [(tokens(30), 9), (first + tokens(13), 9)],
        }
    if setup == "nano-page4-same":  # two that have a part in common behind different beginnings
        part, begins = tokens(4), (tokens(4), tokens(4))
        asked = {
            0: [(begins[0] + part + tokens(3), 2), (tokens(18), 7)],
            8: [(begins[0] + tokens(9), 30), (tokens(44), 14)],
            18: [(begins[1] + part, 12)],
            20: [(begins[0] + part + tokens(6), 9)],
        }
    if setup == "nano-page6-shared":  # two that begin alike, of which the first leaves soon, and others behind them
        begins = shared + tokens(1)
        asked = {
            0: [(begins + tokens(4), 6)],
            2: [(begins + tokens(8), 14)],
            10: [(tokens(27), 8)],
            15: [(tokens(20), 5)],
        }
    if (
        setup == "nano-page7-alike"
    ):  # two of which differ in two tokens of their first block, and one that goes on behind the first
        begins, goes_on = [*tokens(2), 41, 52, *tokens(3)], tokens(9)
        alike = [*begins[:2], 41 + 31, 52 - 1, *begins[4:]]
        asked = {
            0: [(begins + goes_on, 9), (tokens(11), 16)],
            3: [(tokens(25), 7)],
            7: [(alike + goes_on[:8] + tokens(5), 11)],
            12: [(begins + goes_on + tokens(4), 8), (tokens(19), 12)],
            21: [(alike + tokens(10), 9)],
        }
    answers = []
    for step in range(400):
        if setup == "nano-again" and step == 20:
            asked[20] = [(answers[0].completion_token_ids[:8] + tokens(5), 8)]
        if setup == "nano-turns" and step == 24:  # a prompt that goes on behind an answer
            asked[step].insert(0, (first + answers[0].completion_token_ids + tokens(5), 8))
        for prompt, count in asked.pop(step, ()):
            made.add("", prompt, count)
            answers.append(made.llm.scheduler.waiting[-1])
        if not made.step() and not asked:
            break
    (folder / "tokens.json").write_text(json.dumps([one.completion_token_ids for one in answers]))
    made.close()


def prepare(setup: str, patch: Patch) -> None:
    """Make the engine's module ready."""
    import engine as real

    real.BLOCK, real.BLOCKS = SETUPS[setup]
    real._stand_ins()
    patch()


if __name__ == "__main__":
    sys.path.insert(0, os.environ["NANO_VLLM"])
    main("nano", prepare, generate)
