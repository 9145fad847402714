"""`TrainableLLM`, the handle of one server: single requests (`llm_async_generate`) and conversations (`Chat`)."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from pipelinerl.config.task import EvaluationParameters, LLMParameters
from pipelinerl.errors import EndRunError, RetryableRolloutError, RolloutError
from pipelinerl.llm.chat_messages import Message, assistant_message, for_template, tool_message
from pipelinerl.llm.client import Fault, Verdict, classify, post, reason_of, retry_delay_s
from pipelinerl.llm.sample_builder import Transcript, Turn
from pipelinerl.llm.tokens import (
    ChatRenderer,
    LLMCall,
    LLMOutput,
    Prompt,
    continuation,
    cut_at,
    is_begun,
    opened_thinking,
    sampled_text,
)
from pipelinerl.llm.tool_calls import parse_tool_calls
from pipelinerl.records.completion import GENERATE_PATH, MEDIA_TYPE, Completion, read_completion
from pipelinerl.rollouts import STEP_REWARD, TrainingText

_SEED_MASK = (1 << 63) - 1
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that the seeds of a rollout's requests all differ
_QUOTED_CHARACTERS = 300
# Our servers answer in packed form; a plain vLLM server ignores it and answers in JSON.
_ACCEPT = f"{MEDIA_TYPE}, application/json"


def sampling_parameters(parameters: LLMParameters) -> dict[str, Any]:
    """Return `parameters` as a server takes them, without those that equal its defaults.

    Without stop strings the server is told not to detokenize: text is made here, once, at the end.
    """
    values: dict[str, Any] = {"max_tokens": parameters.max_tokens, "temperature": parameters.temperature}
    if isinstance(parameters, EvaluationParameters) and parameters.top_p < 1:
        values["top_p"] = parameters.top_p
    if isinstance(parameters, EvaluationParameters) and parameters.top_k > 0:
        values["top_k"] = parameters.top_k
    if parameters.min_tokens > 0:
        values["min_tokens"] = parameters.min_tokens
    if parameters.ignore_eos:
        values["ignore_eos"] = True
    if parameters.stop:
        values["stop"] = list(parameters.stop)
    else:
        values["detokenize"] = False
    return values


@dataclass(slots=True)
class CallCounters:
    """What one rollout has asked of its server so far, and the policy versions that answered."""

    requests: int = 0
    retries: int = 0
    fatal: str | None = None
    versions: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class TrainableLLM:
    """One server and how to sample from it.

    Args:
        base_url: address of the server, for instance `http://127.0.0.1:8080`.
        model_name: name that the server knows its model by.
        tokenizer: Hugging Face tokenizer with a chat template.
        parameters: sampling parameters (`max_tokens`, `temperature`, `top_p`, `top_k`, `min_tokens`, `stop`,
            `ignore_eos`).
        template_kwargs: further arguments of the chat template.
        token: secret of the server; never shown by `repr`.
        collect_logprobs: request the log-probs that training needs.
        max_model_len: longest prompt and output together, in tokens; None leaves the check to the server.
        request_timeout_s: deadline of one request.
        max_retries: attempts after the first one, for transient failures.
        seed: seed of this rollout's requests; None lets the server draw.
        unlabelled_version: version of tokens whose server was never given one; None rejects them.
    """

    base_url: str
    model_name: str
    tokenizer: Any = None
    parameters: dict[str, Any] = field(default_factory=dict)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    token: str = field(default="", repr=False)
    collect_logprobs: bool = True
    max_model_len: int | None = None
    request_timeout_s: float = 300.0
    max_retries: int = 3
    seed: int | None = None
    unlabelled_version: int | None = None
    counters: CallCounters = field(default_factory=CallCounters, repr=False)
    _renderer: ChatRenderer | None = field(default=None, repr=False)

    @property
    def renderer(self) -> ChatRenderer:
        """Chat template and tokenizer, made at the first use and shared by all copies made later."""
        if self._renderer is None:
            self._renderer = ChatRenderer(self.tokenizer, self.template_kwargs)
        return self._renderer

    @property
    def temperature(self) -> float:
        return float(self.parameters.get("temperature", 1.0))

    def share_renderer(self, other: TrainableLLM) -> None:
        """Use `other`'s copy of the tokenizer instead of making one."""
        self._renderer = other.renderer

    def for_rollout(self, seed: int | None) -> TrainableLLM:
        """Return a copy with its own seed, parameters and counters."""
        self.renderer  # noqa: B018 - made before the copy, so that all copies share it
        llm = copy.copy(self)
        llm.parameters, llm.counters, llm.seed = dict(self.parameters), CallCounters(), seed
        return llm

    def chat(
        self,
        session: aiohttp.ClientSession,
        tools: Sequence[dict[str, Any]] | None = None,
        messages: Sequence[Message] = (),
    ) -> Chat:
        """Return a new conversation of several turns, whose token sequence only grows (see `Chat`)."""
        return Chat(self, session, tools, messages)

    def next_request_seed(self) -> int | None:
        """Return the seed of the next request: a function of the rollout's seed and the number of requests so far."""
        number = self.counters.requests
        self.counters.requests += 1
        return None if self.seed is None else (self.seed + number * _SEED_STEP) & _SEED_MASK

    def get_base_url(self) -> str:
        """Return the address without a trailing slash."""
        return self.base_url.rstrip("/")

    def load_tokenizer(self) -> None:
        """Do nothing: the tokenizer is always loaded. PipelineRL's domain files call this."""


async def llm_async_generate(llm: TrainableLLM, prompt: Prompt, session: aiohttp.ClientSession) -> LLMCall:
    """Return the model's answer to `prompt`.

    The chat template is applied here and token ids are sent and received, so the ids of the training sample are exactly
    the ones that the server saw and sampled. With `prompt.tools`, tool calls in the answer are parsed into
    `output.tool_calls`, and `output.content` is the text around them. For several turns see `llm.chat(session)`.

    Raises:
        RolloutError: the rollout cannot continue (context full, request refused, answer unusable). Do not catch it:
            the actor counts it and continues with other rollouts.
    """
    if prompt.token_ids is not None:
        prompt_text, prompt_ids = None, list(prompt.token_ids)
    else:
        prompt_text, prompt_ids = llm.renderer.render(prompt.messages, prompt.tools)
    return await generate(llm, prompt, prompt_text, prompt_ids, session)


def make_training_text(llm: TrainableLLM, llm_call: LLMCall) -> TrainingText:
    """Return the trainable text of one call: prompt ids, then output ids, of which only the output is trained.

    `finished` is true if the model ended the sequence itself.
    """
    prompt_text = llm_call.prompt_text
    if prompt_text is None:
        prompt_text = llm.renderer.decode(llm_call.prompt_token_ids, skip_special_tokens=False)
    transcript = Transcript(llm.temperature)
    transcript.add(llm_call, prompt_text + llm_call.output_text)
    text = transcript.training_text()
    text.metadata = {}
    return text


async def generate(
    llm: TrainableLLM, prompt: Prompt, prompt_text: str | None, prompt_ids: list[int], session: aiohttp.ClientSession
) -> LLMCall:
    """Return the model's answer to `prompt_ids`; tool calls are parsed if `prompt` has tools.

    Raises:
        RolloutError, EndRunError: as for `complete`.
    """
    completion = await complete(llm, prompt_ids, session)
    text = llm.renderer.decode(completion.token_ids)
    if completion.stop_string:
        text = cut_at(text, completion.stop_string)
    call = LLMCall(
        prompt=prompt,
        output=LLMOutput(content=text),
        prompt_token_ids=prompt_ids,
        output_token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        version_spans=completion.version_spans,
        prompt_text=prompt_text,
        output_text=text,
        ended_by_stop_string=completion.stop_string is not None,
    )
    if prompt.tools:
        # Some formats mark a call with a special token, which the plain text lacks.
        raw = sampled_text(llm.renderer, call)
        if completion.stop_string:
            raw = cut_at(raw, completion.stop_string)
        opened = opened_thinking(prompt_text)
        parsed = parse_tool_calls(opened + raw, id_prefix=f"call_{llm.counters.requests}")
        if parsed.calls:
            content = parsed.content.removeprefix(opened).strip()
            call.output = LLMOutput(content=content, tool_calls=parsed.calls)
    return call


async def complete(llm: TrainableLLM, prompt_ids: list[int], session: aiohttp.ClientSession) -> Completion:
    """Return one completion of `prompt_ids`, after at most `max_retries` retries.

    Raises:
        RolloutError: the context is full (before any request is sent), the server refuses this request, or its answer
            cannot be trained on.
        RetryableRolloutError: every attempt failed for a transient reason.
        EndRunError: the server's answer means that no request can ever succeed.
    """
    body = msgspec.json.encode(request_body(llm, prompt_ids))
    url = llm.get_base_url() + GENERATE_PATH
    attempt = 0
    while True:
        problem, content, retry_after_s = await post(
            session, url, body, timeout_s=llm.request_timeout_s, token=llm.token, accept=_ACCEPT
        )
        if problem is None:
            completion = read_completion(content, llm.collect_logprobs, llm.unlabelled_version)
            if isinstance(completion, Completion):
                llm.counters.versions.update(span.version for span in completion.version_spans)
                return completion
            problem, content = Fault(completion), b"no complete answer"
        text = f"{url}: {reason_of(problem)}: {content[:_QUOTED_CHARACTERS].decode(errors='replace')}"
        verdict = classify(problem)
        if verdict is Verdict.END_RUN:
            llm.counters.fatal = text
            raise EndRunError(text)
        if verdict is Verdict.FAIL_ROLLOUT:
            raise RolloutError(reason_of(problem), text)
        if attempt >= llm.max_retries:
            raise RetryableRolloutError(reason_of(problem), f"{text} ({attempt + 1} attempts)")
        jitter = ((llm.seed or 0) >> 7) % 1024 / 1024
        llm.counters.retries += 1
        await asyncio.sleep(retry_delay_s(attempt, jitter, retry_after_s))
        attempt += 1


def request_body(llm: TrainableLLM, prompt_ids: list[int]) -> dict[str, Any]:
    """Return the request for one completion of `prompt_ids`.

    Raises:
        RolloutError: `context_overflow` or `empty_prompt`, which the server would have to refuse.
    """
    if not prompt_ids:
        raise RolloutError("empty_prompt", "the prompt has no token")
    sampling = dict(llm.parameters)
    if llm.max_model_len is not None:
        room = llm.max_model_len - len(prompt_ids)
        if room < 1:
            raise RolloutError(
                "context_overflow", f"prompt of {len(prompt_ids)} tokens, but the context has {llm.max_model_len}"
            )
        sampling["max_tokens"] = min(int(sampling.get("max_tokens", room)), room)
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0
    if llm.collect_logprobs:
        sampling["logprobs"] = 0
    seed = llm.next_request_seed()
    if seed is not None:
        sampling["seed"] = seed
    return {"model": llm.model_name, "token_ids": prompt_ids, "sampling_params": sampling}


class Chat:
    """One conversation as one growing token sequence; made by `llm.chat(session)`.

    Every prompt is the ids of the last prompt and answer, followed by the ids of the new messages. Where the template
    rewrites the past, a new sequence starts. `messages` is the whole conversation in OpenAI's format; `transcripts` are
    its token sequences.

    Args:
        llm: the server and how to sample from it.
        session: for the requests.
        tools: tools in OpenAI's format, passed to the chat template.
        messages: the beginning of the chat, for instance a system message.
    """

    def __init__(
        self,
        llm: TrainableLLM,
        session: aiohttp.ClientSession,
        tools: Sequence[dict[str, Any]] | None = None,
        messages: Sequence[Message] = (),
    ) -> None:
        self._llm = llm
        self._session = session
        self.tools = list(tools) if tools else None
        self.messages: list[Message] = []
        self.transcripts: list[Transcript] = []
        self._past: list[Message] = []  # as the template saw it, up to the last answer
        self._new: list[Message] = []  # as the template will see it, since the last answer
        self.add(*messages)

    @property
    def turns(self) -> list[Turn]:
        """All turns so far, in order."""
        return [turn for transcript in self.transcripts for turn in transcript.turns]

    def add(self, *messages: Message | str) -> None:
        """Add messages for the next turn; a string is a user message."""
        for message in messages:
            whole = {"role": "user", "content": message} if isinstance(message, str) else dict(message)
            self.messages.append(whole)
            self._new.append(for_template(whole))

    def add_tool_result(self, tool_call: dict[str, Any] | str, content: Any) -> None:
        """Add a tool's result. `tool_call` is the call or its id; non-text content is written as JSON."""
        self.add(tool_message(tool_call, content))

    async def ask(self, *messages: Message | str, parameters: dict[str, Any] | None = None) -> LLMCall:
        """Add `messages`, sample an answer, and return its call; tool calls are in `call.output.tool_calls`.

        Args:
            messages: as for `add`.
            parameters: sampling parameters of this turn only (`max_tokens`, `stop`); the temperature stays.

        Raises:
            RolloutError: as for `llm_async_generate`. After `context_overflow` (nothing was sent) the turns so far can
                still be trained: catch it, and return `training_texts` as usual.
        """
        self.add(*messages)
        llm = self._llm
        if parameters:
            llm = copy.copy(llm)
            llm.parameters = {**llm.parameters, **parameters, "temperature": llm.temperature}
            if llm.parameters.get("stop"):
                llm.parameters["detokenize"] = True  # as the server has to read
        past, transcript, text, ids = self._next_prompt()
        call = await generate(llm, Prompt(messages=list(self.messages), tools=self.tools), text, ids, self._session)
        transcript.add(call, text + sampled_text(llm.renderer, call))
        if len(transcript.turns) == 1:
            self.transcripts.append(transcript)
        content = call.output.content or ""
        if is_begun(self._new[-1:]):  # the answer goes on where this message ends: they are one
            content = self._new.pop()["content"] + content
            self.messages.pop()
        self._past = [*past, *self._new]
        self._new = []
        self.messages.append(assistant_message(content, call.output.tool_calls))
        return call

    def reward_turn(self, reward: float) -> None:
        """Reward the last turn by itself: samples are then one per turn, with discounted sums of later rewards."""
        if not self.turns:
            raise ValueError("reward_turn: got a chat without a turn, expected an answer to reward. Call ask() first.")
        last = self.turns[-1]
        last.reward = reward + (last.reward or 0.0)

    def training_texts(self, reward: float | None = None, *, by_turn: bool = False) -> list[TrainingText]:
        """Return the samples of this chat; every sampled token is trained exactly once.

        One sample per sequence, or, with `by_turn` or rewards of turns, one per turn. With rewards of turns, `reward`
        is added to the last turn's. Without either, the texts have no reward yet and the caller has to set it.
        """
        turns = self.turns
        if any(turn.reward is not None for turn in turns):
            texts = [make_training_text(self._llm, turn.call) for turn in turns]
            rewards = [turn.reward or 0.0 for turn in turns]
            rewards[-1] += reward or 0.0
            for text, own in zip(texts, rewards, strict=True):
                text.reward = own
                text.metadata[STEP_REWARD] = True
            return texts
        if by_turn:
            texts = [make_training_text(self._llm, turn.call) for turn in turns]
        else:
            texts = [transcript.training_text() for transcript in self.transcripts]
        for text in texts:
            text.reward = reward
        return texts

    def _next_prompt(self) -> tuple[list[Message], Transcript, str, list[int]]:
        """Return the messages before the new ones, the sequence to extend, and text and ids of the next prompt.

        The template sees answers as they were sampled or, if it cannot read them, in OpenAI's format.
        """
        renderer = self._llm.renderer
        past = self._past
        if self.transcripts:
            transcript = self.transcripts[-1]
            call = transcript.turns[-1].call
            more = continuation(renderer, past, call, self._new, self.tools, transcript.text)
            if more is not None:
                past = [*past, {"role": "assistant", "content": sampled_text(renderer, call)}]
                return past, transcript, transcript.text + more[0], [*transcript.ids, *more[1]]
            past = [*past, for_template(self.messages[len(self.messages) - len(self._new) - 1])]
        fresh = Transcript(self._llm.temperature)
        try:
            return past, fresh, *renderer.render([*past, *self._new], self.tools)
        except RolloutError:
            # This template wants tool calls before their results: use OpenAI's form of every answer.
            past = [for_template(message) for message in self.messages[: len(self.messages) - len(self._new)]]
            return past, fresh, *renderer.render([*past, *self._new], self.tools)
