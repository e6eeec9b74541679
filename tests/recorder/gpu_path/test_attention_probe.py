"""What comes out of attention on a device: one token in so many forwards, laid aside there and judged by the recorder's thread."""

import numpy as np
import pytest
import torch
from kvcanary.kernels.capture import attention_probe
from kvcanary.kernels.capture.attention_probe import PagedHalf, ProbedCall
from kvcanary.recorder.capture.device import attention_probe as looking
from kvcanary.recorder.capture.device.attention_probe import AttentionProbe, ProbedLayer
from kvcanary.recorder.trace.reader import TraceReader

from .two_recorders import ROWS, SLOTS, WIDTH, Engine

FORWARDS, KV_HEADS, EACH, DIM = 3, 2, 2, 16
LAYERS = (3, 7)


class Attending:
    """An engine with layers that attend, each of whose calls is shown to a probe; `reads` says which positions a token reads."""

    def __init__(self, folder, *, window=0, dtype=torch.float32, launches=True):
        rng = np.random.default_rng(4)
        self.engine, self.random, self.launches = Engine(folder, rng), rng, launches
        torch.manual_seed(4)
        pools = {n: [torch.randn(SLOTS, 1, KV_HEADS, DIM).to(dtype) for _ in "KV"] for n in LAYERS}
        self.layers = {n: ProbedLayer(*map(PagedHalf, both), KV_HEADS * EACH, 0.25) for n, both in pools.items()}
        self.probe = AttentionProbe(self.layers, positions=WIDTH)
        self.probe.begin(dict.fromkeys(LAYERS, (0, (window,))), 1)
        self.engine.device.capture.probe = self.probe
        self.engine.table.copy_(torch.from_numpy(np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) % (SLOTS - 1) + 1))

    def forward(self, lens, mode="extend", reads=lambda r, position: (r, 0, position + 1), told=lambda total: total):
        prefix, extend = (list(part) for part in zip(*lens, strict=True))
        total, rows = [p + e for p, e in lens], list(range(1, len(lens) + 1))
        loc = [int(self.engine.table[row, p]) for row, (a, n) in zip(rows, lens, strict=True) for p in range(a, a + n)]
        positions = [p for a, n in lens for p in range(a, a + n)]
        starts = torch.tensor([0, *np.cumsum(extend).tolist()], dtype=torch.int32)

        def during():
            if self.launches and self.probe.is_on:
                one = self.layers[self.probe.layer]
                query = torch.randn(len(positions), KV_HEADS * EACH, DIM).to(one.keys.values.dtype)
                output = torch.zeros_like(query)
                for token, position in enumerate(positions):
                    r = int(np.searchsorted(starts[1:].numpy(), token, side="right"))
                    other, first, end = reads(r, position)
                    slots = self.engine.table[rows[other], first:end].long()
                    for head in range(KV_HEADS * EACH):
                        keys, values = (half.values[slots, 0, head // EACH].float() for half in (one.keys, one.values))
                        weights = (0.25 * keys @ query[token, head].float()).softmax(0)
                        output[token, head] = (weights @ values).to(output.dtype)
                told_lens = torch.tensor([told(n) for n in total], dtype=torch.int32)
                call = ProbedCall(query, output, self.engine.table, 1, told_lens, starts, torch.tensor(rows))
                self.probe.behind(self.probe.layer, call)

        self.engine.forward(mode, rows, prefix, extend, loc, [5] * len(positions), positions, during=during)
        assert self.engine.device.drain()

    def events(self):
        _, _ = self.engine.close()
        with TraceReader(self.engine.device.path) as reader:
            return [
                {
                    "forward": view.scalar("forward"),
                    "watched": view.scalar("outputs_watched"),
                    **{
                        name: view.ints(name).tolist() for name in ("output_request", "output_layer", "output_position")
                    },
                    "window": list(
                        zip(*(view.ints(f"window_{n}").tolist() for n in ("request", "start", "count")), strict=True)
                    ),
                    "seq_lens": view.ints("attention_seq_lens").tolist(),
                }
                for batch in reader.stream()
                for view in batch
                if view.kind == "forward"
            ]


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(attention_probe, "PROGRAMS", 2)
    monkeypatch.setattr(looking, "FORWARDS", FORWARDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 6])
def test_of_so_many_forwards_one_is_looked_at_and_what_is_right_says_nothing(tmp_path, dtype, window):
    attending = Attending(tmp_path, window=window, dtype=dtype)
    reads = lambda r, position: (r, max(position - window, 0) if window else 0, position + 1)  # noqa: E731
    for number in range(3 * FORWARDS + 1):
        attending.forward([(9, 3), (4 + number % 20, 1), (0, 5)], reads=reads)
    events = attending.events()
    assert [event["forward"] for event in events if event["watched"]] == [n * FORWARDS for n in range(4)]
    assert all(event["watched"] in (0, 1) for event in events)
    assert not any(event["output_request"] or event["window"] or event["seq_lens"] for event in events)


def test_what_attention_reads_otherwise_is_told_of_the_request(tmp_path):
    attending = Attending(tmp_path)
    wrong = {0: lambda r, p: (r, 2, p + 1), 1: lambda r, p: (1 - r, 0, 4), 2: lambda r, p: (r, 0, p)}
    for number in range(3 * FORWARDS):
        attending.forward([(9, 1), (7, 1)], "decode", reads=wrong[number // FORWARDS])
    first, second, third = (event for event in attending.events() if event["watched"])
    assert (first["window"], first["output_request"]) == ([(0, 2, 7)], [])
    assert (second["window"], second["output_request"], second["output_layer"]) == ([], [1], [7])
    assert second["output_position"] == [7]
    assert third["seq_lens"] == [9, -1] and not third["output_request"]


@pytest.mark.parametrize(
    "more",
    [
        {"told": lambda total: total - 1},  # attention is told of fewer: that is told elsewhere
        {"told": lambda total: WIDTH + 1},  # more than there is room for
        {"mode": "target_verify"},  # may be a tree
    ],
)
def test_what_cannot_be_judged_is_not_looked_at(tmp_path, more):
    attending = Attending(tmp_path)
    attending.forward([(9, 1)], reads=lambda r, p: (r, 3, p), **more)
    (event,) = attending.events()
    assert (event["watched"], event["window"], event["output_request"]) == (0, [], [])


def test_what_a_forward_does_not_lay_aside_no_other_does(tmp_path):
    """As in a graph that holds no probe: the next that is looked at is another."""
    attending = Attending(tmp_path, launches=False)
    attending.forward([(9, 1)])
    attending.launches = True
    assert not attending.probe.is_on
    for _ in range(FORWARDS):
        attending.forward([(9, 1)])
    assert [event["forward"] for event in attending.events() if event["watched"]] == [FORWARDS]


def test_layers_of_another_form_are_left_alone(tmp_path):
    one = Attending(tmp_path).layers[3]
    other = one._replace(heads=KV_HEADS)
    probe = AttentionProbe({3: one, 5: other, 7: one}, positions=1 << 30)
    assert [*probe.layers] == [3, 7]
    probe.begin({}, 0)
    assert probe.want(0, "decode", 4) == 0
