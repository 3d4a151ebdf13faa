"""Compare dspark's quantization with other programs' on one model, one set of calibration tokens and one evaluation.

    python benchmarks/quantization.py samples --work WORK          # calibration and evaluation tokens, the model, its bf16 engine
    python benchmarks/quantization.py peers   --work WORK [NAME..] # what the other programs make of them (minutes each)
    python benchmarks/quantization.py compare --work WORK [NAME..] # dspark's own methods, then the table
    python benchmarks/quantization.py all     --work WORK          # the three in turn

Everything stays in WORK and is not made again: remove WORK/MODEL/NAME* to repeat a run. `--noise 0.02` compares on a second model, the
same weights with Gaussian noise of 2 % of each row's standard deviation, since the sample model's own lie on a 4-bit grid already.
README.md beside this file says what each figure means.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "peers"), str(HERE / "workloads")]

import corpus  # noqa: E402
import cpu  # noqa: E402
import make  # noqa: E402
import scores  # noqa: E402

EVALUATION_ROWS, CALIBRATION_ROWS, ROW_TOKENS = 64, 128, 512
GROUP_SIZE = 64
# name -> (environment, runner, its own arguments)
PEERS: dict[str, tuple[str, str, list[str]]] = {
    "gptqmodel-gptq": ("gptqmodel", "quantize_gptqmodel.py", []),
    "gptqmodel-gptq-plain": ("gptqmodel", "quantize_gptqmodel.py", ["--plain"]),
    "gptqmodel-gptq-act-order": ("gptqmodel", "quantize_gptqmodel.py", ["--act-order"]),
    "gptqmodel-rtn": ("gptqmodel", "quantize_gptqmodel.py", ["--method", "rtn"]),
    "autoawq-awq-asym": ("autoawq", "quantize_autoawq.py", []),
    "autoawq-awq-asym-float16": ("autoawq", "quantize_autoawq.py", ["--dtype", "float16"]),
    "llmcompressor-gptq": ("llmcompressor", "quantize_llmcompressor.py", ["--method", "gptq"]),
    "llmcompressor-gptq-act-order": ("llmcompressor", "quantize_llmcompressor.py", ["--method", "gptq", "--act-order"]),
    "llmcompressor-awq": ("llmcompressor", "quantize_llmcompressor.py", ["--method", "awq"]),
    "llmcompressor-awq-asym": ("llmcompressor", "quantize_llmcompressor.py", ["--method", "awq", "--asymmetric"]),
    "llmcompressor-rtn": ("llmcompressor", "quantize_llmcompressor.py", ["--method", "rtn"]),
}
# name -> arguments of `dspark quantize`; {samples} is the calibration file
OWN: dict[str, list[str]] = {
    "dspark-rtn": ["--scheme", "w4a16", "--method", "rtn"],
    "dspark-gptq": ["--scheme", "w4a16", "--method", "gptq", "--no-act-order", "--calibration", "{samples}"],
    "dspark-gptq-act-order": ["--scheme", "w4a16", "--method", "gptq", "--calibration", "{samples}"],
    "dspark-gptaq": ["--scheme", "w4a16", "--method", "gptq", "--gptaq", "0.25", "--calibration", "{samples}"],
    "dspark-awq": ["--scheme", "w4a16", "--method", "awq", "--calibration", "{samples}"],
    "dspark-awq-asym": ["--scheme", "w4a16-asym", "--method", "awq", "--calibration", "{samples}"],
    "dspark-awq-gptq": ["--scheme", "w4a16", "--method", "awq-gptq", "--calibration", "{samples}"],
    "dspark-rtn-calibrated": ["--scheme", "w4a16", "--method", "rtn", "--calibration", "{samples}"],
    "dspark-rtn-asym": ["--scheme", "w4a16-asym", "--method", "rtn"],
    "dspark-w8a8": ["--scheme", "w8a8", "--method", "rtn"],
    "dspark-w8a8-smoothquant": ["--scheme", "w8a8", "--method", "smoothquant", "--calibration", "{samples}"],
    "dspark-w8a8-smoothquant-gptq": ["--scheme", "w8a8", "--method", "smoothquant-gptq", "--calibration", "{samples}"],
    "dspark-fp8": ["--scheme", "fp8", "--method", "rtn"],
    "dspark-fp8-gptq": ["--scheme", "fp8", "--method", "gptq", "--calibration", "{samples}"],
    "dspark-fp8-inputs": ["--scheme", "fp8", "--fp8-inputs", "dynamic", "--calibration", "{samples}"],
    "dspark-fp8-inputs-gptq": ["--scheme", "fp8", "--fp8-inputs", "dynamic", "--method", "gptq", "--calibration", "{samples}"],
}


class Work:
    """Where things lie. samples are shared by the models; every model has a folder of checkpoints, engines and results."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.root = args.work.resolve()
        self.samples = self.root / "samples"
        self.clean = self.root / "model"
        self.folder = self.root / (f"noise-{args.noise:g}" if args.noise else "clean")
        self.model = self.folder / "model" if args.noise else self.clean
        self.baseline = self.folder / "baseline"

    def dspark(self, *arguments: str | Path) -> None:
        """Run dspark; raises CalledProcessError."""
        subprocess.run([str(self.args.dspark), *map(str, arguments)], check=True, stdout=sys.stderr)


def noisy_copy(source: Path, target: Path, noise: float) -> None:
    """A Hugging Face directory with noise of `noise` times its row's deviation on every linear weight; the same bytes each time."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, dirs_exist_ok=True)
    weights = load_file(source / "model.safetensors")
    for name in sorted(weights):
        weight = weights[name].float()
        if name.endswith("_proj.weight"):
            generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"))
            weight += noise * weight.std(-1, keepdim=True) * torch.randn(weight.shape, generator=generator)
        weights[name] = weight.to(weights[name].dtype)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def make_model(work: Work) -> None:
    """The Hugging Face directory and dspark's engine of it, both in bfloat16."""
    if not (work.clean / "config.json").exists():
        subprocess.run([sys.executable, str(HERE / "peers" / "export_hf.py"), str(work.clean)], check=True)
    if not (work.model / "config.json").exists():
        noisy_copy(work.clean, work.model, work.args.noise)
    if not (work.baseline / "engine.json").exists():
        work.dspark("convert", work.model, work.baseline, "--no-audit", "--force")


def conversations(work: Work) -> list[str]:
    """Invented questions, the answers of the clean bf16 engine to them (greedy, at most 192 tokens), rendered."""
    jobs, answers = work.root / "questions.jsonl", work.root / "answers.jsonl"
    rng = random.Random(corpus.SEED)
    asks = [make.distinct(ask, rng, 64) for ask in (make.word_problem, make.code_ask, make.geometry)]
    lines = [make.line(f"q-{i}", text, 192, ignore_eos=False) for i, text in enumerate(text for kind in zip(*asks) for text in kind)]
    jobs.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    work.dspark("generate", jobs, answers, "--engine", work.baseline)
    template = json.loads((work.clean / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    return corpus.chat(template, lines, [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()])


def samples(work: Work) -> None:
    """Calibration and evaluation rows. Raises SystemExit where a domain has too little text."""
    make_model(work)
    if (work.samples / "samples.json").exists():
        return
    if work.args.noise:
        raise SystemExit("samples come from the clean model: run this once without --noise")
    domains = {"prose": corpus.prose(), "reference": corpus.reference(), "code": corpus.code(), "chat": conversations(work)}
    if not domains["prose"]:
        raise SystemExit("the novel is missing: benchmarks/peers/setup.sh text")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(work.clean / "tokenizer.json"))
    rows = corpus.build(domains, tokenizer, (EVALUATION_ROWS, CALIBRATION_ROWS), ROW_TOKENS)
    print(json.dumps(corpus.write(work.samples, rows, tokenizer), indent=2), file=sys.stderr)


def result_of(work: Work, name: str) -> Path:
    return work.folder / f"{name}.json"


def run_peer(work: Work, name: str) -> None:
    """One run of a peer's runner into FOLDER/NAME, its figures and those from outside into FOLDER/NAME.json."""
    environment, runner, own = PEERS[name]
    out, inside = work.folder / name, work.folder / f"{name}.inside.json"
    shutil.rmtree(out, ignore_errors=True)
    command = [str(cpu.ENVS / environment / "bin" / "python"), str(HERE / "peers" / runner), "--model", str(work.model)]
    command += ["--samples", str(work.samples / "calibration.jsonl"), "--out", str(out), "--result", str(inside)]
    command += ["--threads", str(work.args.threads), "--group-size", str(GROUP_SIZE), *own]
    outside = cpu.run_process(command, work.args.threads, work.folder / f"{name}.log")
    record(work, name, {**json.loads(inside.read_text(encoding="utf-8")), **outside})
    inside.unlink()


def record(work: Work, name: str, figures: dict) -> None:
    """Keep what a run has cost; written when its checkpoint is whole."""
    result_of(work, name).write_text(json.dumps({"name": name, **figures}, indent=2) + "\n", encoding="utf-8")


def peers(work: Work, names: list[str]) -> None:
    """Run what has not run; a peer that fails is reported and the others go on."""
    for name in names or list(PEERS):
        if name in OWN or result_of(work, name).exists():
            continue
        if not (cpu.ENVS / PEERS[name][0]).exists():
            print(f"{name}: left out, not installed (benchmarks/peers/setup.sh {PEERS[name][0]})", file=sys.stderr)
            continue
        try:
            run_peer(work, name)
            print(f"{name}: done", file=sys.stderr)
        except RuntimeError as error:
            print(f"{name}: failed, see {name}.log: {error}", file=sys.stderr)


def quantize_own(work: Work, name: str) -> bool:
    """`dspark quantize` of one method. False, with a note, where this dspark has no such method."""
    engine, log = work.folder / "engines" / name, work.folder / f"{name}.log"
    engine.parent.mkdir(parents=True, exist_ok=True)
    own = [text.format(samples=work.samples / "calibration.jsonl") for text in OWN[name]]
    if "--calibration" in own:
        own += ["--samples", str(CALIBRATION_ROWS)]
    if "a16" in own[1]:  # a scheme with groups
        own += ["--group-size", str(GROUP_SIZE)]
    command = [str(work.args.dspark), "quantize", str(work.model), str(engine), *own]
    try:
        outside = cpu.run_process([*command, "--no-audit", "--force"], work.args.threads, log)
    except RuntimeError as error:
        print(f"{name}: left out: {str(error).splitlines()[-1]}", file=sys.stderr)
        return False
    record(work, name, {"peer": "dspark", "settings": {"arguments": " ".join(OWN[name])}, "threads": work.args.threads, **outside})
    return True


def engine_of(work: Work, name: str) -> Path | None:
    """The dspark engine of a run, made of it if it is not there; None where there is no run."""
    engine = work.folder / "engines" / name
    if not result_of(work, name).exists() and not (name in OWN and quantize_own(work, name)):
        return None
    if not (engine / "engine.json").exists():
        work.dspark("convert", work.folder / name, engine, "--no-audit", "--force")
    return engine


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def scores_of(work: Work, engines: dict[str, Path], lines: list[dict]) -> dict[str, scores.Scores]:
    """Scores of the engines and of the baseline, kept in FOLDER/scores: only what is new is computed."""
    rows = hashlib.sha256(json.dumps(lines).encode()).hexdigest()
    key = {"baseline": sha256(work.baseline / "engine.json"), "rows": rows}
    keys = {name: {**key, "engine": sha256(path / "engine.json")} for name, path in {"baseline": work.baseline, **engines}.items()}
    kept = work.folder / "scores"
    found = {name: known for name in keys if (known := scores.stored(kept / f"{name}.json", keys[name])) is not None}
    new = {name: path for name, path in engines.items() if name not in found}
    if new or "baseline" not in found:
        print(f"scoring {', '.join(new) or 'the baseline'} on {len(lines)} rows", file=sys.stderr)
        keep = lambda name, made: scores.store(kept / f"{name}.json", keys[name], made)  # noqa: E731
        found |= scores.score(new, work.baseline, [line["prompt"] for line in lines], keep)
    return found


def method_of(name: str) -> str:
    """`gptqmodel-gptq-act-order` -> `gptq-act-order`; variants of a peer's count as the method."""
    return name.partition("-")[2].removesuffix("-plain").removesuffix("-float16")


def compare(work: Work, names: list[str]) -> None:
    """Quantize with dspark, convert what the peers made, score all of it, print the table and write FOLDER/comparison.json."""
    engines = {name: engine for name in names or [*OWN, *PEERS] if (engine := engine_of(work, name)) is not None}
    lines = scores.read_rows(work.samples / "evaluation.jsonl")
    lines = lines[:: len(lines) // min(work.args.eval_rows, len(lines))]
    found = scores_of(work, engines, lines)
    domains = [line["custom_id"].rpartition("-")[0] for line in lines]
    rows = {name: {**scores.summarize(found[name], found["baseline"]), **costs(work, name)} for name in ("baseline", *engines)}
    by_domain = {domain: [i for i, other in enumerate(domains) if other == domain] for domain in sorted(set(domains))}
    pick = lambda made, chosen: {figure: [values[i] for i in chosen] for figure, values in made.items()}  # noqa: E731
    document = {
        "machine": cpu.machine(),
        "noise": work.args.noise,
        "evaluation": {"rows": len(lines), "row_tokens": len(lines[0]["prompt"])},
        "samples": json.loads((work.samples / "samples.json").read_text(encoding="utf-8")),
        "results": rows,
        "domains": {
            domain: {name: scores.summarize(pick(found[name], chosen), pick(found["baseline"], chosen)) for name in rows}
            for domain, chosen in by_domain.items()
        },
        "paired": {
            f"{ours} / {theirs}": scores.paired(found[ours], found[theirs])
            for ours in engines
            for theirs in engines
            if ours in OWN and theirs in PEERS and method_of(ours) == method_of(theirs)
        },
    }
    target = work.args.out or work.folder / "comparison.json"
    target.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(table(document))


def costs(work: Work, name: str) -> dict:
    """What a run has cost; nothing for the baseline."""
    path = result_of(work, name)
    figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = ("version", "settings", "threads", "load_cpu_s", "quantize_cpu_s", "save_cpu_s", "process_cpu_s", "process_wall_s")
    return {key: figures.get(key) for key in (*kept, "peak_anon_bytes", "peak_rss_bytes", "load_before")}


def table(document: dict) -> str:
    """The results and the paired differences as two Markdown tables."""

    def plus_minus(row: dict, name: str, digits: int) -> str:
        return f"{row[name]:.{digits}f} ± {row[name + '_se']:.{digits}f}"

    def number(value: float | None, divisor: float = 1, digits: int = 0) -> str:
        return "-" if value is None else f"{value / divisor:.{digits}f}"

    lines = ["| | perplexity | increase, % | KL, nats | top-1, % | CPU-s, quantizing | CPU-s, whole | anonymous MB |", "|---" * 8 + "|"]
    for name, row in document["results"].items():
        cells = [name, f"{row['ppl']:.3f}", plus_minus(row, "ppl_increase_pct", 2), plus_minus(row, "kl", 4), f"{row['agreement_pct']:.2f}"]
        cells += [number(row["quantize_cpu_s"]), number(row["process_cpu_s"]), number(row["peak_anon_bytes"], 1e6)]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| row by row | perplexity, % | KL, % |", "|---|---|---|"]
    for name, row in document["paired"].items():
        lines.append(f"| {name} | {plus_minus(row, 'ppl_pct', 2)} | {plus_minus(row, 'kl_pct', 1)} |")
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["samples", "peers", "compare", "all"])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones (default: all of {' '.join([*OWN, *PEERS])})")
    parser.add_argument("--work", type=Path, default=HERE / "results" / "quantization", help="directory for everything that is made")
    parser.add_argument("--noise", type=float, default=0.0, help="compare on weights with this much noise, of their row's deviation")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--eval-rows", type=int, default=EVALUATION_ROWS, help="score fewer rows, for a quick look")
    parser.add_argument("--out", type=Path, help="where the JSON goes (default: WORK/MODEL/comparison.json)")
    parser.add_argument("--dspark", type=Path, default=Path(sys.executable).with_name("dspark"), help="the dspark program")
    args = parser.parse_args()
    unknown = set(args.names) - set(OWN) - set(PEERS)
    if unknown:
        parser.error(f"no such run: {' '.join(sorted(unknown))} (there are: {' '.join([*OWN, *PEERS])})")
    return args


def main() -> None:
    args = parse_args()
    work = Work(args)
    samples(work)
    if args.step in ("peers", "all"):
        peers(work, args.names)
    if args.step in ("compare", "all"):
        compare(work, args.names)


if __name__ == "__main__":
    main()
