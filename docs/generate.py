"""Writes the generated parts of docs/reference from the code: run `python docs/generate.py` after a change of the code.

A generated part stands between `<!-- generated: KIND NAME -->` and `<!-- end -->`. Commands and metrics are generated
whole. Of configuration keys, headers and error codes, the names, types and defaults are generated, and the meaning
stays as the page has it: write it into the row that the first run leaves with "TODO". A test fails when a page is not
what this program would write.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
from cyclopts import App
from msgspec import inspect

from headrace.cli import app
from headrace.cli.drill import DRILLS, FAULTS
from headrace.config import Config
from headrace.config.loader import OPTIONS
from headrace.config.toml_text import toml_value
from headrace.lab.techniques import TECHNIQUES
from headrace.observe import computed_metrics, metrics
from headrace.variant import Variant

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
REGION = re.compile(r"(<!-- generated: (\w+)(?: ([^\n]+))? -->\n).*?(<!-- end -->)", re.DOTALL)
TODO = "TODO"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in map(list, lines))


def existing_rows(region: str) -> dict[str, list[str]]:
    """The cells of each row by the name in its first cell."""
    rows = [re.split(r"(?<!\\) \| ", line.strip("| \n")) for line in region.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row for row in rows}


# Configuration


def config_table(path: str, region: str) -> str:
    kind = section(path)
    before = existing_rows(region)
    rows = []
    for field in msgspec.structs.fields(kind):
        if kind is Variant and field.name not in OPTIONS:
            continue
        row = before.get(field.name, [field.name, TODO, TODO])
        rows.append([f"`{field.name}`", row[1], type_text(field.type), default_text(field, row[-1])])
    return table(("key", "meaning", "type", "default"), rows)


def section(path: str) -> type[msgspec.Struct]:
    """The struct at a path such as `models.NAME.upstream`, where a name in capitals stands for any key."""
    kind: Any = Config
    for part in path.split(".") if path else ():
        if part == "options":
            return Variant
        if not part.isupper():
            kind = next(field.type for field in msgspec.structs.fields(kind) if field.name == part)
        kind = inner_struct(kind)
    return kind


def inner_struct(kind: Any) -> Any:
    """The struct in an optional, a list or a table of it."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next((found for part in get_args(kind) if (found := inner_struct(part)) is not None), None)


def type_text(kind: Any) -> str:
    return of_type(inspect.type_info(kind))


def of_type(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata():
            return of_type(kind.type)
        case inspect.UnionType():
            return " or ".join(of_type(each) for each in kind.types if not isinstance(each, inspect.NoneType))
        case inspect.IntType():
            return "integer" + range_text(kind)
        case inspect.FloatType():
            return "number" + range_text(kind)
        case inspect.BoolType():
            return "boolean"
        case inspect.LiteralType():
            return ", ".join(f"`{toml_value(value)}`" for value in kind.values)
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            return f"list of {of_type(kind.item_type)}".replace("list of table", "list of tables")
        case inspect.TupleType():
            return f"list of {len(kind.item_types)} times {of_type(kind.item_types[0])}"
        case inspect.DictType():
            return "table"
        case inspect.StructType():
            return "table"
        case _:
            return "text"


def range_text(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f", {kind.ge:g} to {kind.le:g}" if kind.le < 10_000 else f", {kind.ge:g} to {kind.le:,}"
    bounds = (("≥", kind.ge), (">", kind.gt), ("≤", kind.le), ("<", kind.lt))
    return "".join(f" {sign} {bound:g}" for sign, bound in bounds if bound is not None)


def default_text(field: Any, before: str) -> str:
    """The default as TOML, with what the page adds in brackets; where there is none, what the page has."""
    if field.required:
        return "required"
    if field.default is msgspec.NODEFAULT or field.default is None or isinstance(field.default, msgspec.Struct | dict):
        return before
    value = f"`{toml_value(field.default)}`"
    added = re.fullmatch(r"`[^`]*`(.*)", before)
    return value + (added[1] if added and before.startswith(value) else "")


# Commands


def command_text(name: str, _region: str) -> str:
    command = app[name]
    subcommands = [each for each in command if not each.startswith("-")]
    tables = {each: flag_rows(command[each]) for each in subcommands}
    shared = [row for row in next(iter(tables.values()), []) if sum(row in rows for rows in tables.values()) > 3]
    text = ""
    if command.default_command:
        text += "\n" + arguments_table(flag_rows(command))
    if shared:
        text += f"\nCommands that ask a server also take:\n\n{arguments_table(shared)}"
    for each, rows in tables.items():
        summary = command[each].help.partition("\n\n")[0].replace("\n", " ")
        text += f"\n### `headrace {name} {each}`\n\n{summary}\n"
        if own := [row for row in rows if row not in shared]:
            text += "\n" + arguments_table(own)
    return text + "\n"


def arguments_table(rows: list[list[str]]) -> str:
    return table(("argument", "meaning", "default"), rows)


def flag_rows(command: App) -> list[list[str]]:
    rows = []
    for argument in command.assemble_argument_collection(parse_docstring=True):
        if argument.names == ("*",) or not argument.show:
            continue
        default = argument.field_info.default
        names = [name for name in argument.names if default is not False or not is_off_form(name, argument.names)]
        text = " ".join((argument.parameter.help or "").split()).replace("|", "\\|")
        rows.append([", ".join(f"`{name}`" for name in names), text, flag_default(default)])
    return rows


def is_off_form(name: str, names: Iterable[str]) -> bool:
    return name.startswith("--no-") and f"--{name.removeprefix('--no-')}" in names


def flag_default(value: Any) -> str:
    if value is None or value == "" or value == []:
        return ""
    if isinstance(value, type):
        return "required"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(f"`{each}`" for each in (value if isinstance(value, list | tuple) else [value]))


# Metrics


def metrics_table(_name: str, _region: str) -> str:
    rows = []
    computed = {metric.name: metric for metric in computed_metrics.METRICS}
    for each in metrics.registry.collect():
        known = computed.get(each.name)
        names = metrics.registry._names_to_collectors[each.name]._labelnames if known is None else known.labels
        labels = ", ".join(f"`{label}`" for label in names)
        name = each.name + ("_total" if each.type == "counter" else "")
        rows.append([f"`{name}`", each.type, labels, each.documentation])
    return table(("metric", "type", "labels", "meaning"), rows)


# Headers and error codes


def string_texts(node: ast.expr) -> Iterator[str]:
    """The texts that an expression can give; what is filled in stands as `...`."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr():
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else "..." for p in node.values)
        case ast.IfExp():
            yield from string_texts(node.body)
            yield from string_texts(node.orelse)


def trees() -> Iterator[ast.Module]:
    for folder in ("gateway", "lab/online", "pipelines", "server"):
        for path in sorted((ROOT / "src" / "headrace" / folder).rglob("*.py")):
            yield ast.parse(path.read_text(encoding="utf-8"))


def error_codes() -> set[str]:
    """Every code that is given as an argument or a variable called `code`."""
    modules = list(trees())
    places: dict[str, int] = {}
    for module in modules:
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef):
                names = [argument.arg for argument in node.args.posonlyargs + node.args.args]
                if "code" in names:
                    places[node.name] = names.index("code")
    found: set[str] = set()
    for module in modules:
        for node in ast.walk(module):
            match node:
                case ast.Call():
                    found |= {t for each in node.keywords if each.arg == "code" for t in string_texts(each.value)}
                    place = places.get(node.func.id, -1) if isinstance(node.func, ast.Name) else -1
                    if 0 <= place < len(node.args):
                        found |= set(string_texts(node.args[place]))
                case ast.Assign(targets=[ast.Name(id="code")]):
                    found |= set(string_texts(node.value))
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    for name, value in zip(names, values, strict=False):
                        if isinstance(name, ast.Name) and name.id == "code":
                            found |= set(string_texts(value))
                case _:
                    pass
    return {code for code in found if re.fullmatch(r"[a-z_.]+", code)}


def header_names() -> set[str]:
    nodes = (node for module in trees() for node in ast.walk(module) if isinstance(node, ast.expr))
    texts = {text for node in nodes for text in string_texts(node)}
    header = re.compile(r"x-(headrace|ratelimit)-[a-z.-]+|x-should-retry|x-request-id|retry-after(-ms)?|server-timing")
    return {text for text in texts if header.fullmatch(text) and not text.endswith("-")}


def techniques_table() -> str:
    rows = (
        [each.name, each.area, "same" if each.lossless else "may change", each.about, f"`{each.switch}`"]
        for each in TECHNIQUES
    )
    return table(("technique", "area", "answers", "what it does", "switch"), rows)


def described(title: str, names: Iterable[str], region: str) -> str:
    before = existing_rows(region)
    return table((title, "meaning"), ([f"`{name}`", before.get(name, [name, TODO])[1]] for name in sorted(names)))


KINDS: dict[str, Callable[[str, str], str]] = {
    "config": config_table,
    "command": command_text,
    "drills": lambda _name, _region: table(("name", "the fault"), ([f"`{name}`", FAULTS[name]] for name in DRILLS)),
    "metrics": metrics_table,
    "techniques": lambda _name, _region: techniques_table(),
    "headers": lambda _, region: described("header", header_names(), region),
    "codes": lambda _, region: described("code", error_codes(), region),
}


def generated(page: str) -> str:
    """The page with its generated parts as the code has them now."""
    return REGION.sub(lambda m: m[1] + KINDS[m[2]](m[3] or "", m[0]) + m[4], page)


def pages() -> list[Path]:
    return [path for path in sorted(REFERENCE.glob("*.md")) if "<!-- generated:" in path.read_text(encoding="utf-8")]


def main() -> int:
    check = "--check" in sys.argv[1:]
    wrong = 0
    for path in pages():
        text = path.read_text(encoding="utf-8")
        new = generated(text)
        wrong += sum(TODO in line for line in new.splitlines())
        if new != text:
            wrong += check
            print(f"{path.relative_to(ROOT)} {'is out of date' if check else 'written'}")
            if not check:
                path.write_text(new, encoding="utf-8")
    if wrong:
        print(f"Run python docs/generate.py, and describe each row that says {TODO}.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
