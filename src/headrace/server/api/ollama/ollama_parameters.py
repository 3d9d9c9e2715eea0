"""The types and parameter tables of Ollama's API.

Options that only say how Ollama loads a model are accepted without an effect, because the server's configuration
decides that. Options that would change an answer are honoured or rejected.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from headrace.server.api.common_parameters import EXTRAS, MODEL, SAMPLING
from headrace.server.api.tool_parameters import ToolName
from headrace.server.api.vectors import EMBEDDINGS_PARAMETERS
from headrace.server.http.body_parameters import Parameter, ParameterTable


class OllamaCalledFunction(Struct, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any] | str = {}
    index: int | None = None  # as answers have it; the order of the calls decides
    description: str | None = None  # of older clients


class OllamaToolCall(Struct, forbid_unknown_fields=True):
    function: OllamaCalledFunction
    id: str | None = None
    type: str | None = None


class OllamaMessage(Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaFunction(Struct, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(Struct, forbid_unknown_fields=True):
    function: OllamaFunction
    type: Literal["function"] = "function"


_LOADING: Final = Parameter("Accepted and ignored: the server's configuration decides how a model is loaded.", Any)

OPTION_PARAMETERS: Final[ParameterTable] = {
    "num_predict": Parameter(
        "Maximum tokens of the answer. 0 or less: as the model's configuration says.", Annotated[int, Meta(ge=-2)]
    ),
    "temperature": Parameter("Sampling temperature. Default: 0.8.", SAMPLING["temperature"].type),
    "top_p": Parameter("As in a chat completion. Default: 0.9.", SAMPLING["top_p"].type),
    "top_k": EXTRAS["top_k"],
    "min_p": EXTRAS["min_p"],
    "seed": Parameter("Seed for sampling. A negative one is ignored.", SAMPLING["seed"].type),
    "stop": SAMPLING["stop"],
    "repeat_penalty": Parameter(EXTRAS["repetition_penalty"].description, EXTRAS["repetition_penalty"].type),
    "repeat_last_n": Parameter(
        "0: no repeat_penalty. -1: it looks at all tokens, which is the default here.", Literal[-1, 0]
    ),
    "presence_penalty": SAMPLING["presence_penalty"],
    "frequency_penalty": SAMPLING["frequency_penalty"],
    "num_ctx": Parameter("Accepted and ignored: the context is what the server's configuration says.", int),
    "num_keep": Parameter("Accepted and ignored: the server never shifts a context.", int),
    "tfs_z": Parameter("", unsupported="use top_p or min_p", no_op_values=(1,)),
    "typical_p": Parameter("", unsupported="use top_p or min_p", no_op_values=(1,)),
    "mirostat": Parameter("", unsupported="use temperature and min_p", no_op_values=(0,)),
    "mirostat_tau": Parameter("Accepted and ignored: it belongs to mirostat.", float),
    "mirostat_eta": Parameter("Accepted and ignored: it belongs to mirostat.", float),
    "penalize_newline": Parameter("", unsupported="penalties treat all tokens alike", no_op_values=(True,)),
    **dict.fromkeys(
        (
            "numa",
            "num_batch",
            "num_gpu",
            "main_gpu",
            "low_vram",
            "f16_kv",
            "logits_all",
            "vocab_only",
            "use_mmap",
            "use_mlock",
            "embedding_only",
            "num_thread",
        ),
        _LOADING,
    ),
}

_KEEP_ALIVE: Final = Parameter("Accepted and ignored: models stay loaded.", float | str)
_IMAGES: Final = Parameter("", unsupported="send images in a message of /api/chat", no_op_values=([],))
_ONLY_TEXT: Final = Parameter("", unsupported="the models served here write text only")

_TEXT: Final[ParameterTable] = {
    "model": MODEL,
    "stream": Parameter("false: one object instead of a stream of lines. Default: true.", bool),
    "format": Parameter("json, or a JSON schema that the answer must match.", Literal["", "json"] | dict[str, Any]),
    "options": Parameter("Sampling and limits: num_predict, temperature, stop, ...", dict[str, Any]),
    "think": Parameter(
        "Whether the model reasons first, or how much. Default: as the model likes.",
        bool | Literal["low", "medium", "high", "max"],
    ),
    "keep_alive": _KEEP_ALIVE,
    "truncate": Parameter(
        "true: drops the oldest turns of a conversation that is too long. false: rejects it. Default: as the server's "
        "configuration says.",
        bool,
    ),
    "shift": Parameter("Accepted and ignored: an answer ends where the context is full.", bool),
    "logprobs": Parameter("Returns the log-probabilities of the answer's tokens.", bool),
    "top_logprobs": Parameter("Number of most likely tokens to return at each position.", Annotated[int, Meta(ge=0)]),
    # Headrace's extensions. The options have the others.
    **{
        name: each
        for name, each in EXTRAS.items()
        if name not in ("top_k", "min_p", "repetition_penalty", "overflow", "metadata")
    },
}

CHAT_PARAMETERS: Final[ParameterTable] = {
    **_TEXT,
    "messages": Parameter(
        "Messages of the conversation. Without any, the model is only checked.", list[OllamaMessage], limit="messages"
    ),
    "tools": Parameter("Functions that the model may call.", list[OllamaTool], limit="tools"),
}

GENERATE_PARAMETERS: Final[ParameterTable] = {
    **_TEXT,
    "prompt": Parameter("What to answer. Without it, the model is only checked.", str),
    "system": Parameter("System message.", str),
    "context": Parameter("The field of an earlier answer, whose conversation goes on.", list[int]),
    "raw": Parameter("true: continues the prompt as it is, without the model's chat template.", bool),
    "template": Parameter(
        "",
        unsupported="the server applies the model's own chat template. Send the rendered prompt with `raw: true`",
        no_op_values=("",),
    ),
    "suffix": Parameter("", unsupported="the models served here do not fill in the middle", no_op_values=("",)),
    "images": _IMAGES,
    **dict.fromkeys(("width", "height", "steps"), _ONLY_TEXT),
}

_EMBEDDING: Final[ParameterTable] = {
    "model": MODEL,
    "options": Parameter("Accepted and ignored: they do not change an embedding.", dict[str, Any]),
    "keep_alive": _KEEP_ALIVE,
    **{name: EMBEDDINGS_PARAMETERS[name] for name in ("surface", "priority", "user")},
}

EMBED_PARAMETERS: Final[ParameterTable] = {
    **_EMBEDDING,
    "input": Parameter("A text or a list of texts.", str | list[str], limit="texts"),
    "dimensions": EMBEDDINGS_PARAMETERS["dimensions"],
    "truncate": Parameter("Cuts texts that are too long at their end. false: rejects them. Default: true.", bool),
}

OLDER_EMBEDDINGS_PARAMETERS: Final[ParameterTable] = {
    **_EMBEDDING,
    "prompt": Parameter("The text.", str),
}

PULL_PARAMETERS: Final[ParameterTable] = {
    "model": MODEL,
    "name": Parameter("Older name of model.", str),
    "stream": Parameter("Accepted and ignored: the answer is one object.", bool),
    "insecure": Parameter("Accepted and ignored: nothing is pulled.", bool),
}

SHOW_PARAMETERS: Final[ParameterTable] = {
    "model": MODEL,
    "name": Parameter("Older name of model.", str),
    "verbose": Parameter("Accepted and ignored: the answer is always the same.", bool),
}
