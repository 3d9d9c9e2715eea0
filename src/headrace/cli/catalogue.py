"""`headrace catalogue`: writes the texts of a catalogue ahead, on the batch surface, and approves them.

The key is read from OPENAI_API_KEY. Exit codes: 2 for a wrong file or a request that the server rejects, 1 if it cannot
be reached.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from cyclopts import App, Parameter

from headrace.cli.admin.admin_client import printable, request_json
from headrace.cli.output_path import check_output_folder
from headrace.errors import RequestError
from headrace.gateway.caches.catalogues.catalogue_file import (
    CatalogueText,
    read_texts,
    version_of,
    write_texts,
)
from headrace.gateway.caches.catalogues.catalogue_source import (
    CatalogueSource,
    PlannedText,
    kept_texts,
    plan_texts,
    read_source,
)

_SHOWN: Final = 100  # characters of a text in a list

catalogue = App(name="catalogue", help="Write texts for known questions ahead, and approve them.", version_flags=[])


@catalogue.command
def build(
    source: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    concurrency: Annotated[int, Parameter(name=["--concurrency", "-c"])] = 4,
    url: Annotated[str, Parameter(env_var="HEADRACE_URL")] = "http://localhost:8000",
) -> None:
    """Have a model write the texts that are new or whose prompt has changed. Approved texts stay approved.

    Parameters
    ----------
    source
        TOML file with questions, prompts, slots and fixed texts.
    output
        File of the catalogue (JSONL), which catalogues.NAME.file names.
    concurrency
        Texts that are written at once, on the surface batch.
    url
        URL of the server. Default: $HEADRACE_URL, else http://localhost:8000.
    """
    if not 1 <= concurrency <= 64:
        raise RequestError(f"Invalid --concurrency {concurrency}. Expected 1 to 64.")
    check_output_folder(output, "output")
    wanted = read_source(source)
    planned = plan_texts(wanted)
    former = read_texts(output) if output.exists() else []
    done = kept_texts(planned, former)
    missing = [each for each in planned if each.text.name not in done]
    done |= {each.text.name: each.text for each in missing if not each.prompt}

    def write(each: PlannedText) -> CatalogueText:
        return _written(each, wanted, url)

    try:
        with ThreadPoolExecutor(concurrency) as pool:
            for text in pool.map(write, [each for each in missing if each.prompt]):
                done[text.name] = text
    finally:  # what was written before an error is kept
        write_texts(output, [done[each.text.name] for each in planned if each.text.name in done])
    texts = [done[each.text.name] for each in planned]
    cut = sum(text.ending != "stop" for text in texts)
    waiting = sum(not text.approved for text in texts)
    print(f"{output}: {len(texts)} texts, {len(missing)} new, {waiting} to be approved")
    if cut:
        print(f"{cut} were cut at max_tokens: raise it in {source}, or write them shorter.")


def _written(planned: PlannedText, source: CatalogueSource, url: str) -> CatalogueText:
    messages = [{"role": "system", "content": source.system}] if source.system else []
    body: dict[str, Any] = {
        "messages": [*messages, {"role": "user", "content": planned.prompt}],
        "max_tokens": source.max_tokens,
        "temperature": 0,
        "surface": "batch",
        "cache": "off",  # no former answer, and not this catalogue's own
    }
    if source.model:
        body["model"] = source.model
    key = "OPENAI_API_KEY"
    answer = request_json(url, "POST", "chat/completions", body, root="/v1/", key_variable=key)
    choice = answer["choices"][0]
    times: dict[str, float] = answer.get("headrace") or {}
    return msgspec.structs.replace(
        planned.text,
        text=(choice["message"]["content"] or "").strip(),
        model=answer["model"],
        output_tokens=answer["usage"]["completion_tokens"],
        machine_s=round((times.get("prefill_ms", 0.0) + times.get("decode_ms", 0.0)) / 1e3, 6),
        ending=choice["finish_reason"],
    )


@catalogue.command(name="list")
def list_texts(
    file: Path,
    /,
    *,
    pending: Annotated[bool, Parameter(negative=())] = False,
    full: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Print the texts of a catalogue.

    Parameters
    ----------
    file
        File of the catalogue.
    pending
        Print only those that are not approved.
    full
        Print whole texts.
    """
    texts = read_texts(file)
    for each in texts:
        if pending and each.approved:
            continue
        state = "approved" if each.approved else "pending"
        text = each.text if full or len(each.text) <= _SHOWN else each.text[:_SHOWN] + "…"
        print(printable(f"{each.name} ({state}{'' if each.ending == 'stop' else ', ' + each.ending})"))
        for question in each.questions:
            print(printable(f"  ? {question}"))
        print(printable(f"  {' '.join(text.split())}"))
    approved = sum(each.approved for each in texts)
    print(f"{len(texts)} texts, {approved} approved, version {version_of(texts)}")


@catalogue.command
def approve(
    file: Path,
    /,
    *names: str,
    all: Annotated[bool, Parameter(negative=())] = False,
    undo: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Approve texts, so that a server answers with them. Texts that were cut need their name.

    Parameters
    ----------
    file
        File of the catalogue.
    names
        Names of texts, or of entries with all their slots' values.
    all
        Approve all texts that were not cut.
    undo
        Take the approval back.
    """
    texts = read_texts(file)
    if all == bool(names):
        raise RequestError("Pass the names of texts, or --all.")
    known = {name for each in texts for name in (each.name, each.name.partition("[")[0])}
    if unknown := [name for name in names if name not in known]:
        raise RequestError(f"{file} has no text '{unknown[0]}'. See headrace catalogue list {file}.")

    def is_meant(each: CatalogueText) -> bool:
        if names:
            return each.name in names or each.name.partition("[")[0] in names
        return undo or each.ending == "stop"

    changed = [msgspec.structs.replace(each, approved=not undo) if is_meant(each) else each for each in texts]
    write_texts(file, changed)
    print(
        f"{sum(each.approved for each in changed)} of {len(changed)} texts are approved, version {version_of(changed)}"
    )
