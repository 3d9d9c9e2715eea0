"""Builds the engine's requests for LLM and AsyncLLM from texts, token ids and chats, and turns outputs into results.

Does not run anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.engine.interface.outputs import SequenceUsage
from headrace.engine.interface.request import AdapterRef, FinishReason, GenerationParams, GenerationRequest
from headrace.engine.interface.sampling import SampledToken, SamplingParams
from headrace.engine.interface.sequence_result import SequenceResult
from headrace.errors import HeadraceError, RequestError
from headrace.models.sentence_files import Prompts
from headrace.models.spec import RankingSpec
from headrace.models.text.pair_encoder import PairEncoder
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.user_text import UserText

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

_NO_PROMPTS: Final = Prompts()
_NO_ADAPTERS: Final[Mapping[str, AdapterRef]] = {}
DEFAULT_TOKENS: Final = 256
_CONTINUATIONS: Final = ("", " a", "ning", "7", "\n", ".")
BULK: Final = "batch"  # the surface of work that no user watches
_SAMPLING: Final = frozenset(SamplingParams.__struct_fields__)


class LocalParams(GenerationParams, frozen=True, kw_only=True):
    """The keyword arguments of a generation, those of SamplingParams excepted."""

    tenant: str = ""
    adapter: str = ""  # one of those that the LLM was given


class Completion(msgspec.Struct, frozen=True):
    """One continuation of a prompt."""

    text: str
    tokens: list[int]
    finish: FinishReason
    usage: SequenceUsage
    logprobs: list[SampledToken] | None = None
    stop: str | None = None  # the stop string that ended it
    why: str = ""  # why it failed


class Generation(msgspec.Struct, frozen=True):
    """A prompt and its continuations."""

    prompt: list[int]
    completions: list[Completion]
    prompt_logprobs: list[SampledToken] | None = None

    @property
    def text(self) -> str:
        """The text of the first continuation."""
        return self.completions[0].text


class Score(msgspec.Struct, frozen=True):
    """The log-probability of one text after another."""

    logprob: float  # sum over the text's tokens
    tokens: list[SampledToken]
    likeliest: bool  # every token is the model's most likely one


def params_of(**given: Any) -> LocalParams:
    """Build parameters from keyword arguments, those of SamplingParams included. RequestError names a wrong one."""
    sampling = {name: value for name, value in given.items() if name in _SAMPLING}
    fields = {name: value for name, value in given.items() if name not in _SAMPLING}
    for name in fields:
        if name not in LocalParams.__struct_fields__:
            raise RequestError(f"Unknown parameter '{name}'.", parameter=name)
    if isinstance(fields.get("stop"), str):
        fields["stop"] = (fields["stop"],)
    if sampling:
        fields["sampling"] = msgspec.structs.replace(fields.get("sampling", SamplingParams()), **sampling)
    try:
        return msgspec.convert({name: msgspec.to_builtins(value) for name, value in fields.items()}, LocalParams)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), parameter=_parameter_in(str(error))) from None


def _parameter_in(message: str) -> str | None:
    """Return the parameter that msgspec's message names."""
    _, _, path = message.partition("$.")
    return path.split("`")[0].split(".")[-1].split("[")[0] or None


class RequestFactory:
    """Builds requests for one model, with ids that are unique in this process."""

    _numbers = itertools.count()

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        context: int,
        alone: str = BULK,
        prompts: Prompts = _NO_PROMPTS,
        ranking: RankingSpec | None = None,
        adapters: Mapping[str, AdapterRef] = _NO_ADAPTERS,
    ) -> None:
        """`alone` is the surface of a single prompt, `prompts` are an embedder's, `ranking` is a reranker's."""
        self._prompts = prompts
        self._ranking = ranking
        self.tokenizer = tokenizer
        self._context = context
        self._alone = alone
        self.adapters = dict(adapters)

    def tokens(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)

    def prefix(self, prefix: Prompt | None, system: str | None) -> tuple[int, ...]:
        """Return the tokens of a prefix to pin: a text, token ids, or a system message."""
        if (prefix is None) == (system is None):
            raise RequestError("Pass either a prefix or a system message.", parameter="prefix")
        if prefix is None or isinstance(prefix, str):
            return prefix_tokens(self.tokenizer, system=system, text=prefix or "")
        return tuple(prefix)

    def generations(self, prompts: Prompt | Iterable[Prompt], params: LocalParams) -> list[GenerationRequest]:
        return self._requests([self.tokens(prompt) for prompt in as_prompts(prompts)], params)

    def chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        tools: Sequence[Message] | None,
        template: Mapping[str, Any],
        params: LocalParams,
    ) -> list[GenerationRequest]:
        """Build requests for one chat or several."""
        given: list[Any] = list(messages)
        chats: list[Sequence[Message]] = [given] if given and isinstance(given[0], Mapping) else given
        texts = [self.tokenizer.apply_template(chat, tools=tools, **template) for chat in chats]
        encode = self.tokenizer.encode
        return self._requests([tuple(encode(text, add_special_tokens=False)) for text in texts], params)

    def _requests(self, prompts: list[tuple[int, ...]], params: LocalParams) -> list[GenerationRequest]:
        return [self.generate(prompt, params, alone=len(prompts) == 1) for prompt in prompts]

    def generate(self, prompt: tuple[int, ...], params: LocalParams, *, alone: bool = True) -> GenerationRequest:
        limit = params.max_tokens
        if limit is None:
            limit = max(1, min(DEFAULT_TOKENS, self._context - len(prompt)))
        return GenerationRequest.of(
            params,
            id=self._id(),
            prompt=prompt,
            eos_ids=self.tokenizer.eos_ids,
            max_tokens=limit,
            surface=params.surface or (self._alone if alone else BULK),
            tenant=params.tenant,
            adapter=self.adapter(params.adapter),
        )

    def adapter(self, name: str) -> AdapterRef | None:
        """Return the adapter with this name; None for an empty one."""
        if name and name not in self.adapters:
            known = ", ".join(sorted(self.adapters)) or "none"
            raise RequestError(f"Unknown adapter '{name[:200]}'. Known: {known}.", parameter="adapter")
        return self.adapters[name] if name else None

    def score(self, before: Prompt, text: Prompt) -> GenerationRequest:
        """Build a request for the likelihood of a text after another."""
        if isinstance(before, str) and isinstance(text, str):
            # Tokenise both as one text: the context can change where the first token of the rest begins.
            start = self.tokens(before)
            whole = self.tokens(before + text)
        else:
            start = self.tokens(before)
            rest = self.tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else text
            whole = (*start, *rest)
        if len(whole) <= len(start):
            raise RequestError("The text to score has no tokens.", parameter="text")
        if not start:
            raise RequestError("A text is scored after at least one token.", parameter="prompt")
        return GenerationRequest(
            id=self._id(),
            prompt=whole,
            kind="score",
            score_from=len(start),
            sampling=SamplingParams(logprobs=1),
            surface=BULK,
        )

    def rank(
        self, query: str, documents: Sequence[str], *, instruction: str | None = None, truncate: bool = False
    ) -> list[GenerationRequest]:
        """Build requests for a reranker's scores. `truncate`: cut pairs that are too long."""
        encoder = PairEncoder(self.tokenizer, self._reranker(), query, context=self._context, instruction=instruction)
        pairs = [encoder.encode(document, cut=truncate) for document in documents]
        return [
            GenerationRequest(
                id=self._id(), prompt=pair.tokens, kind="embed", second_text=pair.second_text, surface=BULK
            )
            for pair in pairs
        ]

    def scores(self, answers: Iterable[SequenceResult]) -> list[float]:
        """Return a reranker's scores from what the engine computed."""
        ranking = self._reranker()
        return [ranking.score(vector.tolist()) for vector in stack_vectors(answers, 0)]

    def _reranker(self) -> RankingSpec:
        if self._ranking is None:
            raise RequestError("The model is not a reranker. Use its embeddings to compare texts.", parameter="model")
        return self._ranking

    def embed(self, text: Prompt, *, prompt_name: str | None = None, truncate: bool = False) -> GenerationRequest:
        """`prompt_name`: of a prompt of the model that is put before the text. `truncate`: cut a text that is too
        long."""
        if self._ranking is not None:
            raise RequestError("The model is a reranker and makes no embeddings. Call `rerank`.", parameter="model")
        if isinstance(text, str):
            given = UserText(self._prompts.text(prompt_name) + text)
            tokens = self.tokenizer.encode_within(given, self._context)[0] if truncate else self.tokens(given)
        else:
            tokens = text[: self._context] if truncate else text
        return GenerationRequest(id=self._id(), prompt=tuple(tokens), kind="embed", surface=BULK)

    def _id(self) -> str:
        return f"local.{next(RequestFactory._numbers)}"


def prefix_tokens(
    tokenizer: Tokenizer, *, system: str | None = None, text: str = "", as_prompt: Callable[[str], str] = str
) -> tuple[int, ...]:
    """Return the tokens that every prompt with this beginning has: every chat with the system message, or every text
    that begins with `text`. `as_prompt` marks a text as the prompts of completions are.

    The tokens at the end of a text depend on what follows, so they are those that several continuations share.
    """
    if system is None:
        prompts = [tokenizer.encode(as_prompt(text + more)) for more in _CONTINUATIONS]
    else:
        chats = [[{"role": "system", "content": system}, {"role": "user", "content": user}] for user in ("a", "7?")]
        prompts = [tokenizer.encode(tokenizer.apply_template(chat), add_special_tokens=False) for chat in chats]
    shared = 0
    for tokens in zip(*prompts, strict=False):
        if len(set(tokens)) > 1:
            break
        shared += 1
    return tuple(prompts[0][:shared])


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list. A prompt is a text or token ids."""
    if isinstance(prompts, str):
        return [prompts]
    found: list[Any] = list(prompts)
    if found and isinstance(found[0], int | np.integer):
        return [cast("list[int]", found)]
    return found


def as_generation(request: GenerationRequest, answers: Sequence[SequenceResult]) -> Generation:
    completions = [
        Completion(
            answer.text,
            answer.tokens,
            ending.finish,
            ending.usage,
            answer.chosen if request.sampling.logprobs is not None else None,
            ending.stop,
            ending.why,
        )
        for answer in answers
        if (ending := answer.ending) is not None
    ]
    return Generation(list(request.prompt), completions, answers[0].prompt)


def as_score(answer: SequenceResult) -> Score:
    _must_not_fail(answer)
    tokens = answer.prompt or []
    logprob = float(sum(token.logprob or 0.0 for token in tokens))
    return Score(logprob, tokens, all(token.top and token.top[0][0] == token.token for token in tokens))


def stack_vectors(answers: Iterable[SequenceResult], width: int) -> NDArray[np.float32]:
    """Return an array with one row for each text."""
    rows: list[NDArray[np.float32]] = []
    for answer in answers:
        _must_not_fail(answer)
        rows.append(np.frombuffer(answer.vector or b"", dtype="<f4").astype(np.float32, copy=False))
    return np.stack(rows) if rows else np.empty((0, width), dtype=np.float32)


def _must_not_fail(answer: SequenceResult) -> None:
    ending = answer.ending
    if ending is None or ending.finish not in (FinishReason.STOP, FinishReason.LENGTH):
        raise HeadraceError(ending.why if ending is not None and ending.why else "The engine returned no result.")
