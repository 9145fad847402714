"""When a server starts waiting requests: one by one as they come, or several at once. Pure: no vLLM, no clock.

Asked by `inference.batched_start` before every engine step. A step that only decodes runs from CUDA graphs; one that
also computes a prompt may run without them, and then takes longer, for all requests. With answers of varied length a
request ends in nearly every step and another one takes its place, so nearly every step is of the slow kind. Held back
for a few steps, those that wait start together, and the steps between only decode.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipelinerl.errors import ConfigError

#: Environment variables of a server's process with the two settings of `vllm_config`.
WAIT_STEPS_VARIABLE = "PIPELINERL_ADMISSION_WAIT_STEPS"
BATCH_FRACTION_VARIABLE = "PIPELINERL_ADMISSION_BATCH_FRACTION"
#: No step is so cheap that it would pay to wait for more of them than this.
MAX_WAIT_STEPS = 64
DEFAULT_BATCH_FRACTION = 1 / 16


class AdmissionBatcher:
    """Says before each step whether requests that could start are held back in it.

    It holds only while others run. A request that could start does so in the `wait_steps + 1`-th step at the latest, as
    far as the scheduler can take it then.

    Args:
        wait_steps: steps that a request waits at most.
        batch_fraction: as soon as the requests that wait are this part of those that run, they start.
    """

    def __init__(self, wait_steps: int, batch_fraction: float = DEFAULT_BATCH_FRACTION) -> None:
        self.wait_steps = wait_steps
        self._batch_fraction = batch_fraction
        self._waited = 0
        self._refused = 0
        self._goes_on = False

    def holds(self, running: int, ready: int) -> bool:
        """Whether nothing new starts in the coming step.

        Args:
            running: requests that run.
            ready: requests that wait, at most as many as there are free places for.
        """
        self._refused = min(self._refused, ready)
        if ready == 0:
            self._waited = 0
            return False
        enough = int(running * self._batch_fraction)
        # Below 2 there is no batch to wait for; what the last step had no room for does not count as new.
        is_batch = self._goes_on or ready - self._refused >= enough
        return enough >= 2 and self._waited < self.wait_steps and not is_batch

    def held(self) -> None:
        """The step was scheduled, and all that could start had to wait."""
        self._waited += 1

    def offered(self, started: int, left: int, *, cut_short: bool) -> None:
        """The step was scheduled, and what could start was allowed to.

        Args:
            started: requests that started.
            left: requests that could have started by the number of places, and did not.
            cut_short: they did not because the step had no more tokens to give. If some did start, the rest of the
                batch follows in the next step. Else there is no memory for them: they are no batch by themselves.
        """
        if started:
            self._waited = 0
        elif left:
            self._waited += 1
        self._goes_on = cut_short and started > 0
        self._refused = left


def batcher_from(environ: Mapping[str, str]) -> AdmissionBatcher | None:
    """What the variables of this process ask for; None: requests start as they come.

    Raises:
        ConfigError: a variable has a value that cannot be used.
    """
    steps = environ.get(WAIT_STEPS_VARIABLE, "0")
    if not (steps.isascii() and steps.isdigit() and int(steps) <= MAX_WAIT_STEPS):
        raise ConfigError(WAIT_STEPS_VARIABLE, steps, f"an integer from 0 to {MAX_WAIT_STEPS}", "0 turns it off.")
    text = environ.get(BATCH_FRACTION_VARIABLE, str(DEFAULT_BATCH_FRACTION))
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise ConfigError(BATCH_FRACTION_VARIABLE, text, "a number above 0, at most 1", "0.0625 is one in sixteen.")
    return AdmissionBatcher(int(steps), fraction) if int(steps) else None
