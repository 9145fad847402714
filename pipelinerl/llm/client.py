"""`TrainableLLM`, the handle of one server (prompt in, `LLMCall` out), and HTTP requests to the run's own servers.

`classify` decides whether a failed request is retried, fails the rollout or ends the run.
"""

from __future__ import annotations

import asyncio
import copy
import enum
import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import aiohttp
import msgspec

from pipelinerl.config.task import EvaluationParameters, LLMParameters
from pipelinerl.errors import EndRunError, RetryableRolloutError, RolloutError
from pipelinerl.llm.chat import Chat, Message
from pipelinerl.llm.sample_builder import text_of_call
from pipelinerl.llm.tokens import ChatRenderer, LLMCall, LLMOutput, Prompt, cut_at, opened_thinking, sampled_text
from pipelinerl.llm.tool_calls import parse_tool_calls
from pipelinerl.records.completion import GENERATE_PATH, MEDIA_TYPE, Completion, read_completion
from pipelinerl.rollouts import TrainingText

_SEED_MASK = (1 << 63) - 1
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that the seeds of a rollout's requests all differ
_QUOTED_CHARACTERS = 300
# Our servers answer in packed form; a plain vLLM server ignores this and answers in JSON.
_ACCEPT = f"{MEDIA_TYPE}, application/json"


def sampling_parameters(parameters: LLMParameters) -> dict[str, Any]:
    """Return `parameters` in the server's format, without its defaults.

    Without stop strings the server does not detokenize: text is decoded here, once, at the end.
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
    """Requests of one rollout so far, and the policy versions that answered them."""

    requests: int = 0
    retries: int = 0
    fatal: str | None = None
    versions: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class TrainableLLM:
    """One server and how to sample from it.

    Args:
        base_url: address of the server, for instance `http://127.0.0.1:8080`.
        model_name: the server's name for its model.
        tokenizer: Hugging Face tokenizer with a chat template.
        parameters: sampling parameters (`max_tokens`, `temperature`, `top_p`, `top_k`, `min_tokens`, `stop`,
            `ignore_eos`).
        token: secret of the server; never shown by `repr`.
        collect_logprobs: request the log-probs that training needs.
        max_model_len: maximum tokens of prompt and output together; None leaves the check to the server.
        request_timeout_s: deadline of one request.
        max_retries: attempts after the first one, for transient failures.
        seed: seed of this rollout's requests; None lets the server draw.
        unlabelled_version: version of tokens whose server has no version label; None rejects them.
        renderer: tokenizer with chat template and its arguments, shared by all copies. None: one without arguments.
    """

    base_url: str
    model_name: str
    tokenizer: Any = None
    parameters: dict[str, Any] = field(default_factory=dict)
    token: str = field(default="", repr=False)
    collect_logprobs: bool = True
    max_model_len: int | None = None
    request_timeout_s: float = 300.0
    max_retries: int = 3
    seed: int | None = None
    unlabelled_version: int | None = None
    counters: CallCounters = field(default_factory=CallCounters, repr=False)
    renderer: ChatRenderer = field(default=None, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.renderer is None:
            self.renderer = ChatRenderer(self.tokenizer)

    @property
    def temperature(self) -> float:
        return float(self.parameters.get("temperature", 1.0))

    def for_rollout(self, seed: int | None) -> TrainableLLM:
        """Return a copy with its own seed, parameters and counters."""
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

        async def answer(prompt: Prompt, text: str, ids: list[int], parameters: dict[str, Any]) -> LLMCall:
            llm = self
            if parameters:
                llm = copy.copy(self)
                llm.parameters = {**self.parameters, **parameters, "temperature": self.temperature}
                if llm.parameters.get("stop"):
                    llm.parameters["detokenize"] = True  # as the server has to read
            return await generate(llm, prompt, text, ids, session)

        return Chat(self.renderer, answer, tools, messages)

    def next_request_seed(self) -> int | None:
        """Return the seed of the next request, derived from the rollout's seed and the number of requests so far."""
        number = self.counters.requests
        self.counters.requests += 1
        return None if self.seed is None else (self.seed + number * _SEED_STEP) & _SEED_MASK

    def get_base_url(self) -> str:
        """Return the address without a trailing slash."""
        return self.base_url.rstrip("/")

    def load_tokenizer(self) -> None:
        """Do nothing: the tokenizer is always loaded. For PipelineRL's domain files."""


async def llm_async_generate(llm: TrainableLLM, prompt: Prompt, session: aiohttp.ClientSession) -> LLMCall:
    """Return the model's answer to `prompt`.

    The chat template is applied here and token ids are sent and received, so the training sample has exactly the ids
    that the server saw and sampled. With `prompt.tools`, tool calls are parsed into `output.tool_calls`, and
    `output.content` is the text around them. For several turns see `llm.chat(session)`.

    Raises:
        RolloutError: the rollout cannot continue (context full, request rejected, answer unusable). Do not catch it:
            the actor counts it and continues with other rollouts.
    """
    if prompt.token_ids is not None:
        prompt_text, prompt_ids = None, list(prompt.token_ids)
    else:
        prompt_text, prompt_ids = llm.renderer.render(prompt.messages, prompt.tools)
    return await generate(llm, prompt, prompt_text, prompt_ids, session)


def make_training_text(llm: TrainableLLM, llm_call: LLMCall) -> TrainingText:
    """Return the trainable text of one call: prompt ids and output ids, of which only the output is trained.

    `finished` is true if the model ended the sequence itself.
    """
    prompt_text = llm_call.prompt_text
    if prompt_text is None:
        prompt_text = llm.renderer.decode(llm_call.prompt_token_ids, skip_special_tokens=False)
    text = text_of_call(replace(llm_call, prompt_text=prompt_text))
    if text.temperature is None:
        text.temperature = llm.temperature
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
        temperature=llm.temperature,
    )
    if prompt.tools:
        # Some formats mark calls with special tokens, which the plain text lacks.
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
        RolloutError: the context is full (nothing is sent), the server rejects the request, or its answer cannot be
            trained on.
        RetryableRolloutError: all attempts failed for transient reasons.
        EndRunError: no request can ever succeed.
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
        RolloutError: `context_overflow` or `empty_prompt`, which the server would reject.
    """
    if not prompt_ids:
        raise RolloutError("empty_prompt", "the prompt has no tokens")
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


class Verdict(enum.Enum):
    """What to do about a failed request."""

    RETRY = "retry"
    FAIL_ROLLOUT = "fail_rollout"
    END_RUN = "end_run"


class Fault(enum.Enum):
    """Ways for a request to fail without an HTTP error status."""

    #: Nothing listens at the address, or the machine does not answer: the server may be restarting.
    REFUSED = "refused"
    #: No connection was attempted: the name does not resolve, or this process is out of descriptors or ports.
    CANNOT_CONNECT = "cannot_connect"
    DISCONNECTED = "disconnected"
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    EMPTY = "empty"


_REFUSED_FOR_ALL = (401, 403, 404, 405)  # wrong token, unknown model or route: every request will be refused
_TRY_AGAIN = (408, 409, 425, 429)

# Errors of connect(2) and socket(2) that this machine raises without asking the other one.
_LOCAL_ERRORS = frozenset(
    {errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM, errno.EAFNOSUPPORT}
)
# Below vLLM's VLLM_HTTP_TIMEOUT_KEEP_ALIVE (5 s), so that a kept connection is never used while the server closes it.
_KEEP_ALIVE_S = 4.0
_FIRST_DELAY_S = 0.25
_MAX_DELAY_S = 10.0


class Reply(NamedTuple):
    """Answer to one POST. `problem` is None for status 200, else the status or fault, with its text in `content`."""

    problem: int | Fault | None
    content: bytes
    retry_after_s: float | None = None


def classify(problem: int | Fault) -> Verdict:
    """Return the verdict on an HTTP status or a fault. Transient problems are retried.

    An aborted completion is incomplete: it is retried and never trained on.
    """
    if isinstance(problem, Fault) or problem >= 500 or problem in _TRY_AGAIN:
        return Verdict.RETRY
    return Verdict.END_RUN if problem in _REFUSED_FOR_ALL else Verdict.FAIL_ROLLOUT


def reason_of(problem: int | Fault) -> str:
    """Return the name under which this problem is counted, for instance `http_500` or `timeout`."""
    return problem.value if isinstance(problem, Fault) else f"http_{problem}"


def connect_fault(error: OSError) -> tuple[Fault, str]:
    """Return what a failed connection attempt means, and a description of its cause."""
    text = str(error) or type(error).__name__
    if isinstance(error, socket.gaierror):
        return Fault.CANNOT_CONNECT, f"cannot resolve the host name: {text}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return Fault.CANNOT_CONNECT, f"{text} (raise the limit of open files, `ulimit -n`, where the run is launched)"
    # Several addresses that failed in different ways give one error without errno: the other machine was contacted.
    return (Fault.CANNOT_CONNECT if error.errno in _LOCAL_ERRORS else Fault.REFUSED), text


def retry_delay_s(attempt: int, jitter: float, retry_after_s: float | None = None) -> float:
    """Return seconds to wait before retry number `attempt` (from 0): 0.25, 0.5, 1 ... 10, each scaled by 0.5 to 1.

    Args:
        jitter: number in [0, 1) that spreads out callers that failed together.
        retry_after_s: the server's `Retry-After`, honored up to 10 s.
    """
    delay_s: float = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2**attempt) * (0.5 + 0.5 * jitter)
    if retry_after_s is not None:
        delay_s = max(delay_s, min(retry_after_s, _MAX_DELAY_S))
    return delay_s


def open_session() -> aiohttp.ClientSession:
    """Return a session for internal servers: unlimited keep-alive connections, no proxies of the environment.

    The scheduler limits the requests in flight; another limit here would hide queueing from it.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, ttl_dns_cache=300, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


async def post(
    session: aiohttp.ClientSession, url: str, body: bytes, *, timeout_s: float, token: str = "", accept: str = "*/*"
) -> Reply:
    """Send one JSON request and read the whole answer. Network failures do not raise.

    Args:
        timeout_s: total, including the connection.
        accept: media types that the caller reads.
    """
    headers = {"Content-Type": "application/json", "Accept": accept}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        # Never follow a redirect with prompts and token; our servers send none.
        async with session.post(
            url, data=body, headers=headers, timeout=aiohttp.ClientTimeout(total=timeout_s), allow_redirects=False
        ) as response:
            content = await response.read()
            if response.status == 200:
                return Reply(None, content)
            return Reply(response.status, content, _seconds(response.headers.get("Retry-After")))
    except TimeoutError:
        return Reply(Fault.TIMEOUT, f"no answer within {timeout_s:g} s".encode())
    except aiohttp.ClientConnectorError as error:
        fault, text = connect_fault(error.os_error)
        return Reply(fault, text.encode())
    except (aiohttp.ClientError, ConnectionError) as error:
        return Reply(Fault.DISCONNECTED, (str(error) or type(error).__name__).encode())


def _seconds(value: str | None) -> float | None:
    """Parse a `Retry-After` in seconds; its other form, a date, is ignored."""
    return float(value) if value is not None and value.strip().isdigit() else None
