"""Mathematics with a Python tool (ToRA, arXiv 2309.17452): the model may run programs before it states the answer.

Problems and grading are those of `math`; programs run in the sandbox of `coding`, never in this process. One sample
holds all turns of a problem: programs and answer are trained, what the sandbox printed is not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains import math
from pipelinerl.domains.answers import boxed_answer
from pipelinerl.domains.coding import check_config, find_program, run_in_sandbox, sandbox_endpoint
from pipelinerl.domains.math import gold_answer, validate, verify_math
from pipelinerl.domains.single_turn import chat, graded_result
from pipelinerl.errors import DomainError, RolloutError
from pipelinerl.grading import verify
from pipelinerl.llm import LLMCall, TrainableLLM
from pipelinerl.llm.tokens import after_thinking
from pipelinerl.llm.tool_calls import arguments_of
from pipelinerl.rollouts import RolloutResult
from pipelinerl.sandbox.programs import ProgramRun
from pipelinerl.sandbox.protocol import Grade

__all__ = ["check_config", "generate_tir_rollout", "gold_answer", "load_problems", "validate"]


MAX_PROGRAMS, MAX_OUTPUT_CHARACTERS = 4, 1000


def load_problems(
    dataset_names: Sequence[str],
    *,
    max_programs: int = MAX_PROGRAMS,
    max_output_characters: int = MAX_OUTPUT_CHARACTERS,
    **params: Any,
) -> list[dict[str, Any]]:
    """Return the problems of `math`.

    Args:
        max_programs: that the model may run for one problem.
        max_output_characters: of one program, that the model sees.
        params: those of `math`.

    Raises:
        DomainError: as there; or a limit is no positive number.
    """
    limits = {"max_programs": max_programs, "max_output_characters": max_output_characters}
    for name, value in limits.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DomainError(f"dataset_loader_params.{name}: got {value!r}, expected a positive number. Change it.")
    return [problem | limits for problem in math.load_problems(dataset_names, **params)]


_RULES = (
    "A program is run by itself, with nothing but Python's standard library, and you see what it prints. "
    "Put your final answer within \\boxed{}."
)
#: What begins the output of a program; a model that goes on there by itself would make it up.
_OUTPUT = "```output"
SYSTEM_PROMPT = (
    "Please reason step by step. To compute something, write a Python program between ```python and ```, and stop. "
    + _RULES
)
NATIVE_SYSTEM_PROMPT = "Please reason step by step, and use the tool to compute. " + _RULES
_PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "The whole program. It prints its results."}},
    "required": ["code"],
}
TOOL = {
    "type": "function",
    "function": {"name": "python", "description": "Run a Python program.", "parameters": _PARAMETERS},
}
_NONE_LEFT = "No more programs are run. State the final answer within \\boxed{}."


class Tool:
    """Runs the programs of one rollout, as long as it may have more.

    Attributes:
        runs: how the programs ended.
    """

    def __init__(self, problem: dict[str, Any], endpoint: str | None) -> None:
        self._most = problem.get("max_programs", MAX_PROGRAMS)
        self._longest = problem.get("max_output_characters", MAX_OUTPUT_CHARACTERS)
        self._endpoint = endpoint
        self.runs: list[ProgramRun] = []

    @property
    def is_used_up(self) -> bool:
        return len(self.runs) >= self._most

    async def answer(self, program: str | None) -> str:
        """Return what the model gets to see of a program; None: it called the tool without one."""
        if self.is_used_up:
            return _NONE_LEFT
        if program is None:
            self.runs.append(ProgramRun("crashed", ""))
            return "error: expected the tool python with the argument code, a text"
        run = await asyncio.to_thread(run_in_sandbox, program, endpoint=self._endpoint)
        self.runs.append(run)
        shown = shown_output(run, self._longest)
        return f"{shown}\n{_NONE_LEFT}" if self.is_used_up else shown


def shown_output(run: ProgramRun, max_characters: int) -> str:
    """Return what a program printed, with its error and how it was stopped; of a long text, beginning and end."""
    endings = {
        "time_limit": "error: the program took too long",
        "output_limit": "error: the program printed too much",
        "crashed": run.stderr.strip() or "error: the program was ended",
    }
    parts = [run.stdout.strip(), endings.get(run.ending, "")]
    text = "\n".join(part for part in parts if part) or "(nothing was printed)"
    half = max_characters // 2
    return text if len(text) <= max_characters else f"{text[:half]}\n...\n{text[-half:]}"


def next_program(call: LLMCall) -> str | None:
    """Return the program that an answer asks to run: its last one, unless a final answer follows it."""
    said = after_thinking(call.graded_text)
    return None if boxed_answer(said.rpartition("```")[2]) is not None else find_program(said)


async def generate_tir_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Let the model run programs until it states an answer, and grade that.

    All answers of the model together have `llm.parameters.max_tokens`. `custom.native_tools`: the model's chat template
    describes the tool and its own tool calls are run, instead of the Python blocks in its text.

    Raises:
        RolloutError: as of `llm_async_generate` and `verify`.
        SandboxUnavailableError: programs cannot be run.
    """
    started = time.monotonic()
    native = bool(cfg.custom.get("native_tools", False))
    messages = chat(cfg, problem["task"], NATIVE_SYSTEM_PROMPT if native else SYSTEM_PROMPT)
    dialogue = llm.chat(session, tools=[TOOL] if native else None, messages=messages)
    tool = Tool(problem, sandbox_endpoint(cfg))
    stop = list(llm.parameters.get("stop", [])) + ([] if native else [_OUTPUT])
    left = int(llm.parameters["max_tokens"])
    calls: list[LLMCall] = []
    while left > 0:
        least = min(left, int(llm.parameters.get("min_tokens", 0)))
        try:
            call = await dialogue.ask(parameters={"max_tokens": left, "min_tokens": least, "stop": stop})
        except RolloutError as error:
            if not calls or error.reason != "context_overflow":
                raise
            break  # the turns so far are trained, without an answer
        calls.append(call)
        left -= len(call.output_token_ids)
        if tool.is_used_up:
            break
        if native and call.output.tool_calls:
            for tool_call in call.output.tool_calls:
                code = arguments_of(tool_call).get("code") if tool_call["function"]["name"] == "python" else None
                dialogue.add_tool_result(tool_call, await tool.answer(code if isinstance(code, str) else None))
        elif not native and (program := next_program(call)) is not None:
            dialogue.add(f"{_OUTPUT}\n{await tool.answer(program)}\n```")
        else:
            break
    grade = await verify(verify_math, calls[-1].graded_text, problem)
    failed = sum(run.ending != "finished" for run in tool.runs)
    details = {**grade.details, "programs": float(len(tool.runs)), "programs_failed": float(failed)}
    grade = Grade(grade.score, grade.status, details)
    return graded_result(cfg, llm, problem, calls, dialogue.training_texts(), grade, started)
