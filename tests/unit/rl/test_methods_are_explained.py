"""Methods state equation and source, names in docs/algorithms.md exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import pipelinerl
from pipelinerl.config.keys import values_of
from pipelinerl.rl.advantages import ADVANTAGES
from pipelinerl.rl.aggregation import AGGREGATIONS
from pipelinerl.rl.losses import POLICY_LOSSES

DOCS = Path(__file__).parents[3] / "docs"
PACKAGE = Path(pipelinerl.__file__).parent


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_every_loss_states_its_equation_and_its_paper(name):
    text = inspect.getmodule(POLICY_LOSSES[name]).__doc__
    assert re.search(r"\n    loss.* = ", text) and re.search(r"arXiv \d{4}\.\d{5}", text)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_every_estimator_states_its_equation(name):
    assert ADVANTAGES[name].__doc__.startswith("A_i = ")


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
