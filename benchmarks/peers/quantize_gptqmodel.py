"""GPTQModel, 4 bit symmetric: GPTQ, GPTQ in the order of the activations (`desc_act`), or round to nearest.

Its defaults but for bits, group and order: damping 0.05, true sequential. Without `desc_act` it still orders whole groups and the
columns inside them by activation (`act_group_aware`); `--plain` switches that off. It computes in bfloat16, the checkpoint's own
dtype. Calibration goes in as token ids, one row a batch.
"""

from __future__ import annotations

import argparse
import os

import quantize_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["gptq", "rtn"], default="gptq")
    parser.add_argument("--act-order", action="store_true", help="desc_act")
    parser.add_argument("--plain", action="store_true", help="no act_group_aware")
    run = quantize_run.setup(parser)
    os.environ["GPTQMODEL_CPU_WORKERS"] = str(run.args.threads)

    import gptqmodel
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.quantization.config import WeightOnlyConfig

    torch.set_num_threads(run.args.threads)
    settings: dict = {"bits": 4, "group_size": run.args.group_size, "sym": True}
    if run.args.method == "rtn":
        config = QuantizeConfig(**settings, device="cpu", weight_only=WeightOnlyConfig(method="rtn"))
        settings["weight_only"] = "rtn"
    else:
        settings["desc_act"] = run.args.act_order
        if run.args.plain:
            settings["act_group_aware"] = False
        config = QuantizeConfig(**settings, device="cpu")
    model = GPTQModel.load(str(run.model), config)
    run.loaded()
    if run.args.method == "rtn":
        model.quantize(calibration=None)
    else:
        rows = [torch.tensor([row]) for row in run.rows]
        model.quantize([{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows], batch_size=1)
    run.quantized()
    model.save(str(run.out))
    run.saved()
    run.add_tokenizer()
    run.write("gptqmodel", gptqmodel.__version__, settings)


if __name__ == "__main__":
    main()
