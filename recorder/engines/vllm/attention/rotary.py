"""The positions that vLLM feeds a model with several dimensions of them (M-RoPE), as one for each token.

Of tokens of prompts with media the engine's own places are taken, by which it computes the slots.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from .....kernels.arrays import Int64Array
from ...common.rotary import one_of, told_by_one

TRIED: Final = 4  # tokens of text by which it is known how a model places text


class FedPositions:
    """Reads the positions of one runner.

    `several`: its model is fed several dimensions. `places`: the engine has the places of a step's tokens in the sequence,
    one for each. `seen`: both, and what the model is fed can be told by them.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        model = runner.vllm_config.model_config
        mrope = bool(getattr(model, "uses_mrope", False))
        self.several = mrope or bool(getattr(model, "uses_xdrope_dim", 0))
        self.later = not hasattr(runner, "input_batch")  # the V2 runner makes them behind attention's metadata
        state = getattr(runner, "model_state", None)
        self._rope: Any = (
            getattr(state, "rope_state", None) if callable(getattr(state, "prepare_inputs", None)) else None
        )
        # In older versions the runner's own positions are filled for models that are fed these alone.
        own, starts = getattr(runner, "positions", None), getattr(runner, "query_start_loc", None)
        there = self._rope is not None if self.later else hasattr(own, "data_ptr") and hasattr(starts, "gpu")
        self.places = self.several and there
        self.seen = self.places and mrope and _places_text_plainly(runner)
        self._names: list[str] = []  # of a step's requests, and from which place on each is text
        self._text_from = np.empty(0, np.int64)

    @property
    def derived(self) -> tuple[str, ...]:
        """The columns of a forward that are worked out."""
        return ("positions",) if self.several and not self.seen else ()

    def forget(self) -> None:
        """Ask anew from where on requests are text: they have changed."""
        self._names = []

    def of_step(
        self, fed: Any, places: Any, starts: Any, names: Sequence[str], text_from: Callable[[Sequence[str]], Int64Array]
    ) -> Any:
        """Return `[T]` positions, where the model's tensors lie: without waiting if that is a device.

        `fed` is `[dimensions, at least T]`, `places` `[T]`, `starts` `[bs + 1]` where each request's tokens begin,
        `text_from` tells `[bs]` from which place on each request is text. A token that is fed different positions gets one of
        them that is not its place.
        """
        import torch

        if not self.seen:
            return places
        total, bs = places.shape[0], len(names)
        fed = fed[:, :total]
        if [*names] != self._names:
            self._names, self._text_from = [*names], text_from(names)
        if not self._text_from.any():
            return one_of(fed, places)
        each_from = self._text_from.tolist()
        ahead = [self._ahead(name) if place else 0 for name, place in zip(names, each_from, strict=True)]
        there = torch.from_numpy(np.stack((self._text_from, np.array(ahead, np.int64))))
        if places.device.type == "cuda":
            there = there.pin_memory().to(places.device, non_blocking=True)
        if total != bs:
            each = torch.arange(bs, device=places.device)
            there = there[:, torch.repeat_interleave(each, starts[: bs + 1].diff(), output_size=total)]
        return told_by_one(fed, places, there[0], there[1])

    def _ahead(self, name: str) -> int:
        """Return how far a request's positions are ahead of its places, by the engine's own number."""
        if self.later:
            return int(self._rope.prefill_delta.np[self._runner.req_states.req_id_to_index[name]])
        return int(self._runner.requests[name].mrope_position_delta or 0)


def _places_text_plainly(runner: Any) -> bool:
    """Say whether a model's own function gives text its places."""
    try:
        model: Any = runner.get_model()
        found, ahead = model.get_mrope_input_positions([1] * TRIED, [])
        return ahead == 0 and bool((np.asarray(found) == np.arange(TRIED)).all())
    except Exception:  # noqa: BLE001  # of a version or a model that asks for more
        return False
