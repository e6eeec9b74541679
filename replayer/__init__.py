"""The replaying side: rebuilt state tables and pools, the replay of a forward, violations and the summary."""
