"""Games as arrays: prompts are the domain's, players play as they should, sampling agrees with a forward pass."""

import numpy as np
import torch

from pipelinerl.domains.guessing import turn_messages
from pipelinerl.tiny.build import build_model
from pipelinerl.tiny.tokenizer import build_tokenizer
from pipelinerl.tiny.warmup import TurnEncoder, draw_games, midpoints, play_games, sample_outputs, start_rows

TOKENIZER = build_tokenizer(32)
ENCODER = TurnEncoder(TOKENIZER, 32)


def test_prompts_are_the_ones_of_the_domain() -> None:
    rng = np.random.default_rng(0)
    answers, history = draw_games(rng, 8, 32, 4)
    for guesses in range(5):
        rows = ENCODER.prompts(history[:, :guesses], answers)
        for row, guessed, answer in zip(rows, history[:, :guesses], answers, strict=True):
            messages = turn_messages(1, 32, guessed.tolist(), int(answer))
            text = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            assert row.tolist() == TOKENIZER.encode(text, add_special_tokens=False)


def test_outputs_are_written_and_read() -> None:
    rows = ENCODER.outputs(np.array([1, 32]))
    assert TOKENIZER.decode(rows[1]) == "<answer>32</answer><|end|>"
    rows = np.concatenate([rows, rows])
    rows[2, 0] = ENCODER.close_id
    rows[3, 1] = ENCODER.end_id
    assert ENCODER.read(rows).tolist() == [1, 32, -1, -1]


def test_the_careful_player_halves_what_is_left() -> None:
    # 1..32, target 20: nothing known -> 16; above 16 -> 24; in 17..23 -> 20
    answers = np.array([20])
    for history, guess in (([], 16), ([16], 24), ([16, 24], 20), ([3, 30, 16, 24], 20)):
        assert midpoints(np.array([history], dtype=np.int64), answers, 32).tolist() == [guess]


def test_drawn_games_open_with_different_wrong_guesses() -> None:
    answers, openings = draw_games(np.random.default_rng(1), 500, 16, 3)
    numbers = np.concatenate([answers[:, None], openings], axis=1)
    assert numbers.min() == 1 and numbers.max() == 16
    assert all(len(set(row)) == 4 for row in numbers.tolist())


def test_outputs_are_sampled_as_from_plain_forward_passes() -> None:
    torch.set_num_threads(1)
    model = build_model(TOKENIZER, seed=3).eval()
    answers, openings = draw_games(np.random.default_rng(2), 6, 32, 2)
    prompts = np.tile(ENCODER.prompts(openings, answers), (20, 1))
    prefix = ENCODER.prefix_tokens
    outputs = sample_outputs(model, prompts, torch.Generator().manual_seed(0), prefix_tokens=prefix)
    ids, generator = torch.from_numpy(prompts), torch.Generator().manual_seed(0)
    for _ in range(4):
        weights = model(input_ids=ids).logits[:, -1].softmax(dim=-1)
        ids = torch.cat([ids, torch.multinomial(weights.detach(), 1, generator=generator)], dim=1)
    assert outputs.tolist() == ids[:, -4:].tolist()


def test_sharing_the_prefix_does_not_change_gradients() -> None:
    torch.set_num_threads(1)
    model = build_model(TOKENIZER, seed=4)
    answers, openings = draw_games(np.random.default_rng(2), 6, 32, 2)
    ids = torch.from_numpy(ENCODER.prompts(openings, answers))
    gradients = []
    for prefix in (0, ENCODER.prefix_tokens):
        model.zero_grad()
        cache, rest = start_rows(model, ids, prefix)
        model(input_ids=rest, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.square().sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    scale = float(gradients[0].abs().max())
    assert float((gradients[0] - gradients[1]).abs().max()) < 1e-4 * scale


def test_an_untrained_model_loses_by_wrong_outputs() -> None:
    torch.set_num_threads(1)
    model = build_model(TOKENIZER, seed=5).eval()
    answers, openings = draw_games(np.random.default_rng(3), 20, 32, 2)
    generator = torch.Generator().manual_seed(1)
    success, wrong = play_games(model, ENCODER, answers, openings, max_turns=3, generator=generator)
    assert not success.any() and wrong.all()
