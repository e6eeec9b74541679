"""What the recorder finds out on the device: what changed in tables and bytes, and the frames that carry it."""
