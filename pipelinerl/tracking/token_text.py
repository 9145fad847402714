"""Token ids as text, with the run's own tokenizer from local files. Nothing is downloaded.

`tokenizer.json` is read directly; only a tokenizer without that file needs torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from pipelinerl.config import RunConfig
from pipelinerl.rundir.layout import RunDir

# Spaces of other widths and joiners count as unprintable, but do not control a terminal.
_KEPT = frozenset(
    "\t\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000\u200c\u200d"
)
_FILE = "tokenizer.json"
# Some tokenizers decode the first word of a text differently.
_CONTEXT_TOKENS = 4
# Tokenizers take ids of 32 bits.
_MAX_ID = 2**32
_MAX_REASON = 200


class TokenText:
    """Text of token ids, including special tokens. Unknown ids are shown as `<|id N|>`.

    Args:
        decode: text of ids that are all known.
        is_known: whether the tokenizer knows an id.
    """

    def __init__(self, decode: Callable[[list[int]], str], is_known: Callable[[int], bool]) -> None:
        self._decode, self._is_known = decode, is_known

    def part(self, token_ids: Sequence[int], start: int, end: int) -> str:
        """The text of tokens `[start, end)` as it continues the ones before."""
        before = token_ids[max(0, start - _CONTEXT_TOKENS) : start]
        if before:
            context = self.whole(before)
            text = self.whole([*before, *token_ids[start:end]])
            # Not if a character begins in one part and ends in the other.
            if text.startswith(context) and not context.endswith("\ufffd"):
                return text[len(context) :]
        return self.whole(token_ids[start:end])

    def whole(self, token_ids: Sequence[int]) -> str:
        known = {index for index in set(token_ids) if 0 <= index < _MAX_ID and self._is_known(index)}
        if len(known) == len(set(token_ids)):
            return self._decode(list(token_ids))
        pieces = []
        for is_known, group in groupby(token_ids, known.__contains__):
            run = list(group)
            pieces.append(self._decode(run) if is_known else "".join(f"<|id {index}|>" for index in run))
        return "".join(pieces)


def token_text(config: RunConfig, run_dir: RunDir) -> tuple[TokenText | None, str]:
    """The tokenizer of `model_path` or of the model that the run exported; or None and the reason, as one line."""
    trusts = config.finetune.trust_remote_code
    folder = Path(config.model_path).expanduser()
    first = str(folder) if folder.is_dir() else config.model_path
    reasons = []
    for name in (first, str(run_dir.current_model)):
        try:
            return _load(name, trusts), ""
        except Exception as error:  # noqa: BLE001 - a damaged file may raise anything; counts are shown without text
            what = one_line(" ".join(str(error).split()))[:_MAX_REASON] or type(error).__name__
            reasons.append(f"{one_line(name)}: {what}")
    return None, f"no tokenizer could be loaded without a download ({'; '.join(reasons)})"


def _load(name: str, trust_remote_code: bool) -> TokenText:
    file = _tokenizer_file(name)
    if file is not None:
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(file))
        return TokenText(
            lambda ids: str(fast.decode(ids, skip_special_tokens=False)),
            lambda index: fast.id_to_token(index) is not None,
        )
    from pipelinerl.llm.tokens import load_tokenizer

    slow: Any = load_tokenizer(name, trust_remote_code=trust_remote_code, local_files_only=True)
    size = len(slow)
    return TokenText(
        lambda ids: str(slow.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)),
        lambda index: index < size,
    )


def _tokenizer_file(name: str) -> Path | None:
    """`tokenizer.json` of a folder or of a cached Hugging Face model; None: a tokenizer without that file.

    Raises:
        FileNotFoundError: neither the folder nor the model is here, or it has no tokenizer.
    """
    folder = Path(name)
    if folder.is_dir():
        if (folder / _FILE).is_file():
            return folder / _FILE
        if not any(_is_of_tokenizer(file.name) for file in folder.iterdir()):
            raise FileNotFoundError("the folder holds no tokenizer")
        return None
    if folder.is_absolute():
        raise FileNotFoundError("there is no such folder")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, _FILE)
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        found = config = None
    if isinstance(found, str):
        return Path(found)
    if not isinstance(config, str):
        raise FileNotFoundError("neither a folder here nor a model in the Hugging Face cache of this machine")
    return None


def _is_of_tokenizer(name: str) -> bool:
    return name.startswith(("tokenizer", "vocab", "merges", "spiece")) or name.endswith((".model", ".tiktoken"))


def escaped(text: str) -> str:
    """`text` with control and formatting characters (ESC, carriage return, changes of direction, ...) as escapes such
    as \\x1b. Line feeds stay."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" or each in _KEPT else repr(each)[1:-1] for each in text)


def one_line(text: str) -> str:
    """As `escaped`, with line feeds as \\n."""
    return escaped(text).replace("\n", "\\n")


def shortened(text: str, limit: int) -> tuple[str, int]:
    """`text` with at most `limit` of its characters (0: all), and how many were cut from its middle: the question is at
    the beginning, the answer at the end."""
    cut = len(text) - limit
    if limit <= 0 or cut <= 0:
        return text, 0
    head = (limit + 1) // 2
    return f"{text[:head]}...({cut} characters cut)...{text[head + cut :]}", cut
