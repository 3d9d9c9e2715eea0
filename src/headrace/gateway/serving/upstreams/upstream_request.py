"""From what is asked to the body that an upstream takes.

Owns what becomes of every field of TextRequest and of Sampling (FATES): it is sent, or done here, or refused with a
clear error that names the parameter. Nothing is dropped in silence. Knows no connection.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from headrace.config.upstream_section import UpstreamConfig, UpstreamFeatures
from headrace.engine.interface.grammar_spec import Grammar
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.requests.text_request import TextRequest, Tool
from headrace.gateway.serving.exchange import Exchange

# What becomes of each field. "sent": in the body, where the server takes it, and else refused; "done here": by this
# server, whatever the other can; "wish": sent where it can be said, and else left to the model, as a template does.
FIELD_HANDLING: Final[Mapping[str, str]] = {
    "model": "sent, by its name there",
    "messages": "sent; reasoning of earlier answers where the server takes it, as most templates leave it out",
    "prompts": "sent; token ids where the server takes them",
    "tools": "sent",
    "choosing": "sent; with none, no tools are sent",
    "only_tool": "sent",
    "parallel_calls": "sent where the server takes it, and done here: later calls are left out",
    "grammar": "sent, as response_format or by the server's own parameters",
    "grammar_of": "done here: names the parameter in errors",
    "template": "sent",
    "think": "wish; where it cannot be said, reasoning that nobody wants is left out",
    "max_tokens": "sent, at most what the context has room for where the prompt's tokens are known",
    "min_tokens": "sent",
    "stop": "sent",
    "stop_ids": "sent",
    "ignore_eos": "sent",
    "n": "sent",
    "prompt_logprobs": "sent, with echo",
    "speculate": "done here: it does not change an answer, and upstreams decide for themselves",
    "skip_special_tokens": "done here: no endpoint offers it",
    "echo": "sent where the server takes it; without log-probabilities done here",
    "stream": "done here: the upstream streams wherever it can, so that it can be cancelled and timed",
    "include_usage": "done here: the upstream is always asked for the usage",
    "deadline_s": "done here: the answer is cut",
    "surface": "done here: it has a deadline",
    "profile": "done here: it chose the variant",
    "priority": "sent where the server takes it; done here in the queue before the upstream",
    "cache": "sent: off",
    "user": "sent where the operator wants it; done here in the log",
    "metadata": "done here: handed back",
    "sources": "done here: they are in the messages by now",
    "overflow": "done here: the messages are as short by now as they are to be",
    "seeded": "done here: it says whether an answer may be kept",
    "degrade": "done here: before anything is sent",
    "sampling": "each of its fields",
    "temperature": "sent",
    "top_k": "sent",
    "top_p": "sent",
    "min_p": "sent",
    "repetition_penalty": "sent",
    "frequency_penalty": "sent",
    "presence_penalty": "sent",
    "logit_bias": "sent",
    "seed": "sent; where the server takes none, greedy answers need none, and others cannot be repeated",
    "logprobs": "sent",
}

_MOST_BIAS: Final = 100.0  # as the parameter has it; what is beyond means always, or never


class UpstreamRequest(msgspec.Struct, frozen=True):
    """What is asked of an upstream, and what is to be done here with its answer."""

    path: str
    body: bytes
    choices: int
    chat: bool
    hide_reasoning: bool = False
    one_call: bool = False
    named: bool = False  # one tool had to be called: an answer does not end by it
    echo: tuple[str, ...] = ()  # prompts that are put before the answers here, n for each
    echoed: bool = False  # the upstream puts them there
    logprobs: int | None = None  # likeliest tokens that are told
    stop: tuple[str, ...] = ()

    @property
    def plain(self) -> bool:
        """Nothing of the answer is changed here."""
        return not (self.hide_reasoning or self.one_call or self.echo)


def build_upstream_request(
    exchange: Exchange,
    config: UpstreamConfig,
    takes: UpstreamFeatures,
    *,
    model: str,
    prompt_tokens: int | None = None,
    secret: str = "",
) -> UpstreamRequest:
    """ApiError for what the upstream cannot do. `prompt_tokens`: of the longest prompt, where they are known.
    `secret`: that tenants' salts are made with."""
    asked = exchange.asked
    chat = asked.messages is not None
    if not (takes.chat if chat else takes.completions):
        raise _refused("messages" if chat else "prompt", f"'{exchange.served.name}' takes no such requests")
    body: dict[str, Any] = {"model": model}
    echo: tuple[str, ...] = ()
    if asked.messages is not None:
        body["messages"] = [_message(message, takes) for message in asked.messages]
        _add_tools(body, asked, takes)
        _add_template(body, asked, takes)
        if asked.echo or asked.prompt_logprobs is not None:
            raise _refused("echo", "a chat has no text that could be put before its answer")
    else:
        echo = _add_prompts(body, asked, takes)
        if asked.template:
            raise _refused("chat_template_kwargs", "a prompt has no template")
        if asked.tools:
            raise _refused("tools", "a prompt calls none")
    _add_grammar(body, asked, config, takes, chat=chat)
    _add_sampling(body, asked, config, takes)
    _add_logprobs(body, asked, config, takes, chat=chat)
    _add_lengths(body, exchange, config, takes, chat=chat, prompt_tokens=prompt_tokens)
    _add_ours(body, exchange, config, takes, secret)
    if takes.stream:
        body["stream"] = True
        if takes.stream_options:
            body["stream_options"] = {"include_usage": True}
    return UpstreamRequest(
        path="/chat/completions" if chat else "/completions",
        body=_encoded(body),
        choices=asked.n * len(asked.prompts or ("",)),
        chat=chat,
        hide_reasoning=asked.think is False and takes.thinking == "none",
        one_call=bool(asked.tools) and not asked.parallel_calls,
        named=asked.only_tool is not None,
        echo=echo,
        echoed="echo" in body,
        logprobs=asked.sampling.logprobs,
        stop=asked.stop,
    )


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        raise invalid_request("the text holds half of a surrogate pair, which is no character") from None


def _refused(parameter: str, why: str) -> ApiError:
    return ApiError(f"'{parameter}' is not supported: {why}", parameter=parameter, code="unsupported_parameter")


def _cannot(parameter: str) -> ApiError:
    return _refused(parameter, "the server behind this model does not take it")


# Messages and prompts


def _message(message: Mapping[str, Any], takes: UpstreamFeatures) -> dict[str, Any]:
    """From the shape that templates take to the one that the API has."""
    role = message["role"]
    plain: dict[str, Any] = {"role": role, "content": message.get("content") or ""}
    if role == "tool":
        plain["tool_call_id"] = message.get("tool_call_id", "")
    elif "name" in message:
        plain["name"] = message["name"]
    if takes.reasoning and message.get("reasoning_content"):
        plain["reasoning_content"] = message["reasoning_content"]
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    if calls:
        plain["content"] = plain["content"] or None
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function: Mapping[str, Any] = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {"id": call.get("id", ""), "type": "function", "function": {"name": function["name"], "arguments": text}}


def _add_prompts(body: dict[str, Any], asked: TextRequest, takes: UpstreamFeatures) -> tuple[str, ...]:
    """The prompts' texts where they are to be put before the answers here."""
    prompts = asked.prompts or []
    if not takes.token_prompts and any(not isinstance(prompt, str) for prompt in prompts):
        raise _refused("prompt", "the server behind this model takes texts only, no token ids")
    if len(prompts) > 1 and not takes.n:
        raise _refused("prompt", "the server behind this model takes one prompt at a time")
    body["prompt"] = prompts[0] if len(prompts) == 1 else prompts
    if not asked.echo:
        if asked.prompt_logprobs is not None:
            raise _refused("echo", "the prompt's log-probabilities are told with the prompt")
        return ()
    if takes.echo:
        body["echo"] = True
        return ()
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if asked.prompt_logprobs is not None or asked.sampling.logprobs is not None or len(texts) < len(prompts):
        raise _cannot("echo")
    return tuple(texts)


def _add_tools(body: dict[str, Any], asked: TextRequest, takes: UpstreamFeatures) -> None:
    if not asked.tools or asked.choosing == "none":
        return
    if not takes.tools:
        raise _cannot("tools")
    body["tools"] = [_tool(tool) for tool in asked.tools]
    if asked.only_tool is not None:
        body["tool_choice"] = {"type": "function", "function": {"name": asked.only_tool}}
    else:
        body["tool_choice"] = asked.choosing
    if not asked.parallel_calls and takes.parallel_tool_calls:
        body["parallel_tool_calls"] = False


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = dict(tool.parameters) if tool.parameters is not None else _NO_SCHEMA
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


_NO_SCHEMA: Final[dict[str, Any]] = {"type": "object", "properties": {}}


def _add_template(body: dict[str, Any], asked: TextRequest, takes: UpstreamFeatures) -> None:
    settings = dict(asked.template)
    if takes.thinking == "effort" and "reasoning_effort" in settings:
        body["reasoning_effort"] = settings.pop("reasoning_effort")
    if settings and not takes.template:
        raise _cannot("chat_template_kwargs")
    if asked.think is not None:
        if takes.thinking == "template":
            settings.setdefault("enable_thinking", asked.think)
        elif takes.thinking == "effort":
            body.setdefault("reasoning_effort", "medium" if asked.think else "none")
    if settings:
        body["chat_template_kwargs"] = settings


# What an answer is held to


def _add_grammar(
    body: dict[str, Any], asked: TextRequest, config: UpstreamConfig, takes: UpstreamFeatures, *, chat: bool
) -> None:
    grammar = asked.grammar
    if grammar is None:
        return
    if grammar.kind not in (takes.grammars or ()):
        raise _cannot(asked.grammar_of)
    if grammar.kind == "json_object":
        body["response_format"] = {"type": "json_object"}
    elif grammar.kind == "json_schema":
        schema = {"name": "answer", "schema": msgspec.Raw(grammar.text.encode(errors="replace")), "strict": True}
        _check_json(grammar, asked.grammar_of)
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if config.kind == "headrace" and not chat:
            del body["response_format"]
            body["guided_json"] = grammar.text
    else:
        _add_other_grammar(body, grammar, config, asked.grammar_of)


def _add_other_grammar(body: dict[str, Any], grammar: Grammar, config: UpstreamConfig, parameter: str) -> None:
    value: Any = grammar.text
    if grammar.kind == "choice":
        value = _check_json(grammar, parameter)
    match config.kind:
        case "vllm":
            name = {"regex": "regex", "choice": "choice", "lark": "grammar"}[grammar.kind]
            body["structured_outputs"] = {name: value}
        case "sglang" if grammar.kind == "regex":
            body["regex"] = value
        case _:
            name = {"regex": "guided_regex", "choice": "guided_choice", "lark": "guided_grammar"}[grammar.kind]
            body[name] = value


def _check_json(grammar: Grammar, parameter: str) -> object:
    """It goes into the body as it is, so it must be what it says."""
    try:
        return msgspec.json.decode(grammar.text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        raise invalid_request(f"'{parameter}' is not JSON", parameter) from None


# How it is drawn, and how long it is


def _add_sampling(body: dict[str, Any], asked: TextRequest, config: UpstreamConfig, takes: UpstreamFeatures) -> None:
    sampling = asked.sampling
    body["temperature"] = sampling.temperature
    if sampling.top_p != 1.0 or takes.defaults:
        body["top_p"] = sampling.top_p
    penalty = "repeat_penalty" if config.kind == "llama.cpp" else "repetition_penalty"
    everything = 0 if config.kind == "llama.cpp" else -1
    for name, there, value, neutral, sent in (
        ("top_k", takes.top_k, sampling.top_k or everything, everything, "top_k"),
        ("min_p", takes.min_p, sampling.min_p, 0.0, "min_p"),
        ("repetition_penalty", takes.repetition_penalty, sampling.repetition_penalty, 1.0, penalty),
        ("frequency_penalty", takes.penalties, sampling.frequency_penalty, 0.0, "frequency_penalty"),
        ("presence_penalty", takes.penalties, sampling.presence_penalty, 0.0, "presence_penalty"),
    ):
        if value != neutral and not there:
            raise _cannot(name)
        if value != neutral or (there and takes.defaults):
            body[sent] = value
    if sampling.logit_bias:
        if not takes.logit_bias:
            raise _cannot("logit_bias")
        body["logit_bias"] = {
            str(token): max(-_MOST_BIAS, min(bias, _MOST_BIAS)) for token, bias in sampling.logit_bias.items()
        }
    if takes.seed:
        body["seed"] = fold_seed(sampling.seed)
    if asked.n > 1:
        if not takes.n:
            raise _cannot("n")
        body["n"] = asked.n


def fold_seed(seed: int) -> int:
    """Not every server reads more than 31 bits, so larger seeds become other ones, always the same."""
    return seed if seed < 2**31 else seed % (2**31 - 1)


def _add_logprobs(
    body: dict[str, Any], asked: TextRequest, config: UpstreamConfig, takes: UpstreamFeatures, *, chat: bool
) -> None:
    wished = asked.sampling.logprobs
    if wished is None:
        return
    if not takes.logprobs:
        raise _cannot("logprobs")
    # llama.cpp takes 0 for none at all; what is too much is left out of the answer.
    most = max(wished, 1) if config.kind == "llama.cpp" else wished
    if chat:
        body |= {"logprobs": True, "top_logprobs": most}
    else:
        body["logprobs"] = most


def _add_lengths(
    body: dict[str, Any],
    exchange: Exchange,
    config: UpstreamConfig,
    takes: UpstreamFeatures,
    *,
    chat: bool,
    prompt_tokens: int | None,
) -> None:
    asked = exchange.asked
    most = asked.max_tokens if asked.max_tokens is not None else exchange.served.max_tokens
    if most is not None and prompt_tokens is not None and config.context is not None:
        most = max(1, min(most, config.context - prompt_tokens))
    if most is not None:
        body["max_completion_tokens" if chat and takes.max_completion_tokens else "max_tokens"] = most
    if asked.min_tokens:
        if not takes.min_tokens:
            raise _cannot("min_tokens")
        body["min_tokens"] = asked.min_tokens if most is None else min(asked.min_tokens, most)
    if asked.stop:
        if len(asked.stop) > (takes.stops or 0):
            raise _refused("stop", f"the server behind this model takes {takes.stops} of them at most")
        body["stop"] = list(asked.stop)
    if asked.stop_ids:
        if not takes.stop_token_ids:
            raise _cannot("stop_token_ids")
        body["stop_token_ids"] = sorted(asked.stop_ids)
    if asked.ignore_eos:
        if not takes.ignore_eos:
            raise _cannot("ignore_eos")
        body["ignore_eos"] = True


# What belongs to the caller


def _add_ours(
    body: dict[str, Any], exchange: Exchange, config: UpstreamConfig, takes: UpstreamFeatures, secret: str
) -> None:
    asked, tenant = exchange.asked, exchange.caller.tenant
    if asked.cache != "on" and not takes.bypass:
        raise _cannot("cache")
    if takes.salt:
        # Where nobody else has the salt, nothing is found and nothing can be found by others.
        body["cache_salt"] = _salt(tenant, secret) if asked.cache == "on" else secrets.token_urlsafe(32)
    elif asked.cache != "on":
        body |= {"cache_prompt": False} if config.kind == "llama.cpp" else {"cache": "off"}
    if asked.priority and takes.priority:
        # vLLM and SGLang begin with the smallest, unless they are told otherwise.
        body["priority"] = asked.priority if config.kind == "headrace" else -asked.priority
    if asked.user is not None and takes.user:
        body["user"] = asked.user


def _salt(tenant: str, secret: str) -> str:
    """The same for all requests of a tenant, whichever server they come through, and nobody else's."""
    return hmac.new(secret.encode(), tenant.encode(errors="replace"), hashlib.sha256).hexdigest()
