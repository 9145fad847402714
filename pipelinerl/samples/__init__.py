"""What the model said in a run: recorded rollouts as text. Used by the command `samples`; imports no role, no torch."""
