"""docs/metrics.md is generated: every name of a metric in the source has one meaning, and the page shows them all."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def document() -> ModuleType:
    spec = importlib.util.spec_from_file_location("document_script", ROOT / "scripts" / "document.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_metric_is_explained_and_the_page_is_up_to_date(document: ModuleType) -> None:
    meanings, wrong = document.collect(ROOT / "pipelinerl")
    assert wrong == []
    assert len(meanings) > 80
    page = document.PAGE.read_text(encoding="utf-8")
    assert document.renew(page, meanings) == page, "run python scripts/document.py"


def test_names_and_meanings_are_read_from_comments(document: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "one.py").write_text(
        'values["rl/a"] = 1  #: at the end\n'
        "#: above, on\n#: two lines\n"
        'values[f"actor/{self.index}/{name}"] = 2\n'
        'shown = values["rl/a"], values["rl/b"], f"evaluation/{seed}"\n'
    )
    (folder / "two.py").write_text('values["rl/a"] = 1  #: something else\n')
    meanings, wrong = document.collect(folder)
    assert meanings == {"rl/a": "at the end", "actor/<index>/<name>": "above, on two lines"}
    assert [line.split(":")[0] for line in wrong] == ["rl/a", "rl/b"]
