"""The positions that SGLang feeds a model with several dimensions of them (M-RoPE), as one for each token.

Of tokens of a prompt with media, up to the last of these, the batch's own positions are taken, of which SGLang computes
what attention reads. Behind it the prompt's own positions say how far they are ahead of the places.
"""

import logging
import weakref
from typing import Any, Final

from ...common.rotary import NEVER, one_of, told_by_one

_log = logging.getLogger("kvcanary")

MAX_ROWS: Final = (
    1 << 16
)  # requests of a batch, padding among them; graphs keep where they lie, before there are any pools
PROMPTS: Final = ("EXTEND", "MIXED", "SPLIT_PREFILL")


class FedPositions:
    """Reads the positions of one model runner; the launches that do are captured with its model's.

    `expect` is called before a forward, on its stream, with the batch that the runner is given; `of` where its model begins,
    with the batch that this is called with.
    """

    def __init__(self, runner: Any) -> None:
        import torch

        # It wants the places of all text, media or not.
        self._plainly = getattr(runner.server_args, "rl_on_policy_target", None) is not None
        self._media: list[Any] = []
        # Of each row of the batch from which place on it is text, and how far its positions are ahead there.
        self._there = torch.zeros((2, MAX_ROWS), dtype=torch.int64, device=runner.device)
        self._some = False  # whether they are ahead anywhere
        self._said = False  # that nobody knows which token is whose

    def expect(self, batch: Any) -> None:
        """Look at whose prompts hold media; nothing waits."""
        media = [] if self._plainly else [*(getattr(batch, "mm_inputs", None) or ())][:MAX_ROWS]
        # A session's may have grown by what it was asked since.
        same = [*map(id, media)] == [*map(id, self._media)]
        if same and not (self._some and batch.forward_mode.name in PROMPTS):
            return
        self._media = media
        some = any(one is not None for one in media)
        if some or self._some:
            import torch

            rows = torch.tensor([_text_of(one) for one in media] or [(0, 0)], dtype=torch.int64).T.contiguous()
            if self._there.device.type == "cuda":
                rows = rows.pin_memory()
            self._there.zero_()[:, : rows.shape[1]].copy_(rows, non_blocking=True)
        self._some = some

    def of(self, batch: Any, positions: Any, *, in_graph: bool = False) -> Any:
        """Return `[T]` positions, where the batch's tensors lie: one that is fed and not the token's place, else the place."""
        import torch

        fed, total = getattr(batch, "mrope_positions", None), int(positions.shape[0])
        bs = int(batch.req_pool_indices.shape[0])
        if fed is None or not total or int(fed.shape[1]) < total:
            return positions
        fed = fed[:, :total]
        if not (self._some or in_graph):
            return one_of(fed, positions)
        there, lens = self._there[:, :bs], None if in_graph else getattr(batch, "extend_seq_lens_cpu", None)
        if lens is None and total % bs == 0 and bs <= MAX_ROWS:
            there = there.repeat_interleave(total // bs, dim=1)
        elif lens is not None and (own := sum(lens)) <= total and bs <= MAX_ROWS:
            there = there.repeat_interleave(batch.extend_seq_lens[:bs], dim=1, output_size=own)
            there = torch.nn.functional.pad(there, (0, total - own))  # rows behind all requests are padding
        else:
            if not self._said:
                self._said = True
                said = "kvcanary: of a batch of %d requests nobody knows which of its %d tokens is whose: its own positions are recorded"
                _log.warning(said, bs, total)
            return positions
        return told_by_one(fed, positions, there[0], there[1])


_OF: "weakref.WeakKeyDictionary[Any, FedPositions]" = weakref.WeakKeyDictionary()


def fed_positions(runner: Any) -> FedPositions | None:
    """Return what reads the positions of a model runner's model, the same each time; None if it is not fed several."""
    several, model = getattr(runner.model_config, "model_is_mrope", False), getattr(runner, "model", None)
    of_transformers = getattr(model, "_uses_mrope_positions", None)  # a model that SGLang has none of its own of
    if not several or not (getattr(model, "is_mrope_enabled", False) or (of_transformers and of_transformers())):
        return None
    if runner not in _OF:
        _OF[runner] = FedPositions(runner)
    return _OF[runner]


def _text_of(media: Any) -> tuple[int, int]:
    """Return from which place on a request is text, and how far its positions are ahead there; `NEVER` if nobody knows."""
    import torch

    if media is None:
        return 0, 0
    own, items = getattr(media, "mrope_positions", None), [item for item in media.mm_items if item is not None]
    if own is None or own.device.type != "cpu" or not all(item.offsets for item in items):
        return NEVER, 0
    start = max((int(last) + 1 for item in items for _, last in item.offsets), default=0)
    ahead = own[:, start:] - torch.arange(start, max(start, int(own.shape[1])))
    if not ahead.numel() or bool((ahead != ahead[0, 0]).any()):  # no text behind it, or it places that otherwise, too
        return NEVER, 0
    return start, int(ahead[0, 0])
