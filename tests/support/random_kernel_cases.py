"""Cases of kernel ops with random shapes."""

import random
from typing import Any

from kernel_cases import MAKERS, Case
from tree_cases import random_tree


def random_cases(op: str, seed: int, count: int) -> list[Case]:
    """Cases of attention or wna16 with random shapes, small enough for an interpreter."""
    rng = random.Random(seed)
    cases = []
    for index in range(count):
        if op == "paged_attention":
            longest = rng.choice([1, 1, 6, 40])
            queries = [rng.randint(1, longest) for _ in range(rng.randint(1, 4))]
            num_kv_heads, group = rng.choice([1, 2]), rng.choice([1, 2, 3, 4, 7, 8])
            shape: dict[str, Any] = {
                "sequences": [(n, n + rng.choice([0, 0, rng.randint(0, 130)])) for n in queries],
                "num_heads": num_kv_heads * group,
                "num_kv_heads": num_kv_heads,
                "head_dim": rng.choice([16, 32, 64, 80, 96, 128]),
                "block_size": rng.choice([8, 16, 32]),
                "window": rng.choice([None, None, rng.randint(1, 90)]),
                "softcap": rng.choice([0.0, 0.0, 2.0]),
                "cache": rng.choice([None, None, "int8", "fp8"]),
            }
            if index % 3 == 0:
                own = random.Random(1000 * seed + index)
                shape["trees"] = [random_tree(own.randint(1, n), own) if n > 1 else None for n in queries]
        else:
            group_size = rng.choice([32, 64, 128])
            shape = {
                "num_tokens": rng.choice([1, 2, 16, 17, rng.randint(1, 130)]),
                "in_features": group_size * rng.randint(1, 3),
                "out_features": 8 * rng.randint(1, 20),
                "bits": rng.choice([4, 8]),
                "symmetric": rng.random() < 0.5,
                "group_size": rng.choice([group_size, -1]),
                "bias": rng.random() < 0.5,
            }
        cases.append(Case(op, f"random_{seed}_{index}", MAKERS[op], shape))
    return cases
