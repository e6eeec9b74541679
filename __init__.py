"""kvcanary: the flight recorder and crash lab for an LLM inference engine's KV cache.

What an integrator needs, by name: `from kvcanary import Recorder, read_trace, replay, open_report`. Each name is imported
when it is first used, so `import kvcanary` loads nothing else.
"""

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .analysis.errors import AnalysisError, SqlError
    from .analysis.store.session import SqlSession, open_report, open_traces
    from .kernels.ops.hash.kv_source import KvSource
    from .kernels.ops.oracle.own import HashOracle, TokenOracle
    from .recorder.capture.block_use import BlockUse
    from .recorder.capture.device.recorder import DeviceRecorder
    from .recorder.capture.forward_input import (
        AttentionInput,
        BlockTable,
        ForwardInput,
        OutputRead,
        TableRead,
        TruthTokens,
    )
    from .recorder.capture.host_arrays import CopyEnds
    from .recorder.capture.kv_tensor import KvTensor
    from .recorder.capture.paged import PagedRecorder
    from .recorder.capture.privacy import IdentityValue, Privacy
    from .recorder.capture.recorder import Recorder
    from .recorder.capture.recurrent import StateAccess
    from .recorder.errors import TraceError
    from .recorder.process.environment import read_environment
    from .recorder.trace.header import (
        EngineInfo,
        KvStream,
        ModelInfo,
        Oracle,
        PoolGroup,
        Runner,
        StatePool,
        StateTable,
        TraceHeader,
    )
    from .recorder.trace.reader import TraceGap, TraceReader, read_trace
    from .replayer.report.summary import Summary
    from .replayer.run.replay import replay
    from .replayer.run.settings import ReplaySettings

    __version__: str

# Where each name is: module below this package.
EXPORTS: Final = {
    "AnalysisError": "analysis.errors",
    "AttentionInput": "recorder.capture.forward_input",
    "BlockTable": "recorder.capture.forward_input",
    "BlockUse": "recorder.capture.block_use",
    "CopyEnds": "recorder.capture.host_arrays",
    "DeviceRecorder": "recorder.capture.device.recorder",
    "EngineInfo": "recorder.trace.header",
    "ForwardInput": "recorder.capture.forward_input",
    "HashOracle": "kernels.ops.oracle.own",
    "IdentityValue": "recorder.capture.privacy",
    "KvSource": "kernels.ops.hash.kv_source",
    "KvStream": "recorder.trace.header",
    "KvTensor": "recorder.capture.kv_tensor",
    "ModelInfo": "recorder.trace.header",
    "Oracle": "recorder.trace.header",
    "OutputRead": "recorder.capture.forward_input",
    "PagedRecorder": "recorder.capture.paged",
    "PoolGroup": "recorder.trace.header",
    "Privacy": "recorder.capture.privacy",
    "Recorder": "recorder.capture.recorder",
    "ReplaySettings": "replayer.run.settings",
    "Runner": "recorder.trace.header",
    "SqlSession": "analysis.store.session",
    "SqlError": "analysis.errors",
    "StateAccess": "recorder.capture.recurrent",
    "StatePool": "recorder.trace.header",
    "StateTable": "recorder.trace.header",
    "Summary": "replayer.report.summary",
    "TIER_HOST": "recorder.trace.schema",
    "TIER_POOL": "recorder.trace.schema",
    "TableRead": "recorder.capture.forward_input",
    "TokenOracle": "kernels.ops.oracle.own",
    "TraceError": "recorder.errors",
    "TraceGap": "recorder.trace.reader",
    "TraceHeader": "recorder.trace.header",
    "TraceReader": "recorder.trace.reader",
    "TruthTokens": "recorder.capture.forward_input",
    "open_report": "analysis.store.session",
    "open_traces": "analysis.store.session",
    "read_environment": "recorder.process.environment",
    "read_trace": "recorder.trace.reader",
    "replay": "replayer.run.replay",
}

# pyflakes and type checkers read literals alone; a test holds that this is `EXPORTS` and the version.
__all__ = [
    "TIER_HOST",
    "TIER_POOL",
    "AnalysisError",
    "AttentionInput",
    "BlockTable",
    "BlockUse",
    "CopyEnds",
    "DeviceRecorder",
    "EngineInfo",
    "ForwardInput",
    "HashOracle",
    "IdentityValue",
    "KvSource",
    "KvStream",
    "KvTensor",
    "ModelInfo",
    "Oracle",
    "OutputRead",
    "PagedRecorder",
    "PoolGroup",
    "Privacy",
    "Recorder",
    "ReplaySettings",
    "Runner",
    "SqlError",
    "SqlSession",
    "StateAccess",
    "StatePool",
    "StateTable",
    "Summary",
    "TableRead",
    "TokenOracle",
    "TraceError",
    "TraceGap",
    "TraceHeader",
    "TraceReader",
    "TruthTokens",
    "__version__",
    "open_report",
    "open_traces",
    "read_environment",
    "read_trace",
    "replay",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for, once; `__version__` too, since reading a package's metadata takes long."""
    if name == "__version__":
        found: Any = _version()
    elif name in EXPORTS:
        from importlib import import_module

        found = getattr(import_module(f".{EXPORTS[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvcanary")
    except PackageNotFoundError:  # a bare checkout on sys.path, not installed
        return "0+unknown"
