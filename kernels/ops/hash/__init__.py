"""The hash over canary records, and over KV bytes."""
