"""Write the benchmark workloads, from invented words and a fixed seed: python benchmarks/workloads/make.py OUT [--seed N] [NAME ...]

| file | lines | prompt tokens | output tokens | what it stresses |
|---|---|---|---|---|
| chat.jsonl | 128 | ~13,500 | ~8,500 (16-192 a line, skewed) | ordinary short requests: continuous batching |
| copy.jsonl | 32 | ~15,000 | ~3,500 | answers that repeat the input: n-gram speculation |
| prefix.jsonl | 256 | ~230,000 | 8,192 | one instruction of ~830 tokens shared by all: prefix sharing |
| long.jsonl | 24 | ~47,000 | ~900 | prefill, chunking |
| sampled.jsonl | 128 | ~13,500 | up to 8,192 | seeds, temperatures, stop at eos |

Token counts are SmolLM2's. All are greedy with `ignore_eos`, so that every engine produces the same number of tokens; `sampled` is the
exception. The same seed gives the same bytes on every machine; each file has a random stream of its own, so that asking for one file
does not change another.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

SYSTEM = "You are a careful assistant. Answer the question and show how you got there"
STEPS = '\nWork it out step by step and end with one line that starts with "Answer:".'

PEOPLE = [
    "Amara",
    "Bjorn",
    "Chiyo",
    "Dario",
    "Elif",
    "Farid",
    "Greta",
    "Hugo",
    "Ines",
    "Joao",
    "Kavya",
    "Lars",
    "Mirela",
    "Nuno",
    "Orla",
    "Petra",
]
PLACES = [
    "bakery",
    "boat yard",
    "book shop",
    "bus depot",
    "garden centre",
    "glass workshop",
    "harbour",
    "library",
    "orchard",
    "pottery",
    "school",
    "seed bank",
]
THINGS = [
    "apples",
    "bolts",
    "candles",
    "clay pots",
    "envelopes",
    "lanterns",
    "loaves",
    "maps",
    "notebooks",
    "paper kites",
    "seed trays",
    "tiles",
]
TIMES = [
    "on Monday",
    "before noon",
    "in the first hour",
    "by the end of the week",
    "after the rain",
    "during the fair",
    "in spring",
    "at night",
]
VERBS = ["packs", "sorts", "sells", "repairs", "paints", "counts", "delivers", "labels"]
KINDS = ["integers", "words", "dates", "file names", "temperatures", "coordinates", "prices", "log lines"]
CHECKS = [
    "is longer than its neighbours",
    "appears an odd number of times",
    "is divisible by {a}",
    "starts and ends with the same character",
    "lies between {a} and {b}",
    "is larger than the mean of the rest",
    "was seen fewer than {a} times",
    "has no repeated digit",
]
ACTIONS = [
    "returns the {n} largest of them",
    "removes every one that repeats",
    "groups them by length",
    "merges neighbours that differ by less than {a}",
    "rotates them by {a} places",
    "counts those whose index is a multiple of {n}",
    "splits them into runs of at most {n}",
    "interleaves its two halves",
]
STRUCTURES = ["a list", "a tuple", "a queue", "a nested list", "a dictionary of lists", "a matrix", "a text file", "a generator"]
QUANTITIES = [
    "the area",
    "the perimeter",
    "the largest whole number below the volume",
    "the length of the diagonal",
    "the sum of all the sides",
]


def word_problem(rng: random.Random) -> str:
    """A few invented sentences with numbers, and a question about them."""
    person, other = rng.sample(PEOPLE, 2)
    thing, second = rng.sample(THINGS, 2)
    a, b, c, d = rng.randint(3, 60), rng.randint(2, 12), rng.randint(2, 25), rng.randint(2, 9)
    openings = [
        f"{person} works at the {rng.choice(PLACES)} and {rng.choice(VERBS)} {a} {thing} an hour.",
        f"The {rng.choice(PLACES)} keeps {a * b} {thing} on {b} shelves, the same number on each.",
        f"{person} and {other} bring {a + c} {thing} to the {rng.choice(PLACES)}; {person} brings {d} times as many as {other} plus {c}.",
    ]
    middles = [
        f"{rng.choice(TIMES).capitalize()} {other} takes {c} of them away and puts {b} {second} in their place.",
        f"A dozen {second} cost ${d}.{rng.randint(10, 95)} and weigh as much as {b} {thing}.",
        f"{c} percent of the {thing} turn out to be cracked, and {person} has to start those again {rng.choice(TIMES)}.",
        f"A box holds {b} {thing} or {b + d} {second}, and {other} has {c} boxes.",
        f"{rng.choice(TIMES).capitalize()} the rate drops by {d}, but {other} helps for {b} hours.",
    ]
    questions = [
        f"How many {thing} are left after {b} hours?",
        f"How much money does {person} need to replace all of the {second}?",
        f"How many boxes stay empty when {other} has finished?",
        f"How much longer would it take {person} without help?",
    ]
    return " ".join([rng.choice(openings), *rng.sample(middles, rng.randint(1, 3)), rng.choice(questions)])


def code_ask(rng: random.Random) -> str:
    """One sentence that asks for a function."""
    checks = rng.random() < 0.5
    rule = rng.choice(CHECKS if checks else ACTIONS).format(a=rng.randint(2, 20), b=rng.randint(21, 90), n=rng.randint(2, 9))
    kind, structure = rng.choice(KINDS), rng.choice(STRUCTURES)
    if checks:
        return f"Write a Python function that finds every item of {structure} of {kind} that {rule}."
    return f"Write a Python function that takes {structure} of {kind} and {rule}."


def code_stub(rng: random.Random) -> str:
    """A function head with a docstring and examples, to be completed."""
    kind, a, n = rng.choice(KINDS).replace(" ", "_"), rng.randint(2, 20), rng.randint(2, 6)
    values = [rng.randint(-40, 90) for _ in range(n + 4)]
    body = code_ask(rng).removeprefix("Write a Python function that ").rstrip(".").capitalize()
    examples = "\n".join(
        f"    >>> pick_{kind}({values[i : i + 4]}, {a + i})\n    {sorted(values[i : i + 4])[:2]}" for i in range(rng.randint(2, 4))
    )
    return (
        f"from collections import defaultdict\n\n\ndef pick_{kind}(items: list[int], limit: int = {a}) -> list[int]:\n"
        f'    """{body}.\n\n    Items above the limit are skipped; the order of the rest is kept.\n\n{examples}\n    """\n'
    )


def geometry(rng: random.Random) -> str:
    """A short question with symbols, of the kind that school books ask."""
    a, b, c = rng.randint(2, 15), rng.randint(2, 15), rng.randint(3, 40)
    return rng.choice(
        [
            f"A rectangle has sides ${a}x + {b}$ and ${c} - x$. What is {rng.choice(QUANTITIES)} when $x = {rng.randint(1, 9)}$?",
            f"What is the largest value of ${a}(x + {b})({c} - x)$ over all real numbers $x$?",
            f"How many whole numbers from 1 to {a * c} are divisible by {a} and not by {b + 1}?",
            f"The sequence $u_1 = {a}$, $u_{{n+1}} = {b} u_n - {c}$ is given. What is $u_{{{rng.randint(4, 7)}}}$?",
            f"A cone of height {c} and radius {a} is cut at height {b}. What share of its volume lies above the cut, as a fraction?",
        ]
    )


def distinct(make: Callable[[random.Random], str], rng: random.Random, count: int) -> list[str]:
    """`count` different texts."""
    texts: dict[str, None] = {}
    while len(texts) < count:
        texts[make(rng)] = None
    return list(texts)


def line(custom_id: str, user: str, max_tokens: int, system: str = SYSTEM, **more) -> dict:
    """One input line in the flat shape."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"custom_id": custom_id, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


def chat(rng: random.Random) -> list[dict]:
    """Short requests of four kinds; output lengths are log-normal, 16 to 192, so that most are short and a few long."""
    kinds: list[tuple[str, Callable[[random.Random], str], str, int]] = [
        ("problem", word_problem, STEPS, 52),
        ("code", code_ask, "", 36),
        ("stub", code_stub, "", 16),
        ("geometry", geometry, STEPS, 24),
    ]
    asks = [(name, ask + tail) for name, make, tail, count in kinds for ask in distinct(make, rng, count)]
    rng.shuffle(asks)
    sizes = [max(16, min(192, round(math.exp(rng.gauss(4.05, 0.75))))) for _ in asks]
    return [line(f"{name}-{i:03d}", ask, size) for i, ((name, ask), size) in enumerate(zip(asks, sizes))]


def copy(rng: random.Random) -> list[dict]:
    """Lists of some 500 tokens to be repeated word for word."""
    orders = [
        "Repeat this list word for word:",
        "Copy the list below exactly and keep the numbers:",
        "Write the list again without any change:",
        "Quote every item of this list:",
    ]
    lines = []
    for i in range(32):
        items = [word_problem(rng) for _ in range(8)] if i % 2 else [code_ask(rng) for _ in range(15)]
        text = "\n\n".join(f"{k + 1}. {item}" for k, item in enumerate(items))[:1850]
        lines.append(line(f"copy-{i:02d}", f"{orders[i % len(orders)]}\n\n{text}", rng.choice([48, 64, 96, 128, 160, 192])))
    return lines


def prefix(rng: random.Random) -> list[dict]:
    """One long instruction with examples, shared by all lines; many short questions."""
    shots = "\n\n".join(f"Example {k + 1}: {word_problem(rng)}{STEPS}" for k in range(7))
    system = f"{SYSTEM}. Name the topic of each problem, then answer in one short sentence. Problems of this kind will come.\n\n{shots}"
    return [line(f"prefix-{i:03d}", ask, 32, system) for i, ask in enumerate(distinct(word_problem, rng, 256))]


def long(rng: random.Random) -> list[dict]:
    """Prompts near 2,000 tokens, few tokens out."""
    head = "Which of these problems is the hardest, and why?\n\n"
    return [
        line(f"long-{i:02d}", head + "\n\n".join(word_problem(rng) + STEPS for _ in range(19)), rng.choice([16, 32, 64])) for i in range(24)
    ]


def sampled(rng: random.Random) -> list[dict]:
    """Seeded sampling at several temperatures, which stops at eos."""
    asks = [word_problem(rng) + STEPS if i % 3 else code_ask(rng) for i in range(128)]
    return [
        {**line(f"s-{i:03d}", ask, 64), "temperature": rng.choice([0.3, 0.7, 1.0]), "top_p": 0.9, "seed": i, "ignore_eos": False}
        for i, ask in enumerate(asks)
    ]


WORKLOADS: dict[str, Callable[[random.Random], list[dict]]] = {
    "chat": chat,
    "copy": copy,
    "prefix": prefix,
    "long": long,
    "sampled": sampled,
}


def write(name: str, out: Path, seed: int = 1) -> Path:
    """Write one workload into the directory `out` and return its path."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.jsonl"
    rows = WORKLOADS[name](random.Random(f"{seed}/{name}"))
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", type=Path, help="directory for the files")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones (default: all of {' '.join(WORKLOADS)})")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    unknown = set(args.names) - set(WORKLOADS)
    if unknown:
        parser.error(f"no such workload: {' '.join(sorted(unknown))} (there are: {' '.join(WORKLOADS)})")
    for name in args.names or WORKLOADS:
        print(write(name, args.out, args.seed))


if __name__ == "__main__":
    main()
