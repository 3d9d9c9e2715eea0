"""The tools of the tools task: what each does, how people ask for it, what it may answer and what is said then.

A request names slots by the parameters' own names; a declaration may call them otherwise. Owns the tools; knows nothing
of how a conversation with them goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from training.corpus import values
from training.corpus.conversation import JSON
from training.corpus.parameters import TITLES
from training.corpus.values import Draw, Value, money, one_of, text_of, whole
from training.corpus.words.places import ROOMS

SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "clear", "stormy", "dry")
MANUALS = ("Staff handbook", "Travel guide", "Security rules", "Operations manual", "Welcome guide", "API guide")


def decimal(low: int, high: int) -> Draw:
    """A number with one digit after the point, never a zero."""

    def draw(random: Random) -> Value:
        number = float(f"{random.randint(low, high)}.{random.randint(1, 9)}")
        return str(number), number

    return draw


@dataclass(frozen=True)
class Outcome:
    values: dict[str, Draw | str]  # the tool's answer: a draw, or a fixed text
    sentence: str  # what to say then: slots of the answer and of the required parameters


@dataclass(frozen=True)
class Tool:
    verbs: tuple[str, ...]
    nouns: tuple[str, ...]
    descriptions: tuple[str, ...]
    required: tuple[str, ...]
    requests: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    optional: tuple[str, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()  # a request that lacks one required parameter, and which
    follows: tuple[str, ...] = ()  # a request after one of the same tool, in which one value changes
    computed: dict[str, Callable[[dict[str, JSON]], JSON]] = field(
        default_factory=lambda: {}  # values of the answer that follow from the arguments
    )


def number(value: JSON) -> float:
    assert isinstance(value, int | float)
    return value


CLOCK = text_of(values.clock)
AMOUNT = money(2, 400)
MORNING = text_of(lambda random: values.clock_pair(random)[0])
DATE = text_of(values.date)

TOOLS: dict[str, Tool] = {
    "weather": Tool(
        ("get", "fetch", "read", "check"),
        ("weather", "current_weather", "weather_now"),
        ("Current weather in a city.", "Tells the weather right now in a place."),
        ("city",),
        (
            "What is the weather in {city}?",
            "How is the weather in {city} right now?",
            "Is it raining in {city} at the moment?",
            "What is the weather in {city} in {unit}?",
            "Tell me the current weather in {city}.",
            "How warm is it in {city} now, in {unit}?",
        ),
        (
            Outcome(
                {"temperature": whole(1, 34), "sky": one_of(SKIES)}, "It is {temperature} degrees and {sky} in {city}."
            ),
        ),
        optional=("unit",),
        missing=(("What is the weather like right now?", "city"), ("How warm is it outside?", "city")),
        follows=("And in {city}?", "What about {city}?"),
    ),
    "forecast": Tool(
        ("get", "fetch", "show", "read"),
        ("forecast", "weather_forecast", "outlook"),
        ("Weather forecast for a day of this week.", "Tells the weather of a coming day."),
        ("city", "weekday"),
        (
            "What will the weather be in {city} on {weekday}?",
            "Will it rain in {city} on {weekday}?",
            "Give me the forecast for {city} on {weekday}.",
            "How warm will it be on {weekday} in {city}?",
        ),
        (
            Outcome(
                {"high": whole(12, 33), "sky": one_of(SKIES)},
                "On {weekday} it will be {sky} in {city}, up to {high} degrees.",
            ),
        ),
        missing=(("What will the weather be in {city}?", "weekday"), ("Will it rain on {weekday}?", "city")),
        follows=("And on {weekday}?", "And in {city}?"),
    ),
    "create_event": Tool(
        ("create", "add", "make", "new"),
        ("event", "calendar_event", "calendar_entry", "appointment"),
        ("Puts an event into the calendar.", "Adds an entry to the calendar."),
        ("title", "date", "time"),
        (
            "Put {title} into my calendar on {date} at {time}.",
            "Add {title} to the calendar for {date}, {time}.",
            "Please plan {title} on {date} at {time}, {minutes} minutes.",
            "Create an event on {date} at {time}: {title}.",
            "I need {title} in the calendar on {date} at {time} for {minutes} minutes.",
        ),
        (
            Outcome({"status": "created"}, "{title} is in the calendar on {date} at {time}."),
            Outcome({"status": "conflict", "with": one_of(TITLES)}, "On {date} at {time} there is already {with}."),
        ),
        optional=("minutes",),
        missing=(
            ("Put {title} into my calendar on {date}.", "time"),
            ("Add {title} to the calendar at {time}.", "date"),
        ),
    ),
    "list_events": Tool(
        ("list", "show", "get", "find"),
        ("events", "calendar", "appointments", "agenda"),
        ("Lists the events of a day.", "Shows what is in the calendar on a day."),
        ("date",),
        (
            "What is in my calendar on {date}?",
            "What do I have planned on {date}?",
            "Which appointments do I have on {date}?",
            "Show my calendar of {date}.",
        ),
        (
            Outcome(
                {"count": whole(2, 9), "first": CLOCK}, "There are {count} events on {date}, the first at {first}."
            ),
            Outcome({"status": "empty"}, "There is nothing in the calendar on {date}."),
        ),
        missing=(("What is in my calendar?", "date"),),
        follows=("And on {date}?", "What about {date}?"),
    ),
    "order_status": Tool(
        ("get", "check", "find", "look_up"),
        ("order_status", "order", "order_state"),
        ("Status of an order.", "Tells how far an order is."),
        ("order",),
        (
            "Where is my order {order}?",
            "What is the status of order {order}?",
            "Has order {order} been sent?",
            "When does order {order} arrive?",
            "How far is order {order}?",
        ),
        (
            Outcome({"status": "shipped", "arrives": DATE}, "Order {order} is shipped and arrives on {arrives}."),
            Outcome({"status": "packed", "leaves": DATE}, "Order {order} is packed and leaves on {leaves}."),
            Outcome({"status": "delivered", "on": DATE}, "Order {order} was delivered on {on}."),
        ),
        missing=(("Where is my order?", "order"), ("Has my order been sent?", "order")),
        follows=("And order {order}?", "What about {order}?"),
    ),
    "cancel_order": Tool(
        ("cancel", "stop", "revoke"),
        ("order", "purchase", "order_by_id"),
        ("Cancels an order.", "Cancels an order that is not sent yet."),
        ("order",),
        (
            "Please cancel order {order}.",
            "I do not want order {order} any more.",
            "Cancel my order {order}.",
            "Can you stop order {order}?",
        ),
        (
            Outcome(
                {"status": "cancelled", "refund": AMOUNT},
                "Order {order} is cancelled and {refund} euros come back.",
            ),
            Outcome({"status": "too late"}, "It is too late to cancel order {order}."),
        ),
        missing=(("Please cancel my order.", "order"),),
    ),
    "convert_currency": Tool(
        ("convert", "change", "exchange"),
        ("currency", "money", "amount"),
        ("Converts money between currencies.", "Changes an amount into another currency."),
        ("amount", "from_currency", "to_currency"),
        (
            "How much is {amount} {from_currency} in {to_currency}?",
            "Convert {amount} {from_currency} to {to_currency}.",
            "What are {amount} {from_currency} in {to_currency}?",
            "I have {amount} {from_currency}. How many {to_currency} is that?",
        ),
        (Outcome({"result": AMOUNT}, "{amount} {from_currency} is {result} {to_currency}."),),
        missing=(("How much is {amount} {from_currency}?", "to_currency"),),
        follows=("And {amount} {from_currency}?",),
    ),
    "search_docs": Tool(
        ("search", "find_in", "query", "look_in"),
        ("docs", "handbook", "documents", "wiki"),
        ("Searches the company's documents.", "Full text search in the handbook."),
        ("query",),
        (
            "What do our documents say about {query}?",
            "Search the handbook for {query}.",
            "Find our rules on {query}.",
            "Where can I read about {query}?",
            "Look up {query} in the documents.",
        ),
        (
            Outcome({"title": one_of(MANUALS), "page": whole(2, 90)}, "See the {title}, page {page}."),
            Outcome({"hits": whole(0, 0)}, "There is nothing about {query}."),
        ),
        missing=(("Please search the documents.", "query"),),
        follows=("And about {query}?",),
    ),
    "set_timer": Tool(
        ("set", "start", "run"),
        ("timer", "countdown", "kitchen_timer"),
        ("Starts a timer.", "Rings after some minutes."),
        ("minutes",),
        (
            "Set a timer for {minutes} minutes.",
            "Wake me in {minutes} minutes.",
            "Start a timer of {minutes} minutes, please.",
            "Ring in {minutes} minutes.",
        ),
        (Outcome({"ends": CLOCK}, "The timer rings at {ends}."),),
        missing=(("Set a timer.", "minutes"),),
    ),
    "create_ticket": Tool(
        ("create", "open", "file", "report"),
        ("ticket", "issue", "support_ticket"),
        ("Opens a support ticket.", "Reports a problem to support."),
        ("summary",),
        (
            "Open a ticket: {summary}.",
            "Please report a problem: {summary}.",
            "Open a ticket with {priority} priority: {summary}.",
            "{summary}. Please open a {priority} priority ticket.",
            "Create a support ticket. {summary}.",
        ),
        (Outcome({"ticket": text_of(lambda r: values.code(r, "T-", 3))}, "Ticket {ticket} is open."),),
        optional=("priority",),
        missing=(("Please open a ticket.", "summary"),),
    ),
    "ticket_status": Tool(
        ("get", "check", "show"),
        ("ticket", "ticket_status", "issue_state"),
        ("Status of a support ticket.", "Tells who works on a ticket."),
        ("ticket",),
        (
            "What is the status of ticket {ticket}?",
            "Who works on ticket {ticket}?",
            "Is ticket {ticket} solved?",
            "How is ticket {ticket} going?",
        ),
        (
            Outcome(
                {"status": "in progress", "owner": text_of(values.person)}, "{owner} is working on ticket {ticket}."
            ),
            Outcome({"status": "solved", "on": DATE}, "Ticket {ticket} was solved on {on}."),
            Outcome({"status": "waiting"}, "Ticket {ticket} is still waiting."),
        ),
        missing=(("What is the status of my ticket?", "ticket"),),
        follows=("And ticket {ticket}?", "What about {ticket}?"),
    ),
    "book_room": Tool(
        ("book", "reserve", "hold"),
        ("room", "meeting_room", "conference_room"),
        ("Books a meeting room.", "Reserves a room for a meeting."),
        ("room", "date", "time"),
        (
            "Book room {room} on {date} at {time}.",
            "Please reserve {room} for {date}, {time}.",
            "I need the room {room} on {date} at {time}.",
            "Can we have {room} on {date} at {time}?",
        ),
        (
            Outcome({"status": "booked"}, "Room {room} is booked for {date} at {time}."),
            Outcome({"status": "taken", "free_at": CLOCK}, "Room {room} is taken on {date}. It is free at {free_at}."),
        ),
        missing=(("Book room {room} on {date}.", "time"), ("Reserve a room on {date} at {time}.", "room")),
    ),
    "find_room": Tool(
        ("find", "suggest", "search"),
        ("room", "free_room", "meeting_place"),
        ("Finds a free room for some people.", "Looks for a room that is large enough."),
        ("people", "date"),
        (
            "Which room is free for {people} people on {date}?",
            "Find a room for {people} people on {date}.",
            "Where can {people} of us meet on {date}?",
            "We are {people} on {date} and need a room.",
        ),
        (
            Outcome({"room": one_of(ROOMS), "floor": whole(1, 9)}, "{room} on floor {floor} is free."),
            Outcome({"status": "none"}, "No room is free on {date}."),
        ),
        missing=(("Find a room for {people} people.", "date"),),
    ),
    "latency": Tool(
        ("get", "read", "query", "measure"),
        ("latency", "response_time", "latency_metric"),
        ("Latency of a service in ms.", "Reads a percentile of the response time."),
        ("service", "percentile"),
        (
            "What is the {percentile} latency of the {service} service?",
            "How high is the {percentile} of {service}?",
            "Show me the {percentile} response time of {service}.",
            "Give me the latency of {service} at {percentile}.",
        ),
        (Outcome({"milliseconds": whole(12, 1900)}, "The {percentile} latency of {service} is {milliseconds} ms."),),
        missing=(("What is the latency of the {service} service?", "percentile"),),
        follows=("And the {percentile}?", "And for {service}?"),
    ),
    "error_rate": Tool(
        ("get", "read", "query"),
        ("error_rate", "errors", "failure_rate"),
        ("Share of failed requests of a service.", "How many requests of a service fail."),
        ("service",),
        (
            "How many requests of {service} fail?",
            "What is the error rate of the {service} service?",
            "What was the error rate of {service} in the last {minutes} minutes?",
            "Does {service} have many errors?",
        ),
        (Outcome({"percent": decimal(0, 9)}, "The error rate of {service} is {percent} %."),),
        optional=("minutes",),
        missing=(("What is the error rate?", "service"),),
        follows=("And of {service}?", "What about {service}?"),
    ),
    "send_message": Tool(
        ("send", "write", "post"),
        ("message", "text", "note", "chat_message"),
        ("Sends a message to a person.", "Writes to somebody."),
        ("recipient", "news"),
        (
            "Tell {recipient}: {news}.",
            "Write to {recipient}: {news}.",
            "Send {recipient} a message: {news}.",
            "Message for {recipient}: {news}.",
        ),
        (
            Outcome({"status": "sent"}, "The message to {recipient} is sent."),
            Outcome({"status": "queued"}, "The message to {recipient} goes out later."),
        ),
        missing=(("Send a message: {news}.", "recipient"), ("Write to {recipient}.", "news")),
    ),
    "find_flight": Tool(
        ("find", "search", "look_for"),
        ("flight", "flights", "plane"),
        ("Finds a flight between two cities.", "Searches flights."),
        ("origin", "destination", "date"),
        (
            "Find a flight from {origin} to {destination} on {date}.",
            "I want to fly from {origin} to {destination} on {date}.",
            "Which plane goes from {origin} to {destination} on {date}?",
            "Is there a flight to {destination} from {origin} on {date}?",
        ),
        (
            Outcome(
                {"flight": text_of(lambda r: values.code(r, r.choice(("MR", "QX", "ZV")), 3)), "leaves": CLOCK},
                "Flight {flight} leaves {origin} at {leaves}.",
            ),
            Outcome({"status": "none"}, "There is no flight to {destination} on {date}."),
        ),
        missing=(
            ("Find a flight from {origin} to {destination}.", "date"),
            ("I want to fly to {destination} on {date}.", "origin"),
        ),
    ),
    "find_train": Tool(
        ("find", "search", "next"),
        ("train", "trains", "rail_connection"),
        ("Finds the next train between two cities.", "Searches trains."),
        ("origin", "destination"),
        (
            "When does the next train from {origin} to {destination} leave?",
            "Find a train from {origin} to {destination}.",
            "Is there a train from {origin} to {destination} after {time}?",
            "I need a train to {destination} from {origin}.",
        ),
        (
            Outcome(
                {"leaves": CLOCK, "platform": whole(1, 24)},
                "The train to {destination} leaves at {leaves} from platform {platform}.",
            ),
        ),
        optional=("time",),
        missing=(("When does the next train to {destination} leave?", "origin"),),
    ),
    "stock_level": Tool(
        ("get", "check", "count"),
        ("stock", "stock_level", "inventory"),
        ("How many of an item are in stock.", "Counts an item in the warehouse."),
        ("item",),
        (
            "How many {item} are in stock?",
            "Do we still have {item}?",
            "Check the stock of {item}.",
            "How many {item} are left in the warehouse?",
        ),
        (
            Outcome({"in_stock": whole(2, 900)}, "There are {in_stock} {item} in stock."),
            Outcome({"in_stock": whole(0, 0), "expected": DATE}, "There are no {item} in stock until {expected}."),
        ),
        missing=(("Please check the stock.", "item"),),
        follows=("And {item}?", "And how many {item}?"),
    ),
    "price": Tool(
        ("get", "look_up", "show"),
        ("price", "item_price", "unit_price"),
        ("Price of an item.", "What one piece of an item costs."),
        ("item",),
        (
            "What do the {item} cost?",
            "How much are the {item}?",
            "What is the price of the {item}?",
            "Tell me the price of our {item}.",
        ),
        (
            Outcome(
                {"price": AMOUNT, "currency": one_of(values.CURRENCIES)},
                "The {item} cost {price} {currency} each.",
            ),
        ),
        missing=(("What does it cost?", "item"),),
        follows=("And the {item}?",),
    ),
    "find_contact": Tool(
        ("find", "look_up", "get"),
        ("contact", "phone_number", "person"),
        ("Phone number of a person.", "Looks a person up in the phone book."),
        ("name",),
        (
            "What is the phone number of {name}?",
            "How can I call {name}?",
            "Give me the number of {name}.",
            "Find {name} in the phone book.",
        ),
        (
            Outcome({"phone": text_of(values.phone)}, "The number of {name} is {phone}."),
            Outcome({"status": "unknown"}, "{name} is not in the phone book."),
        ),
        missing=(("Please find a phone number.", "name"),),
        follows=("And of {name}?", "And {name}?"),
    ),
    "opening_hours": Tool(
        ("get", "show", "read"),
        ("opening_hours", "hours", "shop_hours"),
        ("Opening hours of a shop on a day.", "When a branch is open."),
        ("branch", "weekday"),
        (
            "When is the shop in {branch} open on {weekday}?",
            "When does the {branch} shop open on {weekday}?",
            "Is the shop in {branch} open on {weekday}?",
            "What are the opening hours in {branch} on {weekday}?",
        ),
        (
            Outcome(
                {"opens": MORNING, "closes": text_of(lambda r: f"{r.randint(21, 23)}:30")},
                "On {weekday} the shop in {branch} is open from {opens} to {closes}.",
            ),
            Outcome({"status": "closed"}, "The shop in {branch} is closed on {weekday}."),
        ),
        missing=(("When is the shop in {branch} open?", "weekday"), ("When is the shop open on {weekday}?", "branch")),
        follows=("And on {weekday}?",),
    ),
    "restart_service": Tool(
        ("restart", "reboot", "bounce"),
        ("service", "server", "system"),
        ("Restarts a service.", "Stops a service and starts it again."),
        ("service", "environment"),
        (
            "Restart the {service} service in {environment}.",
            "Please restart {service} on {environment}.",
            "The {service} service in {environment} needs a restart.",
            "Can you restart {service} in {environment}?",
        ),
        (
            Outcome(
                {"status": "running", "seconds": whole(2, 90)},
                "The {service} service is running again after {seconds} seconds.",
            ),
            Outcome({"status": "failed"}, "The {service} service could not be restarted in {environment}."),
        ),
        missing=(("Restart the {service} service.", "environment"), ("Restart a service in {environment}.", "service")),
    ),
    "deploy": Tool(
        ("deploy", "release", "ship", "roll_out"),
        ("version", "program", "build"),
        ("Deploys a version of a program.", "Brings a version to an environment."),
        ("program", "version", "environment"),
        (
            "Deploy {program} {version} to {environment}.",
            "Please bring {program} version {version} to {environment}.",
            "Roll out version {version} of {program} in {environment}.",
            "{program} {version} can go to {environment}.",
        ),
        (
            Outcome({"status": "deployed"}, "{program} {version} is in {environment}."),
            Outcome(
                {"status": "failed", "step": one_of(("build", "tests", "upload"))},
                "The deployment failed at the step {step}.",
            ),
        ),
        missing=(("Deploy {program} to {environment}.", "version"), ("Deploy {program} {version}.", "environment")),
    ),
    "set_reminder": Tool(
        ("set", "add", "create"),
        ("reminder", "alarm", "memo"),
        ("Reminds the user of something on a day.", "Sets a reminder."),
        ("task", "date"),
        (
            "Remind me on {date} to {task}.",
            "On {date} I have to {task}. Remind me.",
            "Set a reminder for {date}: {task}.",
            "Please remind me to {task} on {date} at {time}.",
        ),
        (Outcome({"status": "set"}, "On {date} you will be reminded to {task}."),),
        optional=("time",),
        missing=(("Remind me to {task}.", "date"), ("Remind me of something on {date}.", "task")),
    ),
    "multiply": Tool(
        ("multiply", "product", "times"),
        ("numbers", "two_numbers", "integers"),
        ("Multiplies two numbers.", "Product of two numbers."),
        ("first_number", "second_number"),
        (
            "Multiply {first_number} by {second_number}.",
            "What is the product of {first_number} and {second_number}?",
            "How much is {first_number} multiplied by {second_number}?",
        ),
        (Outcome({}, "The product of {first_number} and {second_number} is {product}."),),
        computed={"product": lambda given: int(number(given["first_number"]) * number(given["second_number"]))},
    ),
    "track_parcel": Tool(
        ("track", "trace", "follow"),
        ("parcel", "package", "shipment"),
        ("Where a parcel is now.", "Follows a parcel by its tracking number."),
        ("tracking",),
        (
            "Where is parcel {tracking}?",
            "Track the parcel {tracking}.",
            "Where is the package with the number {tracking} now?",
            "Follow parcel {tracking}, please.",
        ),
        (
            Outcome(
                {"place": text_of(values.city), "days_left": whole(2, 9)},
                "Parcel {tracking} is in {place} and needs {days_left} more days.",
            ),
        ),
        missing=(("Where is my parcel now?", "tracking"),),
        follows=("And parcel {tracking}?",),
    ),
    "play_music": Tool(
        ("play", "start", "stream"),
        ("music", "song", "audio"),
        ("Plays music in a room.", "Starts music at home."),
        ("genre", "home_room"),
        (
            "Play {genre} in the {home_room}.",
            "I would like {genre} in the {home_room}.",
            "Some {genre} in the {home_room}, please.",
            "Start {genre} in the {home_room}.",
        ),
        (
            Outcome(
                {"status": "playing", "volume": whole(1, 10, step=10)},
                "The {home_room} now plays {genre} at volume {volume}.",
            ),
        ),
        missing=(("Play {genre}.", "home_room"), ("Play music in the {home_room}.", "genre")),
    ),
    "set_light": Tool(
        ("set", "dim", "change"),
        ("light", "lights", "lamp_level"),
        ("Sets the light in a room.", "Changes the brightness of a room."),
        ("home_room", "level"),
        (
            "Set the light in the {home_room} to {level} percent.",
            "Dim the {home_room} to {level} percent.",
            "Light in the {home_room} at {level} percent, please.",
            "Change the {home_room} light to {level} percent.",
        ),
        (Outcome({"status": "ok"}, "The light in the {home_room} is at {level} percent."),),
        missing=(("Dim the light in the {home_room}.", "level"), ("Set the light to {level} percent.", "home_room")),
    ),
    "set_heating": Tool(
        ("set", "change", "adjust"),
        ("heating", "thermostat", "room_temperature"),
        ("Sets the heating of a room.", "Changes the temperature at home."),
        ("home_room", "degrees"),
        (
            "Heat the {home_room} to {degrees} degrees.",
            "Set the heating in the {home_room} to {degrees} degrees.",
            "I want {degrees} degrees in the {home_room}.",
            "Make it {degrees} degrees in the {home_room}.",
        ),
        (Outcome({"now": whole(10, 25)}, "The {home_room} has {now} degrees and goes to {degrees}."),),
        missing=(("Turn up the heating in the {home_room}.", "degrees"),),
    ),
    "tenant_budget": Tool(
        ("get", "read", "show"),
        ("budget", "tenant_budget", "spending"),
        ("What a tenant has spent of its budget.", "Budget and spending of a tenant."),
        ("company",),
        (
            "How much has {company} spent?",
            "What is left of the budget of {company}?",
            "Show me the spending of tenant {company}.",
            "Is {company} within its budget?",
        ),
        (
            Outcome(
                {"spent": whole(10, 400), "budget": whole(5, 20, step=100)},
                "{company} has spent {spent} of {budget} euros.",
            ),
        ),
        missing=(("How much has the tenant spent?", "company"),),
        follows=("And {company}?", "What about {company}?"),
    ),
    "queue_length": Tool(
        ("get", "read", "count"),
        ("queue", "queue_length", "waiting_requests"),
        ("How many requests wait for a model.", "Length of a model's queue."),
        ("model",),
        (
            "How long is the queue of {model}?",
            "How many requests wait for the {model} model?",
            "Is there a queue at {model}?",
            "Count the requests that wait for {model}.",
        ),
        (
            Outcome(
                {"waiting": whole(2, 200), "running": whole(2, 64)},
                "{waiting} requests wait for {model} and {running} are running.",
            ),
        ),
        missing=(("How long is the queue?", "model"),),
        follows=("And of {model}?",),
    ),
    "distance": Tool(
        ("get", "measure", "compute"),
        ("distance", "road_distance", "kilometres"),
        ("Distance between two cities.", "How far two cities are apart."),
        ("origin", "destination"),
        (
            "How far is it from {origin} to {destination}?",
            "What is the distance from {origin} to {destination}?",
            "How many kilometres are there from {origin} to {destination}?",
        ),
        (Outcome({"kilometres": whole(60, 9000)}, "From {origin} to {destination} it is {kilometres} kilometres."),),
        missing=(("How far is it to {destination}?", "origin"),),
        follows=("And to {destination}?",),
    ),
    "city_time": Tool(
        ("get", "show", "tell"),
        ("time", "local_time", "city_time"),
        ("Local time in a city.", "What time it is in a place."),
        ("city",),
        (
            "What time is it in {city}?",
            "How late is it in {city}?",
            "What is the local time in {city}?",
            "Tell me the time in {city}.",
        ),
        (Outcome({"time": CLOCK}, "It is {time} in {city}."),),
        missing=(("What is the local time there?", "city"),),
        follows=("And in {city}?", "What about {city}?"),
    ),
    "add_to_list": Tool(
        ("add", "append", "put"),
        ("to_list", "list_item", "on_list"),
        ("Adds something to a list.", "Puts an item on a list."),
        ("thing", "list_name"),
        (
            "Put a {thing} on my {list_name} list.",
            "Add a {thing} to the {list_name} list.",
            "My {list_name} list needs a {thing}.",
            "Please note a {thing} on the {list_name} list.",
        ),
        (Outcome({"items": whole(2, 30)}, "The {list_name} list has {items} items now."),),
        missing=(("Put a {thing} on my list.", "list_name"),),
    ),
    "invoice_status": Tool(
        ("get", "check", "find"),
        ("invoice", "invoice_status", "bill"),
        ("Tells whether an invoice is paid.", "Status of an invoice."),
        ("invoice",),
        (
            "Is invoice {invoice} paid?",
            "What is the status of invoice {invoice}?",
            "Have we paid invoice {invoice}?",
            "Check invoice {invoice}.",
        ),
        (
            Outcome({"status": "paid", "on": DATE}, "Invoice {invoice} was paid on {on}."),
            Outcome({"status": "open", "amount": AMOUNT}, "Invoice {invoice} is open: {amount} euros."),
        ),
        missing=(("Is the invoice paid?", "invoice"),),
        follows=("And invoice {invoice}?", "And {invoice}?"),
    ),
}
