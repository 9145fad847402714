"""Many games of guessing at once, as arrays: prompts in token ids, players for the warm-up, sampling from the model.

Called by the warm-up and its evaluation. Everything here agrees with the guessing domain's words (a test compares
them); arrays are only a quicker way to write the same prompts. Waits for nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen2ForCausalLM

from pipelinerl.domains.guessing import format_answer, turn_messages
from pipelinerl.tiny.tokenizer import number_token_ids

Ints = NDArray[np.int64]
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
        """Return the prompt after ``guesses`` guesses of 0, which are all too low (answer 1) or not (answer 0)."""
        messages = turn_messages(1, self.high, [0] * guesses, answer)
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return np.array(tokenizer.encode(text, add_special_tokens=False))

    def prompts(self, history: Ints, answers: Ints) -> Ints:
        """Return prompt ids [games, prompt tokens] for ``history`` [games, guesses] and ``answers`` [games]."""
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
        """Return output ids [games, 4] that state ``guesses`` [games]."""
        rows = np.empty((len(guesses), OUTPUT_TOKENS), dtype=np.int64)
        rows[:, 0], rows[:, 2], rows[:, 3] = self.open_id, self.close_id, self.end_id
        rows[:, 1] = self.number_ids[guesses]
        return rows

    def read(self, outputs: Ints) -> Ints:
        """Return the guess stated by each row of ``outputs`` [games, 4], or -1 for anything else."""
        guesses = np.array([self.number_of_id.get(int(index), -1) for index in outputs[:, 1]])
        framed = (outputs[:, 0] == self.open_id) & (outputs[:, 2] == self.close_id) & (outputs[:, 3] == self.end_id)
        return np.where(framed, guesses, -1)


def midpoints(history: Ints, answers: Ints, high: int) -> Ints:
    """Return the middle of what ``history`` leaves possible, [games]: the careful player's guess."""
    lower = np.where(history < answers[:, None], history, 0).max(axis=1, initial=0)
    higher = np.where(history > answers[:, None], history, high + 1).min(axis=1, initial=high + 1)
    return (lower + higher) // 2


def draw_games(rng: np.random.Generator, games: int, high: int, opening_guesses: int) -> tuple[Ints, Ints]:
    """Return answers [games] and different wrong opening guesses [games, opening_guesses], all in ``1..high``."""
    order = rng.random((games, high)).argpartition(opening_guesses, axis=1)[:, : opening_guesses + 1] + 1
    order = rng.permuted(order, axis=1)
    return order[:, 0], order[:, 1:]


@dataclass(frozen=True)
class Turns:
    """One turn of many games: what was asked, sampled, and with which log-probs."""

    games: Ints
    prompts: Ints
    outputs: Ints
    logprobs: NDArray[np.float32]


@dataclass(frozen=True)
class Played:
    """Result of many games: success [games], wrong output [games], turns used [games], and every turn."""

    success: NDArray[np.bool_]
    wrong_output: NDArray[np.bool_]
    turns_used: Ints
    turns: list[Turns]


def play_games(
    model: Qwen2ForCausalLM,
    encoder: TurnEncoder,
    answers: Ints,
    openings: Ints,
    *,
    max_turns: int,
    generator: torch.Generator,
) -> Played:
    """Play every game to its end with guesses sampled from ``model`` at temperature 1."""
    games = len(answers)
    success, wrong = np.zeros(games, dtype=bool), np.zeros(games, dtype=bool)
    used = np.full(games, max_turns)
    alive, history = np.arange(games), openings
    turns: list[Turns] = []
    for turn in range(max_turns):
        prompts = encoder.prompts(history, answers[alive])
        outputs, logprobs = sample_outputs(model, prompts, generator, prefix_tokens=encoder.prefix_tokens)
        turns.append(Turns(alive, prompts, outputs, logprobs))
        guesses = encoder.read(outputs)
        right, bad = guesses == answers[alive], guesses < 0
        success[alive[right]], wrong[alive[bad]] = True, True
        used[alive[right | bad]] = turn + 1
        going = ~(right | bad)
        alive, history = alive[going], np.concatenate([history, guesses[:, None]], axis=1)[going]
        if not len(alive):
            break
    return Played(success, wrong, used, turns)


@torch.no_grad()
def sample_outputs(
    model: Qwen2ForCausalLM, prompts: Ints, generator: torch.Generator, *, prefix_tokens: int = 0
) -> tuple[Ints, NDArray[np.float32]]:
    """Sample four tokens after each row of ``prompts``; return ids and log-probs, both [rows, 4].

    Equal prompts are computed once, which is most of them at the first turns.
    """
    different, place = np.unique(prompts, axis=0, return_inverse=True)
    where = torch.from_numpy(place.reshape(-1))
    cache, ids = start_rows(model, torch.from_numpy(different), prefix_tokens)
    tokens: list[torch.Tensor] = []
    logprobs: list[torch.Tensor] = []
    for _ in range(OUTPUT_TOKENS):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        log_softmax = torch.log_softmax(logits, dim=-1)
        if not tokens:
            cache.batch_select_indices(where)
            log_softmax = log_softmax[where]
        ids = torch.multinomial(log_softmax.exp(), 1, generator=generator)
        tokens.append(ids)
        logprobs.append(log_softmax.gather(1, ids))
    return torch.cat(tokens, dim=1).numpy(), torch.cat(logprobs, dim=1).numpy()


def start_rows(model: Qwen2ForCausalLM, rows: torch.Tensor, prefix_tokens: int) -> tuple[DynamicCache, torch.Tensor]:
    """Compute the first ``prefix_tokens`` of ``rows``, equal in all of them, once; return the cache and what is left.

    Gradients flow through the cache. This saves a third of the work of a short prompt.
    """
    cache = DynamicCache(config=model.config)
    if prefix_tokens:
        model.model(input_ids=rows[:1, :prefix_tokens], past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(rows))
    return cache, rows[:, prefix_tokens:]
