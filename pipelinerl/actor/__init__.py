"""The actor: problems become groups of rollouts, within the lag that the schedule allows."""
