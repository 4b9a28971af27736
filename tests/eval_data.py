"""Small benchmark files as users have them, and a file of text."""

import json

DOGS = "the dog runs over the green hill and sleeps under a tree"


def write_benchmarks(folder, n=12):
    """One file for each benchmark, `n` items each."""
    words = DOGS.split()
    rows = {
        "hellaswag_val": [
            {
                "activity_label": "Walking",
                "ctx_a": f"Dog {i} is on a hill.",
                "ctx_b": "it",
                "endings": [f"{words[(i + j) % len(words)]} number {j}." for j in range(4)],
                "label": str(i % 4),
            }
            for i in range(n)
        ],
        "arc_easy_test": [
            {"question": f"What runs {i}?", "choices": ["a dog", "a big tree", "the hill"][: 2 + i % 2], "gold": i % 2}
            for i in range(n)
        ],
        "piqa_valid": [
            {"goal": f"walk dog {i}", "sol1": "go out", "sol2": "sleep on", "label": i % 2} for i in range(n)
        ],
        "lambada_openai_test": [{"text": f"Number {i}: {DOGS}"} for i in range(n)],
        "truthfulqa_mc": [
            {
                "question": f"Is dog {i} green?",
                "mc1_targets": {"Yes.": 0, f"No, dog {i} is not.": 1, "Perhaps.": 0},
                "mc2_targets": {"No.": 1, "It is not.": 1, "Yes.": 0},
            }
            for i in range(n)
        ],
        "gsm8k_test": [
            {"question": f"What is {i} and {i}?", "answer": f"{i}+{i}={2 * i}\n#### {2 * i}"} for i in range(n)
        ],
    }
    for name, records in rows.items():
        lines = [json.dumps(record) for record in records]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_text(path, sentences=400):
    words = DOGS.split()
    lines = [
        f"{words[i % 12].capitalize()} {i} {words[(i * 5) % 12]} {words[(i * 7) % 12]} the hill."
        for i in range(sentences)
    ]
    path.write_text("\n\n".join(" ".join(lines[i : i + 5]) for i in range(0, sentences, 5)), encoding="utf-8")
    return path
