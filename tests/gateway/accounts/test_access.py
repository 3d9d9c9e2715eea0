"""What a caller may use, and what it hears of what it may not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.engine.interface.request import AdapterRef
from headrace.gateway.accounts.access import allows_model, check_profile, choose_surface, find_model, visible_models
from headrace.gateway.accounts.directory import ANONYMOUS, IdentifiedCaller
from headrace.gateway.api_errors import ApiError
from headrace.gateway.serving.exchange import Caller
from headrace.gateway.serving.fleet import Fleet
from headrace.gateway.serving.served_variant import ServedVariant
from tests.support.dialect_exchanges import NoEngine, tokenizer

NAMES = ("mini", "mini@fast", "mini@int4", "draft", "secret-customer")


def fleet() -> Fleet:
    served = {name: ServedVariant(name=name, engine=NoEngine(), tokenizer=tokenizer(), context=64) for name in NAMES}
    return Fleet(served, {"gpt": "mini", "theirs": "secret-customer"}, "mini")


def scoped(*models: set[str], **fields: Any) -> IdentifiedCaller:
    return IdentifiedCaller(models=tuple(frozenset(each) for each in models), **fields)


def visible(caller: Caller) -> list[str]:
    return [served.name for served in visible_models(caller, fleet())]


def errors(*calls: tuple[Caller, str, str]) -> Iterator[ApiError]:
    for caller, name, profile in calls:
        with pytest.raises(ApiError) as raised:
            find_model(caller, fleet(), name, profile)
        yield raised.value


def test_who_has_no_scope_sees_everything() -> None:
    assert visible(ANONYMOUS) == list(NAMES)
    assert visible(Caller()) == list(NAMES)
    assert find_model(ANONYMOUS, fleet(), "gpt").name == "mini"
    assert find_model(ANONYMOUS, fleet(), "").name == "mini"
    assert find_model(ANONYMOUS, fleet(), "mini", "fast").name == "mini@fast"


def test_a_model_allows_its_variants_and_a_variant_only_itself() -> None:
    assert visible(scoped({"mini"})) == ["mini", "mini@fast", "mini@int4"]
    assert visible(scoped({"mini@int4", "draft"})) == ["mini@int4", "draft"]
    assert visible(scoped({"mini", "draft"}, {"mini@int4"})) == ["mini@int4"]  # the tenant's and the key's
    assert visible(scoped(set())) == []
    assert not allows_model(scoped({"mini"}), "mini2")


def test_what_is_out_of_scope_is_answered_like_what_is_not_there() -> None:
    caller = scoped({"draft"})
    for name in ("secret-customer", "theirs", "mini", "gpt", "mini@int4", "mini@golden"):
        there, missing = errors((caller, name, "standard"), (caller, "nothing", "standard"))
        assert (there.status, there.code, there.parameter) == (404, "model_not_found", "model")
        assert there.message.replace(name, "nothing") == missing.message
        assert "secret" not in there.message.replace(name, "")
    (hidden, missing) = errors((caller, "mini", "fast"), (caller, "nothing", "fast"))
    assert hidden.message.replace("mini", "nothing") == missing.message
    (wrong,) = errors((scoped(set()), "mini", "standard"))
    assert "none for this API key" in wrong.message


def test_a_profile_that_a_model_of_ones_own_lacks_is_named() -> None:
    (error,) = errors((scoped({"draft"}), "draft", "golden"))
    assert (error.status, error.parameter) == (400, "profile")
    assert find_model(scoped({"draft"}), fleet(), "draft", "fast").name == "draft"
    (error,) = errors((scoped({"draft"}), "mini", "golden"))
    assert error.status == 404


def test_an_adapter_of_another_tenant_is_unknown_in_every_profile() -> None:
    served = fleet()
    adapter = served.served["mini"].with_adapter(AdapterRef("theirs", "/a", "0" * 64), tenants=("red",))
    served.adapters[adapter.name] = adapter
    assert find_model(Caller(tenant="red"), served, "mini:theirs") is adapter
    for profile in ("standard", "fast", "golden"):
        with pytest.raises(ApiError) as raised:
            find_model(Caller(tenant="blue"), served, "mini:theirs", profile)
        assert raised.value.code == "model_not_found", profile


def test_without_a_name_the_first_model_that_one_may_use_answers() -> None:
    assert find_model(scoped({"draft", "secret-customer"}), fleet(), "").name == "draft"
    assert find_model(scoped({"mini@int4"}), fleet(), "").name == "mini@int4"
    assert find_model(scoped({"mini"}), fleet(), "").name == "mini"
    (error,) = errors((scoped(set()), "", "standard"))
    assert error.status == 404


def test_profiles_out_of_scope_are_refused_by_name() -> None:
    caller = IdentifiedCaller(profiles=frozenset({"standard"}))
    check_profile(caller, "standard")
    check_profile(ANONYMOUS, "golden")
    (error,) = errors((caller, "mini", "fast"))
    assert (error.status, error.kind, error.code, error.parameter) == (
        403,
        "permission_error",
        "profile_not_allowed",
        "profile",
    )
    assert "'fast'" in error.message
    assert "standard" in error.message


def test_surfaces() -> None:
    caller = IdentifiedCaller(surface=None, surfaces=("voice", "batch"))
    assert choose_surface(caller, "batch", "chat") == "batch"
    assert choose_surface(caller, "", "voice") == "voice"
    assert choose_surface(caller, "", "chat") == "voice"  # nobody asked for chat
    assert choose_surface(IdentifiedCaller(surface="batch", surfaces=("voice", "batch")), "", "chat") == "batch"
    assert choose_surface(ANONYMOUS, "agent", "chat") == "agent"
    assert choose_surface(ANONYMOUS, "", "chat") == "chat"
    for who, asked in ((caller, "chat"), (IdentifiedCaller(surfaces=()), "")):
        with pytest.raises(ApiError) as raised:
            choose_surface(who, asked, "chat")
        assert (raised.value.status, raised.value.code) == (403, "surface_not_allowed")
        assert "'chat'" in raised.value.message
