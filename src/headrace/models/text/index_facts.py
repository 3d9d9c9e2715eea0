"""Finds out what a TokenizerIndex says of a tokenizer: with its file, the tokenizer itself, and its chat templates.

Returns None for a tokenizer that QuickEncoder could not stand in for: only byte-level BPE with a known pre-tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from headrace.models.text.bpe_file import BpeModel, read_merges
from headrace.models.text.detokenizer import byte_of_character, read_decoder
from headrace.models.text.quick_encoder import QuickEncoder
from headrace.models.text.text_splits import read_splits
from headrace.models.text.token_table import AddedTokenEntry
from headrace.models.text.tokenizer_index import IndexArrays, IndexFacts, ordered_pairs

if TYPE_CHECKING:
    import tokenizers

    from headrace.models.text.control_tokens import ControlTokens
    from headrace.models.text.prompt_pieces import PromptPieces

# An index whose encoder reads any of these differently is not written.
_SAMPLES: Final = (
    "The water ran through the mill's wheel, and 12345 sacks of flour weren't enough.",
    "  two  spaces\n\n\ttab\r\n  end  ",
    "naïve café — 中文字 русский हिन्दी ١٢٣ 😀👩‍👩‍👧 ½ ² ǅ",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 2]}  # don't\n",
    "<html lang='en'>&nbsp;\u00a0\u2003\u3000\u2028</html>",
)


class _Nfc(msgspec.Struct, tag_field="type", tag="NFC", forbid_unknown_fields=True):
    pass


class _File(msgspec.Struct):
    model: BpeModel
    pre_tokenizer: msgspec.Raw
    normalizer: _Nfc | None = None
    decoder: msgspec.Raw = msgspec.Raw(b"null")


def find_facts(
    data: bytes,
    tokenizer: tokenizers.Tokenizer,
    control: ControlTokens,
    pieces: PromptPieces,
    *,
    special: Sequence[int],
    frame: tuple[list[int], list[int]],
    literals: Mapping[str, Sequence[str]],
) -> tuple[IndexFacts, IndexArrays] | None:
    """`data` is the tokenizer.json, `special` the special tokens, `frame` the tokens around a text, and `literals` are
    those of each chat template."""
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    merges = _merges(file.model)
    byte_tokens = _byte_tokens(file.model.vocab)
    added = _added(tokenizer)
    if merges is None or byte_tokens is None or added is None or read_splits(bytes(file.pre_tokenizer)) is None:
        return None
    if read_decoder(bytes(file.decoder)).form != "bytes":
        return None
    vocab = tokenizer.get_vocab()
    texts = {id: text for text, id in vocab.items()}
    if len(texts) != len(vocab) or "" in vocab:
        return None
    facts = IndexFacts(
        tokens=max(texts) + 1,
        named=len(texts),
        merges=len(merges),
        pre_tokenizer=bytes(file.pre_tokenizer),
        decoder=bytes(file.decoder),
        whole_words=file.model.ignore_merges,
        composes=file.normalizer is not None,
        byte_tokens=byte_tokens,
        added=added,
        special=sorted(special),
        frame=frame,
        literals={name: sorted(each) for name, each in literals.items()},
        normalises=control.normalises,
        cuts=pieces.can_cut,
        longest_piece=max(map(len, vocab)),
    )
    return (facts, IndexArrays(texts, merges)) if _agrees(facts, merges, vocab, tokenizer) else None


def _merges(model: BpeModel) -> list[tuple[int, int, int]] | None:
    if model.unk_token is not None or model.byte_fallback or model.fuse_unk:
        return None
    if model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    pairs = read_merges(model.merges)
    if pairs is None or len(set(pairs)) != len(pairs):
        return None
    vocab = model.vocab
    try:
        return [(vocab[left], vocab[right], vocab[left + right]) for left, right in pairs]
    except KeyError:
        return None


def _byte_tokens(vocab: Mapping[str, int]) -> list[int] | None:
    try:
        return [vocab[character] for character, _ in sorted(byte_of_character().items(), key=lambda item: item[1])]
    except KeyError:
        return None


def _added(tokenizer: tokenizers.Tokenizer) -> list[AddedTokenEntry] | None:
    found = [
        AddedTokenEntry(
            id=id,
            content=token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=token.special,
        )
        for id, token in sorted(tokenizer.get_added_tokens_decoder().items())
    ]
    # A normalised token that is not ASCII might be searched in another form.
    odd = (
        each.single_word or each.lstrip or each.rstrip or not (each.content.isascii() or not each.normalized)
        for each in found
    )
    return None if any(odd) or any(not each.content for each in found) else found


def _agrees(
    facts: IndexFacts, merges: Sequence[tuple[int, int, int]], vocab: Mapping[str, int], tokenizer: Any
) -> bool:
    ordered = ordered_pairs(merges)
    splits = read_splits(facts.pre_tokenizer)
    assert splits is not None
    quick = QuickEncoder(
        splits,
        {each.id: each for each in facts.added},
        facts.byte_tokens,
        [pair for pair, _ in ordered],
        [merged for _, merged in ordered],
        composes=facts.composes,
        find_word=vocab.get if facts.whole_words else None,
    )
    samples = [*_SAMPLES, *(f"a {each.content}b {each.content}\n" for each in facts.added)]
    return all(quick.encode(text) in (None, tokenizer.encode(text, add_special_tokens=False).ids) for text in samples)
