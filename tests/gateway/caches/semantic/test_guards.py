"""Each guard refuses what it is for, says why, and leaves the same question in other words alone."""

from __future__ import annotations

import pytest

from headrace.gateway.caches.semantic import guards
from headrace.gateway.caches.semantic.guarded_question import parse_question
from headrace.gateway.caches.semantic.guards import GUARDS, refusal_reason
from tests.gateway.caches.semantic.pairs import Split, pairs


@pytest.mark.parametrize(
    ("reason", "one", "other"),
    [
        ("polarity", "How do I turn on the cache?", "How do I turn the cache off?"),
        ("polarity", "How do I enable the cache?", "How do I deactivate the cache?"),
        ("polarity", "Is the replica healthy?", "Is the replica unhealthy?"),
        ("polarity", "How do I deploy with downtime?", "How do I deploy without downtime?"),
        ("order", "The test passes here and fails there.", "The test fails here and passes there."),
        ("negation", "Which services can reach the internet?", "Which services can't reach the internet?"),
        ("negation", "Send a mail if the check is green.", "Send a mail unless the check is green."),
        ("number", "Give me two ideas.", "Give me seven ideas."),
        ("number", "Is 5 GB enough?", "Is 5 MB enough?"),
        ("date", "Who is on call today?", "Who is on call tomorrow?"),
        ("date", "Move it to 9 am.", "Move it to 9 pm."),
        ("name", "Is our data in Dublin?", "Is our data in Frankfurt?"),
        ("identifier", "What does --dry-run do?", "What does --force do?"),
        ("identifier", "What does cp -r do?", "What does cp -R do?"),
        ("identifier", 'It says "not found"', 'It says "access denied"'),
        ("alternative", "Restart it in staging.", "Restart it in production."),
        ("kind of question", "Why do we shard the table?", "Who shards the table?"),
        ("extent", "Log out of all devices.", "Log out of this device."),
        ("superlative", "Which region is the cheapest?", "Which region is cheap?"),
        ("direction", "Copy the file from the server to the laptop.", "Copy the file from the laptop to the server."),
        ("direction", "Does the scheduler call the executor?", "Does the executor call the scheduler?"),
        ("direction", "Is a set faster than a list here?", "Is a list faster than a set here?"),
        ("direction", "Count down from 10 to 5", "Count down from 5 to 10"),
        ("condition", "How do I set an alarm?", "How do I set an alarm that repeats?"),
        ("another word", "How do I create a branch?", "How do I create a wiki?"),
        ("language", "How do I change my password?", "Wie ändere ich mein Passwort?"),
        ("language", "Is there an app?", "アプリはありますか?"),
    ],
)
def test_what_changes_the_answer_is_refused_with_its_reason(reason: str, one: str, other: str) -> None:
    assert refusal_reason(one, other) == reason
    assert refusal_reason(other, one) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("How do I turn on the cache?", "How can I enable the cache?"),
        ("How do I turn the cache off?", "How do I disable the cache?"),
        ("Which files are not included?", "Which files are excluded?"),
        ("Why doesn't the container start?", "Why does the container not start?"),
        ("How do I stop it from updating itself?", "How do I prevent it from updating itself?"),
        ("Is a password of 8 characters enough?", "Is a password of eight characters enough?"),
        ("How do I connect to Postgres from Django?", "connect django to postgres"),
        ("In Python, how do I reverse a list?", "How do I reverse a list in Python?"),
        ("Which is faster, a list or a set?", "What is faster, a set or a list?"),
        ("What is the size limit of attachments?", "What is the attachment size limit?"),
        ("Where is my invoice?", "Hello! Could you please tell me where my invoice is? Thanks a lot!"),
        ("How does the scheduler pick a request?", "How is a request picked by the scheduler?"),
        ("What is rate limiting?", "Explain rate limiting."),
        ("HOW DO I CLOSE A TICKET?", "How do I close a ticket?"),
        ("How do I set up a k8s cluster?", "How do I set up a Kubernetes cluster?"),
    ],
)
def test_the_same_in_other_words_is_let_through(one: str, other: str) -> None:
    assert refusal_reason(one, other) is None
    assert refusal_reason(other, one) is None


def test_a_question_is_let_through_to_itself() -> None:
    for pair in pairs():
        assert refusal_reason(pair.one, pair.one) is None, pair.one


@pytest.mark.parametrize(
    ("split", "least", "most"), [("train", 0.96, 0.05), ("test", 0.93, 0.10), ("late", 0.88, 0.25)]
)
def test_guards_refuse_most_wrong_pairs_and_few_right_ones(split: Split, least: float, most: float) -> None:
    found = pairs(split)
    wrong = [refusal_reason(pair.other, pair.one) is not None for pair in found if not pair.shared]
    right = [refusal_reason(pair.other, pair.one) is not None for pair in found if pair.shared]
    assert sum(wrong) >= least * len(wrong)
    assert sum(right) <= most * len(right)


def test_guards_are_chosen_by_the_caller() -> None:
    one, other = "Give me two ideas.", "Give me seven ideas."
    assert refusal_reason(one, other, (guards.dates, guards.names)) is None
    assert refusal_reason(one, other, (guards.numbers,)) == "number"
    assert len(set(GUARDS)) == len(GUARDS)


def test_any_text_can_be_read() -> None:
    for text in (
        "",
        " ",
        "?",
        "\0\ud800",
        "a-" * 5000,
        "1," * 5000,
        "not " * 3000,
        "\u201c\u201d\u2018\u2019",
        "🙂 🙂",
        "ẞ" * 100,
    ):
        assert parse_question(text).text == text
        assert refusal_reason(text, text) is None


@pytest.mark.parametrize(
    ("question", "candidate", "reason"),
    [
        ("How do I add a nullable column?", "How do I add a non-nullable column?", "polarity"),
        ("Is pre-tax income shown?", "Is post-tax income shown?", "another word"),
        ("How do I reopen a ticket?", "How do I open a ticket?", "polarity"),
        ("Flights under 200 dollars", "Flights over 200 dollars", "bound"),
        ("Hotels with 4 stars or more", "Hotels with at most 4 stars", "bound"),
        ("How do I subtract a from b?", "How do I subtract b from a?", "direction"),
        ("Is x a subset of y?", "Is y a subset of x?", "direction"),
        ("Do you ship to Norway?", "Do you ship from Norway?", "direction"),
        ("Does the agent call the supervisor?", "Does the supervisor call the agent?", "direction"),
        ("Can the first camera see the second one?", "Can the second camera see the first one?", "direction"),
        ("How do I set a limit for a user?", "How do I set a limit for every user?", "extent"),
        ("Do I have to register?", "May I register?", "modality"),
    ],
)
def test_order_bounds_quantifiers_and_prefixes_keep_questions_apart(question: str, candidate: str, reason: str) -> None:
    assert refusal_reason(question, candidate) == reason
    assert refusal_reason(candidate, question) == reason


@pytest.mark.parametrize(
    ("question", "candidate"),
    [
        ("How much water should I drink a day?", "How much water should I drink each day?"),
        ("How do I change the owner of a file?", "How do I change the file owner?"),
        ("How do I remove duplicates from a list?", "What is the way to delete duplicates in a list?"),
        ("What is the difference between a and b?", "What is the difference between b and a?"),
        ("Returns within 30 days", "Returns in up to 30 days"),
        ("How do I re-order an item?", "How do I reorder an item?"),
    ],
)
def test_the_same_question_in_other_words_passes_the_new_guards(question: str, candidate: str) -> None:
    assert refusal_reason(question, candidate) is None
    assert refusal_reason(candidate, question) is None
