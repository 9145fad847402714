"""Commands that look at a run that exists: audit, replay, samples; and the check of a task before a run."""
