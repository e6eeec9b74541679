"""The recording side: trace format, writer, reader, recovery, the engine-neutral Recorder and its adapters."""
