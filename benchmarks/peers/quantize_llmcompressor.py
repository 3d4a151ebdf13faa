"""llm-compressor, 4 bit: GPTQ (damping 0.01; without order, or its default: ordered by activation within static groups), AWQ (scales
without clipping), or round to nearest. It computes in bfloat16, the checkpoint's own dtype.

Its AWQ pins the cached inputs for a GPU, which raises where there is none; pinning changes no number, and is left out here.
"""

from __future__ import annotations

import argparse

import quantize_run


def recipe(args: argparse.Namespace) -> list:
    """The modifiers. Group quantization of every linear layer but the head."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    weights = QuantizationArgs(num_bits=4, type="int", symmetric=not args.asymmetric, strategy="group", group_size=args.group_size)
    groups = {"config_groups": {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}, "ignore": ["lm_head"]}
    if args.method == "gptq":
        return [GPTQModifier(**groups, actorder="static" if args.act_order else None)]
    return [*([AWQModifier()] if args.method == "awq" else []), QuantizationModifier(**groups)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["gptq", "awq", "rtn"], required=True)
    parser.add_argument("--act-order", action="store_true", help="actorder: static")
    parser.add_argument("--asymmetric", action="store_true", help="with zero points")
    run = quantize_run.setup(parser)

    import llmcompressor
    import torch
    import transformers
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache

    torch.set_num_threads(run.args.threads)
    IntermediatesCache.pin_memory = lambda self, batch_index, input_names=None: None
    model = transformers.AutoModelForCausalLM.from_pretrained(run.model, dtype="auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.model)
    run.loaded()
    data = {}
    if run.args.method != "rtn":
        rows = Dataset.from_dict({"input_ids": run.rows, "attention_mask": [[1] * len(row) for row in run.rows]})
        data = {"dataset": rows, "num_calibration_samples": len(rows), "max_seq_length": len(run.rows[0])}
        data["shuffle_calibration_samples"] = False
    oneshot(model=model, tokenizer=tokenizer, recipe=recipe(run.args), **data)
    run.quantized()
    model.save_pretrained(run.out, save_compressed=True)
    run.saved()
    run.add_tokenizer()
    settings = {"method": run.args.method, "act_order": run.args.act_order, "symmetric": not run.args.asymmetric}
    run.write("llmcompressor", llmcompressor.__version__, {**settings, "group_size": run.args.group_size})


if __name__ == "__main__":
    main()
