"""`dspark generate` as a user types it, in a job directory, with a real engine: the next night's rules, the options, the metrics."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import tiny_engine
from tiny_models import BOS_ID, CHAT_TEMPLATE, EOS_ID, build_tokenizer, make_tiny_checkpoint, make_tiny_model, save_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from dspark.converters.pipeline import convert
from dspark.runtime.kv.pool import bytes_per_block
from dspark.runtime.spec.manifest import load_manifest
from dspark_cli.app import run

TOKENIZER = build_tokenizer()
PROMPTS = ["the river runs", "count one two", "stop here please", "what is the colour of", "a small boat", "question and answer:"]
SEED = 3
FAMILIES = ("llama-tied", "llama-bias", "llama-llama3", "mistral", "qwen2", "qwen2-window", "qwen3")
COUNT = 12
"""Tokens of an answer where a test does not say otherwise."""

Typed = Callable[..., tuple[int, list[str]]]


@pytest.fixture(scope="module")
def model() -> Any:
    """transformers' model of the engine below."""
    return make_tiny_model("llama-wide", SEED)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_engine(tmp_path_factory.mktemp("engine"), "llama-wide", seed=SEED)


@pytest.fixture
def typed(tmp_path: Path, engine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """(exit code, lines of stderr) of `dspark ARGUMENTS` in a job directory with a dspark.toml; `typed.out` is its stdout."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dspark.toml").write_text(f'engine = "{engine.as_posix()}"\nmax_tokens = {COUNT}\n')

    def call(*arguments: str) -> tuple[int, list[str]]:
        capsys.readouterr()
        code = run(list(arguments))
        call.out, err = capsys.readouterr()  # type: ignore[attr-defined]
        return code, err.splitlines()

    return call


def write(*lines: dict[str, Any], path: str = "in.jsonl") -> None:
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))


def questions(**options: Any) -> list[dict[str, Any]]:
    return [{"custom_id": f"q{i}", "prompt": prompt, **options} for i, prompt in enumerate(PROMPTS)]


def records(path: str = "out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def greedy(model: Any, prompt: str, count: int = COUNT, **options: Any) -> list[int]:
    """Token ids of transformers."""
    ids = torch.tensor([ids_of(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **options)
    return out[0, ids.shape[1] :].tolist()


def shown(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def answer(typed: Typed, **options: Any) -> dict[str, Any]:
    """The record of one line with the first prompt."""
    write({"custom_id": "a", "prompt": PROMPTS[0], **options})
    assert typed("generate", "in.jsonl", "out.jsonl", "--fresh", "--quiet") == (0, [])
    return records()[0]


@pytest.fixture(scope="module")
def plain(model: Any) -> list[int]:
    """Greedy answer to the first prompt: long enough, no end of text in it, no token twice at the places that tests ask for."""
    ids = greedy(model, PROMPTS[0])
    assert len(ids) == COUNT and EOS_ID not in ids and ids.index(ids[4]) == 4
    return ids


def test_a_job_directory_from_the_first_night_to_a_changed_engine(typed: Typed, model: Any, engine: Path, tmp_path: Path) -> None:
    """`dspark generate in.jsonl out.jsonl`, typed every night."""
    command = ("generate", "in.jsonl", "out.jsonl")
    write(*questions())
    code, lines = typed(*command)
    assert code == 0 and lines[0].startswith("generate: 6 lines of 'in.jsonl'") and lines[0].endswith(f"greedy, max_tokens {COUNT}")
    assert [record["text"] for record in records()] == [shown(greedy(model, prompt)) for prompt in PROMPTS]
    first = Path("out.jsonl").read_bytes()
    assert typed(*command) == (0, ["already done: 'out.jsonl' holds all 6 lines of 'in.jsonl'"])
    assert Path("out.jsonl").read_bytes() == first
    changed = questions()
    changed[2]["prompt"] = "the night sky"
    write(*changed)
    assert typed(*command)[0] == 0
    assert [record["text"] for record in records()][2] == shown(greedy(model, "the night sky"))
    assert [r for i, r in enumerate(records()) if i != 2] == [json.loads(row) for i, row in enumerate(first.splitlines()) if i != 2]
    other = tiny_engine(tmp_path / "other", "llama-wide", seed=SEED + 1)
    code, lines = typed(*command, "--engine", str(other))
    assert code == 0 and lines[-1].startswith("done: 6 of 6")
    assert [r["text"] for r in records()] == [shown(greedy(make_tiny_model("llama-wide", SEED + 1), line["prompt"])) for line in changed]


def test_an_unfinished_job_of_another_engine_is_refused_until_fresh(typed: Typed, engine: Path, tmp_path: Path) -> None:
    """Half of the answers by one model and half by another would be the worst of all outputs."""
    command = ("generate", "in.jsonl", "out.jsonl")
    write(*questions())
    assert typed(*command, "--until", "0s")[0] == 4
    assert not Path("out.jsonl").exists() and Path("out.jsonl.journal").is_dir()
    other = tiny_engine(tmp_path / "other", "llama-wide", seed=SEED + 1)
    code, lines = typed(*command, "--engine", str(other))
    assert code == 2 and len(lines) == 1 and "another engine" in lines[0] and "--fresh" in lines[0]
    code, lines = typed(*command, "--temperature", "0.5")
    assert code == 2 and len(lines) == 1 and "temperature 0.0, now 0.5" in lines[0]
    assert typed(*command, "--engine", str(other), "--fresh")[0] == 0
    by_other = Path("out.jsonl").read_bytes()
    assert typed(*command)[0] == 0
    assert Path("out.jsonl").read_bytes() != by_other


def test_error_lines_exit_3_and_go_where_they_are_asked_to(typed: Typed) -> None:
    lines = questions()
    lines[1] |= {"temprature": 1}
    lines[4] |= {"prompt": " ".join(PROMPTS * 30)}
    write(*lines)
    code, stderr = typed("generate", "in.jsonl", "out.jsonl")
    assert code == 3 and len(stderr) == 4
    assert "line 2 ('q1'): " in stderr[1] and "did you mean 'temperature'" in stderr[1] and "line 5 ('q4'): " in stderr[2]
    assert [record["custom_id"] for record in records()] == [f"q{i}" for i in range(6)]
    good = [record for record in records() if not record["error"]]
    assert typed("generate", "in.jsonl", "out.jsonl")[0] == 3
    assert typed("generate", "in.jsonl", "split.jsonl", "--errors", "errors.jsonl")[0] == 3
    assert records("split.jsonl") == good
    failed = {record["custom_id"]: record["error"] for record in records("errors.jsonl")}
    assert {key: (error["code"], error["line"]) for key, error in failed.items()} == {
        "q1": ("unknown_key", 2),
        "q4": ("prompt_too_long", 5),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_as_transformers_does(family: str, typed: Typed, tmp_path: Path) -> None:
    """Past the sliding window of 24 tokens, too."""
    other = tiny_engine(tmp_path / "family", family)
    prompts = [*PROMPTS[:2], " ".join(PROMPTS)]
    assert len(ids_of(prompts[-1])) > 24
    write(*({"custom_id": str(i), "prompt": prompt, "max_tokens": 30} for i, prompt in enumerate(prompts)))
    assert typed("generate", "in.jsonl", "out.jsonl", "--engine", str(other))[0] == 0
    reference = make_tiny_model(family)
    for record, prompt in zip(records(), prompts, strict=True):
        ids = greedy(reference, prompt, 30)
        assert record["text"] == shown(ids), prompt
        assert record["usage"] == {"prompt_tokens": len(ids_of(prompt)), "completion_tokens": len(ids)}
        assert record["finish_reason"] == ("stop" if ids[-1] == EOS_ID else "length")


def test_n_answers_are_different_draws_and_the_same_when_asked_again(typed: Typed) -> None:
    one = answer(typed, n=4, temperature=1.5, seed=7)
    assert [choice["index"] for choice in one["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in one["choices"]}) == 4 and one["text"] == one["choices"][0]["text"]
    assert one["usage"]["completion_tokens"] <= 4 * COUNT
    assert answer(typed, n=4, temperature=1.5, seed=7) == one
    fewer = answer(typed, n=2, temperature=1.5, seed=7)
    assert fewer["choices"] == one["choices"][:2]
    assert "choices" not in answer(typed)


def test_stop_token_ids_end_the_answer_before_them(typed: Typed, plain: list[int]) -> None:
    record = answer(typed, stop_token_ids=[plain[4]])
    assert (record["text"], record["finish_reason"], record["usage"]["completion_tokens"]) == (shown(plain[:4]), "stop", 5)
    kept = answer(typed, stop_token_ids=[plain[4]], include_stop_str_in_output=True)
    assert kept["text"] == shown(plain[:5])


def test_min_tokens_forbids_ends_until_then(typed: Typed, plain: list[int]) -> None:
    """Counted in tokens; the best other token is taken instead, it is not enough to go on after an end of text."""
    late = answer(typed, stop_token_ids=[plain[4]], min_tokens=5)
    assert late["usage"]["completion_tokens"] > 5
    with_bias = {"logit_bias": {str(EOS_ID): 100}}
    record = answer(typed, **with_bias)
    assert (record["text"], record["finish_reason"], record["usage"]["completion_tokens"]) == ("", "stop", 1)
    record = answer(typed, **with_bias, min_tokens=4)
    assert (record["text"], record["finish_reason"], record["usage"]["completion_tokens"]) == (shown(plain[:4]), "stop", 5)


def test_ignore_eos_goes_on_to_the_last_token(typed: Typed) -> None:
    record = answer(typed, logit_bias={str(EOS_ID): 100}, ignore_eos=True)
    assert (record["text"], record["finish_reason"], record["usage"]["completion_tokens"]) == ("", "length", COUNT)
    record = answer(typed, logit_bias={str(EOS_ID): 100}, ignore_eos=True, skip_special_tokens=False, max_tokens=3)
    assert record["text"] == "<|eos|>" * 3


def test_logit_bias_forbids_and_forces(typed: Typed, model: Any, plain: list[int]) -> None:
    forced = answer(typed, logit_bias={"70": 100}, max_tokens=3)
    assert forced["text"] == shown([70] * 3)
    without = answer(typed, logit_bias={str(plain[0]): -100})
    assert without["text"] == shown(greedy(model, PROMPTS[0], suppress_tokens=[plain[0]]))


def test_penalties_and_filters_agree_with_transformers(typed: Typed, model: Any) -> None:
    record = answer(typed, repetition_penalty=1.8, max_tokens=30)
    assert record["text"] == shown(greedy(model, PROMPTS[0], 30, repetition_penalty=1.8)) != shown(greedy(model, PROMPTS[0], 30))
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):  # one token is left, whatever the temperature
        assert answer(typed, temperature=1.7, seed=1, **narrow)["text"] == shown(greedy(model, PROMPTS[0])), narrow


def test_the_checkpoints_own_ends_and_beginnings_hold(typed: Typed, plain: list[int], tmp_path: Path) -> None:
    """A second end-of-text token, named in generation_config.json only; a BOS before raw texts, and not twice before chats."""
    checkpoint = make_tiny_checkpoint(tmp_path / "checkpoint", "llama-wide", seed=SEED)
    settings = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, plain[4]], "temperature": 0.9, "max_new_tokens": 2}
    (checkpoint / "generation_config.json").write_text(json.dumps(settings))
    convert(checkpoint, tmp_path / "two-ends", audit=False)
    write({"custom_id": "a", "prompt": PROMPTS[0]})
    assert typed("generate", "in.jsonl", "out.jsonl", "--engine", "two-ends")[0] == 0
    assert (records()[0]["text"], records()[0]["finish_reason"]) == (shown(plain[:4]), "stop")
    tokenizer = build_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS_ID)])
    save_tokenizer(checkpoint, tokenizer, chat_template="<|bos|>" + CHAT_TEMPLATE)
    convert(checkpoint, tmp_path / "with-bos", audit=False)
    chat = [{"role": "user", "content": "hi"}]
    write({"custom_id": "raw", "prompt": PROMPTS[0]}, {"custom_id": "chat", "messages": chat})
    assert typed("generate", "in.jsonl", "out.jsonl", "--engine", "with-bos")[0] == 0
    reference = AutoTokenizer.from_pretrained(checkpoint)
    rendered = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    wanted = [reference(PROMPTS[0])["input_ids"], reference(rendered, add_special_tokens=False)["input_ids"]]
    assert [record["usage"]["prompt_tokens"] for record in records()] == [len(ids) for ids in wanted] and wanted[0][0] == BOS_ID


def test_every_option_survives_a_pool_that_is_too_small_for_all(typed: Typed, engine: Path) -> None:
    """A sequence that is thrown out and computed again: what it had generated must not count as prompt, nor be searched for stops twice."""
    draw = random.Random(8)
    options: list[dict[str, Any]] = [
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"repetition_penalty": 1.3, "min_tokens": 20},
        {"temperature": 0.9, "n": 3},
        {"temperature": 1.4, "min_p": 0.02, "stop": ["a", "the", "q"], "min_tokens": 9},
        {"stop": ["th", "z", "1"], "logit_bias": {str(EOS_ID): 2}},
        {"temperature": 1.2, "seed": 5, "stop_token_ids": list(range(60, 70)), "include_stop_str_in_output": True},
    ]
    prompts = [[draw.randrange(3, 320) for _ in range(draw.randint(1, 40))] for _ in range(24)]
    write(*({"custom_id": str(i), "prompt": p, "max_tokens": draw.randint(30, 90), **options[i % 6]} for i, p in enumerate(prompts)))
    assert typed("generate", "in.jsonl", "out.jsonl")[0] == 0
    pool = 9 * bytes_per_block(load_manifest(engine).model, 16, torch.float32)
    flags = ("--kv-cache-memory-bytes", str(pool), "--max-num-seqs", "16", "--max-num-batched-tokens", "48", "--metrics", "m.json")
    assert typed("generate", "in.jsonl", "small.jsonl", *flags)[0] == 0
    assert json.loads(Path("m.json").read_text())["preemptions"] > 5
    assert Path("small.jsonl").read_bytes() == Path("out.jsonl").read_bytes()


METRICS = {
    "": "schema time tokens ttft_s latency_s preemptions memory exit_code stopped already_done lines input_bytes sampling_defaults "
    "engine_config engine",
    "time": "wall_s first_token_s generate_s cpu_s generate_cpu_s",
    "tokens": "prompt output cached output_per_s prompt_per_s output_per_cpu_s",
    "ttft_s": "p50 p90 p99 max",
    "latency_s": "p50 p90 p99 max",
    "memory": "peak_rss_bytes peak_anon_bytes",
    "lines": "total ok failed resumed",
    "engine": "num_steps step_s host_overhead_fraction tokens_per_step_mean tokens_per_step_max sequences_per_step_mean preemptions "
    "kv_blocks kv_blocks_peak block_size max_num_seqs max_num_batched_tokens max_model_len kernels",
}


def test_metrics_hold_what_a_script_relies_on(typed: Typed) -> None:
    """Lines, tokens, rates, latencies, KV use, batch sizes, memory and kernel choices, in a file and with --json alike."""
    shared = " ".join(PROMPTS)
    write(*({"custom_id": str(i), "prompt": f"{shared} {i}"} for i in range(5)), {"custom_id": "bad", "prompt": ""})
    assert typed("generate", "in.jsonl", "out.jsonl", "--metrics", "m.json", "--json", "--quiet")[0] == 3
    metrics = json.loads(Path("m.json").read_text())
    assert metrics == json.loads(typed.out)  # type: ignore[attr-defined]
    for group, names in METRICS.items():
        found = metrics[group] if group else metrics
        assert not set(names.split()) - set(found), group
    assert metrics["lines"] == {"total": 6, "ok": 5, "failed": 1, "resumed": 0} and metrics["exit_code"] == 3
    assert metrics["tokens"]["prompt"] == sum(len(ids_of(f"{shared} {i}")) for i in range(5))
    assert metrics["tokens"]["output"] == sum(r["usage"]["completion_tokens"] for r in records() if not r["error"])
    assert metrics["tokens"]["cached"] == 4 * (len(ids_of(shared)) // 16 * 16)
    assert metrics["time"]["first_token_s"] > 0 and 0 < metrics["engine"]["kv_blocks_peak"] <= metrics["engine"]["kv_blocks"]
    assert metrics["engine"]["kernels"]["paged_attention"]


def test_inspect_and_doctor_tell_what_is_there(typed: Typed, engine: Path) -> None:
    assert typed("inspect", str(engine), "--json") == (0, [])
    facts = json.loads(typed.out)  # type: ignore[attr-defined]
    assert (facts["format"], facts["family"], facts["schema_version"]) == ("engine", "llama", "1.0")
    assert typed("inspect", str(engine))[0] == 0
    assert "llama" in typed.out and "not audited" in typed.out  # type: ignore[attr-defined]
    assert typed("doctor", "--json") == (0, [])
    report = json.loads(typed.out)  # type: ignore[attr-defined]
    assert report["versions"]["dspark"] and report["machine"]["cores"] >= 1
    assert report["kernels"]["paged_attention"]["taken"]
    assert typed("doctor", "--kernels", "reference", "--device", "cpu", "--json") == (0, [])
    chosen = json.loads(typed.out)["kernels"]  # type: ignore[attr-defined]
    assert {choice["taken"] for choice in chosen.values()} == {"reference"}


def test_a_dry_run_foresees_the_errors_of_the_run(typed: Typed, tmp_path: Path) -> None:
    """The context of a stretched rope is the engine's own: four times 256 tokens here, and both must know."""
    stretched = tiny_engine(tmp_path / "stretched", "llama-linear")
    lengths = {"short": 5, "stretched": 700, "last": 1023, "over": 1024}
    write(*({"custom_id": key, "prompt": [7] * length, "max_tokens": 2} for key, length in lengths.items()))
    code, lines = typed("generate", "in.jsonl", "out.jsonl", "--engine", str(stretched), "--dry-run", "--json")
    foreseen = json.loads(typed.out)  # type: ignore[attr-defined]
    assert code == foreseen["exit_code"] == 3 and len(lines) == 1 and "'over'" in lines[0]
    assert typed("generate", "in.jsonl", "out.jsonl", "--engine", str(stretched))[0] == 3
    assert [record["custom_id"] for record in records() if record["error"]] == ["over"]
    assert foreseen["num_errors"] == 1 and foreseen["num_servable"] == 3


def cut_weights(engine: Path) -> None:
    path = next(engine.glob("weights-*"))
    path.write_bytes(path.read_bytes()[:-1000])


def newer_schema(engine: Path) -> None:
    manifest = json.loads((engine / "engine.json").read_text())
    (engine / "engine.json").write_text(json.dumps(manifest | {"schema_version": "2.0"}))


def no_tokenizer(engine: Path) -> None:
    (engine / "tokenizer.json").unlink()


def as_it_is(engine: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("damage", "flags", "words"),
    [
        (as_it_is, ("--kv-cache-memory-bytes", "10"), "one has 16384 bytes"),
        (as_it_is, ("--kv-cache-memory-bytes", str(10**15)), "--kv-cache-memory-bytes is 1000000000000000, this machine has"),
        (as_it_is, ("--max-model-len", "999"), "the model's context is 256"),
        (as_it_is, ("--max-num-batched-tokens", "16"), "below --max-num-seqs 64"),
        (cut_weights, (), "is damaged"),
        (newer_schema, (), "has schema 2.0, this dspark reads 1.x"),
        (no_tokenizer, (), "has no tokenizer.json"),
    ],
)
def test_an_engine_that_cannot_run_exits_2_and_writes_nothing(
    typed: Typed, engine: Path, tmp_path: Path, damage: Callable[[Path], None], flags: tuple[str, ...], words: str
) -> None:
    shutil.copytree(engine, tmp_path / "copy")
    damage(tmp_path / "copy")
    write(*questions())
    before = sorted(path.name for path in tmp_path.iterdir())
    code, lines = typed("generate", "in.jsonl", "out.jsonl", "--engine", "copy", "--quiet", *flags)
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: ") and words in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == before
