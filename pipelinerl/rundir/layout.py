"""A run directory: the names of its files, and its `RunIdentity`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipelinerl.errors import ConfigError
from pipelinerl.rundir.durable import replace_file

_MAX_NAMED = 3


class RunDir:
    """Paths of the run in `root`. Creates nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        conf = root / "conf"
        self.config_file = conf / "exp_config.yaml"
        self.world_file = conf / "world.json"
        self.identity_file = conf / "run.json"
        #: Held by the launcher while it is in the directory.
        self.lock_file = conf / "launch.lock"
        #: The newest step of each metric that earlier starts gave to trackers (`tracking.sinks`).
        self.told_file = conf / "told_steps.json"
        self.streams = root / "streams"
        self.launch_log = root / "launch.log"
        self.summary_file = root / "summary.json"
        self.metrics_file = root / "metrics.jsonl"
        #: What looked wrong in the run's numbers, one JSON object per line (`tracking.health`).
        self.findings_file = root / "findings.jsonl"
        self.learning_curve_file = root / "learning_curve.png"
        #: Results of a run that only evaluates.
        self.evaluation_file = root / "evaluation.json"
        self.finetune = root / "finetune"
        self.current_model = self.finetune / "current"
        #: The best model by evaluation, if the run keeps it (`finetune.keep_best`).
        self.best_model = self.finetune / "best"

    def config_of_start(self, incarnation: int) -> Path:
        """The configuration of one start: keys may change at a resume, and `replay` needs those of each step."""
        return self.root / "conf" / "starts" / f"{incarnation}.yaml"

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
    """`incarnation` counts the starts of the run from 0."""

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
    """The newest runs in a folder that is no run itself, as part of a message."""
    files = sorted(folder.glob("*/conf/run.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    names = [str(file.parent.parent) for file in files[:_MAX_NAMED]]
    return f", for instance {' or '.join(names)}" if names else ""


def write_identity(file: Path, identity: RunIdentity) -> None:
    """Write `conf/run.json` atomically."""
    replace_file(file, msgspec.json.encode(identity) + b"\n")
