"""How a run looks as text: rows of the live table, and the one-line form for terminals that cannot redraw.

Called by the displays. Pure: reads a `RunState`, waits for nothing.
"""

from __future__ import annotations

import re

from rich.table import Table

from pipelinerl.records import EvaluationResult, MetricRecord
from pipelinerl.tracking.state import RunState

SERVER_BUSY = re.compile(r"actor/server_busy_(\d+)")
_NONE = "-"


def table_rows(state: RunState, max_steps: int | None) -> list[tuple[str, str]]:
    """(label, text) of every row; a number that is not known yet is a dash."""
    servers = sorted((int(m[1]), value) for name, value in state.latest.items() if (m := SERVER_BUSY.fullmatch(name)))
    fates = state.fates
    return [
        ("step", f"{_step(state, max_steps)}   ({_duration(state.training_seconds)} of training)"),
        ("reward, training", _number(state, "preprocessor/reward_mean", "actor/reward_mean")),
        ("success, training", _number(state, "preprocessor/success_rate", "actor/success_rate")),
        ("success, held out", _held_out(state)),
        (
            "sampling",
            f"{_number(state, 'actor/output_tokens_per_s', form='.0f')} tokens/s, "
            f"{_number(state, 'actor/rollouts_per_s', form='.1f')} rollouts/s",
        ),
        (
            "training",
            f"{_number(state, 'finetune/samples_per_s', form='.1f')} samples/s, "
            f"loss {_number(state, 'finetune/loss', form='.4g')}, "
            f"gradient norm {_number(state, 'finetune/grad_norm', form='.3g')}",
        ),
        (
            "lag (versions)",
            f"mean {_number(state, 'finetune/lag_mean_versions', form='.2f')}, "
            f"max {_number(state, 'finetune/lag_max_versions', form='.0f')}",
        ),
        ("ESS", f"{_number(state, 'finetune/ess')}, after clamping {_number(state, 'finetune/ess_after_clamp')}"),
        ("servers", ", ".join(f"{index}: {busy:.0f} running" for index, busy in servers) or _NONE),
        (
            "last weight update",
            f"version {state.version}, {state.last_update_seconds.get('total', 0.0):.2f} s"
            if state.version is not None
            else _NONE,
        ),
        ("samples", ", ".join(f"{count} {fate}" for fate, count in sorted(fates.items())) or _NONE),
    ]


def render_table(state: RunState, title: str, max_steps: int | None) -> Table:
    """The live table."""
    table = Table(title=title, show_header=False, title_justify="left", min_width=60)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for label, text in table_rows(state, max_steps):
        table.add_row(label, text)
    return table


def progress_line(state: RunState, max_steps: int | None, record: MetricRecord) -> str:
    """One step as one line.

    Args:
        state: the run so far.
        max_steps: its end.
        record: the trainer's numbers of that step. The preprocessor's of the same step are in `state`, if it has them.
    """
    step = record.step
    reward = record.values.get("finetune/reward_mean", state.history.get("preprocessor/reward_mean", {}).get(step))
    success = state.history.get("preprocessor/success_rate", {}).get(step)
    return (
        f"step {f'{step}/{max_steps}' if max_steps else step}"
        f" | reward {_NONE if reward is None else f'{reward:.3f}'}"
        f" | success {_NONE if success is None else f'{success:.3f}'}"
        f" | grad norm {_number(state, 'finetune/grad_norm', form='.3g')}"
        f" | {_number(state, 'actor/output_tokens_per_s', form='.0f')} tokens/s"
        f" | lag {_number(state, 'finetune/lag_mean_versions', form='.2f')}"
        f" (max {_number(state, 'finetune/lag_max_versions', form='.0f')})"
        f" | ESS {_number(state, 'finetune/ess')}"
        f" | update {state.last_update_seconds.get('total', 0.0):.2f} s"
    )


def evaluation_line(result: EvaluationResult) -> str:
    """One evaluation as one line."""
    kind = "final evaluation" if result.is_final else f"evaluation at version {result.due_version}"
    failed = f", {result.num_failed} failed" if result.num_failed else ""
    if result.success_rate is None or result.mean_reward is None:
        found = "no rollout came to an end"
    else:
        found = f"success {result.success_rate:.3f}, reward {result.mean_reward:.3f}"
    return f"{kind} on {result.dataset_name}: {found} ({result.num_rollouts} rollouts{failed}, {result.seconds:.1f} s)"


def _step(state: RunState, max_steps: int | None) -> str:
    return f"{state.steps}/{max_steps}" if max_steps else f"{state.steps}"


def _number(state: RunState, *names: str, form: str = ".3f") -> str:
    return next((format(state.latest[name], form) for name in names if name in state.latest), _NONE)


def _held_out(state: RunState) -> str:
    measured = [(r, r.success_rate) for r in state.evaluations if r.success_rate is not None]
    if not measured:
        return _NONE
    last, success_rate = measured[-1]
    before = state.held_out_success("before")
    text = f"{success_rate:.3f} at version {last.max_version}"
    return f"{text}   ({before:.3f} before)" if before is not None and last.due_version > 0 else text


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
