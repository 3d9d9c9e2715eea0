"""The generated tasks (reading, extraction, tools, triage, arithmetic) are true and hold out their questions."""

# ruff: noqa: RUF001 (the multiplication sign is meant)
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from random import Random
from types import ModuleType

import pytest

from training.corpus import arithmetic, extraction, reading, tools, triage
from training.corpus.conversation import JSON, Conversation, Turn, rendered
from training.corpus.instances import BETWEEN_KEYS, DETAIL, is_held_out
from training.corpus.reading import DOMAINS
from training.corpus.scoring import calls_of, is_right
from training.corpus.tools import TOOLS
from training.corpus.values import NUMBER_WORDS

MODULES = (reading, extraction, tools, triage, arithmetic)
SOME = 500


def seen_by_the_model(tools: tuple[JSON, ...], turns: tuple[Turn, ...]) -> str:
    return "\n".join([json.dumps(tools), *(f"{turn.role}: {rendered(turn)}" for turn in turns)])


def answers(module: ModuleType, count: int = SOME) -> Iterator[tuple[Conversation, int]]:
    """Every assistant turn of some training conversations, and the questions' expected answers as such."""
    for conversation in module.conversations(Random(11), count):
        for place, turn in enumerate(conversation.turns):
            if turn.role == "assistant":
                yield conversation, place


@pytest.fixture(params=MODULES, ids=lambda module: module.TASK)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def test_every_task_has_300_questions_with_keys_of_their_own(module: ModuleType):
    questions = module.questions()
    assert len(questions) >= 300
    assert len({question.key for question in questions}) == len(questions)
    assert all(question.task == module.TASK and is_held_out(question.key) for question in questions)
    assert all(question.turns[-1].role in ("user", "tool") for question in questions)


def test_questions_and_conversations_are_the_same_each_time(module: ModuleType):
    assert module.questions() == module.questions()
    assert list(module.conversations(Random(5), 80)) == list(module.conversations(Random(5), 80))
    assert list(module.conversations(Random(5), 80)) != list(module.conversations(Random(6), 80))


def test_the_expected_answers_are_right_by_their_own_metric(module: ModuleType):
    assert all(is_right(question, question.expected) for question in module.questions())
    assert not any(is_right(question, "I do not know.") for question in module.questions())


def test_nothing_held_out_is_in_training(module: ModuleType):
    questions = module.questions()
    held_out = {question.key for question in questions}
    asked = {seen_by_the_model(question.tools, question.turns) for question in questions}
    for conversation in module.conversations(Random(1), 1_200):
        assert conversation.key not in held_out
        assert not is_held_out(conversation.key)
        for place, turn in enumerate(conversation.turns):
            if turn.role == "assistant":
                assert seen_by_the_model(conversation.tools, conversation.turns[:place]) not in asked


def test_turns_take_turns(module: ModuleType):
    for conversation in module.conversations(Random(2), SOME):
        roles = [turn.role for turn in conversation.turns]
        assert roles[-1] == "assistant"
        assert "system" not in roles[1:]
        for before, after in pairwise(roles):
            assert (
                after
                in {"system": "user", "user": "assistant", "assistant": "user tool", "tool": "tool assistant"}[before]
            )
        assert all(turn.content or turn.tool_calls for turn in conversation.turns)


def test_prompts_are_mostly_short(module: ModuleType):
    lengths = sorted(
        sum(len(rendered(turn)) for turn in conversation.turns)
        + sum(len(json.dumps(tool)) for tool in conversation.tools)
        for conversation in module.conversations(Random(3), SOME)
    )
    assert lengths[SOME // 2] < 1500  # characters, about four to a token
    assert lengths[-SOME // 100] < 4000


# Arithmetic, recomputed from the text alone

EQUATION = re.compile(r"(\d+(?: [+\-×/] \d+)+) (?:=|is) (\d+)")
DURATION = re.compile(r"(\d+(?:\.\d+)?) (ms|milliseconds|second|minute|hour)s?\b")
MILLISECONDS = {"ms": 1, "milliseconds": 1, "second": 1000, "minute": 60_000, "hour": 3_600_000}


def computed(formula: str) -> Fraction:
    """Products and quotients first; from left to right."""
    first, *rest = formula.split(" ")
    sums = [Fraction(first)]
    for sign, number in zip(rest[::2], map(Fraction, rest[1::2]), strict=True):
        if sign in "+-":
            sums.append(number if sign == "+" else -number)
        else:
            sums[-1] = sums[-1] * number if sign == "×" else sums[-1] / number
    return sum(sums, Fraction(0))


def milliseconds(text: str) -> Fraction:
    return sum((Fraction(number) * MILLISECONDS[unit] for number, unit in DURATION.findall(text)), Fraction(0))


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def result_of(question: str) -> str | None:
    """The last sentence that must be answered, where this independent reading of the question understands it."""
    text = question.lower()
    found = numbers(text)
    sign = re.search(r"\d (\+|-|×|x|/|plus|minus|times|divided by|multiplied by) \d|^.*?(add|multiply|divide) \d", text)
    if " percent of" in text or "%" in text:
        return f"{found[0]} % of {found[1]} is {Fraction(found[0] * found[1], 100)}."
    if sign and len(found) == 2:
        word = sign[1] or sign[2]
        left, right = found
        if word in ("×", "x", "times", "multiply"):
            return f"is {left * right}."
        return {
            **dict.fromkeys(("+", "plus", "add"), f"is {left + right}."),
            **dict.fromkeys(("-", "minus"), f"is {left - right}."),
            **dict.fromkeys(("/", "divided by", "divide"), f"is {Fraction(left, right)}."),
        }[word]
    if "average" in text or "mean of" in text:
        return f"The average is {Fraction(sum(found), len(found))}."
    if " left" in text and " takes " in text:
        budget = re.search(r"(?:budget is|how much of) (\d+) ms", text)
        assert budget
        return f"{2 * int(budget[1]) - sum(found)} ms are left."
    if " takes " in text and " ms." in text and "which" not in text:
        return f"The total is {sum(found)} ms."
    if "when does it end" in text or "when is it over" in text:
        clock = re.search(r"(\d+):(\d+)", text)
        length = re.search(r"(\d+) minutes", text)
        assert clock is not None
        assert length is not None
        end = int(clock[1]) * 60 + int(clock[2]) + int(length[1])
        return f"It ends at {end // 60}:{end % 60:02d}."
    if re.search(r"(largest|highest|biggest|smallest|lowest)", text) and len(found) == 3:
        pick = max if re.search(r"largest|highest|biggest", text) else min
        return f" is {pick(found)}."
    if word := re.search(r"which is (larger|bigger|greater|smaller|less), \d+ or", text):
        return f"{(min if word[1] in ('smaller', 'less') else max)(found)} is {word[1]}."
    if rate := re.search(r"(\d+) (?:tokens|requests) per second", text):
        other = re.search(r"(\d+) (?:tokens|requests)(?! per second)", text)
        if other:
            return f"That takes {Fraction(int(other[1]), int(rate[1]))} seconds."
        return f"That is {found[0] * found[1]} "
    if " each" in text or "costs" in text:
        return f"That is {found[0] * found[1]} "
    return None


def test_every_written_step_of_arithmetic_is_true():
    for conversation, place in answers(arithmetic):
        answer = conversation.turns[place].content
        for formula, result in EQUATION.findall(answer):
            assert computed(formula) == int(result), answer
        for larger, smaller in re.findall(r"(\d+) is more than (\d+)", answer):
            assert int(larger) > int(smaller), answer
        for smaller, larger in re.findall(r"(\d+) is less than (\d+)", answer):
            assert int(smaller) < int(larger), answer
        for said, converted in re.findall(
            r"([\d.]+ [a-z]+(?: \d+ [a-z]+)?) is ([\d.]+ [a-z]+(?: \d+ [a-z]+)?)\.", answer
        ):
            if milliseconds(said) and milliseconds(converted):
                assert milliseconds(said) == milliseconds(converted), answer


def test_results_of_arithmetic_are_those_of_an_independent_reading():
    understood = asked = 0
    for conversation, place in answers(arithmetic):
        question, answer = conversation.turns[place - 1].content, conversation.turns[place].content
        result = result_of(question)
        asked += 1
        if result is not None:
            understood += 1
            assert result in answer, (question, answer, result)
    assert understood > asked * 0.6


def test_the_longer_duration_is_named():
    compared = 0
    for conversation, place in answers(arithmetic):
        question, answer = conversation.turns[place - 1].content, conversation.turns[place].content
        word = re.search(r"(longer|shorter)", question)
        if not word:
            continue
        options = [match[0] for match in DURATION.finditer(question)]
        assert len(options) == 2
        lengths = [milliseconds(option) for option in options]
        if lengths[0] == lengths[1]:
            assert answer.endswith("Both are equal.")
        else:
            right = options[lengths.index((max if word[1] == "longer" else min)(lengths))]
            assert answer.endswith(f"so {right} is {word[1]}."), (question, answer)
        compared += 1
    assert compared > 40


# Reading


def passages(conversation: Conversation) -> dict[int, str]:
    everything = "\n".join(turn.content for turn in conversation.turns if turn.role in ("system", "user"))
    return {int(number): text for number, text in re.findall(r"^\[(\d+)\] (.*)$", everything, re.MULTILINE)}


def test_quoted_words_stand_in_the_cited_passage():
    for conversation, place in answers(reading):
        answer = conversation.turns[place].content
        sources = passages(conversation)
        assert len(sources) >= 2
        assert list(sources) == list(range(1, len(sources) + 1))
        if answer.endswith(reading.NOT_THERE):
            continue
        quotes = re.findall(r"(.+?) \[(\d+)\](?: |$)", answer)
        assert "".join(f"{words} [{number}] " for words, number in quotes).strip() == answer
        for words, number in quotes:
            assert words in sources[int(number)]
            assert sum(words in text for text in sources.values()) == 1


def says(passage: str, subject: str, statement: str) -> bool:
    """Whether the passage says this of the subject, with any values."""

    def value(slot: re.Match[str]) -> str:
        chosen = reading.LISTS.get(slot[1])
        return ".+?" if chosen is None else f"(?:{'|'.join(map(re.escape, chosen))})"

    pattern = re.sub(r"\\\{([a-z_0-9]+)\\\}", value, re.escape(statement.replace("{E}", "\0")))
    named = pattern.replace("\\\0", "\0").replace("\0", re.escape(subject[0].upper() + subject[1:]))
    return re.search(rf"(^|[.] ){named}", passage) is not None


def test_every_statement_begins_with_its_subject():
    for domain in DOMAINS:
        for attribute in domain.attributes:
            assert all(each.startswith("{E} ") and "{e}" not in each for each in attribute.statements)
            assert all("{e}" in each for each in attribute.questions)


def test_absent_answers_are_absent_and_present_ones_present():
    refused = told = 0
    attributes = {(domain.subject, each.name): each for domain in DOMAINS for each in domain.attributes}
    for conversation in reading.conversations(Random(12), 400):
        keys = conversation.key.split(BETWEEN_KEYS)
        replies = [turn.content for turn in conversation.turns if turn.role == "assistant"]
        assert len(set(keys)) == len(keys) == len(replies)
        sources = passages(conversation)
        for key, reply in zip(keys, replies, strict=True):
            subject, _, name = key.partition(DETAIL)[0].rpartition(": ")
            fitting = [each for (_, called), each in attributes.items() if called == name]
            absent = reply.endswith(reading.NOT_THERE)
            if absent:
                assert reply == reading.not_there(subject)
                fitting = [
                    each
                    for each in fitting
                    if any(asked_in(question, subject, conversation) for question in each.questions)
                ]
                assert fitting
                refused += 1
            else:
                told += 1
            held = any(
                says(text, subject, statement)
                for each in fitting
                for statement in each.statements
                for text in sources.values()
            )
            assert held != absent, (conversation, key)
    assert 0.25 < refused / (refused + told) < 0.4


def asked_in(question: str, subject: str, conversation: Conversation) -> bool:
    asked = question.replace("{e}", subject).rstrip("?").lower()
    return any(asked in turn.content.lower() for turn in conversation.turns if turn.role == "user")


# Extraction

JSON_TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}


def schema_of(prompt: str) -> dict[str, str]:
    """The keys and types that the prompt asks for, read as a person would."""
    if found := re.search(r"JSON schema: (.*)", prompt):
        return {key: value["type"] for key, value in json.loads(found[1])["properties"].items()}
    if found := re.search(r"Schema: (.*)", prompt):
        return json.loads(found[1])
    if found := re.search(r"Keys: (.*)", prompt):
        return dict(re.findall(r"(\w+) \((\w+)\)", found[1]))
    return dict(re.findall(r"^- (\w+): (\w+)$", prompt, re.MULTILINE))


def test_records_have_the_schema_and_the_messages_values():
    kinds: set[str] = set()
    missing = values = 0
    for conversation, place in answers(extraction):
        schema = schema_of(conversation.turns[0].content)
        record = json.loads(conversation.turns[place].content)
        assert conversation.turns[place].content == json.dumps(record, ensure_ascii=False)
        assert list(record) == list(schema)
        message = conversation.turns[place - 1].content
        kinds.add(conversation.key.partition(":")[0])
        for key, value in record.items():
            values += 1
            if value is None:
                missing += 1
                continue
            assert isinstance(value, JSON_TYPES[schema[key]]), (key, value)
            assert isinstance(value, bool) == (schema[key] == "boolean")
            if isinstance(value, str):
                assert value in message
            elif isinstance(value, list):
                assert all(each in message for each in value)
            elif not isinstance(value, bool):
                word = NUMBER_WORDS[value] if isinstance(value, int) and value < len(NUMBER_WORDS) else None
                assert str(value) in message or (word and word in message.lower())
    assert len(kinds) >= 12
    assert 0.1 < missing / values < 0.35


# Tools


def test_calls_fit_the_declarations():
    for conversation, place in answers(tools):
        declared = {tool["function"]["name"]: tool["function"]["parameters"] for tool in conversation.tools}
        assert 1 <= len(declared) == len(conversation.tools) <= 5
        said = " ".join(turn.content for turn in conversation.turns[:place] if turn.role == "user")
        for call in conversation.turns[place].tool_calls:
            parameters = declared[call.name]
            assert set(parameters["required"]) <= set(call.arguments) <= set(parameters["properties"])
            order = [name for name in parameters["properties"] if name in call.arguments]
            assert list(call.arguments) == order
            for name, value in call.arguments.items():
                wanted = parameters["properties"][name]
                assert isinstance(value, JSON_TYPES[wanted["type"]])
                assert not isinstance(value, bool)
                assert value in wanted.get("enum", [value])
                assert str(value).lower() in said.lower()


def test_every_call_is_answered_and_every_answer_is_used():
    for conversation in tools.conversations(Random(13), SOME):
        turns = conversation.turns
        for place, turn in enumerate(turns):
            if not turn.tool_calls:
                continue
            results = turns[place + 1 : place + 1 + len(turn.tool_calls)]
            assert [result.name for result in results] == [call.name for call in turn.tool_calls]
            sentence = turns[place + 1 + len(results)].content
            for result in results:
                for name, value in json.loads(result.content).items():
                    if name != "status" and value != 0:
                        assert str(value) in sentence


def test_there_are_many_tools_with_names_that_training_never_sees():
    assert len(TOOLS) >= 25
    seen = {tool["function"]["name"] for each in tools.conversations(Random(14), SOME) for tool in each.tools}
    called = {call["name"] for each in tools.questions() for call in calls_of(each.expected)[1]}
    new = {name for name in called - seen if is_held_out(f"tool {name}", tools.ONE_NAME_IN)}
    assert len(new) > 50
    assert not any(is_held_out(f"tool {name}", tools.ONE_NAME_IN) for name in seen if not re.search(r"_[a-z]\d$", name))


def test_some_requests_are_declined_or_need_a_question_back():
    contents = [conversation.turns[place].content for conversation, place in answers(tools)]
    assert contents.count(tools.NO_TOOL) > 0.03 * len(contents)
    assert sum(text.startswith("Please tell me the ") for text in contents) > 0.03 * len(contents)


# Triage


def test_labels_and_priorities_are_those_that_the_prompt_states():
    others = 0
    for conversation, place in answers(triage):
        prompt = conversation.turns[0].content
        labels = re.search(r"Labels: (.*)", prompt)
        rules = re.search(r"Priority: (.*)", prompt)
        assert labels is not None
        assert rules is not None
        answer = json.loads(conversation.turns[place].content)
        assert list(answer) == ["label", "priority"]
        assert answer["label"] in labels[1].split(", ")
        assert re.search(rf"\b{answer['priority']}\b", rules[1])
        others += answer["label"] == triage.OTHER
    assert others > 40


def test_the_priority_follows_from_the_reach():
    """The words of the messages themselves, read by other rules than those that made them."""
    everyone = re.compile(
        r"\b(all|every|everyone|everybody|nobody can|no one|none of|entire|whole company|not a single)\b", re.I
    )
    for conversation in triage.conversations(Random(15), SOME):
        message = conversation.turns[1 if conversation.turns[0].role == "system" else 0].content.split("\n\n")[-1]
        answer = next(json.loads(turn.content) for turn in conversation.turns if turn.role == "assistant")
        if answer["priority"] in ("urgent", "critical", "P1"):
            assert everyone.search(message), message
