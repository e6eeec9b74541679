"""How a forward is replayed: stepwise, which defines it, and incremental, which is the default."""
