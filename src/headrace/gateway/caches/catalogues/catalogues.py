"""Catalogues: answers known questions with approved texts, before a model is asked.

Answers only what a text can answer whole: one question, without images, tools, sources or a fixed format. Reads files
again when they change; a file that cannot be read leaves the former texts in place. Writes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from headrace.config.catalogue_section import CatalogueConfig
from headrace.gateway.caches.catalogues.catalogue_file import CatalogueError, CatalogueText, read_texts, version_of
from headrace.gateway.caches.catalogues.question_table import Found, QuestionTable, slot_problem
from headrace.gateway.images.message_images import images_of
from headrace.gateway.requests.text_request import TextRequest

log: Final = logging.getLogger(__name__)

_LOOK_S: Final = 1.0


class CatalogueHit(NamedTuple):
    catalogue: str
    version: str
    found: Found


class _Catalogue:
    def __init__(self, name: str, config: CatalogueConfig) -> None:
        self.name = name
        self.config = config
        self.table = QuestionTable((), is_folded=True)
        self.version = ""
        self._seen: tuple[int, int] | None = None

    def load(self) -> None:
        """Read the file if it is new. Runs in a thread."""
        path = self.config.path
        if (stamp := _stamp(path)) == self._seen:
            return
        self._seen = stamp
        if stamp is None:
            log.warning("the catalogue %s has no file %s yet", self.name, path)
            return
        try:
            texts = [text for text in read_texts(path) if not self._is_wrong(text)]
        except CatalogueError as error:
            log.error("the catalogue %s keeps its former texts: %s", self.name, error)
            return
        self.table, self.version = QuestionTable(texts, is_folded=self.config.match == "folded"), version_of(texts)
        log.info("the catalogue %s answers %d questions, version %s", self.name, len(self.table), self.version)

    def _is_wrong(self, text: CatalogueText) -> bool:
        if problem := slot_problem(text):
            log.error("the catalogue %s skips '%s': %s", self.name, text.name, problem)
        return bool(problem)

    def covers(self, tenant: str, variant: str, surface: str) -> bool:
        config = self.config
        if config.models and variant not in config.models and variant.partition("@")[0] not in config.models:
            return False
        return (not config.tenants or (tenant or "-") in config.tenants) and (
            not config.surfaces or surface in config.surfaces
        )


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


class Catalogues:
    """All of it belongs to one event loop."""

    def __init__(self, catalogues: Mapping[str, CatalogueConfig]) -> None:
        self._catalogues = [_Catalogue(name, config) for name, config in catalogues.items()]
        for each in self._catalogues:
            each.load()

    async def run(self) -> None:
        """Read files that have changed until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for each in self._catalogues:
                await asyncio.to_thread(each.load)

    def find(self, text_request: TextRequest, *, tenant: str, variant: str, surface: str) -> CatalogueHit | None:
        """Return the text for a request. `text_request`: as the client sent it."""
        if not _can_be_answered(text_request):
            return None
        *before, last = text_request.messages or ({},)
        question = last.get("content")
        if last.get("role") != "user" or not isinstance(question, str):
            return None
        if any(each.get("role") not in ("system", "developer") for each in before):
            return None
        for each in self._catalogues:
            if (before and each.config.system == "none") or not each.covers(tenant, variant, surface):
                continue
            found = each.table.find(question)
            if found is not None and found.text.output_tokens <= (text_request.max_tokens or found.text.output_tokens):
                return CatalogueHit(each.name, each.version, found)
        return None


def _can_be_answered(text_request: TextRequest) -> bool:
    sampling = text_request.sampling
    return not (
        text_request.messages is None
        or images_of(text_request.messages)
        or text_request.tools
        or text_request.sources
        or text_request.grammar is not None
        or text_request.n > 1
        or text_request.stop
        or text_request.stop_ids
        or text_request.min_tokens
        or text_request.begun
        or text_request.prompt_logprobs is not None
        or sampling.logprobs is not None
        or text_request.cache == "off"
    )
