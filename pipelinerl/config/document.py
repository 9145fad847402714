"""The tables of `docs/configuration.md`, made from the schema. `python -m pipelinerl.config.document FILE` renews them.

A test compares the file with what is made here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pipelinerl.config.hydra_compose import compose_plain
from pipelinerl.config.key_notes import HONOURED, REFUSED_VALUES
from pipelinerl.config.keys import known_keys

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def tables() -> str:
    """Return the tables as Markdown: keys of the schema by section."""
    from pipelinerl.config.arguments import Arguments

    shipped = compose_plain(Arguments(config_name="base")).data
    sections: dict[str, list[str]] = {}
    for key in known_keys():
        sections.setdefault(key.rpartition(".")[0] or "top level", []).append(key)
    parts: list[str] = []
    for section, keys in sections.items():
        rows = [_row(key, shipped) for key in keys]
        parts += [f"### {section}", "", "| key | default | what it does |", "|---|---|---|", *rows, ""]
    return "\n".join([*parts, ""])


def renew(text: str) -> str:
    """Return the document with new tables between the two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}{END}{after}"


def _row(key: str, shipped: dict[str, Any]) -> str:
    value: Any = shipped
    for part in key.split("."):
        value = value[part]
    note = HONOURED[key]
    if key in REFUSED_VALUES:
        note += f". {REFUSED_VALUES[key][0].upper()}{REFUSED_VALUES[key][1:]}"
    return f"| `{key}` | {_default(key, value)} | {note} |"


def _default(key: str, value: Any) -> str:
    if key == "output_dir":
        return "required"
    if key == "vllm_config.vllm_kwargs":
        return "see `base.yaml`"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    return f"`{value}`" if value != "" else '`""`'


def main(argv: list[str]) -> int:
    """Renew the tables in the file that `argv` names."""
    path = Path(argv[0])
    path.write_text(renew(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
