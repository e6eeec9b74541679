"""SGLang's state pools: which are watched, where a forward's slots are read, and what is recorded of copies."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.recorder.engines.common.hooking import wrap_method
from kvcanary.recorder.engines.sglang.recurrent import StateHooks, prefills_not_seen, state_pool
from kvcanary.recorder.trace.header import NotWatched, StatePool


class MambaPool:
    """Two layers of four slots: a convolution's window and no more."""

    def __init__(self) -> None:
        self.mamba_layer_ids = [2, 5]
        self.mamba_cache = SimpleNamespace(conv=[torch.zeros(2, 4, 3, 2)], temporal=torch.zeros(2, 4, 0))

    def copy_from(self, src_indices: Any, dst_indices: Any) -> None:
        self.mamba_cache.conv[0][:, dst_indices] = self.mamba_cache.conv[0][:, src_indices]

    def clear_slots(self, indices: Any) -> None:
        self.mamba_cache.conv[0][:, indices] = 0


class HybridReqToTokenPool(SimpleNamespace):
    """Has the states beside its rows."""


class OtherMambaPool(MambaPool):
    """May keep its slots otherwise."""


def runner(pool: Any, *, rows: dict[str, Any] | None = None, **arguments: Any) -> Any:
    return SimpleNamespace(
        req_to_token_pool=HybridReqToTokenPool(mamba_pool=pool, **(rows or {})),
        token_to_kv_pool=SimpleNamespace(),
        server_args=SimpleNamespace(**arguments),
    )


def test_the_first_layers_parts_of_a_known_pool_are_watched() -> None:
    found = state_pool(runner(MambaPool(), disaggregation_mode="null"), 0)
    assert isinstance(found, tuple)
    pool, parts = found
    assert pool == StatePool(
        name="MambaPool", num_slots=4, layer=2, num_layers=2, hashed_bytes=4096, from_end=True, part_bytes=(24,)
    )
    assert [tuple(part.shape) for part in parts] == [(4, 3, 2)]


def test_an_earlier_version_says_which_layers_beside_its_rows() -> None:
    older = MambaPool()
    del older.mamba_layer_ids
    found = state_pool(runner(older, rows={"mamba_map": {4: 0, 7: 1}}), 0)
    assert isinstance(found, tuple)
    assert (found[0].layer, found[0].num_layers) == (4, 2)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: runner(OtherMambaPool()), "does not know"),
        (lambda: runner(type("MambaPool", (), {"copy_from": print})()), "otherwise: AttributeError"),
        (lambda: runner(MambaPool(), rows={"enable_mamba_extra_buffer": True}), "a forward saves itself"),
        (lambda: runner(MambaPool(), rows={"mamba_ckpt_pool": object()}), "another pool"),
        (lambda: runner(MambaPool(), speculative_algorithm="EAGLE"), "drafts"),
        (lambda: runner(MambaPool(), enable_hierarchical_cache=True), "another pool"),
        (lambda: runner(MambaPool(), disaggregation_mode="decode"), "another pool"),
    ],
)
def test_what_is_not_understood_is_named(made: Any, reason: str) -> None:
    found = state_pool(made(), 0)
    assert isinstance(found, NotWatched)
    assert reason in found.reason


def test_prefills_in_graphs_are_named() -> None:
    made = runner(MambaPool())
    assert not prefills_not_seen(made)
    made.prefill_cuda_graph_runner = type("EagerRunner", (), {})()
    assert not prefills_not_seen(made)
    made.prefill_cuda_graph_runner = type("PrefillCudaGraphRunner", (), {})()
    assert [entry.what for entry in prefills_not_seen(made)] == ["graph"]


def test_a_state_that_does_not_lie_in_one_piece_is_not_watched() -> None:
    odd = MambaPool()
    odd.mamba_cache.conv = [torch.zeros(2, 4, 3, 4)[..., ::2]]
    found = state_pool(runner(odd), 0)
    assert isinstance(found, NotWatched)
    assert "laid out" in found.reason
    odd.mamba_cache.conv = [torch.zeros(2, 4, 2, 3).transpose(2, 3)]  # in another order all of it is there
    assert isinstance(state_pool(runner(odd), 0), tuple)


def test_a_runner_without_states_has_nothing_to_name() -> None:
    assert state_pool(runner(None), 0) is None


class Told:
    def __init__(self) -> None:
        self.changes: list[tuple] = []
        self.given: list[Any] = []

    def states_given(self, states: Any) -> None:
        self.given += states

    def state_changed(self, change: str, *, pool: int, slots: Any, sources: Any) -> None:
        self.changes.append((change, pool, slots.tolist(), sources.tolist()))


def hooked() -> tuple[MambaPool, Told, StateHooks]:
    pool, told = MambaPool(), Told()
    hooks = StateHooks(told, 0, runner(None))
    for name, hook in hooks.hooks().items():
        assert wrap_method(pool, name, hook, lambda *_: None)
    return pool, told, hooks


def backend(*slots: int) -> Any:
    indices = torch.tensor(slots, dtype=torch.int32)
    return SimpleNamespace(
        linear_attn_backend=SimpleNamespace(forward_metadata=SimpleNamespace(mamba_cache_indices=indices))
    )


def test_copies_and_clears_are_told_once_they_are_done() -> None:
    pool, told, hooks = hooked()
    pool.copy_from(torch.tensor([1]), torch.tensor([3]))
    pool.clear_slots(torch.tensor([1, 2]))
    assert told.changes == [("copy", 0, [3], [1]), ("clear", 0, [1, 2], [])]
    access = hooks.access(backend(3, 1), SimpleNamespace(), np.array([4, 0]))
    assert access is not None
    assert (access.reads.tolist(), access.writes.tolist()) == ([3, -1], [3, 1])


def test_after_a_change_that_failed_nobody_knows_what_the_slots_hold() -> None:
    pool, _, hooks = hooked()
    with pytest.raises(IndexError):
        pool.copy_from(torch.tensor([9]), torch.tensor([3]))
    assert hooks.access(backend(3, 1), SimpleNamespace(), np.array([4, 0])) is None
    assert hooked()[2].access(SimpleNamespace(), SimpleNamespace(), np.array([4])) is None


class Asked:
    """What short convolutions ask for their slots, and who goes on from the state that lies there."""

    def __init__(self, said: list[bool] | None) -> None:
        self.said = None if said is None else torch.tensor(said)
        self.forward_metadata = SimpleNamespace(mamba_cache_indices=torch.tensor([3, 1, 0]))

    def conv_state_metadata(self, layer_id: int, forward_batch: Any) -> Any:
        return SimpleNamespace(cache_indices=torch.tensor([3, 2, 0]), has_initial_state=self.said)


@pytest.mark.parametrize(
    ("said", "reads"), [([True, True, False], [[3, 2]]), ([False, True, True], [[-1, 2]]), (None, [])]
)
def test_who_begins_with_a_state_is_what_the_first_convolution_is_told(
    said: list[bool] | None, reads: list[list[int]]
) -> None:
    told, made = Told(), runner(None)
    made.attn_backend = SimpleNamespace(linear_attn_backend=Asked(said))
    hooks = StateHooks(told, 0, made)
    asked = hooks.asked
    assert wrap_method(asked, "conv_state_metadata", hooks.on_asked, lambda *_: None)
    asked.conv_state_metadata(0, None)  # no forward waits
    access = hooks.access(made.attn_backend, SimpleNamespace(), np.array([4, 0]))
    assert access is not None
    assert access.reads.tolist() == [3, -1]
    for layer in (0, 2):
        asked.conv_state_metadata(layer, None)
    assert [access.reads.tolist() for access in told.given] == reads
    assert all(access.writes.tolist() == [3, 2] for access in told.given)


@pytest.mark.parametrize("mixed", [False, True])
def test_who_begins_with_a_state_is_what_metadata_say_of_the_first_requests(mixed: bool) -> None:
    hooks, attention = StateHooks(Told(), 0, runner(None)), backend(3, 1, 2)
    metadata = attention.linear_attn_backend.forward_metadata
    flags = SimpleNamespace(has_initial_states=torch.tensor([False, True]))
    if mixed:
        metadata.mixed_metadata = flags
    else:
        metadata.mixed_metadata, metadata.has_initial_states = None, flags.has_initial_states
    access = hooks.access(attention, SimpleNamespace(), np.array([4, 0, 5]))
    assert access is not None
    assert access.reads.tolist() == [-1, 1, 2]


class Mamba2AttnBackend(SimpleNamespace):
    """Saves states of whole chunks where the batch says."""


class ShortConvAttnBackend(Mamba2AttnBackend):
    """May save them otherwise."""


def saving(layers: type = Mamba2AttnBackend, chunk: int = 8) -> tuple[Any, Any]:
    """Return a model runner with extra buffers, and its attention."""
    metadata = SimpleNamespace(
        mamba_cache_indices=torch.tensor([3, 1]), mamba_track_indices=torch.tensor([2, 0, 7], dtype=torch.int64)
    )
    attention = SimpleNamespace(linear_attn_backend=layers(forward_metadata=metadata))
    made = runner(MambaPool(), rows={"enable_mamba_extra_buffer": True}, mamba_cache_chunk_size=chunk)
    made.attn_backend = attention
    return made, attention


def batch(mode: str, **more: Any) -> Any:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: mode == "decode"),
        mamba_track_mask=torch.tensor([True, False]),
        seq_lens=torch.tensor([24, 6]),
        extend_prefix_lens=torch.tensor([3, 0]),
        mamba_track_seqlens=torch.tensor([24, -1]),
        **more,
    )


@pytest.mark.parametrize(("mode", "tokens"), [("decode", 24), ("extend", 19)])
def test_states_that_a_forward_saves_are_whole_chunks_or_all_of_a_decode(mode: str, tokens: int) -> None:
    made, attention = saving()
    assert isinstance(state_pool(made, 0), tuple)
    access = StateHooks(Told(), 0, made).access(attention, batch(mode), np.array([3, 0]))
    assert access is not None
    assert (access.saves.tolist(), access.saved_tokens.tolist()[0]) == ([2, -1], tokens)


@pytest.mark.parametrize("made", [lambda: saving(ShortConvAttnBackend), lambda: saving(chunk=0)])
def test_what_another_attention_saves_is_not_known(made: Any) -> None:
    own, attention = made()
    assert isinstance(state_pool(own, 0), NotWatched)
    assert StateHooks(Told(), 0, own).access(attention, batch("extend"), np.array([3, 0])) is None
