"""The fault lab: real faults put into a running simulated engine, and what the replay makes of them."""
