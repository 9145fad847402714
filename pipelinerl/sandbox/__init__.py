"""Services beside the rollouts: grading in processes of its own, in the actor or behind HTTP."""
