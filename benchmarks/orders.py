"""Makes the data of README's tuned job: orders in words, and the lines that they become.

python benchmarks/orders.py [--folder configs/post_train/orders]

chats.jsonl has the orders to train on, held_out.jsonl those to be asked. A line has each number in
digits, goods in the singular with their colour, the city with its country, and the day: all of it
is to be learned from the chats.
"""

import argparse
import json
import pathlib
import random

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHATS, HELD_OUT = 240, 40
split_words = str.split
CITIES = split_words(
    "Leeds-GB Malaga-ES Basel-CH Ghent-BE Riga-LV Porto-PT Lyon-FR Bremen-DE Turin-IT Graz-AT "
    "Cork-IE Tartu-EE Brno-CZ Aarhus-DK Bergen-NO Malmo-SE Oulu-FI Utrecht-NL Gdansk-PL Patras-GR"
)
GOODS = split_words(
    "knife-knives box-boxes shelf-shelves desk-desks helmet-helmets basket-baskets bucket-buckets "
    "drum-drums brush-brushes glass-glasses ladder-ladders bench-benches chair-chairs lamp-lamps "
    "mug-mugs battery-batteries"
)
COLOURS = split_words("green blue red white brown black grey yellow")
DAYS = split_words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
ONES = split_words(
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
TENS = split_words("twenty thirty forty fifty sixty seventy eighty ninety")
ORDERS = (
    "Please send {goods} to {city} by {day}.",
    "We need {goods} in {city}, no later than {day}.",
    "{day} is the last day for {goods}, to go to {city}.",
    "Could you get {goods} over to {city} on {day}?",
)


def in_words(number: int) -> str:
    """Writes a number below 100 in words; 12 and 24 are dozens."""
    if number in (12, 24):
        return {12: "a dozen", 24: "two dozen"}[number]
    if number < 20:
        return ONES[number - 1]
    ones = f"-{ONES[number % 10 - 1]}" if number % 10 else ""
    return f"{TENS[number // 10 - 2]}{ones}"


def make_part(random: random.Random) -> tuple[str, str]:
    """Draws some goods, and returns them as an order names them and as a line does."""
    number = random.choice([12, 24, *range(2, 100)])
    one, many = random.choice(GOODS).split("-")
    colour = random.choice([*COLOURS, ""])
    words = " ".join(filter(None, (in_words(number), colour, many)))
    return words, f"{number} {one}/{colour or 'any'}"


def make_order(random: random.Random) -> tuple[str, str]:
    words, lines = zip(*(make_part(random) for _ in range(random.choice([1, 2]))), strict=True)
    city, country = random.choice(CITIES).split("-")
    day = random.choice(DAYS)
    text = random.choice(ORDERS).format(goods=" and ".join(words), city=city, day=day)
    return text, f"{' + '.join(lines)} > {city} {country} {day[:3]}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = ROOT / "configs" / "post_train" / "orders"
    options.add_argument("--folder", type=pathlib.Path, default=default)
    folder, chosen, orders = options.parse_args().folder, random.Random(7), {}
    while len(orders) < CHATS + HELD_OUT:
        orders.update([make_order(chosen)])
    pairs = list(orders.items())
    chats = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in pairs[:CHATS]
    ]
    held_out = [{"order": order, "line": line} for order, line in pairs[CHATS:]]
    for name, records in (("chats", chats), ("held_out", held_out)):
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
