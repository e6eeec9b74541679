"""How often a model's weights have changed since the recording began: a step of training, or new weights copied into them."""

from typing import Any, Final
from weakref import ref

LISTED_EVERY: Final = 128  # steps: to list a model's parameters takes ten times as long as to look at them


class Weights:
    """Counts the changes of the weights of the model that a processor runs, whoever makes them."""

    def __init__(self) -> None:
        self._parameters: list[ref[Any]] = []  # that hold no model in memory
        self._seen: list[int] = []
        self._steps = 0
        self.changes = 0
        self.adapters = True  # whether the model may be computed with some, by peft

    def look(self, model: Any) -> bool:
        """Look at a model before a step; return whether its weights have changed since the step before.

        torch counts what is done to a tensor in place. It does so neither for tensors that are for inference alone, nor for what
        goes through `.data`: that is not seen. Parameters in the place of others that live on are seen some steps late.
        """
        self.adapters = hasattr(model, "peft_config")
        before = self._parameters
        found: list[Any] = [parameter() for parameter in before]
        if self._steps % LISTED_EVERY == 0 or any(one is None for one in found):
            found = [one for one in model.parameters() if not one.is_inference()]
            self._parameters = [ref(one) for one in found]
        self._steps += 1
        seen = [one._version for one in found]
        # A tensor has one such reference: tensors themselves would compare their values.
        others = [*map(id, before)] != [*map(id, self._parameters)]
        changed = bool(before) and (others or seen != self._seen)
        self._seen = seen
        self.changes += changed
        return changed
