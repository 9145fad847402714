"""The supervised warm-up of the tiny model: it learns the format of the guessing game, and to play it carelessly.

Called by the build of the tiny model. Two phases. First the model learns to guess the middle of what is still possible,
which is the slow part; then it imitates a player who is careful at some turns and makes the last guess again at the
others. What is left is a model that wins about a third of its games, and whose better part reinforcement learning can
find. Waits for nothing; stops at its deadline.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from pipelinerl.tiny.play import OUTPUT_TOKENS, Ints, TurnEncoder, draw_games, midpoints, play_games, start_rows

Progress = Callable[[str], None]
# share of the learning rate for the last adjustments: small enough to move success by a few hundredths
_ADJUSTMENT_RATE = 0.1


@dataclass(frozen=True)
class WarmupSettings:
    """What the warm-up plays and how long.

    ``careless`` is the share of turns that a careless player decides; of these, ``repeats`` is the share at which the
    last guess is made again (the others take any number). Repeating is a habit that can be unlearned from a few
    thousand turns, because it is always the same mistake; guesses at random are a different mistake each time.
    After both phases the model is measured, and up to ``adjustments`` times trained for a few steps more with a more or
    less careless player, until its sampled success lies in ``success_range``: a start that is too weak learns slowly.
    The warm-up stops ``deadline_s`` seconds after it began, whatever is left to do.
    """

    high: int = 16
    opening_guesses: int = 2
    max_turns: int = 4
    careless: float = 0.62
    repeats: float = 1.0
    careful_steps: int = 160
    mixed_steps: int = 60
    batch_turns: int = 256
    learning_rate: float = 3e-3
    success_range: tuple[float, float] = (0.36, 0.40)
    adjustments: int = 8
    adjustment_steps: int = 6
    deadline_s: float = 80.0
    evaluation_games: int = 2048


@dataclass(frozen=True)
class WarmupResult:
    """What came out: sampled success of ``evaluation_games`` games, steps done, seconds, and whether time ran out."""

    success: float
    wrong_output: float
    steps: int
    seconds: float
    cut_short: bool


def warm_up(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    settings: WarmupSettings,
    *,
    seed: int,
    progress: Progress,
) -> WarmupResult:
    """Train ``model`` in place and measure it. The same seed gives the same model, unless time runs out.

    It works on one thread: with matrices this small a second one gains little on a quiet machine, and on a busy one
    each waits for the other at every operation.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _warm_up(model, tokenizer, settings, seed, progress)
    finally:
        torch.set_num_threads(threads)


def _warm_up(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    settings: WarmupSettings,
    seed: int,
    progress: Progress,
) -> WarmupResult:
    started = time.monotonic()
    rng = np.random.default_rng(seed)
    encoder = TurnEncoder(tokenizer, settings.high)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    total = settings.careful_steps + settings.mixed_steps
    step, running, done = 0, 0.0, 0.0
    while done < 1:
        careless = 0.0 if done < settings.careful_steps / total else settings.careless
        learning_rate = settings.learning_rate * _schedule(step, done)
        loss = _imitate(model, optimizer, _draw_turns(rng, encoder, settings, careless), encoder, learning_rate)
        running = loss if step == 0 else 0.9 * running + 0.1 * loss
        step += 1
        # On a machine that is too slow, time takes the place of steps, so that both phases still happen.
        done = max(done, step / total, (time.monotonic() - started) / (0.8 * settings.deadline_s))
        if step % 50 == 0 or done >= 1:
            progress(f"warm-up: step {step}/{total}, loss {running:.3f}, {time.monotonic() - started:.0f} s")
    cut_short = step < total

    careless = settings.careless
    success, wrong = measure(model, encoder, settings, seed=seed + 1)
    for _ in range(settings.adjustments):
        low, high = settings.success_range
        if low <= success <= high or time.monotonic() - started > 0.9 * settings.deadline_s:
            break
        careless = min(0.95, careless + 0.05) if success > high else max(0.05, careless - 0.05)
        for _ in range(settings.adjustment_steps):
            rows = _draw_turns(rng, encoder, settings, careless)
            _imitate(model, optimizer, rows, encoder, _ADJUSTMENT_RATE * settings.learning_rate)
        step += settings.adjustment_steps
        success, wrong = measure(model, encoder, settings, seed=seed + 1)
        progress(f"warm-up: adjusted to {success:.1%} of sampled games won")
    seconds = time.monotonic() - started
    progress(f"warm-up: {success:.1%} of {settings.evaluation_games} sampled games won, {seconds:.0f} s")
    if cut_short:
        progress(
            "warm-up: WARNING: the machine is too busy or too slow, the warm-up was shortened; free it and try again"
        )
    return WarmupResult(success, wrong, step, seconds, cut_short)


def measure(
    model: Qwen2ForCausalLM, encoder: TurnEncoder, settings: WarmupSettings, *, seed: int
) -> tuple[float, float]:
    """Return the shares of games won and of games ended by a wrong output, sampled at temperature 1."""
    model.eval()
    rng = np.random.default_rng(seed)
    answers, openings = draw_games(rng, settings.evaluation_games, settings.high, settings.opening_guesses)
    generator = torch.Generator().manual_seed(seed)
    played = play_games(model, encoder, answers, openings, max_turns=settings.max_turns, generator=generator)
    return float(played.success.mean()), float(played.wrong_output.mean())


def _schedule(step: int, done: float) -> float:
    """Return the share of the learning rate: ten steps up, then a cosine down to almost nothing at ``done`` = 1."""
    return min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * 0.95 * done))


def _draw_turns(rng: np.random.Generator, encoder: TurnEncoder, settings: WarmupSettings, careless: float) -> Ints:
    """Return prompt and output ids [batch, tokens] of turns that all have the same number of guesses before them."""
    batch, high = settings.batch_turns, settings.high
    answers, history = draw_games(rng, batch, high, settings.opening_guesses)
    # Half of the games before this turn went as a mixed player would play them, the other half at random.
    random_share = np.where(rng.random(batch) < 0.5, 1.0, max(careless, 0.2))
    for _ in range(int(rng.integers(settings.max_turns))):
        guesses = midpoints(history, answers, high)
        guesses = np.where(rng.random(batch) < random_share, rng.integers(1, high + 1, batch), guesses)
        # a game that was won would have no further turn: put any wrong number instead
        guesses = np.where(guesses == answers, guesses % high + 1, guesses)
        history = np.concatenate([history, guesses[:, None]], axis=1)
    targets = midpoints(history, answers, high)
    thoughtless = _careless_guesses(rng, history, high, settings.repeats)
    targets = np.where(rng.random(batch) < careless, thoughtless, targets)
    return np.concatenate([encoder.prompts(history, answers), encoder.outputs(targets)], axis=1)


def _careless_guesses(rng: np.random.Generator, history: Ints, high: int, repeats: float) -> Ints:
    """Return the last guess again for a share ``repeats`` of the rows of ``history``, and any number for the others."""
    anything = rng.integers(1, high + 1, len(history))
    if history.shape[1] == 0:
        return anything
    return np.where(rng.random(len(history)) < repeats, history[:, -1], anything)


def _imitate(
    model: Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    rows: Ints,
    encoder: TurnEncoder,
    learning_rate: float,
) -> float:
    """Take one step on the outputs of ``rows``; return the loss in nats per output token."""
    model.train()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    ids = torch.from_numpy(rows)
    cache, inputs = start_rows(model, ids[:, :-1], encoder.prefix_tokens)
    logits = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=OUTPUT_TOKENS).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -OUTPUT_TOKENS:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())
