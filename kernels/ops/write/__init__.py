"""Write: a canary record into every slot that a forward writes."""
