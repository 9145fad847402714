"""Packed = alone on real models, a leak is found, and loading refuses what cannot be packed."""

import weakref

import pytest
import torch
from fakes.families import SHAPE, random_model
from fakes.static_pool import StaticPool
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
)

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError, WeightSyncError
from pipelinerl.finetune import model as loading
from pipelinerl.finetune.attention import register_own_attention, segment_layout
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.model import load_policy
from pipelinerl.finetune.model_check import forward_difference, packing_difference, token_batch
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.weight_sync import WeightSync

CPU = torch.device("cpu")


def test_layout_by_hand():
    layout = segment_layout([2, 1, 5])
    # The sample of 5 tokens stands alone; 2 and 1 share a block of length 2.
    (long, count, length), (short, short_count, short_length) = layout.blocks
    assert (long.tolist(), count, length) == ([3, 4, 5, 6, 7], 1, 5)
    assert (short.tolist(), short_count, short_length) == ([0, 1, 2, 2], 2, 2)
    # Row position -> place in [3 4 5 6 7 | 0 1 | 2 2]
    assert layout.restore.tolist() == [5, 6, 7, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "attention", ["pipelinerl_segments", "sdpa", "eager", pytest.param("flex_attention", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_m3_packed_equals_alone(kit, family, attention):
    policy = kit.policy(family, attention=attention)
    assert forward_difference(policy) < 1e-5
    assert packing_difference(policy) < 1e-5


def test_a_sliding_window_is_kept_inside_samples():
    """X2: on lengths beyond the window."""
    register_own_attention()
    results = {}
    for attention in ("pipelinerl_segments", "eager"):
        torch.manual_seed(1)
        config = Qwen2Config(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_sliding_window=True,
            sliding_window=4,
            max_window_layers=0,
            initializer_range=0.2,
            attn_implementation=attention,
        )
        assert config.layer_types == ["sliding_attention"] * 2
        policy = PolicyModel(Qwen2ForCausalLM(config))
        batch = token_batch([list(range(20)), list(range(5, 12))], torch.device("cpu"))
        results[attention] = policy(batch, policy.layout_of(batch)).logprobs
    torch.testing.assert_close(results["pipelinerl_segments"], results["eager"], atol=1e-5, rtol=0)


def test_m3_no_gradient_crosses_a_border(kit):
    """The log-probs of the second sample do not depend on the embeddings of the first."""
    policy = kit.policy()
    batch = token_batch([[1, 2, 3], [4, 5, 6, 7]], torch.device("cpu"))
    logprobs = policy(batch, policy.layout_of(batch)).logprobs[0]
    logprobs[3:].sum().backward()
    rows = policy.language_model.get_input_embeddings().weight.grad.abs().sum(-1)
    assert not rows[[1, 2, 3]].any()
    assert rows[[4, 5, 6]].all()


def test_attention_without_borders_is_found_out(kit):
    """X2: by the check that a run makes of its own model."""
    policy = kit.policy()
    policy.layout_of = lambda batch, may_share: segment_layout([batch.input_ids.shape[1]])
    assert packing_difference(policy) > 0.1


def test_without_packing_the_probe_does_not_pack(kit):
    """A server is right about a family whose state crosses samples in one row: it sees each sequence alone."""
    sequences = [[5, 3, 9, 11], [8, 2, 7], [1, 4, 6, 10, 12]]
    backend = PlainBackend(PolicyModel(random_model("mamba2")), kit.config(), Ranks())
    pool = StaticPool(kit.publisher(model=random_model("mamba2")))
    assert WeightSync(backend, Ranks(), pool, packed=False).send(1, sequences).probe_abs_diff < 1e-5
    with pytest.raises(WeightSyncError, match="differ"):
        WeightSync(backend, Ranks(), pool, packed=True).send(1, sequences)


def run_config(tmp_path, folder, **finetune):
    return RunConfig(output_dir=str(tmp_path), model_path=str(folder), finetune=finetune)


@pytest.fixture
def mamba_folder(tmp_path):
    torch.manual_seed(0)
    folder = tmp_path / "mamba"
    MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2)).save_pretrained(folder)
    return folder


def test_a_family_that_cannot_be_packed_is_refused_with_the_reason(tmp_path, mamba_folder):
    with pytest.raises(ConfigError, match=r"finetune.seq_packing: .*packed samples see each other.*seq_packing=false"):
        load_policy(run_config(tmp_path, mamba_folder, gradient_checkpointing=False), torch.device("cpu"))


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("gemma2", dict(attn_implementation="segments"), "finetune.attn_implementation"),
        ("mamba2", dict(attn_implementation="eager"), "finetune.seq_packing"),
        ("phimoe", {}, "model_path"),
    ],
)
def test_the_key_that_is_named_is_one_that_helps(tmp_path, family, changes, key):
    """Packing is blamed only if the model can be trained without it."""
    shape = dict(SHAPE, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    shape |= dict(num_heads=8, state_size=8, n_groups=2, num_local_experts=4, sliding_window=8)
    if family != "mamba2":
        shape.pop("num_heads")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20 if parameter.dim() > 1 else 1)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError) as found:
        load_policy(run_config(tmp_path, tmp_path / "model", gradient_checkpointing=False, **changes), CPU)
    assert found.value.key == key


def test_a_checkpoint_with_images_is_no_language_model(tmp_path):
    Qwen2VLConfig().save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="qwen2_vl") as found:
        load_policy(run_config(tmp_path, tmp_path / "model"), CPU)
    assert found.value.key == "model_path"


def test_the_same_family_trains_on_padded_rows(tmp_path, mamba_folder):
    config = run_config(tmp_path, mamba_folder, seq_packing=False, gradient_checkpointing=False)
    assert forward_difference(load_policy(config, torch.device("cpu"))) < 1e-5


def test_a_missing_model_folder_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"model_path: got '/nowhere/model', expected an existing folder"):
        load_policy(RunConfig(output_dir=str(tmp_path), model_path="/nowhere/model"), torch.device("cpu"))


def test_loading_says_which_attention_was_chosen(tmp_path, kit, caplog):
    folder = tmp_path / "model"
    kit.model().save_pretrained(folder)
    with caplog.at_level("INFO"):
        policy = load_policy(run_config(tmp_path, folder), torch.device("cpu"))
    assert policy.attention == "pipelinerl_segments"
    assert "attention pipelinerl_segments" in caplog.text
    assert policy.compute_dtype == torch.float32
    explicit = load_policy(run_config(tmp_path, folder, attn_implementation="sdpa"), torch.device("cpu"))
    assert explicit.attention == "sdpa"


def test_an_attention_that_is_not_used_is_gone_before_the_next_one_is_loaded(tmp_path, kit, monkeypatch):
    kit.model().save_pretrained(tmp_path / "model")
    loaded, load = [], loading.load_language_model

    def load_alone(*args, **kwargs):
        assert all(each() is None for each in loaded)
        made = load(*args, **kwargs)
        loaded.append(weakref.ref(made))
        return made

    verdicts = iter(["differs", "differs", None])
    monkeypatch.setattr(loading, "load_language_model", load_alone)
    monkeypatch.setattr(loading, "candidate_implementations", lambda *_: ["sdpa", "eager", "sdpa"])
    monkeypatch.setattr(loading, "find_fault", lambda *_, **__: next(verdicts))
    monkeypatch.setattr(loading, "cure", lambda *_: None)
    assert load_policy(run_config(tmp_path, tmp_path / "model"), torch.device("cpu")).attention == "sdpa"
    assert len(loaded) == 3
