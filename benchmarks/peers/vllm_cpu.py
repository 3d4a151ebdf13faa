"""vLLM's CPU build: bf16, eager, continuous batching, prefix caching on, the engine inside this process.

As vLLM's installation notes for CPUs advise, Intel's OpenMP and tcmalloc are preloaded where they are found.
"""

from __future__ import annotations

import argparse
import ctypes.util
import os
import sys
from pathlib import Path

import measure


def preload() -> None:
    """Start this program again with the recommended libraries in front, if that has not been done."""
    if "LD_PRELOAD" in os.environ:
        return
    openmp = Path(sys.prefix, "lib", "libiomp5.so")
    malloc = ctypes.util.find_library("tcmalloc_minimal")
    found = [str(openmp)] * openmp.exists() + [malloc] * bool(malloc)
    if found:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": ":".join(found)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv-gib", type=int, default=1, help="size of the KV pool, GiB (1 holds 45,000 tokens of SmolLM2-135M)")
    parser.add_argument("--max-num-seqs", type=int, default=None, help="rows of a step (default: vLLM's)")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile the model (inductor) instead of running it eagerly")
    run = measure.setup(parser)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE=str(run.args.kv_gib),
        VLLM_CPU_OMP_THREADS_BIND=cores,
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
    )

    import vllm

    more = {} if run.args.max_num_seqs is None else {"max_num_seqs": run.args.max_num_seqs}
    llm = vllm.LLM(
        model=str(run.args.model),
        dtype="bfloat16",
        enforce_eager=not run.args.compile,
        enable_prefix_caching=True,
        max_model_len=4096,
        **more,
    )
    run.ready()

    def chat(lines: list[dict], limits: list[int]) -> list:
        greedy = [vllm.SamplingParams(temperature=0, ignore_eos=True, max_tokens=limit) for limit in limits]
        return llm.chat([line["messages"] for line in lines], greedy, use_tqdm=False)

    chat(run.lines[:1], [1])
    run.first_token()

    run.start()
    answers = chat(run.lines, [line["max_tokens"] for line in run.lines])
    run.stop()
    run.write(
        "vllm",
        vllm.__version__,
        sum(len(answer.prompt_token_ids) for answer in answers),
        sum(len(answer.outputs[0].token_ids) for answer in answers),
        [answer.outputs[0].text for answer in answers],
    )


if __name__ == "__main__":
    preload()
    main()
