"""The launches of a step, one after another or as captured graphs, which step any forward."""

from dataclasses import dataclass
from typing import Any, Final

from ....recorder.trace.header import TraceHeader
from .cuda import uncollected

STEPS_OF_A_GRAPH: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """How many programs each launch has, how many prefix positions (`tile`) or tokens one of them takes at once, and whether
    chains read their tokens `ahead`.
    """

    change: int
    store: int
    chain: int
    verify: int
    commit: int
    tile: int
    token_tile: int
    ahead: bool


ON_GPU: Final = Programs(change=64, store=128, chain=256, verify=1056, commit=128, tile=512, token_tile=128, ahead=True)
INTERPRETED: Final = Programs(change=1, store=1, chain=1, verify=2, commit=1, tile=64, token_tile=64, ahead=False)


class Launches:
    """Launches the kernels of steps; on a GPU sixteen steps are one graph launch.

    Args:
        header: says which kernels the trace needs at all.
        root: `[2] int64` on the device.
        programs: the size of each launch.
    """

    def __init__(self, header: TraceHeader, root: Any, programs: Programs) -> None:
        from ....kernels.gpu import step_commit, step_judge, step_prepare

        self._root = root
        self._programs = programs
        self._first, self._judge, self._last = step_prepare, step_judge, step_commit
        self._lut = any(group.lut >= 0 for group in header.groups)
        self._ring = any(group.reads_before_write for group in header.groups)
        self._graphs: dict[int, Any] = {}

    def run(self, steps: int, special: list[int]) -> None:
        """Take the steps of the piece that `root` names, those in `special` with the bytes that changed."""
        if not self._root.is_cuda:
            for number in range(steps):
                self._one(0, special=number in special)
                self._move_on(1)
            return
        at = 0
        for number in [*special, steps]:
            while at < number:
                count = STEPS_OF_A_GRAPH if number - at >= STEPS_OF_A_GRAPH or number == steps else 1
                self._graph(count).replay()
                at += count
            if number < steps:
                self._one(0, special=True)
                self._move_on(1)
                at += 1

    def _graph(self, steps: int) -> Any:
        """Return the captured launches of so many steps."""
        if steps not in self._graphs:
            import torch

            # The kernels are compiled first, by launches that find nothing to do.
            halted = self._root.clone()
            self._root[1] = 1
            self._one(0, special=True)
            self._move_on(0)
            torch.cuda.current_stream().synchronize()
            self._root.copy_(halted)
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph()
            with uncollected(), torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                for ahead in range(steps):
                    self._one(ahead, special=False)
                self._move_on(steps)
            self._graphs[steps] = graph
        return self._graphs[steps]

    def _one(self, ahead: int, *, special: bool) -> None:
        """Launch one step's kernels, which find it `ahead` steps behind the next one."""
        first, programs, root = self._first, self._programs, self._root
        tile = {"TILE": programs.token_tile}
        first.change_kernel[(programs.change,)](root, ahead, **tile)
        if self._lut:
            first.translate_kernel[(programs.change,)](root, ahead, **tile)
        if special:
            self._kv_changes(ahead, 0)
        first.store_kernel[(programs.store,)](root, ahead, RING=False, **tile)
        if special:
            self._kv_changes(ahead, 1)
        judges = programs.chain + programs.verify
        self._judge.judge_kernel[(judges,)](root, ahead, programs.chain, AHEAD=programs.ahead, TILE=programs.tile)
        if self._ring:
            first.store_kernel[(programs.store,)](root, ahead, RING=True, **tile)
        self._last.commit_kernel[(programs.commit,)](root, ahead, **tile)
        if self._lut:
            self._last.divergence_kernel[(programs.verify,)](root, ahead, TILE=programs.tile)

    def _kv_changes(self, ahead: int, phase: int) -> None:
        programs = (self._programs.change,)
        self._first.kv_change_kernel[programs](self._root, ahead, PHASE=phase, TILE=self._programs.token_tile)
        self._first.kv_fold_kernel[programs](self._root, ahead, PHASE=phase, TILE=self._programs.token_tile)

    def _move_on(self, steps: int) -> None:
        self._first.move_on_kernel[(1,)](self._root, steps)
