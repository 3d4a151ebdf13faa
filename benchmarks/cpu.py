"""Compare dspark with other engines on one workload file, on CPU cores.

    python benchmarks/cpu.py --engine ENGINE [--workload FILE] [--threads N] [--peers transformers,vllm,openvino] [--repeat R] [--out FILE]
    python benchmarks/cpu.py --speculation --engine ENGINE ...      # drafting against plain decoding: speculation.py beside this file

Every program runs the whole file in a process of its own, bound to the first N cores; the programs take turns (A B C, B C A, ...), so
that a slow minute of the machine does not hit one of them alone. The result is one JSON document (every run, medians, ratios of
dspark to each peer) and a table. Times are seconds, memory is bytes. README.md beside this file says what each figure means.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVS = HERE / ".envs"
sys.path[:0] = [str(HERE / "peers"), str(HERE / "workloads")]

import make  # noqa: E402
import measure  # noqa: E402

# name -> (environment, None for the one this runs in; runner; its own arguments)
PEERS: dict[str, tuple[str | None, str, list[str]]] = {
    "transformers": (None, "transformers_static.py", []),
    "vllm": ("vllm", "vllm_cpu.py", []),
    "openvino": ("openvino", "openvino_continuous.py", ["--weights", "int8"]),
    "openvino-bf16": ("openvino", "openvino_continuous.py", ["--weights", "bf16"]),
}
# where dspark's metrics file has the figures that a peer's runner writes
DSPARK_METRICS = {
    "lines": "lines",
    "prompt_tokens": "tokens.prompt",
    "output_tokens": "tokens.output",
    "cached_tokens": "tokens.cached",
    "generate_wall_s": "time.generate_s",
    "generate_cpu_s": "time.generate_cpu_s",
    "first_token_s": "time.first_token_s",
    "dtype": "engine.dtype",
    "host_overhead_fraction": "host_overhead_fraction",
    "own_peak_anon_bytes": "memory.peak_anon_bytes",
    "own_peak_rss_bytes": "memory.peak_rss_bytes",
}
# figure -> (heading, divisor, digits)
COLUMNS = {
    "process_tokens_per_s": ("tok/s whole", 1, 1),
    "process_tokens_per_cpu_s": ("tok/CPU-s whole", 1, 1),
    "tokens_per_s": ("tok/s gen", 1, 1),
    "tokens_per_cpu_s": ("tok/CPU-s gen", 1, 1),
    "first_token_s": ("first token s", 1, 2),
    "peak_anon_bytes": ("anon MB", 1e6, 0),
    "peak_rss_bytes": ("RSS MB", 1e6, 0),
}


def lookup(metrics: dict, path: str):
    """A value of the metrics, nested or under its dotted name; None where it is absent."""
    if path in metrics:
        return metrics[path]
    value = metrics
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def quotient(a, b) -> float | None:
    """a / b, or None where either is absent or zero."""
    return a / b if a and b else None


def run_process(command: list[str], threads: int, log: Path) -> dict:
    """Run a program bound to the first `threads` cores and measure it from outside."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    load = os.getloadavg()[0]
    start = time.perf_counter()
    with log.open("w") as stream:
        child = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, cwd=log.parent, preexec_fn=lambda: os.sched_setaffinity(0, cores)
        )
        memory = measure.MemoryWatch(child.pid)
        memory.start()
        try:
            _, status, usage = os.wait4(child.pid, 0)
        except BaseException:  # this program is being stopped
            child.kill()
            raise
    wall = time.perf_counter() - start
    memory.stop()
    if status:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"exit {os.waitstatus_to_exitcode(status)}: {' '.join(command)}\n{tail}")
    return {
        "process_wall_s": wall,
        "process_cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_rss_bytes": memory.peak_rss_bytes,
        "peak_anon_bytes": memory.peak_anon_bytes,
        "load_before": load,
    }


def run_dspark(args: argparse.Namespace, folder: Path) -> dict:
    """One `dspark generate` of the workload, in a folder of its own."""
    out, metrics_file = folder / "out.jsonl", folder / "metrics.json"
    command = [str(args.dspark), "generate", str(args.workload), str(out), "--engine", str(args.engine.resolve())]
    command += ["--threads", str(args.threads), "--fresh", "--metrics", str(metrics_file), *args.dspark_args.split()]
    outside = run_process(command, args.threads, folder / "log.txt")
    metrics = json.loads(metrics_file.read_text()) if metrics_file.exists() else {}
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    inside = {name: lookup(metrics, path) for name, path in DSPARK_METRICS.items()}
    if not inside["output_tokens"]:
        inside["output_tokens"] = sum(answer.get("usage", {}).get("completion_tokens", 0) for answer in answers)
    return {**inside, **outside, "texts": [answer.get("text") for answer in answers[:3]]}


def run_peer(name: str, args: argparse.Namespace, folder: Path) -> dict:
    """One run of a peer's runner."""
    environment, script, own = PEERS[name]
    result = folder / "result.json"
    command = [str(peer_python(environment)), str(HERE / "peers" / script), "--workload", str(args.workload)]
    command += ["--threads", str(args.threads), "--model", str(args.model), "--out", str(result), *own]
    outside = run_process(command, args.threads, folder / "log.txt")
    return {**json.loads(result.read_text(encoding="utf-8")), **outside}


def peer_python(environment: str | None) -> Path:
    return Path(sys.executable) if environment is None else ENVS / environment / "bin" / "python"


def prepare(args: argparse.Namespace) -> list[str]:
    """Make what is missing (workload, model directories); return the programs that can run here."""
    args.workload = args.workload.resolve() if args.workload else make.write("chat", ENVS / "workloads")
    programs = ["dspark"] if args.engine else []
    for name in filter(None, args.peers.split(",")):
        if name not in PEERS:
            raise SystemExit(f"no such peer: {name} (there are: {', '.join(PEERS)})")
        if peer_python(PEERS[name][0]).exists():
            programs.append(name)
        else:
            print(f"{name}: left out, not installed (benchmarks/peers/setup.sh {PEERS[name][0]})", file=sys.stderr)
    if not programs:
        raise SystemExit("nothing to run: give --engine, --peers or both")
    args.model = args.model.resolve() if args.model else ENVS / "models" / "smollm2-135m"
    if set(programs) & set(PEERS) and not (args.model / "config.json").exists():
        subprocess.run([sys.executable, str(HERE / "peers" / "export_hf.py"), str(args.model)], check=True)
    for name in programs:
        if name.startswith("openvino"):
            script = [str(peer_python("openvino")), str(HERE / "peers" / PEERS[name][1])]
            subprocess.run([*script, "--export-only", "--model", str(args.model), *PEERS[name][2]], check=True)
    return programs


def add_rates(run: dict) -> dict:
    """Output tokens per second and per CPU-second, of the whole process and of the generation alone."""
    for rate, cost in (
        ("process_tokens_per_s", "process_wall_s"),
        ("process_tokens_per_cpu_s", "process_cpu_s"),
        ("tokens_per_s", "generate_wall_s"),
        ("tokens_per_cpu_s", "generate_cpu_s"),
    ):
        run[rate] = quotient(run.get("output_tokens"), run.get(cost))
    return run


def median(values: list) -> float | None:
    present = [value for value in values if isinstance(value, int | float)]
    return statistics.median(present) if present else None


def summarize(runs: dict[str, list[dict]]) -> dict:
    """Medians per program, and per peer the median over the rounds of dspark / peer."""
    names = ["output_tokens", "prompt_tokens", "cached_tokens", "process_wall_s", "process_cpu_s", "generate_wall_s", "generate_cpu_s"]
    names += ["startup_s", "host_overhead_fraction", *COLUMNS]
    medians = {program: {name: median([run.get(name) for run in rounds]) for name in names} for program, rounds in runs.items()}
    ratios = {
        peer: {
            name: median([quotient(ours.get(name), theirs.get(name)) for ours, theirs in zip(runs["dspark"], rounds)]) for name in COLUMNS
        }
        for peer, rounds in runs.items()
        if peer != "dspark" and "dspark" in runs
    }
    return {"medians": medians, "dspark_over_peer": ratios}


def table(summary: dict) -> str:
    """The medians and ratios as a Markdown table."""
    rows = [["", *(heading for heading, _, _ in COLUMNS.values())]]
    for program, figures in summary["medians"].items():
        cells = [(figures[name], divisor, digits) for name, (_, divisor, digits) in COLUMNS.items()]
        rows.append([program, *("-" if value is None else f"{value / divisor:.{digits}f}" for value, divisor, digits in cells)])
    for peer, figures in summary["dspark_over_peer"].items():
        rows.append([f"dspark / {peer}", *("-" if figures[name] is None else f"{figures[name]:.2f}x" for name in COLUMNS)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join(lines)


def machine() -> dict:
    """The processor and how many cores this process may use."""
    models = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {"processor": models[0] if models else None, "cores": len(os.sched_getaffinity(0)), "python": sys.version.split()[0]}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, help="JSONL file in the flat shape (default: a generated chat.jsonl)")
    parser.add_argument("--engine", type=Path, help="engine directory; without it only the peers run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peers", default="transformers,vllm,openvino", help=f"comma-separated, out of {', '.join(PEERS)}; '' for none")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where the JSON goes (default: stdout gets the table only)")
    parser.add_argument("--model", type=Path, help="Hugging Face directory for the peers (default: SmolLM2-135M, exported once)")
    parser.add_argument("--dspark", type=Path, default=Path(sys.executable).with_name("dspark"), help="the dspark program")
    parser.add_argument("--dspark-args", default="", help="more arguments for dspark generate, in one string")
    return parser.parse_args()


def main() -> None:
    if "--speculation" in sys.argv[1:]:
        import speculation

        speculation.main([argument for argument in sys.argv[1:] if argument != "--speculation"], make.write, machine())
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a run in progress ends with this program
    args = parse_args()
    programs = prepare(args)
    runs: dict[str, list[dict]] = {program: [] for program in programs}
    for turn in range(args.repeat):
        for i in range(len(programs)):
            program = programs[(turn + i) % len(programs)]
            with tempfile.TemporaryDirectory(prefix="dspark-bench-") as folder:
                run = run_dspark(args, Path(folder)) if program == "dspark" else run_peer(program, args, Path(folder))
            runs[program].append(add_rates(run))
            print(f"{turn + 1}/{args.repeat} {program}: {run['process_wall_s']:.1f} s", file=sys.stderr)
    summary = summarize(runs)
    settings = {"workload": args.workload.name, "threads": args.threads, "repeat": args.repeat, "dspark_args": args.dspark_args}
    if args.out:
        document = {"settings": settings, "machine": machine(), **summary, "runs": runs}
        args.out.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(table(summary))


if __name__ == "__main__":
    main()
