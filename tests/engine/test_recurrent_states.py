"""Models with recurrent layers in the engine: the same tokens whatever is reused, preempted or beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.engine.engine import Engine
from headrace.engine.interface.request import FinishReason, GenerationRequest
from headrace.engine.interface.sampling import SamplingParams
from headrace.engine.process.open_engine import open_variant
from headrace.engine.speculation.drafters import ReplayDrafter
from headrace.engine.speculation.speculator import DraftLength, Speculator
from headrace.errors import RequestError
from headrace.variant import Variant
from tests.models.tiny_models import build, prompt

NAMES = ("lfm2", "mamba2", "qwen3-next", "falcon-h1")

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    built: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in built:
            built[name] = tmp_path_factory.mktemp(name)
            build(name, built[name])
        return built[name]

    return get


def engine_of(path: Path, **options: object) -> Engine:
    given = {"weights": "int8", "kv": "bf16", "threads": 1, "context": 512, "cache": False, "checks": True}
    return open_variant(Variant.of(str(path), **{**given, **options})).engine


def request(name: str, tokens: list[int], *, count: int = 24, n: int = 1) -> GenerationRequest:
    sampling = SamplingParams(temperature=1.0, seed=3) if n > 1 else SamplingParams()
    return GenerationRequest(id=name, prompt=tuple(tokens), max_tokens=count, n=n, sampling=sampling)


def run(engine: Engine, *requests: GenerationRequest) -> tuple[dict[tuple[str, int], list[int]], dict[str, int]]:
    """Return the tokens of every sequence, and how many of each request's prompt were found in the cache."""
    for each in requests:
        assert engine.submit(each).accepted
    tokens: dict[tuple[str, int], list[int]] = {}
    cached: dict[str, int] = {}
    while not engine.idle:
        for output in engine.step():
            tokens.setdefault((output.request, output.index), []).extend(output.tokens)
            if output.ending is not None:
                assert output.ending.finish is FinishReason.LENGTH, output.ending
                cached[output.request] = output.ending.usage.cached_tokens
    engine.blocks.check()
    return tokens, cached


@pytest.mark.parametrize(("name", "kv"), [*zip(NAMES, ("fp8", "bf16", "int4", "int8"), strict=True)])
def test_reused_states_change_no_token(name: str, kv: str, folder: Folder) -> None:
    fresh = engine_of(folder(name), kv=kv, prefix_cache=False)
    engine = engine_of(folder(name), kv=kv)
    tokens = prompt(150)
    first, found = run(engine, request("a", tokens))
    assert found == {"a": 0}
    assert first == run(fresh, request("a", tokens))[0]
    # the same prompt, a conversation that goes on, and one that leaves it early
    longer = [*tokens, *first["a", 0], *prompt(20)]
    branch = [*tokens[:100], *prompt(30)]
    for again, least in ((tokens, 144), (longer, 160), (branch, 0)):
        output, found = run(engine, request("b", again))
        assert found["b"] >= least
        assert output == run(fresh, request("b", again))[0]


@pytest.mark.parametrize("name", NAMES)
def test_company_chunks_and_preemption_change_no_token(name: str, folder: Folder) -> None:
    requests = [request(str(length), prompt(length), count=60) for length in (5, 17, 90, 200)]
    alone = engine_of(folder(name), prefix_cache=False)
    expected = {key: found for each in requests for key, found in run(alone, each)[0].items()}
    crowded = engine_of(folder(name), kv_tokens=512, context=320, max_rows=48)
    assert run(crowded, *requests)[0] == expected
    assert crowded.scheduler.stats().preempted


def test_several_answers_to_one_prompt(folder: Folder) -> None:
    engine = engine_of(folder("lfm2"))
    output, _ = run(engine, request("a", prompt(40), n=3))
    fresh, _ = run(engine_of(folder("lfm2"), prefix_cache=False), request("a", prompt(40), n=3))
    assert output == fresh
    assert len({tuple(tokens) for tokens in output.values()}) == 3


@pytest.mark.parametrize(
    ("option", "value"),
    [("kv_memory_bytes", 1 << 20), ("saved_prefixes", "prefixes"), ("speculation", "self")],
)
def test_options_that_need_more_than_kv_are_refused(option: str, value: object, folder: Folder) -> None:
    more = {"draft_weights": "int4"} if option == "speculation" else {}
    with pytest.raises(RequestError, match="recurrent layers") as caught:
        engine_of(folder("lfm2"), **{option: value, **more})
    assert caught.value.parameter == option


def drafting(engine: Engine, outputs: dict[tuple[str, int], list[int]], acceptance: float) -> Speculator:
    """Let the engine draft what it is known to answer, each token right with a probability, whatever that costs."""
    by_request: dict[str, list[list[int]]] = {}
    for (name, _), tokens in sorted(outputs.items()):
        by_request.setdefault(name, []).append(tokens)
    speculator = Speculator(ReplayDrafter(by_request, acceptance), DraftLength(prior=0.99, memory=0.99))
    engine.draft_with(speculator)
    engine._step_time.predict = lambda rows, pairs: 1.0  # pyright: ignore[reportPrivateUsage]
    return speculator


@pytest.mark.parametrize("name", ["mamba2", "qwen3-next"])
def test_rejected_drafts_change_no_token(name: str, folder: Folder) -> None:
    requests = [request(str(length), prompt(length), count=45) for length in (5, 17, 20)]
    alone = engine_of(folder(name), prefix_cache=False)
    expected = {key: found for each in requests for key, found in run(alone, each)[0].items()}
    for reuse, tokens in ((True, 512), (False, 96)):
        engine = engine_of(folder(name), prefix_cache=reuse, kv_tokens=tokens, context=96, max_rows=48)
        speculator = drafting(engine, expected, 0.7)
        assert run(engine, *requests)[0] == expected
        assert 0.1 * speculator.drafted < speculator.held < 0.9 * speculator.drafted
        assert speculator.drafted > 60
        assert (engine.scheduler.stats().preempted > 0) == (tokens == 96)


def test_states_are_kept_for_reuse_beside_drafts(folder: Folder) -> None:
    fresh = engine_of(folder("qwen3-next"), prefix_cache=False)
    tokens = prompt(40)
    expected, _ = run(fresh, request("a", tokens, count=60))
    engine = engine_of(folder("qwen3-next"))
    drafting(engine, expected, 0.8)
    assert run(engine, request("a", tokens, count=60))[0] == expected
    longer = [*tokens, *expected["a", 0], *prompt(20)]
    found, cached = run(engine, request("b", longer))
    assert cached["b"] >= 80
    assert found == run(fresh, request("b", longer))[0]


def test_drafts_take_at_most_half_of_the_kept_states(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.executors.cpu_executor._STATE_BYTES", 1)  # the least: 8 states
    requests = [request(str(length), prompt(length)) for length in (5, 17, 60)]
    alone = engine_of(folder("mamba2"), prefix_cache=False)
    expected = {key: found for each in requests for key, found in run(alone, each)[0].items()}
    engine = engine_of(folder("mamba2"))
    states = engine.blocks.states
    assert states is not None
    assert (states.running, states.kept, states.most_lent) == (4, 4, 2)
    speculator = drafting(engine, expected, 1.0)
    assert run(engine, *requests)[0] == expected
    assert speculator.drafted
    assert states.lent == 0


def test_a_recurrent_model_drafts_for_none(folder: Folder) -> None:
    with pytest.raises(RequestError, match="cannot be a draft model") as caught:
        engine_of(Path("mini"), speculation="model", draft_model=str(folder("lfm2")))
    assert caught.value.parameter == "draft_model"


def test_states_are_kept_at_the_ends_of_larger_blocks(folder: Folder) -> None:
    found: list[list[int]] = []
    for size, cached in ((16, 144), (64, 128)):
        engine = engine_of(folder("lfm2"), kv_block=size)
        for number, expected in enumerate((0, cached)):
            tokens, hits = run(engine, request(f"{number}", prompt(150), count=8))
            found += tokens.values()
            assert list(hits.values()) == [expected]
    assert found == found[:1] * 4
