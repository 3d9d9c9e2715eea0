"""The fields of the records that are extracted: their types, the names a schema may give them, how values are drawn.

A value has two forms: as a message says it and as the JSON has it ("three" and 3). Owns the fields; knows no sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from training.corpus import values
from training.corpus.conversation import JSON
from training.corpus.values import Draw, Value, as_number, money, one_of, text_of, whole
from training.corpus.words.people import FIRST_NAMES, LAST_NAMES
from training.corpus.words.places import ROOMS
from training.corpus.words.things import COLOURS, GOODS, PROGRAMS, SERVICES, THINGS

ROLES = (
    "engineer",
    "designer",
    "sales manager",
    "accountant",
    "teacher",
    "cook",
    "driver",
    "nurse",
    "analyst",
    "buyer",
)
TOPICS = (
    "the budget",
    "the new website",
    "the holiday plan",
    "the launch",
    "the test results",
    "the office move",
    "the next release",
    "the training plan",
    "the customer survey",
    "the new contract",
)
EXPENSES = ("a taxi", "a train ticket", "lunch", "a hotel room", "parking", "a book", "office supplies", "a cable")
LEAVE_REASONS = ("a holiday", "a wedding", "a move", "parental leave", "a family visit", "a course")
CAUSES = (
    "a full disk",
    "a wrong setting",
    "a power cut",
    "a bad update",
    "an expired certificate",
    "a broken cable",
    "too many requests",
    "a memory leak",
)
EVENTS = ("spring conference", "summer party", "data workshop", "open day", "book fair", "safety course", "city run")
MEALS = ("vegetarian", "vegan", "without nuts", "without milk", "without gluten", "fish")
APPLIANCES = (
    "printer",
    "kettle",
    "toaster",
    "pump",
    "heater",
    "washing machine",
    "coffee machine",
    "dishwasher",
    "fan",
)
PROBLEMS = ("is broken", "leaks", "makes a loud noise", "does not turn on", "gets too hot", "smells of smoke")
PLANS = ("basic", "team", "business", "starter", "family", "premium")
RETURN_REASONS = (
    "is too small",
    "is too large",
    "arrived broken",
    "has a crack",
    "does not work",
    "has the wrong colour",
)
CARS = ("small car", "van", "family car", "truck", "minibus", "sports car")
COMPLAINTS = ("my back", "a cough", "my knee", "a headache", "my eyes", "a check-up", "a rash", "my shoulder")
ROOM_TYPES = ("single", "double", "twin", "family")


def weight(random: Random) -> Value:
    text = f"{random.randint(1, 60)}.{random.randint(1, 9)}" if random.random() < 0.6 else str(random.randint(1, 90))
    return text, as_number(text)


def size(random: Random) -> Value:
    text = f"{random.randint(24, 160)}.5" if random.random() < 0.2 else str(random.randint(24, 160))
    return text, as_number(text)


def attendees(random: Random) -> Value:
    names = random.sample(FIRST_NAMES, random.choice((2, 2, 3)))
    listed: list[JSON] = list(names)
    return ", ".join(names[:-1]) + f" and {names[-1]}", listed


def seat(random: Random) -> str:
    return f"{random.randint(1, 38)}{random.choice('ABCDEF')}"


def flight(random: Random) -> str:
    return values.code(random, random.choice(("MR", "QX", "ZV", "NB")), 3)


def some_date(random: Random) -> str:
    return values.iso_date(random) if random.random() < 0.15 else values.date(random)


def email(random: Random) -> str:
    return values.email_of(random, values.person(random))


@dataclass(frozen=True)
class Field:
    type: str  # of JSON schema: "string", "integer", "number", "boolean" or "array" (of strings)
    names: tuple[str, ...]
    draw: Draw | None = None  # none: a sentence settles it


PERSON = text_of(values.person)
DATE = text_of(some_date)
CLOCK = text_of(values.clock)
CITY = text_of(values.city)

FIELDS: dict[str, Field] = {
    "account": Field("string", ("account", "account_number"), text_of(lambda r: values.code(r, "K", 5))),
    "address": Field("string", ("address", "street"), text_of(values.address)),
    "amount": Field("number", ("amount", "total"), money(2, 900)),
    "appliance": Field("string", ("device", "item"), one_of(APPLIANCES)),
    "arrival": Field("string", ("arrival", "arrival_date"), DATE),
    "attendees": Field("array", ("attendees", "guests"), attendees),
    "available": Field("string", ("available", "free_from"), DATE),
    "bags": Field("integer", ("bags", "luggage"), whole(2, 5, words=True)),
    "boxes": Field("integer", ("boxes", "box_count"), whole(2, 30, words=True)),
    "breakfast": Field("boolean", ("breakfast",)),
    "car": Field("string", ("car", "vehicle"), one_of(CARS)),
    "cause": Field("string", ("cause", "reason"), one_of(CAUSES)),
    "city": Field("string", ("city", "place"), CITY),
    "colour": Field("string", ("colour",), one_of(COLOURS)),
    "company": Field("string", ("company", "organisation"), text_of(values.company)),
    "complaint": Field("string", ("reason", "complaint"), one_of(COMPLAINTS)),
    "contact": Field("string", ("contact", "contact_person"), PERSON),
    "currency": Field("string", ("currency",), one_of(values.CURRENCIES)),
    "customer": Field("string", ("customer", "name"), PERSON),
    "date": Field("string", ("date", "day"), DATE),
    "days": Field("integer", ("days", "day_count"), whole(2, 21, words=True)),
    "delivery_date": Field("string", ("delivery_date", "deliver_by"), DATE),
    "deputy": Field("string", ("deputy", "stand_in"), PERSON),
    "doctor": Field("string", ("doctor",), one_of(LAST_NAMES)),
    "driver": Field("string", ("driver", "name"), PERSON),
    "due_date": Field("string", ("due_date", "pay_by"), DATE),
    "email": Field("string", ("email", "e_mail"), text_of(email)),
    "employee": Field("string", ("employee", "name"), PERSON),
    "end_date": Field("string", ("end_date", "until"), DATE),
    "end_time": Field("string", ("end_time", "ended"), CLOCK),
    "event": Field("string", ("event",), one_of(EVENTS)),
    "expense": Field("string", ("expense", "item"), one_of(EXPENSES)),
    "first_visit": Field("boolean", ("first_visit", "new_patient")),
    "flight": Field("string", ("flight", "flight_number"), text_of(flight)),
    "from_city": Field("string", ("from_city", "origin"), CITY),
    "guest": Field("string", ("guest", "name"), PERSON),
    "guests": Field("integer", ("guests", "people"), whole(2, 12, words=True)),
    "insurance": Field("boolean", ("insurance", "insured")),
    "invoice": Field("string", ("invoice", "invoice_number"), text_of(lambda r: values.code(r, "R-", 5))),
    "item": Field("string", ("item", "product"), one_of(GOODS)),
    "leave_reason": Field("string", ("reason",), one_of(LEAVE_REASONS)),
    "meal": Field("string", ("meal", "food"), one_of(MEALS)),
    "minutes": Field("integer", ("minutes", "duration_minutes"), whole(3, 24, step=5)),
    "name": Field("string", ("name", "full_name"), PERSON),
    "nights": Field("integer", ("nights", "night_count"), whole(2, 14, words=True)),
    "order": Field("string", ("order", "order_number"), text_of(lambda r: values.code(r, r.choice("ABCK") + "-"))),
    "organiser": Field("string", ("organiser", "sender"), PERSON),
    "outdoors": Field("boolean", ("outdoors", "outside")),
    "owner": Field("string", ("owner", "engineer"), PERSON),
    "paid": Field("boolean", ("paid",)),
    "passenger": Field("string", ("passenger", "name"), PERSON),
    "patient": Field("string", ("patient", "name"), PERSON),
    "pets": Field("boolean", ("pets", "pets_allowed")),
    "phone": Field("string", ("phone", "phone_number"), text_of(values.phone)),
    "plan": Field("string", ("plan",), one_of(PLANS)),
    "price": Field("number", ("price", "cost"), money(5, 400)),
    "problem": Field("string", ("problem", "fault"), one_of(PROBLEMS)),
    "project": Field("string", ("project",), one_of(PROGRAMS)),
    "quantity": Field("integer", ("quantity", "count"), whole(2, 60, words=True)),
    "receipt": Field("boolean", ("receipt", "has_receipt")),
    "recipient": Field("string", ("recipient", "receiver"), PERSON),
    "refund": Field("boolean", ("refund", "wants_refund")),
    "rent": Field("number", ("rent", "monthly_rent"), money(400, 2900)),
    "return_reason": Field("string", ("reason", "problem"), one_of(RETURN_REASONS)),
    "role": Field("string", ("role", "position"), one_of(ROLES)),
    "room": Field("string", ("room",), one_of(ROOMS)),
    "room_type": Field("string", ("room_type", "room"), one_of(ROOM_TYPES)),
    "rooms": Field("integer", ("rooms", "room_count"), whole(2, 6, words=True)),
    "seat": Field("string", ("seat", "seat_number"), text_of(seat)),
    "seats": Field("integer", ("seats", "users"), whole(2, 90, words=True)),
    "service": Field("string", ("service", "system"), one_of(SERVICES)),
    "signature": Field("boolean", ("signature", "must_sign")),
    "size": Field("number", ("size", "square_metres"), size),
    "start_date": Field("string", ("start_date", "start"), DATE),
    "start_time": Field("string", ("start_time", "started"), CLOCK),
    "thing": Field("string", ("item", "product"), one_of(THINGS)),
    "tickets": Field("integer", ("tickets", "ticket_count"), whole(2, 12, words=True)),
    "time": Field("string", ("time",), CLOCK),
    "to_city": Field("string", ("to_city", "destination"), CITY),
    "topic": Field("string", ("topic", "subject"), one_of(TOPICS)),
    "urgent": Field("boolean", ("urgent", "is_urgent")),
    "users": Field("integer", ("affected_users", "users"), whole(3, 900)),
    "visit": Field("string", ("visit_day", "day"), one_of(values.WEEKDAYS)),
    "weight_kg": Field("number", ("weight_kg", "weight"), weight),
    "years": Field("integer", ("years", "experience_years"), whole(2, 30, words=True)),
}
