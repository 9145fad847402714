"""Makes a run with many gigabytes of streams and measures the page of `view` on it, as a browser would ask:

    python scripts/benchmark_view.py --gigabytes 10 --folder results/big

Prints one JSON object: seconds until the address is printed, of the first view (its files, overview, curves) right
after that, of the newest rollouts with their text, until a new one is found; megabytes and processor seconds until all
is indexed; the share of one core while the page is open and a rollout is written each second. The folder is removed.
"""

from __future__ import annotations

import http.cookiejar
import json
import random
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import psutil
from benchmark_common import made_sample, make_parser

from pipelinerl.config import RunConfig
from pipelinerl.config.load import save_config
from pipelinerl.records import (
    FateRecord,
    Group,
    MetricRecord,
    RolloutSummary,
    Sample,
    StepDone,
    TrainerMessage,
    TrainingBatch,
    VersionSpan,
)
from pipelinerl.rundir.layout import RunDir, RunIdentity, write_identity
from pipelinerl.streams.hub import StreamHub
from pipelinerl.tiny.tokenizer import build_tokenizer
from pipelinerl.world import WorldMap

ATTEMPTS, PROMPT, OUTPUT, GROUPS_PER_STEP, METRICS = 8, 200, 1200, 4, 100
OPEN_S = 30
CURVES = "success,reward,finetune/ess,finetune/lag_mean_versions,rl/entropy_estimate,finetune/grad_norm,finetune/step_s"


class MadeRun:
    """The folder of a run; groups of 8 rollouts of 1,400 tokens are written with all that belongs to them."""

    def __init__(self, folder: Path) -> None:
        self.files = RunDir(folder)
        model = folder / "model"
        build_tokenizer(16).save_pretrained(model)
        config = RunConfig.model_validate({"output_dir": str(folder), "model_path": str(model)})
        write_identity(self.files.identity_file, RunIdentity(run_id="big", incarnation=0))
        save_config(config, self.files.config_file)
        self.files.world_file.write_text(WorldMap([], "cpu", 1, "127.0.0.1", 1).to_json())
        hub = StreamHub(config.streams, self.files, "big")

        def writer(topic: str, instance: str, kind: Any) -> Any:
            return hub.writer(topic, instance, kind, is_consumed=False)

        self.groups = writer("actor", "actor_0", Group)
        self.batches = writer("training_data", "preprocessor_0", TrainingBatch)
        self.trainer = writer("trainer", "finetune_0", TrainerMessage)
        self.fates = writer("fates", "finetune_0", FateRecord)
        self.metrics = writer("metrics", "finetune_0", MetricRecord)
        self._random = random.Random(0)
        self._samples = [self._sample(k) for k in range(ATTEMPTS)]
        self._waiting: list[Group] = []
        self.step = 0

    def _sample(self, k: int) -> Sample:
        ids = [self._random.randrange(10, 280) for _ in range(PROMPT + OUTPUT)]
        logprobs = [-self._random.random() for _ in range(OUTPUT)]
        return made_sample("", ids[:PROMPT], ids[PROMPT:], logprobs=logprobs, reward=float(k % 2))

    def add_group(self, n: int) -> None:
        """Group `n`; with each fourth one the step that trains them."""
        spans = [VersionSpan(self.step, 0, OUTPUT)]
        names = [f"0-{n}/r{k}" for k in range(ATTEMPTS)]
        own = [
            msgspec.structs.replace(sample, id=f"{name}/s0", group_id=f"0-{n}", rollout_id=name, version_spans=spans)
            for name, sample in zip(names, self._samples, strict=True)
        ]
        summaries = [
            RolloutSummary(
                rollout_id=name, reward=k % 2, success=k % 2 > 0, num_samples=1, output_tokens=OUTPUT, latency_s=9
            )
            for k, name in enumerate(names)
        ]
        group = Group(id=f"0-{n}", problem_id=f"p{n % 500}", dataset_name="train", samples=own, rollouts=summaries)
        self.groups.write(group)
        self._waiting.append(group)
        if len(self._waiting) == GROUPS_PER_STEP:
            self._train()

    def _train(self) -> None:
        self.step += 1
        groups, self._waiting = self._waiting, []
        samples = [sample for group in groups for sample in group.samples]
        ids = [group.id for group in groups]
        plan = [[list(range(len(samples)))]]
        self.batches.write(
            TrainingBatch(id="", step=self.step, samples=samples, group_ids=ids, plan=plan, actor_offset=0)
        )
        for group in groups:
            self.fates.write(
                FateRecord(
                    sample_ids=[sample.id for sample in group.samples],
                    fate="trained",
                    reason="",
                    version=self.step,
                    group_id=group.id,
                    source="finetune",
                    output_tokens=OUTPUT * ATTEMPTS,
                    num_rollouts=ATTEMPTS,
                )
            )
        values = {
            name: self._random.random() for name in (*CURVES.split(",")[2:], *(f"rl/m{n}" for n in range(METRICS)))
        }
        values["finetune/reward_mean"] = self._random.random()
        self.metrics.write(MetricRecord(source="finetune_0", step=self.step, time=self.step, values=values))
        done = StepDone(step=self.step, time=self.step, group_ids=ids, num_samples=len(samples), samples_processed=0)
        self.trainer.write(done)

    @property
    def size(self) -> int:
        """Bytes of the two large streams."""
        folders = (self.files.streams / name for name in ("actor", "training_data"))
        return sum(file.stat().st_size for folder in folders for file in folder.rglob("*.jsonl"))


class Page:
    """Asks a server of `view` as the page does."""

    def __init__(self, address: str) -> None:
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
        self._base = address.split("/?")[0]
        self._opener.open(address).read()

    def get(self, path: str) -> bytes:
        with self._opener.open(self._base + path) as response:
            return bytes(response.read())

    def ask(self, path: str) -> Any:
        return json.loads(self.get(f"/api/runs/0/{path}"))

    def first_view(self) -> None:
        for name in re.findall(rb'"(/page/[^"]+)"', self.get("/")):
            self.get(name.decode())
        self.get("/api/runs")
        for path in ("pulse", "overview", "metrics", f"curves?names={CURVES}"):
            self.ask(path)

    def newest(self) -> list[Any]:
        rows: list[Any] = self.ask("rollouts?count=50")["rows"]
        at = ",".join(f"{row['offset']}.{row['place']}" for row in rows[:25])
        if at:
            self.ask(f"previews?at={at}")
        return rows


def timed(call: Any) -> float:
    started = time.monotonic()
    call()
    return round(time.monotonic() - started, 3)


def measure(run: MadeRun, groups: int) -> dict[str, Any]:
    """Open the page on `run`, which holds `groups` groups."""
    started = time.monotonic()
    command = [sys.executable, "-m", "pipelinerl", "view", str(run.files.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            page = Page(server.stdout.readline().strip())
            found: dict[str, Any] = {
                "gigabytes": round(run.size / 1e9, 2),
                "steps": run.step,
                "rollouts": groups * ATTEMPTS,
            }
            found["address_s"] = round(time.monotonic() - started, 3)
            found["first_view_s"] = timed(page.first_view)
            found["newest_s"] = timed(page.newest)
            while (pulse := page.ask("pulse"))["rollouts"]["training"] < groups * ATTEMPTS or pulse["step"] < run.step:
                time.sleep(0.5)
            found["all_indexed_s"] = round(time.monotonic() - started, 1)
            process = psutil.Process(server.pid)
            found["all_indexed_cpu_s"] = round(sum(process.cpu_times()[:2]), 1)
            found["second_view_s"] = timed(page.first_view)
            found["newest_again_s"] = timed(page.newest)
            found["one_problem_s"] = timed(lambda: page.ask("rollouts?problem=p7&count=1000"))
            found["one_step_s"] = timed(lambda: page.ask("rollouts?step_from=9&step_to=9"))
            found["old_group_s"] = timed(lambda: page.ask(f"group?offset={groups // 3}"))
            found |= _live(run, page, process, groups)
            found["peak_megabytes"] = _peak_megabytes(server.pid)
            return found
        finally:
            server.terminate()


def _live(run: MadeRun, page: Page, process: psutil.Process, groups: int) -> dict[str, Any]:
    """A group a second for a while, with the page open on the newest rollouts."""
    slowest, cpu_s, started = 0.0, sum(process.cpu_times()[:2]), time.monotonic()
    for n in range(groups, groups + OPEN_S):
        written = time.monotonic()
        run.add_group(n)
        while page.ask("pulse")["rollouts"]["training"] < (n + 1) * ATTEMPTS:
            time.sleep(0.05)
        page.newest()
        slowest = max(slowest, time.monotonic() - written)
        time.sleep(max(0.0, 1.0 - (time.monotonic() - written)))
    used = sum(process.cpu_times()[:2]) - cpu_s
    return {"new_rollout_s": round(slowest, 3), "live_core_share": round(used / (time.monotonic() - started), 4)}


def _peak_megabytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return round(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1e3, 1)  # type: ignore[index]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--folder", type=Path, default=Path("results/view-benchmark"))
    args = parser.parse_args()
    try:
        run = MadeRun(args.folder.absolute())
        groups = 0
        while run.size < args.gigabytes * 1e9:
            for _ in range(100):
                run.add_group(groups)
                groups += 1
        print(json.dumps(measure(run, groups)))
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
