"""transformers `generate` in static batches: bf16, left-padded, lines sorted by how much they write and read, the surplus trimmed."""

from __future__ import annotations

import argparse

import measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32, help="lines in a batch")
    run = measure.setup(parser)

    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(run.args.threads)
    tokenizer = AutoTokenizer.from_pretrained(run.args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(run.args.model, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None  # ignore_eos
    run.ready()

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        with torch.inference_mode():
            full = model.generate(**batch, do_sample=False, max_new_tokens=new_tokens, pad_token_id=tokenizer.pad_token_id)
        return full[:, batch["input_ids"].shape[1] :].tolist()

    def encode(line: dict) -> list[int]:
        return tokenizer.apply_chat_template(line["messages"], add_generation_prompt=True)["input_ids"]

    generate([encode(run.lines[0])], 1)
    run.first_token()

    run.start()
    prompts = [encode(line) for line in run.lines]
    limits = [line["max_tokens"] for line in run.lines]
    order = sorted(range(len(prompts)), key=lambda i: (limits[i], len(prompts[i])))
    answers: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), run.args.batch):
        members = order[start : start + run.args.batch]
        for i, tokens in zip(members, generate([prompts[i] for i in members], max(limits[i] for i in members))):
            answers[i] = tokens[: limits[i]]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    run.stop()
    run.write("transformers", transformers.__version__, sum(map(len, prompts)), sum(map(len, answers)), texts)


if __name__ == "__main__":
    main()
