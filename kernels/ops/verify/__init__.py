"""Verify: every plan entry against its predecessor, the plan, and the KV bytes."""
