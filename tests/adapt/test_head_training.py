"""Draft heads in torch: EAGLE layers are trained as they are served, losses fall, and acceptance is counted right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headrace.adapt.head_examples import HeadExample, HeadModel, batches, choose_vocabulary
from headrace.adapt.head_networks import Eagle3Network, EagleNetwork, MedusaNetwork
from headrace.adapt.head_recipe import HeadRecipe
from headrace.adapt.head_run import AnswerFile, HeadJob, HeadRun
from headrace.adapt.head_training import HeadTraining
from headrace.engine.speculation.eagle3_head import eagle3_head
from headrace.engine.speculation.joined_layer import eagle_layer
from headrace.engine.speculation.layer_drafter import LayerDrafter
from headrace.engine.speculation.speculator import Speculator
from headrace.engine.speculation.state_recorder import StateRecorder
from headrace.errors import RequestError
from headrace.llm import LLM
from headrace.models.config_json import ConfigJson
from headrace.models.draft_heads import eagle_config, eagle_spec
from headrace.models.eagle3_layer import chosen_layers, eagle3_config, eagle3_spec
from headrace.models.precision import parse_precision
from headrace.models.spec import ModelSpec

PROMPTS = [[5, 9, 30, 41, 7], [100, 20, 21, 22, 23, 24], list(range(40, 60)), [9, 8, 7]]


@pytest.fixture(scope="module")
def recorded(tiny_folder: Path) -> Any:
    """The tiny model's answers with their states, by kind of heads, and what heads read of it."""
    common: dict[str, Any] = {"weights": "f32", "kv": "f32", "threads": 1, "context": 128}
    with LLM(tiny_folder, **common, speculation="none", prefix_cache=False) as llm:
        spec = llm.opened.executor.spec
        examples: dict[str, list[HeadExample]] = {}
        for kind, reads in (("eagle", ()), ("eagle3", chosen_layers(len(spec.layers)))):
            recorder = StateRecorder(reads, prompts=bool(reads))
            llm.opened.engine.draft_with(Speculator(recorder))
            llm.generate(PROMPTS, max_tokens=24, temperature=0.0, ignore_eos=True)
            examples[kind] = [HeadExample(np.array(each.tokens), each.states, each.prompt) for each in recorder.answers]
        examples["medusa"] = examples["eagle"]
        every = np.arange(spec.vocab_size, dtype=np.int32)
        products = llm.opened.executor.products
        model = HeadModel(every, products.embeddings(every), None, products.head_rows(every), products.head_norm())
        yield llm, spec, model, examples


def network_of(kind: str, spec: ModelSpec, model: HeadModel, *, count: int = 2, seed: int = 0) -> Any:
    if kind == "medusa":
        return MedusaNetwork(spec, count)
    if kind == "eagle":
        return EagleNetwork(
            eagle_spec(ConfigJson(eagle_config(spec, base="t"), path=Path()), spec, spec.vocab_size), seed
        )
    config = ConfigJson(eagle3_config(spec, base="t", vocabulary=spec.vocab_size), path=Path())
    own = eagle3_spec(config, spec, spec.vocab_size)
    return Eagle3Network(own, chosen_layers(len(spec.layers)), model.head, model.norm, seed)


def test_an_eagle3_layer_begins_with_the_models_norm_and_head(recorded: Any, tiny_folder: Path) -> None:
    _, spec, model, _ = recorded
    stored: dict[str, Any] = {}
    for file in tiny_folder.glob("*.safetensors"):
        stored |= load_file(file)
    norm = stored["model.norm.weight"].float().numpy()
    trained = network_of("eagle3", spec, model).trained
    assert np.array_equal(trained["norm"].detach().numpy(), norm)
    assert np.array_equal(trained["head"].detach().numpy(), model.head)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_layer_drafts_what_it_was_trained_to(recorded: Any, kind: str) -> None:
    llm, spec, model, answers = recorded
    examples = answers[kind]
    network = network_of(kind, spec, model, seed=3)
    with torch.no_grad():
        for value in network.trained.values():  # far from the identity that it begins with
            value += 0.05 * torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel()))
    example = max(examples, key=lambda each: len(each.tokens))
    load: Any = eagle_layer if kind == "eagle" else eagle3_head
    drafter = LayerDrafter(load(llm.opened.executor, network.layer(None), parse_precision("f32")))
    checked = 0
    engine = llm.opened.engine
    speculator = Speculator(drafter)
    drafter.pass_seconds = lambda sequences: 0.0
    engine.draft_with(speculator)
    engine._step_time.predict = lambda rows, pairs: 1.0
    propose = drafter.propose_all
    drafts: list[tuple[int, list[int]]] = []

    def watched(wanted: Any) -> list[list[int]]:
        found = propose([(sequence, 3) for sequence, _ in wanted])
        drafts.append((wanted[0][0].output_count, found[0]))
        return [[] for _ in wanted]

    drafter.propose_all = watched
    prompt = next(
        each
        for each in PROMPTS
        if llm.generate([each], max_tokens=24, temperature=0.0, ignore_eos=True)[0].completions[0].tokens
        == example.answer.tolist()
    )
    drafts.clear()
    llm.generate([prompt], max_tokens=24, temperature=0.0, ignore_eos=True)
    embedded = torch.from_numpy(model.embeddings[example.tokens])
    states = torch.from_numpy(example.states)
    head = torch.from_numpy(model.head) if kind == "eagle" else network.own_head.detach()
    for output, found in drafts:
        count = example.prompt + output
        # The draft's own tokens are what the next passes read.
        tokens = embedded[:count]
        known = states[:count]
        expected: list[int] = []
        for _ in range(len(found)):
            predicted = _last(network, tokens, known, len(expected))
            expected.append(int((head @ predicted).argmax()))
            tokens = torch.cat((tokens, torch.from_numpy(model.embeddings[expected[-1:]])))
            known = torch.cat((known, torch.zeros(1, known.shape[1])))
        assert found == expected
        checked += len(found)
    assert checked > 20


def _last(network: Any, embedded: Tensor, states: Tensor, draft: int) -> Tensor:
    """The state that a draft is chosen from, after so many drafts."""
    with torch.no_grad():
        return network.predict(embedded[None], states[None], draft + 1)[draft][0, -1]


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_training_raises_the_acceptance_of_what_is_learnt(recorded: Any, kind: str) -> None:
    _, spec, model, answers = recorded
    examples = answers[kind]
    recipe = HeadRecipe(depth=2, epochs=12, batch=2, rate=4e-3)
    network = network_of(kind, spec, model)
    losses: list[float] = []
    training = HeadTraining(
        network,
        model,
        recipe,
        learns_states=kind == "eagle",
        watch=lambda _step, _steps, loss, _tokens: losses.append(loss),
    )
    before = training.acceptance(examples, 2)
    training.run(examples)
    after = training.acceptance(examples, 2)
    assert losses[-1] < losses[0]
    assert after.tokens > before.tokens
    assert after.by_draft[0] > 0.5


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_answers_shorter_than_the_drafts_are_learnt(recorded: Any, kind: str) -> None:
    _, spec, model, answers = recorded
    short = [HeadExample(each.tokens[:4], each.states[:4]) for each in answers[kind]]
    network = network_of(kind, spec, model, count=4)
    losses: list[float] = []
    recipe = HeadRecipe(depth=4, epochs=8, batch=2, rate=4e-3)
    HeadTraining(
        network,
        model,
        recipe,
        learns_states=kind == "eagle",
        watch=lambda _step, _steps, loss, _tokens: losses.append(loss),
    ).run(short)
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    assert all(bool(torch.isfinite(value).all()) for value in network.trained.values())


class _Known:
    """Predicts the first draft right and the second wrong."""

    own_head: Tensor | None = None

    def __init__(self) -> None:
        self.trained: dict[str, Tensor] = {}

    def predict(self, embedded: Tensor, states: Tensor, depth: int) -> list[Tensor]:
        ahead = torch.roll(states, -1, dims=1)
        return [ahead, -ahead][:depth]


def test_acceptance_counts_drafts_after_accepted_ones(recorded: Any) -> None:
    _, _, model, answers = recorded
    examples = answers["eagle"]
    training = HeadTraining(_Known(), model, HeadRecipe(depth=2), learns_states=False)
    found = training.acceptance(examples, 2)
    assert found.by_draft == [1.0, 0.0]
    assert found.tokens == 2.0
    with pytest.raises(RequestError, match="too short"):
        training.acceptance([HeadExample(each.tokens[:1], each.states[:1]) for each in examples], 2)


def test_of_whole_texts_only_answers_count(recorded: Any) -> None:
    _, spec, model, answers = recorded
    for training, examples in (
        (HeadTraining(_Known(), model, HeadRecipe(depth=2), learns_states=False), answers["eagle"]),
        (HeadTraining(_Final(spec.hidden_size), model, HeadRecipe(depth=2), learns_states=False), answers["eagle3"]),
    ):
        batch = training._batch(examples)  # pyright: ignore[reportPrivateUsage]
        assert batch.drafted(0).sum(1).tolist() == [23] * 4
        assert batch.drafted(1).sum(1).tolist() == [22] * 4
        assert training.acceptance(examples, 2).by_draft == [1.0, 0.0]
    assert sorted(each.prompt for each in answers["eagle3"]) == sorted(len(prompt) - 1 for prompt in PROMPTS)


class _Final(_Known):
    """The same, of whole texts with the states of other layers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self._hidden = hidden

    def predict(self, embedded: Tensor, states: Tensor, depth: int) -> list[Tensor]:
        return super().predict(embedded, states[..., -self._hidden :], depth)


def test_a_vocabulary_has_the_most_frequent_tokens() -> None:
    found = choose_vocabulary([[7, 7, 9, 9, 9], [7, 3]], 20, 4)
    assert found is not None
    assert found.tolist() == [0, 3, 7, 9]
    assert choose_vocabulary([[1]], 4, 4) is None


def test_epochs_have_their_own_order_and_every_answer() -> None:
    examples = [HeadExample(np.arange(count), np.zeros((count, 2), np.float32)) for count in range(5, 16)]
    one, same, other = (batches(examples, 3, 1, epoch) for epoch in (0, 0, 1))
    lengths = [[[len(each.tokens) for each in rows] for rows in found] for found in (one, same, other)]
    assert lengths[0] == lengths[1] != lengths[2]
    assert sorted(length for rows in lengths[2] for length in rows) == list(range(5, 16))


@pytest.mark.parametrize("wrong", [{"depth": 0}, {"depth": 17}, {"epochs": 0}, {"batch": 0}, {"rate": 2.0}])
def test_recipes_that_cannot_be_used_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        HeadRecipe(**wrong).check()


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_training_that_was_killed_continues_with_the_same_numbers(kind: str, recorded: Any, tmp_path: Path) -> None:
    _, spec, model, answers = recorded
    examples = answers[kind]
    recipe = HeadRecipe(depth=2, epochs=3, batch=1, rate=1e-3)

    def begin(run: HeadRun | None, watch: Any) -> tuple[HeadTraining, dict[str, Any]]:
        network = network_of(kind, spec, model, seed=3)
        job = HeadTraining(
            network, model, recipe, learns_states=kind == "eagle", run=run, watch=watch, checkpoint_s=0.0
        )
        return job, network.trained

    whole, expected = begin(None, lambda *_: None)
    whole.run(examples)
    job = HeadJob("model", kind, recipe, "auto", 64, 24, "prompts")
    run = HeadRun.open(tmp_path / "run", job, spec.hidden_size, restart=False)

    def kill(step: int, *_: Any) -> None:
        if step == 5:
            raise KeyboardInterrupt

    killed, _ = begin(run, kill)
    with pytest.raises(KeyboardInterrupt):
        killed.run(examples)
    again, found = begin(HeadRun.open(tmp_path / "run", job, spec.hidden_size, restart=False), lambda *_: None)
    again.run(examples)
    assert again.resumed == 5
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value)


def test_a_batch_of_answers_that_was_cut_does_not_count(tmp_path: Path) -> None:
    def answer(*tokens: int) -> HeadExample:
        return HeadExample(np.array(tokens), np.array([[token, -token] for token in tokens], dtype=np.float32))

    file = AnswerFile(tmp_path, "train", 2)
    file.add([answer(5, 6, 7), answer(1)], 3)
    length = (tmp_path / "train.jsonl").stat().st_size
    file.add([answer(8, 9)], 1)
    content = (tmp_path / "train.jsonl").read_bytes()
    for cut in range(length, len(content)):
        (tmp_path / "train.jsonl").write_bytes(content[:cut])
        again = AnswerFile(tmp_path, "train", 2)
        assert (again.prompts, again.tokens) == (3, 4)
        assert (tmp_path / "train.states").stat().st_size == 4 * 2 * 4
        again.add([answer(3, 4)], 2)
        third = AnswerFile(tmp_path, "train", 2)
        assert third.prompts == 5
        assert [each.tokens.tolist() for each in third.examples(2)] == [[3, 4], [5, 6, 7]]
        assert [each.states.tolist() for each in third.examples(3)] == [[[5, -5], [6, -6], [7, -7]]]
        (tmp_path / "train.states").write_bytes((tmp_path / "train.states").read_bytes()[:32])
