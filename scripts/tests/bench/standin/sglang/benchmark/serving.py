"""The options and the result file of `sglang.benchmark.serving`, as far as used.

Prompts come from a seeded generator with the same structure as the two data sets:
one shared prefix, then each prompt's own tokens.
"""

import argparse
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from urllib import request


def options(argv=None):
    parser = argparse.ArgumentParser()
    for name in ("backend", "base-url", "model", "tokenizer", "dataset-name"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("output-file", "extra-request-body"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("seed", "num-prompts", "max-concurrency", "warmup-requests"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("tokenize-prompt", "cache-report", "output-details", "gsp-ordered"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("input-len", "output-len"):
        parser.add_argument(f"--random-{name}", type=int)
    parser.add_argument("--random-range-ratio", type=float)
    for name in ("num-groups", "prompts-per-group", "system-prompt-len"):
        parser.add_argument(f"--gsp-{name}", type=int, default=0)
    for name in ("question-len", "output-len"):
        parser.add_argument(f"--gsp-{name}", type=int)
    return parser.parse_args(argv)


def cli_main() -> None:
    args = options()
    source = random.Random(args.seed)
    shared = source.choices(range(1, 500), k=args.gsp_system_prompt_len)
    own = args.random_input_len or args.gsp_question_len
    prompts = [
        shared + source.choices(range(1, 500), k=own) for _ in range(args.num_prompts)
    ]
    extra = json.loads(args.extra_request_body)

    def send(ids):
        body = json.dumps({"input_ids": ids, **extra}).encode()
        began = time.perf_counter()
        try:
            with request.urlopen(f"{args.base_url}/generate", body) as answer:
                return json.load(answer), time.perf_counter() - began, ""
        except Exception as error:
            return None, 0.0, f"{type(error).__name__}: {error}"

    began = time.perf_counter()
    with ThreadPoolExecutor(args.max_concurrency) as pool:
        answers = list(pool.map(send, prompts))
    with request.urlopen(f"{args.base_url}/server_info"):
        pass
    metas = [a["meta_info"] if a else {} for a, _, _ in answers]
    result = {
        "request_rate": float("inf"),
        "duration": time.perf_counter() - began,
        "errors": [error for _, _, error in answers],
        "ttfts": [seconds for _, seconds, _ in answers],
        "itls": [[] for _ in answers],
        "input_lens": [m.get("prompt_tokens", len(p)) for m, p in zip(metas, prompts)],
        "output_lens": [m.get("completion_tokens", 0) for m in metas],
        "cached_tokens": [m.get("cached_tokens", 0) for m in metas],
        "generated_texts": [a["text"] if a else "" for a, _, _ in answers],
    }
    with open(args.output_file, "a") as file:
        file.write(json.dumps(result) + "\n")
