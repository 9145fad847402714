"""No text is evaluated as code and nothing is unpickled anywhere in the package."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "pipelinerl"
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "joblib"}
FORBIDDEN_ATTRIBUTES = {"parse_expr", "sympify", "literal_eval_unsafe"}
# `model.eval()` and `re.compile()` are other things.


def offences(source: str, name: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            found.append(f"{name}:{node.lineno}: {node.func.id}()")
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        modules = (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else names if isinstance(node, ast.Import) else []
        )
        found += [f"{name}:{node.lineno}: {each}" for each in modules if each.partition(".")[0] in FORBIDDEN_MODULES]
        found += [f"{name}:{node.lineno}: {each}" for each in names if each in FORBIDDEN_ATTRIBUTES]
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_ATTRIBUTES:
            found.append(f"{name}:{node.lineno}: .{node.attr}")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append(f"{name}:{node.value.lineno}: allow_pickle")
    return found


def test_the_package_evaluates_no_text() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    assert [line for file in files for line in offences(file.read_text(encoding="utf-8"), str(file.name))] == []


def test_the_check_finds_what_it_looks_for() -> None:
    source = "import pickle\nfrom dill import loads\neval('1')\nexec('1')\nsympy.parse_expr('1')\nmodel.eval()\n"
    assert len(offences(source, "x")) == 5
