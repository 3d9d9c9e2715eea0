"""Task "tools": choose among declared tools, fill in arguments, ask for a missing one, use the result.

Names of tools and arguments change between conversations, so the model must read the declarations; some names never
occur in training. The tools are in words/tools.toml.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

import msgspec

from training.corpus.conversation import JSON, Conversation, Question, ToolCall, Turn
from training.corpus.instances import (
    BETWEEN_KEYS,
    DETAIL,
    Instance,
    held_out_questions,
    is_held_out,
    training_conversations,
)
from training.corpus.values import Draw, Value, draw_of, one_of
from training.corpus.wording import as_typed, lower_first, slots
from training.corpus.words import PHRASES, read

TASK = "tools"
NO_TOOL = "None of the tools can do that."
SYSTEM, ERRORS = PHRASES.tools["system"], PHRASES.tools["errors"]
ONE_NAME_IN = 6  # of the names that a tool or an argument may have, so many are held out


class Parameter(msgspec.Struct, frozen=True):
    names: tuple[str, ...]  # a declaration uses one of them
    draw: tuple[str | int, ...] = ()  # empty: one of the choices
    type: str = "string"
    choices: tuple[str, ...] = ()
    description: str = ""

    def value(self, random: Random) -> Value:
        return drawing(self.draw, self.choices)(random)


class Outcome(msgspec.Struct, frozen=True):
    answer: dict[str, str | tuple[str | int, ...]]  # the tool's answer: a draw, or a fixed text
    sentence: str  # what to say then: slots of the answer and of the required parameters


class Tool(msgspec.Struct, frozen=True, eq=False):
    verbs: tuple[str, ...]
    nouns: tuple[str, ...]
    descriptions: tuple[str, ...]
    required: tuple[str, ...]
    requests: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    optional: tuple[str, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()  # a request that lacks one required parameter, and which
    follows: tuple[str, ...] = ()  # a request after one of the same tool, in which one value changes


class ToolsFile(msgspec.Struct):
    parameters: dict[str, Parameter]
    tools: dict[str, Tool]


FILE = read("tools", ToolsFile)
PARAMETERS, TOOLS = FILE.parameters, FILE.tools


@cache
def drawing(spec: tuple[str | int, ...], choices: tuple[str, ...] = ()) -> Draw:
    return draw_of(spec) if spec else one_of(choices)


def product(given: dict[str, Value]) -> int:
    left, right = given["first_number"][1], given["second_number"][1]
    assert isinstance(left, int)
    assert isinstance(right, int)
    return left * right


@dataclass(frozen=True)
class Declared:
    """A tool as one conversation declares it."""

    tool: Tool
    name: str
    arguments: dict[str, str]  # a parameter's own name -> the name it has here
    declaration: JSON

    def call(self, given: dict[str, Value]) -> ToolCall:
        """Return the call with these values, arguments in declaration order."""
        return ToolCall(self.name, {called: given[name][1] for name, called in self.arguments.items() if name in given})


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def possible_names(tool: Tool) -> list[str]:
    plain = [f"{verb}_{noun}" for verb in tool.verbs for noun in tool.nouns]
    plain += [f"{noun}_{verb}" for verb in tool.verbs for noun in tool.nouns]
    return plain + [camel(name) for name in plain] + [name.replace("_", "-") for name in plain]


@cache
def tool_names(kind: str, *, held_out: bool) -> tuple[str, ...]:
    names = possible_names(TOOLS[kind])
    return tuple(name for name in names if is_held_out(f"tool {name}", ONE_NAME_IN) == held_out)


def declared(random: Random, kind: str, *, held_out_names: bool) -> Declared:
    tool = TOOLS[kind]
    new = held_out_names and random.random() < 0.5
    name = random.choice(tool_names(kind, held_out=new))
    if not new and random.random() < 0.08:  # a name that says nothing: only the description tells
        name = f"{random.choice(('tool', 'action', 'function'))}_{random.choice('abcdefghk')}{random.randint(1, 9)}"
    arguments: dict[str, str] = {}
    optional = [name for name in tool.optional if random.random() < 0.7]
    for parameter in (*tool.required, *optional):
        known = [name for name in PARAMETERS[parameter].names if name not in arguments.values()]
        called = known[0] if random.random() < 0.5 else random.choice(known)
        arguments[parameter] = camel(called) if "_" in called and random.random() < 0.15 else called
    properties: dict[str, JSON] = {}
    for parameter, called in arguments.items():
        spec = PARAMETERS[parameter]
        properties[called] = {"type": spec.type}
        if spec.choices:
            properties[called] = {"type": spec.type, "enum": list(spec.choices)}
        elif spec.description and random.random() < 0.25:
            properties[called] = {"type": spec.type, "description": spec.description}
    declaration: JSON = {
        "type": "function",
        "function": {
            "name": name,
            "description": random.choice(tool.descriptions),
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": [arguments[parameter] for parameter in tool.required],
            },
        },
    }
    return Declared(tool, name, arguments, declaration)


def drawn(random: Random, names: Sequence[str]) -> dict[str, Value]:
    given = {name: PARAMETERS[name].value(random) for name in names}
    for left, right in (("origin", "destination"), ("from_currency", "to_currency")):
        while left in given and right in given and given[left] == given[right]:
            given[right] = PARAMETERS[right].value(random)
    return given


def filled(text: str, given: dict[str, Value]) -> str:
    return text.format_map({name: value[0] for name, value in given.items()})


def named(text: str, given: dict[str, Value]) -> bool:
    """Return whether the text begins with a value, whose first letter must not change."""
    return any(text.startswith(value[0]) for value in given.values())


def typed(random: Random, text: str, given: dict[str, Value]) -> str:
    return as_typed(random, text, starts_with_name=named(text, given), lower=False)


def request(random: Random, chosen: Declared) -> tuple[str, dict[str, Value]]:
    """Return a request that this tool can serve with its declared parameters, and the values in it."""
    fitting = [text for text in chosen.tool.requests if set(slots(text)) <= chosen.arguments.keys()]
    text = random.choice(fitting)
    given = drawn(random, slots(text))
    return filled(text, given), given


def outcome(random: Random, chosen: Declared, given: dict[str, Value]) -> tuple[str, str]:
    """Return the tool's result and the sentence about it."""
    if random.random() < 0.05:
        error = random.choice(ERRORS)
        return json.dumps({"error": error}), f"That did not work: {error}."
    picked = random.choice(chosen.tool.outcomes)
    drawn_values: dict[str, Value] = {
        name: (spec, spec) if isinstance(spec, str) else drawing(spec)(random) for name, spec in picked.answer.items()
    }
    if "{product}" in picked.sentence:
        drawn_values["product"] = (str(product(given)), product(given))
    content = json.dumps({name: value[1] for name, value in drawn_values.items()}, ensure_ascii=False)
    sentence = filled(picked.sentence, {**given, **drawn_values})
    return content, sentence[0].upper() + sentence[1:]


def words(name: str) -> str:
    """Split an argument's name into words: order_id and orderId become `order id`."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).replace("_", " ")


@dataclass
class Scene:
    """A conversation being drawn."""

    turns: list[Turn]
    keys: list[str]
    metrics: list[str]

    def says(self, content: str, key: str) -> None:
        self.turns.append(Turn("assistant", content))
        self.keys.append(key)
        self.metrics.append("exact")

    def calls(self, calls: tuple[ToolCall, ...], key: str) -> None:
        self.turns.append(Turn("assistant", tool_calls=calls))
        self.keys.append(key)
        self.metrics.append("calls")


def answered(random: Random, scene: Scene, calls: list[tuple[Declared, dict[str, Value]]], key: str) -> None:
    """Add the calls, the tools' results and the final sentence."""
    scene.calls(tuple(chosen.call(given) for chosen, given in calls), f"{key}{DETAIL}{[c.name for c, _ in calls]}")
    sentences: list[str] = []
    for chosen, given in calls:
        content, sentence = outcome(random, chosen, given)
        scene.turns.append(Turn("tool", content, name=chosen.name))
        sentences.append(sentence)
    scene.says(" ".join(sentences), f"{key}{DETAIL}{scene.turns[-1].content}")


def exchange(random: Random, scene: Scene, present: list[Declared], absent: list[Tool], *, absent_share: float) -> None:
    """Add one request and everything that follows from it."""
    chance = random.random()
    chosen = random.choice(present)
    if chance < absent_share and absent:
        text = random.choice(random.choice(absent).requests)
        given = drawn(random, slots(text))
        text = filled(text, given)
        scene.turns.append(Turn("user", typed(random, text, given)))
        scene.says(NO_TOOL, f"{text}{DETAIL}none of {[each.name for each in present]}")
    elif chance < absent_share + 0.14 and chosen.tool.missing:
        text, lacking = random.choice(chosen.tool.missing)
        given = drawn(random, chosen.tool.required)
        said = {name: given[name] for name in slots(text)}
        text = filled(text, said)
        complete = {**said, **{name: given[name] for name in chosen.tool.required if name in said or name == lacking}}
        called = chosen.arguments[lacking]
        scene.turns.append(Turn("user", typed(random, text, said)))
        scene.says(f"Please tell me the {words(called)}.", f"{text} {present[0].name}{DETAIL}{called}")
        if set(complete) != set(chosen.tool.required):
            return
        value = given[lacking][0]
        reply = random.choice(("{}", "{}.", "{}, please.", "It is {}.")).format(value)
        scene.turns.append(Turn("user", reply))
        answered(random, scene, [(chosen, complete)], f"{text} {reply}")
    elif chance < absent_share + 0.28:
        other = random.choice(present)
        first, given = request(random, chosen)
        second, more = request(random, other)
        if first == second:
            return exchange(random, scene, present, absent, absent_share=absent_share)
        joined = f"{first} {random.choice(('And ', 'Also, ', 'And then: ', ''))}"
        joined += second if joined.endswith((". ", "? ")) or named(second, more) else lower_first(second)
        scene.turns.append(Turn("user", typed(random, joined, given)))
        answered(random, scene, [(chosen, given), (other, more)], f"{first}{BETWEEN_KEYS}{second}")
    else:
        text, given = request(random, chosen)
        scene.turns.append(Turn("user", typed(random, text, given)))
        answered(random, scene, [(chosen, given)], text)
        if chosen.tool.follows and random.random() < 0.25:
            follow = random.choice(chosen.tool.follows)
            changed = {**given, **drawn(random, slots(follow))}
            if len({changed[name][0] for name in changed}) == len(changed) and changed != given:
                text = f"{text} {filled(follow, changed)}"
                scene.turns.append(Turn("user", filled(follow, changed)))
                answered(random, scene, [(chosen, changed)], text)
    return None


def draw(
    random: Random, *, held_out_names: bool, exchanges: Sequence[int] = (1, 1, 1, 2), absent_share: float = 0.14
) -> Instance:
    kinds = random.sample(list(TOOLS), random.choice((1, 2, 2, 3, 3, 4, 5)))
    present: list[Declared] = []
    for kind in kinds:
        made = declared(random, kind, held_out_names=held_out_names)
        if made.name not in [each.name for each in present]:
            present.append(made)
    absent = [tool for kind, tool in TOOLS.items() if kind not in kinds]
    scene = Scene([], [], [])
    if random.random() < 0.25:
        scene.turns.append(Turn("system", random.choice(SYSTEM)))
    for _ in range(random.choice(exchanges)):
        exchange(random, scene, present, absent, absent_share=absent_share)
    declarations = tuple(each.declaration for each in present)
    return Instance(tuple(scene.turns), tuple(scene.keys), tuple(scene.metrics), declarations)


def training_instance(random: Random) -> Instance:
    # More requests per declaration than in the evaluation, because declarations are long and only calls count. More
    # requests that no tool can serve, because the model learns to recognise these last.
    return draw(random, held_out_names=False, exchanges=(2, 3, 4, 5), absent_share=0.2)


def held_out_instance(random: Random) -> Instance:
    return draw(random, held_out_names=True)


def conversations(random: Random, count: int) -> Iterator[Conversation]:
    return training_conversations(TASK, training_instance, random, count)


def questions() -> list[Question]:
    return held_out_questions(TASK, held_out_instance, 4, 480)
