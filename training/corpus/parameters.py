"""The parameters of the tools that the tools task declares: names, types, and how a value is drawn.

A parameter has several names, of which a declaration uses one. Owns the parameters; knows no tool.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.corpus import values
from training.corpus.values import Draw, one_of, text_of, whole
from training.corpus.words.people import FIRST_NAMES
from training.corpus.words.places import ROOMS
from training.corpus.words.things import COMPANIES, GOODS, PROGRAMS, SERVICES, THINGS

TITLES = (
    "Budget review",
    "Team lunch",
    "Planning",
    "Dentist",
    "Job interview",
    "Design review",
    "Yoga",
    "Demo",
    "Town hall",
)

QUERIES = (
    "parental leave",
    "travel costs",
    "password rules",
    "working from home",
    "backups",
    "release notes",
    "data protection",
    "sick leave",
    "fire drills",
    "visitor badges",
    "cache settings",
    "rate limits",
)

SUMMARIES = (
    "The printer is jammed",
    "The login page is slow",
    "The invoice is wrong",
    "The lamp is broken",
    "The export is empty",
    "The badge does not work",
    "The report is missing",
    "The screen flickers",
)

NEWS = (
    "I am late",
    "The meeting is over",
    "Lunch is ready",
    "The parcel is here",
    "The test has passed",
    "I am on my way",
    "The demo starts now",
    "Please call me",
)

CHORES = (
    "water the plants",
    "pay the rent",
    "call the bank",
    "buy milk",
    "send the report",
    "book the hotel",
    "renew the passport",
    "feed the cat",
)

GENRES = ("jazz", "rock", "piano music", "folk", "classical music", "soul", "film music", "blues")

HOME_ROOMS = ("kitchen", "bedroom", "bathroom", "living room", "hall", "garage", "office", "cellar")


@dataclass(frozen=True)
class Parameter:
    names: tuple[str, ...]
    draw: Draw
    type: str = "string"
    choices: tuple[str, ...] = ()
    description: str = ""


def choice(names: tuple[str, ...], choices: tuple[str, ...], description: str = "") -> Parameter:
    return Parameter(names, one_of(choices), choices=choices, description=description)


PARAMETERS: dict[str, Parameter] = {
    "amount": Parameter(("amount", "value", "sum"), whole(1, 90, step=5), "number", description="How much money."),
    "branch": Parameter(
        ("branch", "city", "branch_name", "shop"), text_of(values.city), description="Where the shop is."
    ),
    "city": Parameter(("city", "location", "place", "city_name", "town"), text_of(values.city), description="A city."),
    "company": Parameter(("tenant", "account", "customer", "tenant_name"), one_of(COMPANIES), description="Who pays."),
    "date": Parameter(
        ("date", "day", "calendar_day", "event_date"), text_of(values.date), description="Such as 3 May."
    ),
    "degrees": Parameter(("degrees", "temperature", "target", "value"), whole(15, 26), "integer"),
    "destination": Parameter(
        ("destination", "to_city", "arrival", "target_city"), text_of(values.city), description="Where to."
    ),
    "environment": choice(("environment", "stage", "target"), ("staging", "production")),
    "first_number": Parameter(("a", "x", "first", "first_number"), whole(12, 99), "integer"),
    "from_currency": choice(("from_currency", "source", "source_currency", "base"), values.CURRENCIES),
    "genre": Parameter(("genre", "style", "music", "kind"), one_of(GENRES), description="What to play."),
    "home_room": Parameter(("room", "room_name", "area", "zone"), one_of(HOME_ROOMS), description="A room at home."),
    "invoice": Parameter(
        ("invoice", "invoice_id", "invoice_number", "number"), text_of(lambda r: values.code(r, "R-", 5))
    ),
    "item": Parameter(("item", "product", "article", "item_name"), one_of(GOODS), description="What is sold."),
    "level": Parameter(
        ("level", "brightness", "percent", "value"), whole(1, 20, step=5), "integer", description="0 to 100."
    ),
    "list_name": choice(("list", "list_name", "target_list"), ("shopping", "packing", "wish")),
    "minutes": Parameter(("minutes", "duration", "length", "duration_minutes"), whole(1, 18, step=5), "integer"),
    "model": choice(("model", "variant", "model_name"), ("mini", "draft", "large", "medium")),
    "name": Parameter(
        ("name", "person", "full_name", "contact"), text_of(values.person), description="First and last name."
    ),
    "news": Parameter(("text", "message", "body", "content"), one_of(NEWS), description="What to say."),
    "order": Parameter(
        ("order_id", "order", "order_number", "id"), text_of(lambda r: values.code(r, r.choice("ABCK") + "-"))
    ),
    "origin": Parameter(
        ("origin", "from_city", "departure", "start_city"), text_of(values.city), description="Where from."
    ),
    "people": Parameter(("people", "seats", "size", "guests"), whole(2, 30), "integer", description="How many people."),
    "percentile": choice(("percentile", "quantile", "quantile_name"), ("p50", "p90", "p95", "p99")),
    "priority": choice(("priority", "urgency", "level"), ("low", "normal", "high")),
    "query": Parameter(
        ("query", "text", "search", "terms", "question"), one_of(QUERIES), description="What to look for."
    ),
    "recipient": Parameter(
        ("recipient", "person", "receiver", "name"), one_of(FIRST_NAMES), description="Who gets it."
    ),
    "room": Parameter(("room", "room_name", "meeting_room", "name"), one_of(ROOMS)),
    "second_number": Parameter(("b", "y", "second", "second_number"), whole(2, 99), "integer"),
    "service": Parameter(("service", "service_name", "system", "app"), one_of(SERVICES), description="Which service."),
    "summary": Parameter(("summary", "title", "subject", "problem"), one_of(SUMMARIES), description="What is wrong."),
    "task": Parameter(("task", "text", "todo", "note"), one_of(CHORES), description="What to do."),
    "thing": Parameter(("item", "thing", "entry", "text"), one_of(THINGS), description="What to add."),
    "ticket": Parameter(("ticket_id", "ticket", "ticket_number", "id"), text_of(lambda r: values.code(r, "T-", 3))),
    "time": Parameter(("time", "start", "hour", "start_time"), text_of(values.clock), description="Such as 9:30."),
    "title": Parameter(("title", "name", "subject", "event"), one_of(TITLES), description="What it is called."),
    "to_currency": choice(("to_currency", "target", "target_currency", "quote"), values.CURRENCIES),
    "tracking": Parameter(
        ("tracking_number", "parcel", "parcel_id", "code"), text_of(lambda r: values.code(r, "ZX", 6))
    ),
    "unit": choice(("unit", "units", "scale"), ("celsius", "fahrenheit")),
    "version": Parameter(("version", "release", "tag"), text_of(lambda r: f"{values.version(r)}.{r.randint(0, 9)}")),
    "program": Parameter(("program", "app", "project", "app_name"), one_of(PROGRAMS), description="Which program."),
    "weekday": Parameter(("weekday", "day", "day_of_week"), one_of(values.WEEKDAYS), description="Such as Monday."),
}
