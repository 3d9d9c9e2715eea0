"""Adapters in a program: in one batch, in the prefix cache, with speculation and grammars, and in bounded memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.adapt.recipe import AdaptRecipe
from headrace.engine.executors.adapter_table import AdapterMemoryError
from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.image_rows import ImageRows
from headrace.errors import HeadraceError, RequestError
from headrace.llm import LLM, AsyncLLM
from headrace.models.model_folder import open_model
from tests.support.models.lora_folders import write_lora
from tests.support.models.tiny_vision import write_vision_model
from tests.support.running_server import asynchronous

PROMPT = tuple(range(5, 60))
OPTIONS: dict[str, Any] = {"threads": 1, "context": 256, "kv_tokens": 4096, "cache": False}


@pytest.fixture(scope="module")
def adapters(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, root = open_model(tiny_folder), tmp_path_factory.mktemp("adapters")
    kinds: list[dict[str, Any]] = [{}, {"use_dora": True}, {"targets": ("q_proj", "up_proj"), "rank": 3}]
    return {f"a{seed}": write_lora(folder, root / f"a{seed}", seed=seed, **kinds[seed % 3]) for seed in range(8)}


@pytest.mark.parametrize(("weights", "kv"), [("int8", "bf16"), ("int4", "int4"), ("bf16", "fp8"), ("int4-a16", "int8")])
def test_each_answer_is_that_of_its_adapter_alone(
    weights: str, kv: str, tiny_folder: Path, adapters: dict[str, Path]
) -> None:
    with LLM(tiny_folder, adapters=adapters, weights=weights, kv=kv, **OPTIONS | {"threads": 2}) as llm:
        names = ["", *adapters]
        alone = [llm.generate([PROMPT], adapter=name, max_tokens=12)[0].completions[0].tokens for name in names]
        assert len({tuple(tokens) for tokens in alone}) > 6
        requests = [llm._asking.generations([PROMPT], params(adapter=name, max_tokens=12))[0] for name in names]
        together = [answers[0].tokens for answers in llm._run(requests)]
        assert together == alone
        assert llm.stats()["adapters"]["loaded"] == len(adapters)
        assert llm.stats()["adapters"]["in_use"] == 0


def params(**given: Any) -> Any:
    from headrace.llm.prompting import params_of

    return params_of(**given)


def test_images_and_adapters_tell_answers_apart_together(tmp_path: Path) -> None:
    see = write_vision_model(tmp_path / "see")
    folder, start, count = open_model(see), 20, 16
    paths = {f"a{seed}": write_lora(folder, tmp_path / f"a{seed}", seed=seed) for seed in range(2)}

    def image(seed: int) -> ImageRows:
        rows = np.random.default_rng(seed).standard_normal((count, folder.spec.hidden_size)).astype("<f4")
        return ImageRows(start, count, hashlib.sha256(rows.tobytes()).digest(), rows.tobytes())

    with LLM(see, adapters=paths, **OPTIONS) as llm:
        requests = [
            replace(llm._asking.generations([PROMPT], params(adapter=name, max_tokens=8))[0], images=(image(seed),))
            for name in ("", *paths)
            for seed in (1, 2)
        ]
        first, again = (
            [answers[0] for answers in llm._run([replace(each, id=f"{turn}-{each.id}") for each in requests])]
            for turn in range(2)
        )
        assert len({tuple(answer.tokens) for answer in first}) == len(requests)
        assert [answer.tokens for answer in again] == [answer.tokens for answer in first]
        assert all(answer.ending is not None and answer.ending.usage.cached_tokens > start + count for answer in again)
    with LLM(see, adapters=paths, prefix_cache=False, **OPTIONS) as llm:
        assert [llm._run([each])[0][0].tokens for each in requests] == [answer.tokens for answer in first]


def test_kv_is_shared_by_one_adapter_alone(tiny_folder: Path, adapters: dict[str, Path]) -> None:
    with LLM(tiny_folder, adapters=adapters, **OPTIONS) as llm:

        def cached(name: str) -> int:
            return llm.generate([PROMPT], adapter=name, max_tokens=2)[0].completions[0].usage.cached_tokens

        assert [cached(""), cached("a0"), cached("a1")] == [0, 0, 0]
        assert cached("") > 40
        assert cached("a0") > 40
        assert cached("a1") > 40
        llm.pin(PROMPT)  # of the base alone
        assert cached("a2") == 0


def test_public_prefixes_are_not_shared_with_adapters(tiny_folder: Path, adapters: dict[str, Path]) -> None:
    with LLM(tiny_folder, adapters=adapters, public_prefixes=(PROMPT[:48],), **OPTIONS) as llm:
        base = llm.generate([PROMPT], tenant="red", max_tokens=8)[0]
        adapted = llm.generate([PROMPT], adapter="a0", tenant="blue", max_tokens=8)[0]
        assert adapted.completions[0].usage.cached_tokens == 0
        assert adapted.completions[0].tokens != base.completions[0].tokens


def test_kv_on_disk_is_found_by_its_adapter_alone(tiny_folder: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    tiers = {"kv_tokens": 256, "kv_memory_bytes": 1 << 26}
    with LLM(tiny_folder, adapters=adapters, **OPTIONS | tiers) as llm:
        whole = [tuple(range(start, start + 200)) for start in (10, 11, 12)]
        first = llm.generate([whole[0]], adapter="a0", max_tokens=4)[0].completions[0]
        for name, text in (("", whole[0]), ("a1", whole[0]), ("", whole[1])):  # each evicts the one before
            assert llm.generate([text], adapter=name, max_tokens=4)[0].completions[0].usage.cached_tokens == 0
        again = llm.generate([whole[0]], adapter="a0", max_tokens=4)[0].completions[0]
        assert again.tokens == first.tokens
        assert again.usage.cached_tokens > 150


def test_speculation_and_grammars_change_nothing_but_what_they_do_without_adapters(
    tiny_folder: Path, adapters: dict[str, Path]
) -> None:
    repeated = PROMPT[:8] * 6
    grammar = Grammar("regex", "[0-9]{3}")
    found: list[Any] = []
    for options in ({"speculation": "none"}, {"speculation": "ngram"}, drafting(tiny_folder)):
        with LLM(tiny_folder, adapters=adapters, **OPTIONS | options) as llm:
            tokens = [
                llm.generate([repeated], adapter=name, max_tokens=24)[0].completions[0].tokens for name in ("a0", "a1")
            ]
            texts = [llm.generate("Number", adapter=name, grammar=grammar)[0].text for name in ("a0", "a1")]
            assert all(text.isdigit() and len(text) == 3 for text in texts)
            found.append((tokens, texts))
    assert found[0] == found[1] == found[2]


def drafting(folder: Path) -> dict[str, Any]:
    return {"speculation": "model", "draft_model": str(folder)}


def test_unused_adapters_make_room_for_others(tiny_folder: Path, adapters: dict[str, Path]) -> None:
    with LLM(tiny_folder, adapters=adapters, **OPTIONS) as llm:
        first = llm.generate([PROMPT], adapter="a0", max_tokens=4)[0].text
        size = llm.stats()["adapters"]["bytes"]
    most = {"adapter_memory_bytes": int(size * 2.5)}
    with LLM(tiny_folder, adapters=adapters, **OPTIONS | most) as llm:
        for name in ("a0", "a3", "a6", "a0"):
            llm.generate([PROMPT], adapter=name, max_tokens=4)
        stats = llm.stats()["adapters"]
        assert (stats["loaded"], stats["evictions"], stats["loads"]) == (2, 2, 4)
        assert llm.generate([PROMPT], adapter="a0", max_tokens=4)[0].text == first
        stream = llm.stream(PROMPT, adapter="a0", max_tokens=4)
        next(stream)
        table = llm._engine.adapters
        assert table is not None
        assert llm.stats()["adapters"]["in_use"] == 1
        table.load(llm._asking.adapters["a3"]).result()  # evicts what is not in use
        assert table.has(llm._asking.adapters["a0"])
        table.hold(llm._asking.adapters["a3"])
        with pytest.raises(AdapterMemoryError, match="adapters in use fill"):
            table.load(llm._asking.adapters["a6"]).result()
        stream.close()
    with (
        LLM(tiny_folder, adapters=adapters, **OPTIONS | {"adapter_memory_bytes": 1000}) as llm,
        pytest.raises(HeadraceError, match="Raise it"),
    ):
        llm.generate([PROMPT], adapter="a0", max_tokens=4)


def test_a_hundred_adapters_are_registered(tiny_folder: Path, adapters: dict[str, Path]) -> None:
    many = {f"n{number}": adapters[f"a{number % 8}"] for number in range(100)}
    with LLM(tiny_folder, adapters=many, **OPTIONS) as llm:
        requests = [llm._asking.generations([PROMPT], params(adapter=name, max_tokens=3))[0] for name in many]
        tokens = [answers[0].tokens for answers in llm._run(requests)]
        assert tokens[:8] == tokens[8:16] == tokens[88:96]


def test_mistakes_are_found_before_anything_runs(tiny_folder: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match="no such adapter folder"):
        LLM(tiny_folder, adapters={"x": tmp_path / "nothing"}, **OPTIONS)
    own = write_lora(open_model(tiny_folder), tmp_path / "own", seed=1)
    with LLM(tiny_folder, adapters={"x": own}, **OPTIONS) as llm:
        with pytest.raises(RequestError, match=r"Unknown adapter 'y'\. Known: x"):
            llm.generate("a", adapter="y")
        write_lora(open_model(tiny_folder), own, seed=2)
        with pytest.raises(HeadraceError, match="are not those that it was registered with"):
            llm.generate("a", adapter="x")


@asynchronous
async def test_workers_load_what_a_request_names(tiny_folder: Path, adapters: dict[str, Path]) -> None:
    options = OPTIONS | {"adapters": adapters}
    with LLM(tiny_folder, **options) as llm:
        expected = {
            name: llm.generate([PROMPT], adapter=name, max_tokens=8)[0].completions[0].tokens
            for name in ("", "a0", "a1")
        }
    async with AsyncLLM(tiny_folder, replicas=2, **options) as llm:

        async def loaded() -> list[int]:
            return [each["adapters"]["loaded"] for each in await llm.client.stats()]

        for name, tokens in expected.items():
            answers = await llm.generate([PROMPT] * 6, adapter=name, max_tokens=8)
            assert [answer.completions[0].tokens for answer in answers] == [tokens] * 6
        for name in ("a0", "a1"):
            await llm.client.load_adapter(llm._asking.adapters[name])
        assert await loaded() == [2, 2]
        llm.client.drop_adapter(llm._asking.adapters["a0"].digest)
        assert await loaded() == [1, 1]
        missing = replace(llm._asking.adapters["a0"], path=str(tiny_folder / "none"))
        with pytest.raises(RequestError, match="no such adapter folder"):
            await llm.client.load_adapter(missing)
        with pytest.raises(RequestError, match="are not those that it was registered with"):
            await llm.client.load_adapter(replace(llm._asking.adapters["a0"], digest="0" * 64))


def test_what_adapt_writes_is_served(tiny_folder: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from headrace.adapt.decoder import Decoder
    from headrace.adapt.model_output import write_adapter
    from headrace.engine.executors.runner import logits

    folder, recipe = open_model(tiny_folder), AdaptRecipe(rank=3, alpha=6.0)
    student = Decoder(folder, recipe)
    generator = torch.Generator().manual_seed(1)
    for values in student.trained.values():
        with torch.no_grad():
            values.copy_(torch.randn(values.shape, generator=generator) * 0.1)
    write_adapter(folder, student, recipe, tmp_path / "trained", base="tiny")
    with torch.no_grad():
        states = student.hidden(torch.tensor([PROMPT]), torch.arange(len(PROMPT)))
        expected = int(student.logits(states)[-1].argmax())
    with LLM(tiny_folder, adapters={"trained": tmp_path / "trained"}, weights="f32", **OPTIONS) as llm:
        base = int(logits(llm.opened.executor, [PROMPT])[0][-1].argmax())
        assert llm.generate([PROMPT], adapter="trained", max_tokens=1)[0].completions[0].tokens == [expected]
        assert base != expected
