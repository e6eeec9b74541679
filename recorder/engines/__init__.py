"""One adapter a file: each turns one engine's forwards into Recorder calls."""
