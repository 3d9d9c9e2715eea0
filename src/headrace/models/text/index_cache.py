"""Keeps indexes of large tokenizers in the cache folder: finds one, or writes it after the tokenizer was loaded.

An index is named by a digest of all that it was made from, so a change of any file makes another. It may be deleted at
any time; that only costs time at the next start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from headrace.models.text.control_tokens import ControlTokens, encoding_of
from headrace.models.text.indexed_tokenizer import IndexedTokenizer, StoredTemplate, as_indexed
from headrace.models.text.prompt_pieces import PromptPieces
from headrace.models.text.text_encoder import TextEncoder, frame_of, own_frame, read_templates, read_tokenizer
from headrace.models.text.tokenizer_files import TokenizerFiles
from headrace.models.text.tokenizer_index import TokenizerIndex, is_supported, read_index, write_index
from headrace.version import __version__

if TYPE_CHECKING:
    import tokenizers

    from headrace.models.text.chat_template import ChatTemplate

_VERSION: Final = 1  # increase it when this package reads a tokenizer differently
_LEAST_BYTES: Final = 1 << 20  # of a file that is worth an index
_MOST_KEPT: Final = 16  # indexes; the oldest go first


class IndexPlace:
    """Where the index of some files is, or would be. Holds the files' content until the tokenizer is loaded, so that a
    file that changes later cannot give another tokenizer than the index."""

    def __init__(self, files: TokenizerFiles, vocab_size: int, data: bytes, cache: Path) -> None:
        self._files = files
        self._vocab_size = vocab_size
        self._data: bytes | None = data
        self._sources = files.templates()
        facts = (
            (_VERSION, __version__, vocab_size),
            (files.config, sorted(files.special_tokens.items())),
            sorted((name, source) for name, (source, _) in self._sources.items()),
        )
        digest = hashlib.sha256(json.dumps(facts).encode())  # which takes half of a surrogate pair, as JSON does
        digest.update(data)
        self.path = cache / "tokenizers" / f"{digest.hexdigest()[:40]}.index"

    @classmethod
    def of(cls, files: TokenizerFiles, vocab_size: int, cache: Path | None) -> IndexPlace | None:
        """Return the place of an index; None if these files have none. ModelError if they cannot be read."""
        if cache is None or not files.is_quick or not is_supported():
            return None
        data = files.read()
        return cls(files, vocab_size, data, cache) if len(data) >= _LEAST_BYTES else None

    def read(self) -> TokenizerIndex | None:
        return read_index(self.path)

    def write(self, encoder: TextEncoder, special: Iterable[int]) -> None:
        """Write the index, if it can stand in for the tokenizer and the cache folder can be written."""
        from headrace.models.text.index_facts import find_facts

        found = find_facts(
            self._content(),
            encoder.tokenizer,
            encoder.control,
            encoder.pieces,
            special=sorted(special),
            frame=own_frame(encoder.tokenizer),
            literals={name: sorted(template.literals) for name, template in encoder.templates.items()},
        )
        self._data = None
        if found is None:
            return
        with contextlib.suppress(OSError, UnicodeEncodeError):  # full or read-only; a template with half a pair
            write_index(self.path, *found)
            _drop_oldest(self.path.parent)

    def tokenizer(self, index: TokenizerIndex) -> IndexedTokenizer:
        """Return the tokenizer that loads the whole one once."""
        return IndexedTokenizer(index, self._read_tokenizer)

    def _read_tokenizer(self) -> tokenizers.Tokenizer:
        found = read_tokenizer(self._files._replace(read=self._content), self._vocab_size)
        self._data = None
        return found

    def _content(self) -> bytes:
        assert self._data is not None
        return self._data

    def encoder(self, index: TokenizerIndex, quick: IndexedTokenizer) -> TextEncoder:
        """Return an encoder that loads `tokenizers` and jinja when they are needed."""
        facts, files = index.facts, self._files._replace(templates=lambda: self._sources)

        def compiled(name: str) -> ChatTemplate:
            return read_templates(files)[name]

        templates = {
            name: StoredTemplate(source, facts.literals[name], lambda name=name: compiled(name))
            for name, (source, _) in self._sources.items()
        }
        tokenizer = cast("tokenizers.Tokenizer", quick)
        known = [(template.source, template.literals) for template in templates.values()]
        control = ControlTokens(tokenizer, known, normalises=facts.normalises)
        pieces = PromptPieces(tokenizer, control.ids, lambda text: encoding_of(tokenizer, text).ids, cuts=facts.cuts)
        frame = frame_of(files.config, quick, files.special_tokens)
        return TextEncoder(tokenizer, cast("Mapping[str, ChatTemplate]", templates), frame, control, pieces)


def load_whole(encoder: TextEncoder) -> None:
    """Load all that an encoder loads when it is needed. ModelError if that fails."""
    quick = as_indexed(encoder.tokenizer)
    if quick is not None:
        quick.whole()
    load_templates(encoder)


def load_templates(encoder: TextEncoder) -> None:
    """Compile the chat templates that are compiled when they are needed."""
    templates: Mapping[str, object] = encoder.templates
    for template in templates.values():
        if isinstance(template, StoredTemplate):
            template.compiled()


def _drop_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.index"), key=lambda path: path.stat().st_mtime)
    for path in files[:-_MOST_KEPT]:
        path.unlink(missing_ok=True)
