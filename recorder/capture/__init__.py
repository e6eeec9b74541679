"""The Recorder: what an engine calls around a forward, and how its arrays become events."""
