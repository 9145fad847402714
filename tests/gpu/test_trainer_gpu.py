"""The trainer on GPUs: bf16 products over fp32 weights on one, gradients as on the CPU on two (NCCL)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from fakes.finetune_kit import Kit
from fakes.rank_group import run_ranks
from fakes.visible_gpus import visible_gpu
from safetensors.torch import load_file

from pipelinerl.config import RunConfig
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.model import load_policy
from pipelinerl.finetune.model_export import ModelExporter
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.step import StepRunner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
FOLDER = Path(__file__).parents[1] / "integration" / "ranks"


def gradient(kit, policy, device: torch.device) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    config, ranks = kit.config(), Ranks(device=device)
    AcceleratorState._reset_state(reset_partial_state=True)  # it keeps the device of the first backend
    runner = StepRunner(PlainBackend(policy, config, ranks), config, ranks)
    runner.accumulate(kit.batch(kit.samples(64, 1, masked_every=9)))
    return {name: parameter.grad.cpu() for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_bf16_products_give_almost_the_fp32_gradient(tmp_path: Path, attention: str) -> None:
    kit = Kit()
    exact = gradient(kit, kit.policy(), torch.device("cpu"))
    folder = tmp_path / "model"
    kit.model().save_pretrained(folder)
    kit.tokenizer(folder)
    config = RunConfig(
        output_dir=str(tmp_path),
        model_path=str(folder),
        finetune=dict(attn_implementation=attention, gradient_checkpointing=True),
    )
    device = torch.device("cuda", 0)
    policy = load_policy(config, device)
    assert policy.compute_dtype == torch.bfloat16
    if attention == "auto":
        assert policy.attention in ("pipelinerl_varlen", "flash_attention_2")
        assert policy.has_compiled_layers == (policy.attention == "pipelinerl_varlen")
    assert next(policy.parameters()).dtype == torch.float32
    rough = gradient(kit, policy, device)
    ours = torch.cat([tensor.flatten() for tensor in rough.values()])
    theirs = torch.cat([exact[name].flatten() for name in rough])
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.995
    backend = PlainBackend(policy, config.finetune, Ranks(device=device))
    exporter = ModelExporter(tmp_path / "out", str(folder), Ranks(device=device))
    exporter.export(1, policy, backend.weight_source(torch.bfloat16, with_value_head=True))
    saved = load_file(tmp_path / "out" / "current" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "current" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("backend", ["plain", "fsdp", "zero2", "zero3"])
def test_two_gpus_train_as_one_cpu(tmp_path: Path, backend: str) -> None:
    if backend.startswith("zero"):
        pytest.importorskip("deepspeed")
    # One card is visible to each process; DeepSpeed takes the card by LOCAL_RANK, so its processes see both.
    cards = None if backend.startswith("zero") else [{"CUDA_VISIBLE_DEVICES": visible_gpu(rank)} for rank in range(2)]
    run_ranks(FOLDER / "rank_process.py", [backend, str(tmp_path), "cuda"], tmp_path, environments=cards)
    kit = Kit()
    expected = gradient(kit, kit.policy(), torch.device("cpu"))
    found = load_file(tmp_path / "gradients_1.safetensors")
    for name, tensor in expected.items():
        scale = max(1.0, float(tensor.abs().max()))
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-4 * scale, msg=name)
    result = json.loads((tmp_path / "result_0.json").read_text())
    assert result["probe"] < 1e-3
    assert result["grad_norms"][1] == pytest.approx(result["grad_norms"][2], rel=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_a_rank_that_waits_for_another_leaves_its_gpu_idle(tmp_path: Path) -> None:
    """In NCCL it would keep it busy, and a server of several workers that shares it would crawl."""
    run_ranks(FOLDER / "waiting_process.py", [str(tmp_path), "cuda"], tmp_path, limit_s=120)
    first, second = (json.loads((tmp_path / f"result_{rank}.json").read_text()) for rank in range(2))
    assert first["busy_percent"] <= 10
    assert second["broadcast"] == 7 and second["sum"] == [2.0, 2.0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_a_rank_that_fails_waits_for_no_other(tmp_path: Path) -> None:
    """It used to wait in NCCL's end until the other rank came, which waited for it."""
    run_ranks(FOLDER / "failing_process.py", [str(tmp_path), "cuda"], tmp_path, limit_s=120)
    first, second = (json.loads((tmp_path / f"result_{rank}.json").read_text()) for rank in range(2))
    assert (first["error"], second["error"]) == ("ValueError", "RuntimeError")
    assert max(first["seconds"], second["seconds"]) < 20


def test_a_micro_batch_never_waits_for_the_gpu(tmp_path: Path) -> None:
    """PyTorch itself raises where the host would wait: in forward, loss, backward and diagnostics."""
    kit = Kit()
    folder = tmp_path / "model"
    kit.model().save_pretrained(folder)
    kit.tokenizer(folder)
    config = RunConfig(output_dir=str(tmp_path), model_path=str(folder), finetune={"seq_length": 128})
    ranks = Ranks(device=torch.device("cuda", 0))
    backend = PlainBackend(load_policy(config, ranks.device), config.finetune, ranks)
    runner = StepRunner(backend, config.finetune, ranks)
    samples = kit.samples(64, 1, masked_every=9)
    # Each sample twice in a row, so that prefixes are shared.
    plan = [[[index, index + 32, index + 1, index + 33] for index in range(0, 32, 2)]]
    batch = kit.batch([*samples[:32], *samples[:32]], plan=plan)
    # The first step also loads kernels and makes buffers.
    runner.accumulate(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.accumulate(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
