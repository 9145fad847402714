"""Every metric of the loss and the diagnostics has its line in docs/metrics.md, every method its section."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import torch
from rl_samples import collated, make_sample

from pipelinerl.config.finetune import RLConfig
from pipelinerl.finetune.report import _RENAMED
from pipelinerl.preprocess import scoring
from pipelinerl.rl.advantages import ADVANTAGES
from pipelinerl.rl.aggregation import AGGREGATIONS
from pipelinerl.rl.coefficients import Coefficients
from pipelinerl.rl.diagnostics import StepDiagnostics
from pipelinerl.rl.losses import POLICY_LOSSES, LossInputs, compute_loss

DOCS = Path(__file__).parents[3] / "docs"


def test_every_metric_is_explained():
    batch = collated([make_sample([1], [2, 3], ref_logprobs=[-1.0, -1.0])])
    zeros = torch.zeros(1, 3)
    inputs = LossInputs.of(batch, zeros, entropy=zeros, values=zeros)
    names = set(StepDiagnostics.of(inputs, 5.0).values())
    for name in POLICY_LOSSES:
        rl = RLConfig(policy_loss=name, advantage_estimator="gae", importance_correction="mask")
        names |= set(compute_loss(inputs, rl, Coefficients(0.1, 0.1))[1])
    text = (DOCS / "metrics.md").read_text()
    assert not [name for name in names if f"`{_RENAMED.get(name, name)}`" not in text]


def test_every_method_has_a_section_with_equation_source_code_and_use():
    text = (DOCS / "algorithms.md").read_text()
    sections = [(part.split()[0], part) for part in re.split(r"\n###? ", text)[1:]]
    for name in (*ADVANTAGES, *POLICY_LOSSES):
        # `reinforce` is an estimator and a loss.
        parts = [part for title, part in sections if title == name]
        assert len(parts) == (name in ADVANTAGES) + (name in POLICY_LOSSES)
        for part in parts:
            words = " ".join(part.split())
            assert re.search(r"\n    \S", part), f"{name}: no equation"
            assert "Paper" in words and "Code: `" in words and "Use it when" in words, name
    corrections = get_args(RLConfig.model_fields["importance_correction"].annotation)
    estimators = get_args(RLConfig.model_fields["kl_estimator"].annotation)
    for name in (*AGGREGATIONS, *(c for c in corrections if c != "none"), *estimators):
        assert f"| `{name}`" in text, name


def test_code_and_metrics_that_the_page_names_exist():
    text = (DOCS / "algorithms.md").read_text()
    metrics = (DOCS / "metrics.md").read_text()
    for name in re.findall(r"`((?:rl|finetune|preprocessor)/[a-z_0-9]+)`", text):
        assert name == "finetune/current" or f"`{name}`" in metrics, name
    package = Path(scoring.__file__).parents[1]
    for file in re.findall(r"`([a-z_/]+\.py)`", text):
        assert list(package.glob(f"**/{file}")) or (DOCS.parent / file).exists(), file


def test_config_names_are_the_registered_ones():
    def literal(field):
        return set(get_args(RLConfig.model_fields[field].annotation))

    assert literal("policy_loss") == set(POLICY_LOSSES)
    assert literal("advantage_estimator") == set(ADVANTAGES)
    assert literal("aggregation") == set(AGGREGATIONS)


def test_every_rejection_reason_is_in_the_table():
    source = Path(scoring.__file__).read_text()
    for reason in ("overlong", "zero_advantage", "max_version_lag", "dropped_oldest", "no_ref_logprobs"):
        assert f"| {reason} " in source
