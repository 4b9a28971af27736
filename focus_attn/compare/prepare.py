"""Token files of a comparison's texts, for a machine that has neither the texts nor the network."""

from __future__ import annotations

from pathlib import Path

from focus_attn.compare.data import Texts
from focus_attn.compare.models import load_tokenizer
from focus_attn.compare.recipe import Comparison
from focus_attn.training.token_file import write_tokens


def prepare_tokens(comparison: Comparison, folder: Path) -> None:
    """NAME.train.npy and NAME.test.npy of every dataset, below a folder for each model; prints how to use them."""
    for model_name in comparison.models:
        tokenizer, vocabulary = load_tokenizer(model_name)
        options = []
        for name, dataset in comparison.data.items():
            texts = Texts(dataset, tokenizer, vocabulary)
            for part, store in (("train", texts.train), ("test", texts.test)):
                file = folder / model_name.replace("/", "--") / f"{name}.{part}.npy"
                write_tokens(file, store)
                options.append(f"--text {name}.{part}={file}")
        print(f"focus compare {comparison.name} --model {model_name} {' '.join(options)}")
