"""The model as a Hugging Face folder: `finetune/intermediate/<step>/`, with `finetune/current` pointing to the newest.

All ranks take part (a sharded model is gathered bucket by bucket); rank 0 writes file by file, so that the whole model
is never in memory, as it would be for `save_pretrained`. `current` is replaced in one atomic step: a reader sees the
old model or the new one, never a mixture.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.dynamic_module_utils import custom_object_save

from pipelinerl.finetune.lora import ADAPTER, has_adapters, save_adapter
from pipelinerl.finetune.policy import VALUE_HEAD, PolicyModel
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.served_weights import export_name, is_adapter_part
from pipelinerl.finetune.tensor_files import write_tensors
from pipelinerl.llm.tokens import load_tokenizer
from pipelinerl.rundir.durable import finish_folder, point_link, remove_folder, start_folder
from pipelinerl.weights.buffers import TensorMeta, WeightSource, plan_chunks

logger = logging.getLogger(__name__)

#: About how much one tensor file holds, and how much of the model waits in memory.
MAX_SHARD_BYTES = 5 * 10**9
_TRIED_TEXT = "Guess a number between 1 and 100, don't say why.\nThe answer is <answer>57</answer>."


class ModelExporter:
    """Writes the policy to `root/intermediate/<step>` and moves the link `root/current`.

    Args:
        tokenizer_path: model folder or name whose tokenizer goes along.
        keep_intermediate: keep older exports; else only the newest and those of `keep_steps` stay.
        trust_remote_code: run code of the tokenizer's folder. Code of a model or tokenizer goes along.
    """

    def __init__(
        self,
        root: Path,
        tokenizer_path: str,
        ranks: Ranks,
        keep_intermediate: bool = True,
        keep_steps: frozenset[int] = frozenset(),
        trust_remote_code: bool = False,
    ) -> None:
        self._root = root
        self._tokenizer_path = tokenizer_path
        self._ranks = ranks
        self._keep_intermediate = keep_intermediate
        self._keep_steps = keep_steps
        self._trust_remote_code = trust_remote_code
        self._has_tried_tokenizer = False

    def export(self, step: int, policy: PolicyModel, source: WeightSource) -> Path:
        """Write the weights of `source` and return the folder. Raises OSError if the disk does not take them."""
        final = self._root / "intermediate" / str(step)
        self.write(final, policy, source)
        if self._ranks.is_first:
            point_link(self._root / "current", final)
            if not self._keep_intermediate:
                self._prune(step)
        return final

    def write(
        self, final: Path, policy: PolicyModel, source: WeightSource, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Write the weights of `source` to the folder `final`, complete or not at all. All ranks take part.

        Args:
            final: where; an older folder of that name is replaced.
            policy: whose weights they are.
            source: the weights.
            files: further files by name.

        Raises:
            OSError: the disk does not take them (rank 0; the pass over the weights is over then).
        """
        if not self._ranks.is_first:
            source.follow()
            return
        trained = {export_name(name) for name, p in policy.named_parameters() if p.requires_grad}
        kept: dict[str, torch.Tensor] = {}

        def model_tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for bucket in source.buckets():
                for name, tensor in bucket:
                    if not _is_models(name) or (has_adapters(policy) and name in trained):
                        kept[name] = tensor.to("cpu", copy=True)
                    if _is_models(name):
                        yield name, tensor

        tensors = model_tensors()
        try:
            folder = start_folder(final)
            write_shards(folder, [m for m in source.metadata() if _is_models(m.name)], tensors, MAX_SHARD_BYTES)
        finally:
            # A pass is a collective: it is read to its end also if the disk is full.
            for _ in tensors:
                pass
            source.done()
        _write_rest(folder, policy, kept, source.metadata()[0].dtype)
        tokenizer = load_tokenizer(self._tokenizer_path, trust_remote_code=self._trust_remote_code)
        tokenizer.save_pretrained(folder)
        if not self._has_tried_tokenizer and (difference := tokenizer_difference(tokenizer, folder)):
            logger.warning("%s: %s", final, difference)
        self._has_tried_tokenizer = True
        for name, content in (files or {}).items():
            (folder / name).write_bytes(content)
        finish_folder(final)

    def _prune(self, newest: int) -> None:
        for folder in (self._root / "intermediate").iterdir():
            if folder.name.isdecimal() and int(folder.name) not in self._keep_steps | {newest}:
                remove_folder(folder)


def write_shards(
    folder: Path, metas: Sequence[TensorMeta], tensors: Iterator[tuple[str, torch.Tensor]], max_bytes: int
) -> None:
    """Write `tensors`, which come in the order of `metas`, to `model.safetensors`, or to numbered files of about
    `max_bytes` with an index."""
    shards = list(plan_chunks(metas, max_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = several if len(shards) > 1 else "model.safetensors"
        pending: dict[str, torch.Tensor] = {}
        for meta in shard:
            name, tensor = next(tensors)
            assert name == meta.name
            pending[name] = tensor.to("cpu", copy=True)
        write_tensors(folder / file, pending, {"format": "pt"})
        weight_map |= dict.fromkeys(pending, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(meta.num_bytes for meta in metas)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def tokenizer_difference(tokenizer: Any, folder: Path) -> str | None:
    """How other programs cut texts otherwise with the tokenizer in the model's `folder`; None: they do as `tokenizer`.

    They load it by the model's family, and may then keep its vocabulary and replace its rules.
    """
    if type(tokenizer) is not PreTrainedTokenizerFast:
        return None
    others = AutoTokenizer.from_pretrained(folder)
    text = _TRIED_TEXT
    if tokenizer.chat_template:
        # Templates may want more than one message of the user.
        with suppress(Exception):
            chat = [{"role": "user", "content": _TRIED_TEXT}]
            text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    ours, theirs = (each.encode(text, add_special_tokens=False) for each in (tokenizer, others))
    if ours == theirs:
        return None
    return (
        f"training sees {len(ours)} tokens where programs that use AutoTokenizer see others ({len(theirs)} for the "
        "same text): load the tokenizer with transformers.PreTrainedTokenizerFast, or give such programs token ids"
    )


def _is_models(name: str) -> bool:
    return not name.startswith(f"{VALUE_HEAD}.") and not is_adapter_part(name)


def _write_rest(folder: Path, policy: PolicyModel, kept: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    model = policy.language_model
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    if model.is_remote_code():
        # The configuration's own code is saved with it, the model's is not.
        custom_object_save(model, folder, config=config)  # type: ignore[arg-type]
    config.save_pretrained(folder)
    if model.generation_config is not None:
        content = model.generation_config.to_diff_dict()
        (folder / "generation_config.json").write_text(json.dumps(content, indent=1) + "\n")
    if has_adapters(policy):
        save_adapter(folder / ADAPTER, policy, kept)
    prefix = f"{VALUE_HEAD}."
    head = {name.removeprefix(prefix): tensor for name, tensor in kept.items() if name.startswith(prefix)}
    if head:
        # In a folder of its own: servers load every tensor file next to config.json.
        (folder / VALUE_HEAD).mkdir()
        write_tensors(folder / VALUE_HEAD / "model.safetensors", head)
