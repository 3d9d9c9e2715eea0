"""Makes a working byte-level BPE tokenizer of any vocabulary size from a word list instead of a corpus.

Writes the merges, tokenizer.json, tokenizer_config.json and the chat template. The merges are a prefix of one endless
list, so every size is a prefix of the next:

    trained BPE merges of the word list | numbers of two and three digits | compounds of a word and an ending

BPE really produces every merged token when it meets the token's text. Does not know model weights.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import count, islice, pairwise, product
from typing import Any

from headrace.models.synthetic.public_shapes import PLAIN_MARKS, PublicShape, TurnMarkers
from headrace.models.synthetic.word_list import FUNCTION_WORDS, PREFIXES, SUFFIXES, inflected

MergePair = tuple[str, str]

SPACE = "\u0120"  # a space in the byte-level alphabet
NEWLINE = "\u010a"

# A word with the space or sign before it; up to three digits; signs; line ends; other space.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

OTHER_PIECES = {
    NEWLINE * 2: 4000,
    SPACE * 2: 900,
    SPACE * 4: 800,
    SPACE * 8: 600,
    SPACE * 3: 500,
    SPACE * 7: 300,
    "'s": 900,
    "'t": 300,
    "'re": 60,
    "'ve": 60,
    "'ll": 60,
    "'m": 60,
    "'d": 60,
    "." + NEWLINE: 900,
    "." + NEWLINE * 2: 900,
    ":" + NEWLINE: 200,
    "..": 60,
    "...": 120,
    '."': 200,
    ',"': 200,
    "),": 120,
    ").": 120,
    "()": 100,
    "--": 60,
    "==": 60,
    '":': 60,
    '",': 60,
    "](": 30,
    "</": 60,
    "//": 60,
    "://": 60,
    SPACE + "(": 400,
    SPACE + '"': 500,
    SPACE + "=": 200,
    SPACE + "-": 300,
    SPACE + "{": 60,
}


@cache
def byte_alphabet() -> tuple[str, ...]:
    """Return the printable character for each byte value in a byte-level tokenizer."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = count(0x100)
    return tuple(chr(byte) if byte in printable else chr(next(spare)) for byte in range(256))


@cache
def byte_tokens() -> tuple[str, ...]:
    """Return the alphabet in id order: printable characters first."""
    return tuple(sorted(byte_alphabet()))


@cache
def pieces() -> dict[str, int]:
    """Return the training data of BPE: pieces as the word pattern splits them, with counts."""
    counted: defaultdict[str, int] = defaultdict(int, OTHER_PIECES)
    for word, times in inflected():
        counted[SPACE + word] += times
        counted[SPACE + word.capitalize()] += times // 12
        counted[word] += times // 20
        counted[word.capitalize()] += times // 25
    for word in FUNCTION_WORDS[:40]:
        counted[SPACE + word.upper()] += 8
    for suffix in SUFFIXES:
        counted[suffix] += 120
    for prefix in PREFIXES:
        counted[SPACE + prefix] += 60
        counted[prefix] += 30
    for first in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz":
        counted[SPACE + first] += 60
    return {piece: times for piece, times in counted.items() if times > 0}


def train(counted: dict[str, int]) -> list[MergePair]:
    """Run BPE: merge the most frequent neighbours, ties by text, until every piece is one token."""
    texts = [list(piece) for piece in counted]
    times = list(counted.values())
    frequency: defaultdict[MergePair, int] = defaultdict(int)
    places: defaultdict[MergePair, set[int]] = defaultdict(set)
    for index, text in enumerate(texts):
        for pair in pairwise(text):
            frequency[pair] += times[index]
            places[pair].add(index)
    heap = [(-total, pair) for pair, total in frequency.items()]
    heapq.heapify(heap)
    merges: list[MergePair] = []
    while heap:
        total, pair = heapq.heappop(heap)
        if -total != frequency[pair] or not total:
            continue  # an outdated entry
        merges.append(pair)
        changed: set[MergePair] = set()
        for index in places.pop(pair):
            before = texts[index]
            after = merged(before, pair)
            if len(after) == len(before):
                continue
            texts[index] = after
            for old in pairwise(before):
                frequency[old] -= times[index]
                changed.add(old)
            for new in pairwise(after):
                frequency[new] += times[index]
                places[new].add(index)
                changed.add(new)
        for other in changed:
            if frequency[other] > 0:
                heapq.heappush(heap, (-frequency[other], other))
    return merges


def merged(text: list[str], pair: MergePair) -> list[str]:
    left, right = pair
    result: list[str] = []
    index = 0
    while index < len(text):
        if text[index] == left and index + 1 < len(text) and text[index + 1] == right:
            result.append(left + right)
            index += 2
        else:
            result.append(text[index])
            index += 1
    return result


def number_merges() -> Iterator[MergePair]:
    digits = "0123456789"
    yield from product(digits, digits)
    for a, b, c in product(digits, digits, digits):
        # BPE merges the earlier pair of the list, the left one of two equals, and then the remaining digit.
        yield (a + b, c) if a + b <= b + c else (a, b + c)


class Boundaries:
    """Decides whether BPE with the trained merges keeps the boundary between two tokens."""

    def __init__(self, merges: list[MergePair]) -> None:
        first = len(byte_tokens())
        self.ids = {token: index for index, token in enumerate(byte_tokens())}
        self.parts = [(index, index) for index in range(first)]
        self.ranks: dict[tuple[int, int], int] = {}
        for left, right in merges:
            pair = self.ids[left], self.ids[right]
            token = self.ids.setdefault(left + right, len(self.parts))
            if token == len(self.parts):
                self.parts.append(pair)
            self.ranks[pair] = token

    def stays(self, left: int, right: int) -> bool:
        """Undo merges around the boundary, latest first, and look for one that BPE would make across it."""
        limit = len(self.parts) + 1
        while True:
            if self.ranks.get((left, right), limit) < limit:
                return False
            if left > right:
                limit, left = left, self.parts[left][1]
                if left == limit:
                    limit, right = right + 1, self.parts[right][0]
                    if right + 1 == limit:
                        return True
            else:
                limit, right = right + 1, self.parts[right][0]
                if right + 1 == limit:
                    limit, left = left, self.parts[left][1]
                    if left == limit:
                        return True


def compound_merges(trained: list[MergePair], taken: set[str]) -> Iterator[MergePair]:
    """Yield words with an ending or a second word, without limit, if BPE would produce them."""
    boundaries = Boundaries(trained)
    known = boundaries.ids
    plain = [word for word in dict.fromkeys(word for word, _ in inflected()) if word.isalpha()]
    words = [SPACE + word for word in plain if len(word) > 2 and SPACE + word in known]
    endings = [end for end in dict.fromkeys([*SUFFIXES, *plain]) if len(end) < 8 and end in known]
    for ending, word in product(endings, words):
        text = word + ending
        if text not in taken and boundaries.stays(known[word], known[ending]):
            taken.add(text)
            yield word, ending


@cache
def trained_merges() -> tuple[MergePair, ...]:
    return tuple(train(pieces()))


def all_merges() -> Iterator[MergePair]:
    trained = list(trained_merges())
    taken = {*byte_tokens(), *(left + right for left, right in trained)}
    for pair in (*trained, *number_merges()):
        taken.add(pair[0] + pair[1])
        yield pair
    yield from compound_merges(trained, taken)


def vocabulary(shape: PublicShape) -> tuple[dict[str, int], list[MergePair]]:
    """Return a token for every id: special tokens at the public model's ids, ours in the gaps. And the merges."""
    special = set(shape.tokens.values())
    free = (token for token in range(shape.vocab_size) if token not in special)
    merges = list(islice(all_merges(), shape.vocab_size - len(special) - len(byte_tokens())))
    ordinary = [*byte_tokens(), *(left + right for left, right in merges)]
    tokens = shape.tokens | dict(zip(ordinary, free, strict=True))
    return dict(sorted(tokens.items(), key=lambda item: item[1])), merges


def added_token(text: str, token: int) -> dict[str, Any]:
    return {
        "id": token,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": text not in PLAIN_MARKS,
    }


def template_of(shape: PublicShape) -> dict[str, Any] | None:
    """Return the post-processor that puts the first and last token around one text or each of two."""
    around = [name for name in (shape.begin, shape.finish) if name is not None]
    if not around:
        return None

    def special(name: str | None, part: int) -> list[dict[str, Any]]:
        return [] if name is None else [{"SpecialToken": {"id": name, "type_id": part}}]

    def text(name: str, part: int) -> list[dict[str, Any]]:
        return [{"Sequence": {"id": name, "type_id": part}}]

    first = special(shape.begin, 0) + text("A", 0) + special(shape.finish, 0)
    # An encoder's second text has only the end token, a decoder's only the begin token.
    second = ([] if shape.finish else special(shape.begin, 1)) + text("B", 1) + special(shape.finish, 1)
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {name: {"id": name, "ids": [shape.tokens[name]], "tokens": [name]} for name in around},
    }


def normaliser_of(shape: PublicShape) -> dict[str, Any] | None:
    """Return none for a decoder: GGUF has no name for this division into words after a normaliser."""
    if not shape.lower_case:
        return None
    return {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    }


def tokenizer_json(shape: PublicShape) -> dict[str, Any]:
    tokens, merges = vocabulary(shape)
    byte_level = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    cut = {"type": "Split", "pattern": {"Regex": WORD_PATTERN}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(text, token) for text, token in sorted(shape.tokens.items(), key=lambda i: i[1])],
        "normalizer": normaliser_of(shape),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, {"type": "ByteLevel"} | byte_level]},
        "post_processor": template_of(shape),
        "decoder": {"type": "ByteLevel"} | byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": tokens,
            "merges": merges,
        },
    }


CHAT_TEMPLATE = r"""
{%- macro say(content) -%}
{%- if content is string %}{{ content }}
{%- elif content %}{% for part in content if part.type == 'text' %}{{ part.text }}{% endfor %}
{%- endif %}
{%- endmacro -%}
BEGIN
{%- set first = 1 if messages and messages[0].role == 'system' else 0 %}
{%- if first or tools %}
{{- START + 'system' + MIDDLE }}
{%- if first %}{{- say(messages[0].content) }}{% endif %}
{%- if first and tools %}{{- '\n\n' }}{% endif %}
{%- if tools %}
{{- 'You may call these tools; each line describes one:\n' }}
{%- for tool in tools %}{{- tool | tojson + '\n' }}{% endfor %}
{{- 'To call one, write its name and arguments as JSON:\n<tool_call>\n' }}
{{- '{"name": "...", "arguments": {}}\n</tool_call>' }}
{%- endif %}
{{- END }}
{%- endif %}
{%- for message in messages[first:] %}
{{- START + message.role + MIDDLE + say(message.content) }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{%- set arguments = function.arguments if function.arguments is string else function.arguments | tojson %}
{{- '\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\n{"name": ' + function.name | tojson + ', "arguments": ' + arguments + '}\n</tool_call>' }}
{%- endfor %}
{{- END }}
{%- endfor %}
{%- if add_generation_prompt %}{{- START + 'assistant' + MIDDLE }}{% endif %}
""".strip()


def chat_template(turn: TurnMarkers, begin: str | None) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\n", "\\n") + "'"

    marks = {"START": turn.start, "MIDDLE": turn.middle, "END": turn.end}
    template = CHAT_TEMPLATE
    for name, mark in marks.items():
        template = template.replace(name, quoted(mark))
    return template.replace("BEGIN\n", "" if begin is None else "{{- bos_token }}\n")


def tokenizer_config(shape: PublicShape) -> dict[str, Any]:
    encoder = shape.turn is None
    roles = {
        "bos_token": None if encoder else shape.begin,
        "eos_token": shape.end_of_text[0] if shape.end_of_text else None,
        "pad_token": shape.pad,
        "unk_token": shape.unknown,
        "cls_token": shape.begin if encoder else None,
        "sep_token": shape.finish if encoder else None,
        "mask_token": shape.mask,
    }
    inputs = ["input_ids", "token_type_ids", "attention_mask"] if encoder else ["input_ids", "attention_mask"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": inputs,
        "model_max_length": shape.config["max_position_embeddings"],
    } | {role: token for role, token in roles.items() if token is not None}
    if shape.turn is not None:
        config["chat_template"] = chat_template(shape.turn, shape.begin)
    return config
