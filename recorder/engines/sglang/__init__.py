"""Adapter for SGLang: what SGLang calls when it looks for plugins (entry point group `sglang.srt.plugins`).

Nothing happens, and nothing of weight is imported, unless `KVCANARY_TRACE` names a folder. Then every process that
runs a model writes a trace of its own into that folder. See docs/guide/production.md.
"""

from ..common.attachment import begin_plugin


def plugin() -> None:
    """Set the hooks if a recording is asked for; never raises into the engine."""
    begin_plugin("SGLang", __name__)
