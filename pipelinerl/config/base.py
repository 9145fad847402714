"""The base of every config section: frozen, and an unknown key is an error."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

#: NumPy and vLLM take 32 bits, and each server adds its number.
LARGEST_SEED = 2**31 - 1


class Section(BaseModel):
    """A frozen part of the configuration; unknown keys are refused (`config.load` names the nearest known key)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        # A name made of digits (`wandb.wandb_name=123`) is read as a number by the command line.
        coerce_numbers_to_str=True,
    )
