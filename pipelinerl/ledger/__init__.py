"""What became of every sample of a run, proved from its streams. Used by the command `audit`; imports no role."""
