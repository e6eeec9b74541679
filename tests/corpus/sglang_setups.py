"""What SGLang is set up with for the corpus, each setup with what is asked of it: prompts, and then others."""

import random
from collections.abc import Callable
from dataclasses import dataclass


class Asked:
    """Seeded random `prompts`, every other of which begins alike, and some that come `again` behind them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.shared = self.tokens(20)
        self.prompts = [(self.shared if i % 2 == 0 else []) + self.tokens(rng.randrange(5, 40)) for i in range(5)]
        self.again: list[list[int]] = []

    def tokens(self, count: int) -> list[int]:
        """Return that many new ones."""
        return [self.rng.randrange(3, 500) for _ in range(count)]

    def ask_again(self) -> None:
        """Have some go on behind the prompts, or be one of them once more."""
        prompts = self.prompts
        self.again = [
            prompts[0][:28] + self.tokens(9),
            self.tokens(30),
            prompts[2 % len(prompts)],
            prompts[1 % len(prompts)] + self.tokens(3),
        ]


Change = Callable[[Asked], None]


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to run the engine: its model, slots of a page and of the pool, requests at a time, and what is asked otherwise:
    before the usual ones come again, and behind that.
    """

    model: str
    page: int
    slots: int
    overlap: bool
    most: int
    retracts: bool
    first: Change | None = None
    then: Change | None = None

    def ask(self, rng: random.Random) -> Asked:
        """Return what is asked."""
        asked = Asked(rng)
        if self.first is not None:
            self.first(asked)
        asked.ask_again()
        if self.then is not None:
            self.then(asked)
        return asked


def _llama_twins_first(ask: Asked) -> None:
    """Prompts asked at the same time."""
    ask.prompts[:2] = [ask.prompts[1][:12]] * 2


def _recurrent_chunks_first(ask: Asked) -> None:
    """Prompts of two chunks, alone in a batch."""
    ask.prompts = [ask.tokens(50)]


def _recurrent_chunks(ask: Asked) -> None:
    """Prompts that go on behind the first chunk."""
    ask.again = [ask.prompts[0][:32] + ask.tokens(9), ask.tokens(20)]


def _llama_page16_first(ask: Asked) -> None:
    """Prompts: short ones, one at a time."""
    ask.prompts.append(ask.tokens(7))


def _recurrent_mixed(ask: Asked) -> None:
    """Prompts that go on behind prompts which were computed beside decodes."""
    ask.again += [ask.prompts[3] + ask.tokens(3), ask.prompts[4] + ask.tokens(4)]


def _llama_long_first(ask: Asked) -> None:
    """Prompts of three chunks and more."""
    ask.prompts = [ask.tokens(ask.rng.randrange(80, 105)) for _ in range(5)]


def _llama_flush(ask: Asked) -> None:
    """Prompts of eight chunks, alone."""
    ask.again = [ask.tokens(230)]


def _long_ones(ask: Asked) -> None:
    """Prompts of more than a chunk each."""
    ask.prompts = [ask.tokens(ask.rng.randrange(36, 60)) for _ in range(5)]


def _llama_abort(ask: Asked) -> None:
    """Prompts that go on behind prompts, those that were sent away among them."""
    ask.again = [prompt + ask.tokens(5) for prompt in ask.prompts[:4]]


def _llama_beams(ask: Asked) -> None:
    """Prompts that are asked again when others have ended."""
    ask.again = [
        ask.prompts[1] + ask.tokens(3),
        ask.tokens(30),
        ask.tokens(25),
        ask.prompts[0][:28] + ask.tokens(9),
        ask.tokens(18),
    ]


def _llama_once_more(ask: Asked) -> None:
    """Prompts: the last one again, which goes on for longer than those beside it."""
    ask.again = [ask.prompts[4], ask.tokens(30), ask.tokens(28), ask.tokens(26), ask.tokens(24)]


def _llama_page4_crowd(ask: Asked) -> None:
    """Prompts some of which are the same, and go on for different lengths."""
    ask.prompts = [ask.prompts[0], ask.prompts[1], ask.prompts[0], ask.prompts[1] + ask.tokens(6), ask.tokens(14)]
    ask.again = [
        ask.tokens(30),
        ask.prompts[0] + ask.tokens(5),
        ask.tokens(22),
        ask.prompts[0] + ask.tokens(5),
        ask.tokens(17),
    ]


def _hybrid_page4_no_tree(ask: Asked) -> None:
    """Prompts of one to three chunks."""
    ask.prompts = [ask.tokens(count) for count in (21, 75, 40, 11)]
    ask.again = [ask.tokens(50), ask.tokens(33)]


def _recurrent_replay(ask: Asked) -> None:
    """Prompts some of which are asked again as they were."""
    ask.again = [ask.prompts[1], ask.tokens(21), ask.prompts[3], ask.prompts[1]]


def _recurrent_branches(ask: Asked) -> None:
    """Prompts that begin alike, one after the other."""
    ask.prompts = [ask.shared + ask.tokens(ask.rng.randrange(5, 12)) for _ in range(2)]
    ask.again = [ask.shared + ask.tokens(ask.rng.randrange(5, 12)) for _ in range(4)] + [ask.tokens(25)]


def _llama_page8_turns(ask: Asked) -> None:
    """Prompts that go on behind prompts and answers, and for longer than what they hit."""
    ask.again = [
        ask.prompts[0] + ask.tokens(5),
        ask.tokens(30),
        ask.prompts[2] + ask.tokens(9),
        ask.prompts[4][:25] + ask.tokens(4),
    ]


def _llama_page4_abort(ask: Asked) -> None:
    """Prompts that begin alike, of three chunks, of which one is asked again as it was."""
    ask.prompts = [ask.shared + ask.tokens(count) for count in (75, 62, 58, 70)]
    ask.again = [ask.prompts[0], ask.tokens(34), ask.prompts[3] + ask.tokens(5), ask.prompts[1][:60] + ask.tokens(12)]


def _hybrid_page8_chunks(ask: Asked) -> None:
    """Prompts of one to four chunks, and some that go on behind them."""
    ask.prompts = [ask.tokens(count) for count in (70, 26, 45, 103)]
    ask.again = [ask.prompts[0] + ask.tokens(6), ask.tokens(55), ask.prompts[1] + ask.tokens(11)]


def _llama_overlap_retract_no_tree(ask: Asked) -> None:
    """Prompts more than can be computed at a time."""
    ask.prompts = [ask.tokens(count) for count in (31, 14, 22, 40, 9, 27, 18)]
    ask.again = [ask.tokens(count) for count in (25, 33, 12, 20, 16)]


def _llama_overlap_page8_short(ask: Asked) -> None:
    """Prompts of which one after the other leaves."""
    ask.prompts = [ask.tokens(count) for count in (17, 8, 29, 12, 23)]
    ask.again = [ask.prompts[0] + ask.tokens(4), ask.prompts[2] + ask.tokens(9), ask.tokens(15), ask.tokens(24)]


def _hybrid_page4_branches(ask: Asked) -> None:
    """Prompts of several chunks, and others that leave them in the middle of one."""
    ask.prompts = [ask.tokens(count) for count in (92, 60, 31)]
    ask.again = [
        ask.prompts[0][:45] + ask.tokens(8),
        ask.tokens(27),
        ask.prompts[1][:44] + ask.tokens(21),
        ask.prompts[0][:84] + ask.tokens(6),
    ]


def _llama_lora_page8_renewed(ask: Asked) -> None:
    """Prompts some of which come again word for word."""
    ask.again = [ask.prompts[0], ask.tokens(26), ask.prompts[1] + ask.tokens(4), ask.prompts[2][:25] + ask.tokens(7)]


def _llama_host_page4_branches(ask: Asked) -> None:
    """Prompts that begin alike."""
    ask.prompts = [ask.tokens(ask.rng.randrange(36, 60)) for _ in range(5)]
    ask.prompts = [ask.shared + ask.tokens(count) for count in (28, 33, 24, 30, 36)]


def _llama_lora_page16_named(ask: Asked) -> None:
    """Prompts of more than a page, some of which come again without an adapter."""
    ask.prompts = [ask.tokens(45), ask.tokens(38), ask.shared + ask.tokens(30)]
    ask.again = [ask.prompts[0], ask.prompts[1] + ask.tokens(4), ask.tokens(22), ask.prompts[2]]


def _llama_page4_evicts(ask: Asked) -> None:
    """Prompts: long ones that are computed while others grow."""
    ask.prompts = [ask.tokens(count) for count in (20, 17, 96, 24, 80)]
    ask.again = [ask.tokens(count) for count in (88, 21, 100, 18)]


def _llama_page8_answers(ask: Asked) -> None:
    """Prompts some of which go on behind what has been answered before."""
    ask.prompts = [ask.tokens(count) for count in (19, 34, 11)]
    ask.again = [ask.prompts[0] + ask.tokens(6), ask.tokens(27), ask.prompts[1] + ask.tokens(13), ask.prompts[2]]


def _hybrid_page4_weights(ask: Asked) -> None:
    """Prompts that begin alike before and behind new weights."""
    ask.prompts = [ask.shared + ask.tokens(18), ask.tokens(41), ask.shared + ask.tokens(5)]
    ask.again = [ask.shared + ask.tokens(24), ask.tokens(29), ask.prompts[1] + ask.tokens(6)]


def _llama_page2_together(ask: Asked) -> None:
    """Prompts of all lengths, five at a time and then fewer."""
    ask.prompts = [ask.tokens(count) for count in (12, 35, 21, 8, 27)]
    ask.again = [ask.prompts[1] + ask.tokens(9), ask.tokens(46), ask.prompts[2][:14] + ask.tokens(10)]


def _llama_page2_abort(ask: Asked) -> None:
    """Prompts more than can be computed at a time."""
    ask.prompts = [ask.tokens(count) for count in (26, 31, 19, 24, 38, 22)]
    ask.again = [ask.tokens(count) for count in (33, 17, 28, 41)]


def _recurrent_ends(ask: Asked) -> None:
    """Prompts that go on behind prompts and answers."""
    ask.prompts = [ask.tokens(count) for count in (22, 37, 13)]
    ask.again = [
        ask.prompts[0] + ask.tokens(8),
        ask.tokens(19),
        ask.prompts[1] + ask.tokens(11),
        ask.prompts[2] + ask.tokens(25),
    ]


def _llama_page2_overrides(ask: Asked) -> None:
    """Prompts: the same tokens, first with embeddings in the place of some of them and then without."""
    ask.prompts = [ask.tokens(count) for count in (25, 44, 16)]
    ask.again = [ask.prompts[0], ask.tokens(18), ask.prompts[1][:40] + ask.tokens(7), ask.prompts[2] + ask.tokens(9)]


def _llama_page4_rows(ask: Asked) -> None:
    """Prompts: short ones, and then such that go on behind longer ones."""
    ask.prompts = [ask.tokens(count) for count in (46, 52, 14, 11)]
    ask.again = [ask.prompts[0] + ask.tokens(5), ask.prompts[1][:49] + ask.tokens(12), ask.tokens(20), ask.prompts[0]]


def _llama_overlap_page1_ends(ask: Asked) -> None:
    """Prompts that end one after the other, while others go on and come."""
    ask.prompts = [ask.tokens(count) for count in (15, 23, 9, 34, 28, 12)]
    ask.again = [ask.tokens(31), ask.prompts[1] + ask.tokens(6), ask.tokens(18), ask.tokens(26)]


def _recurrent_parked(ask: Asked) -> None:
    """Prompts of one chunk and of several, that come while others are answered."""
    ask.prompts = [ask.tokens(count) for count in (14, 26, 19, 57, 33)]
    ask.again = [ask.tokens(41), ask.prompts[0] + ask.tokens(4), ask.tokens(22)]


def _llama_page32_mixed(ask: Asked) -> None:
    """Prompts of more than a page, which are computed beside decodes and gone on with behind whole pages."""
    ask.prompts = [ask.tokens(count) for count in (70, 38, 101, 33)]
    ask.again = [ask.prompts[0][:64] + ask.tokens(15), ask.tokens(47), ask.prompts[2] + ask.tokens(6)]


def _recurrent_reuse(ask: Asked) -> None:
    """Prompts of two chunks and more, and others that leave them behind the first."""
    ask.prompts = [ask.tokens(count) for count in (58, 75, 24)]
    ask.again = [
        ask.prompts[0][:44] + ask.tokens(13),
        ask.tokens(21),
        ask.prompts[1][:39] + ask.tokens(30),
        ask.prompts[0] + ask.tokens(7),
    ]


def _llama_overlap_page2_alone(ask: Asked) -> None:
    """Prompts that are answered together, and gone on with behind the answers."""
    ask.prompts = [ask.tokens(count) for count in (18, 9, 31, 26)]
    ask.again = [ask.prompts[0] + ask.tokens(11), ask.tokens(40), ask.prompts[3][:20] + ask.tokens(8)]


def _llama_page16_rounds(ask: Asked) -> None:
    """Prompts of less than a page and of several, some of which come again."""
    ask.prompts = [ask.tokens(count) for count in (13, 49, 34, 20)]
    ask.again = [ask.prompts[1] + ask.tokens(10), ask.tokens(28), ask.prompts[2]]


def _llama_host_halves_storage(ask: Asked) -> None:
    """Prompts whose beginning others share, of which the rest leaves the host before it."""
    ask.prompts = [
        ask.shared + ask.tokens(36),
        ask.shared + ask.tokens(28),
        ask.tokens(58),
        ask.tokens(52),
        ask.tokens(61),
    ]


def _llama_turns_whole(ask: Asked) -> None:
    """Prompts that others go on behind, together with all of their answers."""
    ask.prompts = [ask.tokens(count) for count in (19, 32, 11, 27)]


def _recurrent_few_slots(ask: Asked) -> None:
    """Prompts that come one after another while others are answered, and some that go on behind them."""
    ask.prompts = [ask.tokens(count) for count in (17, 28, 11, 36, 23, 14)]
    ask.again = [ask.tokens(30), ask.prompts[1] + ask.tokens(5), ask.tokens(19), ask.prompts[4], ask.tokens(25)]


def _llama_page4_trimmed(ask: Asked) -> None:
    """Prompts: one that has its first page in common with another, and one that leaves that page out."""
    ask.prompts = [ask.tokens(count) for count in (29, 18, 35)]
    rest = ask.tokens(33)
    ask.again = [ask.prompts[0][:4] + rest, ask.tokens(26), ask.tokens(21), rest + ask.tokens(7)]


def _llama_page8_forks(ask: Asked) -> None:
    """Prompts that leave others in the middle of a page, and then those others again."""
    ask.prompts = [ask.tokens(count) for count in (29, 38, 17)]
    ask.again = [
        ask.prompts[0][:21] + ask.tokens(9),
        ask.tokens(25),
        ask.prompts[1][:27] + ask.tokens(4),
        ask.prompts[0] + ask.tokens(5),
        ask.prompts[1],
    ]


def _llama_page4_pictures(ask: Asked) -> None:
    """Prompts that come with pictures, and some of them again with others."""
    ask.prompts = [ask.tokens(count) for count in (24, 31, 18)]
    ask.again = [ask.prompts[0], ask.tokens(22), ask.prompts[1], ask.prompts[2] + ask.tokens(9)]


def _llama_page4_bursts(ask: Asked) -> None:
    """Prompts of a part of a chunk, two and then four of which are computed at a time."""
    ask.prompts = [ask.tokens(count) for count in (11, 9)]
    ask.again = [
        ask.tokens(12),
        ask.prompts[0] + ask.tokens(5),
        ask.tokens(7),
        ask.tokens(5),
        ask.prompts[1] + ask.tokens(6),
    ]


def _recurrent_tails_mixed(ask: Asked) -> None:
    """Prompts that are computed beside decodes, and others that go on behind them."""
    ask.prompts = [ask.tokens(count) for count in (21, 12, 27, 16)]
    ask.again = [ask.prompts[2] + ask.tokens(2), ask.tokens(24), ask.prompts[3] + ask.tokens(1), ask.tokens(11)]


def _hybrid_page4_far(ask: Asked) -> None:
    """Prompts of less than a window and of several, and some that go on behind them."""
    ask.prompts = [ask.tokens(count) for count in (34, 9, 51)]
    ask.again = [ask.prompts[0] + ask.tokens(8), ask.tokens(23), ask.prompts[2][:40] + ask.tokens(6)]


def _llama_host_halves_flushed_storage(ask: Asked) -> None:
    """Prompts of more than a chunk each, some of which are gone on with when others have taken their slots."""
    ask.prompts = [ask.tokens(ask.rng.randrange(44, 60)) for _ in range(8)]
    ask.again = [ask.prompts[4] + ask.tokens(5), ask.prompts[5] + ask.tokens(9), ask.prompts[6]]


def _llama_page8_chunks(ask: Asked) -> None:
    """Prompts of one chunk to four, some of which others go on behind."""
    ask.prompts = [ask.tokens(count) for count in (71, 19, 104, 40)]
    ask.again = [ask.prompts[0][:64] + ask.tokens(9), ask.tokens(37), ask.prompts[2] + ask.tokens(5)]


def _llama_page8_wide(ask: Asked) -> None:
    """Prompts of one chunk and of two in a pool that has more than enough slots."""
    ask.prompts = [ask.tokens(count) for count in (22, 45, 13)]
    ask.again = [ask.prompts[0] + ask.tokens(6), ask.tokens(28), ask.prompts[1][:24] + ask.tokens(8)]


def _llama_page4_repeats(ask: Asked) -> None:
    """Prompts in which the same stands behind different beginnings."""
    same = ask.tokens(16)
    ask.prompts = [ask.tokens(8) + same + ask.tokens(5), ask.tokens(12) + same + ask.tokens(6), ask.tokens(19)]
    ask.again = [
        ask.prompts[1] + ask.tokens(4),
        ask.tokens(21),
        ask.tokens(8) + same + ask.tokens(3),
        ask.prompts[0] + ask.tokens(7),
    ]


def _recurrent_handed_on(ask: Asked) -> None:
    """Prompts, most of them very short, that come when others have left, and one that goes on behind another."""
    ask.prompts = [ask.tokens(count) for count in (9, 24, 3, 2, 31, 2)]
    ask.again = [ask.tokens(2), ask.prompts[1] + ask.tokens(6), ask.tokens(3), ask.tokens(26)]


def _hybrid_page4_inside(ask: Asked) -> None:
    """Prompts of one chunk, and others that leave them in the middle of it."""
    ask.prompts = [ask.tokens(count) for count in (31, 29, 14)]
    ask.again = [
        ask.prompts[0][:20] + ask.tokens(9),
        ask.tokens(26),
        ask.prompts[1][:17] + ask.tokens(6),
        ask.prompts[0] + ask.tokens(5),
    ]


def _recurrent_padded(ask: Asked) -> None:
    """Prompts three of which are answered at a time, and some that go on behind what others have left."""
    ask.prompts = [ask.tokens(count) for count in (16, 21, 9, 27)]
    ask.again = [
        ask.prompts[1] + ask.tokens(2),
        ask.tokens(18),
        ask.prompts[0] + ask.tokens(1),
        ask.tokens(12),
        ask.prompts[2] + ask.tokens(2),
        ask.prompts[3] + ask.tokens(1),
    ]


def _llama_page4_crush_retract(ask: Asked) -> None:
    """Prompts that leave few slots to those who answer, more than can be computed at a time."""
    ask.prompts = [ask.tokens(count) for count in (23, 18, 27, 14, 21)]
    ask.again = [ask.prompts[1] + ask.tokens(6), ask.tokens(25), ask.prompts[3] + ask.tokens(11), ask.tokens(19)]


def _llama_host_lossy_twice_storage(ask: Asked) -> None:
    """Prompts of more than a chunk, one at a time, which come back twice when others have taken their slots."""
    ask.prompts = [ask.tokens(ask.rng.randrange(48, 60)) for _ in range(4)]


def _llama_page4_turns(ask: Asked) -> None:
    """Prompts of one chunk and of two, most of which others go on behind."""
    ask.prompts = [ask.tokens(count) for count in (26, 41, 15, 33)]
    ask.again = [ask.prompts[0] + ask.tokens(8), ask.tokens(24), ask.prompts[2] + ask.tokens(11), ask.prompts[1]]


def _recurrent_resumed_retract_no_tree(ask: Asked) -> None:
    """Prompts, most of them very short, more than are computed at a time."""
    ask.prompts = [ask.tokens(count) for count in (9, 3, 2, 14, 2)]
    ask.again = [ask.tokens(2), ask.tokens(11), ask.tokens(3), ask.tokens(2)]


def _llama_page2_many(ask: Asked) -> None:
    """Prompts of one chunk and of two in a pool that is never full, some of which others go on behind."""
    ask.prompts = [ask.tokens(count) for count in (19, 37, 12, 26)]
    ask.again = [ask.tokens(22), ask.prompts[0] + ask.tokens(7), ask.prompts[1][:20] + ask.tokens(9)]


def _llama_page8_lengths(ask: Asked) -> None:
    """Prompts of one chunk beside such of two and three, some of which others go on behind."""
    ask.prompts = [ask.tokens(count) for count in (24, 57, 13, 90)]
    ask.again = [ask.prompts[0] + ask.tokens(9), ask.tokens(33), ask.prompts[3][:72] + ask.tokens(6)]


def _llama_host_halves_twice_storage(ask: Asked) -> None:
    """Prompts of more than a chunk, one at a time, which come back twice when others have taken their slots."""
    ask.prompts = [ask.tokens(ask.rng.randrange(42, 58)) for _ in range(5)]


def _hybrid_page2_ring(ask: Asked) -> None:
    """Prompts of one chunk and of two, and others that leave them on the way."""
    ask.prompts = [ask.tokens(count) for count in (37, 28, 12)]
    ask.again = [
        ask.prompts[0][:26] + ask.tokens(9),
        ask.tokens(23),
        ask.prompts[1][:20] + ask.tokens(7),
        ask.prompts[0] + ask.tokens(4),
    ]


def _llama_lora_page2_tenants(ask: Asked) -> None:
    """Prompts of two tenants and of one without an adapter, some of which are gone on with."""
    ask.prompts = [ask.tokens(count) for count in (21, 35, 14, 27)]
    ask.again = [ask.prompts[0] + ask.tokens(6), ask.tokens(19), ask.prompts[2] + ask.tokens(8), ask.prompts[3]]


def _llama_page4_clones_no_tree(ask: Asked) -> None:
    """Prompts that are answered twice and three times at once, beside others."""
    ask.prompts = [ask.tokens(count) for count in (18, 29, 11)]
    ask.prompts = [ask.prompts[0], ask.prompts[1], ask.prompts[1], ask.prompts[2]]
    twice = ask.tokens(23)
    ask.again = [twice, ask.tokens(15), twice, twice]


def _qwen3_page4_rescaled(ask: Asked) -> None:
    """Prompts of one chunk and of two, most of which are gone on with when the engine has been idle."""
    ask.prompts = [ask.tokens(count) for count in (23, 36, 17)]
    ask.again = [
        ask.prompts[0] + ask.tokens(6),
        ask.tokens(21),
        ask.prompts[1] + ask.tokens(4),
        ask.prompts[2] + ask.tokens(9),
    ]


def _llama_page8_agents(ask: Asked) -> None:
    """Prompts that begin alike and soon part, of several pages each."""
    start = ask.tokens(6)
    ask.prompts = [start + ask.tokens(24), ask.tokens(35), ask.tokens(12)]
    ask.again = [start + ask.tokens(31), ask.tokens(20), ask.prompts[1][:4] + ask.tokens(26), start + ask.tokens(17)]


def _recurrent_resident(ask: Asked) -> None:
    """Prompts of one chunk, three of which are answered at a time, and some that go on behind them."""
    ask.prompts = [ask.tokens(count) for count in (13, 22, 8, 17)]
    ask.again = [ask.prompts[0] + ask.tokens(5), ask.tokens(15), ask.prompts[3] + ask.tokens(3), ask.tokens(10)]


def _hybrid_page8_rings(ask: Asked) -> None:
    """Prompts shorter than the window, as long, and longer, and some that go on behind them."""
    ask.prompts = [ask.tokens(count) for count in (9, 16, 27, 45)]
    ask.again = [ask.prompts[2] + ask.tokens(7), ask.tokens(12), ask.prompts[0] + ask.tokens(20)]


def _hybrid_page4_emptied(ask: Asked) -> None:
    """Prompts of one chunk, and others that leave them further back than a window reaches."""
    ask.prompts = [ask.tokens(count) for count in (31, 14, 27)]
    ask.again = [
        ask.prompts[0][:22] + ask.tokens(8),
        ask.tokens(25),
        ask.prompts[2][:16] + ask.tokens(11),
        ask.prompts[1] + ask.tokens(6),
    ]


def _llama_twins_grouped(ask: Asked) -> None:
    """Prompts two of which are the same at a time, beside others, and some that go on behind them."""
    first, second = ask.tokens(14), ask.tokens(11)
    ask.prompts = [first, first, second, second, ask.tokens(23)]
    third = ask.tokens(12)
    ask.again = [third, third, ask.tokens(26), first + ask.tokens(7), ask.tokens(19)]


def _llama_page2_tiles(ask: Asked) -> None:
    """Prompts of different lengths, four and then fewer of which are answered at a time, and some that go on behind them."""
    ask.prompts = [ask.tokens(count) for count in (14, 33, 21, 9)]
    ask.again = [ask.prompts[1] + ask.tokens(5), ask.tokens(27), ask.prompts[0] + ask.tokens(10), ask.tokens(16)]


def _llama_page4_bf16(ask: Asked) -> None:
    """Prompts of one chunk and of two, most of which others go on behind."""
    ask.prompts = [ask.tokens(count) for count in (18, 25, 37, 12)]
    ask.again = [ask.prompts[0] + ask.tokens(7), ask.tokens(22), ask.prompts[1][:20] + ask.tokens(9), ask.prompts[2]]


def _recurrent_ubatches(ask: Asked) -> None:
    """Prompts of one chunk to three, and some that go on behind them."""
    ask.prompts = [ask.tokens(count) for count in (34, 20, 71, 9)]
    ask.again = [ask.prompts[1] + ask.tokens(1), ask.tokens(50), ask.prompts[0] + ask.tokens(2)]


def _qwen3_page4_regimes(ask: Asked) -> None:
    """Prompts, short and long ones, and long ones that begin as short ones did and the other way round."""
    ask.prompts = [ask.tokens(count) for count in (28, 93, 17)]
    ask.again = [
        ask.prompts[0] + ask.tokens(51),
        ask.tokens(24),
        ask.prompts[1][:40] + ask.tokens(8),
        ask.prompts[2] + ask.tokens(6),
    ]


def _llama_page2_captured(ask: Asked) -> None:
    """Prompts that are answered three at a time, a little in front of where the next tile of places begins."""
    ask.prompts = [ask.tokens(count) for count in (12, 27, 19)]
    ask.again = [ask.prompts[0] + ask.tokens(8), ask.tokens(29), ask.prompts[1] + ask.tokens(14), ask.tokens(11)]


def _recurrent_joined(ask: Asked) -> None:
    """Prompts, the last chunk of one of which is computed beside others, and some that go on behind them beside new ones."""
    ask.prompts = [ask.tokens(count) for count in (38, 12, 20, 43)]
    ask.again = [ask.prompts[0] + ask.tokens(4), ask.tokens(13), ask.tokens(36), ask.prompts[1] + ask.tokens(3)]


def _qwen3_page2_upper(ask: Asked) -> None:
    """Prompts of one chunk, and some that go on behind them."""
    ask.prompts = [ask.tokens(count) for count in (16, 29, 22)]
    ask.again = [ask.prompts[0] + ask.tokens(7), ask.tokens(18), ask.prompts[2][:20] + ask.tokens(9)]


def _llama_turns_ended(ask: Asked) -> None:
    """Prompts that are answered one behind the other."""
    ask.prompts = [ask.tokens(count) for count in (17, 30, 23, 11)]


def _llama_page2_strides(ask: Asked) -> None:
    """Prompts of different lengths, which are answered four at a time, and some that go on behind them."""
    ask.prompts = [ask.tokens(count) for count in (24, 41, 17, 30)]
    ask.again = [ask.prompts[2] + ask.tokens(16), ask.tokens(26), ask.prompts[1] + ask.tokens(9), ask.tokens(12)]


def _llama_page4_shrinks(ask: Asked) -> None:
    """Prompts four of which are answered at a time and then fewer, and some that go on behind them."""
    ask.prompts = [ask.tokens(count) for count in (22, 13, 31, 18)]
    ask.again = [ask.prompts[2][:28] + ask.tokens(7), ask.tokens(25), ask.prompts[0] + ask.tokens(10), ask.tokens(9)]


def _llama_host_page8_unfenced_storage(ask: Asked) -> None:
    """Prompts of one chunk and of two, most of which are gone on with when others have taken their slots."""
    ask.prompts = [ask.tokens(ask.rng.randrange(30, 58)) for _ in range(6)]


def _llama_lora_page8_beside(ask: Asked) -> None:
    """Prompts with adapters beside such without, some of which are gone on with."""
    ask.prompts = [ask.tokens(count) for count in (33, 26, 15, 21)]
    ask.again = [ask.prompts[1] + ask.tokens(6), ask.tokens(19), ask.prompts[0][:32] + ask.tokens(8), ask.prompts[3]]


def _qwen3_page8_slept(ask: Asked) -> None:
    """Prompts that come again when the engine has been emptied, and others behind them."""
    ask.prompts = [ask.shared + ask.tokens(9), ask.tokens(34), ask.shared + ask.tokens(16)]
    ask.again = [ask.prompts[0], ask.tokens(20), ask.prompts[0][:24] + ask.tokens(13), ask.prompts[1] + ask.tokens(5)]


def _recurrent_remapped(ask: Asked) -> None:
    """Prompts three of which are answered at a time, the first of which leave first, and some that go on behind them."""
    ask.prompts = [ask.tokens(count) for count in (11, 19, 24, 15, 8)]
    ask.again = [ask.prompts[1] + ask.tokens(3), ask.tokens(17), ask.tokens(12), ask.prompts[0] + ask.tokens(2)]


def _llama_page4_briefs(ask: Asked) -> None:
    """Prompts of a few tokens beside longer ones, and some that go on behind both."""
    ask.prompts = [ask.tokens(count) for count in (6, 29, 9, 38, 11)]
    ask.again = [ask.prompts[0] + ask.tokens(7), ask.tokens(24), ask.prompts[1] + ask.tokens(5), ask.prompts[4]]


def _hybrid_page2_spans(ask: Asked) -> None:
    """Prompts of one chunk to three, and some that leave them on the way and are longer than a window from there."""
    ask.prompts = [ask.tokens(count) for count in (58, 23, 71)]
    ask.again = [ask.prompts[0][:44] + ask.tokens(21), ask.tokens(39), ask.prompts[1] + ask.tokens(18)]


def _recurrent_blocks(ask: Asked) -> None:
    """Prompts of two chunks, and others that leave them behind the first, or go on behind them."""
    ask.prompts = [ask.tokens(count) for count in (52, 19, 54, 12)]
    ask.again = [
        ask.prompts[0][:48] + ask.tokens(7),
        ask.tokens(23),
        ask.prompts[1] + ask.tokens(4),
        ask.prompts[2][:50] + ask.tokens(5),
        ask.prompts[0] + ask.tokens(3),
    ]


def _llama_host_page8_halves_again_storage(ask: Asked) -> None:
    """Prompts of more than a chunk, two at a time, all of which come again when others have taken their slots."""
    ask.prompts = [ask.tokens(ask.rng.randrange(42, 58)) for _ in range(6)]


def _qwen3_overlap_page2_mixed(ask: Asked) -> None:
    """Prompts of one chunk and of two, computed beside decodes, and some that go on behind them."""
    ask.prompts = [ask.tokens(count) for count in (19, 33, 12, 45, 24, 16)]
    ask.again = [ask.prompts[1] + ask.tokens(5), ask.tokens(38), ask.prompts[0] + ask.tokens(9), ask.tokens(27)]


def _llama_page16_wraps_retract(ask: Asked) -> None:
    """Prompts of several pages each, and some that go on behind whole pages of them."""
    ask.prompts = [ask.tokens(count) for count in (37, 52, 21, 66, 44)]
    ask.again = [ask.prompts[1] + ask.tokens(8), ask.tokens(40), ask.prompts[3][:48] + ask.tokens(12), ask.prompts[4]]


def _qwen3_page16_groups(ask: Asked) -> None:
    """Prompts of more than a page, which are answered three at a time, and some that go on behind them."""
    ask.prompts = [ask.tokens(count) for count in (35, 18, 50, 27)]
    ask.again = [ask.prompts[0] + ask.tokens(11), ask.tokens(22), ask.prompts[2][:32] + ask.tokens(9)]


# Model, slots of a page, slots, overlapped scheduling, requests at a time, whether some are retracted now and then.
SETUPS = {
    "llama": Setup("llama", 1, 512, False, 4, False),
    "llama-chunks": Setup("llama", 1, 512, False, 4, False),
    "llama-page4": Setup("llama", 4, 512, False, 4, False),
    "llama-small": Setup("llama", 1, 120, False, 3, False),
    "llama-retract": Setup("llama", 1, 150, False, 4, True),
    "llama-overlap": Setup("llama", 1, 512, True, 4, False),
    "llama-overlap-page16": Setup("llama", 16, 256, True, 3, False),
    "llama-page16-retract": Setup("llama", 16, 320, False, 4, True),
    "llama-twins": Setup("llama", 1, 120, False, 3, False, first=_llama_twins_first),
    "llama-weights": Setup("llama", 1, 512, False, 4, False),
    "hybrid-page16": Setup("mellum_hybrid", 16, 512, False, 4, False),
    "hybrid": Setup("mellum_hybrid", 1, 512, False, 4, False),
    "hybrid-turns": Setup("mellum_hybrid", 1, 512, False, 4, False),
    "recurrent": Setup("lfm2", 1, 512, False, 4, False),
    "recurrent-chunks": Setup("lfm2", 1, 512, False, 4, False, first=_recurrent_chunks_first, then=_recurrent_chunks),
    "llama-page16": Setup("llama", 16, 512, False, 3, False, first=_llama_page16_first),
    "llama-page4-small": Setup("llama", 4, 160, False, 3, False),
    "llama-no-tree": Setup("llama", 1, 160, False, 3, False),
    "hybrid-uneven-no-tree": Setup("mellum_hybrid", 1, 512, False, 4, False),
    "hybrid-no-tree": Setup("mellum_hybrid", 1, 512, False, 4, False),
    "llama-salts": Setup("llama", 1, 512, False, 4, False),
    "llama-mixed": Setup("llama", 1, 512, False, 4, False),
    "recurrent-mixed": Setup("lfm2", 1, 512, False, 4, False, then=_recurrent_mixed),
    "recurrent-retract": Setup("lfm2", 1, 512, False, 4, True),
    "llama-long": Setup("llama", 1, 230, False, 3, False, first=_llama_long_first),
    "llama-flush": Setup("llama", 1, 512, False, 4, False, then=_llama_flush),
    "llama-lora": Setup("llama", 1, 512, False, 4, False),
    "llama-host": Setup("llama", 1, 160, False, 3, False, then=_long_ones),
    "llama-abort": Setup("llama", 1, 600, False, 3, False, first=_llama_long_first, then=_llama_abort),
    "llama-session": Setup("llama", 1, 210, False, 4, False),
    "llama-session-abort": Setup("llama", 1, 210, False, 4, False),
    "llama-keys": Setup("llama", 1, 512, False, 4, False),
    "llama-beams": Setup("llama", 1, 160, False, 10, False, then=_llama_beams),
    "llama-once-more": Setup("llama", 1, 120, False, 3, False, then=_llama_once_more),
    "llama-thinks": Setup("llama", 1, 512, False, 4, False),
    "llama-host-parts": Setup("llama", 1, 160, False, 3, False, then=_long_ones),
    "llama-page4-crowd": Setup("llama", 4, 200, False, 5, False, then=_llama_page4_crowd),
    "recurrent-weights": Setup("lfm2", 1, 512, False, 4, False),
    "llama-host-page4": Setup("llama", 4, 160, False, 3, False, then=_long_ones),
    "hybrid-page4-no-tree": Setup("mellum_hybrid", 4, 512, False, 3, False, then=_hybrid_page4_no_tree),
    "llama-lora-swapped-no-tree": Setup("llama", 1, 512, False, 2, False),
    "llama-overlap-mixed": Setup("llama", 1, 512, True, 4, False),
    "recurrent-replay": Setup("lfm2", 1, 512, False, 3, False, then=_recurrent_replay),
    "llama-page4-crowd-retract": Setup("llama", 4, 240, False, 5, True),
    "llama-lora-page4": Setup("llama", 4, 512, False, 4, False),
    "llama-host-storage": Setup("llama", 4, 160, False, 3, False, then=_long_ones),
    "llama-host-overlap": Setup("llama", 4, 160, True, 3, False, then=_long_ones),
    "llama-overlap-page4-weights": Setup("llama", 4, 512, True, 4, False),
    "recurrent-branches": Setup("lfm2", 1, 512, False, 3, False, then=_recurrent_branches),
    "llama-page8-turns": Setup("llama", 8, 512, False, 4, False, then=_llama_page8_turns),
    "llama-host-page8": Setup("llama", 8, 160, False, 3, False, then=_long_ones),
    "llama-host-lossy-storage": Setup("llama", 4, 160, False, 3, False, then=_long_ones),
    "llama-page4-abort": Setup("llama", 4, 320, False, 3, False, then=_llama_page4_abort),
    "hybrid-page8-chunks": Setup("mellum_hybrid", 8, 512, False, 4, False, then=_hybrid_page8_chunks),
    "llama-overlap-retract-no-tree": Setup("llama", 1, 240, True, 4, True, then=_llama_overlap_retract_no_tree),
    "llama-overlap-page8-short": Setup("llama", 8, 400, True, 4, False, then=_llama_overlap_page8_short),
    "hybrid-page4-branches": Setup("mellum_hybrid", 4, 480, False, 3, False, then=_hybrid_page4_branches),
    "llama-lora-page8-renewed": Setup("llama", 8, 448, False, 3, False, then=_llama_lora_page8_renewed),
    "llama-host-page4-branches": Setup("llama", 4, 160, False, 2, False, then=_llama_host_page4_branches),
    "llama-lora-page16-named": Setup("llama", 16, 640, False, 3, False, then=_llama_lora_page16_named),
    "llama-host-page4-rest": Setup("llama", 4, 176, False, 3, False, then=_long_ones),
    "llama-page4-evicts": Setup("llama", 4, 124, False, 4, False, then=_llama_page4_evicts),
    "llama-page8-answers": Setup("llama", 8, 360, False, 3, False, then=_llama_page8_answers),
    "hybrid-page4-weights": Setup("mellum_hybrid", 4, 448, False, 3, False, then=_hybrid_page4_weights),
    "llama-page2-together": Setup("llama", 2, 336, False, 5, False, then=_llama_page2_together),
    "llama-host-page2": Setup("llama", 2, 160, False, 3, False, then=_long_ones),
    "llama-page2-abort": Setup("llama", 2, 150, False, 5, False, then=_llama_page2_abort),
    "llama-host-page2-overlap": Setup("llama", 2, 164, True, 2, False, then=_long_ones),
    "recurrent-ends": Setup("lfm2", 1, 384, False, 3, False, then=_recurrent_ends),
    "llama-host-page16": Setup("llama", 16, 192, False, 3, False, then=_long_ones),
    "llama-page2-overrides": Setup("llama", 2, 320, False, 3, False, then=_llama_page2_overrides),
    "llama-page4-rows": Setup("llama", 4, 392, False, 2, False, then=_llama_page4_rows),
    "llama-host-page8-pinned": Setup("llama", 8, 152, False, 4, False, then=_long_ones),
    "llama-overlap-page1-ends": Setup("llama", 1, 186, True, 3, False, then=_llama_overlap_page1_ends),
    "recurrent-parked": Setup("lfm2", 1, 432, False, 3, False, then=_recurrent_parked),
    "llama-page32-mixed": Setup("llama", 32, 640, False, 3, False, then=_llama_page32_mixed),
    "recurrent-reuse": Setup("lfm2", 1, 416, False, 2, False, then=_recurrent_reuse),
    "llama-overlap-page2-alone": Setup("llama", 2, 300, True, 4, False, then=_llama_overlap_page2_alone),
    "llama-page16-rounds": Setup("llama", 16, 368, False, 4, False, then=_llama_page16_rounds),
    "llama-host-weights-storage": Setup("llama", 4, 168, False, 3, False, then=_long_ones),
    "llama-turns-whole": Setup("llama", 1, 292, False, 3, False, then=_llama_turns_whole),
    "llama-host-halves-storage": Setup("llama", 4, 172, False, 2, False, then=_llama_host_halves_storage),
    "recurrent-few-slots": Setup("lfm2", 1, 424, False, 3, False, then=_recurrent_few_slots),
    "llama-host-page4-lists": Setup("llama", 4, 164, False, 3, False, then=_long_ones),
    "llama-page4-trimmed": Setup("llama", 4, 452, False, 2, False, then=_llama_page4_trimmed),
    "llama-page8-forks": Setup("llama", 8, 488, False, 2, False, then=_llama_page8_forks),
    "llama-page4-pictures": Setup("llama", 4, 356, False, 2, False, then=_llama_page4_pictures),
    "llama-page4-bursts": Setup("llama", 4, 288, False, 4, False, then=_llama_page4_bursts),
    "hybrid-page4-far": Setup("mellum_hybrid", 4, 436, False, 3, False, then=_hybrid_page4_far),
    "llama-host-halves-flushed-storage": Setup(
        "llama", 4, 180, False, 2, False, then=_llama_host_halves_flushed_storage
    ),
    "recurrent-tails-mixed": Setup("lfm2", 1, 404, False, 3, False, then=_recurrent_tails_mixed),
    "llama-page8-chunks": Setup("llama", 8, 472, False, 3, False, then=_llama_page8_chunks),
    "recurrent-handed-on": Setup("lfm2", 1, 420, False, 3, False, then=_recurrent_handed_on),
    "llama-page8-wide": Setup("llama", 8, 1200, False, 3, False, then=_llama_page8_wide),
    "llama-page4-repeats": Setup("llama", 4, 516, False, 2, False, then=_llama_page4_repeats),
    "llama-lora-page4-apart": Setup("llama", 4, 468, False, 3, False),
    "llama-page4-crush-retract": Setup("llama", 4, 132, False, 4, True, then=_llama_page4_crush_retract),
    "recurrent-padded": Setup("lfm2", 1, 444, False, 3, False, then=_recurrent_padded),
    "hybrid-page4-inside": Setup("mellum_hybrid", 4, 460, False, 3, False, then=_hybrid_page4_inside),
    "llama-host-lossy-twice-storage": Setup("llama", 4, 156, False, 2, False, then=_llama_host_lossy_twice_storage),
    "llama-page4-turns": Setup("llama", 4, 412, False, 3, False, then=_llama_page4_turns),
    "llama-page2-many": Setup("llama", 2, 640, False, 3, False, then=_llama_page2_many),
    "recurrent-resumed-retract-no-tree": Setup("lfm2", 1, 428, False, 3, True, then=_recurrent_resumed_retract_no_tree),
    "llama-page8-lengths": Setup("llama", 8, 560, False, 3, False, then=_llama_page8_lengths),
    "llama-host-halves-twice-storage": Setup("llama", 4, 160, False, 2, False, then=_llama_host_halves_twice_storage),
    "hybrid-page2-ring": Setup("mellum_hybrid", 2, 452, False, 3, False, then=_hybrid_page2_ring),
    "llama-lora-page2-tenants": Setup("llama", 2, 432, False, 3, False, then=_llama_lora_page2_tenants),
    "llama-page4-clones-no-tree": Setup("llama", 4, 420, False, 4, False, then=_llama_page4_clones_no_tree),
    "qwen3-page4-rescaled": Setup("qwen3", 4, 476, False, 3, False, then=_qwen3_page4_rescaled),
    "llama-page8-agents": Setup("llama", 8, 528, False, 2, False, then=_llama_page8_agents),
    "recurrent-resident": Setup("lfm2", 1, 436, False, 3, False, then=_recurrent_resident),
    "hybrid-page8-rings": Setup("mellum_hybrid", 8, 496, False, 3, False, then=_hybrid_page8_rings),
    "hybrid-page4-emptied": Setup("mellum_hybrid", 4, 468, False, 2, False, then=_hybrid_page4_emptied),
    "llama-host-page4-tight": Setup("llama", 4, 148, False, 3, False, then=_long_ones),
    "llama-twins-grouped": Setup("llama", 1, 148, False, 4, False, then=_llama_twins_grouped),
    "llama-page2-tiles": Setup("llama", 2, 384, False, 4, False, then=_llama_page2_tiles),
    "llama-page4-bf16": Setup("llama", 4, 440, False, 3, False, then=_llama_page4_bf16),
    "recurrent-ubatches": Setup("lfm2", 1, 448, False, 3, False, then=_recurrent_ubatches),
    "qwen3-page4-regimes": Setup("qwen3", 4, 588, False, 3, False, then=_qwen3_page4_regimes),
    "llama-page2-captured": Setup("llama", 2, 408, False, 3, False, then=_llama_page2_captured),
    "recurrent-joined": Setup("lfm2", 1, 440, False, 3, False, then=_recurrent_joined),
    "qwen3-page2-upper": Setup("qwen3", 2, 472, False, 3, False, then=_qwen3_page2_upper),
    "llama-host-page4-scaled": Setup("llama", 4, 168, False, 2, False, then=_long_ones),
    "llama-host-page2-virtual": Setup("llama", 2, 156, False, 3, False, then=_long_ones),
    "llama-turns-ended": Setup("llama", 1, 308, False, 3, False, then=_llama_turns_ended),
    "llama-page2-strides": Setup("llama", 2, 520, False, 4, False, then=_llama_page2_strides),
    "llama-page4-shrinks": Setup("llama", 4, 428, False, 4, False, then=_llama_page4_shrinks),
    "llama-host-page8-unfenced-storage": Setup(
        "llama", 8, 184, False, 3, False, then=_llama_host_page8_unfenced_storage
    ),
    "llama-lora-page8-beside": Setup("llama", 8, 464, False, 4, False, then=_llama_lora_page8_beside),
    "qwen3-page8-slept": Setup("qwen3", 8, 480, False, 3, False, then=_qwen3_page8_slept),
    "recurrent-remapped": Setup("lfm2", 1, 452, False, 3, False, then=_recurrent_remapped),
    "llama-page4-briefs": Setup("llama", 4, 504, False, 3, False, then=_llama_page4_briefs),
    "hybrid-page2-spans": Setup("mellum_hybrid", 2, 476, False, 3, False, then=_hybrid_page2_spans),
    "recurrent-blocks": Setup("lfm2", 1, 460, False, 3, False, then=_recurrent_blocks),
    "llama-host-page8-halves-again-storage": Setup(
        "llama", 8, 176, False, 2, False, then=_llama_host_page8_halves_again_storage
    ),
    "qwen3-overlap-page2-mixed": Setup("qwen3", 2, 424, True, 4, False, then=_qwen3_overlap_page2_mixed),
    "llama-page16-wraps-retract": Setup("llama", 16, 544, False, 3, True, then=_llama_page16_wraps_retract),
    "qwen3-page16-groups": Setup("qwen3", 16, 576, False, 3, False, then=_qwen3_page16_groups),
}
# Whose weights are made large enough for attention to be seen in the answers; where they are made up, it is not.
TELLING = (
    "llama-page2-overrides",
    "llama-page4-rows",
    "llama-host-page8-pinned",
    "llama-overlap-page1-ends",
    "recurrent-parked",
    "llama-page32-mixed",
    "recurrent-reuse",
    "llama-overlap-page2-alone",
    "llama-page16-rounds",
    "llama-host-weights-storage",
    "llama-host-halves-storage",
    "llama-turns-whole",
    "llama-host-page4-lists",
    "llama-page4-trimmed",
    "llama-page8-forks",
    "llama-page4-pictures",
    "llama-page4-bursts",
    "hybrid-page4-far",
    "llama-host-halves-flushed-storage",
    "recurrent-tails-mixed",
    "llama-page8-chunks",
    "llama-page8-wide",
    "recurrent-handed-on",
    "llama-page4-repeats",
    "llama-lora-page4-apart",
    "hybrid-page4-inside",
    "recurrent-padded",
    "llama-page4-crush-retract",
    "llama-host-lossy-twice-storage",
    "llama-page4-turns",
    "recurrent-resumed-retract-no-tree",
    "llama-page2-many",
    "llama-page8-lengths",
    "llama-host-halves-twice-storage",
    "hybrid-page2-ring",
    "llama-lora-page2-tenants",
    "llama-page4-clones-no-tree",
    "qwen3-page4-rescaled",
    "llama-page8-agents",
    "recurrent-resident",
    "hybrid-page8-rings",
    "hybrid-page4-emptied",
    "llama-host-page4-tight",
    "llama-twins-grouped",
    "llama-page2-tiles",
    "llama-page4-bf16",
    "recurrent-ubatches",
    "qwen3-page4-regimes",
    "llama-page2-captured",
    "recurrent-joined",
    "qwen3-page2-upper",
    "llama-host-page4-scaled",
    "llama-host-page2-virtual",
    "llama-turns-ended",
    "llama-page2-strides",
    "llama-page4-shrinks",
    "llama-host-page8-unfenced-storage",
    "llama-lora-page8-beside",
    "qwen3-page8-slept",
    "recurrent-remapped",
    "llama-page4-briefs",
    "hybrid-page2-spans",
    "recurrent-blocks",
    "llama-host-page8-halves-again-storage",
    "qwen3-overlap-page2-mixed",
    "llama-page16-wraps-retract",
    "qwen3-page16-groups",
)
