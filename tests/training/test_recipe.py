"""The recipe: rows and weights, resumed runs, model files, answers, the toy run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import transformers

from headrace.adapt.attention import PLAIN_ATTENTION
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import greedy, logits
from headrace.models.model_folder import open_model
from tests.training.stand_in import SHAPE, stream, tasks
from training import evaluate, make
from training.card import begin, end, filled
from training.corpus import arithmetic, facts
from training.corpus.conversation import CALL_BEGIN, Turn
from training.corpus.rephrasing import SYNONYMS, with_synonyms
from training.decoder import Decoder
from training.distil import Teacher
from training.files import MODEL_FILES, copy_model, digest, read_model, write_model
from training.optimiser import Kind, Optimiser, orthogonal, share_of_rate
from training.rows import (
    DRILL,
    EXERCISES,
    JOINED,
    MIXTURE,
    OPENING,
    PROMPT_WEIGHT,
    TELLING_WEIGHT,
    Drill,
    Marks,
    Place,
    Row,
    Stream,
    joined,
    load_tasks,
    lookup_rows,
    pool,
)
from training.shape import CONTEXT, DRAFT, MINI, Shape
from training.tokenizer import ASSISTANT, END, read, text_of, token_id
from training.train import Pace, Settings, SettingsChangedError, train

ROOT = Path(__file__).parents[2]
SETTINGS = Settings(SHAPE, tokens=6_000, seed=5, step_tokens=512)
QUIET = Pace(print_steps=4, save_seconds=0.0, milestones=2)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """A model that was trained for a few steps, so that no two logits are alike."""
    folder = tmp_path_factory.mktemp("run")
    model = train(replace(SETTINGS, tokens=12_000), stream(tokenizer_folder), folder, pace=Pace(save_seconds=1e9))
    write_model(model, tokenizer_folder, folder / "model")
    return folder / "model"


def test_answer_tokens_count_fully_and_prompt_tokens_partly(tokenizer_folder: Path) -> None:
    batches = stream(tokenizer_folder)
    tokenizer = read(tokenizer_folder)
    (_, pieces) = next(batches.batches(Place()))
    for piece in pieces:
        flat = piece.tokens.ravel()
        assert np.array_equal(flat[piece.places + 1], piece.targets)
        assert not (piece.targets == 0).any()  # padding
        assert set(piece.weights[piece.tasks >= 0].tolist()) == {1.0, TELLING_WEIGHT}
        assert set(piece.weights[piece.tasks < 0].tolist()) <= {PROMPT_WEIGHT}
        for index, row in enumerate(piece.tokens):
            answered = {int(place) + 1 for place in piece.places[piece.tasks >= 0]}
            length = len(row)
            for place in range(length):
                says = index * length + place in answered
                before = row[:place].tolist()
                turns = [token for token in before if token in (batches.assistant, batches.end)]
                assert says == (bool(turns) and turns[-1] == batches.assistant)
    assert tokenizer.token_to_id("<|pad|>") == 0


def test_a_place_in_the_stream_is_enough_to_go_on_from_it(tokenizer_folder: Path) -> None:
    whole = list(islice(stream(tokenizer_folder).batches(Place()), 12))
    assert len({place.pool for place, _ in whole}) > 1
    for index in (0, 4, 7):
        place, (following, pieces) = whole[index][0], whole[index + 1]
        found, again = next(stream(tokenizer_folder).batches(place))
        assert found == following
        assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(again, pieces, strict=True))
        assert all(np.array_equal(a.places, b.places) for a, b in zip(again, pieces, strict=True))


def test_every_row_of_a_pool_is_in_exactly_one_step(tokenizer_folder: Path) -> None:
    batches = stream(tokenizer_folder)
    sizes = sorted(len(row.tokens) for row in batches.rows(0))
    count = len({place for place, _ in takewhile_pool(batches, 0)})
    found = sorted(
        int((row != 0).sum()) for _, pieces in takewhile_pool(batches, 0) for piece in pieces for row in piece.tokens
    )
    assert found == sizes
    assert count > 1


def takewhile_pool(batches: Stream, number: int) -> list[tuple[Place, list]]:  # type: ignore[type-arg]
    found = []
    for place, pieces in batches.batches(Place(number)):
        found.append((place, pieces))
        if place.pool != number:
            return found
    raise AssertionError


def test_joined_rows_are_long_and_end_with_the_one_that_refers_back() -> None:
    random = Random(1)
    rows = [Row("facts", [1, *[7] * random.randrange(20, 90)], []) for _ in range(200)]
    rows += [Row("talk", [1, 9, 9, 9], []) for _ in range(5)]
    rows = [replace(row, worth=[0.0] * len(row.tokens)) for row in rows]
    result = joined(rows, random)
    assert sum(len(row.tokens) for row in result if row.task == JOINED) > 8000
    for row in result:
        assert len(row.tokens) == len(row.worth) <= CONTEXT
        assert row.tokens.count(1) == 1
        assert row.tokens[-row.tokens.count(9) :].count(9) == row.tokens.count(9) in (0, 3)
    assert max(len(row.tokens) for row in result) > 0.7 * CONTEXT


def test_finished_weights_are_trained_further(tokenizer_folder: Path, model_folder: Path, tmp_path: Path) -> None:
    start = read_model(model_folder)
    settings = replace(SETTINGS, tokens=4_000, begun=digest(model_folder))
    losses = {}
    for name, weights in (("further", start), ("anew", None)):
        folder = tmp_path / name
        chosen = settings if weights is not None else replace(settings, begun=None)
        train(chosen, stream(tokenizer_folder), folder, start=weights, pace=Pace(print_steps=1))
        losses[name] = [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]
    assert losses["further"][0] < 0.8 * losses["anew"][0]
    with pytest.raises(SettingsChangedError):
        train(settings, stream(tokenizer_folder), tmp_path / "anew", start=start, pace=QUIET)


def test_matrices_become_orthogonal() -> None:
    torch.manual_seed(0)
    for shape in ((3, 32, 128), (2, 128, 32)):
        matrices = torch.randn(shape)
        for half in (True, False):
            values = torch.linalg.svdvals(orthogonal(matrices, half=half))
            assert values.min() > 0.5
            assert values.max() < 1.4
        assert (orthogonal(matrices) - orthogonal(matrices, half=False)).abs().max() < 0.05


def test_blocks_of_a_matrix_become_orthogonal_by_themselves() -> None:
    torch.manual_seed(0)
    for shape in ((3, 64, 128), (2, 128, 64)):
        matrices = torch.randn(shape)
        found = orthogonal(matrices, half=False, block=32)
        for start in (0, 32):
            part = (slice(None), slice(start, start + 32)) if shape[1] == 64 else (..., slice(start, start + 32))
            assert torch.allclose(found[part], orthogonal(matrices[part], half=False), atol=1e-5)


def test_the_rate_goes_up_and_then_down_to_nothing() -> None:
    shares = [share_of_rate(done / 1000) for done in range(1001)]
    peak = shares.index(max(shares))
    assert shares[:peak] == sorted(shares[:peak])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert shares[0] > 0
    assert shares[-1] == 0


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_both_optimisers_make_the_loss_fall(kind: Kind, tokenizer_folder: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, tokens=14_000, optimiser=kind)
    train(settings, stream(tokenizer_folder), tmp_path, pace=Pace(print_steps=6))
    found = make.losses(tmp_path)
    assert found[-1] < 0.7 * found[0]


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_run_cut_off_at_any_step_ends_with_the_same_weights(
    kind: Kind, tokenizer_folder: Path, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, optimiser=kind)
    whole = train(settings, stream(tokenizer_folder), tmp_path / "whole", pace=QUIET)
    cut = tmp_path / "cut"
    for steps in (3, 4, 9):  # each leaves without a checkpoint of its own, so some steps are done twice
        pace = replace(QUIET, stop_after=steps, save_seconds=0.0)
        train(settings, stream(tokenizer_folder), cut, pace=pace)
    (cut / ".checkpoint.safetensors.00.part").write_bytes(b"half a file")
    again = train(settings, stream(tokenizer_folder), cut, pace=QUIET)
    for (name, weight), other in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(weight, other), name
    assert not list(cut.glob(".*"))
    # A run at its end has nothing more to do.
    assert torch.equal(
        next(iter(train(settings, stream(tokenizer_folder), cut, pace=QUIET).parameters())), next(whole.parameters())
    )


def test_a_checkpoint_of_other_settings_is_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    train(SETTINGS, stream(tokenizer_folder), tmp_path, pace=replace(QUIET, stop_after=3))
    with pytest.raises(SettingsChangedError, match="other settings"):
        train(replace(SETTINGS, seed=6), stream(tokenizer_folder), tmp_path, pace=QUIET)


def test_both_ways_of_attention_agree() -> None:
    model = Decoder(SHAPE, seed=1)
    tokens = torch.randint(0, SHAPE.vocabulary, (2, PLAIN_ATTENTION + 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        fused = model(tokens)[:, :PLAIN_ATTENTION]
        plain = model(tokens[:, :PLAIN_ATTENTION])
    assert torch.allclose(fused, plain, atol=2e-5)


def test_states_of_some_places_are_those_of_all() -> None:
    model = Decoder(SHAPE, seed=1)
    tokens = torch.randint(0, SHAPE.vocabulary, (3, 20), generator=torch.Generator().manual_seed(2))
    places = torch.tensor([0, 5, 19, 20, 41, 59])
    with torch.no_grad():
        assert torch.allclose(model(tokens, places), model(tokens).flatten(0, 1)[places], atol=1e-5)


@pytest.mark.parametrize("shape", [MINI, DRAFT], ids=["mini", "draft"])
def test_the_shapes_have_the_documented_sizes(shape: Shape) -> None:
    assert sum(weight.numel() for weight in Decoder(shape).parameters()) == shape.weights
    sizes = (shape.hidden, shape.inner, shape.heads * shape.head_size, shape.vocabulary)
    assert all(size % 128 == 0 for size in sizes)
    assert CONTEXT >= 2048


def test_both_models_together_are_small_enough_to_ship() -> None:
    assert 8e6 <= MINI.weights <= 15e6
    assert MINI.weights / 12 < DRAFT.weights < MINI.weights / 8
    assert 2 * (MINI.weights + DRAFT.weights) < 38e6  # bytes; the tokenizers come on top


def test_the_files_give_the_same_logits_in_transformers_and_in_headrace(model_folder: Path) -> None:
    tokens = [1, *range(9, 250), *range(40, 300)]
    with torch.no_grad():
        ours = (model := read_model(model_folder)).logits(model(torch.tensor([tokens])))[0].numpy()
        llama = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        assert type(llama).__name__ == "LlamaForCausalLM"
        theirs = llama(torch.tensor([tokens])).logits[0].numpy()
    executor = CpuExecutor.load(open_model(model_folder), weights="f32", kv="f32", threads=1)
    (served,) = logits(executor, [tokens])
    assert np.abs(ours - theirs).max() < 1e-4
    assert np.abs(ours - served).max() < 1e-4
    assert ours.std() > 0.1


def test_transformers_generates_to_the_end_token_as_headrace_does(model_folder: Path) -> None:
    model = open_model(model_folder)
    prompt = model.tokenizer.encode(text_of((Turn("user", "Say river 7"),), (), prompt=True), add_special_tokens=False)
    executor = CpuExecutor.load(model, weights="f32", kv="f32", threads=1)
    (answer,) = evaluate.greedy_answers(executor, [prompt], model.tokenizer.eos_ids, most=24)
    llama = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    found = llama.generate(torch.tensor([prompt]), max_new_tokens=24)[0].tolist()
    assert found[len(prompt) :] == answer


def test_answers_do_not_depend_on_their_company_and_end_at_the_stop_token(model_folder: Path) -> None:
    model = open_model(model_folder)
    executor = evaluate.load(model, "bf16", "bf16", 1)
    questions = tasks()["repeat"].questions() * 6  # more than run side by side
    prompts = evaluate.prompts_of(model, questions)
    together = evaluate.greedy_answers(executor, prompts, model.tokenizer.eos_ids, most=8)
    assert len(prompts) > evaluate.SIDE_BY_SIDE
    stop = next(iter(model.tokenizer.eos_ids))
    for prompt, answer in zip(prompts[:9], together[:9], strict=True):
        (alone,) = greedy(executor, [prompt], 8)
        assert answer == (alone[: alone.index(stop) + 1] if stop in alone else alone)


def test_a_model_accepts_all_of_its_own_answers(model_folder: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.jsonl"
    questions = tasks()["repeat"].questions()
    precisions = (("bf16", "bf16"), ("int4-channel", "int8"))
    results = evaluate.evaluate(model_folder, model_folder, questions, precisions=precisions, threads=1, wrong=wrong)
    counts = results["acceptance"]["repeat"]
    assert counts["right"] == counts["of"] > 0
    first = results["precisions"][0]["tasks"]
    assert first == results["draft"]["tasks"]
    assert len(wrong.read_text().splitlines()) == first["repeat"]["of"] - first["repeat"]["right"]
    assert results["precisions"][1]["weight_bytes"] < results["precisions"][0]["weight_bytes"]


def test_the_draft_learns_from_minis_answers(model_folder: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    teacher = Teacher.load(model_folder, 1)
    retold = Stream(tasks(), read(tokenizer_folder), seed=3, step_tokens=512, pool_size=60, retell=teacher.answers)
    plain, changed = stream(tokenizer_folder).rows(0), retold.rows(0)
    assert len(plain) == len(changed)
    assert [row.tokens for row in retold.rows(0)] == [row.tokens for row in changed]
    small = Shape(vocabulary=SHAPE.vocabulary, hidden=32, layers=1, heads=2, kv_heads=1, head_size=16, inner=64)
    settings = Settings(small, tokens=20_000, step_tokens=512)
    train(settings, retold, tmp_path, teacher=teacher.decoder, pace=Pace(print_steps=5))
    found = make.losses(tmp_path)
    assert found[-1] < 0.8 * found[0]


def test_a_finished_model_replaces_the_old_one(model_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "bundled" / "mini"
    target.mkdir(parents=True)
    (target / "old").write_text("")
    copy_model(model_folder, target)
    assert {path.name for path in target.iterdir()} == set(MODEL_FILES)
    assert open_model(target).tokenizer.eos_ids == {2}


def test_tables_go_between_their_marks() -> None:
    card = f"Words.\n\n{begin('a')}\nold\n{end('a')}\n\nMore.\n"
    once = filled(card, {"a": "| new |"})
    assert "old" not in once
    assert "| new |" in once
    assert filled(once, {"a": "| new |"}) == once
    with pytest.raises(ValueError, match="no marks"):
        filled(card, {"b": ""})


def test_muon_and_adam_share_the_weights_between_them() -> None:
    model = Decoder(SHAPE)
    optimiser = Optimiser(model, "muon")
    assert not optimiser.muon.keys() & optimiser.adam.keys()
    assert optimiser.muon.keys() | optimiser.adam.keys() == dict(model.named_parameters()).keys()
    assert "model.embed_tokens.weight" in optimiser.adam


@pytest.mark.parametrize("task", MIXTURE)
def test_training_never_meets_a_held_out_key(task: str) -> None:
    module = load_tasks([task])[task]
    questions = module.questions()
    assert len(questions) >= 300
    held_out = {question.key for question in questions}
    assert len(held_out) == len(questions) or task == "facts"
    seen = {conversation.key for conversation in module.conversations(Random(11), 1_200)}
    parts = {part for key in seen for part in key.split(" & ")}
    assert not held_out & (seen | parts)


def test_the_corpus_follows_from_the_seed_in_every_process() -> None:
    program = (
        "import hashlib\n"
        "from training.rows import load_tasks, pool\n"
        "print(hashlib.sha256(repr(pool(load_tasks(), 1, 0, 200)).encode()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_every_conversation_of_the_corpus_fits_and_ends_with_an_answer() -> None:
    for conversation in pool(load_tasks(), 2, 0, 300):
        assert conversation.turns[-1].role == "assistant"
        text = text_of(conversation.turns, conversation.tools)
        assert text.count("<|assistant|>") == sum(turn.role == "assistant" for turn in conversation.turns)
        assert text.startswith("<|begin|>")


def test_the_toy_recipe_runs_from_corpus_to_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--toy", "--folder", str(tmp_path), "--threads", "1", "--tokens", "40000", "--draft-tokens", "30000"]
    assert make.main([*arguments, "--sample", "1"]) == 0
    results = json.loads((tmp_path / "evaluation.json").read_text())
    assert set(results["acceptance"]) == set(MIXTURE)
    assert results["questions"] == len(MIXTURE)
    capsys.readouterr()
    assert make.main([*arguments, "--steps", "tokenizer,mini,draft"]) == 0  # all done already
    assert "step" not in capsys.readouterr().out.replace("steps", "")


def test_continued_training_blends_old_and_new_weights(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "mini").symlink_to(model_folder)
    further = replace(make.TOY, mini=SHAPE, start=tmp_path / "start", tokens=4_000, step_tokens=1024, pool_size=100)
    made: dict[float, dict[str, torch.Tensor]] = {}
    for share in (1.0, 0.25):
        recipe = replace(further, folder=tmp_path / str(share), blend=share)
        make.run(recipe, ("tokenizer", "mini"), tasks())
        made[share] = read_model(recipe.model("mini")).state_dict()
    before = read_model(model_folder).state_dict()
    for name, old in before.items():
        new = made[1.0][name]
        assert not torch.equal(old, new)
        assert torch.allclose(made[0.25][name], 0.75 * old + 0.25 * new, atol=0.01, rtol=0.02)
    capsys.readouterr()
    assert make.main(["--toy", "--folder", str(tmp_path), "--blend", "0.5"]) == 2
    assert "--start" in capsys.readouterr().err
    assert make.main(["--toy", "--folder", str(tmp_path), "--start", str(model_folder), "--blend", "1.5"]) == 2


def test_facts_that_the_bundled_models_have_not_learnt_are_emphasised(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = facts.digests()
    new = list(digests)[:3]
    learnt = {name: digest for name, digest in digests.items() if name not in new[:2]} | {new[2]: "changed"}
    monkeypatch.setattr(evaluate, "learnt_facts", lambda: learnt)
    tasks, mixture = make.emphasised(load_tasks(), 5)
    assert tasks["facts"] == facts.Emphasised(dict.fromkeys(new, 5))
    assert mixture == {**MIXTURE, "facts": pytest.approx(MIXTURE["facts"] * (1 + 3 * 4 / len(digests)))}
    assert make.emphasised(tasks, 1) == (tasks, MIXTURE)
    drawn = pool(tasks, 1, 0, 400, mixture)
    assert sum(conversation.task == "facts" for conversation in drawn) > 400 * MIXTURE["facts"] / sum(MIXTURE.values())


def test_new_facts_must_be_a_number_of_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make.main(["--toy", "--folder", str(tmp_path), "--new-facts", "0"]) == 2
    assert "--new-facts" in capsys.readouterr().err


def test_the_drill_comes_first_and_is_predictable_by_copying(tokenizer_folder: Path) -> None:
    tasks, tokenizer = load_tasks(("facts",)), read(tokenizer_folder)
    batches = Stream(tasks, tokenizer, seed=0, step_tokens=2048, pool_size=100, drill=Drill(pools=1))
    first, later = batches.rows(0), batches.rows(1)
    assert sum(row.task == DRILL for row in first) == 80
    assert sum(row.task == DRILL for row in later) == 3
    special = tokenizer.get_added_tokens_decoder()
    for row in (row for row in first if row.task == DRILL):
        half = len(row.tokens) // 2
        assert sorted(row.tokens[:half]) == sorted(row.tokens[half:])
        assert not any(row.worth[:half])
        assert not special.keys() & set(row.tokens)
        begun = [place for place in range(half, len(row.tokens)) if not row.worth[place]]
        for place, after in pairwise([*begun, len(row.tokens)]):
            piece = row.tokens[place:after]
            assert any(row.tokens[at : at + len(piece)] == piece for at in range(half))


# Tokens that nothing else is made of, so that a row can be taken apart.
LOOKED_UP = Marks(
    begin=[1],
    passage=[2],
    numbers=[[number] for number in range(11, 20)],
    says=[3],
    stop=[4],
    cites=[5],
    cited=[6],
    answers=[7],
    not_there=[8, 9],
    asks=[10],
)


def split(tokens: list[int], *marks: int) -> list[list[int]]:
    """The parts between tokens that are marks, without empty ones."""
    ends = [place for place, token in enumerate(tokens) if token in marks]
    parts = [tokens[start + 1 : end] for start, end in pairwise([-1, *ends, len(tokens)])]
    return [part for part in parts if part]


def test_a_lookup_is_in_the_cited_passage_or_nowhere() -> None:
    rows = lookup_rows(Random(5), 300, [], range(100, 900), LOOKED_UP)
    again, there, nowhere = 0, 0, 0
    for row in rows:
        assert len(row.tokens) == len(row.worth)
        first = next(place for place, worth in enumerate(row.worth) if worth)
        end = max(place for place in range(first) if row.tokens[place] == 4)  # of the passages
        sources = {
            (passage[0], *sentence) for passage in split(row.tokens[1:end], 2) for sentence in split(passage[2:], 4)
        }
        assert len({number for number, *_ in sources}) >= 2
        if 7 not in row.tokens:
            again += 1
            cited = [place for place, token in enumerate(row.tokens) if token == 5]
            assert len(cited) == len(sources)
            assert {row.worth[place + 1] for place in cited} == {TELLING_WEIGHT}
            continue
        for place in (place for place, token in enumerate(row.tokens) if token == 7):
            assert row.worth[place + 1] == 1.0  # the subject
            answer = row.tokens[place + 1 : row.tokens.index(10, place)]
            telling = place + 1 + next(at for at, worth in enumerate(row.worth[place + 1 :]) if worth == TELLING_WEIGHT)
            if 8 in answer:
                assert answer[-2:] == [8, 9]
                assert row.tokens[telling] == 8
                subject = answer[:-2]
                question = row.tokens[max(at for at in range(place) if row.tokens[at] in (4, 10)) + 1 : place]
                assert question[: len(subject)] == subject or question[-len(subject) :] == subject
                rest = question[len(subject) :] if question[: len(subject)] == subject else question[: -len(subject)]
                assert not [said for _, *said in sources if said[: len(question)] == subject + rest]
                nowhere += 1
                continue
            there += 1
            sentence, number = answer[: answer.index(4)], answer[-2]
            assert place + 1 < telling < place + len(sentence)
            assert (number, *sentence) in sources
            assert row.worth[place + len(answer) - 1] == TELLING_WEIGHT
    assert 60 < again < 140
    assert there > 500
    assert 0.4 < nowhere / there < 1.0


def test_the_start_of_an_answer_and_its_citation_count_most(tokenizer_folder: Path) -> None:
    tokenizer = read(tokenizer_folder)
    for row in Stream(load_tasks(("reading",)), tokenizer, seed=0, step_tokens=2048, pool_size=20).rows(0):
        if row.task != "reading":
            continue
        begun, end = token_id(tokenizer, ASSISTANT), token_id(tokenizer, END)
        for place in (place for place, token in enumerate(row.tokens) if token == begun):
            answer = row.tokens[place + 1 : row.tokens.index(end, place) + 1]
            counts = row.worth[place + 1 :][: len(answer)]
            cited = {at + 1 for at in range(len(answer) - 1) if tokenizer.decode(answer[: at + 1]).endswith(" [")}
            most = {*range(min(OPENING["reading"], len(answer))), *cited}
            assert [at for at, worth in enumerate(counts) if worth == TELLING_WEIGHT] == sorted(most)
            assert set(counts) <= {1.0, TELLING_WEIGHT}


def test_the_name_of_the_tool_that_is_called_counts_most(tokenizer_folder: Path) -> None:
    tokenizer = read(tokenizer_folder)
    called = 0
    for row in Stream(load_tasks(("tools",)), tokenizer, seed=0, step_tokens=2048, pool_size=40).rows(0):
        for place, token in enumerate(row.tokens):
            if row.task == "tools" and token == token_id(tokenizer, CALL_BEGIN):
                opening = range(place + 1, place + 1 + OPENING["tools"])
                assert re.match(r' ?{"name": "[a-zA-Z]{2}', tokenizer.decode([row.tokens[at] for at in opening]))
                assert {row.worth[at] for at in opening} == {TELLING_WEIGHT}
                called += 1
    assert called > 40


def test_exercises_count_their_results_alone(tokenizer_folder: Path) -> None:
    tokenizer = read(tokenizer_folder)
    batches = Stream(load_tasks(("facts",)), tokenizer, seed=0, step_tokens=2048, pool_size=400, drill=Drill(pools=0))
    exercises = [row for row in batches.rows(0) if row.task == EXERCISES]
    assert len(exercises) == 19
    for row in exercises:
        text = tokenizer.decode(row.tokens)
        counted = [tokenizer.id_to_token(token) for token, said in zip(row.tokens, row.worth, strict=True) if said]
        assert counted == [digit for result in arithmetic.RESULT.findall(text) for digit in result]


def test_exercises_hold_nothing_that_is_held_out() -> None:
    held_out = {question.expected for question in arithmetic.questions()}
    random = Random(3)
    said = " ".join(arithmetic.exercises(random, 16)[0] for _ in range(300))
    sums = [answer for answer in held_out if answer[0].isdigit() and "+" in answer]
    assert len(sums) > 50
    assert not [answer for answer in sums if f" {answer} " in f" {said} "]


def test_synonyms_leave_names_of_commands_and_settings_alone() -> None:
    random = Random(8)
    question = "Which folder does headrace check use, and what limits --limits in make check?"
    found = {with_synonyms(random, question) for _ in range(100)}
    assert len(found) > 6
    for text in found:
        assert re.fullmatch(
            r"Which (folder|directory) does headrace check (use|employ), "
            r"and what (limits|caps|bounds) --limits in make check\?",
            text,
        )


def test_no_word_has_synonyms_of_two_kinds() -> None:
    for word, others in SYNONYMS.items():
        assert word in others
        assert all(SYNONYMS[other] == others for other in others)


def test_a_question_never_becomes_one_that_is_held_out() -> None:
    random = Random(9)
    known = {facts.bare(question) for fact in facts.facts() for question in fact.held_out}
    changed = 0
    for fact in facts.facts():
        for question in fact.asked:
            text = facts.with_some_synonyms(random, question)
            assert facts.bare(text) not in known
            changed += text != question
    assert changed > 300


def test_a_worn_question_keeps_most_of_its_words_in_their_order() -> None:
    question = "What does the scheduler of Headrace do when memory is short?"
    random = Random(7)
    found = {facts.with_dropped_words(random, question) for _ in range(200)}
    assert len(found) > 50
    for text in found:
        words = iter(question.split())
        assert all(word in words for word in text.split())  # in their order
        assert text
