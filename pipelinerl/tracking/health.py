"""Findings: what goes wrong in the numbers of a run that works, with evidence and advice.

`RULES` look at the curves after every optimizer step: medians of the last `WINDOW` steps, some compared with the first
ones. `EqualRewards` and `Waits` count for themselves. A finding that lasts is reported again after `AGAIN_AFTER_STEPS`
steps, a wait only when the other side waits.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median

import msgspec

from pipelinerl.records import EvaluationResult, FateRecord, MetricRecord
from pipelinerl.tracking.state import REWARD, SUCCESS, RunState

#: Steps per median.
WINDOW = 10
#: Steps without learning before the first report, and between reports of the same finding.
FIRST_AFTER_STEPS = 5
AGAIN_AFTER_STEPS = 50
#: Samples filtered in a row that are worth a report, in steps.
FILTERED_STEPS = 20
#: Steps over which waits are summed, and the share of their time that is worth a report.
WAITING_STEPS, WAITING_SHARE = 50, 0.3


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `findings.jsonl`. `step` is the newest step that it is about; `name` is that of the rule."""

    name: str
    step: int
    evidence: str
    advice: str

    @property
    def line(self) -> str:
        """For the terminal and the log."""
        return f"note: {self.evidence}, up to step {self.step}: {self.advice}"


def add_finding(path: Path, finding: Finding) -> None:
    """Append to the run's findings. Raises OSError if the disk refuses."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(finding) + b"\n")


def newest_findings(path: Path) -> list[Finding]:
    """The newest finding of each name, the latest last; an incomplete line is skipped."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    newest: dict[str, Finding] = {}
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError):
            found = msgspec.json.decode(line, type=Finding)
            newest.pop(found.name, None)
            newest[found.name] = found
    return list(newest.values())


class Curves:
    """Medians of a run's numbers in its first and last steps up to `step`; None where there are too few values."""

    def __init__(self, state: RunState, step: int) -> None:
        self.state, self.step = state, step

    def now(self, *names: str) -> float | None:
        """Median of the last `WINDOW` values of the first of `names` with data."""
        values = self.state.by_step(names)
        # Newest first; if steps are short, the actor records less than once per step.
        last = list(islice((value for step, value in reversed(values.items()) if step <= self.step), WINDOW))
        return median(last) if len(last) == WINDOW else None

    def begin(self, *names: str) -> float | None:
        """Median of the first values, once they are not also the last ones."""
        values = self.state.by_step(names)
        if len(values) < 2 * WINDOW:
            return None
        return median(islice(values.values(), WINDOW))

    def growth(self, name: str) -> float | None:
        """Increase of a counter over the last `WINDOW` steps."""
        values = self.state.by_step((name,))
        steps = [step for step in range(max(0, self.step - WINDOW), self.step + 1) if step in values]
        return values[steps[-1]] - values[steps[0]] if len(steps) > 1 else None

    def by_dataset(self, metric: str) -> Iterator[tuple[str, str]]:
        """(data set, name) of every curve `actor/<data set>/<metric>`."""
        pattern = re.compile(rf"actor/(.+)/{metric}")
        for name in list(self.state.history):
            if found := pattern.fullmatch(name):
                yield found[1], name


def entropy_collapse(curves: Curves) -> str | None:
    begin, now, success = curves.begin(_ENTROPY), curves.now(_ENTROPY), curves.now(*SUCCESS)
    if begin is None or now is None or now > 0.02 or now > 0.2 * begin or (success is not None and success > 0.9):
        return None
    return f"the entropy fell from {begin:.3g} to {now:.3g} nats per token while the task is not solved"


def entropy_explosion(curves: Curves) -> str | None:
    begin, now = curves.begin(_ENTROPY), curves.now(_ENTROPY)
    if begin is None or now is None or now < 2 * begin or now < begin + 0.5:
        return None
    return f"the entropy rose from {begin:.3g} to {now:.3g} nats per token: answers are turning into random text"


def policy_drift(curves: Curves) -> str | None:
    ess, ratio, kl = (curves.now(name) for name in ("finetune/ess", "rl/ratio_mean", "finetune/kl_sampler_trainer"))
    if ess is not None and ess < 0.3:
        return f"the effective sample size is {ess:.2g} (1 is best): most samples hardly count"
    if ratio is not None and abs(ratio - 1) > 0.2:
        return f"the mean importance ratio is {ratio:.2g} instead of 1: trainer and servers have different policies"
    if kl is not None and kl > 0.2:
        return f"the KL divergence of the servers' policy from the trainer's is {kl:.2g} nats per token"
    return None


def length_blow_up(curves: Curves) -> str | None:
    begin, now = curves.begin(_LENGTH), curves.now(_LENGTH)
    before, success = curves.begin(*SUCCESS), curves.now(*SUCCESS)
    if begin is None or now is None or before is None or success is None or now < 2 * begin or success > before + 0.05:
        return None
    return f"answers grew from {begin:.0f} to {now:.0f} tokens while success went from {before:.2f} to {success:.2f}"


def truncation(curves: Curves) -> str | None:
    now, begin = curves.now("preprocessor/cut_fraction"), curves.begin("preprocessor/cut_fraction")
    # Short answers come first, so the first steps vary, and a model may learn to finish its answers.
    if now is None or now < 0.3 or (now < 0.5 and (begin is None or now < 0.9 * begin)):
        return None
    return f"{now:.0%} of the rollouts are cut off by a token limit"


def reward_saturation(curves: Curves) -> str | None:
    equal, success = curves.now("finetune/zero_advantage_fraction"), curves.now(*SUCCESS)
    if equal is None or success is None or not 0.8 < equal < 1 or 0.1 < success < 0.9:
        return None
    before = curves.begin(*SUCCESS)
    # Many runs begin like that, then learn.
    if success <= 0.1 and (before is None or success > 1.3 * before):
        return None
    kind = "easy" if success >= 0.9 else "hard"
    return f"{equal:.0%} of the samples have equal rewards in their group and success is {success:.2f}: too {kind}"


def reward_without_success(curves: Curves) -> str | None:
    reward, reward_before = curves.now(*REWARD), curves.begin(*REWARD)
    success, success_before = curves.now(*SUCCESS), curves.begin(*SUCCESS)
    if reward is None or reward_before is None or success is None or success_before is None:
        return None
    if reward - reward_before < max(0.1, 0.2 * abs(reward_before)) or success >= success_before - 0.02:
        return None
    return (
        f"the reward rose from {reward_before:.3g} to {reward:.3g} while success fell from {success_before:.2f} "
        f"to {success:.2f}"
    )


def repetition(curves: Curves) -> str | None:
    now = curves.now("preprocessor/repeated_4grams")
    begin = curves.begin("preprocessor/repeated_4grams")
    if now is None or begin is None or now < 0.5 or now < begin + 0.2:
        return None
    return f"{now:.0%} of the 4-grams of an answer are repetitions, {begin:.0%} at first"


def format_lost(curves: Curves) -> str | None:
    for dataset, name in curves.by_dataset("no_answer"):
        now, begin = curves.now(name), curves.begin(name)
        if now is not None and begin is not None and now > 0.3 and now > begin + 0.2:
            return f"{now:.0%} of the rollouts of {dataset} have no answer that can be parsed, {begin:.0%} at first"
    return None


def evaluation_falls(curves: Curves) -> str | None:
    by_dataset: dict[str, list[EvaluationResult]] = {}
    for result in curves.state.evaluations:
        if result.success_rate is not None and result.due_version <= curves.step:
            by_dataset.setdefault(result.dataset_name, []).append(result)
    rewards = curves.state.by_step(REWARD)
    for dataset, results in by_dataset.items():
        rates = [result.success_rate or 0.0 for result in results]
        best = max(range(len(rates)), key=lambda index: rates[index])
        # Two in a row, each by more than chance explains (three standard errors).
        worse = [rate < rates[best] - 3 * _error(rates[best], results[best].num_rollouts) for rate in rates[best + 1 :]]
        if len(worse) < 2 or not all(worse[-2:]):
            continue
        then, now = _around(rewards, results[best].due_version), curves.now(*REWARD)
        if then is None or now is None or now <= then:
            continue
        return (
            f"success on {dataset} fell from {rates[best]:.3f} at version {results[best].due_version} to "
            f"{rates[-1]:.3f} while the reward of training rose from {then:.3g} to {now:.3g}"
        )
    return None


def _error(rate: float, count: int) -> float:
    return (max(rate * (1 - rate), 0.01) * 2 / max(count, 1)) ** 0.5


def _around(values: dict[int, float], step: int) -> float | None:
    near = [values[each] for each in range(step - WINDOW // 2, step + WINDOW // 2 + 1) if each in values]
    return median(near) if near else None


def stale_samples(curves: Curves) -> str | None:
    old = curves.now("rl/lag_share_8_plus")
    if old is not None and old > 0.2:
        return f"{old:.0%} of the tokens are at least eight versions old"
    dropped, trained = curves.growth("preprocessor/stale_samples"), curves.now("finetune/samples")
    if dropped is None or not trained or dropped < 0.1 * WINDOW * trained:
        return None
    return f"{dropped:.0f} samples were dropped in {WINDOW} steps because they were too old"


def failing_rollouts(curves: Curves) -> str | None:
    trained, per_rollout = curves.now("finetune/samples"), curves.now("actor/samples_per_rollout")
    rollouts = None if not trained else trained / max(per_rollout or 1.0, 1.0)
    for name in list(curves.state.history):
        reason = name.partition("/failed_")[2]
        if not reason or reason == "rollouts" or rollouts is None:
            continue
        if (failed := curves.growth(name)) is not None and failed > 0.1 * WINDOW * rollouts:
            return f"{failed:.0f} rollouts failed in {WINDOW} steps ({reason})"
    for dataset, name in curves.by_dataset("no_error"):
        now, begin = curves.now(name), curves.begin(name)
        if now is not None and begin is not None and now < 0.9 and now < begin - 0.1:
            return f"{1 - now:.0%} of the rollouts of {dataset} report an error, {1 - begin:.0%} at first"
    return None


def plain_layers(curves: Curves) -> str | None:
    if curves.now("finetune/compiled_layers") == 0:
        return "the trainer's decoder layers are not compiled, so steps take longer"
    return None


_ENTROPY, _LENGTH = "rl/entropy_estimate", "actor/output_tokens_per_rollout"
_LOOK = "Read what the model says: `python -m pipelinerl samples RUN_DIR`"
#: Each rule says what it saw in the curves, or None; a finding has its name, and the advice here.
RULES: dict[Callable[[Curves], str | None], str] = {
    entropy_collapse: "Lower finetune.learning_rate, raise finetune.rl.epsilon_high, or set "
    "finetune.rl.target_entropy.",
    entropy_explosion: "Lower finetune.learning_rate and finetune.rl.entropy_bonus, and continue from an earlier "
    "checkpoint.",
    policy_drift: "Lower finetune.learning_rate or max_lag; if rl/logprob_abs_diff_on_policy is large too, servers and "
    "trainer compute different log-probs.",
    length_blow_up: f"{_LOOK}, lower llm.parameters.max_tokens, or use rewards=soft_length.",
    truncation: "Raise llm.parameters.max_tokens (and vllm_config.vllm_kwargs.max_model_len), or use "
    "rewards=soft_length.",
    reward_saturation: "Use problems of another difficulty, or filter_zero_advantage_groups=true, which trains only on "
    "the others.",
    reward_without_success: f"One part of the reward outweighs the rest: lower its weight. {_LOOK} --best 5.",
    repetition: f"{_LOOK} --worst 5; lower finetune.learning_rate, or penalize repetition.",
    format_lost: f"{_LOOK} --worst 5; rewards=success_and_format rewards the format.",
    evaluation_falls: "The reward can be earned without solving the task, or the training problems are memorized. "
    f"{_LOOK} --best 5; finetune.keep_best keeps the best model.",
    stale_samples: "Lower max_lag, or give the trainer more GPUs.",
    failing_rollouts: "See the actor's stderr.log and `python -m pipelinerl audit RUN_DIR`.",
    plain_layers: "The reason is in finetune_0/stderr.log, often no C compiler; TORCH_COMPILE_DISABLE=1 turns the "
    "attempt off.",
}


class EqualRewards:
    """`groups_equal`: nothing was learned for some steps, because all attempts of each group got the same reward.

    Args:
        samples_per_step: of the configuration.
        log: file with the output of rollout functions.
    """

    def __init__(self, samples_per_step: int, log: str) -> None:
        self._samples_per_step = samples_per_step
        self._advice = (
            "all attempts of a group got the same reward, so its advantages are 0. Print answers and rewards in "
            f"your rollout function (it writes to {log}), and try the reward with `python -m pipelinerl check-domain`."
        )
        self._steps = 0
        self._filtered = 0
        self._most_filtered = FILTERED_STEPS * samples_per_step

    def step(self, record: MetricRecord) -> Finding | None:
        """Take the numbers of one step."""
        fraction = record.values.get("finetune/zero_advantage_fraction")
        if fraction is None:
            return None
        self._filtered = 0
        self._steps = self._steps + 1 if fraction >= 1 else 0
        if self._steps < FIRST_AFTER_STEPS or (self._steps - FIRST_AFTER_STEPS) % AGAIN_AFTER_STEPS:
            return None
        evidence = f"nothing was learned in {self._steps} steps in a row"
        return Finding(name="groups_equal", step=record.step, evidence=evidence, advice=self._advice)

    def fate(self, record: FateRecord) -> Finding | None:
        """Take a fate; with `filter_zero_advantage_groups` there is no step if all groups are filtered."""
        if record.fate != "filtered" or record.reason != "zero_advantage":
            return None
        self._filtered += len(record.sample_ids)
        if self._filtered < self._most_filtered:
            return None
        self._most_filtered *= 4  # reported again only if it is much worse
        steps = self._filtered // self._samples_per_step
        evidence = f"{self._filtered} samples were filtered since the last step, enough for {steps} steps"
        return Finding(name="groups_equal", step=record.version, evidence=evidence, advice=self._advice)


class Waits:
    """`starved_trainer`, `idle_servers`: one side waits for the other much of the time."""

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._steps = 0
        self._step_s = self._wait_s = self._idle_s = self._idle_of_s = 0.0
        self._last_record: float | None = None
        self._said: str | None = None

    def actor(self, record: MetricRecord) -> None:
        """Take what the actor recorded of its servers."""
        idle = [value for name, value in record.values.items() if "server_idle_s_" in name]
        if idle and self._last_record is not None:
            self._idle_s += sum(idle)
            self._idle_of_s += len(idle) * max(0.0, record.time - self._last_record)
        if idle:
            self._last_record = record.time

    def step(self, record: MetricRecord) -> Finding | None:
        """Take the numbers of one step; the same finding is reported once in a row."""
        if (seconds := record.values.get("finetune/step_s")) is None:
            return None
        self._steps += 1
        self._step_s += seconds
        self._wait_s += record.values.get("finetune/wait_data_s", 0.0)
        if self._steps < WAITING_STEPS:
            return None
        waited = self._wait_s / max(self._step_s, 1e-9)
        idle = self._idle_s / max(self._idle_of_s, 1e-9)
        self._steps = 0
        self._step_s = self._wait_s = self._idle_s = self._idle_of_s = 0.0
        if waited > WAITING_SHARE:
            name, side, share = "starved_trainer", "the trainer waited for samples", waited
        elif idle > WAITING_SHARE:
            name, side, share = "idle_servers", "the servers were idle", idle
        else:
            return None
        if name == self._said:
            return None
        self._said = name
        evidence = f"{side} {share:.0%} of the last {WAITING_STEPS} steps"
        return Finding(name=name, step=record.step, evidence=evidence, advice=self._advice)


class Health:
    """All findings of one run, as its records come in.

    Args:
        waits: None where the sides alternate.
        run_dir: replaces RUN_DIR in advice.
    """

    def __init__(self, equal_rewards: EqualRewards, waits: Waits | None, run_dir: str) -> None:
        self._equal_rewards, self._waits, self._run_dir = equal_rewards, waits, run_dir
        self._told: dict[str, int] = {}

    def metrics(self, state: RunState, record: MetricRecord) -> list[Finding]:
        """Take a record that was folded into `state`."""
        found: list[Finding | None] = []
        if self._waits is not None:
            self._waits.actor(record)
            found.append(self._waits.step(record))
        if "finetune/loss" in record.values:
            found += [self._equal_rewards.step(record), *self._curves(state, record.step)]
        return [each for each in found if each is not None]

    def fate(self, record: FateRecord) -> list[Finding]:
        """Take a fate."""
        found = self._equal_rewards.fate(record)
        return [] if found is None else [found]

    def _curves(self, state: RunState, step: int) -> Iterator[Finding]:
        curves = Curves(state, step)
        for rule, advice in RULES.items():
            name = rule.__name__
            if step - self._told.get(name, step - AGAIN_AFTER_STEPS) < AGAIN_AFTER_STEPS:
                continue
            if (evidence := rule(curves)) is not None:
                self._told[name] = step
                yield Finding(name=name, step=step, evidence=evidence, advice=advice.replace("RUN_DIR", self._run_dir))
