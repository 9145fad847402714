"""A run directory: every file name inside it, and `RunIdentity`, which makes it one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipelinerl.errors import ConfigError
from pipelinerl.rundir.durable import replace_file

_MAX_NAMED = 3


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. Nothing is created by constructing it."""

    root: Path

    @property
    def config_file(self) -> Path:
        return self.root / "conf" / "exp_config.yaml"

    def config_of_start(self, incarnation: int) -> Path:
        """The configuration of one start: keys may change at a resume, and `replay` needs those of each step."""
        return self.root / "conf" / "starts" / f"{incarnation}.yaml"

    @property
    def world_file(self) -> Path:
        return self.root / "conf" / "world.json"

    @property
    def identity_file(self) -> Path:
        """Run id and incarnation: what makes this directory one run."""
        return self.root / "conf" / "run.json"

    @property
    def streams(self) -> Path:
        return self.root / "streams"

    @property
    def lock_file(self) -> Path:
        """Held by the launcher while it is in the directory."""
        return self.root / "conf" / "launch.lock"

    @property
    def launch_log(self) -> Path:
        return self.root / "launch.log"

    @property
    def summary_file(self) -> Path:
        return self.root / "summary.json"

    @property
    def metrics_file(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def told_file(self) -> Path:
        """The newest step of each metric that earlier starts told (`tracking.sinks`)."""
        return self.root / "conf" / "told_steps.json"

    @property
    def findings_file(self) -> Path:
        """What went wrong in the run's numbers, a JSON object a line (`tracking.health`)."""
        return self.root / "findings.jsonl"

    @property
    def learning_curve_file(self) -> Path:
        return self.root / "learning_curve.png"

    @property
    def evaluation_file(self) -> Path:
        """Results of an evaluation alone."""
        return self.root / "evaluation.json"

    @property
    def finetune(self) -> Path:
        return self.root / "finetune"

    @property
    def current_model(self) -> Path:
        return self.finetune / "current"

    @property
    def best_model(self) -> Path:
        """The best model by evaluation, if the run keeps it (`finetune.keep_best`)."""
        return self.finetune / "best"

    def training_state(self, step: int) -> Path:
        return self.finetune / "training_state" / str(step)

    def job(self, name: str) -> Path:
        """Folder of one job (`command.sh`, `stdout.log`, `stderr.log`, `heartbeat.json`)."""
        return self.root / name

    def heartbeat_file(self, name: str) -> Path:
        return self.job(name) / "heartbeat.json"


def newest_training_state(run_dir: RunDir) -> int | None:
    """Step of the newest training state; None if there is none."""
    folder = run_dir.finetune / "training_state"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=None)


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """`incarnation` counts the starts of the same run from 0."""

    run_id: str
    incarnation: int


def read_identity(file: Path) -> RunIdentity:
    """Read `conf/run.json`; ConfigError if there is none or it is damaged."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=RunIdentity)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            "run directory",
            str(file.parent.parent),
            f"a started run ({file} is missing)",
            f"Give the output_dir of a run{_runs_in(file.parent.parent)}.",
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            "run directory",
            str(file),
            f"the identity of a run ({error})",
            "The file is damaged: use another output_dir.",
        ) from error


def _runs_in(folder: Path) -> str:
    """The newest runs below a folder that is none itself, as a remark."""
    files = sorted(folder.glob("*/conf/run.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    names = [str(file.parent.parent) for file in files[:_MAX_NAMED]]
    return f", for instance {' or '.join(names)}" if names else ""


def write_identity(file: Path, identity: RunIdentity) -> None:
    """Write `conf/run.json` atomically."""
    replace_file(file, msgspec.json.encode(identity) + b"\n")
