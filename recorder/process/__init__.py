"""The process that is recorded: its settings, how it ends, and what it leaves behind."""
