"""BatchKind: what differs between OpenAI's batches and Anthropic's message batches: ids, endpoints and result lines.

Everything else, from the input file to the results, is one mechanism.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.server.api.batches import batch_lines


class BatchKind(msgspec.Struct, frozen=True):
    prefix: str  # of ids
    endpoints: tuple[str, ...]  # that its requests may use
    result_line: Callable[[str, int, dict[str, Any]], bytes]  # custom id, HTTP status, body
    error_line: Callable[[str, ApiError], bytes]
    unrun_line: Callable[[str, str], bytes]  # custom id, and the batch's ending: expired or cancelled

    def is_id(self, id: str) -> bool:
        return re.fullmatch(rf"{self.prefix}_[0-9a-f]{{32}}", id) is not None


OPENAI_BATCH: Final = BatchKind(
    prefix="batch",
    endpoints=(
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
    ),
    result_line=batch_lines.result_line,
    error_line=batch_lines.error_line,
    unrun_line=batch_lines.unrun_line,
)
MESSAGE_BATCH: Final = BatchKind(
    prefix="msgbatch",
    endpoints=("/v1/messages",),
    result_line=batch_lines.message_result_line,
    error_line=batch_lines.message_error_line,
    unrun_line=batch_lines.message_unrun_line,
)


def kind_of(id: str) -> BatchKind:
    return MESSAGE_BATCH if MESSAGE_BATCH.is_id(id) else OPENAI_BATCH
