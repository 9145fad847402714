"""Which end of which job means what: the exit policy of a run, pure. Used by the supervisor.

Trainer ranks, actor and preprocessor end by themselves with exit code 0 once training is complete. Servers never end
by themselves; `server_keeper` says whether they are started again. Every other end fails the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipelinerl.errors import EXIT_USER_ERROR
from pipelinerl.run.processes import describe_exit
from pipelinerl.world import SERVER_KINDS, Job

VerdictKind = Literal["go_on", "finished", "failed", "user_error"]


@dataclass(frozen=True)
class Verdict:
    """What an exit means for the run; `reason` completes the sentence `<job> ...`."""

    kind: VerdictKind
    reason: str = ""


@dataclass
class ExitPolicy:
    """State: which jobs have ended well. `is_training_complete` asks the trainer's stream. `ends_run`: the run is over
    when all jobs ended; False on a node above 0, whose servers the other nodes may still need."""

    jobs: Sequence[Job]
    is_training_complete: Callable[[], bool]
    ends_run: bool = True
    _done: set[str] = field(default_factory=set)

    @property
    def unfinished(self) -> list[str]:
        """Jobs that still have to end by themselves."""
        return [job.name for job in self.jobs if job.kind not in SERVER_KINDS and job.name not in self._done]

    @property
    def has_finished_jobs(self) -> bool:
        return bool(self._done)

    def is_done(self, kind: str) -> bool:
        """Whether there are jobs of that kind and every one has ended well."""
        names = [job.name for job in self.jobs if job.kind == kind]
        return bool(names) and all(name in self._done for name in names)

    @property
    def is_training_over(self) -> bool:
        """Whether a job has ended that does so only behind the end of training. The trainer may be on another node."""
        ended = any(job.name in self._done for job in self.jobs if job.kind != "finetune")
        return ended or self.is_done("finetune")

    def awaits(self, kind: str) -> bool:
        """Whether a job of that kind still has to end by itself."""
        return any(job.kind == kind and job.name not in self._done for job in self.jobs)

    def on_exit(self, job: Job, returncode: int) -> Verdict:
        """Judge the end of one job."""
        if job.kind in SERVER_KINDS:
            return Verdict("failed", f"ended while the run needed it ({describe_exit(returncode)})")
        if returncode == EXIT_USER_ERROR:
            return Verdict("user_error", "refused its input")
        if returncode != 0:
            verb = "ended with" if returncode > 0 else "was"
            return Verdict("failed", f"{verb} {describe_exit(returncode)}")
        is_other_rank = job.kind == "finetune" and job.idx > 0
        if not is_other_rank and not self.is_training_complete():
            return Verdict("failed", "ended (exit code 0) before training was complete")
        self._done.add(job.name)
        return Verdict("finished") if self.ends_run and not self.unfinished else Verdict("go_on")
