"""Build the tiny model's folder once, and find it again.

Called by `python -m pipelinerl tiny-model`, by the quickstart and by tests. The folder is in Hugging Face format, as
vLLM and transformers load it, with one file more (`tiny_model.json`): what it was made of. Waits for nothing.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from pipelinerl.domains import guessing
from pipelinerl.tiny import model as model_module
from pipelinerl.tiny import play as play_module
from pipelinerl.tiny import tokenizer as tokenizer_module
from pipelinerl.tiny import warmup as warmup_module
from pipelinerl.tiny.model import build_model
from pipelinerl.tiny.tokenizer import build_tokenizer
from pipelinerl.tiny.warmup import WarmupSettings, warm_up

RECORD_FILE = "tiny_model.json"
DEFAULT_ROOT = Path("results/tiny-model")
# Numbers in the vocabulary of a model that is not warmed up for a particular game.
_UNTRAINED_MAX_NUMBER = 32
_SOURCES = (guessing, model_module, play_module, tokenizer_module, warmup_module)


def model_key(*, seed: int, tie_word_embeddings: bool, warmup: WarmupSettings | None) -> str:
    """Return a short name that changes whenever the model would: settings, seed, source code or library versions."""
    digest = hashlib.sha256()
    settings = None if warmup is None else dataclasses.asdict(warmup)
    facts = [seed, tie_word_embeddings, settings, torch.__version__, transformers.__version__]
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for module in _SOURCES:
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()[:12]


def build_tiny_model(
    output_dir: Path,
    *,
    seed: int,
    tie_word_embeddings: bool = False,
    warmup: WarmupSettings | None,
    progress: Callable[[str], None],
) -> Path:
    """Return ``output_dir`` with a tokenizer and a model in it; reuse it when it was built from the same things.

    Args:
        output_dir: becomes the model's folder; it appears complete or not at all.
        seed: for the initial weights and the warm-up.
        tie_word_embeddings: share the input and the output embeddings.
        warmup: how to warm the model up; None leaves random weights (a few seconds, for tests).
        progress: is given one line at a time.

    Raises:
        ValueError: ``output_dir`` holds something that is not a tiny model.
    """
    key = model_key(seed=seed, tie_word_embeddings=tie_word_embeddings, warmup=warmup)
    if _recorded_key(output_dir) == key:
        progress(f"tiny model: {output_dir} is up to date")
        return output_dir
    tokenizer = build_tokenizer(_UNTRAINED_MAX_NUMBER if warmup is None else warmup.high)
    model = build_model(tokenizer, seed=seed, tie_word_embeddings=tie_word_embeddings)
    record: dict[str, object] = {"key": key, "seed": seed, "tie_word_embeddings": tie_word_embeddings, "warmup": None}
    progress(f"tiny model: {model.num_parameters():,} parameters, {len(tokenizer)} tokens, seed {seed}")
    if warmup is not None:
        result = warm_up(model, tokenizer, warmup, seed=seed, progress=progress)
        record["warmup"] = dataclasses.asdict(warmup)
        record["result"] = dataclasses.asdict(result)
        if result.cut_short:
            # not what the settings ask for: usable, but built again at the next call
            record["key"] = f"{key}-cut-short"

    output_dir.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{output_dir.name}-", dir=output_dir.parent))
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        (scratch / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        scratch.chmod(0o755)
        if output_dir.exists():
            shutil.rmtree(output_dir)
        os.replace(scratch, output_dir)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress(f"tiny model: saved in {output_dir}")
    return output_dir


def _recorded_key(output_dir: Path) -> str | None:
    """Return the key of the tiny model in ``output_dir``, or None when the folder is empty or absent."""
    record = output_dir / RECORD_FILE
    if record.is_file():
        try:
            return str(json.loads(record.read_text(encoding="utf-8"))["key"])
        except (ValueError, KeyError) as error:
            raise ValueError(f"{record}: not a record of a tiny model ({error}). Delete {output_dir}.") from error
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise ValueError(
            f"output: {output_dir} exists and is not a tiny model; expected a new or empty folder. Choose another one."
        )
    return None
