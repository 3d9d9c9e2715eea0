"""Builds the body of an upstream's request from a TextRequest.

FIELD_HANDLING says for every field whether it is sent, applied by this server or rejected with an error that names the
parameter. No field is dropped silently. Does not send anything.
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
from headrace.gateway.images.message_images import upstream_parts
from headrace.gateway.requests.text_request import TextRequest, Tool
from headrace.gateway.serving.exchange import Exchange

# "sent": in the body if the upstream takes the parameter, else rejected. "done here": applied by this server, whatever
# the upstream can do. "wish": sent if the upstream has a parameter for it, else left to the model.
FIELD_HANDLING: Final[Mapping[str, str]] = {
    "model": "sent, as the model's name at the upstream",
    "messages": "sent; reasoning of earlier answers only if the upstream takes it, as most templates drop it",
    "prompts": "sent; token ids only if the upstream takes them",
    "tools": "sent",
    "choosing": "sent; with none, no tools are sent",
    "only_tool": "sent",
    "allowed_tools": "done here: only these tools are sent",
    "parallel_calls": "sent if the upstream takes it, and done here: further calls are dropped",
    "grammar": "sent, as response_format or as the upstream's own parameter",
    "grammar_of": "done here: names the parameter in errors",
    "template": "sent",
    "template_hints": "wish; dropped if the upstream takes neither the parameter nor chat_template_kwargs",
    "show_reasoning": "done here: the reasoning is left out of the answer",
    "prediction": "done here: it does not change an answer, and upstreams draft by themselves",
    "begun": "done here: only engines of this server continue a text",
    "think": "wish; if it cannot be sent, unwanted reasoning is dropped",
    "max_tokens": "sent, limited to the room in the context if the prompt's tokens are known",
    "min_tokens": "sent",
    "stop": "sent",
    "stop_ids": "sent",
    "ignore_eos": "sent",
    "n": "sent",
    "prompt_logprobs": "sent, with echo",
    "speculate": "done here: it does not change an answer, and upstreams decide for themselves",
    "skip_special_tokens": "done here: no endpoint offers it",
    "echo": "sent if the upstream takes it; else done here, without log-probabilities",
    "stream": "done here: the upstream always streams if it can, so that it can be cancelled and timed",
    "include_usage": "done here: usage is always requested",
    "continuous_usage": "done here: by the tokens that came so far",
    "deadline_s": "done here: the answer is cut",
    "surface": "done here: it decides the deadline",
    "profile": "done here: it selected the variant",
    "priority": "sent if the upstream takes it; done here in the upstream's queue",
    "cache": "sent: off",
    "user": "sent if configured; done here in the log",
    "metadata": "done here: repeated in the answer",
    "sources": "done here: already part of the messages",
    "overflow": "done here: the messages are already shortened",
    "seeded": "done here: it decides whether an answer may be cached",
    "rewrite": "done here: after the answer",
    "degrade": "done here: before anything is sent",
    "pipeline": "done here: pipelines run in this server",
    "sampling": "each of its fields",
    "temperature": "sent",
    "top_k": "sent",
    "top_p": "sent",
    "min_p": "sent",
    "repetition_penalty": "sent",
    "frequency_penalty": "sent",
    "presence_penalty": "sent",
    "logit_bias": "sent",
    "seed": "sent if the upstream takes it; without it, sampled answers are not reproducible",
    "logprobs": "sent",
}

_MOST_BIAS: Final = 100.0  # the parameter's bound; larger values mean always or never


class UpstreamRequest(msgspec.Struct, frozen=True):
    """A request to an upstream, and what this server has to do with its answer."""

    path: str
    body: bytes
    choices: int
    chat: bool
    hide_reasoning: bool = False
    one_call: bool = False
    named: bool = False  # a particular tool must be called, so the finish reason is stop
    echo: tuple[str, ...] = ()  # prompts to put before the answers, n choices for each
    echoed: bool = False  # the upstream puts the prompts before the answers
    logprobs: int | None = None  # number of most likely tokens to return
    stop: tuple[str, ...] = ()

    @property
    def plain(self) -> bool:
        """True if the answer needs no change."""
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
    """Build the request. ApiError for a parameter that the upstream does not take.

    `prompt_tokens`: of the longest prompt, if known. `secret`: the key for deriving the tenants' cache salts.
    """
    text_request = exchange.text_request
    chat = text_request.messages is not None
    if not (takes.chat if chat else takes.completions):
        raise _unsupported("messages" if chat else "prompt", f"'{exchange.served.name}' does not serve this endpoint")
    body: dict[str, Any] = {"model": model}
    echo: tuple[str, ...] = ()
    if text_request.messages is not None:
        body["messages"] = [_message(message, takes) for message in text_request.messages]
        _add_tools(body, text_request, takes)
        _add_template(body, text_request, takes)
        if text_request.echo or text_request.prompt_logprobs is not None:
            raise _unsupported("echo", "a chat has no prompt text to echo")
    else:
        echo = _add_prompts(body, text_request, takes)
        if text_request.template:
            raise _unsupported("chat_template_kwargs", "prompts use no chat template")
        if text_request.tools:
            raise _unsupported("tools", "use /v1/chat/completions")
    _add_grammar(body, text_request, config, takes, chat=chat)
    _add_sampling(body, text_request, config, takes)
    _add_logprobs(body, text_request, config, takes, chat=chat)
    _add_lengths(body, exchange, config, takes, chat=chat, prompt_tokens=prompt_tokens)
    _add_caller_settings(body, exchange, config, takes, secret)
    if takes.stream:
        body["stream"] = True
        if takes.stream_options:
            body["stream_options"] = {"include_usage": True}
    return UpstreamRequest(
        path="/chat/completions" if chat else "/completions",
        body=_encoded(body),
        choices=text_request.n * len(text_request.prompts or ("",)),
        chat=chat,
        hide_reasoning=text_request.think is False and takes.thinking == "none",
        one_call=bool(text_request.tools) and not text_request.parallel_calls,
        named=text_request.only_tool is not None,
        echo=echo,
        echoed="echo" in body,
        logprobs=text_request.sampling.logprobs,
        stop=text_request.stop,
    )


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        raise invalid_request("The text contains an unpaired surrogate. Send valid Unicode.") from None


def _unsupported(parameter: str, why: str) -> ApiError:
    return ApiError(f"'{parameter}' is not supported: {why}.", parameter=parameter, code="unsupported_parameter")


def _not_taken(parameter: str) -> ApiError:
    return _unsupported(parameter, "the upstream of this model does not take it")


# Messages and prompts


def _message(message: Mapping[str, Any], takes: UpstreamFeatures) -> dict[str, Any]:
    """Convert a message from the shape of chat templates to the shape of the API."""
    role = message["role"]
    plain: dict[str, Any] = {"role": role, "content": message.get("content") or ""}
    if message.get("images"):
        if not takes.images:
            raise _unsupported("messages", "the upstream of this model does not take images")
        plain["content"] = upstream_parts(message)
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


def _add_prompts(body: dict[str, Any], text_request: TextRequest, takes: UpstreamFeatures) -> tuple[str, ...]:
    """Add the prompts. Return their texts if this server must put them before the answers."""
    prompts = text_request.prompts or []
    if not takes.token_prompts and any(not isinstance(prompt, str) for prompt in prompts):
        raise _unsupported("prompt", "the upstream of this model takes text only, not token ids")
    if len(prompts) > 1 and not takes.n:
        raise _unsupported("prompt", "the upstream of this model takes one prompt per request")
    body["prompt"] = prompts[0] if len(prompts) == 1 else prompts
    if not text_request.echo:
        if text_request.prompt_logprobs is not None:
            raise _unsupported("echo", "the prompt's log-probabilities require it")
        return ()
    if takes.echo:
        body["echo"] = True
        return ()
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if (
        text_request.prompt_logprobs is not None
        or text_request.sampling.logprobs is not None
        or len(texts) < len(prompts)
    ):
        raise _not_taken("echo")
    return tuple(texts)


def _add_tools(body: dict[str, Any], text_request: TextRequest, takes: UpstreamFeatures) -> None:
    if not text_request.tools or text_request.choosing == "none":
        return
    if not takes.tools:
        raise _not_taken("tools")
    body["tools"] = [_tool(tool) for tool in text_request.callable_tools]
    if text_request.only_tool is not None:
        body["tool_choice"] = {"type": "function", "function": {"name": text_request.only_tool}}
    else:
        body["tool_choice"] = text_request.choosing
    if not text_request.parallel_calls and takes.parallel_tool_calls:
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


def _add_template(body: dict[str, Any], text_request: TextRequest, takes: UpstreamFeatures) -> None:
    settings = dict(text_request.template)
    hints = {name: value for name, value in text_request.template_hints.items() if name not in settings}
    if takes.thinking == "effort":
        for values in (hints, settings):
            if "reasoning_effort" in values:
                body["reasoning_effort"] = values.pop("reasoning_effort")
    if settings and not takes.template:
        raise _not_taken("chat_template_kwargs")
    if takes.template:
        settings |= hints
    if text_request.think is not None:
        if takes.thinking == "template":
            settings.setdefault("enable_thinking", text_request.think)
        elif takes.thinking == "effort":
            body.setdefault("reasoning_effort", "medium" if text_request.think else "none")
    if settings:
        body["chat_template_kwargs"] = settings


# Constrained decoding


def _add_grammar(
    body: dict[str, Any], text_request: TextRequest, config: UpstreamConfig, takes: UpstreamFeatures, *, chat: bool
) -> None:
    grammar = text_request.grammar
    if grammar is None:
        return
    if grammar.kind not in (takes.grammars or ()):
        raise _not_taken(text_request.grammar_of)
    if grammar.kind == "json_object":
        body["response_format"] = {"type": "json_object"}
    elif grammar.kind == "json_schema":
        schema = {"name": "answer", "schema": msgspec.Raw(grammar.text.encode(errors="replace")), "strict": True}
        _check_json(grammar, text_request.grammar_of)
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if config.kind == "headrace" and not chat:
            del body["response_format"]
            body["guided_json"] = grammar.text
    else:
        _add_server_grammar(body, grammar, config, text_request.grammar_of)


def _add_server_grammar(body: dict[str, Any], grammar: Grammar, config: UpstreamConfig, parameter: str) -> None:
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
    """Check that the text is JSON, because it is sent unchanged."""
    try:
        return msgspec.json.decode(grammar.text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        raise invalid_request(f"'{parameter}' is not valid JSON.", parameter) from None


# Sampling and lengths


def _add_sampling(
    body: dict[str, Any], text_request: TextRequest, config: UpstreamConfig, takes: UpstreamFeatures
) -> None:
    sampling = text_request.sampling
    body["temperature"] = sampling.temperature
    if sampling.top_p != 1.0 or takes.defaults:
        body["top_p"] = sampling.top_p
    penalty = "repeat_penalty" if config.kind == "llama.cpp" else "repetition_penalty"
    all_tokens = 0 if config.kind == "llama.cpp" else -1
    for name, there, value, neutral, sent in (
        ("top_k", takes.top_k, sampling.top_k or all_tokens, all_tokens, "top_k"),
        ("min_p", takes.min_p, sampling.min_p, 0.0, "min_p"),
        ("repetition_penalty", takes.repetition_penalty, sampling.repetition_penalty, 1.0, penalty),
        ("frequency_penalty", takes.penalties, sampling.frequency_penalty, 0.0, "frequency_penalty"),
        ("presence_penalty", takes.penalties, sampling.presence_penalty, 0.0, "presence_penalty"),
    ):
        if value != neutral and not there:
            raise _not_taken(name)
        if value != neutral or (there and takes.defaults):
            body[sent] = value
    if sampling.logit_bias:
        if not takes.logit_bias:
            raise _not_taken("logit_bias")
        body["logit_bias"] = {
            str(token): max(-_MOST_BIAS, min(bias, _MOST_BIAS)) for token, bias in sampling.logit_bias.items()
        }
    if takes.seed:
        body["seed"] = fold_seed(sampling.seed)
    if text_request.n > 1:
        if not takes.n:
            raise _not_taken("n")
        body["n"] = text_request.n


def fold_seed(seed: int) -> int:
    """Fold a seed into 31 bits, because some servers read no more. Equal seeds stay equal."""
    return seed if seed < 2**31 else seed % (2**31 - 1)


def _add_logprobs(
    body: dict[str, Any], text_request: TextRequest, config: UpstreamConfig, takes: UpstreamFeatures, *, chat: bool
) -> None:
    logprobs = text_request.sampling.logprobs
    if logprobs is None:
        return
    if not takes.logprobs:
        raise _not_taken("logprobs")
    # llama.cpp takes 0 for no log-probabilities at all; the surplus token is dropped from the answer.
    most = max(logprobs, 1) if config.kind == "llama.cpp" else logprobs
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
    text_request = exchange.text_request
    most = text_request.max_tokens if text_request.max_tokens is not None else exchange.served.max_tokens
    if most is not None and prompt_tokens is not None and config.context is not None:
        most = max(1, min(most, config.context - prompt_tokens))
    if most is not None:
        body["max_completion_tokens" if chat and takes.max_completion_tokens else "max_tokens"] = most
    if text_request.min_tokens:
        if not takes.min_tokens:
            raise _not_taken("min_tokens")
        body["min_tokens"] = text_request.min_tokens if most is None else min(text_request.min_tokens, most)
    if text_request.stop:
        if len(text_request.stop) > (takes.stops or 0):
            raise _unsupported("stop", f"the upstream of this model takes at most {takes.stops} strings")
        body["stop"] = list(text_request.stop)
    if text_request.stop_ids:
        if not takes.stop_token_ids:
            raise _not_taken("stop_token_ids")
        body["stop_token_ids"] = sorted(text_request.stop_ids)
    if text_request.ignore_eos:
        if not takes.ignore_eos:
            raise _not_taken("ignore_eos")
        body["ignore_eos"] = True


# Caching, priority and user


def _add_caller_settings(
    body: dict[str, Any], exchange: Exchange, config: UpstreamConfig, takes: UpstreamFeatures, secret: str
) -> None:
    text_request, tenant = exchange.text_request, exchange.caller.tenant
    if text_request.cache != "on" and not takes.bypass:
        raise _not_taken("cache")
    if takes.salt:
        # A random salt matches no cache entry, and no other request can match what it leaves.
        body["cache_salt"] = _salt(tenant, secret) if text_request.cache == "on" else secrets.token_urlsafe(32)
    elif text_request.cache != "on":
        body |= {"cache_prompt": False} if config.kind == "llama.cpp" else {"cache": "off"}
    if text_request.priority and takes.priority:
        # By default, vLLM and SGLang run the smallest value first.
        body["priority"] = text_request.priority if config.kind == "headrace" else -text_request.priority
    if text_request.user is not None and takes.user:
        body["user"] = text_request.user


def _salt(tenant: str, secret: str) -> str:
    """Derive a tenant's cache salt: the same on every gateway, and different for every other tenant."""
    return hmac.new(secret.encode(), tenant.encode(errors="replace"), hashlib.sha256).hexdigest()
