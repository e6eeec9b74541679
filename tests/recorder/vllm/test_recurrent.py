"""vLLM's state groups: which are watched, which blocks a step reads and writes, and what is recorded of copies."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.recorder.capture.forward_input import ForwardInput
from kvcanary.recorder.engines.vllm import recurrent
from kvcanary.recorder.engines.vllm.recurrent import VllmStates
from kvcanary.recorder.trace.header import StatePool, TraceHeader

BLOCKS = 6
GROUP = SimpleNamespace(layer_names=["model.layers.2.conv", "model.layers.3.conv"])


def runner(
    *, device: str = "cpu", parts: Any = None, v1: bool = False, kernels: Any = None, table: Any = None, **config: Any
) -> Any:
    layer = SimpleNamespace(kv_cache=[torch.zeros(BLOCKS, 3, 2)] if parts is None else parts)
    compilation = SimpleNamespace(static_forward_context=dict.fromkeys(GROUP.layer_names, layer))
    return SimpleNamespace(
        kv_cache_config=object(),
        device=SimpleNamespace(type=device),
        model_state=SimpleNamespace(_mamba_ctx=kernels),
        block_tables=SimpleNamespace(block_tables=[None, SimpleNamespace(gpu=table)]),
        **({"input_batch": None} if v1 else {}),
        vllm_config=SimpleNamespace(compilation_config=compilation, **config),
    )


def forward(*prefix: int) -> ForwardInput:
    nothing: Any = {name: [] for name in ("request_ids", "extend_lens", "input_ids", "positions")}
    return ForwardInput(mode="mixed", prefix_lens=np.array(prefix), out_cache_loc=(), reads=(), **nothing)


def spec(mode: str = "align", **more: Any) -> Any:
    return SimpleNamespace(mamba_cache_mode=mode, **more)


@pytest.mark.parametrize(
    ("made", "of", "why"),
    [
        (runner(), spec(), ""),
        (runner(), spec("none"), ""),
        (runner(), spec("all"), "mode of caching"),
        (runner(), spec(mamba_type=SimpleNamespace(name="SHORT_CONV")), ""),
        (runner(), spec(mamba_type=SimpleNamespace(name="GDN_ATTN")), ""),
        (runner(), spec(num_prefill_checkpoint_blocks=1), "a forward saves itself"),
        (runner(device="tpu"), spec(), "on such a device"),
        (runner(device="cuda"), spec(), "not known"),
        (runner(device="cuda", kernels=SimpleNamespace(run_fused_precopy=print)), spec(), ""),
        (runner(device="cuda"), spec("none"), ""),
        (runner(device="cuda", v1=True), spec(), ""),
        (runner(device="cuda", v1=True, parts=[torch.zeros(BLOCKS, 3, 4)[..., ::2]]), spec(), "laid out"),
        (runner(parts=[torch.zeros(BLOCKS, 3)] * 5), spec(), "laid out"),
        (runner(speculative_config=object()), spec(), "drafts"),
        (runner(kv_transfer_config=object()), spec(), "elsewhere"),
        (runner(parts=[torch.zeros(3, 2)]), spec(), "laid out"),
    ],
)
def test_what_is_understood_is_watched_and_the_rest_named(made: Any, of: Any, why: str) -> None:
    states = VllmStates(made)
    said = states.add(1, GROUP, of, BLOCKS)
    assert (why in said) if why else said == ""
    expected = StatePool(
        name="mamba", num_slots=BLOCKS, layer=2, num_layers=2, hashed_bytes=4096, from_end=True, padding_slots=(0,)
    )
    assert [replace(pool, part_bytes=()) for pool in states.pools] == ([] if why else [expected])


def test_a_step_reads_and_writes_the_blocks_of_its_metadata_decodes_first() -> None:
    states = VllmStates(runner())
    states.add(1, GROUP, spec(), BLOCKS)
    metadata = SimpleNamespace(
        state_indices_tensor_d=torch.tensor([[4], [2]]), state_indices_tensor_p=torch.tensor([5], dtype=torch.int32)
    )
    prefix = np.array([7, 9, 0])
    step = SimpleNamespace(given={GROUP.layer_names[0]: metadata}, prefix=prefix)
    parts = [(forward(7, 0), ("a", "c"), np.array([0, 2])), (forward(9), ("b",), np.array([1]))]
    found = [given.states[0] for given, _, _ in states.beside(parts, step)]
    assert [(one.reads.tolist(), one.writes.tolist(), one.ran) for one in found if one is not None] == [
        ([4, -1], [4, 5], False),
        ([2], [2], True),  # told after the model has run
    ]
    nothing = states.beside(parts, SimpleNamespace(given=None, prefix=prefix))
    assert [given.states for given, _, _ in nothing] == [(None,), (None,)]


def test_copies_between_blocks_are_told_and_after_another_kind_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    utils: Any = ModuleType(recurrent.UTILS)
    utils.collect_mamba_copy_meta = lambda *_args: None
    utils.do_mamba_copy_block = lambda _bufs: None
    monkeypatch.setitem(sys.modules, recurrent.UTILS, utils)
    engine, told = runner(), []
    states = VllmStates(engine)
    states.add(1, GROUP, spec(), BLOCKS)
    states.attach(SimpleNamespace(state_changed=lambda change, **of: told.append((change, of))), lambda *_: None)
    request = SimpleNamespace(block_ids=[[], [3, 5]])

    def copy(config: Any, bias: int) -> None:
        utils.collect_mamba_copy_meta(None, config, None, [1], 0, 1, bias, request, None)
        utils.do_mamba_copy_block(None)

    copy(engine.kv_cache_config, 0)
    copy(object(), 0)  # another runner's
    assert told == [("copy", {"pool": 0, "slots": [5], "sources": [3]})]
    metadata = {
        GROUP.layer_names[0]: SimpleNamespace(state_indices_tensor_d=torch.tensor([5]), state_indices_tensor_p=None)
    }
    step = SimpleNamespace(given=metadata, prefix=np.array([4]))
    parts = [(forward(4), ("a",), np.array([0]))]
    assert states.beside(parts, step)[0][0].states != (None,)
    copy(engine.kv_cache_config, 1)
    assert states.beside(parts, step)[0][0].states == (None,)


def test_copies_that_the_v2_runners_kernels_decide_on_are_looked_up_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, recurrent.UTILS, ModuleType(recurrent.UTILS))
    ran: list[Any] = []
    kernels = SimpleNamespace(run_fused_precopy=lambda *of: ran.append(of))
    table = torch.tensor([[7, 8, 9], [1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    states = VllmStates(runner(device="cuda", kernels=kernels, table=table))
    states.add(1, GROUP, spec(), BLOCKS)
    told: list[Any] = []
    recorder = SimpleNamespace(states_hashed=lambda change, pool, values: told.append((change, pool, values.tolist())))
    states.attach(recorder, lambda *of: pytest.fail(str(of)))
    to, of, bias = (torch.tensor(given, dtype=torch.int32) for given in ([0, 2, 1], [-1, 1, 1], [0, 0, 5]))
    kernels.run_fused_precopy(3, to, of, bias, torch.tensor([1, 0, 2, 9], dtype=torch.int32))
    assert len(ran) == 1
    assert told == [("copy", 0, [3, 0, 0, 2, 0, 0, 0, 0, 0])]


def test_on_a_device_nothing_is_read_and_padding_behind_the_decodes_is_left_out() -> None:
    states = VllmStates(runner(device="cuda", v1=True))
    states.add(1, GROUP, spec(), BLOCKS)
    nothing, layer = torch.empty(0, dtype=torch.int32), GROUP.layer_names[0]

    def found(decodes: Any, prefills: Any, bs: int) -> list[Any]:
        metadata = SimpleNamespace(state_indices_tensor_d=decodes, state_indices_tensor_p=prefills)
        (one,) = states.on_device({layer: metadata}, bs, nothing)
        assert one[2:] == (None, None)  # nobody says who begins with a state
        return [None if part is None else part.tolist() for part in one[:2]]

    ints = torch.tensor
    assert found(ints([[4], [2]]), ints([5]), 3) == [[4, 2], [5]]
    assert found(ints([[4], [2], [0]]), ints([], dtype=torch.int32), 2) == [[4, 2, 0], None]  # a graph's padding
    assert found(ints([4, 2]), None, 2) == [[4, 2], None]
    assert found(None, ints([5]), 1) == [[5], None]
    for wrong in ((ints([4]), None, 2), (ints([4, 2]), ints([5]), 2), (None, ints([5]), 2), (ints([[[4]]]), None, 1)):
        assert found(*wrong) == [[], None]
    for name in ("non_spec_state_indices_tensor", "state_indices_tensor"):  # gated delta nets, linear attention
        (one,) = states.on_device({layer: SimpleNamespace(**{name: ints([4, 2, 0])})}, 2, nothing)
        assert one.first.tolist() == [4, 2, 0]
    assert states.on_device(None, 1, nothing)[0].first is nothing
    header = TraceHeader(groups=(), tables=(), states=tuple(states.pools))
    gone = states.without(header, "it waits")
    assert (gone.states, [entry.reason for entry in gone.not_watched]) == ((), ["it waits"])
    assert states.on_device({}, 1, nothing) == ()


@pytest.mark.parametrize(
    ("said", "reads"),
    [
        ({}, [4, -1, 5, -1]),  # linear attention, by prefixes
        ({"num_decodes": 2}, [4, 2, 5, -1]),  # a decode begins with what lies there
        ({"num_decodes": 2, "has_initial_states_p": torch.tensor([False, True])}, [4, 2, -1, 6]),
        ({"num_decodes": 2, "prefill_has_initial_state": torch.tensor([True, True])}, [4, 2, 5, 6]),
        ({"num_decodes": 2, "has_initial_states_d": torch.tensor([True, False, True])}, [4, -1, 5, -1]),
        ({"num_decodes": 9}, [4, -1, 5, -1]),
        ({"num_decodes": 0, "has_initial_states_p": torch.tensor([True])}, [4, -1, 5, -1]),
    ],
)
def test_metadata_say_who_begins_with_the_state_that_lies_in_its_block(said: dict[str, Any], reads: list[int]) -> None:
    states = VllmStates(runner())
    states.add(1, GROUP, spec(), BLOCKS)
    layer, blocks = GROUP.layer_names[0], torch.tensor([4, 2, 5, 6])
    step = SimpleNamespace(
        given={layer: SimpleNamespace(state_indices_tensor=blocks, **said)}, prefix=np.array([3, 0, 7, 0])
    )
    ((given, _, _),) = states.beside([(forward(3, 0, 7, 0), (), np.arange(4))], step)
    assert given.states[0].reads.tolist() == reads
    assert given.states[0].writes.tolist() == [4, 2, 5, 6]
    on_gpu = VllmStates(runner(device="cuda", v1=True))
    on_gpu.add(1, GROUP, spec(), BLOCKS)
    (there,) = on_gpu.on_device(step.given, 4, blocks[:0])
    first = 4 if there.second is None else len(there.first)
    prefix, told = [3, 0, 7, 0], []
    for begin, end, said_of in ((0, first, there.first_reads), (first, 4, there.second_reads)):
        told += (
            [p > 0 for p in prefix[begin:end]]
            if said_of is None
            else [True] * (end - begin)
            if said_of is True
            else said_of[: end - begin].tolist()
        )
    slots = [*there.first.tolist(), *([] if there.second is None else there.second.tolist())]
    assert [slot if goes_on else -1 for slot, goes_on in zip(slots, told, strict=True)] == reads
