"""Writes a GPT-2 of 1.9 million random weights with a 512-word tokenizer.

    python scripts/bench/examples/make_tiny_model.py FOLDER [--seed N]

It answers nonsense, the same nonsense each time: enough to try the harness on a CPU.
"""

import argparse
from pathlib import Path

VOCABULARY = 512


def make(folder: Path, seed: int = 0) -> None:
    """Writes model and tokenizer into `folder`; one seed always gives one model."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=2,
        n_head=4,
        n_embd=256,
        vocab_size=VOCABULARY,
        n_positions=8192,
        bos_token_id=0,
        eos_token_id=0,
        # With GPT-2's own 0.02 the tied head repeats the last token, whatever the
        # other weights are, and a wrong one would not show.
        initializer_range=0.1,
    )
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(folder)
    words = {f"t{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t0", eos_token="t0"
    )
    fast.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.folder, arguments.seed)
