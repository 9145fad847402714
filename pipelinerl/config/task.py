"""Sections of what is sampled and how it is judged: `llm`, `actor`, `agent`, `preprocess`, `rewards`, `verifier`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pipelinerl.config.section import Section


class LLMParameters(Section):
    """Sampling parameters of training (`llm`): always from the whole distribution, as the trainer assumes."""

    max_tokens: int = Field(default=8192, ge=1, description="longest output, in tokens")
    temperature: float = Field(default=1.0, gt=0, description="sampling temperature, also of the trainer's log-probs")
    min_tokens: int = Field(default=0, ge=0, description="shortest output, in tokens")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[], description="strings that end an output")
    ignore_eos: bool = Field(default=False, description="continue after the end token")


class EvaluationParameters(LLMParameters):
    """Sampling parameters of evaluation (`test_llm`); `max_tokens`, `temperature` and `stop` follow `llm`."""

    temperature: float = Field(default=1.0, ge=0, description="sampling temperature; 0: greedy")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus sampling")
    top_k: int = Field(default=-1, ge=-1, description="sample from the k most likely tokens; -1 or 0: from all")


class LLMConfig(Section):
    parameters: LLMParameters = LLMParameters()
    chat_template_kwargs: dict[str, Any] = Field(
        default={},
        description="further arguments of the model's chat template, as `enable_thinking: false`; in evaluations too",
    )


class EvaluationConfig(Section):
    parameters: EvaluationParameters = EvaluationParameters()


class EvaluationSet(Section):
    """A held-out data set with its own sampling (`eval`). What is left out is that of `test_llm.parameters`."""

    name: Any
    k: int = Field(default=1, ge=1)
    problems: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    stop: list[Annotated[str, Field(min_length=1)]] | None = None

    def parameters(self, others: EvaluationParameters) -> EvaluationParameters:
        """How this set is sampled; `others` has what it leaves out."""
        own = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "stop")}
        return others.model_copy(update={name: value for name, value in own.items() if value is not None})


class Example(Section):
    """A question and its answer, shown before the task as an earlier turn of the dialogue."""

    task: str
    answer: str


class ActorConfig(Section):
    rollout_policy: str | None = Field(default=None, description="dotted path of the rollout function")
    llm_max_rollouts: int = Field(default=64, ge=1, description="concurrent rollouts per server")
    rollout_workers: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="processes that run rollouts; auto: one for every two servers on GPUs, at most 8, and no more than "
        "the node has free cores",
    )
    discount_factor: float = Field(default=1.0, gt=0, le=1, description="discount per output token, in built-in tasks")
    rollout_timeout_s: float = Field(default=600, gt=0, description="time limit of a rollout; a longer one fails")
    request_timeout_s: float = Field(default=300, gt=0, description="time limit of a request; a longer one is retried")
    max_retries: int = Field(default=3, ge=0, description="retries of a rollout or request after a transient failure")
    max_failure_rate: float = Field(
        default=0.5, gt=0, le=1, description="end the run if a larger share of the latest rollouts (at least 32) failed"
    )
    test_samples: int | None = Field(default=None, ge=1, description="rollouts per evaluation; null: one per problem")
    recorded_test_samples: int | None = Field(
        default=100, ge=0, description="rollouts of each evaluation that `samples --evaluation` shows; null: all"
    )
    evaluation_concurrency: int | None = Field(
        default=None, ge=1, description="rollouts of an evaluation at once; null: all slots"
    )
    agent_func_path: str | None = Field(
        default=None, description="Python file with `async step(state, action, label, **kwargs)` (docs/agents.md)"
    )
    system_prompt: str | None = Field(
        default=None,
        description="system prompt of built-in tasks in place of their own, and with agent.apply_chat_template",
    )
    task_template: str | None = Field(default=None, description="text around `{task}` in tasks with one question")
    examples: list[Example] = Field(
        default=[],
        description="[{task, answer}, ...]: earlier turns of the dialogue, in built-in tasks with one question",
    )


class AgentConfig(Section):
    """Prompts and episodes of the agent function. It takes effect with `actor.agent_func_path`."""

    prompt_data: str | list[str] | None = Field(
        default=None, description="JSONL file or Hugging Face dataset (`name`, `name:split`); several: comma-separated"
    )
    prompt_data_probs: str | float | list[float] | None = Field(
        default=None, description="how often each data set is drawn, one number each; null: all prompts equally often"
    )
    eval_data: str | list[str] | None = Field(default=None, description="the same for evaluation; null: none")
    input_key: str = Field(default="input", description="column of the prompts")
    label_key: str | None = Field(default=None, description="column of the labels; null: empty labels")
    apply_chat_template: bool = Field(default=False, description="format prompts with the model's chat template")
    prompt_max_len: int = Field(default=1024, ge=1, description="longest prompt in tokens; longer ones are dropped")
    max_samples: int | None = Field(default=None, ge=1, description="rows used, from the beginning; null: all")
    max_steps: int = Field(default=64, ge=1, description="calls of the agent function per rollout")
    reward: Literal["sum", "last"] = Field(default="sum", description="sum of the steps' rewards, or the last one")
    action_special_tokens: bool = Field(default=False, description="keep special tokens and stop string in the action")


class PreprocessConfig(Section):
    ring_buffer_size: int = Field(
        default=128, ge=1, description="most batches that wait for the trainer with max_lag=null"
    )


class RewardsConfig(Section):
    """Reward of one answer, for tasks that judge answers: the weighted sum of `components`.

    The eight numbers are the component `outcome`: reward by kind of answer. `finished`: the model ended its answer.
    """

    components: dict[str, float] = Field(
        default={"outcome": 1.0}, description="weights of outcome, soft_length and difficulty_length"
    )
    correct_answer_finished: float = Field(default=1.0, description="reward of this kind of answer")
    correct_answer_not_finished: float = Field(default=0.0, description="reward of this kind of answer")
    wrong_answer_finished: float = Field(default=0.0, description="reward of this kind of answer")
    wrong_answer_not_finished: float = Field(default=0.0, description="reward of this kind of answer")
    no_answer_finished: float = Field(default=0.0, description="reward of this kind of answer")
    no_answer_not_finished: float = Field(default=0.0, description="reward of this kind of answer")
    unparsable_finished: float = Field(default=0.0, description="reward of this kind of answer")
    unparsable_not_finished: float = Field(default=0.0, description="reward of this kind of answer")
    buffer_tokens: int = Field(default=0, ge=0, description="tokens before the limit that cost reward (soft_length)")
    easy_tokens: int = Field(default=256, ge=1, description="budget of the easiest problem (difficulty_length)")


class VerifierConfig(Section):
    """Grader processes: of one verifier service, or of one rollout worker where there is no service."""

    processes: int = Field(default=2, ge=1, description="grader processes")
    timeout_s: float = Field(default=10, gt=0, description="processor time for grading one answer")
    memory_mib: int = Field(default=2048, ge=256, description="memory limit (address space) of a grader process")
