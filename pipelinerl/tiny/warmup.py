"""The supervised warm-up of the tiny model: it learns the format of the guessing game, and to play it carelessly.

Two phases. First the model learns to guess the middle of what is still possible, which is the slow part; then it
imitates a player who is careful at some turns and repeats the last guess at the others. The result wins about a third
of its games, and reinforcement learning can find its better part. Many games are played at once, as arrays; the prompts
are those of the guessing domain.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen2ForCausalLM

from pipelinerl.domains.guessing import format_answer, turn_messages
from pipelinerl.tiny.tokenizer import number_token_ids

Progress = Callable[[str], None]
Ints = NDArray[np.int64]
# share of the learning rate for the last adjustments: small enough to move success by a few hundredths
_ADJUSTMENT_RATE = 0.1
# steps after which the time so far says how fast the machine is
_FIRST_STEPS = 20


@dataclass(frozen=True)
class WarmupSettings:
    """What the warm-up plays and how long.

    `careless` is the share of turns that a careless player decides; of these, `repeats` is the share at which the
    last guess is made again (the others take any number). Repeating is a habit that can be unlearned from a few
    thousand turns, because it is always the same mistake; guesses at random are a different mistake each time.
    After both phases the model is measured, and up to `adjustments` times trained for a few steps more with a more or
    less careless player, until its sampled success lies in `success_range`: a start that is too weak learns slowly.
    The warm-up stops `deadline_s` seconds after it began, whatever is left to do.
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
    """What came out: sampled success of `evaluation_games` games, steps done, seconds, and whether time ran out."""

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
    """Train `model` in place and measure it. The same seed gives the same model, unless time runs out.

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
        done = max(done, step / total)
        # On a machine that is too slow, time takes the place of steps, so that both phases still happen.
        if step > _FIRST_STEPS:
            done = max(done, (time.monotonic() - started) / (0.8 * settings.deadline_s))
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
    success, wrong = play_games(model, encoder, answers, openings, max_turns=settings.max_turns, generator=generator)
    return float(success.mean()), float(wrong.mean())


def _schedule(step: int, done: float) -> float:
    """Return the share of the learning rate: ten steps up, then a cosine down to almost nothing at `done` = 1."""
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
    """Return the last guess again for a share `repeats` of the rows of `history`, and any number for the others."""
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
    """Take one step on the outputs of `rows`; return the loss in nats per output token."""
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


# `<answer>`, the number, `</answer>`, and the end of the message
OUTPUT_TOKENS = 4


class TurnEncoder:
    """Writes the prompt of a turn in token ids, for many games with equally many guesses at once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, high: int) -> None:
        numbers = number_token_ids(tokenizer)
        self.high = high
        self.number_ids: Ints = np.array([numbers[number] for number in range(high + 1)])
        self.number_of_id = {int(index): number for number, index in enumerate(self.number_ids)}
        self.end_id = int(tokenizer.eos_token_id)
        self.open_id, _, self.close_id = tokenizer.encode(format_answer(1), add_special_tokens=False)
        self._templates = {
            answer: [self._template(tokenizer, guesses, answer) for guesses in range(high)] for answer in (0, 1)
        }
        # every prompt of a game starts with the same rules, up to where the chat goes on
        self.prefix_tokens = len(self._templates[0][0]) - 1

    def _template(self, tokenizer: PreTrainedTokenizerFast, guesses: int, answer: int) -> Ints:
        """Return the prompt after `guesses` guesses of 0, which are all too low (answer 1) or not (answer 0)."""
        messages = turn_messages(1, self.high, [0] * guesses, answer)
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return np.array(tokenizer.encode(text, add_special_tokens=False))

    def prompts(self, history: Ints, answers: Ints) -> Ints:
        """Return prompt ids [games, prompt tokens] for `history` [games, guesses] and `answers` [games]."""
        games, guesses = history.shape
        higher, lower = self._templates[0][guesses], self._templates[1][guesses]
        rows = np.tile(higher, (games, 1))
        if guesses:
            # the templates differ only in the relation, which follows its number
            relation = np.flatnonzero(higher != lower)
            rows[:, relation - 1] = self.number_ids[history]
            rows[:, relation] = np.where(history < answers[:, None], lower[relation], higher[relation])
        return rows

    def outputs(self, guesses: Ints) -> Ints:
        """Return output ids [games, 4] that state `guesses` [games]."""
        rows = np.empty((len(guesses), OUTPUT_TOKENS), dtype=np.int64)
        rows[:, 0], rows[:, 2], rows[:, 3] = self.open_id, self.close_id, self.end_id
        rows[:, 1] = self.number_ids[guesses]
        return rows

    def read(self, outputs: Ints) -> Ints:
        """Return the guess stated by each row of `outputs` [games, 4], or -1 for anything else."""
        guesses = np.array([self.number_of_id.get(int(index), -1) for index in outputs[:, 1]])
        framed = (outputs[:, 0] == self.open_id) & (outputs[:, 2] == self.close_id) & (outputs[:, 3] == self.end_id)
        return np.where(framed, guesses, -1)


def midpoints(history: Ints, answers: Ints, high: int) -> Ints:
    """Return the middle of what `history` leaves possible, [games]: the careful player's guess."""
    lower = np.where(history < answers[:, None], history, 0).max(axis=1, initial=0)
    higher = np.where(history > answers[:, None], history, high + 1).min(axis=1, initial=high + 1)
    return (lower + higher) // 2


def draw_games(rng: np.random.Generator, games: int, high: int, opening_guesses: int) -> tuple[Ints, Ints]:
    """Return answers [games] and different wrong opening guesses [games, opening_guesses], all in `1..high`."""
    order = rng.random((games, high)).argpartition(opening_guesses, axis=1)[:, : opening_guesses + 1] + 1
    order = rng.permuted(order, axis=1)
    return order[:, 0], order[:, 1:]


def play_games(
    model: Qwen2ForCausalLM,
    encoder: TurnEncoder,
    answers: Ints,
    openings: Ints,
    *,
    max_turns: int,
    generator: torch.Generator,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Play every game to its end with guesses sampled from `model` at temperature 1; return which were won, and which
    ended by a wrong output, both [games]."""
    games = len(answers)
    success, wrong = np.zeros(games, dtype=bool), np.zeros(games, dtype=bool)
    alive, history = np.arange(games), openings
    for _ in range(max_turns):
        prompts = encoder.prompts(history, answers[alive])
        guesses = encoder.read(sample_outputs(model, prompts, generator, prefix_tokens=encoder.prefix_tokens))
        right, bad = guesses == answers[alive], guesses < 0
        success[alive[right]], wrong[alive[bad]] = True, True
        going = ~(right | bad)
        alive, history = alive[going], np.concatenate([history, guesses[:, None]], axis=1)[going]
        if not len(alive):
            break
    return success, wrong


@torch.no_grad()
def sample_outputs(
    model: Qwen2ForCausalLM, prompts: Ints, generator: torch.Generator, *, prefix_tokens: int = 0
) -> Ints:
    """Sample four tokens after each row of `prompts`; return their ids [rows, 4].

    Equal prompts are computed once, which is most of them at the first turns.
    """
    different, place = np.unique(prompts, axis=0, return_inverse=True)
    where = torch.from_numpy(place.reshape(-1))
    cache, ids = start_rows(model, torch.from_numpy(different), prefix_tokens)
    tokens: list[torch.Tensor] = []
    for _ in range(OUTPUT_TOKENS):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        if not tokens:
            cache.batch_select_indices(where)
            logits = logits[where]
        ids = torch.multinomial(torch.log_softmax(logits, dim=-1).exp(), 1, generator=generator)
        tokens.append(ids)
    return torch.cat(tokens, dim=1).numpy()


def start_rows(model: Qwen2ForCausalLM, rows: torch.Tensor, prefix_tokens: int) -> tuple[DynamicCache, torch.Tensor]:
    """Compute the first `prefix_tokens` of `rows`, equal in all of them, once; return the cache and what is left.

    Gradients flow through the cache. This saves a third of the work of a short prompt.
    """
    cache = DynamicCache(config=model.config)
    if prefix_tokens:
        model.model(input_ids=rows[:1, :prefix_tokens], past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(rows))
    return cache, rows[:, prefix_tokens:]
