"""Runs chat templates in a jinja environment that reaches nothing outside and does nothing without a bound.

On top of jinja's immutable sandbox:

- loop bodies, loop conditions, macros and blocks begin with a tick; calls and filters tick too;
- `~`, literals and slices become calls that charge the new value, and so does all output;
- a template may read only the attributes in a short list per type;
- filters and globals without a use in chat templates or a cheap bound are removed (urlize, wordwrap, striptags,
  xmlattr, pprint, random, lipsum), and so are include, import, extends and autoescape.

docs/explanation/decisions/chat-templates.md says why this is not minijinja. Does not know chat messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, update_wrapper
from types import BuiltinMethodType, CodeType, MethodType
from typing import Any, Final, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter, safe_range
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from headrace.models.text.template_bounds import RENDER_BUDGET
from headrace.models.text.template_filters import bounded_filters, checked_method
from headrace.models.text.user_text import UserText, has_user_text, inherit, join, plain

_TEXT_METHODS: Final = frozenset(
    "capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii "
    "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip "
    "partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines "
    "startswith strip swapcase title upper zfill".split()
)
_DICT_NAMES: Final = frozenset(dir(dict))
_READABLE: Final[tuple[tuple[type[Any], frozenset[str]], ...]] = (
    (str, _TEXT_METHODS),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    (list, frozenset({"copy", "count", "index"})),
    (tuple, frozenset({"count", "grouper", "index", "list"})),  # groupby yields tuples with two names
    (float, frozenset({"is_integer"})),
    (
        LoopContext,
        frozenset(
            "changed cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0".split()
        ),
    ),
    (Cycler, frozenset({"current", "next", "reset"})),
    (Macro, frozenset({"name"})),
    (BlockReference, frozenset({"super"})),
)


class SandboxNamespace(Namespace):
    """A namespace with a constant text that rejects names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        values: dict[Any, Any] = dict(*args, **kwargs)
        for name in values:
            _check_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


class DictFactory:
    """Stands in for `dict` in templates, so that they cannot reach the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace cannot hold {name[:40]!r}: the name begins with an underscore"
        )


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here it only opens a scope."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        budget = RENDER_BUDGET.get()
        budget.tick()
        budget.check_format_spec(format_spec)
        if not isinstance(value, str):
            budget.materialised(value)
        return budget.charged(super().format_field(value, format_spec))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        RENDER_BUDGET.get().materialised(value)
        return super().convert_field(value, conversion)


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    pass


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of all templates and threads; each rendering has its own RENDER_BUDGET."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])
        self.finalize = jinja2.pass_context(_finalize)
        self.filters = bounded_filters()
        self.globals = {
            "range": safe_range,
            "dict": DictFactory(),
            "cycler": Cycler,
            "joiner": Joiner,
            "namespace": SandboxNamespace,
        }

    def prepare(self, source: str) -> tuple[CodeType, frozenset[str]]:
        """Return the code of a template and its literal texts."""
        parsed = self.parse(source)
        literals = {node.data for node in parsed.find_all(nodes.TemplateData)}
        literals.update(node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, str))
        tree = _Rewriter().visit(parsed)
        return self.compile(tree), frozenset(literals)

    def template(self, code: CodeType) -> jinja2.Template:
        return jinja2.Template.from_code(self, code, self.globals)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:  # jinja's name for the join of a block's or macro's output
        return join("", pieces) if RENDER_BUDGET.get().tracks else "".join(pieces)

    # The rewritten tree calls these three methods; a template cannot name them.
    def tick(self) -> bool:
        return RENDER_BUDGET.get().tick()

    def charged(self, value: Any) -> Any:
        return RENDER_BUDGET.get().charged(value)

    def concat_texts(self, *items: Any) -> str:
        return RENDER_BUDGET.get().join("", items)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(*args)  # without the loop and block variables that jinja adds
        budget = RENDER_BUDGET.get()
        budget.tick()
        if isinstance(owner, str):
            args = checked_method(budget, owner, __obj.__name__, args, kwargs)
            if budget.tracks and not isinstance(owner, UserText) and has_user_text((args, kwargs)):
                __obj = getattr(UserText(owner, ()), __obj.__name__)
        result = super().call(__context, __obj, *args, **kwargs)
        if budget.tracks and isinstance(owner, str):
            result = inherit(result, owner, args, kwargs)
        # `get` returns an existing value.
        return result if isinstance(owner, dict) and __obj.__name__ == "get" else budget.charged(result)

    def getattr(self, obj: Any, attribute: str) -> Any:
        # Templates mostly read fields of messages, for which jinja would raise and catch an exception each.
        if type(cast(object, obj)) is dict and attribute in obj and attribute not in _DICT_NAMES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return RENDER_BUDGET.get().operate(operator, left, right, self.binop_table[operator])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        if isinstance(obj, SandboxNamespace):
            return True
        if isinstance(obj, DictFactory):
            return attr == "fromkeys"
        return any(isinstance(obj, kind) and attr in names for kind, names in _READABLE)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if not isinstance(value, MethodType | BuiltinMethodType) or value.__name__ not in ("format", "format_map"):
            return None
        owner = cast(object, value.__self__)
        if not isinstance(owner, str):
            return None
        formatter = _EscapeFormatter(self, escape=owner.escape) if isinstance(owner, Markup) else _Formatter(self)
        whole_mapping = value.__name__ == "format_map"

        def formatted(*args: Any, **kwargs: Any) -> str:
            if whole_mapping:
                if kwargs or len(args) != 1 or not isinstance(args[0], Mapping):
                    raise TypeError("format_map() takes exactly one mapping")
                args, kwargs = (), cast("dict[str, Any]", args[0])
            RENDER_BUDGET.get().check(len(owner))
            text = formatter.vformat(plain(owner), args, kwargs)
            return inherit(text, owner, args, kwargs) if RENDER_BUDGET.get().tracks else type(owner)(text)

        return update_wrapper(formatted, value)


@cache
def sandbox() -> TemplateSandbox:
    return TemplateSandbox()


class _Rewriter(NodeTransformer):
    """Inserts ticks and charges into a template's syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja finds it by the node's name
        self.generic_visit(node)
        node.body.insert(0, _tick_statement(node))
        if node.test is not None:
            node.test = nodes.And(_call("tick", node), node.test, lineno=node.lineno)
        return node

    def _with_tick(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _tick_statement(node))
        return node

    visit_Macro = visit_CallBlock = visit_Block = visit_FilterBlock = _with_tick  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("concat_texts", node, *node.nodes)

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if (isinstance(node, nodes.Tuple) and node.ctx != "load") or _is_constant(node):
            return node
        return _call("charged", node, node)

    visit_Tuple = visit_Dict = visit_List  # noqa: N815

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("charged", node, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Name(self, node: nodes.Name) -> nodes.Node:  # noqa: N802
        # In a macro these two are containers of the arguments.
        return _call("charged", node, node) if node.name in ("varargs", "kwargs") and node.ctx == "load" else node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        # Constants pass through `finalize` and literal text does not; in a loop each output must be charged.
        node.nodes = [
            nodes.Const(item.data, lineno=item.lineno) if isinstance(item, nodes.TemplateData) else item
            for item in node.nodes
        ]
        return node

    def _reject(self, node: nodes.Node) -> nodes.Node:
        kind = type(node).__name__
        raise jinja2.exceptions.TemplateSyntaxError(f"{kind} is not allowed in a chat template", node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _reject  # noqa: N815
    visit_EvalContextModifier = visit_ScopedEvalContextModifier = _reject  # noqa: N815


def _call(method: str, near: nodes.Node, *arguments: nodes.Expr) -> nodes.Call:
    function = nodes.EnvironmentAttribute(method, lineno=near.lineno)
    return nodes.Call(function, list(arguments), [], None, None, lineno=near.lineno)


def _tick_statement(near: nodes.Node) -> nodes.ExprStmt:
    return nodes.ExprStmt(_call("tick", near), lineno=near.lineno)


def _is_constant(node: nodes.Node) -> bool:
    """Return whether a node is a literal of literals, which is no larger than the source."""
    if isinstance(node, nodes.List | nodes.Tuple | nodes.Dict | nodes.Pair):
        return all(_is_constant(child) for child in node.iter_child_nodes())
    return isinstance(node, nodes.Const)


def _finalize(context: Context, value: Any) -> str:
    budget = RENDER_BUDGET.get()
    return budget.charged(budget.text(value))
