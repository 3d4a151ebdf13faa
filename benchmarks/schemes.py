"""Engines of one model against each other, decoding: output tokens per CPU-second and per second at given numbers of sequences.

    python benchmarks/schemes.py ENGINE ENGINE... [--sequences 1,64] [--threads 1] [--tokens 48] [--repeat 3] [--out FILE.json]

The first engine is the baseline of the ratios. Settings of one engine are appended to its path: `demo/engine-w8a16+weight_shadow` keeps a
16-bit copy of its weights, `demo/engine+deterministic` computes independently of the batch. All engines stand in memory together and take
turns, so that a machine whose speed drifts does not favour one. Prompts have 8 random tokens: what is timed is decoding.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from dspark.runtime.spec.openmp import bound_spinning

bound_spinning()  # before torch is imported

from dspark.runtime.engine import Engine  # noqa: E402
from dspark.runtime.jobs.tokenizer import load_codec  # noqa: E402
from dspark.runtime.spec.engine_config import EngineConfig  # noqa: E402
from dspark.runtime.spec.request import Request  # noqa: E402
from dspark.runtime.spec.sampling_params import SamplingParams  # noqa: E402

PROMPT_TOKENS = 8


def load(spec: str, config: EngineConfig) -> Engine:
    """`PATH[+SETTING...]` -> a loaded engine."""
    path, *settings = spec.split("+")
    return Engine.from_directory(path, replace(config, **dict.fromkeys(settings, True)), load_codec(Path(path)))


def decode(engine: Engine, num_sequences: int, num_tokens: int, seed: int) -> dict[str, float]:
    """Answer num_sequences prompts of num_tokens each at once; tokens per second and per CPU-second of this process."""
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for i in range(num_sequences):
        engine.add(Request(i, [rng.randrange(engine.vocab_size) for _ in range(PROMPT_TOKENS)], params))
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in engine.drain():
        pass
    total = num_sequences * num_tokens
    return {"tokens_per_s": total / (time.perf_counter() - wall), "tokens_per_cpu_s": total / (time.process_time() - cpu)}


def compare(engines: dict[str, Engine], counts: list[int], num_tokens: int, repeat: int) -> list[dict[str, Any]]:
    """One row per engine and number of sequences: medians, and the median of the ratios to the first engine, round by round."""
    rows = []
    for count in counts:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        for number in range(repeat + 1):
            for name, engine in engines.items():
                measured = decode(engine, count, num_tokens, number)
                if number:  # the first round warms up
                    rounds[name].append(measured)
        baseline = rounds[next(iter(engines))]
        for name, measured in rounds.items():
            row: dict[str, Any] = {"engine": name, "sequences": count}
            for key in ("tokens_per_s", "tokens_per_cpu_s"):
                row[key] = statistics.median(m[key] for m in measured)
                row[f"{key}_ratio"] = statistics.median(m[key] / b[key] for m, b in zip(measured, baseline, strict=True))
            rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+")
    parser.add_argument("--sequences", default="1,64")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    counts = [int(count) for count in args.sequences.split(",")]
    config = EngineConfig(threads=args.threads, max_num_seqs=max(counts), enable_prefix_caching=False)
    engines = {spec: load(spec, config) for spec in args.engines}
    rows = compare(engines, counts, args.tokens, args.repeat)
    print("| engine | sequences | tokens/s | ratio | tokens/CPU-s | ratio |\n|---|---|---|---|---|---|")
    for row in rows:
        name = Path(row["engine"]).name
        print(
            f"| {name} | {row['sequences']} | {row['tokens_per_s']:.1f} | {row['tokens_per_s_ratio']:.2f}x "
            f"| {row['tokens_per_cpu_s']:.1f} | {row['tokens_per_cpu_s_ratio']:.2f}x |"
        )
    if args.out:
        args.out.write_text(json.dumps({"threads": args.threads, "tokens": args.tokens, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
