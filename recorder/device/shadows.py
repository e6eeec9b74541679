"""The device's picture of what a replay knows: block tables, full-to-SWA tables, bytes of slots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...kernels.frames import GroupOnDevice, LutOnDevice, RunnerOnDevice, StreamOnDevice
from ...kernels.kv_source import KvSource
from ..header import PoolGroup, TraceHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerCapture:
    """One runner's shadows, its descriptor on the device, and which header groups and tables its parts are.

    `groups[i]` is the header's number of the runner's i-th group, `luts[i]` of its i-th full-to-SWA table.
    """

    on_device: RunnerOnDevice
    descriptor: Any
    table: int
    groups: tuple[int, ...]
    luts: tuple[int, ...]
    stream_words: tuple[int, ...]
    lut_int64: bool


class DeviceShadows:
    """Every runner's shadows; `bytes` is what they take on the device.

    Args:
        header: what the engine is; no group may be a ring buffer.
        tables: the engine's block table of each of the header's tables, `[rows, width] int32`.
        luts: its full-to-SWA tables.
        sources: for each `(group, stream)`, where the bytes lie.

    Raises:
        ValueError: an engine that cannot be recorded this way; the message says why.
    """

    def __init__(
        self,
        header: TraceHeader,
        *,
        tables: Sequence[Any],
        luts: Sequence[Any],
        sources: Mapping[tuple[int, int], KvSource],
    ) -> None:
        import torch

        self._owned: list[Any] = []
        device = tables[0].device

        def zeros(shape: Sequence[int], dtype: Any) -> Any:
            self._owned.append(torch.zeros(tuple(shape), dtype=dtype, device=device))
            return self._owned[-1]

        table_shadows = [zeros(table.shape, torch.int32) for table in tables]
        on_device_luts = [LutOnDevice(table=lut, shadow=zeros(lut.shape, torch.int64)) for lut in luts]
        self.runners: list[RunnerCapture] = []
        for number in range(len(header.runners)):
            mine = [(g, group) for g, group in enumerate(header.groups) if group.runner == number]
            used = sorted({group.lut for _, group in mine if group.lut >= 0})
            groups = [
                GroupOnDevice(
                    window=group.window,
                    lut=used.index(group.lut) if group.lut >= 0 else -1,
                    num_slots=group.num_slots,
                    stamps=zeros((group.num_slots,), torch.int32),
                    known=zeros((group.num_slots,), torch.uint8),
                )
                for _, group in mine
            ]
            streams = [
                StreamOnDevice(
                    rows=_rows(sources[g, s]),
                    shadow=zeros((group.num_slots, stream.capture_bytes // 8), torch.int64),
                    group=place,
                )
                for place, (g, group) in enumerate(mine)
                for s, stream in enumerate(group.streams)
            ]
            table = _only_table(number, [group for _, group in mine])
            on_device = RunnerOnDevice(
                table=tables[table],
                shadow=table_shadows[table],
                groups=groups,
                luts=[on_device_luts[lut] for lut in used],
                streams=streams,
            )
            self.runners.append(
                RunnerCapture(
                    on_device=on_device,
                    descriptor=torch.tensor(on_device.descriptor(), dtype=torch.int64, device=device),
                    table=table,
                    groups=tuple(g for g, _ in mine),
                    luts=tuple(used),
                    stream_words=tuple(stream.words for stream in streams),
                    lut_int64=bool(used) and str(luts[used[0]].dtype) == "torch.int64",
                )
            )

    @property
    def bytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._owned)

    def reset(self) -> None:
        """Take everything for unknown, as a replay does after a loss; runs on the current stream."""
        for tensor in self._owned:
            tensor.zero_()


def _only_table(runner: int, groups: list[PoolGroup]) -> int:
    tables = {group.table for group in groups}
    if len(tables) > 1:
        raise ValueError(f"runner {runner} has groups of {len(tables)} block tables, expected one")
    if any(group.reads_before_write for group in groups):
        raise ValueError(f"runner {runner} has ring buffers, which must be looked at before a forward")
    return tables.pop() if tables else 0


def _rows(source: KvSource) -> Any:
    if source.page_size != 1:
        raise ValueError(f"pages of {source.page_size} slots in one row, expected one slot a row")
    return source.tensor
