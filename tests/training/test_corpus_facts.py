"""Facts and talk: enough, unambiguous, held out, true to the documented commands; and the metrics."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from headrace.models.precision import parse_precision
from training.corpus import facts, talk
from training.corpus.conversation import JSON, Question, ToolCall, Turn, rendered
from training.corpus.instances import BETWEEN_KEYS
from training.corpus.rephrasing import rephrased
from training.corpus.scoring import METRICS, is_right

ROOT = Path(__file__).parent.parent.parent
MOST_WORDS = 35
SOME = 20_000


@pytest.fixture(params=(facts, talk), ids=lambda module: module.TASK)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def parts() -> list[str]:
    """What docs/reference/commands.md says of all commands, and then a name and a section for each."""
    return re.split(
        r"^## `headrace ([a-z-]+)`$", (ROOT / "docs" / "reference" / "commands.md").read_text(), flags=re.MULTILINE
    )


def sections() -> list[tuple[str, str]]:
    _, *rest = parts()
    return list(zip(rest[::2], rest[1::2], strict=True))


def documented() -> set[str]:
    """Commands, flags, shapes and variables of docs/reference/commands.md, and the targets that `make help` names."""
    found = set(re.findall(r"^\| `(HEADRACE_\w+)` \|", parts()[0], re.MULTILINE))
    for command, section in sections():
        found.add(command)
        rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        found |= {f"{command} {flag}" for row in rows for flag in re.findall(r"`(--[a-z-]+)`", row)}
        found |= {f"{command} {shape}" for row in rows for shape in re.findall(r"^`([a-z0-9][a-z0-9.-]+)`", row)}
    makefile = (ROOT / "Makefile").read_text()
    return found | {f"make {target}" for target in re.findall(r'@echo "make ([a-z-]+) ', makefile)} | {"make help"}


def test_there_are_enough_facts_and_questions() -> None:
    assert len(facts.facts()) >= 320
    assert len(facts.questions()) == facts.HELD_OUT * len(facts.facts())
    assert len(talk.questions()) >= 400
    assert sum(1 for fact in facts.facts() if fact.why) >= 40


def test_every_fact_has_its_own_name_and_answer() -> None:
    known = facts.facts()
    assert len({fact.id for fact in known}) == len(known)
    assert len({facts.folded(fact.answer) for fact in known}) == len(known)


def test_every_fact_has_at_least_six_wordings() -> None:
    few = [fact.id for fact in facts.facts() if len(fact.asked) < 4 or len(set(fact.held_out)) != facts.HELD_OUT]
    assert few == []


def test_no_question_has_two_answers() -> None:
    answers: dict[str, set[str]] = {}
    for fact in facts.facts():
        for question in (*fact.asked, *fact.held_out):
            answers.setdefault(facts.folded(question), set()).add(fact.answer)
    for entry in (*talk.said("small_talk"), *talk.said("refusals")):
        for line in entry.lines:
            for value in entry.fills if "{x}" in line else ("",):
                answers.setdefault(facts.folded(line.replace("{x}", value)), set()).add(entry.answer)
    assert {question: found for question, found in answers.items() if len(found) > 1} == {}


def test_no_held_out_phrasing_differs_from_a_learnt_one_in_marks_only() -> None:
    for fact in facts.facts():
        assert not {*map(facts.folded, fact.asked)} & {*map(facts.folded, fact.held_out)}, fact.id
    entries = [entry.lines for entry in (*talk.said("small_talk"), *talk.said("refusals"))]
    for phrasings in (*entries, talk.WHY, talk.ABOUT, talk.AGAIN, talk.FIRST_QUESTION, talk.LAST_QUESTION, talk.ASKED):
        folded = [facts.folded(phrasing) for phrasing in phrasings]
        assert len(folded) >= 6
        assert not {*folded[: -talk.HELD_OUT]} & {*folded[-talk.HELD_OUT :]}, phrasings


def test_answers_are_short_sentences() -> None:
    entries = (*talk.said("small_talk"), *talk.said("refusals"))
    texts = [text for fact in facts.facts() for text in (fact.answer, fact.why) if text]
    texts += [entry.answer for entry in entries]
    assert [text for text in texts if len(text.split()) > MOST_WORDS or text != text.strip()] == []
    assert [text for text in texts if text[-1] not in ".?!" and not text.endswith('rope".')] == []


def test_facts_cover_most_of_the_documentation_and_nothing_else() -> None:
    """A new command with its flags may wait for the next training; a fact about one that is gone may not."""
    about = {name for fact in facts.facts() for name in fact.documents}
    assert about <= documented()
    assert len(about) >= 65


def test_the_fact_about_all_commands_names_existing_ones() -> None:
    answer = next(fact.answer for fact in facts.facts() if fact.id == "commands")
    sections = re.findall(
        r"^## `(headrace [a-z-]+)`$", (ROOT / "docs" / "reference" / "commands.md").read_text(), re.MULTILINE
    )
    assert set(re.findall(r"headrace [a-z-]+", answer)) <= set(sections)


def test_facts_about_flags_give_the_documented_defaults() -> None:
    defaults: dict[str, str] = {}
    for command, section in sections():
        rows = re.findall(r"^\| `(--[a-z-]+)`.*\| (\S+) \|$", section, re.MULTILINE)
        found = {flag: default.strip("`") for flag, default in rows if re.fullmatch(r"`?[a-z]*[0-9]+`?", default)}
        defaults |= {f"{command} {flag}": default for flag, default in found.items()}
    assert defaults["generate --max-tokens"] == "128"
    for fact in facts.facts():
        for name in fact.documents:
            default = defaults.get(name)
            if default is not None:
                assert re.search(rf"\b{default}\b", fact.answer), fact.id


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_facts_about_integer_weights_give_the_default_group_and_its_bits(precision: str) -> None:
    answer = next(fact.answer for fact in facts.facts() if fact.id == f"{precision}-bits")
    default = parse_precision(precision)
    assert f" {default.bits} bits " in answer
    assert f"groups of {default.group}," in answer


def test_nothing_learnt_has_the_key_of_a_held_out_question(module: ModuleType) -> None:
    held_out = {question.key for other in (facts, talk) for question in other.questions()}
    learnt = {
        key for conversation in module.conversations(Random(5), SOME) for key in conversation.key.split(BETWEEN_KEYS)
    }
    assert len(learnt) > 1000
    assert not learnt & held_out


def test_no_held_out_question_is_in_training(module: ModuleType) -> None:
    def said(turns: tuple[Turn, ...]) -> tuple[str, ...]:
        return tuple(facts.folded(turn.content) for turn in turns if turn.role != "system")

    learnt = {
        said(conversation.turns[:place])
        for conversation in module.conversations(Random(6), SOME)
        for place, turn in enumerate(conversation.turns)
        if turn.role == "assistant"
    }
    assert [question.key for question in module.questions() if said(question.turns) in learnt] == []


def test_every_question_ends_with_a_user_and_accepts_its_expected_answer(module: ModuleType) -> None:
    asked = module.questions()
    assert len({question.key for question in asked}) == len(asked)
    for question in asked:
        assert question.task == module.TASK
        assert question.turns[-1].role == "user"
        assert question.turns[-1].content
        assert is_right(question, question.expected)
        assert not is_right(question, f"{question.expected} And more.")


def test_every_conversation_alternates_and_ends_with_the_assistant(module: ModuleType) -> None:
    for conversation in module.conversations(Random(8), 2000):
        roles = [turn.role for turn in conversation.turns if turn.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(turn.content == turn.content.strip() != "" for turn in conversation.turns)


def test_the_same_seed_gives_the_same_conversations_and_questions(module: ModuleType) -> None:
    def drawn() -> list[object]:
        return list(module.conversations(Random(3), 500))

    assert drawn() == drawn()
    assert module.questions() == module.questions()


def test_every_fact_is_learnt_equally_often() -> None:
    last: dict[str, int] = {}
    for conversation in facts.conversations(Random(2), 3 * len(facts.facts())):
        answer = conversation.turns[-1].content
        last[answer] = last.get(answer, 0) + 1
    assert last == {fact.answer: 3 for fact in facts.facts()}


def test_new_facts_come_more_often_and_the_others_as_often_as_before() -> None:
    known = facts.facts()
    task = facts.Emphasised({fact.id: 3 for fact in known[:10]})
    last: dict[str, int] = {}
    for conversation in task.conversations(Random(2), round(2 * task.growth() * len(known))):
        answer = conversation.turns[-1].content
        last[answer] = last.get(answer, 0) + 1
    assert last == {fact.answer: 6 if number < 10 else 2 for number, fact in enumerate(known)}
    assert task.questions() == facts.questions()


def test_recalled_values_are_those_that_the_user_gave() -> None:
    for question in talk.questions():
        told = " ".join(turn.content for turn in question.turns if turn.role == "user")
        found = re.fullmatch(r"Your (?!first|last)(.*?) is (.*)\.", question.expected)
        if found:
            assert found[2] in told
        unknown = re.fullmatch(r"You have not told me your (.*)\.", question.expected)
        if unknown:
            assert f"your {unknown[1]} is" not in " ".join(turn.content for turn in question.turns[:-1])


@pytest.mark.parametrize(
    ("question", "wording"),
    [
        ("How do I lower TTFT?", "How can I lower TTFT?"),
        ("What is the difference between ITL and TPOT?", "Is there a difference between TPOT and ITL?"),
        ("What does --kv do in headrace generate?", "Explain the --kv flag of headrace generate."),
        ("Which flag prints JSON?", "What is the flag that prints JSON?"),
        ("Where are errors printed in Headrace?", "In Headrace, where are errors printed?"),
    ],
)
def test_a_question_is_rephrased_by_its_form(question: str, wording: str) -> None:
    assert wording in set(rephrased(question))


def test_a_question_of_no_known_form_is_not_rephrased() -> None:
    assert list(rephrased("What is SGLang known for?")) == []


def question_with(metric: str, expected: str) -> Question:
    return Question("talk", (Turn("user", "?"),), (), expected, metric, "key")


CALLS = rendered(Turn("assistant", tool_calls=(ToolCall("weather", {"city": "Oslo", "days": 2}), ToolCall("time", {}))))


@pytest.mark.parametrize(
    ("metric", "expected", "right", "wrong"),
    [
        ("exact", "Oslo.", [" Oslo.\n"], ["oslo.", "Oslo", ""]),
        ("fact", "One  token.", ["one token. "], ["One token", "One token. Two."]),
        (
            "json",
            '{"a": 1, "b": null}',
            ['{"b":null,"a":1.0}'],
            ['{"a": 1}', '{"a": true, "b": null}', "a", "[" * 9999],
        ),
        ("number", "That is 1,250 ms.", ["1000 + 250 = 1250 ms"], ["1250 s", "1251 ms", "none"]),
        ("cited", "Due in May. [2]", ["[2] due in  May."], ["Due in May. [1]", "Due in May.", "Due in June. [2]"]),
        ("calls", CALLS, [CALLS.replace('"days": 2', '"days":2')], ["", CALLS[:-1], CALLS.replace("Oslo", "Rome")]),
    ],
)
def test_a_metric_accepts_only_right_answers(metric: str, expected: str, right: list[str], wrong: list[str]) -> None:
    assert metric in METRICS
    question = question_with(metric, expected)
    assert all(is_right(question, answer) for answer in [expected, *right])
    assert not any(is_right(question, answer) for answer in wrong)


def test_tool_calls_are_rendered_one_after_another_after_the_text() -> None:
    arguments: dict[str, JSON] = {"city": "Zürich"}
    turn = Turn("assistant", " Let me look. ", (ToolCall("weather", arguments), ToolCall("time", {})))
    assert rendered(turn) == (
        'Let me look.<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>'
        '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    )
