"""What every adapter shares: hooking, stopping, and the table of what is observed."""
