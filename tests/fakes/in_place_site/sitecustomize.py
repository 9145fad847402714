"""For a server on a CPU whose PYTHONPATH has this folder: it loads in place, as one on a GPU does.

Python imports this by itself in every process of the server. vLLM then leaves the matrices of linear layers as they are
(on CPUs it packs them), and every update says in the log that it is loaded so.

If PIPELINERL_TEST_SKIPPED names a file, the server loads as it does without this folder, but its loaders skip the
tensor whose name is in that file.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _in_place(module: Any) -> None:
    module.can_load_in_place = lambda model: True
    begin = module.InPlaceLoading.begin

    def told(self: Any, is_noted: bool) -> None:
        print("loading in place", flush=True)
        begin(self, is_noted)

    module.InPlaceLoading.begin = told


def _skipping(module: Any) -> None:
    load = module.load_weights

    def load_weights(model: Any, tensors: Any, is_noted: bool) -> Any:
        with open(os.environ[_SKIPPED]) as file:
            skipped, kind = file.read(), type(model)
        real = kind.load_weights
        kind.load_weights = lambda self, given: real(self, [(name, one) for name, one in given if name != skipped])
        try:
            return load(model, tensors, is_noted)
        finally:
            kind.load_weights = real

    module.load_weights = load_weights


def _no_packing_of_large(module: Any) -> None:
    module._supports_onednn = False


def _no_packing_of_small(module: Any) -> None:
    module.check_cpu_sgl_kernel = lambda *_: False


_SKIPPED = "PIPELINERL_TEST_SKIPPED"
_CHANGES: dict[str, Callable[[Any], None]] = {
    "pipelinerl.inference.transfer": _in_place,
    "vllm._custom_ops": _no_packing_of_large,
    "vllm.model_executor.layers.utils": _no_packing_of_small,
}
if _SKIPPED in os.environ:
    _CHANGES = {"pipelinerl.inference.transfer": _skipping}


class _Finder:
    """Changes a module right after it was imported."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in _CHANGES or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            _CHANGES[name](module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
