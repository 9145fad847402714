"""What an evaluation estimates: success of k samples per problem, with confidence intervals.

| name          | estimates                                                                             |
|---------------|---------------------------------------------------------------------------------------|
| `avg_at_<k>`  | probability that a sample solves a problem: mean over problems of the share solved     |
| `pass_at_<j>` | probability that one of j samples does, for j = 1, 2, 4, ... and k; `avg_at_k` = pass@1 |

Samples of one problem are not independent, so every interval is over problems. Pure: no I/O.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from pipelinerl.actor.worker_messages import Answer, RolloutEnded
from pipelinerl.domains.user_task import Problem
from pipelinerl.records import Estimate, EvaluationResult

ALL_DATASETS = "all"
# Quantile of the normal distribution for two-sided intervals of 95 %.
_Z = 1.959963984540054


def pass_at(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate that one of `k` samples of a problem is correct: 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374), equation 1, with integers.

    Args:
        num_samples: n, samples of the problem, at least k.
        num_correct: c of them that are correct.
        k: from 1 on.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@k: got k={k}, n={num_samples}, c={num_correct}, expected 1 <= k <= n and 0 <= c <= n")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def interval(values: Sequence[float], num_samples: int) -> Estimate:
    """Return the mean of `values`, one in [0, 1] for each problem, with its 95 % interval.

    The variance is that between problems, sum (x_i - mean)^2 / m^2 for m problems: for equal numbers of samples a
    problem, the clustered standard error of Miller 2024, "Adding Error Bars to Evals" (arXiv 2411.00640), section 2.2,
    clusters being problems. It gives the effective sample size n = mean (1 - mean) / variance, between the numbers of
    problems and of samples, for which the interval is Wilson's (1927); this form keeps its coverage near 0 and 1
    (Franco, Little, Louis and Slud 2019, https://pmc.ncbi.nlm.nih.gov/articles/PMC6690503). With one sample a problem
    it is Wilson's interval itself. Where all or none are correct nothing tells samples of a problem apart from copies
    of one: n is then the number of problems.

    Args:
        values: at least one.
        num_samples: of all problems together.
    """
    problems = len(values)
    mean = min(math.fsum(values) / problems, 1.0)
    variance = math.fsum((value - mean) ** 2 for value in values) / problems**2
    spread = mean * (1 - mean)
    effective = float(problems)
    if spread > 0:
        effective = min(max(spread / variance, problems), num_samples) if variance > 0 else float(num_samples)
    shrunk = 1 + _Z**2 / effective
    middle = (mean + _Z**2 / (2 * effective)) / shrunk
    half = _Z / shrunk * math.sqrt(spread / effective + _Z**2 / (4 * effective**2))
    return Estimate(value=mean, low=min(max(middle - half, 0.0), mean), high=max(min(middle + half, 1.0), mean))


def estimates(outcomes: Iterable[Sequence[bool]], k: int) -> dict[str, Estimate]:
    """Return `avg_at_<k>` and, for k above 1, `pass_at_<j>` by name.

    Args:
        outcomes: success of the samples of each problem. Problems without any are left out, and of `pass_at_<j>` those
            with fewer than j.
        k: samples that each problem was to have.
    """
    known = [list(each) for each in outcomes if each]
    if not known:
        return {}
    shares = [sum(each) / len(each) for each in known]
    found = {f"avg_at_{k}": interval(shares, sum(map(len, known)))}
    for j in sorted({*(2**power for power in range(k.bit_length())), k}) if k > 1 else []:
        enough = [each for each in known if len(each) >= j]
        if enough:
            values = [pass_at(len(each), sum(each), j) for each in enough]
            found[f"pass_at_{j}"] = interval(values, sum(map(len, enough)))
    return found


def summarize(
    problems: Sequence[Problem], answers: Sequence[Answer], template: EvaluationResult
) -> list[EvaluationResult]:
    """Return one result for all data sets together, followed by one for each if there are several.

    Success and reward are means over problems, so a set with more samples per problem weighs no more. Failed rollouts
    are counted but not averaged. Data sets in which all failed are left out. If everything failed there is one result
    without averages, so that readers know that the evaluation is over.

    Args:
        problems: of the rollouts; those with the same data set and id are samples of one problem.
        answers: of the rollouts, in the same order.
        template: everything that is the same for all results. Its versions apply if no rollout says its own.
    """
    by_name: dict[str, list[tuple[Problem, Answer]]] = defaultdict(list)
    for problem, answer in zip(problems, answers, strict=True):
        own_name = answer.dataset_name if isinstance(answer, RolloutEnded) else None
        by_name[own_name or problem.dataset_name].append((problem, answer))
    everything = [pair for own in by_name.values() for pair in own]
    results = [_summarize_one(ALL_DATASETS, everything, template)] if len(by_name) > 1 else []
    results += [_summarize_one(name, own, template) for name, own in sorted(by_name.items())]
    return [result for result in results if result.success_rate is not None] or results[:1]


def _summarize_one(
    dataset_name: str, rollouts: Sequence[tuple[Problem, Answer]], template: EvaluationResult
) -> EvaluationResult:
    ended = [answer for _, answer in rollouts if isinstance(answer, RolloutEnded)]
    versions = [version for answer in ended for version in (answer.min_version, answer.max_version)]
    known = [version for version in versions if version is not None] or [template.min_version, template.max_version]
    metrics: dict[str, list[float]] = defaultdict(list)
    for answer in ended:
        for name, value in answer.summary.metrics.items():
            metrics[name].append(value)
    by_problem: dict[tuple[int, str, str], list[Answer]] = defaultdict(list)
    for problem, each in rollouts:
        by_problem[problem.evaluation_set, problem.dataset_name, problem.id].append(each)
    attempts = min(map(len, by_problem.values()), default=1)
    summaries = [[one.summary for one in own if isinstance(one, RolloutEnded)] for own in by_problem.values()]
    outcomes = [[summary.success for summary in own] for own in summaries if own]
    rewards = [[summary.reward for summary in own] for own in summaries if own]
    return replace(
        template,
        min_version=min(known),
        max_version=max(known),
        dataset_name=dataset_name,
        num_rollouts=len(rollouts),
        num_failed=len(rollouts) - len(ended),
        success_rate=_mean([math.fsum(own) / len(own) for own in outcomes]),
        mean_reward=_mean([math.fsum(own) / len(own) for own in rewards]),
        metrics={name: math.fsum(values) / len(values) for name, values in sorted(metrics.items())},
        num_problems=len(by_problem),
        attempts=attempts,
        estimates=estimates(outcomes, attempts),
        output_tokens=_mean([answer.summary.output_tokens for answer in ended]),
        cut_fraction=_mean([answer.summary.num_cut > 0 for answer in ended]),
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
