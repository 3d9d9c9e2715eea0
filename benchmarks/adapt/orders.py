"""Writes examples of a JSON extraction task: orders in plain words, and the record that an order system takes.

The same seed gives the same bytes. Train and test sets share no text, because they draw from different seeds and equal
texts are left out. Run: python benchmarks/adapt/orders.py --count 500 --seed 1 --out examples.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

FIRST = "Ada Ben Cora Dan Eva Finn Gail Hugo Iris Jon Kira Leo Mina Ned Olga Paul Rosa Sam Tess Uwe Vera Will".split()
LAST = "Abel Brook Carr Dale Ellis Ford Grant Hale Ives Kent Lane Marsh North Owen Price Reed Stone Vale".split()
GOODS = "boxes pens lamps chairs desks folders cables screens mugs clocks printers bags keys labels shelves".split()
COLOURS = "red blue green black white grey brown yellow".split()
CITIES = "Oslo Leeds Turin Basel Ghent Lyon Porto Graz Cork Malmo Delft Bonn".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday".split()
INTRO = "Turn the order into JSON with customer, item, colour, count, city and day."
PATTERNS = (
    "{first} {last} in {city} wants {count} {colour} {item} by {day}.",
    "Please send {count} {colour} {item} to {city}. They are for {first} {last} and must arrive on {day}.",
    "On {day} we deliver to {city}: {count} {item}, {colour}, ordered by {first} {last}.",
    "This is {first} {last}. I need {count} {item} in {colour}, here in {city}, before {day} ends.",
    "New order for {day}. Customer: {first} {last}, {city}. Goods: {item}, {colour}, {count} pieces.",
)


def example(random: Random) -> dict[str, object]:
    count = random.randint(2, 99)
    values = {
        "first": random.choice(FIRST),
        "last": random.choice(LAST),
        "item": random.choice(GOODS),
        "colour": random.choice(COLOURS),
        "count": count,
        "city": random.choice(CITIES),
        "day": random.choice(DAYS),
    }
    record = {
        "customer": f"{values['first']} {values['last']}",
        "item": values["item"],
        "colour": values["colour"],
        "count": count,
        "city": values["city"],
        "day": values["day"],
    }
    prompt = f"{INTRO}\n{random.choice(PATTERNS).format(**values)}"
    return {"prompt": prompt, "completion": json.dumps(record)}


def examples(count: int, seed: int) -> list[dict[str, object]]:
    random = Random(f"orders {seed}")
    found: dict[str, dict[str, object]] = {}
    while len(found) < count:
        made = example(random)
        found.setdefault(str(made["prompt"]), made)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lines = (json.dumps(each) for each in examples(options.count, options.seed))
    options.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
