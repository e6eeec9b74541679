"""A pipeline stage of SGLang's: which of its own forwards a result belongs to that came round from the last stage.

Each stage runs a micro-batch, and later takes over a result that is made anew from what the last stage sent. It takes it
over for the very batch that it ran, and before that batch runs again; or, where the batch is speculative, for the copy
that newer versions make of it as it was launched.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ..common.hooking import Finish, Hook

if TYPE_CHECKING:
    from .session import Session


# Micro-batches whose results may still be outstanding; a pipeline has a few.
MAX_LAUNCHED: Final = 64


class StageResults:
    """The micro-batches that a stage has run and that have no result yet, with what is known of each one's forward."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._launched: dict[int, tuple[Any, Any]] = {}  # by id of the batch, which is held, so that ids stay its own

    def on_launch(
        self, mb_id: Any, batch: Any, _proxy: Any = None, mb_metadata: Any = None, *_args: Any, **_kwargs: Any
    ) -> Finish | None:
        """Note which forward a micro-batch ran."""

        def finish(returned: Any, error: BaseException | None) -> None:
            ran = None if error is not None else self._session.take_ran(returned[0])
            if ran is None:
                return
            copied = None if mb_metadata is None else getattr(mb_metadata[mb_id], "fwd_batch", None)
            key = batch if copied is None else copied
            again = id(key) in self._launched  # without a result in between: whose the next one is cannot be told
            self._launched[id(key)] = (key, None if again else ran)
            if len(self._launched) > MAX_LAUNCHED:
                del self._launched[next(iter(self._launched))]

        return finish

    def on_process(self, batch: Any, result: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Say that a result is the one of the forward that this batch ran."""
        _, ran = self._launched.pop(id(batch), (None, None))
        if ran is not None and result is not None:
            self._session.put_ran(result, ran)
        return None


def follow_stages(scheduler: Any, stages: StageResults, wrap: Callable[[Any, str, Hook], None]) -> None:
    """Hook what a scheduler calls to run a micro-batch and to take over its result, where it is a stage's."""
    wrap(scheduler, "_pp_launch_batch", stages.on_launch)
    wrap(scheduler, "_pp_process_batch_result", stages.on_process)
