"""Methods state equation and source, names in docs/algorithms.md exist."""

from __future__ import annotations

import re
from pathlib import Path

import pipelinerl
from pipelinerl.config.keys import values_of
from pipelinerl.rl.advantages import ADVANTAGES
from pipelinerl.rl.loss import POLICY_LOSSES
from pipelinerl.rl.microbatch import AGGREGATIONS

DOCS = Path(__file__).parents[3] / "docs"
PACKAGE = Path(pipelinerl.__file__).parent


def test_what_the_page_names_exists():
    text, metrics = (DOCS / "algorithms.md").read_text(), (DOCS / "metrics.md").read_text()
    for name in re.findall(r"`((?:rl|finetune|preprocessor)/[a-z_0-9]+)`", text):
        assert name == "finetune/current" or f"`{name}`" in metrics, name
    for file in re.findall(r"`([a-z_/]+\.py)`", text):
        assert list(PACKAGE.glob(f"**/{file}")) or (DOCS.parent / file).exists(), file
    corrections = values_of("finetune.rl.importance_correction")
    estimators = values_of("finetune.rl.kl_estimator")
    for name in (*AGGREGATIONS, *(c for c in corrections if c != "none"), *estimators):
        assert f"| `{name}`" in text, name


def test_config_names_are_the_registered_ones():
    def literal(field):
        return set(values_of(f"finetune.rl.{field}"))

    assert literal("policy_loss") == set(POLICY_LOSSES)
    assert literal("advantage_estimator") == set(ADVANTAGES)
    assert literal("aggregation") == set(AGGREGATIONS)
