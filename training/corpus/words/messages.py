"""The messages of the extraction task: kinds of records, and the sentences that carry their fields.

A message is one sentence of each group of its kind, in order; an optional group may be left out. A slot is the name of
a field; a sentence may also settle a field by being there at all. Owns the sentences. How values are drawn and which
names a field has is in records.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sentence:
    text: str
    settles: tuple[tuple[str, bool], ...] = ()  # fields that it decides without a slot


@dataclass(frozen=True)
class Group:
    sentences: tuple[Sentence, ...]
    optional: bool = True


@dataclass(frozen=True)
class Kind:
    name: str
    groups: tuple[Group, ...]


def must(*texts: str) -> Group:
    return Group(tuple(Sentence(text) for text in texts), optional=False)


def may(*texts: str) -> Group:
    return Group(tuple(Sentence(text) for text in texts))


def either(field: str, yes: tuple[str, ...], no: tuple[str, ...]) -> Group:
    sentences = [Sentence(text, ((field, True),)) for text in yes] + [Sentence(text, ((field, False),)) for text in no]
    return Group(tuple(sentences))


KINDS = (
    Kind(
        "order",
        (
            must(
                "I would like to order {quantity} {item}.",
                "Please send us {quantity} {colour} {item}.",
                "We need {quantity} {item} in {colour}.",
                "Our order: {quantity} {item}.",
                "Could you send {quantity} {item}, please?",
            ),
            may(
                "Please deliver to {address} in {city}.",
                "The address is {address}.",
                "Deliver to our office in {city}, please.",
                "They go to {address}, {city}.",
            ),
            may("We need them by {delivery_date}.", "Delivery on {delivery_date} would be good."),
            may("The price of {price} {currency} is fine.", "As agreed we pay {price} {currency}."),
            may("Regards, {customer}", "{customer}, {company}", "Best wishes, {customer}"),
        ),
    ),
    Kind(
        "table",
        (
            must(
                "I would like to book a table for {guests} on {date} at {time}.",
                "A table for {guests} people on {date}, please.",
                "Do you have a table for {guests} on {date} at {time}?",
                "We are {guests} people and would like to come on {date} at {time}.",
            ),
            either(
                "outdoors",
                ("Outside, if possible.", "We would like to sit in the garden."),
                ("Inside, please.", "We would rather sit indoors."),
            ),
            may("The name is {name}.", "Please book it for {name}.", "It is for {name}."),
            may("My number is {phone}.", "You can reach me at {phone}."),
        ),
    ),
    Kind(
        "hotel",
        (
            must(
                "I need a {room_type} room for {nights} nights from {arrival}.",
                "Please book a {room_type} room from {arrival} for {nights} nights.",
                "Do you have a {room_type} room on {arrival}?",
                "We arrive on {arrival} and stay for {nights} nights.",
            ),
            either(
                "breakfast",
                ("With breakfast, please.", "We would like breakfast."),
                ("Without breakfast.", "We do not need breakfast."),
            ),
            may("At most {price} {currency} a night.", "We can pay {price} {currency} a night."),
            may("The guest is {guest}.", "It is for {guest}.", "Kind regards, {guest}"),
            may("My e-mail is {email}.", "Please confirm to {email}."),
        ),
    ),
    Kind(
        "contact",
        (
            must(
                "My name is {name} and I work for {company}.",
                "I am {name}, {role} at {company}.",
                "This is {name} from {company}.",
                "Please add {name} to the list, {role} in {city}.",
                "New contact: {name}, {company}.",
            ),
            may("You can call {phone}.", "The phone number is {phone}.", "Phone: {phone}."),
            may("The e-mail address is {email}.", "Write to {email}.", "E-mail: {email}."),
            may("The office is at {address}.", "The office is at {address} in {city}."),
        ),
    ),
    Kind(
        "meeting",
        (
            must(
                "Let us meet on {date} at {time} to talk about {topic}.",
                "Could we talk about {topic} on {date}?",
                "Meeting about {topic}: {date}, {time}.",
                "I would like to discuss {topic} with you on {date} at {time}.",
            ),
            may("We meet in room {room}.", "Room {room} is booked.", "I have booked {room}."),
            may("It takes {minutes} minutes.", "Please plan {minutes} minutes.", "{minutes} minutes should be enough."),
            may("{attendees} will be there too.", "I have also asked {attendees}.", "With us: {attendees}."),
            may("See you there, {organiser}", "Regards, {organiser}"),
        ),
    ),
    Kind(
        "delivery note",
        (
            must(
                "Order {order} left the depot on {date}.",
                "We have sent order {order} today.",
                "Delivery note for order {order}, {date}.",
                "Your order {order} is on its way.",
            ),
            may("It is {boxes} boxes.", "There are {boxes} boxes.", "{boxes} boxes in all."),
            may("The weight is {weight_kg} kg.", "Together they weigh {weight_kg} kg.", "Weight: {weight_kg} kg."),
            may("Recipient: {recipient}, {city}.", "They go to {recipient} at {address}.", "For {recipient}."),
            either(
                "signature",
                ("Please sign for it.", "A signature is needed."),
                ("No signature is needed.", "Nobody has to sign for it."),
            ),
        ),
    ),
    Kind(
        "expense",
        (
            must(
                "I paid {amount} {currency} for {expense} on {date}.",
                "Please refund {amount} {currency} for {expense}.",
                "Paid on {date}: {expense}, {amount} {currency}.",
                "On {date} I spent {amount} {currency} on {expense}.",
            ),
            may("It was for the {project} project.", "Please book it on {project}.", "Project: {project}."),
            may("It was in {city}.", "I was in {city} then."),
            either(
                "receipt",
                ("The receipt is attached.", "I have the receipt."),
                ("I have lost the receipt.", "There is no receipt."),
            ),
            may("Regards, {employee}", "Thanks, {employee}", "This is from {employee}."),
        ),
    ),
    Kind(
        "invoice",
        (
            must(
                "Invoice {invoice} from {company} is {amount} {currency}.",
                "{company} has sent invoice {invoice}.",
                "Here is invoice {invoice} of {amount} {currency}.",
                "We have received invoice {invoice} from {company} for {amount} {currency}.",
            ),
            may("It is due on {due_date}.", "Please pay it by {due_date}.", "Due date: {due_date}."),
            may("It was written on {date}.", "Its date is {date}."),
            either(
                "paid", ("It has been paid.", "It is already paid."), ("It has not been paid yet.", "It is still open.")
            ),
            may("Please ask {contact} if anything is unclear.", "The contact is {contact}."),
        ),
    ),
    Kind(
        "leave",
        (
            must(
                "I would like to take {days} days off from {start_date}.",
                "I am away from {start_date} to {end_date}.",
                "Please note my leave from {start_date} to {end_date}.",
                "May I take leave from {start_date} to {end_date}?",
            ),
            may("The reason is {leave_reason}.", "It is for {leave_reason}.", "Reason: {leave_reason}."),
            may("{deputy} stands in for me.", "Please ask {deputy} while I am away.", "My deputy is {deputy}."),
            may("Thanks, {employee}", "Best regards, {employee}"),
        ),
    ),
    Kind(
        "application",
        (
            must(
                "My name is {name} and I apply for the post of {role}.",
                "I am {name} and would like to work for you as {role}.",
                "My name is {name}, and I would like the post of {role}.",
                "Here is my application as {role}.",
            ),
            may("I have {years} years of experience.", "I have worked in this field for {years} years."),
            may("I live in {city}.", "At present I live in {city}."),
            may("I could start on {start_date}.", "My first day could be {start_date}."),
            may("You can reach me at {email}.", "My e-mail is {email}.", "My phone number is {phone}."),
        ),
    ),
    Kind(
        "incident",
        (
            must(
                "The {service} service was down from {start_time} to {end_time}.",
                "At {start_time} the {service} service failed.",
                "On {date} the {service} service stopped at {start_time}.",
                "Incident on {date}: the {service} service failed.",
            ),
            may("The cause was {cause}.", "It was caused by {cause}.", "Cause: {cause}."),
            may("{users} users were affected.", "It hit {users} users.", "Affected users: {users}."),
            may("{owner} fixed it.", "{owner} looked into it.", "On call was {owner}."),
        ),
    ),
    Kind(
        "flight",
        (
            must(
                "Please book a flight from {from_city} to {to_city} on {date}.",
                "I fly from {from_city} to {to_city} on {date} at {time}.",
                "Flight {flight} to {to_city} leaves at {time}.",
                "I need a flight to {to_city} on {date}.",
            ),
            may("The passenger is {passenger}.", "It is for {passenger}.", "Passenger: {passenger}."),
            may("I have {bags} bags.", "{bags} bags, please.", "Luggage: {bags} bags."),
            may("Seat {seat}, please.", "My seat is {seat}.", "I would like seat {seat}."),
        ),
    ),
    Kind(
        "registration",
        (
            must(
                "Please register {name} for the {event}.",
                "I would like {tickets} tickets for the {event} on {date}.",
                "{name} would like to come to the {event}.",
                "Please put me down for the {event} on {date}.",
            ),
            may("{tickets} tickets, please.", "We need {tickets} tickets."),
            may("The meal should be {meal}.", "Please note for the meal: {meal}.", "Food: {meal}."),
            may("My e-mail is {email}.", "Send the ticket to {email}."),
            may("I come from {company}.", "We are from {company}.", "Company: {company}."),
        ),
    ),
    Kind(
        "repair",
        (
            must(
                "The {appliance} {problem}.",
                "We noticed on {date} that our {appliance} {problem}.",
                "Please send somebody: the {appliance} {problem}.",
                "We have a problem: our {appliance} {problem}.",
            ),
            may("It is in room {room}.", "The address is {address}.", "We are at {address} in {city}."),
            may("You can come on {visit}.", "{visit} would be a good day.", "Could you come on {visit}?"),
            either(
                "urgent",
                ("It is urgent.", "This is urgent, please hurry."),
                ("It is not urgent.", "There is no hurry."),
            ),
            may("Please call {phone}.", "My number is {phone}."),
            may("Regards, {name}", "Thanks, {name}"),
        ),
    ),
    Kind(
        "subscription",
        (
            must(
                "We would like the {plan} plan for {seats} seats.",
                "Please move us to the {plan} plan from {start_date}.",
                "{company} would like {seats} seats of the {plan} plan.",
                "Please cancel our {plan} plan on {end_date}.",
            ),
            may("We agreed on {price} {currency} a month.", "It should cost {price} {currency} a month."),
            may("Our account is {account}.", "The account number is {account}.", "Account: {account}."),
            may("Send the invoice to {email}.", "The invoices go to {email}."),
            may("Regards, {name}", "Best wishes, {name}"),
        ),
    ),
    Kind(
        "return",
        (
            must(
                "I am sending back the {thing} from order {order}.",
                "I would like to return the {colour} {thing} from order {order}.",
                "The {thing} I bought on {date} goes back to you.",
                "Please take back the {thing}, order {order}.",
            ),
            may("The reason: it {return_reason}.", "It {return_reason}.", "Sadly it {return_reason}."),
            may("It cost {price} {currency}.", "I paid {price} {currency} for it."),
            either(
                "refund",
                ("Please send the money back.", "I would like a refund."),
                ("I would like a new one, no refund.", "Please send another one instead of a refund."),
            ),
            may("Regards, {customer}", "Thank you, {customer}"),
        ),
    ),
    Kind(
        "car",
        (
            must(
                "I need a {car} in {city} for {days} days.",
                "Please reserve a {car} from {start_date} to {end_date}.",
                "Do you have a {car} in {city} on {start_date}?",
                "We would like to rent a {car} for {days} days from {start_date}.",
            ),
            either(
                "insurance",
                ("With full insurance, please.", "We would like the insurance."),
                ("Without extra insurance.", "We need no insurance."),
            ),
            may("The driver is {driver}.", "{driver} will drive.", "Driver: {driver}."),
            may("The pick-up is at {time}.", "We come at {time}."),
            may("It may cost {price} {currency} a day.", "The offer was {price} {currency} a day."),
        ),
    ),
    Kind(
        "flat",
        (
            must(
                "Flat in {city} with {rooms} rooms, {size} square metres.",
                "A flat of {size} square metres at {address} is free.",
                "For rent: {rooms} rooms in {city}.",
                "We let a flat with {rooms} rooms at {address} in {city}.",
            ),
            may("The rent is {rent} {currency}.", "It costs {rent} {currency} a month.", "Rent: {rent} {currency}."),
            may("It is free from {available}.", "You can move in on {available}."),
            either("pets", ("Pets are welcome.", "You may bring pets."), ("No pets, please.", "Pets are not allowed.")),
            may("Please call {phone}.", "Contact: {contact}.", "Ask for {contact}."),
        ),
    ),
    Kind(
        "appointment",
        (
            must(
                "I would like to see Dr {doctor} on {date} at {time}.",
                "Can I come on {date} at {time}?",
                "Please give me an appointment with Dr {doctor} on {date}.",
                "I need an appointment on {date}.",
            ),
            may("It is about {complaint}.", "The reason is {complaint}.", "Reason: {complaint}."),
            either(
                "first_visit",
                ("It is my first visit.", "I have not been to you before."),
                ("I have been to you before.", "It is not my first visit."),
            ),
            may("My name is {patient}.", "It is for {patient}.", "Regards, {patient}"),
            may("My number is {phone}.", "Please call me at {phone}."),
        ),
    ),
)

OPENINGS = ("Hello,", "Hi,", "Good morning,", "Dear team,", "Hi there,", "Good afternoon,", "Dear colleagues,")
FIRST_ASIDES = (
    "I hope you are well.",
    "Thank you for your quick answer.",
    "Sorry for the late message.",
    "It was nice to talk to you.",
    "We spoke about it last week.",
)
LATER_ASIDES = (
    "Please confirm.",
    "Let me know if that works.",
    "Thanks in advance.",
    "Please tell me if anything is unclear.",
)
