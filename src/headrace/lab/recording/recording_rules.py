"""The rules of [recording] that types cannot express."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from headrace.config import ConfigError
from headrace.config.lab.recording_section import RecordingConfig
from headrace.config.value_types import Finding
from headrace.lab.recording.line_cipher import LineCipher


def findings(recording: RecordingConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    for place, pattern in enumerate(recording.redact_patterns):
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"recording.redact_patterns[{place}]", f"not a regular expression: {error}"
    if recording.key_env is not None:
        try:
            LineCipher.from_environment(recording.key_env, environ)
        except ConfigError as error:
            yield "recording.key_env", str(error).removeprefix("recording.key_env: ").rstrip(".")
