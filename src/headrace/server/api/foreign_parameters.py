"""Parameters of other servers and hosted services that clients send to Headrace's endpoints.

The tables say which of them would change the meaning of an answer and are rejected by name, and which are hints that
may be ignored. Values that change nothing are accepted in both cases. Parameters that Headrace honours are in the
tables of their endpoints.
"""

from __future__ import annotations

from typing import Final

from headrace.server.http.body_parameters import Parameter, ParameterTable

_OTHER_SAMPLER: Final = "the engine has no such sampler. Use temperature, top_p, top_k and min_p"
_FORMAT: Final = "use `response_format`, `guided_json`, `guided_regex`, `guided_choice` or `guided_grammar`"
_MAX_TOKENS: Final = "use `max_tokens`"
_TEXT_ONLY: Final = "models write text only"


def _refused(reason: str, *no_op_values: object) -> Parameter:
    return Parameter("", unsupported=reason, no_op_values=no_op_values)


def _hint(reason: str, *no_op_values: object) -> Parameter:
    return Parameter("", unsupported=reason, no_op_values=no_op_values, hint=True)


# Of OpenAI's hosted service, beside those that Headrace honours.
HOSTED: Final = {
    "store": _hint("only /v1/responses stores answers", False),
    "service_tier": _hint("use `priority` and `surface`", "auto", "default"),
    "prompt_cache_key": Parameter("Accepted and ignored: the prefix cache finds common prefixes without it.", str),
    "prompt_cache_retention": _hint("the prefix cache keeps prefixes as long as it has room", "in_memory"),
    "prompt_cache_options": _hint(
        "the prefix cache finds common prefixes without breakpoints and evicts the least recently used",
        {},
        {"mode": "implicit"},
    ),
    "web_search_options": _refused("this server has no web search"),
    "moderation": _refused("this server has no moderation"),
}

AUDIO: Final = {
    "modalities": _refused(_TEXT_ONLY, ["text"]),
    "audio": _refused(_TEXT_ONLY),
}

# Of vLLM, SGLang, llama.cpp, Ollama, TGI, Mistral and OpenRouter.
SAMPLERS: Final[ParameterTable] = {
    "use_beam_search": _refused("the engine has no beam search", False),
    "length_penalty": _refused("the engine has no beam search", 1),
    "early_stopping": _refused("the engine has no beam search", False),
    "typical_p": _refused(_OTHER_SAMPLER, 1),
    "tfs_z": _refused(_OTHER_SAMPLER, 1),
    "top_n_sigma": _refused(_OTHER_SAMPLER, -1),
    "mirostat": _refused(_OTHER_SAMPLER, 0),
    "dynatemp_range": _refused(_OTHER_SAMPLER, 0),
    "xtc_probability": _refused(_OTHER_SAMPLER, 0),
    "dry_multiplier": _refused(_OTHER_SAMPLER, 0),
    "samplers": _refused(_OTHER_SAMPLER),
    "repeat_penalty": _refused("use `repetition_penalty`", 1),
    "random_seed": _refused("use `seed`"),
    "bad_words": _refused("use `logit_bias` with -100", []),
    "allowed_token_ids": _refused("use `guided_choice` or `logit_bias`"),
    "logits_processors": _refused("the server runs no code of clients", []),
    "max_new_tokens": _refused(_MAX_TOKENS),
    "n_predict": _refused(_MAX_TOKENS),
    "num_predict": _refused(_MAX_TOKENS),
    "skip_special_tokens": _refused("special tokens are never part of a text", True),
    "include_stop_str_in_output": _refused("an answer ends before the stop string", False),
    "grammar": _refused(_FORMAT),
    "json_schema": _refused(_FORMAT),
    "regex": _refused(_FORMAT),
    "ebnf": _refused(_FORMAT),
    "structural_tag": _refused(_FORMAT),
    "structured_outputs": _refused(_FORMAT),
    "format": _refused(_FORMAT, "text"),
    "options": _refused("send its fields beside `model`", {}),
    "extra_body": _refused("send its fields beside `model`", {}),
    "lora": _refused("name the model that you want in `model`", []),
    "lora_path": _refused("name the model that you want in `model`"),
    "truncate_prompt_tokens": _refused("use `overflow` to say what to do with a prompt that is too long"),
    "models": _refused("the server operator configures fallbacks", []),
    "plugins": _refused("this server has no plugins", []),
    "spaces_between_special_tokens": _hint("special tokens are never part of a text", True, False),
    "guided_decoding_backend": _hint("the server has one way to constrain an answer"),
    "keep_alive": _hint("models stay loaded"),
    "request_id": _hint("use the header x-request-id"),
    "cache_salt": _hint("the server derives the salt of its caches from the tenant"),
    "provider": _hint("the server operator configures routes"),
}

CHAT: Final[ParameterTable] = {
    "add_generation_prompt": _refused("an answer always begins a new message", True),
    "continue_final_message": _refused("an answer always begins a new message", False),
    "chat_template": _refused("the model's own template is used"),
    "documents": _refused("use `sources`", []),
    "safe_prompt": _refused("write a system message", False),
    "best_of": _refused("set `n` and choose among the answers", 1),
    "echo": _refused("a chat has no prompt text to echo", False),
    "suffix": _refused("a chat has no text to fill in", ""),
    "client_metadata": _hint("use `metadata`"),
}

# Of the other endpoints that generate text, where they are not the endpoint's own.
_PROMPT: Final = "this endpoint takes the prompt in another parameter"
_LENGTH: Final = "use this endpoint's own name: max_tokens, max_completion_tokens or max_output_tokens"
_STOP: Final = "use this endpoint's own name: stop or stop_sequences"
_OWN_FORMAT: Final = "use this endpoint's own name: response_format, text.format, output_config.format or guided_json"
_NO_TEMPLATE: Final = "prompts use no chat template. Use a chat"
_STORED: Final = "only /v1/responses continues what the server has stored"
_NO_TOOLS: Final = "this endpoint calls no tools, or has another name for it"
_ELSEWHERE: Final[ParameterTable] = {
    **dict.fromkeys(("messages", "prompt", "input", "instructions", "system"), _refused(_PROMPT)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _refused(_LENGTH)),
    **dict.fromkeys(("stop", "stop_sequences"), _refused(_STOP, [])),
    "n": _refused("this endpoint gives one answer", 1),
    "best_of": _refused("this endpoint gives one answer", 1),
    "echo": _refused("only /v1/completions repeats the prompt", False),
    "suffix": _refused("the models served here do not fill in the middle", ""),
    "logprobs": _refused("this endpoint returns no log-probabilities, or has another name for them", False),
    "top_logprobs": _refused("this endpoint returns no log-probabilities, or has another name for them", 0),
    "tools": _refused(_NO_TOOLS, []),
    "functions": _refused(_NO_TOOLS, []),
    "tool_choice": _refused(_NO_TOOLS, "none", "auto"),
    "function_call": _refused(_NO_TOOLS, "none", "auto"),
    "parallel_tool_calls": _refused(_NO_TOOLS, True),
    "response_format": _refused(_OWN_FORMAT, {"type": "text"}),
    "text": _refused(_OWN_FORMAT, {}, {"format": {"type": "text"}}),
    "output_config": _refused(_OWN_FORMAT, {}),
    "output_format": _refused(_OWN_FORMAT),
    "reasoning": _refused("use `reasoning_effort` or `thinking`", {}),
    "reasoning_effort": _refused(_NO_TEMPLATE, "none"),
    "thinking": _refused(_NO_TEMPLATE, {"type": "disabled"}),
    "think": _refused(_NO_TEMPLATE, False),
    "enable_thinking": _refused(_NO_TEMPLATE, False),
    "chat_template_kwargs": _refused(_NO_TEMPLATE, {}),
    "sources": _refused(_NO_TEMPLATE, []),
    "overflow": _refused("only conversations can be shortened", "refuse"),
    "truncation": _refused("use `overflow` to say what to do with a conversation that is too long", "disabled"),
    "background": _refused("only /v1/responses and batches run in the background", False),
    "background_options": _refused("only /v1/responses and batches run in the background"),
    "conversation": _refused(_STORED),
    "previous_response_id": _refused(_STORED),
    "thread": _refused(_STORED),
    "speed": _refused("use `profile: fast`", "standard"),
    "container": _refused("the server runs no code"),
    "mcp_servers": _refused("the server calls no tools itself", []),
    "image": _refused("models read text only"),
    "inference_geo": _refused("the server answers where it runs"),
    "access_programs": _refused("this server has no access programs", {}),
    "fallbacks": _refused("the server operator configures fallbacks", []),
    "fallback_credit_token": _refused("this server has no credits"),
    "cache_control": _hint("the prefix cache finds common prefixes without it"),
    "include": _hint("this endpoint has nothing more to return", []),
    "include_reasoning": _hint("this endpoint returns no reasoning of its own", True),
    "prediction": _hint("only chats use it as draft tokens"),
    "stream_options": _hint("streams of this endpoint always end with the usage"),
    "verbosity": _hint("prompts use no chat template", "medium"),
    "user": _hint("use `metadata.user_id`"),
    "safety_identifier": _hint("use `metadata.user_id`"),
    "user_profile_id": _hint("use `user`"),
    **{name: parameter for name, parameter in CHAT.items() if name not in ("best_of", "echo", "suffix")},
    **HOSTED,
    **AUDIO,
}


def with_foreign(table: ParameterTable) -> ParameterTable:
    """Return the table of an endpoint that generates text, with the parameters of all others."""
    foreign = {**SAMPLERS, **_ELSEWHERE}
    return {**table, **{name: parameter for name, parameter in foreign.items() if name not in table}}


# Of servers of embedding and rerank models.
VECTORS: Final[ParameterTable] = {
    "input_type": _refused("put the model's prefix for queries or documents in front of the text"),
    "task": _refused("put the model's prefix for the task in front of the text"),
    "instruction": _refused("put the instruction in front of the text"),
    "normalize": _refused("embeddings always have length 1", True),
    "output_dimension": _refused("use `dimensions`"),
    "output_dtype": _refused("embeddings are numbers or base64", "float"),
    "embedding_types": _refused("use `encoding_format`", ["float"]),
    "add_special_tokens": _refused("the model's special tokens are always added", True),
    "raw_scores": _refused("scores are cosines"),
    "keep_alive": SAMPLERS["keep_alive"],
}
