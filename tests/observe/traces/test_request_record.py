"""Recent requests are found by their ids, within their tenant, and are bounded."""

from headrace.observe.traces.request_record import RecentRequests, RequestRecord
from headrace.observe.traces.timeline import Timeline


def record(id: str = "", request_id: str = "req_1", tenant: str = "red") -> RequestRecord:
    made = Timeline(0.0)
    made.ended = 1.0
    return RequestRecord(
        id=id, request_id=request_id, tenant=tenant, method="POST", endpoint="/v1/x", status=200, timeline=made
    )


def test_a_request_is_found_by_any_of_its_ids() -> None:
    recent = RecentRequests(10)
    recent.add(made := record("abc", "req_7"))
    for id in ("abc", "chatcmpl-abc", "cmpl-abc", "msg_abc", "resp_abc", "req_7"):
        assert recent.find("red", id) is made
        assert recent.find_any(id) is made
    assert recent.find("red", "ab") is None


def test_other_tenants_do_not_find_it() -> None:
    recent = RecentRequests(10)
    recent.add(record("abc", "req_7", "red"))
    recent.add(blue := record("def", "req_7", "blue"))
    assert recent.find("blue", "abc") is None
    assert recent.find("blue", "req_7") is blue
    assert recent.find("", "req_7") is None


def test_the_oldest_is_forgotten() -> None:
    recent = RecentRequests(3)
    for number in range(5):
        recent.add(record(f"id{number}", f"req_{number}"))
    assert len(recent) == 3
    assert [recent.find("red", f"id{number}") is not None for number in range(5)] == [False, False, True, True, True]
    assert not any(key[1] in ("id0", "req_0") for key in recent._numbers)  # pyright: ignore[reportPrivateUsage]


def test_a_repeated_request_id_is_that_of_the_newest() -> None:
    recent = RecentRequests(2)
    for number in range(4):
        recent.add(record(f"id{number}", "same"))
    newest = recent.find("red", "same")
    assert newest is not None
    assert newest.id == "id3"
    assert [each.id for each in recent.newest()] == ["id3", "id2"]
