"""Runs the continuous batching of transformers for the corpus: with one bug, or with none.

python transformers_engine.py FOLDER NAME...        # NAME: a bug's, or clean:SETUP
"""

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "data")]
sys.path.append(str(HERE.parent / "conformance"))

from forking import fork, wait_for  # noqa: E402


def fired_in(forward: list[int]):
    """Return what a patch calls before the first forward that reads the damage: it leaves a mark in the trace."""

    def fired() -> None:
        from kvcanary.recorder.engines.transformers.attachment import TransformersAttachment

        attachment = TransformersAttachment.current
        if not forward and attachment is not None and attachment.recorder is not None:
            forward.append(int(attachment.recorder.next_forward))
            attachment.recorder.mark("real bug", {"forward": forward[0]})

    return fired


def own_requests(setup: str) -> list:
    """Return the requests of setups that have no request in common with the others; none for those."""
    from driver import Request, random_prompt

    def ask(name: str, prompt: list[int], new_tokens: int, at_step: int = 0) -> Request:
        return Request(name=name, prompt=prompt, new_tokens=new_tokens, at_step=at_step)

    if setup == "hybrid-wide-page16":  # chunks that are longer than the window of 32, in a batch with short ones
        return [
            ask("a", random_prompt(41, 57), 20),
            ask("b", random_prompt(42, 12), 44),
            ask("c", random_prompt(43, 90), 14, 4),
            ask("d", random_prompt(44, 33), 24, 9),
            ask("e", random_prompt(45, 64), 10, 15),
        ]
    system = random_prompt(46, 26)
    if setup == "qwen-waves":  # one at a time and in pairs, while others decode
        return [
            ask("a", system + random_prompt(47, 10), 30),
            ask("b", random_prompt(48, 21), 26),
            ask("c", random_prompt(49, 37), 16, 5),
            ask("d", system + random_prompt(50, 19), 14, 12),
            ask("e", random_prompt(51, 18), 12, 17),
            ask("f", system + random_prompt(52, 6), 12, 17),
        ]
    if setup == "offload-qwen-alike":  # that begin alike and grow until there is no room for all
        return [
            ask("a", system + random_prompt(53, 5), 4),
            ask("b", system + random_prompt(54, 4), 52, 4),
            ask("c", system + random_prompt(55, 7), 34, 5),
            ask("d", system + random_prompt(56, 2), 36, 6),
            ask("e", random_prompt(57, 18), 16, 20),
        ]
    if setup == "prefill-first":  # prompts of several chunks, before which decodes wait
        return [
            ask("a", random_prompt(58, 9), 30),
            ask("b", random_prompt(59, 14), 24),
            ask("c", random_prompt(60, 70), 12, 6),
            ask("d", random_prompt(61, 31), 14, 11),
        ]
    if setup == "few-qwen-turns":  # turns of two talks, with others between them that need the room
        return [
            ask("a", system, 10),
            ask("b", random_prompt(62, 20), 12, 2),
            ask("c", random_prompt(63, 50), 18, 11),
            ask("d", random_prompt(64, 22), 20, 12),
            ask("e", system + random_prompt(65, 9), 12, 20),
            ask("f", random_prompt(62, 20) + random_prompt(66, 7), 12, 29),
        ]
    asked = random_prompt(67, 48)
    if setup == "qwen-verbatim-page16":  # word for word what was asked before, and of whole blocks
        return [
            ask("a", asked, 12),
            ask("b", random_prompt(68, 37), 22, 1),
            ask("c", asked[:32], 14, 8),
            ask("d", asked, 20, 16),
            ask("e", random_prompt(68, 37) + random_prompt(69, 6), 10, 27),
        ]
    if setup == "offload-qwen-crowd":  # that all grow, and leave the room to one after the other
        return [ask(name, random_prompt(70 + i, 12 + 3 * i), 58, 2 * i) for i, name in enumerate("abcde")]
    if setup == "prefill-first-qwen":  # whose prompts end in steps in which others decode
        return [
            ask("a", random_prompt(76, 11), 34),
            ask("b", random_prompt(77, 8), 28, 1),
            ask("c", random_prompt(78, 53), 16, 5),
            ask("d", random_prompt(79, 45), 14, 12),
        ]
    if setup == "hybrid-alike":  # that begin alike, and run on for longer than the window
        return [
            ask("a", system + random_prompt(80, 8), 40),
            ask("b", random_prompt(81, 19), 30, 2),
            ask("c", system + random_prompt(82, 14), 34, 6),
            ask("d", system + random_prompt(83, 5), 22, 20),
            ask("e", random_prompt(81, 19) + random_prompt(84, 9), 18, 34),
        ]
    if setup == "few-shared":  # two that are the same, one of which has long gone when others need the room
        return [
            ask("a", system + random_prompt(85, 3), 6),
            ask("b", system + random_prompt(85, 3), 44),
            ask("c", random_prompt(87, 16), 30),
            ask("d", random_prompt(88, 11), 40, 12),
            ask("e", system + random_prompt(89, 5), 12, 30),
        ]
    if setup == "offload-hybrid":  # that all grow, with a window and without
        return [ask(name, random_prompt(90 + i, 10 + 5 * i), 50, 2 * i) for i, name in enumerate("abcde")]
    if setup == "hybrid-tails":  # of less than a window, and that grow over it
        return [
            ask("a", random_prompt(95, 6), 38),
            ask("b", random_prompt(96, 19), 22, 3),
            ask("c", random_prompt(97, 45), 12, 9),
            ask("d", random_prompt(98, 11), 16, 18),
        ]
    if setup == "offload-qwen-grow":  # that grow until some are put back, with others behind them
        return [
            ask("a", random_prompt(99, 13), 46),
            ask("b", system + random_prompt(100, 4), 40, 1),
            ask("c", random_prompt(101, 21), 34, 3),
            ask("d", system + random_prompt(102, 9), 18, 14),
            ask("e", random_prompt(103, 30), 14, 22),
        ]
    if setup == "qwen-far":  # of which one is long, and another comes to be
        return [
            ask("a", random_prompt(104, 268), 16),
            ask("b", random_prompt(105, 17), 40, 2),
            ask("c", random_prompt(106, 243), 30, 7),
            ask("d", system + random_prompt(107, 12), 20, 13),
        ]
    if (
        setup == "llama-cancels"
    ):  # one of which is sent away when a part of it has been computed, and asked again by others
        long = random_prompt(108, 104)
        return [
            ask("a", random_prompt(109, 15), 36),
            ask("b", long, 20, 4),
            ask("c", random_prompt(110, 33), 22, 9),
            ask("d", long[:72] + random_prompt(111, 6), 16, 14),
            ask("e", long + random_prompt(112, 3), 12, 22),
        ]
    if setup == "qwen-page16-decodes":  # that run on for long, two or three at a time
        return [
            ask("a", random_prompt(113, 23), 44),
            ask("b", random_prompt(114, 40), 34, 2),
            ask("c", random_prompt(115, 9), 30, 12),
            ask("d", system + random_prompt(116, 11), 18, 40),
        ]
    if setup == "qwen-bytes":  # tokens of one byte, and the same with a second byte here and there
        head = [token % 250 + 4 for token in random_prompt(120, 32)]
        twin = head[:8] + [token + 256 * (place % 3 == 0) for place, token in enumerate(head[8:])]
        return [
            ask("a", head + random_prompt(121, 7), 18),
            ask("b", random_prompt(122, 26), 24, 1),
            ask("c", twin + random_prompt(123, 5), 16, 9),
            ask("d", head[:24] + random_prompt(124, 9), 12, 20),
        ]
    if setup == "hybrid-sawtooth":  # that come to be longer than the window while they are answered
        return [
            ask("a", random_prompt(130, 20), 36),
            ask("b", random_prompt(131, 51), 24, 2),
            ask("c", random_prompt(132, 9), 40, 8),
            ask("d", random_prompt(133, 37), 14, 19),
        ]
    if setup == "hybrid-together":  # that are all longer than the window, some alone in a step and some not
        return [
            ask("a", random_prompt(140, 43), 30),
            ask("b", random_prompt(141, 38), 22, 13),
            ask("c", random_prompt(142, 15), 34, 17),
            ask("d", random_prompt(143, 56), 12, 33),
        ]
    if setup == "hybrid-rings-page16":  # of many short chunks, that fill the window and go on
        return [
            ask("a", random_prompt(150, 75), 12),
            ask("b", random_prompt(151, 22), 20, 2),
            ask("c", random_prompt(152, 60), 16, 9),
            ask("d", random_prompt(153, 48), 10, 21),
        ]
    if setup == "qwen-contexts":  # of several parts each, while others are answered
        return [
            ask("a", random_prompt(160, 19), 32),
            ask("b", random_prompt(161, 84), 18, 3),
            ask("c", random_prompt(162, 27), 24, 6),
            ask("d", system + random_prompt(163, 66), 14, 15),
            ask("e", system + random_prompt(164, 41), 12, 26),
        ]
    if setup == "offload-hybrid-turned":  # that are longer than the window when they have to give way
        return [
            ask("a", random_prompt(165, 34), 30),
            ask("b", random_prompt(166, 39), 36, 1),
            ask("c", random_prompt(167, 23), 38, 3),
            ask("d", random_prompt(168, 28), 24, 6),
        ]
    if setup == "hybrid-clamped":  # of chunks that are shorter than the window, behind which others stand
        return [
            ask("a", random_prompt(170, 72), 16),
            ask("b", random_prompt(171, 27), 28, 2),
            ask("c", random_prompt(172, 55), 20, 7),
            ask("d", random_prompt(173, 40), 14, 17),
        ]
    if setup == "offload-qwen-suspends":  # that grow until some are suspended
        return [
            ask("a", random_prompt(174, 17), 48),
            ask("b", random_prompt(175, 26), 42, 1),
            ask("c", random_prompt(176, 14), 44, 4),
            ask("d", random_prompt(177, 31), 26, 9),
        ]
    if setup == "few-cancels":  # one of which takes the room of one that has gone, and is sent away between two chunks
        return [
            ask("a", random_prompt(180, 35), 6),
            ask("b", random_prompt(181, 95), 12, 3),
            ask("c", random_prompt(180, 35) + random_prompt(182, 4), 16, 10),
            ask("d", random_prompt(183, 21), 14, 13),
        ]
    if setup == "qwen-new-weights":  # that begin alike before and behind new weights
        return [
            ask("a", system + random_prompt(190, 7), 14),
            ask("b", random_prompt(191, 15), 12),
            ask("c", system + random_prompt(192, 9), 18, 14),
            ask("d", random_prompt(191, 15) + random_prompt(193, 6), 14, 14),
            ask("e", system + random_prompt(192, 5), 12, 23),
        ]
    if setup == "few-qwen-outgrown":  # that grow until there is no room for all of their next tokens
        return [
            ask("a", random_prompt(200, 20), 38),
            ask("b", random_prompt(201, 17), 34),
            ask("c", random_prompt(202, 25), 28, 2),
            ask("d", random_prompt(203, 12), 14, 21),
        ]
    if setup == "llama-places":  # of several lengths, two of which begin alike
        return [
            ask("a", random_prompt(210, 29), 24),
            ask("b", system + random_prompt(211, 8), 20, 1),
            ask("c", random_prompt(212, 47), 14, 6),
            ask("d", system + random_prompt(213, 12), 16, 14),
        ]
    if setup == "llama-seats":  # of which some come to where others have left off
        return [
            ask("a", random_prompt(220, 20), 14),
            ask("b", random_prompt(221, 31), 18),
            ask("c", random_prompt(222, 13), 48, 1),
            ask("d", random_prompt(223, 33), 16, 16),
            ask("e", random_prompt(224, 48), 12, 22),
            ask("f", random_prompt(225, 10), 10, 30),
        ]
    if setup == "qwen-goes-on":  # some of which go on behind what others have been answered
        return [
            ask("a", random_prompt(230, 21), 19),
            ask("b", random_prompt(231, 18), 30),
            ask("c", random_prompt(232, 30), 24, 2),
            ask("d", random_prompt(233, 7), 16, 24),
            ask("e", random_prompt(234, 11), 14, 36),
            ask("f", random_prompt(235, 5), 10, 40),
        ]
    if setup == "hybrid-cancels":  # one of which is sent away while others run on with full windows
        return [
            ask("a", random_prompt(240, 38), 42),
            ask("b", random_prompt(241, 44), 30, 2),
            ask("c", random_prompt(242, 29), 26, 5),
            ask("d", random_prompt(243, 35), 24, 11),
            ask("e", random_prompt(244, 21), 14, 33),
        ]
    if setup == "qwen-sleeps":  # that begin alike before and behind a sleep
        return [
            ask("a", random_prompt(250, 33), 12),
            ask("b", system + random_prompt(251, 4), 15, 1),
            ask("c", random_prompt(250, 33) + random_prompt(252, 8), 20, 16),
            ask("d", random_prompt(253, 19), 16, 17),
            ask("e", system + random_prompt(254, 11), 14, 22),
        ]
    if setup == "offload-hybrid-brief":  # of which two at a time find room, with windows that are full
        return [
            ask("a", random_prompt(260, 33), 19),
            ask("b", random_prompt(261, 37), 20, 1),
            ask("c", random_prompt(262, 26), 17, 3),
        ]
    if setup == "qwen-refit":  # that are answered while new weights come, before and behind which some begin alike
        return [
            ask("a", system + random_prompt(270, 6), 28),
            ask("b", random_prompt(271, 24), 20, 3),
            ask("c", random_prompt(272, 36), 16, 9),
            ask("d", system + random_prompt(273, 13), 14, 19),
            ask("e", random_prompt(271, 24) + random_prompt(274, 5), 12, 26),
        ]
    if setup == "qwen-one-left":  # of which a chunk of one token is left
        return [
            ask("a", random_prompt(280, 41), 26),
            ask("b", random_prompt(281, 40), 30, 4),
            ask("c", random_prompt(282, 77), 13, 9),
            ask("d", random_prompt(283, 9), 12, 30),
        ]
    if setup == "offload-hybrid-shorter":  # some of which are the beginning of what was asked before
        long = random_prompt(290, 66)
        return [
            ask("a", long, 14),
            ask("b", random_prompt(291, 23), 38, 2),
            ask("c", long[:45], 18, 19),
            ask("d", random_prompt(292, 31), 16, 24),
        ]
    if setup == "offload-stages":  # that grow until there is no room for all
        return [
            ask("a", random_prompt(300, 22), 40),
            ask("b", random_prompt(301, 15), 38, 1),
            ask("c", random_prompt(302, 28), 30, 2),
            ask("d", random_prompt(303, 12), 16, 12),
        ]
    if setup == "qwen-adapters":  # that begin alike, with the base model and with two adapters
        return [
            ask("a", system + random_prompt(310, 7), 20),
            ask("b", random_prompt(311, 18), 28, 1),
            ask("c", system + random_prompt(312, 11), 18, 6),
            ask("d", system + random_prompt(313, 4), 16, 13),
            ask("e", random_prompt(311, 18) + random_prompt(314, 8), 14, 20),
            ask("f", system + random_prompt(315, 9), 12, 28),
        ]
    if setup == "hybrid-long-chunks":  # of chunks that are longer than the window, alone and beside others
        return [
            ask("a", random_prompt(320, 131), 18),
            ask("b", random_prompt(321, 24), 26, 1),
            ask("c", random_prompt(322, 98), 20, 9),
            ask("d", random_prompt(323, 167), 12, 16),
        ]
    if setup == "offload-qwen-store":  # some of which begin alike and come together, behind one that has been stored
        return [
            ask("a", system + random_prompt(330, 15), 9),
            ask("b", random_prompt(331, 29), 30, 2),
            ask("c", system + random_prompt(332, 10), 16, 14),
            ask("d", system + random_prompt(333, 6), 18, 14),
            ask("e", random_prompt(334, 19), 12, 17),
        ]
    if setup == "offload-qwen-behind-hits":  # of which the front is hit and the rest lies on the host
        long = random_prompt(340, 58)
        return [
            ask("a", long[:25], 12),
            ask("b", random_prompt(341, 17), 34, 1),
            ask("c", long, 10, 3),
            ask("d", long[:50] + random_prompt(342, 9), 18, 18),
            ask("e", long + random_prompt(343, 6), 14, 24),
        ]
    if setup == "offload-transfers":  # that grow until some give way, one of which is sent away on its way back
        return [
            ask("a", random_prompt(350, 19), 44),
            ask("b", random_prompt(351, 24), 40, 1),
            ask("c", random_prompt(352, 16), 42, 3),
            ask("d", random_prompt(353, 27), 30, 8),
            ask("e", random_prompt(354, 13), 26, 20),
            ask("f", random_prompt(355, 21), 20, 59),
        ]
    if setup == "qwen-recycled":  # that come to where shorter ones have left off, and are computed in several chunks
        return [
            ask("a", random_prompt(360, 20), 8),
            ask("b", random_prompt(361, 13), 15),
            ask("c", random_prompt(362, 34), 40, 2),
            ask("d", random_prompt(363, 77), 14, 11),
            ask("e", random_prompt(364, 91), 12, 19),
            ask("f", random_prompt(365, 58), 10, 31),
        ]
    if setup == "llama-capped":  # that share their chunks with the decodes of others
        return [
            ask("a", random_prompt(370, 14), 38),
            ask("b", random_prompt(371, 62), 20, 3),
            ask("c", random_prompt(372, 22), 26, 8),
            ask("d", random_prompt(373, 105), 14, 14),
        ]
    if setup == "llama-sessions":  # one behind the other, most of which begin alike, beside one that runs on
        return [
            ask("a", system + random_prompt(380, 13), 16),
            ask("b", random_prompt(381, 20), 84, 1),
            ask("c", system + random_prompt(382, 19), 15, 20),
            ask("d", system + random_prompt(383, 9), 18, 40),
            ask("e", system + random_prompt(384, 30), 12, 62),
        ]
    if setup == "qwen-long-prefills":  # of which some are prefilled in many chunks, and some in one
        return [
            ask("a", random_prompt(390, 39), 30),
            ask("b", random_prompt(391, 118), 18, 2),
            ask("c", random_prompt(392, 16), 26, 8),
            ask("d", random_prompt(393, 87), 14, 15),
        ]
    if setup == "offload-qwen-stores":  # that come one behind the other, and begin like one that is being stored
        return [
            ask("a", system + random_prompt(400, 21), 11),
            ask("b", random_prompt(401, 27), 40, 1),
            ask("c", system + random_prompt(400, 21) + random_prompt(402, 6), 16, 15),
            ask("d", system + random_prompt(400, 21) + random_prompt(403, 11), 12, 26),
        ]
    if setup == "few-turned-away":  # of which one begins like another, and finds no room for the rest
        return [
            ask("a", system + random_prompt(410, 5), 4),
            ask("b", random_prompt(411, 17), 36),
            ask("c", random_prompt(412, 12), 30, 1),
            ask("d", system + random_prompt(413, 20), 14, 9),
        ]
    if setup == "llama-grows":  # that have nothing in common, and grow by chunks and by tokens
        return [
            ask("a", random_prompt(420, 27), 40),
            ask("b", random_prompt(421, 70), 34, 2),
            ask("c", random_prompt(422, 11), 30, 7),
            ask("d", random_prompt(423, 45), 26, 15),
        ]
    if setup == "offload-hybrid-slots":  # that take turns when there is no room for all, while some run on
        return [
            ask("a", random_prompt(430, 29), 38),
            ask("b", random_prompt(431, 21), 44, 1),
            ask("c", random_prompt(432, 36), 28, 4),
            ask("d", random_prompt(433, 17), 32, 9),
        ]
    if setup == "hybrid-padded":  # that begin with less than a window and with more, and run on over several
        return [
            ask("a", random_prompt(440, 13), 66),
            ask("b", random_prompt(441, 29), 40, 3),
            ask("c", random_prompt(442, 61), 24, 8),
            ask("d", random_prompt(443, 22), 30, 21),
        ]
    if setup == "offload-qwen-saves":  # that give way and leave their room to those that stay
        return [
            ask("a", random_prompt(450, 25), 42),
            ask("b", random_prompt(451, 18), 46),
            ask("c", random_prompt(452, 29), 36, 2),
            ask("d", random_prompt(453, 10), 34, 5),
        ]
    if setup == "few-orphans":  # that begin together and all need a next block at the same time, until there is none
        return [
            ask("a", random_prompt(460, 16), 31),
            ask("b", random_prompt(461, 16), 30),
            ask("c", random_prompt(462, 40), 24),
            ask("d", random_prompt(463, 12), 14, 34),
        ]
    if setup == "qwen-rows":  # of the same tokens, for some of which rows of their own are put in
        asked = random_prompt(470, 38)
        return [
            ask("a", asked, 16),
            ask("b", random_prompt(471, 23), 30, 1),
            ask("c", asked[:33], 18, 7),
            ask("d", asked + random_prompt(472, 5), 14, 13),
            ask("e", asked[:25] + random_prompt(473, 10), 12, 22),
        ]
    if setup == "llama-rows":  # of which some grow past what their prompts took, beside others that run on
        return [
            ask("a", random_prompt(480, 38), 34),
            ask("b", random_prompt(481, 30), 40, 1),
            ask("c", random_prompt(482, 51), 22, 4),
            ask("d", random_prompt(483, 17), 28, 10),
        ]
    if setup == "offload-qwen-layers":  # two of which are stored, and begin like those that come behind them
        first, second = random_prompt(490, 36), random_prompt(491, 45)
        return [
            ask("a", first, 10),
            ask("b", random_prompt(492, 22), 48, 1),
            ask("c", second, 9, 14),
            ask("d", second[:41] + random_prompt(493, 7), 16, 27),
            ask("e", first + random_prompt(494, 9), 14, 33),
        ]
    if setup == "offload-qwen-records":  # one of which is stored, and asked again by others at its side and behind it
        asked = random_prompt(500, 43)
        return [
            ask("a", random_prompt(501, 29), 44),
            ask("b", asked, 8, 2),
            ask("c", asked + random_prompt(502, 5), 18, 16),
            ask("d", asked[:34] + random_prompt(503, 10), 16, 22),
        ]
    if setup == "offload-buffers":  # of lengths that are no whole blocks when they have to give way
        return [
            ask("a", random_prompt(510, 21), 40),
            ask("b", random_prompt(511, 27), 36),
            ask("c", random_prompt(512, 14), 42, 2),
            ask("d", random_prompt(513, 19), 24, 7),
        ]
    if setup == "llama-stretched":  # of which some stay short, and some come to be long
        return [
            ask("a", random_prompt(520, 34), 50),
            ask("b", random_prompt(521, 12), 30, 2),
            ask("c", random_prompt(522, 88), 16, 18),
            ask("d", random_prompt(523, 25), 24, 23),
        ]
    if setup == "offload-qwen-rebaked":  # that begin alike before and behind new weights, one of which is stored
        asked = random_prompt(530, 37)
        return [
            ask("a", asked, 13),
            ask("b", random_prompt(531, 9), 12),
            ask("c", random_prompt(532, 25), 26, 13),
            ask("d", asked + random_prompt(533, 8), 18, 15),
            ask("e", asked[:33] + random_prompt(534, 5), 12, 22),
        ]
    if setup == "llama-copies":  # two that are the same at the same time, and others that come when they have gone
        asked = random_prompt(540, 35)
        return [
            ask("a", asked, 6),
            ask("b", asked, 14),
            ask("c", random_prompt(541, 18), 38, 1),
            ask("d", random_prompt(542, 46), 22, 17),
            ask("e", asked + random_prompt(543, 6), 16, 22),
            ask("f", asked[:27] + random_prompt(544, 9), 12, 29),
        ]
    if setup == "few-qwen-states":  # some of which come to where others have left off in the middle of a block
        return [
            ask("a", system + random_prompt(550, 5), 9),
            ask("b", random_prompt(551, 21), 40, 1),
            ask("c", random_prompt(552, 34), 22, 13),
            ask("d", system + random_prompt(553, 12), 18, 20),
            ask("e", random_prompt(554, 15), 12, 33),
        ]
    if setup == "offload-qwen-chunks":  # two of which are stored, and asked again in whole and in part
        first, second = random_prompt(560, 50), random_prompt(561, 33)
        return [
            ask("a", first, 8),
            ask("b", random_prompt(562, 19), 46, 1),
            ask("c", second, 11, 5),
            ask("d", first[:43] + random_prompt(563, 7), 16, 20),
            ask("e", second + random_prompt(564, 8), 14, 27),
            ask("f", first + random_prompt(565, 4), 10, 33),
        ]
    if setup == "hybrid-overlaps":  # of several chunks each, beside others whose windows are full
        return [
            ask("a", random_prompt(570, 36), 44),
            ask("b", random_prompt(571, 61), 24, 4),
            ask("c", random_prompt(572, 17), 34, 10),
            ask("d", random_prompt(573, 82), 14, 18),
        ]
    if setup == "llama-mixed-adapters":  # some of which are for the base model, alone and beside those with adapters
        return [
            ask("a", system + random_prompt(580, 9), 20),
            ask("b", random_prompt(581, 23), 18, 6),
            ask("c", system + random_prompt(582, 6), 24, 9),
            ask("d", random_prompt(583, 40), 16, 15),
            ask("e", system + random_prompt(584, 13), 14, 26),
            ask("f", random_prompt(583, 40) + random_prompt(585, 5), 10, 32),
        ]
    if setup == "qwen-interleaved-page16":  # that take their blocks one after the other, while others are answered
        return [
            ask("a", random_prompt(590, 44), 36),
            ask("b", system + random_prompt(591, 15), 30, 2),
            ask("c", random_prompt(592, 70), 20, 7),
            ask("d", system + random_prompt(593, 27), 18, 16),
            ask("e", random_prompt(594, 12), 22, 21),
        ]
    if setup == "hybrid-every-row":  # of which the long ones come in several chunks, beside others
        return [
            ask("a", random_prompt(610, 15), 40),
            ask("b", random_prompt(611, 94), 18, 3),
            ask("c", random_prompt(612, 27), 26, 8),
            ask("d", random_prompt(613, 76), 12, 17),
        ]
    if setup == "glm-partial":  # some of which begin alike, and go on where others have left off
        return [
            ask("a", system + random_prompt(620, 11), 18),
            ask("b", random_prompt(621, 33), 36, 1),
            ask("c", system + random_prompt(622, 7), 22, 9),
            ask("d", random_prompt(623, 58), 14, 21),
            ask("e", system + random_prompt(624, 16), 12, 27),
        ]
    if setup == "offload-lost-loads":  # two of which are stored, and asked again when a part of the one is lost
        first, second = random_prompt(630, 47), random_prompt(631, 35)
        return [
            ask("a", first, 9),
            ask("b", random_prompt(632, 24), 50, 1),
            ask("c", second, 12, 4),
            ask("d", second + random_prompt(633, 6), 14, 21),
            ask("e", first + random_prompt(634, 5), 18, 26),
            ask("f", random_prompt(635, 13), 16, 29),
        ]
    if setup == "llama-strided-page16":  # that run on for long, some behind what others have left
        return [
            ask("a", random_prompt(640, 37), 40),
            ask("b", system + random_prompt(641, 13), 28, 3),
            ask("c", random_prompt(642, 82), 20, 9),
            ask("d", system + random_prompt(643, 22), 16, 18),
        ]
    if setup == "llama-same-ids":  # one behind the other, while most of those before still run
        return [
            ask("a", system + random_prompt(650, 6), 38),
            ask("b", random_prompt(651, 41), 36, 1),
            ask("c", random_prompt(652, 22), 30, 4),
            ask("d", random_prompt(653, 28), 34, 11),
            ask("e", system + random_prompt(654, 15), 14, 20),
        ]
    return []


def cancel(name: str, at_step: int) -> None:
    """Have a request cancelled before a step is prepared, and its answer handed out as far as it has come."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    prepare, steps = ContinuousBatchProcessor.prepare_next_batch, [0]

    def prepare_next_batch(processor) -> bool:
        scheduler = processor.scheduler
        if steps[0] == at_step and name in scheduler.active_requests:
            state = scheduler.active_requests[name]
            scheduler.set_request_cancellation(name)
            processor.output_router.deliver(state.to_generation_output())
        ready = prepare(processor)
        steps[0] += ready
        return ready

    ContinuousBatchProcessor.prepare_next_batch = prepare_next_batch


def goes_on(requests: list, behind: dict[str, str]) -> None:
    """Have a request's prompt begin with all of another's, and with what that was answered, when it has ended."""
    from transformers.generation.continuous_batching.scheduler import Scheduler

    finish, prompts = Scheduler.finish_request, {request.name: request.prompt for request in requests}

    def finish_request(scheduler, request_id: str) -> None:
        state = scheduler.active_requests.get(request_id)
        for name, first in behind.items():
            if state is not None and first == request_id:
                prompts[name][:0] = state.initial_tokens + state.generated_tokens
        finish(scheduler, request_id)

    Scheduler.finish_request = finish_request


def empty_prefix_cache(processor) -> None:
    """Have nothing found any more that was computed before."""
    processor.cache.evict_cached_blocks()


def forget_kept() -> None:
    """Have nothing found any more that is kept on the host: the weights that it was computed by are part of its key."""
    KEPT.clear()


def new_weights(at_step: int) -> None:
    """Have the model's weights replaced before a step is prepared, when nothing runs."""
    import torch
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    prepare, step, models = ContinuousBatchProcessor.prepare_next_batch, ContinuousBatchProcessor._generation_step, []

    def prepare_next_batch(processor) -> bool:
        if len(models) == at_step and not processor.scheduler.active_requests:
            drawn = torch.Generator().manual_seed(2)
            with torch.no_grad():
                for weights in models[-1].parameters():
                    weights += 0.02 * torch.randn(weights.shape, generator=drawn)
            empty_prefix_cache(processor)
            forget_kept()
        return prepare(processor)

    def generation_step(processor, model) -> None:
        models.append(model)
        step(processor, model)

    ContinuousBatchProcessor.prepare_next_batch = prepare_next_batch
    ContinuousBatchProcessor._generation_step = generation_step


def begin_anew(processor) -> None:
    """Have nothing found any more that was computed before, and all that runs computed again from its beginning."""
    from transformers.generation.continuous_batching.requests import RequestStatus

    scheduler = processor.scheduler
    for name, state in list(scheduler.active_requests.items()):
        fresh = state.create_equivalent_initial_request()
        state._status = RequestStatus.FINISHED
        processor.cache.free_blocks(name, no_cache=True)
        scheduler.finish_request(name)
        scheduler.add_waiting_request(fresh)
    empty_prefix_cache(processor)


def refit(at_step: int) -> None:
    """Have the model's weights replaced before a step is prepared, while requests are answered."""
    import torch
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    prepare, step, models = ContinuousBatchProcessor.prepare_next_batch, ContinuousBatchProcessor._generation_step, []

    def prepare_next_batch(processor) -> bool:
        if len(models) == at_step:
            drawn = torch.Generator().manual_seed(3)
            with torch.no_grad():
                for weights in models[-1].parameters():
                    weights += 0.05 * torch.randn(weights.shape, generator=drawn)
            begin_anew(processor)
        return prepare(processor)

    def generation_step(processor, model) -> None:
        models.append(model)
        step(processor, model)

    ContinuousBatchProcessor.prepare_next_batch = prepare_next_batch
    ContinuousBatchProcessor._generation_step = generation_step


def sleeps(at_step: int) -> None:
    """Have the cache's memory taken away before a step is prepared, when nothing runs, and come back filled with zeros."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    prepare, slept, steps = ContinuousBatchProcessor.prepare_next_batch, [], [0]

    def prepare_next_batch(processor) -> bool:
        if steps[0] >= at_step and not slept and not processor.scheduler.active_requests:
            empty_prefix_cache(processor)
            processor.cache.cache_tensor.zero_()
            slept.append(True)
        ready = prepare(processor)
        steps[0] += ready
        return ready

    ContinuousBatchProcessor.prepare_next_batch = prepare_next_batch


ADAPTERS = {"a": 1, "b": 0, "c": 2, "d": 1, "e": 2, "f": 0}  # of the requests of qwen-adapters; 0 is the base model


# Of the requests of llama-mixed-adapters.
MIXED_ADAPTERS = {"a": 0, "b": 1, "c": 0, "d": 2, "e": 0, "f": 2}


def stacked(adapters: list[int]) -> list[int]:
    """Return which adapter each token of a step is computed with, by what its request asks for; 0 for the base model."""
    return adapters


def first_parent(adapter: int) -> int | None:
    """Return what the key of a prompt's first block goes on from: the adapter that the prompt is computed with."""
    return adapter or None


def adapters(of: dict[str, int]) -> None:
    """Have requests computed with adapters of their own, 0 for none, and their blocks known by these, too."""
    import torch
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    step, search = ContinuousBatchProcessor._generation_step, PagedAttentionCache.search_prefix_match
    mark, key = PagedAttentionCache.mark_complete_blocks, cache_allocator.compute_block_hash
    now: list[int] = [0]  # the adapter of the request whose blocks are looked for or entered
    drawn = torch.Generator().manual_seed(4)
    halves: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}  # by adapter and projection

    def added(name: str, rows: torch.Tensor):
        def hook(module, inputs, output):
            for adapter in set(of.values()) - {0}:
                if (adapter, name) not in halves:
                    sizes = (module.in_features, 4), (4, module.out_features)
                    halves[adapter, name] = tuple(0.3 * torch.randn(size, generator=drawn) for size in sizes)
                down, up = halves[adapter, name]
                output = output + (inputs[0] @ down @ up) * (rows == adapter)[: output.shape[1], None]
            return output

        return hook

    def generation_step(processor, model) -> None:
        batch = processor.inputs_and_outputs.requests_in_batch
        asked = [of[future.state.request_id] for future in batch for _ in range(future.query_length)]
        rows = torch.tensor(stacked(asked))
        hooks = [
            module.register_forward_hook(added(name, rows))
            for name, module in model.named_modules()
            if name.endswith(("k_proj", "v_proj"))
        ]
        step(processor, model)
        for hook in hooks:
            hook.remove()

    def search_prefix_match(cache, request_id, prompt_ids) -> int:
        now[0] = of[request_id]
        return search(cache, request_id, prompt_ids)

    def mark_complete_blocks(cache, state, complete_blocks) -> None:
        now[0] = of[state.request_id]
        mark(cache, state, complete_blocks)

    def compute_block_hash(parent_hash, tokens) -> int:
        return key(first_parent(now[0]) if parent_hash is None else parent_hash, tokens)

    ContinuousBatchProcessor._generation_step = generation_step
    PagedAttentionCache.search_prefix_match = search_prefix_match
    PagedAttentionCache.mark_complete_blocks = mark_complete_blocks
    cache_allocator.compute_block_hash = compute_block_hash


KEPT: dict[int, int] = {}  # by the key of a block, the host's block in which it is kept


def kept_blocks(keys: list[int], hit: int) -> list[int]:
    """Return the host's blocks for all of a prompt's, of which the first `hit` are those that the device has, too."""
    return [KEPT[key] for key in keys]


LOST: set[int] = set()  # the host's blocks that cannot be read


def failed_loads(hosts: list[int]) -> list[int]:
    """Return those of the host's blocks that could not be loaded, as the scheduler is told."""
    return [block for block in hosts if block in LOST]


def loses(request: str, place: int) -> None:
    """Have one of the blocks that are kept of a request never come back from the host: behind `keeps_on_host`."""
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
    from transformers.generation.continuous_batching.scheduler import Scheduler

    finish, restore = Scheduler.finish_request, OffloadingManager.restore_scheduled_requests

    def finish_request(scheduler, request_id: str) -> None:
        kept = len(KEPT)
        finish(scheduler, request_id)
        if request_id == request and len(KEPT) > kept:
            LOST.add(list(KEPT.values())[kept + place])

    def restore_scheduled_requests(manager, requests_in_batch) -> None:
        ((name, allocator),) = manager.cache.cache_allocators.items()
        blocks: list[int] = []
        for future in requests_in_batch:
            if future.state.is_cpu_offloaded:
                stored = manager._request_id_to_cpu_blocks[future.state.request_id][name]
                table = allocator.block_table[future.state.request_id]
                blocks += [block for host, block in zip(stored, table, strict=False) if host in LOST]
        had = allocator._copy_view[blocks]
        restore(manager, requests_in_batch)
        if blocks:
            allocator._copy_view[blocks] = had

    Scheduler.finish_request = finish_request
    OffloadingManager.restore_scheduled_requests = restore_scheduled_requests


def keeps_on_host(of: set[str], front: int) -> None:
    """Have the full blocks of some requests kept on the host when they have ended, those behind the first `front` of them
    no longer on the device, and loaded by whoever begins alike.
    """
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
    from transformers.generation.continuous_batching.requests import RequestStatus
    from transformers.generation.continuous_batching.scheduler import Scheduler

    begin, finish, infer = OffloadingManager.__init__, Scheduler.finish_request, Scheduler._infer_request_tokens
    restore, managers = OffloadingManager.restore_scheduled_requests, []
    hits: dict[str, int] = {}

    def keys_of(tokens: list[int], size: int) -> list[int]:
        keys: list[int] = []
        for end in range(size, len(tokens) + 1, size):
            keys.append(cache_allocator.compute_block_hash(keys[-1] if keys else None, tokens[end - size : end]))
        return keys

    def initialize(manager, *args, **kwargs) -> None:
        begin(manager, *args, **kwargs)
        managers.append(manager)
        free = manager._cpu_pool.free_blocks
        manager._cpu_pool.free_blocks = lambda index, ids: free(index, [b for b in ids if b not in KEPT.values()])

    def finish_request(scheduler, request_id: str) -> None:
        state, manager = scheduler.active_requests.get(request_id), managers[-1]
        if request_id in of and state is not None and state.status == RequestStatus.FINISHED:
            ((name, allocator),) = scheduler.cache.cache_allocators.items()
            tokens = (state.initial_tokens + state.generated_tokens)[: state.position_offset]
            keys, table = keys_of(tokens, allocator.tokens_per_page), allocator.block_table[request_id]
            if request_id in manager._offload_to_cpu([state], {request_id: {name: table[: len(keys)]}}):
                KEPT.update(zip(keys, manager._request_id_to_cpu_blocks.pop(request_id)[name], strict=True))
            state.is_cpu_offloaded = False
            allocator.block_table[request_id] = table[front:]
            allocator.free_blocks(request_id, no_cache=True)
            allocator.block_table[request_id] = table[:front]
        finish(scheduler, request_id)

    def infer_request_tokens(scheduler, state, *args) -> list[int]:
        fresh = state.status == RequestStatus.PENDING and not state.is_cpu_offloaded and not state.position_offset
        tokens = infer(scheduler, state, *args)
        ((name, allocator),) = scheduler.cache.cache_allocators.items()
        size = allocator.tokens_per_page
        keys, hit = keys_of(state.initial_tokens[:-1], size), state.position_offset // size
        while keys and keys[-1] not in KEPT:
            keys.pop()
        hosts = [KEPT[key] for key in keys] if LOST else []
        failed = failed_loads(hosts)
        if failed:  # what is behind them is computed
            del keys[hosts.index(failed[0]) :]
        if not fresh or len(keys) <= hit:
            return tokens
        hits[state.request_id], state.is_cpu_offloaded = hit, True
        managers[-1]._request_id_to_cpu_blocks[state.request_id] = {name: kept_blocks(keys, hit)}
        state.position_offset, state.remaining_prefill_tokens = (
            len(keys) * size,
            state.initial_tokens[len(keys) * size :],
        )
        return state.remaining_prefill_tokens

    def restore_scheduled_requests(manager, requests_in_batch) -> None:
        restore(manager, requests_in_batch)
        for future in requests_in_batch:
            for name in manager.cache.cache_allocators:
                hit = hits.pop(future.state.request_id, 0)
                if hit:  # which were entered long ago
                    future.complete_blocks[name] -= hit

    OffloadingManager.__init__, Scheduler.finish_request = initialize, finish_request
    Scheduler._infer_request_tokens = infer_request_tokens
    OffloadingManager.restore_scheduled_requests = restore_scheduled_requests


def may_leave(landed: bool) -> bool:
    """Return whether a request that was sent away gives its pages back, by whether what is sent to them has landed."""
    return landed


def land(processor, blocks: list[int], sent) -> None:
    """Have what was sent land where it was sent to."""
    (allocator,) = processor.cache.cache_allocators.values()
    allocator._copy_view[blocks] = sent


def loads_take(steps: int) -> None:
    """Have what comes back from the host take some steps, and who comes back first sent away while it is on its way."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
    from transformers.generation.continuous_batching.scheduler import Scheduler

    prepare, waiting = ContinuousBatchProcessor.prepare_next_batch, Scheduler._get_waiting_candidates
    now, managers, sent_away = [0], [], []
    on_its_way: dict[str, tuple] = {}  # when it began, where it goes, and what
    arrived: set[str] = set()

    def begins(scheduler, state) -> bool:
        if not scheduler.cache.can_store_request_tokens(state, 1):
            return False
        ((name, allocator),) = scheduler.cache.cache_allocators.items()
        stored = managers[-1]._request_id_to_cpu_blocks[state.request_id][name]
        blocks = allocator.block_table[state.request_id][: len(stored)]
        on_its_way[state.request_id] = (now[0], blocks, managers[-1]._cpu_views[name][stored[: len(blocks)]].clone())
        return True

    def waiting_candidates(scheduler) -> list:
        (allocator,) = scheduler.cache.cache_allocators.values()
        ready = []
        for state in waiting(scheduler):
            name = state.request_id
            if not state.is_cpu_offloaded or (name in arrived and name in allocator.block_table):
                ready.append(state)
            elif name not in on_its_way and begins(scheduler, state):
                arrived.discard(name)
                sent_away[:] = sent_away or [name]
        return ready

    def prepare_next_batch(processor) -> bool:
        managers[:] = [processor.offloading_manager]
        for name, (begun, blocks, sent) in list(on_its_way.items()):
            state, landed = processor.scheduler.waiting_requests.get(name), now[0] >= begun + steps
            if state is not None and name in sent_away and now[0] > begun and may_leave(landed):
                processor.scheduler.set_request_cancellation(name)
                processor.output_router.deliver(state.to_generation_output())
            if landed:
                if state is None:
                    land(processor, blocks, sent)
                arrived.add(name)
                del on_its_way[name]
        ready = prepare(processor)
        now[0] += 1
        return ready

    ContinuousBatchProcessor.prepare_next_batch = prepare_next_batch
    Scheduler._get_waiting_candidates = waiting_candidates


# By request of qwen-rows: the places of its prompt for which it brings a row of its own, in place of its token's.
BROUGHT: dict[str, range] = {"a": range(4, 21), "c": range(0), "d": range(4, 21), "e": range(12, 25)}


def whose_rows(request_id: str, first: int, last: int) -> list[int]:
    """Return what the key of a block has of where its rows come from: the places in it that are not its tokens'."""
    return [place for place in range(first, last) if place in BROUGHT.get(request_id, ())]


def rows_are_brought() -> None:
    """Have rows put in for some tokens of prompts, the same for all, and blocks known by which of theirs these are."""
    import torch
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    step, search = ContinuousBatchProcessor._generation_step, PagedAttentionCache.search_prefix_match
    mark, key = PagedAttentionCache.mark_complete_blocks, cache_allocator.compute_block_hash
    now: list[str] = [""]  # the request whose blocks are looked for or entered
    ends: dict[int, int] = {}  # of a block, by its key

    def generation_step(processor, model) -> None:
        own: list[bool] = []
        for future in processor.inputs_and_outputs.requests_in_batch:
            end = future.state.position_offset
            brought = BROUGHT.get(future.state.request_id, ())
            own += [place in brought for place in range(end - future.query_length, end)]
        rows = torch.tensor(own)

        def put_in(module, inputs, output):
            output[0, : len(rows)][rows] = module.weight[198]
            return output

        hook = model.get_input_embeddings().register_forward_hook(put_in)
        step(processor, model)
        hook.remove()

    def search_prefix_match(cache, request_id, prompt_ids) -> int:
        now[0] = request_id
        return search(cache, request_id, prompt_ids)

    def mark_complete_blocks(cache, state, complete_blocks) -> None:
        now[0] = state.request_id
        mark(cache, state, complete_blocks)

    def compute_block_hash(parent_hash, tokens) -> int:
        first = 0 if parent_hash is None else ends[parent_hash]
        found = key(parent_hash, [*tokens, *whose_rows(now[0], first, first + len(tokens))])
        ends[found] = first + len(tokens)
        return found

    ContinuousBatchProcessor._generation_step = generation_step
    PagedAttentionCache.search_prefix_match = search_prefix_match
    PagedAttentionCache.mark_complete_blocks = mark_complete_blocks
    cache_allocator.compute_block_hash = compute_block_hash


def by_address() -> None:
    """Have free pages given out from the lowest on."""
    from transformers.generation.continuous_batching.cache_allocators import CachePool

    reset = CachePool.reset

    def from_the_lowest(pool) -> None:
        reset(pool)
        pool.free_sectors.reverse()

    CachePool.reset = from_the_lowest


def glm():
    """Return three full-attention layers whose keys and queries are turned in their first half alone."""
    from transformers import GlmConfig

    return GlmConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_id=[511],
        bos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )


def generate(setup: str, folder: Path) -> None:
    """Run seeded requests, some of which share a prefix, through the engine."""
    import driver
    from driver import Request, gemma3, llama, qwen3, random_prompt, record

    shared = random_prompt(1, 30)
    requests = [
        Request(name="a", prompt=shared + random_prompt(2, 9), new_tokens=22),
        Request(name="b", prompt=random_prompt(3, 61), new_tokens=18),
        Request(name="c", prompt=random_prompt(4, 5), new_tokens=40 if setup == "hybrid-long" else 24),
        Request(name="d", prompt=shared + random_prompt(5, 14), new_tokens=16, at_step=6),
        Request(name="e", prompt=random_prompt(6, 40), new_tokens=14, at_step=12),
        Request(name="f", prompt=shared + random_prompt(7, 3), new_tokens=12, at_step=24),
        Request(name="g", prompt=random_prompt(8, 35), new_tokens=12, at_step=26),
    ]
    if setup.endswith("again"):  # with prompts that come again late
        late = (30, 33, 36) if setup == "llama-again" else (44, 52, 66)
        requests += [
            Request(name="h", prompt=shared + random_prompt(9, 20), new_tokens=10, at_step=late[0]),
            Request(name="i", prompt=random_prompt(3, 61) + random_prompt(10, 4), new_tokens=10, at_step=late[1]),
            Request(name="j", prompt=shared + random_prompt(11, 20), new_tokens=10, at_step=late[2]),
        ]
    if setup == "few-twins":  # with a prompt that is asked for twice at the same time, by one that goes on for longer
        requests[:2] = [
            Request(name="a", prompt=random_prompt(3, 30), new_tokens=4),
            Request(name="b", prompt=random_prompt(3, 30), new_tokens=40),
        ]
    if setup == "pair":  # with two that have a prefix in common and come at the same time
        pair = random_prompt(12, 24)
        requests += [
            Request(name="h", prompt=pair + random_prompt(13, 4), new_tokens=12, at_step=20),
            Request(name="i", prompt=pair + random_prompt(14, 5), new_tokens=12, at_step=20),
        ]
    if setup == "few-middle":  # one behind another, some of which have a block in common that is not their first
        middle = random_prompt(12, 8)
        requests = [
            Request(name="a", prompt=random_prompt(1, 8) + middle + random_prompt(2, 3), new_tokens=6),
            Request(name="b", prompt=random_prompt(3, 61), new_tokens=22, at_step=5),
            Request(name="c", prompt=random_prompt(4, 8) + middle + random_prompt(5, 3), new_tokens=10, at_step=27),
            Request(name="d", prompt=random_prompt(4, 8) + middle + random_prompt(6, 5), new_tokens=8, at_step=36),
        ]
    requests = own_requests(setup) or requests
    path = folder / "traces" / "trace.arrow"
    path.parent.mkdir(parents=True, exist_ok=True)
    batching = {"num_blocks": 96, "max_batch_tokens": 40}
    if setup.endswith("page16"):
        driver.PAGE_SIZE = 16
    if setup.startswith(("few", "offload", "forks-few")):
        blocks = 8 if setup.endswith("page16") else 14
        batching = {"num_blocks": blocks, "max_batch_tokens": 40, "safety_margin": 0.0}
        if setup.startswith("offload"):
            from types import SimpleNamespace

            import torch
            from transformers.generation.continuous_batching import offloading_manager

            def unpinned(*args, pin_memory: bool = False, **kwargs):  # there is no pinned memory without a device
                return torch.empty(*args, **kwargs)

            kept = {name: getattr(torch, name) for name in dir(torch) if not name.startswith("__")}
            offloading_manager.torch = SimpleNamespace(**{**kept, "empty": unpinned})
            batching["cpu_offload_space"] = 0.01
    if setup == "hybrid-wide-page16":
        batching = {"num_blocks": 40, "max_batch_tokens": 72}
    if setup.startswith("prefill-first"):
        budget = 24 if setup == "prefill-first" else 32
        batching = {"num_blocks": 64, "max_batch_tokens": budget, "scheduler_type": "prefill_first"}
    if setup == "hybrid-tails":
        batching = {"num_blocks": 48, "max_batch_tokens": 28}
    if setup == "hybrid-alike":
        batching = {"num_blocks": 56, "max_batch_tokens": 36}
    if setup == "qwen-far":
        batching = {"num_blocks": 112, "max_batch_tokens": 60}
    if setup == "llama-cancels":
        batching = {"num_blocks": 80, "max_batch_tokens": 44}
        cancel("b", 5)
    if setup == "qwen-page16-decodes":
        batching = {"num_blocks": 30, "max_batch_tokens": 48}
    if setup == "qwen-bytes":
        batching = {"num_blocks": 70, "max_batch_tokens": 52}
    if setup == "hybrid-sawtooth":
        batching = {"num_blocks": 44, "max_batch_tokens": 32}
    if setup == "hybrid-together":
        batching = {"num_blocks": 64, "max_batch_tokens": 64}
    if setup == "hybrid-rings-page16":
        batching = {"num_blocks": 36, "max_batch_tokens": 20}
    if setup == "qwen-contexts":
        batching = {"num_blocks": 88, "max_batch_tokens": 38}
    if setup == "offload-hybrid-turned":
        batching |= {"num_blocks": 9, "max_batch_tokens": 46}
    if setup == "hybrid-clamped":
        batching = {"num_blocks": 52, "max_batch_tokens": 22}
    if setup == "offload-qwen-suspends":
        batching |= {"num_blocks": 16, "max_batch_tokens": 42}
    if setup == "few-cancels":
        batching |= {"num_blocks": 12, "max_batch_tokens": 23}
        cancel("b", 11)
    if setup == "qwen-new-weights":
        batching = {"num_blocks": 72, "max_batch_tokens": 44}
        new_weights(14)
    if setup == "llama-places":
        batching = {"num_blocks": 68, "max_batch_tokens": 46}
    if setup == "llama-seats":
        batching = {"num_blocks": 76, "max_batch_tokens": 44}
    if setup == "qwen-goes-on":
        batching = {"num_blocks": 84, "max_batch_tokens": 42}
        goes_on(requests, {"d": "a", "e": "b", "f": "c"})
    if setup == "offload-hybrid-brief":
        batching |= {"num_blocks": 9, "max_batch_tokens": 48}
    if setup == "hybrid-cancels":
        batching = {"num_blocks": 60, "max_batch_tokens": 40}
        cancel("b", 9)
    if setup == "qwen-sleeps":
        batching = {"num_blocks": 66, "max_batch_tokens": 48}
        sleeps(16)
    if setup == "qwen-refit":
        batching = {"num_blocks": 74, "max_batch_tokens": 46}
        refit(15)
    if setup == "qwen-one-left":
        batching = {"num_blocks": 78, "max_batch_tokens": 40}
        goes_on(requests, {"d": "c"})
    if setup == "offload-hybrid-shorter":
        batching |= {"num_blocks": 48, "max_batch_tokens": 44}
    if setup == "offload-stages":
        batching |= {"num_blocks": 13, "max_batch_tokens": 40}
    if setup == "qwen-adapters":
        batching = {"num_blocks": 82, "max_batch_tokens": 42}
        adapters(ADAPTERS)
    if setup == "hybrid-long-chunks":
        batching = {"num_blocks": 90, "max_batch_tokens": 58}
    if setup == "offload-qwen-store":
        batching |= {"num_blocks": 46, "max_batch_tokens": 48}
        keeps_on_host({"a"}, 0)
    if setup == "offload-qwen-behind-hits":
        batching |= {"num_blocks": 54, "max_batch_tokens": 44}
        keeps_on_host({"c"}, 3)
    if setup == "offload-transfers":
        batching |= {"num_blocks": 17, "max_batch_tokens": 38}
        loads_take(4)
    if setup == "qwen-recycled":
        batching = {"num_blocks": 36, "max_batch_tokens": 36}
        by_address()
    if setup == "llama-capped":
        batching = {"num_blocks": 58, "max_batch_tokens": 30}
    if setup == "llama-sessions":
        batching = {"num_blocks": 62, "max_batch_tokens": 34}
    if setup == "qwen-long-prefills":
        batching = {"num_blocks": 86, "max_batch_tokens": 34}
    if setup == "offload-qwen-stores":
        batching |= {"num_blocks": 50, "max_batch_tokens": 42}
        keeps_on_host({"a"}, 0)
    if setup == "few-turned-away":
        batching |= {"num_blocks": 12, "max_batch_tokens": 41}
    if setup == "llama-grows":
        batching = {"num_blocks": 80, "max_batch_tokens": 36}
    if setup == "offload-hybrid-slots":
        batching |= {"num_blocks": 10, "max_batch_tokens": 44}
    if setup == "hybrid-padded":
        batching = {"num_blocks": 66, "max_batch_tokens": 34}
    if setup == "offload-qwen-saves":
        batching |= {"num_blocks": 15, "max_batch_tokens": 44}
    if setup == "few-orphans":
        batching |= {"num_blocks": 16, "max_batch_tokens": 76}
    if setup == "qwen-rows":
        batching = {"num_blocks": 70, "max_batch_tokens": 46}
        rows_are_brought()
    if setup == "llama-rows":
        batching = {"num_blocks": 72, "max_batch_tokens": 42}
    if setup == "offload-qwen-layers":
        batching |= {"num_blocks": 52, "max_batch_tokens": 38}
        keeps_on_host({"a", "c"}, 0)
    if setup == "offload-qwen-records":
        batching |= {"num_blocks": 48, "max_batch_tokens": 36}
        keeps_on_host({"b"}, 0)
    if setup == "offload-buffers":
        batching |= {"num_blocks": 14, "max_batch_tokens": 42}
    if setup == "llama-stretched":
        batching = {"num_blocks": 74, "max_batch_tokens": 38}
    if setup == "offload-qwen-rebaked":
        batching |= {"num_blocks": 44, "max_batch_tokens": 48}
        keeps_on_host({"a"}, 0)
        new_weights(13)
    if setup == "llama-copies":
        batching = {"num_blocks": 70, "max_batch_tokens": 60}
    if setup == "few-qwen-states":
        batching |= {"num_blocks": 18, "max_batch_tokens": 38}
    if setup == "offload-qwen-chunks":
        batching |= {"num_blocks": 56, "max_batch_tokens": 40}
        keeps_on_host({"a", "c"}, 0)
    if setup == "hybrid-overlaps":
        batching = {"num_blocks": 62, "max_batch_tokens": 26}
    if setup == "llama-mixed-adapters":
        batching = {"num_blocks": 78, "max_batch_tokens": 36}
        adapters(MIXED_ADAPTERS)
    if setup == "qwen-interleaved-page16":
        batching = {"num_blocks": 40, "max_batch_tokens": 44}
        by_address()
    if setup == "hybrid-every-row":
        batching = {"num_blocks": 70, "max_batch_tokens": 30}
    if setup == "glm-partial":
        batching = {"num_blocks": 60, "max_batch_tokens": 48}
    if setup == "offload-lost-loads":
        batching |= {"num_blocks": 58, "max_batch_tokens": 46}
        keeps_on_host({"a", "c"}, 0)
        loses("a", 3)
    if setup == "llama-strided-page16":
        batching = {"num_blocks": 34, "max_batch_tokens": 52}
    if setup == "llama-same-ids":
        batching = {"num_blocks": 66, "max_batch_tokens": 40}
    model = gemma3() if "hybrid" in setup else qwen3() if "qwen" in setup else llama()
    if setup == "glm-partial":
        model = glm()
    shapes = {  # other than the usual ones
        "hybrid-every-row": {"sliding_window": 24},
        "offload-lost-loads": {"head_dim": 32},
        "llama-strided-page16": {"num_hidden_layers": 3, "num_key_value_heads": 4},
        "llama-same-ids": {"num_key_value_heads": 1},
    }
    for name, value in shapes.get(setup, {}).items():
        setattr(model, name, value)
    sharp = ("hybrid-clamped", "offload-qwen-suspends", "few-qwen-outgrown", "llama-places", "qwen-goes-on")
    sharp += ("hybrid-cancels", "qwen-sleeps", "offload-hybrid-brief")
    sharp += ("qwen-refit", "qwen-one-left", "offload-hybrid-shorter", "offload-stages")
    sharp += ("qwen-adapters",)
    sharp += ("hybrid-long-chunks", "offload-qwen-store", "offload-qwen-behind-hits", "offload-transfers")
    sharp += ("qwen-recycled", "llama-capped")
    sharp += ("llama-sessions", "qwen-long-prefills", "offload-qwen-stores", "few-turned-away")
    sharp += ("llama-grows", "offload-hybrid-slots", "hybrid-padded", "offload-qwen-saves", "few-orphans", "qwen-rows")
    sharp += ("llama-rows", "offload-qwen-layers", "offload-qwen-records", "offload-buffers")
    sharp += ("llama-stretched", "offload-qwen-rebaked")
    sharp += ("llama-copies", "few-qwen-states", "offload-qwen-chunks", "hybrid-overlaps")
    sharp += ("llama-mixed-adapters", "qwen-interleaved-page16")
    sharp += ("hybrid-every-row", "glm-partial", "offload-lost-loads")
    sharp += ("llama-strided-page16", "llama-same-ids")
    if setup in sharp:
        model.initializer_range, model.tie_word_embeddings = 0.3, False  # so that attention is seen in the answers
    sequences = 2 if setup.startswith("forks") else 1
    answers = record(path, model, requests, num_return_sequences=sequences, all_layers=True, **batching)
    (folder / "tokens.json").write_text(json.dumps(answers))


def run(name: str, folder: Path) -> int:
    """Run one bug, or a setup without any; return the exit status."""
    folder.mkdir(parents=True, exist_ok=True)

    def act() -> None:
        if name.startswith("clean:"):
            generate(name.removeprefix("clean:"), folder)
            return
        from bugs import load

        bug = load("transformers")[name]
        bug.patch(fired_in([]))
        generate(bug.setup, folder)

    return wait_for(fork(folder / "log", act), 180.0)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    for one in sys.argv[2:]:
        print(one, run(one, Path(sys.argv[1]) / one.replace(":", "-")), flush=True)
