"""OpenVINO GenAI's continuous batching: weights int8 (per channel, its own export) or bf16, prefix caching on, else its defaults.

The prompts go in as token ids: OpenVINO's own tokenizer splits white space before a digit otherwise than SmolLM2's.

It reads OpenVINO's own format. `--export-only` makes that once from the Hugging Face directory, beside it (`MODEL-openvino-int8`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import measure


def exported(model: Path, weights: str) -> Path:
    """Where the OpenVINO form of a Hugging Face directory lies; bf16 runs on 16 bit weights that are cast at load."""
    return model.with_name(f"{model.name}-openvino-{weights}")


def export(model: Path, weights: str) -> None:
    """Run optimum-intel's exporter, which stands in the same environment; nothing to do when the result is there."""
    target = exported(model, weights)
    if (target / "openvino_model.xml").exists():
        return
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(model)]
    command += ["--task", "text-generation-with-past", "--weight-format", "int8" if weights == "int8" else "fp16", str(target)]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", choices=["int8", "bf16"], default="int8")
    parser.add_argument("--kv-gib", type=int, default=1, help="size of the KV pool, GiB")
    parser.add_argument("--batched-tokens", type=int, default=256, help="tokens of a step (256 is OpenVINO's default)")
    if "--export-only" in sys.argv:
        parser.add_argument("--export-only", action="store_true", help="make OpenVINO's form of the model and stop")
        parser.add_argument("--model", type=Path, required=True)
        args = parser.parse_args()
        return export(args.model, args.weights)
    run = measure.setup(parser)
    ir = exported(run.args.model, run.args.weights)
    if not (ir / "openvino_model.xml").exists():
        raise SystemExit(f"{ir} is not there: run this once with --export-only --model {run.args.model} --weights {run.args.weights}")

    import numpy as np
    import openvino
    import openvino_genai as ov
    from tokenizers import Tokenizer

    scheduler = ov.SchedulerConfig()
    scheduler.cache_size = run.args.kv_gib
    scheduler.max_num_batched_tokens = run.args.batched_tokens
    scheduler.enable_prefix_caching = True
    properties: dict = {"INFERENCE_NUM_THREADS": run.args.threads}
    if run.args.weights == "bf16":
        properties["INFERENCE_PRECISION_HINT"] = "bf16"
    pipeline = ov.ContinuousBatchingPipeline(str(ir), scheduler, "CPU", properties)
    template = pipeline.get_tokenizer()
    tokenizer = Tokenizer.from_file(str(run.args.model / "tokenizer.json"))
    run.ready()

    def greedy(limit: int) -> ov.GenerationConfig:
        return ov.GenerationConfig(max_new_tokens=limit, ignore_eos=True, do_sample=False, apply_chat_template=False)

    def generate(lines: list[dict], limits: list[int]) -> tuple[int, list]:
        """Prompt tokens in all, and the answers as token ids."""
        prompts = [template.apply_chat_template(line["messages"], add_generation_prompt=True) for line in lines]
        ids = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
        tensors = [openvino.Tensor(np.array([row], dtype=np.int64)) for row in ids]
        answers = pipeline.generate(tensors, [greedy(limit) for limit in limits])
        return sum(map(len, ids)), [answer.m_generation_ids[0] for answer in answers]

    generate(run.lines[:1], [1])
    run.first_token()

    run.start()
    prompt_tokens, answers = generate(run.lines, [line["max_tokens"] for line in run.lines])
    texts = tokenizer.decode_batch(answers)
    run.stop()
    run.write(f"openvino-{run.args.weights}", ov.get_version(), prompt_tokens, sum(map(len, answers)), texts)


if __name__ == "__main__":
    main()
