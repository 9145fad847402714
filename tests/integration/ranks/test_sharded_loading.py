"""A model whose weights are sharded is loaded in parts: with the right values, and never whole on any rank."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from fakes.families import random_model
from fakes.rank_group import run_ranks
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from pipelinerl.finetune.tensor_files import read_tensors

SCRIPT = Path(__file__).with_name("loading_process.py")
#: Tied; beyond the vocabulary of a trial; transposed; experts by other names, with a buffer; states, vectors in fp32.
MODELS: dict[str, dict[str, Any]] = {
    "gemma3_text": dict(tie_word_embeddings=True),
    "qwen3": dict(tie_word_embeddings=False, vocab_size=3001, pad_token_id=3000),
    "gpt2": {},
    "deepseek_v3": {},
    "qwen3_moe": {},
    "falcon_mamba": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp", "zero3", "fsdp_lora", "zero3_lora"])
def test_parts_have_the_values_of_the_files_and_train_as_the_whole_model(tmp_path: Path, backend: str) -> None:
    lora = "_lora" if backend.endswith("_lora") else ""
    # peft refuses all layers of a Mamba.
    families = [family for family in MODELS if not lora or family != "falcon_mamba"]
    folders = [tmp_path / f"model_{number}" for number in range(len(families))]
    for folder, family in zip(folders, families, strict=True):
        random_model(family, **MODELS[family]).save_pretrained(folder)
    models = ",".join(map(str, folders))
    for name, world_size in (("plain" + lora, 1), (backend, 2)):
        (tmp_path / name).mkdir()
        run_ranks(SCRIPT, [name, models, str(tmp_path / name)], tmp_path / name, world_size)
    for number, (family, folder) in enumerate(zip(families, folders, strict=True)):
        files, sent = read_tensors(folder), read_tensors(tmp_path / backend / f"sent_{number}.safetensors")
        assert files.keys() == sent.keys(), family
        assert all(torch.equal(files[name], sent[name]) for name in files), family
        expected = json.loads((tmp_path / ("plain" + lora) / f"loaded_{number}_0.json").read_text())["steps"]
        buffers = read_tensors(tmp_path / ("plain" + lora) / f"buffers_{number}_0.safetensors")
        for rank in range(2):
            found = json.loads((tmp_path / backend / f"loaded_{number}_{rank}.json").read_text())
            # The second step shows that the same parameters decay.
            assert found["steps"] == [pytest.approx(step, rel=1e-4) for step in expected], family
            own = read_tensors(tmp_path / backend / f"buffers_{number}_{rank}.safetensors")
            assert own.keys() == buffers.keys(), family
            assert all(torch.equal(buffers[name], own[name]) for name in buffers), family


@pytest.mark.slow
def test_an_adapter_to_start_from_is_merged_as_peft_does_and_trained_as_by_the_whole_model(tmp_path: Path) -> None:
    random_model("qwen2").save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    started = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"], bias="lora_only"))
    with torch.no_grad():
        for parameter in started.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)
    started.save_pretrained(tmp_path / "model" / "adapter")
    merged = dict(started.merge_and_unload().named_parameters())
    for name, world_size in (("plain_start", 1), ("fsdp_start", 2), ("zero3_start", 2)):
        (tmp_path / name).mkdir()
        run_ranks(SCRIPT, [name, str(tmp_path / "model"), str(tmp_path / name)], tmp_path / name, world_size)
        for weight, tensor in read_tensors(tmp_path / name / "sent_0.safetensors").items():
            torch.testing.assert_close(tensor, merged[weight].detach(), atol=1e-6, rtol=0, msg=f"{name}: {weight}")
        expected, found = (
            json.loads((tmp_path / each / "loaded_0_0.json").read_text())["steps"] for each in ("plain_start", name)
        )
        assert found == [pytest.approx(step, rel=1e-4) for step in expected], name


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "backends"), [("kl", ["fsdp", "zero3"]), ("kl16", ["fsdp"])])
def test_a_reference_in_parts_computes_what_a_whole_one_does(tmp_path: Path, kind: str, backends: list[str]) -> None:
    """Also with matrices in 16 bits beside vectors in fp32."""
    families = ["gemma3_text", "qwen3", "qwen3_moe"]
    folders = [tmp_path / f"model_{number}" for number in range(len(families))]
    for folder, family in zip(folders, families, strict=True):
        random_model(family, **MODELS[family]).save_pretrained(folder)
    for backend in ("plain", *backends):
        (tmp_path / backend).mkdir()
        words, ranks = [f"{backend}_{kind}", ",".join(map(str, folders)), str(tmp_path / backend)], range(2)
        run_ranks(SCRIPT, words, tmp_path / backend, 1 if backend == "plain" else 2)
    for number, rank, backend in itertools.product(range(len(families)), ranks, backends):
        expected = read_tensors(tmp_path / "plain" / f"reference_{number}_0.safetensors")
        for name, found in read_tensors(tmp_path / backend / f"reference_{number}_{rank}.safetensors").items():
            assert found.min() < -1
            torch.testing.assert_close(found, expected[name], atol=1e-6, rtol=0, msg=f"{backend} {families[number]}")
        plain, steps = (
            json.loads((tmp_path / each).read_text())["steps"]
            for each in (f"plain/loaded_{number}_0.json", f"{backend}/loaded_{number}_{rank}.json")
        )
        assert plain[0][2] == 0.0 < plain[1][2]
        assert kind == "kl16" or steps == [pytest.approx(step, rel=1e-4, abs=1e-9) for step in plain], backend


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "shares"), [("fsdp", 2), ("zero3", 4)])
def test_no_rank_loads_more_than_its_part_and_two_layers(tmp_path: Path, backend: str, shares: int) -> None:
    """A model of 0.5 B parameters, whose files are in bf16, beside a reference model. Its largest matrix alone has the
    size of nine layers.

    `shares`: what is held before the first step, in parts of the model. DeepSpeed makes masters and gradients of ZeRO-3
    at once, and gathers every matrix to attach a hook to it; gloo has it twice meanwhile.
    """
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    parts = model, model.model.layers[0], model.model.embed_tokens
    whole, layer, largest = (4 * sum(p.numel() for p in part.parameters()) / 2**20 for part in parts)
    model.save_pretrained(tmp_path / "large")
    del model, parts
    run_ranks(SCRIPT, [f"{backend}_kl", str(tmp_path / "large"), str(tmp_path)], tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"loaded_0_{rank}.json").read_text())
        for taken in (found["loading"] - found["empty"], found["reference"] - found["loaded"]):
            # Room for what is no weight: code that is loaded meanwhile, activations of a trial.
            assert whole / 2 < taken < whole / 2 + 2 * layer + 64, found
        held = shares * whole / 2
        assert held < found["ready"] - found["empty"] < held + 100, found
        assert found["sharding"] - found["empty"] < held + (2 * largest if backend == "zero3" else 0) + 128, found


@pytest.mark.slow
def test_ranks_leave_a_trial_together_and_name_the_rank_that_cannot_go_on(tmp_path: Path) -> None:
    """Wherever it is: in a layer while the other rank waits to gather the next one, or with a value on the border."""
    random_model("qwen2").save_pretrained(tmp_path / "model")
    run_ranks(SCRIPT.with_name("trial_process.py"), [str(tmp_path / "model"), str(tmp_path)], tmp_path)
    first, second = (json.loads((tmp_path / f"verdicts_{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert (first["none"], first["afterwards"]) == (None, None)
    assert first["layer"] == first["room"] == "rank 1: OutOfMemoryError: no room"
    assert first["tolerance"].startswith("rank 1: ")
