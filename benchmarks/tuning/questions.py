"""Writes mini's held-out questions with its own answers, as prompts for `headrace tune` and `headrace evaluate`.

python benchmarks/tuning/questions.py questions.jsonl [--sample N]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # training is no package that is installed

from benchmarks.quality import answers


def main() -> None:
    parser = argparse.ArgumentParser(description="mini's held-out questions, with its answers in f32.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--sample", type=int, default=8, help="questions of each task")
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    lines = [
        json.dumps({"prompt": each.prompt, "completion": each.completion}, ensure_ascii=False)
        for each in answers(options.sample, options.threads)
    ]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{options.out}: {len(lines)} questions")


if __name__ == "__main__":
    main()
