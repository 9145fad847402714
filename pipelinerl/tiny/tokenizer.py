"""The tiny model's tokenizer: whole phrases and whole numbers of the guessing game as tokens, bytes for the rest.

Short prompts (16 to 28 tokens) make the warm-up and training quick on a CPU. Any other text is spelled in bytes, so
every text decodes to itself in Unicode's composed form (NFC).
"""

import re

from tokenizers import AddedToken, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from pipelinerl.domains.guessing import SYSTEM_PROMPT, WRONG_OUTPUT, feedback, format_answer, instruction

END_TOKEN = "<|end|>"
PAD_TOKEN = "<|pad|>"
UNK_TOKEN = "<|unk|>"
ROLES = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "<|{{ message['role'] }}|>{{ message['content'] or '' }}" + END_TOKEN + "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def build_tokenizer(max_number: int) -> PreTrainedTokenizerFast:
    """Return a fast tokenizer whose vocabulary has the game's phrases, the numbers ``0..max_number`` and all bytes.

    It has a chat template, and end, padding and unknown tokens. ``<|end|>`` ends every message, and generation.
    """
    phrases = _phrases()
    special = [PAD_TOKEN, UNK_TOKEN, END_TOKEN, *(f"<|{role}|>" for role in ROLES)]
    vocabulary: dict[str, int] = {}
    for token in special:
        vocabulary.setdefault(token, len(vocabulary))
    for byte_symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary.setdefault(byte_symbol, len(vocabulary))
    # One byte is in the vocabulary already.
    whole = [text for text in (*phrases, *(str(number) for number in range(max_number + 1))) if len(text) > 1]
    for text in whole:
        vocabulary.setdefault(text, len(vocabulary))

    # Other programs read only vocabulary and added tokens of a Qwen2 model, and take its own rules for the rest: so
    # these are its rules, without merges, and what they must not cut is an added token.
    backend = Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token=UNK_TOKEN, eos_token=END_TOKEN, pad_token=PAD_TOKEN)
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in special], special_tokens=True)
    backend.add_tokens([AddedToken(text, normalized=False) for text in whole])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend.backend_tokenizer,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        unk_token=UNK_TOKEN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=1024,
    )


def number_token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[int, int]:
    """Return token id by number, for every whole number in the vocabulary."""
    return {int(token): index for token, index in tokenizer.get_vocab().items() if re.fullmatch("[0-9]+", token)}


def _phrases() -> list[str]:
    """Cut the game's texts at their numbers; what lies between is a phrase, with its line break where there is one."""
    texts = [
        SYSTEM_PROMPT,
        WRONG_OUTPUT,
        instruction(1, 2),
        feedback([2, 2], answer=1),
        feedback([1, 1], answer=2),
        format_answer(1),
        "\n",
    ]
    pieces = [piece for text in texts for piece in re.split("[0-9]+", text) if piece]
    return list(dict.fromkeys(pieces))
