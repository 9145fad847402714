"""When no more batches are due because the passes of `finetune.max_epochs` are over. Pure; called by the loop.

Training ends with the batch that has the last groups of the passes. To fill that batch the actor asks problems once
more, but many groups may be filtered, in the end all of them. So after one more pass it is closed with what there is,
and without anything the trainer is told that no batch follows.
"""

from __future__ import annotations


class LastStep:
    """Counts passes from the groups that came in, and from the batches that were closed.

    Args:
        max_epochs: `finetune.max_epochs`; None: never ends.
        update_interval: steps between two updates of the servers; the trainer ends behind a multiple of it.
        step: of the last batch that was closed; 0: none.
        epochs_done: the most that a batch says so far.
    """

    def __init__(self, max_epochs: int | None, update_interval: int, step: int, epochs_done: float) -> None:
        self.max_epochs = max_epochs
        self._interval = update_interval
        self._step = step
        self._closed_epochs = epochs_done
        self._given_up = False
        # Passes that were done when they were first seen to be enough, or when the last batch behind that was closed.
        self._over_since: float | None = None
        #: Once one more pass has not filled the open batch: what came before this offset is all that is trained.
        self.rest_end: int | None = None
        self.seen_epochs = 0.0
        self.see(epochs_done)

    def see(self, epochs_done: float) -> None:
        """Hear what a group says, also one of which nothing is trained."""
        self.seen_epochs = max(self.seen_epochs, epochs_done)
        if self._over_since is None and self.max_epochs is not None and self.seen_epochs >= self.max_epochs:
            self._over_since = self.seen_epochs

    def close(self, step: int, epochs_done: float) -> None:
        """Hear of a batch that was closed."""
        self._step = step
        self._closed_epochs = max(self._closed_epochs, epochs_done)
        if self._over_since is not None:
            self._over_since = max(self._over_since, epochs_done)

    def give_up(self) -> None:
        """There is nothing for another batch."""
        self._given_up = True

    @property
    def is_closed(self) -> bool:
        """Whether no further batch is due."""
        if self.max_epochs is None:
            return False
        ends = self._closed_epochs >= self.max_epochs and self._step % self._interval == 0
        return ends or self._given_up

    def wait_no_longer(self, end_offset: int) -> bool:
        """Whether one more pass did not fill the batch that would be the last, of which groups before `end_offset`
        came in; if so, `rest_end` is set."""
        if self._over_since is None:
            return False
        if self.rest_end is None and self.seen_epochs >= self._over_since + 1:
            self.rest_end = end_offset
        return self.rest_end is not None
