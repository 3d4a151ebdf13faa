"""The engine from Python, without files: python samples/python_api.py ENGINE [QUESTION ...]

`Engine` is the loop alone: requests in, finished requests out. Exactly once, resume and order are the job's, and belong to
`dspark generate`.
"""

import sys
from pathlib import Path

from dspark.runtime.spec.openmp import bound_spinning

bound_spinning()  # before torch is imported

from dspark import Engine, EngineConfig, Request, SamplingParams  # noqa: E402
from dspark.runtime.jobs.tokenizer import load_codec  # noqa: E402

QUESTIONS = ["Name a river in Africa.", "What is two plus three?", "Finish the sentence: the early bird"]


def answers(engine_dir: Path, questions: list[str]) -> list[str]:
    """One greedy answer to each question; all of them share the engine's batch."""
    codec = load_codec(engine_dir)
    engine = Engine.from_directory(engine_dir, EngineConfig(max_num_seqs=8), codec)
    try:
        for number, question in enumerate(questions):
            prompt = codec.render_chat([{"role": "user", "content": question}], add_generation_prompt=True)
            token_ids = codec.encode(prompt, add_special_tokens=False)
            engine.add(Request(number, token_ids, SamplingParams(max_tokens=32)))
        texts = {output.request_id: output.completions[0].text for output in engine.drain()}
    finally:
        engine.close()
    return [texts[number] for number in range(len(questions))]


if __name__ == "__main__":
    asked = sys.argv[2:] or QUESTIONS
    for question, text in zip(asked, answers(Path(sys.argv[1]), asked), strict=True):
        print(f"{question}\n  {text.strip()}")
