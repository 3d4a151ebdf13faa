"""AutoAWQ, 4 bit with zero points (its GEMM format has no other): scale and clip search over the given rows.

On a CPU its snapshot of the weights before the search, `v.cpu()`, is no copy but the weights themselves, which the search then multiplies
in place. `--as-it-is` leaves that so; otherwise the snapshot is a copy, as it is on the GPUs that AutoAWQ was written for. bfloat16 is the
checkpoint's own dtype, and several times faster than float16 on a CPU that multiplies it.
"""

from __future__ import annotations

import argparse

import quantize_run


def copied_snapshots(quantizer) -> None:
    """Make the scale search restore real copies: it takes its snapshot from a module's `state_dict()`."""
    search = quantizer._compute_best_scale

    def patched(self, x, w_mean, x_mean, module2inspect, *rest):
        original = module2inspect.state_dict
        module2inspect.state_dict = lambda: {name: tensor.clone() for name, tensor in original().items()}
        try:
            return search(self, x, w_mean, x_mean, module2inspect, *rest)
        finally:
            del module2inspect.state_dict

    quantizer._compute_best_scale = patched


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float16", "float32", "bfloat16"], default="bfloat16", help="float16 is AutoAWQ's default")
    parser.add_argument("--as-it-is", action="store_true", help="leave the weights' snapshots as AutoAWQ makes them")
    run = quantize_run.setup(parser)

    import torch
    import transformers
    from awq import AutoAWQForCausalLM
    from awq.quantize.quantizer import AwqQuantizer

    torch.set_num_threads(run.args.threads)
    if not run.args.as_it_is:
        copied_snapshots(AwqQuantizer)
    model = AutoAWQForCausalLM.from_pretrained(str(run.model), device_map="cpu", torch_dtype=getattr(torch, run.args.dtype))
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.model)
    run.loaded()
    settings = {"zero_point": True, "q_group_size": run.args.group_size, "w_bit": 4, "version": "GEMM"}
    model.quantize(
        tokenizer, quant_config=settings, calib_data=run.rows, max_calib_samples=len(run.rows), max_calib_seq_len=len(run.rows[0])
    )
    run.quantized()
    model.save_quantized(str(run.out))
    run.saved()
    run.add_tokenizer()
    from importlib.metadata import version

    run.write("autoawq", version("autoawq"), {**settings, "dtype": run.args.dtype, "as_it_is": run.args.as_it_is})


if __name__ == "__main__":
    main()
