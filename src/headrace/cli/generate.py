"""`headrace generate`: run one prompt on an engine in this process, without a server."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
from cyclopts import Parameter

from headrace.engine.interface.outputs import SequenceEnd
from headrace.engine.interface.request import FinishReason
from headrace.engine.interface.sampling import SamplingParams
from headrace.errors import HeadraceError, RequestError
from headrace.llm import LLM
from headrace.models.model_folder import BUNDLED_NAMES, ModelFolder, find_model, open_model
from headrace.models.precision import AUTO
from headrace.models.weight_choice import describe_choice
from headrace.variant import DEFAULT_MODEL


class GenerationReport(msgspec.Struct):
    """The output of --json."""

    model: str
    text: str
    finish_reason: str  # "stop" or "length"
    prompt_tokens: list[int]
    tokens: list[int]
    load_s: float
    prefill_s: float  # to the first token
    decode_s: float  # all tokens after the first
    isa: str
    threads: int
    weights: str
    kv: str
    weight_bytes: int
    weights_mapped: bool  # packed weights were in the cache


def generate(
    model: str = DEFAULT_MODEL,
    /,
    *,
    prompt: Annotated[str, Parameter(name=["--prompt", "-p"], allow_leading_hyphen=True)],
    chat: bool | None = None,
    max_tokens: Annotated[int, Parameter(name=["--max-tokens", "-n"])] = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    seed: int = 0,
    ignore_eos: bool = False,
    weights: str = AUTO,
    group: str | None = None,
    keep: Annotated[list[str] | None, Parameter(negative=())] = None,
    kv: str = "bf16",
    threads: Annotated[int | None, Parameter(name=["--threads", "-t"])] = None,
    context: int | None = None,
    cache: bool = True,
    json: bool = False,
) -> None:
    """Continue a prompt with a model and print the text as it comes.

    Usage: headrace generate --prompt "What is time to first token?"

    Parameters
    ----------
    model
        Model folder, GGUF file, bundled model (mini, draft), or a downloaded model's name (see headrace pull).
    prompt
        Text to continue. `-` reads it from standard input.
    chat
        Apply the model's chat template, with the prompt as a user message. Default: on for the bundled models.
    max_tokens
        Maximum number of tokens to generate.
    temperature
        0 always takes the most likely token; higher values sample.
    top_k
        Sample from this many most likely tokens; 0 is all of them.
    top_p
        Sample from the most likely tokens that together have this probability.
    min_p
        Sample from tokens whose probability is at least this share of the most likely one's.
    repetition_penalty
        Values above 1 make tokens of the prompt and the answer less likely.
    frequency_penalty
        Subtracted from a token's logit for each time it occurs in the answer.
    presence_penalty
        Subtracted from a token's logit once it occurs in the answer.
    seed
        Seed for sampling.
    ignore_eos
        Continue past the model's end-of-sequence tokens.
    weights
        Precision of the weights: auto (bf16, or what keeps the weights of a quantised file), f32, bf16, fp8, int8,
        int4, int3 or int2.
    group
        Inputs that share a scale at int8 and fewer bits: 32, 64, 128 or channel.
    keep
        PATTERN=PRECISION for tensors whose names match, such as "layers.*.attn.o=bf16". Repeatable.
    kv
        Precision of the KV cache: f32, bf16, int8, fp8 or int4.
    threads
        Threads to compute with. Default: the machine's cores.
    context
        Maximum tokens of prompt and answer together. Default: the model's context, at most 8,192.
    cache
        Keep the packed weights in the cache folder for the next start.
    json
        Print one JSON object at the end instead of the text.
    """
    if max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, not {max_tokens}.", parameter="max_tokens")
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        seed=seed,
    )
    folder = open_model(find_model(model))
    sampling.check(folder.spec.vocab_size)  # before the weights are loaded
    if folder.spec.kind != "decoder":
        raise RequestError(
            f"{folder.spec.architecture} is an encoder: it computes embeddings, not text.", parameter="model"
        )
    text_in = sys.stdin.read() if prompt == "-" else prompt
    ids = _encode(folder, text_in, chat=model in BUNDLED_NAMES if chat is None else chat)
    llm = LLM(
        folder,
        weights=weights,
        group=group,
        keep=keep or (),
        kv=kv,
        threads=threads,
        context=context,
        cache=cache,
        speculation="none",  # so that the times are the model's alone
    )
    executor = llm.opened.executor
    if chosen := describe_choice(folder, executor.plan):
        print(f"Weights: {chosen}.", file=sys.stderr)
    room = min(max_tokens, executor.capacity.context - len(ids))
    if room < 1:
        raise RequestError(
            f"The prompt has {len(ids)} tokens, which leaves no room in the context of {executor.capacity.context}.",
            parameter="prompt",
        )
    tokens: list[int] = []
    text: list[str] = []
    ending: SequenceEnd | None = None
    for output in llm.stream(ids, max_tokens=room, sampling=sampling, ignore_eos=ignore_eos):
        tokens += output.tokens
        text.append(output.text)
        ending = output.ending
        if not json:
            print(output.text, end="", flush=True)
    llm.close()
    if ending is None or ending.finish is FinishReason.FAILED:
        raise HeadraceError(ending.why if ending is not None else "The engine returned no answer.")
    if not json:
        print()
        return
    report = GenerationReport(
        model=str(folder.path),
        text="".join(text),
        finish_reason=ending.finish,
        prompt_tokens=ids,
        tokens=tokens,
        load_s=executor.load_report.seconds,
        prefill_s=ending.usage.prefill_s,
        decode_s=ending.usage.decode_s,
        isa=executor.isa,
        threads=executor.threads,
        weights=executor.plan.name,
        kv=executor.kv_type,
        weight_bytes=executor.load_report.weight_bytes,
        weights_mapped=executor.load_report.mapped,
    )
    print(msgspec.json.encode(report).decode())


def _encode(folder: ModelFolder, prompt: str, *, chat: bool) -> list[int]:
    """Return the prompt's tokens. A model may continue nothing (its beginning-of-text token), but answers no empty
    message."""
    tokenizer = folder.tokenizer
    ids = [] if chat else tokenizer.encode(prompt)
    if not (prompt.strip() if chat else ids):
        raise RequestError("The prompt is empty. Pass a text with --prompt TEXT, or - to read it from standard input.")
    if not chat:
        return ids
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.encode(tokenizer.apply_template(messages), add_special_tokens=False)
