"""The state that events drive: state tables, pools, the history of slots; on both sides of a trace."""
