"""Print the first answers of a job beside their questions: python samples/show_answers.py IN OUT [--first N] [--metrics FILE.json]"""

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

WIDTH = 100


def question(line: dict[str, Any]) -> str:
    """The text of a request, in either shape."""
    body = line.get("body", line)
    if "messages" in body:
        return str(body["messages"][-1]["content"])
    return str(body["prompt"])


def answer(record: dict[str, Any]) -> str:
    """The text of a result, in either shape; an error record's message."""
    if record.get("error"):
        return f"[{record['error']['code']}] {record['error']['message']}"
    if "response" not in record:
        return str(record["text"])
    body = record["response"]["body"]
    if "error" in body:
        return f"[{body['error']['code']}] {body['error']['message']}"
    choice = body["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def summary(metrics: dict[str, Any]) -> str:
    """A run's metrics in a few words. The file is the last run's: one that had nothing to do repeats the job's."""
    lines, tokens, seconds = metrics["lines"], metrics["tokens"], metrics["time"]["generate_s"]
    rate = f", {tokens['output'] / seconds:.0f} tokens/s" if seconds else ""
    return (
        f"{lines['total']} lines: {lines['ok']} answered, {lines['failed']} errors; "
        f"{tokens['prompt']} prompt tokens, {tokens['output']} new tokens in {seconds:.1f} s{rate}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--first", type=int, default=3)
    parser.add_argument("--metrics", type=Path)
    args = parser.parse_args()
    requests = [json.loads(line) for line in args.input.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    records = [json.loads(line) for line in args.output.read_text(encoding="utf-8").splitlines()]
    for request, record in list(zip(requests, records, strict=True))[: args.first]:
        print(f"\n{record['custom_id']}")
        for label, text in (("  asked:    ", question(request)), ("  answered: ", answer(record).strip())):
            print(textwrap.fill(text, WIDTH, initial_indent=label, subsequent_indent=" " * len(label)))
    if args.metrics is not None:
        print(f"\n{summary(json.loads(args.metrics.read_text(encoding='utf-8')))}")


if __name__ == "__main__":
    main()
