"""What `dry_run=true` can say about a start without starting anything: output_dir, model folder, names of the task.

Called by the launcher behind the plan. The user's files are read, not run; no network, no torch. Waits for nothing.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from pipelinerl.config import RunConfig
from pipelinerl.config.stages import has_stage
from pipelinerl.errors import UserError
from pipelinerl.run import preflight, workspace
from pipelinerl.run.model_folder import notes_on_model

_UNSET = "{key} is not set: a run has no task without it."


@dataclass
class Findings:
    """`faults`: why a start here would be refused; `notes`: what may be wrong; `unchecked`: what only a start tells."""

    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Several lines for the terminal."""
        lines = [f"note: {note}" for note in self.notes]
        if self.faults:
            lines += ["a start here would be refused:", *(f"- {fault}" for fault in self.faults)]
        else:
            lines.append("output_dir, model and task were looked at; nothing was found against a start")
        return "\n".join([*lines, f"not checked: {'; '.join(self.unchecked)}"])


def look_around(config: RunConfig, search_dirs: Sequence[Path]) -> Findings:
    """Look at all that can be seen without running anything of the user's."""
    found = Findings(unchecked=["whether devices and ports are free"])
    try:
        workspace.inspect(config, "dry-run")
    except UserError as error:
        found.faults.append(str(error))
    folder = Path(config.model_path).expanduser()
    if not folder.exists() and preflight.is_hub_name(config.model_path):
        found.unchecked.append(f"whether the hub has {config.model_path} (it is no folder here)")
    else:
        try:
            preflight.check_model(config)
            found.notes += notes_on_model(folder, config.model_path)
        except UserError as error:
            found.faults.append(str(error))
    if has_stage(config, "actor"):
        found.unchecked.append("whether the task's code runs (`check-domain` with the same arguments tries it)")
        for key, path, is_async in (
            ("dataset_loader", config.dataset_loader, False),
            ("actor.rollout_policy", config.actor.rollout_policy, True),
        ):
            fault = function_fault(path, is_async, search_dirs) if path else _UNSET.format(key=key)
            if fault is not None:
                found.faults.append(f"{key}: got {path!r}: {fault}" if path else fault)
    return found


def function_fault(path: str, is_async: bool, search_dirs: Sequence[Path]) -> str | None:
    """Why the dotted `path` leads to no function of this kind, from the text of its file; None if nothing is known
    against it."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        return "expected module and function with a dot between them"
    file = _module_file(module_name, search_dirs)
    if isinstance(file, str):
        return f"there is no module {file!r} in the folder of --config-dir, an installed package or on PYTHONPATH"
    if file is None:
        return None
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        return f"{file} is no Python: {error}"
    names = dict(_bound_names(tree.body))
    if name in names:
        node = names[name]
        is_plain = isinstance(node, ast.FunctionDef) and not node.decorator_list
        if is_async and is_plain:
            return f"{file} defines it with `def`, expected `async def`"
        if not is_async and isinstance(node, ast.AsyncFunctionDef):
            return f"{file} defines it with `async def`, expected `def`"
        return None
    if "*" in names or "__getattr__" in names:
        return None
    wanted = ast.AsyncFunctionDef if is_async else ast.FunctionDef
    near = difflib.get_close_matches(name, [each for each, node in names.items() if isinstance(node, wanted)], n=1)
    return f"{file} has no {name!r}. " + (f"Did you mean {module_name}.{near[0]}?" if near else "Define it there.")


def _module_file(module_name: str, search_dirs: Sequence[Path]) -> Path | str | None:
    """The file of a module, found without importing its packages; the name of what is missing; None for a module that
    has no text."""
    first, *rest = module_name.split(".")
    spec: ModuleSpec | None = PathFinder.find_spec(first, [str(folder) for folder in search_dirs] + sys.path)
    if spec is None:
        spec = importlib.util.find_spec(first)  # an installed package may have a finder of its own
    name = first
    for part in rest:
        if spec is None:
            break
        if spec.submodule_search_locations is None:
            return f"{name}.{part}"
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    if spec is None:
        return name
    return Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None


def _bound_names(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """What a module binds at its top level, branches included; `*` for an import of everything."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
        else:
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield part.id, part
            for block in ("body", "orelse", "finalbody", "handlers", "cases"):
                for inner in getattr(node, block, []):
                    yield from _bound_names(inner.body if not isinstance(inner, ast.stmt) else [inner])
