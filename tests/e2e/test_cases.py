"""Faults that users of other tools reported, from the checkpoint or the lines to the answers, with the real engine.

tests/converters and tests/runtime/jobs look at the same cases from their own side; here `dspark generate` runs whole.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import case_lines
import pytest
import torch
from case_checkpoints import ROPE_SPELLINGS, State, cast, llama_config, llama_state, save_checkpoint, token_ids, write_gguf
from tiny_models import CONTEXT, EOS_ID, NO_SYSTEM_TEMPLATE, VOCAB_SIZE, build_tokenizer, save_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.converters.pipeline import convert
from dspark.runtime.kv.pool import bytes_per_block
from dspark.runtime.spec.manifest import load_manifest
from dspark_cli.app import run

TOKENIZER = build_tokenizer()
PATH = TOKENIZER.encode(case_lines.KNOWN_TEXT, add_special_tokens=False).ids
STRONG = 12.0


class Job:
    """Jobs in one directory, in one line shape."""

    def __init__(self, directory: Path, shape: str = case_lines.FLAT) -> None:
        self.directory, self.shape = directory, shape

    def run(self, name: str | list[case_lines.Row], engine: Path, *flags: str) -> int:
        """Answer the named file, or these requests; returns the exit code."""
        data = case_lines.file(name, self.shape) if isinstance(name, str) else case_lines.rows_file(self.shape, name)
        (self.directory / "in.jsonl").write_bytes(data)
        return self.again(engine, "--fresh", *flags)

    def again(self, engine: Path, *flags: str) -> int:
        paths = [str(self.directory / name) for name in ("in.jsonl", "out.jsonl")]
        return run(["generate", *paths, "--engine", str(engine), "--quiet", *flags])

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "out.jsonl").read_bytes().split(b"\n")[:-1]]

    def results(self) -> dict[str, tuple[str, str, int]]:
        """id -> (text, finish reason, completion tokens) of the answered lines."""
        found = {}
        for record in self.records():
            body = record["response"]["body"] if "response" in record else record
            if body.get("error"):
                continue
            choice = body["choices"][0] if "choices" in body else body
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            found[record["custom_id"]] = (text, choice["finish_reason"], body["usage"]["completion_tokens"])
        return found

    def texts(self) -> dict[str, str]:
        return {key: text for key, (text, _, _) in self.results().items()}

    def errors(self) -> dict[str, dict[str, Any]]:
        bodies = {r["custom_id"]: r["response"]["body"] if "response" in r else r for r in self.records()}
        return {key: body["error"] for key, body in bodies.items() if body.get("error")}


@pytest.fixture(params=case_lines.SHAPES)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    return Job(tmp_path, request.param)


def path_logits(path: list[int]) -> torch.Tensor:
    """Logit of token j after token i: along the path, whose tokens are all different; from anywhere else to its beginning."""
    follower = dict(pairwise(path))
    table = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    for token in range(VOCAB_SIZE):
        table[token, follower.get(token, path[0])] = STRONG
    return table


def chain_engine(directory: Path, table: torch.Tensor) -> Path:
    """A real Llama of one layer whose next token is the table's word: attention and MLP add nothing, embeddings are one-hot."""
    config = llama_config(
        hidden_size=VOCAB_SIZE, intermediate_size=64, num_hidden_layers=1, num_attention_heads=10, num_key_value_heads=5, head_dim=32
    )
    state = llama_state(config, 3)
    for name, tensor in state.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1)
    state["model.embed_tokens.weight"] = 10 * torch.eye(VOCAB_SIZE)
    state["lm_head.weight"] = table.t() / math.sqrt(VOCAB_SIZE)
    return engine_of(save_checkpoint(directory / "checkpoint", config, state))


def engine_of(checkpoint: Path, **options: Any) -> Path:
    engine = checkpoint.parent / f"{checkpoint.name}-engine"
    convert(checkpoint, engine, audit=False, **options)
    return engine


def transformers_model(config: dict[str, Any], state: State) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig.from_dict(dict(config))).float().eval()
    head = state["model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"]
    model.load_state_dict({name: tensor.float() for name, tensor in {**state, "lm_head.weight": head}.items()})
    return model


def greedy(model: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    """Token ids up to the end of text, as transformers generates them."""
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), max_new_tokens=count, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


def shown(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes KNOWN_TEXT after any prompt that does not end on its path, then the end of text (B28)."""
    assert len(set(PATH)) == len(PATH)
    return chain_engine(tmp_path_factory.mktemp("chain"), path_logits([*PATH, EOS_ID]))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    """(engine, transformers' model) of a random Llama whose answers to the prompts of B37 all differ, by clear margins."""
    config = llama_config()
    state = llama_state(config, 68)
    checkpoint = save_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint", config, state)
    return engine_of(checkpoint), transformers_model(config, state)


def odd_checkpoints() -> dict[str, tuple[dict[str, Any], State, dict[str, Any], State]]:
    """name -> (config and weights as saved, config and weights that they stand for)."""
    plain, tied, biased = llama_config(), llama_config(tie_word_embeddings=True), llama_config(attention_bias=True)
    state, with_bias, rounded = llama_state(plain, 4), llama_state(biased, 9), cast(llama_state(plain, 10), "bfloat16")
    one = llama_state(tied, 3)
    one["model.embed_tokens.weight"] *= 0.3
    rope = {name: llama_config(**changes) for name, (changes, _) in ROPE_SPELLINGS.items()}
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.rand(16) for i in range(2)}
    return {
        "B03_copy": (tied, {**one, "lm_head.weight": one["model.embed_tokens.weight"].clone()}, tied, one),
        "B03_no_copy": (tied, one, tied, one),
        "B04_untied": (plain, state, plain, state),
        "B05_flag_but_other_head": (tied, state, plain, state),
        "B06_buffers": (plain, {**state, **buffers}, plain, state),
        "B09_bias": (biased, with_bias, biased, with_bias),
        "B10_float32_label": (llama_config(torch_dtype="float32"), rounded, plain, rounded),
        **{f"B08_{name}": (config, state, config, state) for name, config in rope.items()},
    }


def check_greedy(job: Job, engine: Path, model: LlamaForCausalLM, lengths: tuple[int, ...], *flags: str) -> None:
    prompts = {f"t{length}": token_ids(length, length) for length in lengths}
    assert job.run([(key, case_lines.request(ids, 24)) for key, ids in prompts.items()], engine, *flags) == 0
    for key, ids in prompts.items():
        want = greedy(model, ids, 24)
        reason = "stop" if want[-1] == EOS_ID else "length"
        assert job.results()[key] == (shown(want), reason, len(want)), key


@pytest.mark.parametrize("name", odd_checkpoints())
def test_odd_checkpoints_generate_what_transformers_does(name: str, tmp_path: Path) -> None:
    """B03-B06, B08-B10: the engine may hold the right weights and the runtime still read its config wrongly."""
    saved_config, saved, config, state = odd_checkpoints()[name]
    engine = engine_of(save_checkpoint(tmp_path / "checkpoint", saved_config, saved), dtype="float32")
    lengths = (60, 100) if "dynamic" in name else (5, 160)  # the dynamic model sees 128 tokens, and grows from 64 on
    check_greedy(Job(tmp_path), engine, transformers_model(config, state), lengths)


@pytest.mark.parametrize("block_type", [None, "Q8_0"])
def test_b12_a_gguf_file_generates_what_transformers_does(tmp_path: Path, block_type: str | None) -> None:
    config = llama_config()
    effective = write_gguf(tmp_path / "model.gguf", config, llama_state(config, 12), block_type)
    convert(tmp_path / "model.gguf", tmp_path / "engine", dtype="float32", audit=False)
    check_greedy(Job(tmp_path), tmp_path / "engine", transformers_model(config, effective), (5, 160))


def test_b01_a_failed_convert_leaves_nothing_to_generate_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The next step must not run on half a model."""
    config = llama_config()
    source = save_checkpoint(tmp_path / "checkpoint", config, llama_state(config, 1), shards=4)
    (source / "model-00003-of-00004.safetensors").unlink()
    assert run(["convert", str(source), str(tmp_path / "engine")]) == 2
    assert "model-00003-of-00004.safetensors" in capsys.readouterr().err
    assert Job(tmp_path).run("plain", tmp_path / "engine") == 2
    assert not (tmp_path / "out.jsonl").exists()


def test_b07_tokens_without_a_row_are_errors_of_their_lines(job: Job, tmp_path: Path) -> None:
    """Four added tokens, an embedding of 320: an index error must not take the good lines with it."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens(["<|tool|>", "<|call|>"])
    tokenizer.add_tokens(["zyxxy", "qwvbn"])
    config = llama_config()
    engine = engine_of(save_checkpoint(tmp_path / "checkpoint", config, llama_state(config, 7), tokenizer=tokenizer))
    bad = {"b1": "<|tool|> please", "b2": "a zyxxy", "b3": [3, 321]}
    rows = [("g1", case_lines.request("the river runs")), *((key, case_lines.request(text)) for key, text in bad.items())]
    assert job.run([*rows, ("g2", case_lines.request("count one two"))], engine) == 3
    assert set(job.texts()) == {"g1", "g2"}
    assert {key: error["code"] for key, error in job.errors().items()} == dict.fromkeys(bad, "token_out_of_range")
    assert "'<|tool|>', token 320" in job.errors()["b1"]["message"] and "324 tokens, the model 320" in job.errors()["b1"]["message"]


def test_b24_b25_odd_files_give_the_answers_of_the_plain_one(job: Job, tiny: Any) -> None:
    assert job.run("plain", tiny[0]) == 0
    plain = job.results()
    for key, body in case_lines.requests("plain"):
        want = greedy(tiny[1], TOKENIZER.encode(body["prompt"]).ids, 8)
        assert plain[key][0] == shown(want) and plain[key][2] == len(want)
    for name in ("B24_bom", "B25_crlf", "B25_blank_lines", "B25_no_final_newline"):
        assert job.run(name, tiny[0]) == 0
        assert job.results() == plain, name
    assert job.run("B25_unicode_line_separators", tiny[0]) == 0 and len(job.texts()) == 3
    assert job.run("B25_nonobject_lines", tiny[0]) == 3 and {"r0", "r1", "r3", "r5"} <= set(job.texts())
    assert job.run("B25_nan_numbers", tiny[0]) == 3 and set(job.texts()) == {"r0", "r4"}


def test_b26_lines_with_one_id_keep_their_own_answers(job: Job, tiny: Any) -> None:
    assert job.run("B26_duplicate_ids", tiny[0], "--allow-duplicate-ids") == 0
    records = job.records()
    for record, (custom_id, body) in zip(records, case_lines.requests("B26_duplicate_ids"), strict=True):
        assert record["custom_id"] == custom_id
        text = record["text"] if job.shape == case_lines.FLAT else record["response"]["body"]["choices"][0]["text"]
        assert text == shown(greedy(tiny[1], TOKENIZER.encode(body["prompt"]).ids, 8))


def test_b27_one_bad_prompt_changes_no_other_answer(job: Job, tiny: Any) -> None:
    rows = case_lines.requests("B27_long_and_empty")
    assert job.run([row for row in rows if row[0].startswith("ok")], tiny[0]) == 0
    alone = job.results()
    assert job.run("B27_long_and_empty", tiny[0]) == 3
    assert [record["custom_id"] for record in job.records()] == [key for key, _ in rows]
    assert {key: job.results()[key] for key in alone} == alone
    message = job.errors()["long"]["message"]
    assert str(CONTEXT - 1) in message and any(int(word) > CONTEXT for word in message.replace(",", " ").split() if word.isdigit())
    assert {"empty", "null", "nofield", "emptylist"} <= set(job.errors()) and "space" in job.texts()
    prompt = len(TOKENIZER.encode(dict(rows)["fits_prompt_only"]["prompt"]).ids)
    if prompt < CONTEXT:
        assert job.results()["fits_prompt_only"][1:] == ("length", CONTEXT - prompt)
    else:
        assert "fits_prompt_only" in job.errors()


def test_b27_an_answer_ends_with_the_context(job: Job, tiny: Any) -> None:
    rows = [(key, {**body, "ignore_eos": True}) for key, body in case_lines.requests("B27_exact_limit")]
    assert job.run(rows, tiny[0]) == 3
    room = CONTEXT - len(TOKENIZER.encode(case_lines.PROMPTS[0]).ids)
    assert set(job.errors()) == {"zero", "minus"}
    assert {key: result[1:] for key, result in job.results().items()} == {
        "at": ("length", min(251, room)),
        **dict.fromkeys(("over", "absent", "null"), ("length", room)),
    }


def test_b28_every_cut_of_the_known_text(job: Job, chain: Path) -> None:
    """Inside the emoji's four tokens the text ends in U+FFFD, everywhere else it is the beginning of the known text."""
    assert job.run("B28_every_cut", chain) == 0
    for n in range(1, 19):
        text, reason, count = job.results()[f"n{n}"]
        assert text == shown(PATH[:n]) and count == min(n, len(PATH) + 1)
        assert reason == ("stop" if n > len(PATH) else "length")
        assert text.rstrip("\ufffd") == case_lines.KNOWN_TEXT[: len(text.rstrip("\ufffd"))]
    assert job.run("B28_emoji_in_prompt", chain) == 0
    assert set(job.texts().values()) == {case_lines.KNOWN_TEXT}


def test_b29_text_is_cut_just_before_the_stop(job: Job, chain: Path) -> None:
    known = case_lines.KNOWN_TEXT
    assert job.run("B29_stops", chain) == 0
    for key, body in case_lines.requests("B29_stops"):
        assert job.results()[key][:2] == (known.partition(body["stop"][0])[0], "stop"), body["stop"]
    assert job.run("B29_stop_shapes", chain) == 3
    cut = {"str": "END", "two": "th", "prefix_of": "h"}  # of several the one that is complete first
    whole = dict.fromkeys(("emptylist", "null", "in_prompt"), known)
    assert job.texts() == {**{key: known.partition(stop)[0] for key, stop in cut.items()}, **whole}
    assert {key: error["param"] for key, error in job.errors().items()} == {"emptystr": "stop", "nonstring": "stop"}


@pytest.mark.parametrize("count", ["1", "2", "8"])
def test_b30_a_seed_decides_whatever_the_neighbours(job: Job, tiny: Any, count: str) -> None:
    flags = ("--max-num-seqs", count)
    assert job.run("B30_seed_alone", tiny[0], *flags) == 0
    alone = job.results()["x"]
    for name in ("B30_seed_mixed", "B30_seed_last"):
        assert job.run(name, tiny[0], *flags, "--seed", count) == 0
        results = job.results()
        assert results["x"] == results.get("x2", alone) == alone
        assert len(set(results.values())) >= 4
    assert job.run("B30_seed_odd", tiny[0]) == 3
    assert set(job.texts()) == {"zero"} and all(error["param"] == "seed" for error in job.errors().values())


def test_b31_a_template_that_refuses_costs_its_line_only(job: Job, tmp_path: Path) -> None:
    config = llama_config()
    checkpoint = save_checkpoint(tmp_path / "checkpoint", config, llama_state(config, 31))
    save_tokenizer(checkpoint, chat_template=NO_SYSTEM_TEMPLATE)
    assert job.run("B31_system_role", engine_of(checkpoint)) == 3
    assert set(job.texts()) == {"u", "alt", "u2"} and set(job.errors()) == {"sys", "none"}
    assert job.errors()["sys"]["code"] == "template_refused"
    assert "this template takes no system turn" in job.errors()["sys"]["message"]


def penalized(table: torch.Tensor, prompt: list[int], count: int, repetition: float, frequency: float, presence: float) -> list[int]:
    """On paper: repetition counts prompt and answer, the other two the answer only."""
    out: list[int] = []
    for _ in range(count):
        logits = table[(prompt + out)[-1]].clone()
        for token in {*prompt, *out}:
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        for token in set(out):
            logits[token] -= frequency * out.count(token) + presence
        out.append(int(logits.argmax()))
    return out


def test_b33_penalties_count_what_they_say(job: Job, tmp_path: Path) -> None:
    """A cycle with a close second choice after each token: every penalty leaves it at another place."""
    table = path_logits(PATH)
    table[PATH[-1]] = 0
    table[PATH[-1], PATH[0]] = STRONG
    for index, token in enumerate(PATH):
        table[token, 40 + index] = STRONG - 0.5
    engine = chain_engine(tmp_path, table)
    options = [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (1.0, 0.8, 0.0), (1.0, 0.0, 0.8), (1.0, -0.3, 0.0), (1.1, 0.3, 0.4)]
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    rows = [(str(values), case_lines.request("xx", 40, **dict(zip(names, values)))) for values in options]
    assert job.run(rows, engine) == 0
    prompt = TOKENIZER.encode("xx").ids
    wanted = {str(values): shown(penalized(table, prompt, 40, *values)) for values in options}
    assert job.texts() == wanted and len(set(wanted.values())) >= 4


@pytest.mark.parametrize("blocks", [16, 8])
def test_b36_a_small_pool_changes_no_answer(job: Job, tiny: Any, blocks: int) -> None:
    """A request larger than the pool was admitted and thrown out for ever: it is refused, and all the others are answered."""
    engine = tiny[0]
    assert job.run("B36_pool", engine) == 3
    large = job.results()
    rows = dict(case_lines.requests("B36_pool"))
    sizes = {key: len(TOKENIZER.encode(body["prompt"]).ids) for key, body in rows.items()}
    too_long = {key for key, size in sizes.items() if size >= CONTEXT}
    assert set(job.errors()) == too_long
    pool = blocks * bytes_per_block(load_manifest(engine).model, 16, torch.float32)
    metrics = job.directory / "metrics.json"
    assert job.run("B36_pool", engine, "--kv-cache-memory-bytes", str(pool), "--metrics", str(metrics)) == 3
    never = {key for key, body in rows.items() if min(sizes[key] + body["max_tokens"], CONTEXT) > 16 * blocks} - too_long
    assert job.results() == {key: result for key, result in large.items() if key not in never}
    errors = job.errors()
    assert set(errors) == never | too_long
    assert all(f"the pool has {blocks}" in errors[key]["message"] for key in never)
    engine_metrics = json.loads(metrics.read_text())["engine"]
    assert engine_metrics["kv_blocks"] == blocks and engine_metrics["preemptions"] > 0


@pytest.fixture(scope="module")
def b37_wanted(tiny: Any) -> dict[str, tuple[str, str, int]]:
    """prompt -> what transformers answers; 15 different answers."""
    wanted = {}
    for _, body in case_lines.requests("B37_prefix"):
        ids = TOKENIZER.encode(body["prompt"]).ids
        assert len(ids) == 48
        answer = greedy(tiny[1], ids, 5)
        wanted[body["prompt"]] = shown(answer), "length", len(answer)
    assert len(set(wanted.values())) == 15
    return wanted


@pytest.mark.parametrize("flags", [(), ("--no-enable-prefix-caching",), ("--block-size", "8"), ("--max-num-seqs", "1")])
def test_b37_prompts_one_token_apart_get_their_own_answers(job: Job, tiny: Any, b37_wanted: Any, flags: tuple[str, ...]) -> None:
    """A block key that leaves a token out gives the neighbour's keys and values."""
    metrics = job.directory / "metrics.json"
    rows = case_lines.requests("B37_prefix")
    for order in (rows, rows[::-1], case_lines.requests("B37_prefix_twice")):
        assert job.run(order, tiny[0], *flags, "--metrics", str(metrics)) == 0
        assert job.results() == {key: b37_wanted[body["prompt"]] for key, body in order}
        assert (json.loads(metrics.read_text())["tokens"]["cached"] > 0) == ("--no-enable-prefix-caching" not in flags)


def test_b38_a_cut_output_is_completed_with_the_same_answers(job: Job, tiny: Any) -> None:
    assert job.run("B38_resume", tiny[0]) == 3
    out = job.directory / "out.jsonl"
    whole = out.read_bytes()
    assert set(job.errors()) == {"k2", "k7"}
    rows = whole.split(b"\n")[:-1]
    out.write_bytes(b"".join(row + b"\n" for i, row in enumerate(rows) if i not in (4, 9)))
    assert job.again(tiny[0]) == 3
    assert out.read_bytes() == whole
