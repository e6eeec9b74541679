"""Streams that sample all layers of a pool, where they cannot be looked at."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...trace.header import PoolGroup, TraceHeader


def without_samples(
    header: TraceHeader, sources: Mapping[tuple[int, int], Any]
) -> tuple[TraceHeader, dict[tuple[int, int], Any]]:
    """Return a header and what its streams are read from without those that sample layers, which are the last of their groups."""
    groups: list[PoolGroup] = []
    kept: dict[tuple[int, int], Any] = {}
    for number, group in enumerate(header.groups):
        streams = tuple(stream for stream in group.streams if not stream.samples)
        groups.append(dataclasses.replace(group, streams=streams))
        kept |= {(number, place): sources[number, place] for place in range(len(streams))}
    return dataclasses.replace(header, groups=tuple(groups)), kept
