"""The command `check-domain`: check a task's functions, data sets and gold answers, and run one rollout.

No model is started: the rollout runs against a server with scripted answers. The launcher runs the same checks, without
the gold answers, in a subprocess: `python -m pipelinerl.analysis.check_domain --run-config FILE` exits with 0 if the
task is usable, else with 2 and the reason on stderr.

The module of `dataset_loader` may define three more functions: `check_config(config)` refuses configurations that
cannot work; `gold_answer(problem) -> str | None` returns a correct output; `validate(problem) -> float | None`, or
`validate(problem, config)`, returns the score of the gold answer, which must be 1 (None: there is no gold answer).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import importlib
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from aiohttp import web

from pipelinerl.actor.budget import lag_policy_of
from pipelinerl.agents.user_threads import start_thread
from pipelinerl.commands import typed
from pipelinerl.config import RunConfig
from pipelinerl.config.compose import compose
from pipelinerl.config.load import load_config, to_dictconfig
from pipelinerl.config.validate import missing_task
from pipelinerl.domains.user_task import (
    Problem,
    ProblemSets,
    describe_error,
    gold_score,
    is_await_missing,
    load_dataset_loader,
    load_problem_sets,
    load_rollout_function,
    place_of,
    shared_problems,
)
from pipelinerl.errors import EXIT_USER_ERROR, ConfigError, DomainError, RolloutError, UserError
from pipelinerl.grading import open_verifier
from pipelinerl.llm import TrainableLLM
from pipelinerl.llm.client import open_session, sampling_parameters
from pipelinerl.llm.sample_builder import build_samples, check_result, complete_texts, summarize
from pipelinerl.llm.tokens import ChatRenderer, load_tokenizer
from pipelinerl.rl.user_function import check_user_functions
from pipelinerl.run.model_folder import read_model_config
from pipelinerl.run.preflight import COUNTS, DOMAIN_CHECK_TIMEOUT_S, REMARK, count_line
from pipelinerl.sandbox.main import check_environment
from pipelinerl.tiny.tokenizer import build_tokenizer

MAX_VALIDATED = 200
_NEARLY = 1 - 1e-6
_REPEAT_S = 5.0  # for code that swallows the interruption
_LAST_RESORT_S = 20.0
_FRAMES = 6
_SHOWN_PROMPTS, _SHOWN_CHARACTERS = 3, 3000
_DRY_ROLLOUT = "actor.rollout_policy: a dry rollout"
_AT_START_S = 30.0  # for the dry rollout of the launcher
TEMPLATE_LIMIT_S = 10.0  # for one prompt, which usually takes milliseconds
#: Faults of the code, whatever the model says. Others may come from an answer that no model would give.
_ALWAYS_FAULTS = (NameError, ImportError)
#: Faults of the code if they come before the first request to the model.
_FAULTS = (*_ALWAYS_FAULTS, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class PossibleFault(DomainError):
    """The dry rollout failed, but other rollouts may not."""


class _TimeIsUp(BaseException):
    """Raised inside user code. Not an `Exception`, so that `except Exception` does not catch it."""


def checked_problems(config: RunConfig) -> ProblemSets:
    """Return the problems after checking everything that the run needs from the domain.

    Raises:
        DomainError: something is not usable; the message says what to do.
        ConfigError: a loss, an advantage estimator or a lag policy of the user cannot be imported.
    """
    load_rollout_function(config)
    # Checks the path with good messages; the module is imported below without them.
    load_dataset_loader(config)
    check_config = domain_function(config, "check_config")
    if check_config is not None:
        try:
            check_config(config)
        except UserError:
            raise
        except Exception as error:
            raise DomainError(f"check_config refuses the configuration: {describe_error(error)}") from error
    check_environment(config)
    check_user_functions(config.finetune.rl)
    lag_policy_of(config)
    return load_problem_sets(config)


def domain_function(config: RunConfig, name: str) -> Callable[..., Any] | None:
    """Return the optional function `name` of the dataset loader's module."""
    module = importlib.import_module(str(config.dataset_loader).rpartition(".")[0])
    function: Callable[..., Any] | None = getattr(module, name, None)
    return function if callable(function) else None


def check_answers(config: RunConfig, problems: ProblemSets) -> str:
    """Grade the domain's own gold answers and return one line about it.

    Raises:
        DomainError: a gold answer does not score 1.
    """
    validate = domain_function(config, "validate")
    if validate is None:
        return f"gold answers are not checked: the module of {config.dataset_loader} has no validate(problem)"
    chosen = [*_spread(problems.train), *_spread(problems.test)]
    num_checked = 0
    for problem in chosen:
        try:
            score = gold_score(validate, problem.data, config)
        except Exception as error:
            raise DomainError(f"validate of problem {problem.id!r} raised {describe_error(error)}") from error
        if score is None:
            continue
        num_checked += 1
        if not score >= _NEARLY:
            raise DomainError(
                f"validate: the gold answer of problem {problem.id!r} scores {score}, expected 1. Correct the problem "
                f"or the grader. Problem: {str(problem.data)[:400]}"
            )
    return f"gold answers of {num_checked} of {len(chosen)} problems were graded; all score 1"


def _spread(problems: list[Problem]) -> list[Problem]:
    """Return at most `MAX_VALIDATED` problems, evenly spread."""
    step = -(-len(problems) // MAX_VALIDATED)
    return problems[:: max(step, 1)]


@contextlib.contextmanager
def time_limit(seconds: float, what: str, next_step: str) -> Iterator[None]:
    """Run the code inside for at most `seconds`.

    Raises:
        PossibleFault: it took longer; `what` is the subject of the message, `next_step` its end.
    """
    place: list[str] = []
    is_inside = True

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if not is_inside:
            return
        place[:] = place or [f"{f.filename}:{f.lineno} in {f.name}" for f in traceback.extract_stack(frame)[-_FRAMES:]]
        raise _TimeIsUp

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_S)
    faulthandler.dump_traceback_later(seconds + _LAST_RESORT_S, exit=True, file=sys.__stderr__ or 2)
    try:
        yield
    except _TimeIsUp:
        where = "\n  ".join(place)
        raise PossibleFault(f"{what} took more than {seconds:g} s. {next_step} It was at:\n  {where}") from None
    finally:
        is_inside = False
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def heeded_interrupts() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in the code inside. asyncio would only cancel its main task, which blocking
    code prevents, but it keeps handlers that are not Python's own."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


TIMEOUT_S = 120.0
_BLOCK_GRACE_S = 2.0
_FILLER = "I do not know."
_TOKEN = "dry-rollout"


def dry_rollout(
    config: RunConfig, problem: Problem, timeout_s: float = TIMEOUT_S, prompts: list[str] | None = None
) -> str:
    """Run one rollout of `problem` and return one line about it; append its first prompt to `prompts`.

    The server answers with the domain's gold answer, if there is one; the rollout must then succeed.

    Raises:
        DomainError: the rollout fails, has nothing to train on, or does not succeed with the gold answer.
        PossibleFault: the same, but possibly because of the answer or the time it took.
    """
    limit_s = min(timeout_s, config.actor.rollout_timeout_s)
    # The event loop ends a function that waits; the grace period is for one that blocks the loop.
    with time_limit(
        limit_s + _BLOCK_GRACE_S,
        f"{_DRY_ROLLOUT} of problem {problem.id!r} blocks the event loop and",
        "Other rollouts cannot run meanwhile: await slow operations, or move them to a thread or a @grader.",
    ):
        return asyncio.run(_run(config, problem, limit_s, prompts if prompts is not None else []))


async def _run(config: RunConfig, problem: Problem, limit_s: float, prompts: list[str]) -> str:
    function = load_rollout_function(config)
    gold_answer = domain_function(config, "gold_answer")
    try:
        gold = gold_answer(problem.data) if gold_answer is not None else None
    except Exception as error:
        raise DomainError(f"gold_answer of problem {problem.id!r} raised {describe_error(error)}") from error
    tokenizer = build_tokenizer(max_number=1)
    async with (
        _scripted_server(tokenizer.encode(gold or _FILLER, add_special_tokens=False)) as url,
        open_session() as session,
        open_verifier(config.verifier, []),
    ):
        renderer = _TryingRenderer(tokenizer, config)
        llm = _handle(config, url, tokenizer, renderer)
        timeout = asyncio.timeout(limit_s)
        try:
            async with timeout:
                answer = await function(to_dictconfig(config), llm, problem.data, session)
            result = check_result(answer, function)
            if not result.training_texts:
                raise DomainError(
                    f"{_DRY_ROLLOUT} of problem {problem.id!r} returned no training text. The actor "
                    "rejects such rollouts (no_samples), because they have nothing to train on. Return "
                    "training_texts=[make_training_text(llm, llm_call), ...], for wrong answers, too."
                )
            complete_texts(result, llm.temperature, llm.counters.versions)
            samples = build_samples(result.training_texts, group_id="dry", rollout_id="dry/r0")
            summary = summarize(result, "dry/r0")
        except UserError:
            raise
        except Exception as error:
            if timeout.expired():
                place = place_of(error.__cause__) if error.__cause__ is not None else ""
                raise PossibleFault(
                    f"{_DRY_ROLLOUT} of problem {problem.id!r} did not finish within {limit_s:g} s, although every "
                    f"request was answered at once (actor.rollout_timeout_s is {config.actor.rollout_timeout_s:g}). It "
                    f"waits for something else{f' at {place}' if place else ''}."
                ) from error
            is_certain = gold is not None or isinstance(error, _ALWAYS_FAULTS) or is_await_missing(error)
            is_certain = is_certain or (not llm.counters.requests and isinstance(error, _FAULTS))
            raise (DomainError if is_certain else PossibleFault)(
                f"{_DRY_ROLLOUT} of problem {problem.id!r}, answered with {gold or _FILLER!r}, failed: "
                f"{describe_error(error, function)}"
            ) from error
    prompts.append(renderer.first_prompt)
    said = "the gold answer" if gold else f"{_FILLER!r}"
    if gold and not summary.success:
        raise DomainError(
            f"{_DRY_ROLLOUT} of problem {problem.id!r} does not succeed with the gold answer "
            f"(reward {summary.reward}, {summary.metrics}). Prompt, grader and gold answer do not match."
        )
    return (
        f"a dry rollout, answered with {said}: reward {summary.reward:g}, success {summary.success}, "
        f"{len(samples)} sample(s), metrics {summary.metrics}"
    )


def _handle(config: RunConfig, url: str, tokenizer: Any, renderer: ChatRenderer) -> Any:
    parameters = sampling_parameters(config.llm.parameters)
    llm = TrainableLLM(url, "actor", tokenizer, parameters=parameters, token=_TOKEN, renderer=renderer)
    return llm.for_rollout(seed=0)


class _TryingRenderer(ChatRenderer):
    """Renders with a small tokenizer, after trying the same messages with the run's model, if it is on this machine.

    Raises ConfigError if the model cannot read the prompt.
    """

    def __init__(self, tokenizer: Any, config: RunConfig) -> None:
        super().__init__(tokenizer, config.llm.chat_template_kwargs)
        self._model_path, self._models = config.model_path, None
        self.first_prompt = ""
        try:
            trust = config.finetune.trust_remote_code
            self._models = ChatRenderer(
                load_tokenizer(config.model_path, trust_remote_code=trust, local_files_only=True),
                config.llm.chat_template_kwargs,
            )
        except Exception:  # noqa: BLE001 - reported by whatever needs the model
            return

    def try_template(self) -> None:
        """Render a short chat. Only a template that never ends is a fault; the task may not use it otherwise."""
        with contextlib.suppress(RolloutError):
            self._limited([{"role": "user", "content": "?"}], None)

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> tuple[str, list[int]]:
        as_messages = "\n".join(f"{each.get('role')}: {each.get('content')}" for each in messages)
        prompt = self._try(messages, tools) or as_messages
        self.first_prompt = self.first_prompt or prompt
        return super().render(messages, tools)

    def _limited(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
    ) -> tuple[str, list[int]]:
        if (renderer := self._models) is None:
            return "", []
        try:
            # In a thread, because a template is a program that may loop forever.
            return start_thread(lambda: renderer.render(messages, tools)).result(TEMPLATE_LIMIT_S)
        except TimeoutError as error:
            raise ConfigError(
                "model_path",
                self._model_path,
                f"a model whose chat template renders a prompt within {TEMPLATE_LIMIT_S:g} s; it may loop forever",
                "Correct the template in chat_template.jinja or tokenizer_config.json of the model folder.",
            ) from error

    def _try(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> str:
        """Return the text that the model gets; empty if the model is not here."""
        try:
            prompt, ids = self._limited(messages, tools)
        except RolloutError as error:
            roles = ", ".join(dict.fromkeys(str(message.get("role")) for message in messages))
            raise ConfigError(
                "model_path",
                self._model_path,
                f"a model whose chat template accepts the messages of this task (roles: {roles}); {error}",
                "Use an instruction-tuned model with these roles, or other messages; actor.system_prompt='' drops the "
                "system message of a domain that has one.",
            ) from error
        rows = read_model_config(self._model_path).get("vocab_size")
        if isinstance(rows, int) and ids and max(ids) >= rows:
            text = self._models.decode([max(ids)], skip_special_tokens=False) if self._models else ""
            raise ConfigError(
                "model_path",
                self._model_path,
                f"token ids below {rows}, the vocab_size of its config.json; its tokenizer has {max(ids)} for {text!r}",
                "Copy the tokenizer that belongs to these weights, or resize the model's embedding.",
            )
        return prompt


@contextlib.asynccontextmanager
async def _scripted_server(token_ids: list[int]) -> AsyncIterator[str]:
    """Serve `/inference/v1/generate` and answer everything with `token_ids`."""

    async def generate(request: web.Request) -> web.Response:
        content = [{"token_id": token, "logprob": -0.5} for token in token_ids]
        choice = {
            "token_ids": token_ids,
            "logprobs": {"content": content},
            "finish_reason": "stop",
            "weight_versions": [{"version": "0", "start": 0, "end": len(token_ids)}],
        }
        return web.json_response({"choices": [choice]})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/inference/v1/generate", generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


_EPILOG = f"The arguments are those of {typed('launch')}; NAME is short for --config-name NAME."


def main(argv: list[str]) -> int:
    """Print the results and return 0; a mistake raises a `UserError` that says what to change."""
    if not argv or argv[0] in ("-h", "--help"):
        argparse.ArgumentParser(
            prog=typed("check-domain"),
            usage="%(prog)s [NAME] [--config-dir DIR] [--config-name NAME] [key=value ...]",
            description="Import actor.rollout_policy and dataset_loader, load the data sets, check their shapes, grade "
            "the gold answers, and run one rollout against a server with scripted answers.",
            epilog=_EPILOG,
        ).print_help()
        return 0

    words = argv if argv[0].startswith("-") or "=" in argv[0] else ["--config-name", *argv]
    # Nothing is written, but a configuration needs a run directory to be complete.
    words = words if any("output_dir=" in word for word in words) else [*words, "++output_dir=unused"]
    composed = compose(words)
    if composed.config is None:
        print(composed.help_text)
        return 0
    if (fault := missing_task(composed.config)) is not None:
        raise fault
    sys.path[:0] = [str(folder) for folder in composed.search_dirs]

    with heeded_interrupts():
        _check(composed.config)
    return 0


def _check(config: RunConfig) -> None:
    with time_limit(
        DOMAIN_CHECK_TIMEOUT_S,
        f"dataset_loader {config.dataset_loader}: importing the task and loading its problems",
        "A run would not start. Make it faster.",
    ):
        problems = checked_problems(config)
    print(count_line(len(problems.train), len(problems.test)), flush=True)
    if note := _note_of(problems):
        print(f"note: {note}", flush=True)
    print(check_answers(config, problems), flush=True)
    prompts, tried = list[str](), problems.train or problems.test
    print(dry_rollout(config, tried[0], prompts=prompts), flush=True)
    for problem in tried[1:_SHOWN_PROMPTS]:
        dry_rollout(config, problem, prompts=prompts)
    for problem, prompt in zip(tried, prompts, strict=False):
        print(f"\nproblem {problem.id} as the model sees it:\n{prompt[:_SHOWN_CHARACTERS]}")


def _note_of(problems: ProblemSets) -> str:
    """A note about held-out problems that are also trained on."""
    shared, total = shared_problems(problems), len(problems.test)
    same = f"{shared} of the {total} test problems are also training problems, so evaluations measure memorization, too"
    return same if shared else ""


def check_run(file: Path) -> int:
    """Check the task of a resolved configuration for the launcher, and return the exit code.

    A possible fault of the dry rollout is only a line of the output, because rollouts of a run may fail, too.
    """
    try:
        config = load_config(file)
        problems = checked_problems(config)
        # User code may have left a line without its end.
        print(f"\n{COUNTS}{len(problems.train)} {len(problems.test)}", flush=True)
        if note := _note_of(problems):
            print(f"\n{REMARK}{note}", flush=True)
        if config.world.env_replicas:  # the environment's servers are started with the run
            _TryingRenderer(build_tokenizer(max_number=1), config).try_template()
        else:
            dry_rollout(config, (problems.train or problems.test)[0], _AT_START_S)
    except PossibleFault as error:
        print(f"\n{REMARK}{' '.join(str(error).split())} Such rollouts count as failed.", flush=True)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Check the task of a run.")
    parser.add_argument("--run-config", required=True, type=Path, help="resolved configuration (YAML)")
    sys.exit(check_run(parser.parse_args().run_config))
