"""What cannot be is refused before anything is sent, and tenants come from a file without their keys."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.load_generator.benchmark_options import (
    BenchmarkOptions,
    LoadTenant,
    SweepOptions,
    WorkloadOptions,
    build_mix,
)
from headrace.bench.load_generator.tenant_file import read_tenants
from headrace.errors import RequestError

TRACE = Path("trace.jsonl")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rates": (1.0,), "sweep": SweepOptions(low=1.0)}, "one of"),
        ({"concurrency": (1,), "ramp": (1.0, 2.0), "seconds": 5.0}, "one of"),
        ({"rates": (1.0, 2.0), "concurrency": (1, 2)}, "one concurrency"),
        ({"rates": (0.0,)}, "above 0"),
        ({"rates": (math.nan,)}, "above 0"),
        ({"rates": (math.inf,)}, "requests"),
        ({"concurrency": (0,)}, "concurrency"),
        ({"ramp": (1.0, 2.0)}, "seconds"),
        ({"sweep": SweepOptions(low=2.0, high=1.0)}, "up"),
        ({"sweep": SweepOptions(low=2.0, factor=1.0)}, "up"),
        ({"sweep": SweepOptions(low=2.0, good_share=2.0)}, "sweep-good"),
        ({"trace": TRACE, "rates": (1.0, 2.0)}, "one stage"),
        ({"requests": 0}, "requests"),
        ({"requests": 10_000_000}, "at most"),
        ({"seconds": math.inf}, "seconds"),
        ({"timeout": 0.0}, "timeout"),
        ({"buckets": (5, 5)}, "increasing"),
        ({"objectives": {"itl": 5.0}}, "itl"),
        ({"objectives": {"ttft": 0.0}}, "ttft"),
        ({"objectives": {"ttft": 5.0}, "stream": False}, "stream"),
        ({"tenants": (LoadTenant(name="a", rate=1.0), LoadTenant(name="b"))}, "every tenant"),
        ({"tenants": (LoadTenant(name="a", rate=1.0),), "concurrency": (2,)}, "sets the load"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        BenchmarkOptions(**options).check()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rates": (1.0, 2.0), "concurrency": (8,)},
        {"rates": (math.inf,), "requests": 5},
        {"ramp": (0.0, 2.0), "seconds": 5.0},
        {"trace": TRACE},
        {"stream": False, "objectives": {"e2el": 5.0}},
    ],
)
def test_what_can_be_passes(options: dict[str, Any]) -> None:
    BenchmarkOptions(**options).check()


FILE = """
[[tenant]]
name = "a"
key-env = "A_KEY"
rate = 2
arrivals = "gamma"
burstiness = 0.5
surface = "voice"
input-tokens = 10

[[tenant]]
name = "b"
concurrency = 4
"""


def test_tenants_have_keys_loads_and_workloads(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    usual = build_mix(WorkloadOptions(workload="chat"))
    first, second = read_tenants(path, {"A_KEY": "sk-a"}, usual)
    assert first == LoadTenant(
        name="a",
        key="sk-a",
        surface="voice",
        mix=build_mix(WorkloadOptions(input_tokens=10)),
        rate=2.0,
        arrivals="gamma",
        burstiness=0.5,
    )
    assert second == LoadTenant(name="b", mix=usual, concurrency=4)
    assert "sk-a" not in repr(first)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "tenant"),
        ("tenant = []", "1 to"),
        ('[[tenant]]\nname = "a"\n[[tenant]]\nname = "a"', "unique names"),
        ('[[tenant]]\nname = "a"\nkey = "secret"', "key"),
        ('[[tenant]]\nname = "a"\nkey-env = "NOT_THERE"', "NOT_THERE"),
        ('[[tenant]]\nname = "a"\nrate = 1\nconcurrency = 1', "Give one"),
        ('[[tenant]]\nname = "a"\nrate = -1', "rate"),
        ('[[tenant]]\nname = "a"\nworkload = "nobody"', "nobody"),
        ("[[tenant", "tenants.toml"),
    ],
)
def test_a_wrong_file_of_tenants_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(RequestError, match=said) as caught:
        read_tenants(path, {}, build_mix(WorkloadOptions()))
    assert "tenants.toml" in str(caught.value)
